"""Rejected calls of node-limited dispatch, and its errors when ranks disagree or leave: the same on all ranks."""

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from dispatch.errors import DispatchError, PeerLost
from dispatch.hierarchical import HierarchicalDispatcher, open_hierarchical
from dispatch.wires.local import LocalWire
from tests.dispatch.exchange import catch
from tests.dispatch.hierarchical_cases import S, open_here
from tests.fixtures import PoolOf


class Seen(NamedTuple):
    """A rank's view of a call that some ranks rejected, and whether the next call worked."""

    error: str
    text: str
    rank: int | None
    works_on: bool


def attempt(dispatcher: HierarchicalDispatcher, breaking: dict[int, dict[str, Any]]) -> Seen:
    """Dispatch and combine with this rank's bad arguments, then again with good ones."""
    rank, R = dispatcher.rank, dispatcher.world_size
    good = {"x": torch.full((2, 4), float(rank)), "slots": torch.arange(R * S).expand(2, -1)}
    good["weights"] = torch.ones(2, R * S)
    bad = good | breaking.get(rank, {})
    error: Exception | None = None
    try:
        sent = dispatcher.dispatch(bad["x"], bad["slots"])
        y_PH = bad.get("y", sent.x_NH[sent.row_P])
        dispatcher.combine(y_PH, bad["weights"], sent)
    except (ValueError, DispatchError) as caught:
        error = caught
    sent = dispatcher.dispatch(good["x"], good["slots"])
    combined = dispatcher.combine(sent.x_NH[sent.row_P], good["weights"], sent)
    works_on = torch.equal(combined, good["x"] * R * S)
    return Seen(type(error).__name__, str(error), getattr(error, "rank", None), works_on)


def attempt_all(name: str, node_size: int, cases: list[dict[int, dict[str, Any]]]) -> list[Seen]:
    dispatcher = open_here(name, node_size)
    seen = [attempt(dispatcher, case) for case in cases]
    dispatcher.close()
    return seen


BAD_ONE = {
    "slots_TK[0, 1] is 99": {"slots": torch.tensor([[0, 99], [0, 1]])},
    "x_TH is torch.int32": {"x": torch.zeros(2, 4, dtype=torch.int32)},
    "slots_TK has 3 tokens": {"slots": torch.zeros(3, 12, dtype=torch.int64)},
    "H is 0": {"x": torch.zeros(2, 0)},
    "y_PH is torch.float32 [1, 4]": {"y": torch.zeros(1, 4)},
    "weights_TK is torch.float32 [1, 12]": {"weights": torch.zeros(1, 12)},
}


@pytest.mark.parametrize("name", ["auto", "gloo"])
def test_bad_arguments_of_one_rank_are_an_error_on_all_and_the_next_call_works(
    pool_of: PoolOf, name: str
) -> None:
    """Rank 1 of 2 x 2: rank 2 shares no wire with it."""
    seen = pool_of(4).run(attempt_all, name, 2, [{1: bad} for bad in BAD_ONE.values()])
    for rank in range(4):
        for text, outcome in zip(BAD_ONE, seen[rank], strict=True):
            assert outcome.error == ("ValueError" if rank == 1 else "PeerRefused"), outcome
            assert text in outcome.text and outcome.works_on
            assert rank == 1 or (outcome.rank == 1 and "rank 1 refused the call" in outcome.text)


def test_several_ranks_may_refuse_at_once(pool_of: PoolOf) -> None:
    bad = {"slots": torch.tensor([[-5], [0]])}
    seen = pool_of(4).run(
        attempt_all, "auto", 2, [{0: bad, 3: bad}, {1: bad, 2: bad}, dict.fromkeys(range(4), bad)]
    )
    for index, refusing in enumerate([{0, 3}, {1, 2}, {0, 1, 2, 3}]):
        for rank in range(4):
            outcome = seen[rank][index]
            assert outcome.works_on and "slots_TK[0, 0] is -5" in outcome.text
            assert outcome.error == ("ValueError" if rank in refusing else "PeerRefused")
            assert outcome.rank is None or outcome.rank in refusing


