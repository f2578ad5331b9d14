"""When a rank posts a version of the weights, what it drops, and what it serves before it meets the others."""

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from moe.load.checkpoint import CheckpointError
from scheduler.weights.updates import Loaded, NoRoomError, RankWeights, WeightParts
from scheduler.weights.versions import (
    WeightAction,
    WeightDigests,
    WeightOrder,
    WeightReport,
    WeightState,
    WeightVersion,
)

WAIT_S = 20.0
SUMS_LE = np.array([[7, 0]], np.uint64)


class FakeModel:
    def __init__(self, number: int, freed: list[int]) -> None:
        self.number, self._freed = number, freed

    def dismantle(self) -> None:
        self._freed.append(self.number)


class Rank:
    """Updates over parts that record their calls. Loading waits for `may_load`."""

    def __init__(self) -> None:
        self.freed: list[int] = []
        self.installed: list[int] = []
        self.reports: list[WeightReport] = []
        self.begun: list[int] = []
        self.may_load = threading.Event()
        self.may_load.set()
        self.error: Exception | None = None
        self.held = [[0, 1]]
        self.plain = "p"
        parts = WeightParts(self._load, self._install, lambda: [[0, 1]], self._check)
        self.updates = RankWeights(3, parts)
        self.updates.on_report = self.reports.append
        self.updates.on_installed = lambda version: self.begun.append(version.number)

    def _load(self, version: WeightVersion, look: Callable[[], None]) -> Loaded:
        while not self.may_load.wait(0.001):
            look()
        if self.error is not None:
            raise self.error
        return Loaded(
            FakeModel(version.number, self.freed), self.held, WeightDigests(self.plain, SUMS_LE), 100
        )

    def _install(self, loaded: Loaded, digests: WeightDigests | None) -> Callable[[], None]:
        self.installed.append(loaded.model.number)
        return lambda: self.freed.append(-loaded.model.number)

    def _check(self) -> WeightDigests:
        return WeightDigests("now", SUMS_LE)

    def order(self, action: WeightAction, number: int, **how: object) -> None:
        self.updates.order(WeightOrder(action=action, version=WeightVersion(number), **how))  # type: ignore[arg-type]

    def stage(self, number: int) -> None:
        self.order(WeightAction.STAGE, number)

    def serve(self, number: int) -> None:
        self.order(WeightAction.SERVE, number)

    def rest(self) -> None:
        """Wait until nothing is loaded any more."""
        until = threading.Event()
        for _ in range(int(WAIT_S / 0.005)):
            if self.updates._worker is None:
                return
            until.wait(0.005)
        raise AssertionError("the thread does not end")

    @property
    def plain_sums(self) -> list[str]:
        return [each.digests.plain for each in self.reports if each.digests is not None]

    @property
    def states(self) -> list[tuple[int, WeightState]]:
        return [(each.number, each.state) for each in self.reports]


def test_a_version_is_posted_once_it_is_loaded_and_ordered_to_serve() -> None:
    rank = Rank()
    rank.stage(1)
    rank.rest()
    assert rank.updates.number_to_post() == 0 and not rank.updates.has_news
    rank.serve(1)
    assert rank.updates.has_news and rank.updates.number_to_post() == 1
    rank.updates.switch(1, step=40)
    rank.rest()
    assert (rank.installed, rank.begun, rank.freed) == ([1], [1], [-1])
    assert rank.states == [(1, WeightState.STAGED), (1, WeightState.SERVING)]
    assert rank.plain_sums[0] == "p" and rank.reports[0].rank == 3 and rank.reports[1].step == 40
    assert rank.updates.number_to_post() == 1 and not rank.updates.has_news
    rank.serve(1)
    assert rank.states[2:] == [(1, WeightState.SERVING)], "a repeated order is confirmed"


def test_a_version_that_was_not_staged_is_loaded_when_it_must_serve() -> None:
    rank = Rank()
    rank.serve(4)
    rank.rest()
    assert rank.updates.number_to_post() == 4 and rank.states == [(4, WeightState.STAGED)]


def test_a_posted_version_is_not_freed_before_another_is_posted() -> None:
    rank = Rank()
    rank.serve(1)
    rank.rest()
    assert rank.updates.number_to_post() == 1
    posted = rank.updates.posted
    assert (posted.version.number, posted.loaded.model.number) == (1, 1)
    rank.serve(2)
    rank.rest()
    assert rank.freed == [] and rank.updates.posted is posted, "a step may run its model"
    assert rank.updates.number_to_post() == 2
    rank.rest()
    assert rank.freed == [1] and rank.updates.posted.version.number == 2
    rank.updates.switch(2, step=7)
    rank.rest()
    assert rank.freed == [1, -2]
    assert rank.updates.number_to_post() == 2
    with pytest.raises(AssertionError, match="the serving version was posted"):
        _ = rank.updates.posted


