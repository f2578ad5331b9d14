"""How tests are chosen and sorted. The process that only hands tests out to others imports neither torch nor `tests.fixtures`.

Tests start hundreds of processes. Without cached bytecode, each of them would compile hundreds of modules again, so
PYTHONDONTWRITEBYTECODE is ignored here.
"""

import gc
import os
import signal
import sys
from importlib import import_module

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

from tests.support import durations

sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Some tests start processes while gRPC threads of other tests run here. gRPC's fork handler may abort a forked child
# before it calls exec (5 of 200, measured). None of our processes forks while it uses gRPC.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

# A suite in the background of a shell ignores Ctrl-C, and so would the commands that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Load on the machine may delay code, so examples have no deadline.
settings.register_profile("search", deadline=None)
settings.register_profile("same examples", deadline=None, derandomize=True, database=None)

# Values of the parameters of crossed and paired tests, in order of their appearance. A callspec's own indices count combinations.
CROSSED = pytest.StashKey[dict[tuple[str, str], list[object]]]()
LEFT_OUT = pytest.StashKey[bool]()  # of a combination that no suite runs


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flags about durations."""
    durations.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Register the fixtures where tests run. Search for new examples in `make test-all`.

    `make test` and CI take the same ones each time, so a failure is a change's.
    """
    durations.register(config)
    only_hands_out = config.getoption("dist", "no") != "no" and not config.option.collectonly
    if hasattr(config, "workerinput") or not only_hands_out:
        config.pluginmanager.register(import_module("tests.fixtures"))
    config.addinivalue_line(
        "markers", "paired(names, of): of all combinations of these parameters, run one in `of`, by turns"
    )
    settings.load_profile("same examples" if _is_fast(config) else "search")
    if _is_fast(config):
        # Hypothesis also tries constants of all imported modules. Then examples depend on the selected tests, and reading hundreds
        # of modules takes each worker two seconds.
        providers._get_local_constants = lambda: providers._local_constants


def _is_fast(config: pytest.Config) -> bool:
    return "not slow" in config.option.markexpr


def pytest_itemcollected(item: pytest.Item) -> None:
    """Leave most combinations of a crossed test's parameters to `make test-all`, and some of a paired test's to no suite."""
    for mark in item.iter_markers("crossed"):
        if _turn(item, mark) % mark.kwargs["every"]:
            item.add_marker(pytest.mark.slow)
    for mark in item.iter_markers("paired"):
        if _turn(item, mark) % mark.kwargs["of"]:
            item.stash[LEFT_OUT] = True


def _turn(item: pytest.Item, mark: pytest.Mark) -> int:
    """Return the sum of the places of an item's parameters, each among the values of its test."""
    places = []
    for name in mark.args:
        values = item.config.stash.setdefault(CROSSED, {}).setdefault((item.nodeid.split("[")[0], name), [])
        value = item.callspec.params[name]  # type: ignore[attr-defined]
        if not any(value is each for each in values):
            values.append(value)
        places.append(next(place for place, each in enumerate(values) if each is value))
    return sum(places)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drop the combinations of paired tests that no suite runs. In `make test`, take fewer examples.

    If several processes run tests, start the long files first, so that none of them is left for one process at the end.
    """
    if _is_fast(config):
        _take_fewer_examples(items)
    if left_out := [item for item in items if LEFT_OUT in item.stash]:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if LEFT_OUT not in item.stash]
    if hasattr(config, "workerinput"):
        durations.put_long_files_first(items, durations.read_durations())


def _take_fewer_examples(items: list[pytest.Item]) -> None:
    """Take a third of the examples of each property, at least ten. They are the same each time, and `make test-all` searches."""
    functions = {getattr(each, "function", None) for each in items}
    state_machines = {getattr(each, "cls", None) for each in items}
    for holder, name in (
        *((each, "_hypothesis_internal_use_settings") for each in functions),
        *((each, "settings") for each in state_machines),
    ):
        given = getattr(holder, name, None)
        if isinstance(given, settings):
            setattr(holder, name, settings(given, max_examples=max(10, given.max_examples // 3)))


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Collect no garbage while modules are imported and tests are collected: almost all of that stays."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Exclude what was imported and collected from garbage collections. A full one would take seconds, so none precedes this."""
    gc.freeze()
    gc.enable()
