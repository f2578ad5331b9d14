# `make serve` and `make test` set up everything they need on a machine with Python 3.11 and pip.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.runtime
DEVELOP := $(VENV)/.develop

.PHONY: serve test test-all lint bench-serve proto clean

serve: $(RUNTIME)
	@$(BIN)/wideep serve $(ARGS)

test: $(DEVELOP)
	$(BIN)/python -m pytest -m "not slow and not gpu" $(ARGS)

test-all: $(DEVELOP)
	$(BIN)/python -m pytest -m "not gpu" $(ARGS)

lint: $(DEVELOP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench-serve: $(DEVELOP)
	$(BIN)/python -m benchmarks.serve $(ARGS)

proto: $(DEVELOP)
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --grpc_python_out=. server/ranks.proto

clean:
	rm -rf $(VENV)

$(VENV)/bin/pip:
	@command -v $(PYTHON) >/dev/null || { echo "WideEP needs $(PYTHON) (set PYTHON=... to use another one, 3.11 or later)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(RUNTIME): requirements-cpu.txt pyproject.toml | $(VENV)/bin/pip
	@echo "Installing WideEP into $(VENV) (once, a few minutes)"
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements-cpu.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

$(DEVELOP): requirements-dev.txt $(RUNTIME)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@