def test_a_posted_version_is_freed_when_an_epoch_serves_another() -> None:
    rank = Rank()
    rank.serve(1)
    rank.rest()
    rank.updates.number_to_post()
    rank.serve(2)
    assert rank.updates.settle(2) == [[0, 1]]
    rank.rest()
    assert sorted(rank.freed) == [-2, 1]


def test_a_dropped_version_is_freed_and_one_that_must_serve_is_not_dropped() -> None:
    rank = Rank()
    rank.stage(1)
    rank.rest()
    rank.order(WeightAction.DROP, 1)
    rank.rest()
    assert rank.freed == [1] and rank.updates.number_to_post() == 0
    rank.stage(2)
    rank.rest()
    rank.serve(2)
    rank.order(WeightAction.DROP, 2)
    rank.updates.forget_staged()
    rank.stage(3)
    assert rank.updates.number_to_post() == 2


def test_a_newer_version_ends_the_loading_of_an_older_one() -> None:
    rank = Rank()
    rank.may_load.clear()
    rank.stage(1)
    rank.stage(2)
    rank.may_load.set()
    rank.rest()
    assert rank.states == [(2, WeightState.STAGED)]


def test_without_the_front_that_staged_it_a_version_is_dropped() -> None:
    rank = Rank()
    rank.stage(1)
    rank.rest()
    rank.updates.forget_staged()
    rank.rest()
    assert rank.freed == [1]


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (CheckpointError("missing: a"), WeightState.REFUSED),
        (OSError("no such file"), WeightState.REFUSED),
        (NoRoomError("too large"), WeightState.NO_ROOM),
        (torch.OutOfMemoryError("CUDA out of memory"), WeightState.NO_ROOM),
        (RuntimeError("odd"), WeightState.FAILED),
    ],
)
def test_a_failure_is_reported_and_a_later_version_can_serve(error: Exception, state: WeightState) -> None:
    rank = Rank()
    rank.error = error
    rank.stage(1)
    rank.rest()
    assert rank.states == [(1, state)] and str(error) in rank.reports[0].reason
    rank.error = None
    rank.serve(2)
    rank.rest()
    assert rank.updates.number_to_post() == 2


@pytest.mark.parametrize(
    ("plain", "experts", "named"),
    [("q", [[7, 8]], "weights outside the experts differ"), ("p", [[6, 8]], "1 experts differ")],
)
def test_weights_that_differ_from_those_of_other_ranks_do_not_serve(
    plain: str, experts: list[list[int]], named: str
) -> None:
    rank = Rank()
    rank.order(WeightAction.SERVE, 1, digests=WeightDigests(plain, np.array(experts, np.uint64)))
    rank.rest()
    assert rank.states == [(1, WeightState.REFUSED)] and named in rank.reports[0].reason
    assert rank.freed == [1] and rank.updates.number_to_post() == 0
    same = Rank()
    same.order(WeightAction.SERVE, 1, digests=WeightDigests("p", np.array([[7, 8]], np.uint64)))
    same.rest()
    assert same.states == [(1, WeightState.STAGED)]


def test_a_rank_serves_the_version_of_an_epoch_before_it_meets_the_others() -> None:
    rank = Rank()
    assert rank.updates.settle(0) is None
    rank.may_load.clear()
    rank.serve(1)
    threading.Timer(0.05, rank.may_load.set).start()
    assert rank.updates.settle(1) == [[0, 1]]
    assert rank.installed == [1] and rank.updates.serving.number == 1
    assert rank.updates.settle(1) is None
    with pytest.raises(CheckpointError, match="version 5 of the weights, which this rank does not know"):
        rank.updates.settle(5)
    rank.error = CheckpointError("missing")
    rank.serve(2)
    rank.rest()
    with pytest.raises(CheckpointError, match="could not be loaded"):
        rank.updates.settle(2)


def test_the_serving_weights_are_checked_on_request() -> None:
    rank = Rank()
    rank.order(WeightAction.CHECK, 0)
    rank.rest()
    assert rank.states == [(0, WeightState.CHECKED)] and rank.plain_sums == ["now"]


def test_another_label_of_the_serving_version_drops_nothing() -> None:
    rank = Rank()
    rank.stage(1)
    rank.rest()
    rank.serve(0)
    assert rank.freed == [] and rank.states[-1] == (0, WeightState.SERVING)


def test_a_rank_that_cannot_change_its_weights_says_so() -> None:
    updates, reports = RankWeights(), list[WeightReport]()
    updates.on_report = reports.append
    updates.order(WeightOrder(action=WeightAction.STAGE, version=WeightVersion(1)))
    worker = updates._worker
    if worker is not None:
        worker.join(WAIT_S)
    assert [each.state for each in reports] == [WeightState.FAILED]
    updates.close()
