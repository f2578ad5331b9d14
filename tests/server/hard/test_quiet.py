"""Bad latency fails a test only if the machine was quiet, and skips it if other processes were always busy."""

import re

import pytest

from tests.support.service import quiet
from tests.support.service.quiet import Measured, expect_good


def watch_that_finds(monkeypatch: pytest.MonkeyPatch, cores: list[float]) -> None:
    """Let the tries find these cores of other processes, one after the other."""

    class Watch:
        def __init__(self, _root: int) -> None: ...

        def __enter__(self) -> "Watch":
            return self

        def __exit__(self, *_: object) -> None:
            self.other_cores = cores.pop(0)

    monkeypatch.setattr(quiet, "CpuWatch", Watch)
    monkeypatch.delenv("PYTEST_XDIST_WORKER_COUNT", raising=False)


def bad(number: int) -> Measured:
    return Measured(False, f"try {number}")


@pytest.mark.parametrize("cores", [[0.1, 0.5], [2.0, 0.1, 1.5, 0.0], [2.0, 0.1, 2.0, 2.0, 2.0, 2.0]])
def test_bad_results_of_quiet_tries_fail(cores: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    left = list(cores)
    watch_that_finds(monkeypatch, left)
    with pytest.raises(AssertionError, match=re.escape(f"try 0 (other processes used {cores[0]:.2f} cores)")):
        expect_good(bad, quiet_tries=2)
    assert not left


def test_a_machine_that_is_never_quiet_skips_with_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    watch_that_finds(monkeypatch, [1.25] * quiet.MAX_TRIES)
    with pytest.raises(pytest.skip.Exception, match=r"more than 0.5 cores in all tries: try 0 .*1\.25 cores"):
        expect_good(bad, quiet_tries=1)


def test_there_are_fewer_tries_beside_other_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    watch_that_finds(monkeypatch, [1.25] * quiet.MAX_TRIES_BESIDE_WORKERS)
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "3")
    with pytest.raises(pytest.skip.Exception, match=r"try 0 .*try 1"):
        expect_good(bad, quiet_tries=1)


def test_one_good_try_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [2.0, 0.1, 2.0]
    watch_that_finds(monkeypatch, left)
    expect_good(lambda number: Measured(number == 2, f"try {number}"), quiet_tries=2)
    assert not left
