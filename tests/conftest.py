"""Fixtures shared by tests of several packages. Rank pools are spawned once per session and size.

Tests start hundreds of processes. Without cached bytecode, each of them would compile hundreds of modules again, so
PYTHONDONTWRITEBYTECODE is ignored here.
"""

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis.internal.conjecture import providers

from tests.support import durations
from tests.support.gpu.interpreted import NO_TRITON, interpret
from tests.support.ranks import RankPool

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

PoolOf = Callable[[int], RankPool]
OnDevice = Callable[..., Any]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flags about durations."""
    durations.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Search for new examples in `make test-all`. `make test` and CI take the same ones each time, so a failure is a change's."""
    durations.register(config)
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


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests of a GPU on a machine without one."""
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[int, RankPool]]:
    """Return the running pools by size."""
    running: dict[int, RankPool] = {}
    yield running
    for pool in running.values():
        pool.close()


@pytest.fixture
def pool_of(pools: dict[int, RankPool]) -> Iterator[PoolOf]:
    """Return `pool_of(world_size)`: a running pool, replaced if an earlier test broke it."""
    used: dict[int, RankPool] = {}

    def pool_of_size(world_size: int) -> RankPool:
        pool = pools.get(world_size)
        if pool is None or not pool.is_whole:
            pools[world_size] = pool = RankPool(world_size, timeout_s=120.0)
        used[world_size] = pool
        return pool

    yield pool_of_size
    for pool in used.values():
        pool.end_groups()


@pytest.fixture(scope="session")
def interpreter() -> Iterator[RankPool]:
    """Return a process that interprets Triton's kernels: this is chosen before any import of triton."""
    if find_spec("triton") is None:
        pytest.skip(NO_TRITON)
    with RankPool(1, timeout_s=300.0) as pool:  # interpreted kernels are slow, more so on a busy machine
        pool.run(interpret)
        yield pool


@pytest.fixture(scope="session")
def interpreting_pair() -> Iterator[RankPool]:
    """Return two separate ranks with interpreted kernels."""
    with RankPool(2, timeout_s=120.0) as pool:
        pool.run(interpret)
        yield pool


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def on_device(request: pytest.FixtureRequest) -> OnDevice:
    """Return `on_device(function, *args)`, which calls `function(device, *args)`: on the CPU in Triton's interpreter in a
    separate process, on a GPU in this one."""
    device: str = request.param
    pool: RankPool | None = request.getfixturevalue("interpreter") if device == "cpu" else None

    def call(function: Callable[..., Any], *args: Any) -> Any:
        return pool.run(function, device, *args)[0] if pool else function(device, *args)

    return call