def test_ranks_that_disagree_on_sizes_all_say_so(pool_of: PoolOf) -> None:
    """On one rank (detected by its rail), and on whole rails (detected only by the nodes)."""
    wider = {"x": torch.zeros(2, 8), "y": torch.zeros(1)}
    half = {"x": torch.zeros(2, 4, dtype=torch.float16)}
    seen = pool_of(4).run(attempt_all, "auto", 2, [{3: wider}, {1: wider, 3: wider}, {0: half}])
    for rank in range(4):
        for outcome in seen[rank]:
            assert outcome.error in ("RanksDisagree", "PeerRefused"), outcome
            assert "made another call than rank" in outcome.text and outcome.works_on


def test_an_older_dispatch_is_refused_by_all(pool_of: PoolOf) -> None:
    assert (
        pool_of(4).run(combine_the_older)
        == [("PeerRefused", True), ("ValueError", True)] + [("PeerRefused", True)] * 2
    )


def combine_the_older() -> tuple[str, bool]:
    dispatcher = open_here("auto", 2)
    x_TH, slots_TK = torch.ones(2, 4), torch.zeros(2, 1, dtype=torch.int64)
    older = dispatcher.dispatch(x_TH, slots_TK)
    newer = dispatcher.dispatch(x_TH, slots_TK)
    error = ""
    try:
        dispatcher.combine(
            newer.x_NH[newer.row_P], torch.ones(2, 1), older if dispatcher.rank == 1 else newer
        )
    except ValueError as caught:
        error = type(caught).__name__
    again = dispatcher.combine(newer.x_NH[newer.row_P], torch.ones(2, 1), newer)  # valid data stays valid
    dispatcher.close()
    return error, torch.equal(again, x_TH)


def leave_early(name: str) -> str:
    """Close rank 3 while the others dispatch. Rank 0 shares no wire with it."""
    dispatcher = open_here(name, 2)
    if dispatcher.rank == 3:
        dispatcher.close()
        return "closed"
    said = catch(lambda: dispatcher.dispatch(torch.ones(1, 4), torch.tensor([[0]])))
    dispatcher.close()
    return said.partition(":")[0]


@pytest.mark.parametrize("name", ["auto", "gloo"])
def test_a_rank_that_leaves_is_an_error_everywhere_at_once(pool_of: PoolOf, name: str) -> None:
    answers = pool_of(4).run(leave_early, name, timeout_s=15.0)  # below the 20 s timeout of the ranks
    assert answers == ["PeerLost"] * 3 + ["closed"]


def give_up_a_rank() -> str:
    """Let rank 0 wait for rank 2, and then exclude rank 3, with which it shares no wire."""
    dispatcher, said = open_here("shm", 2), ""
    if dispatcher.rank == 0:
        dispatcher.interrupt(PeerLost(3, "the front has given it up"))
        said = catch(lambda: dispatcher.dispatch(torch.ones(1, 4), torch.tensor([[0]])))
    dist.barrier()
    dispatcher.close()
    return said


def test_an_interruption_ends_a_wait_with_the_rank_that_it_names(pool_of: PoolOf) -> None:
    answers = pool_of(4).run(give_up_a_rank)
    assert answers == ["PeerLost: rank 3 is lost: the front has given it up", "", "", ""]


def open_with(node_size: int, slots: int) -> str:
    return catch(
        lambda: open_hierarchical("auto", dist.group.WORLD, node_size=node_size, slots_per_rank=slots)
    )


def open_unequal() -> str:
    return open_with(1 if dist.get_rank() == 0 else 2, S)


def test_a_bad_node_size_is_refused_on_every_rank(pool_of: PoolOf) -> None:
    pool = pool_of(4)
    for bad in (0, 3, 8):
        wanted = f"ValueError: node_size is {bad} for 4 ranks; it must be one of [1, 2, 4]"
        assert pool.run(open_with, bad, S) == [wanted] * 4
    assert all("rank 1 has the settings" in text for text in pool.run(open_unequal))


def test_slots_per_rank_must_be_positive() -> None:
    with pytest.raises(ValueError, match="slots_per_rank is 0"):
        HierarchicalDispatcher(LocalWire(), LocalWire(), slots_per_rank=0)
