# `make serve` and `make test` set up everything they need on a machine with Python 3.11 and pip.
PYTHON ?= python3.11
# Processes that run tests side by side, a test's file in one of them; 0 runs all in one. One more than cores, since tests wait.
TEST_WORKERS ?= $(shell cores=$$(nproc); echo $$((cores < 8 ? cores + 1 : 8)))
SIDE_BY_SIDE := -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder
VENV := .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.runtime
DEVELOP := $(VENV)/.develop
CLIENTS_VENV := .venv-clients
CLIENTS := $(CLIENTS_VENV)/.installed
LOWEST_VENV := .venv-lowest
LOWEST := $(LOWEST_VENV)/.installed
NEWEST_VENV := .venv-newest
# What other versions of the dependencies may break: the service's parts that call them, loading, parity of all families that
# `make test` covers, drafts, the demo model, and one whole service.
VERSION_TESTS := tests/house tests/server/link tests/server/http tests/server/options tests/scheduler tests/moe/load \
  tests/moe/test_parity.py tests/moe/test_families.py tests/moe/test_text_part.py tests/moe/test_mtp.py tests/moe/test_survey.py \
  tests/moe/demo_model tests/server/machine/test_versions.py tests/server/test_service.py
QUICK_TESTS := tests/house tests/server/options tests/server/http tests/server/api tests/server/test_cli.py tests/scheduler/policy \
	tests/expert_placement tests/kvcache
NPM := tests/clients/npm
PURELIB := 'import sysconfig; print(sysconfig.get_path("purelib"))'

.PHONY: serve test test-quick test-all test-clients test-lowest test-newest lint sizes bench-serve bench-peers clean

# In a terminal's foreground (+) the service is a job of its own (set -m): Ctrl-C reaches it and not make, so that make ends as
# the service does. Nobody could continue it after a Ctrl-Z.
serve: $(RUNTIME)
	@case "$$(ps -o stat= -p $$$$ 2>/dev/null)" in *+*) set -m; trap '' TSTP;; esac; $(BIN)/wideep serve $(ARGS); exit $$?

test: $(DEVELOP)
	$(BIN)/python -m pytest -m "not slow and not gpu" $(SIDE_BY_SIDE) $(ARGS)

# No models, no processes: what most edits of the service and of the policy need.
test-quick: $(DEVELOP)
	$(BIN)/python -m pytest -m "not slow and not gpu" $(SIDE_BY_SIDE) $(QUICK_TESTS) $(ARGS)

test-all: $(DEVELOP)
	$(BIN)/python -m pytest -m "not gpu" $(SIDE_BY_SIDE) $(ARGS)

test-clients: $(CLIENTS)
	$(CLIENTS_VENV)/bin/python -m pytest tests/clients $(ARGS)

# The lowest versions that pyproject.toml allows, but for torch, in an environment of their own. Some ten minutes on two cores.
test-lowest: $(LOWEST)
	$(LOWEST_VENV)/bin/python -m pytest -m "not slow and not gpu" $(SIDE_BY_SIDE) $(VERSION_TESTS) $(ARGS)

# The same tests with the newest release of every dependency that pyproject.toml allows, but for torch: looked up each time.
test-newest: $(DEVELOP) | $(NEWEST_VENV)/bin/pip
	$(BIN)/python -m tests.house.allowed_versions newest > $(NEWEST_VENV)/requirements.txt
	$(NEWEST_VENV)/bin/pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager -r $(NEWEST_VENV)/requirements.txt
	$(NEWEST_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps --editable .
	$(NEWEST_VENV)/bin/python -m pytest -m "not slow and not gpu" $(SIDE_BY_SIDE) $(VERSION_TESTS) $(ARGS)

lint: $(DEVELOP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

sizes:
	@$(PYTHON) -m tests.house.sizes

bench-serve: $(DEVELOP)
	$(BIN)/python -m benchmarks.serve $(ARGS)

# vLLM, llama.cpp and transformers beside us; installs them once, outside of this checkout ($$WIDEEP_PEERS or the cache folder).
bench-peers: $(DEVELOP)
	$(BIN)/python -m benchmarks.peers $(ARGS)

clean:
	rm -rf $(VENV) $(CLIENTS_VENV) $(LOWEST_VENV) $(NEWEST_VENV) $(NPM)/node_modules

$(VENV)/bin/pip:
	@command -v $(PYTHON) >/dev/null || { echo "WideEP needs $(PYTHON) (set PYTHON=... to use another one, 3.11 or later)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(NEWEST_VENV)/bin/pip:
	$(PYTHON) -m venv $(NEWEST_VENV)

$(RUNTIME): requirements-cpu.txt pyproject.toml | $(VENV)/bin/pip
	@echo "Installing WideEP into $(VENV) (once, a few minutes)"
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements-cpu.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

$(DEVELOP): requirements-dev.txt $(RUNTIME)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@

# Clients pin other versions of packages that we use, so they get an environment of their own, with ours behind it.
$(CLIENTS): requirements-clients.txt $(NPM)/package.json $(DEVELOP)
	$(PYTHON) -m venv $(CLIENTS_VENV)
	$(BIN)/python -c $(PURELIB) > "$$($(CLIENTS_VENV)/bin/python -c $(PURELIB))/wideep.pth"
	$(CLIENTS_VENV)/bin/pip install --quiet --disable-pip-version-check -r requirements-clients.txt
	@if command -v npm >/dev/null; then npm install --prefix $(NPM) --no-package-lock --no-audit --no-fund --silent; \
	else echo "npm is not here: the test of the npm package will be skipped"; fi
	@touch $@

$(LOWEST): requirements-cpu.txt requirements-dev.txt pyproject.toml | $(DEVELOP)
	$(PYTHON) -m venv $(LOWEST_VENV)
	$(BIN)/python -m tests.house.allowed_versions lowest > $(LOWEST_VENV)/requirements.txt
	$(LOWEST_VENV)/bin/pip install --quiet --disable-pip-version-check -r $(LOWEST_VENV)/requirements.txt
	$(LOWEST_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@
