"""Work beside an exchange is done before a peer is waited for, however tokens go; a rank that refuses does none."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from dispatch.dispatched import Dispatched
from dispatch.dispatcher import Dispatcher
from dispatch.errors import PeerRefused
from dispatch.hierarchical.groups import open_hierarchical
from dispatch.meanwhile import Meanwhile, nothing
from dispatch.mode import NORMAL, Mode, low_latency
from dispatch.wires.choose import open_wire
from dispatch.wires.local import LocalWire
from tests.conftest import PoolOf
from tests.dispatch.gpu.ranks import interpret, open_wide
from tests.support.ranks import RankPool

S = 3


def combine(dispatcher: Any, x_TH: torch.Tensor, sent: Dispatched, meanwhile: Meanwhile) -> torch.Tensor:
    """Answer every pair with its row."""
    num_pairs = int(sent.slot_offsets[-1])
    y_PH = torch.ones(sent.handle.num_pairs, x_TH.shape[1])
    y_PH[:num_pairs] = sent.x_NH[sent.row_P[:num_pairs]]
    combined: torch.Tensor = dispatcher.combine(y_PH, torch.ones(2, 2), sent, meanwhile=meanwhile)
    return combined


def late_peer(dispatcher: Any, name: str, mode: Mode) -> torch.Tensor:
    """Rank 1 comes to each call only when rank 0 has worked beside its own; returns what the layer gives.

    A first call of a size may wait for all ranks, to make room; so nobody is late for that.
    """
    store, rank = _get_default_store(), dist.get_rank()
    x_TH, slots_TK = torch.full((2, 8), rank + 1.0), torch.tensor([[0, S], [S + 1, -1]])
    calls = [f"{name} {call}" for call in ("dispatch", "combine")]

    combine(dispatcher, x_TH, dispatcher.dispatch(x_TH, slots_TK, mode), nothing)

    def tell(call: str) -> None:
        if rank == 0:
            store.set(call, "worked")

    def follow(call: str) -> None:
        if rank == 1:
            store.wait([call])

    follow(calls[0])
    sent = dispatcher.dispatch(x_TH, slots_TK, mode, meanwhile=lambda: tell(calls[0]))
    follow(calls[1])
    return combine(dispatcher, x_TH, sent, lambda: tell(calls[1]))


def check(answers: list[torch.Tensor]) -> None:
    for rank, combined in enumerate(answers):
        want = torch.tensor([[2.0], [1.0]]).expand(2, 8) * (rank + 1)
        assert torch.equal(combined, want), f"rank {rank}"


def meet_late(name: str) -> torch.Tensor:
    wire = open_wire(name, dist.group.WORLD, timeout_s=20.0)
    dispatcher = Dispatcher(wire, slots_per_rank=S)
    combined = late_peer(dispatcher, name, NORMAL)
    dispatcher.close()
    return combined


@pytest.mark.parametrize("name", ["gloo", "shm"])
def test_work_beside_is_done_while_a_peer_is_late(pool_of: PoolOf, name: str) -> None:
    check(pool_of(2).run(meet_late, name))


def meet_late_across_nodes() -> torch.Tensor:
    dispatcher = open_hierarchical("gloo", dist.group.WORLD, node_size=1, slots_per_rank=S, timeout_s=20.0)
    combined = late_peer(dispatcher, "nodes", NORMAL)
    dispatcher.close()
    return combined


def test_work_beside_is_done_while_a_node_is_late(pool_of: PoolOf) -> None:
    check(pool_of(2).run(meet_late_across_nodes))


def meet_late_on_devices() -> list[torch.Tensor]:
    dispatcher = open_wide()
    return [late_peer(dispatcher, f"devices {mode}", mode).clone() for mode in (NORMAL, low_latency(2))]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton: pip install -r requirements-dev.txt")
def test_work_beside_is_launched_before_a_late_device_is_waited_for() -> None:
    with RankPool(2, timeout_s=120.0) as pool:
        pool.run(interpret)
        for answers in zip(*pool.run(meet_late_on_devices), strict=True):
            check(list(answers))


def refuse_beside(name: str) -> tuple[str, int]:
    """Rank 1's type is wrong: what each rank is told, and how often it worked."""
    dispatcher = Dispatcher(open_wire(name, dist.group.WORLD, timeout_s=20.0), slots_per_rank=S)
    worked: list[int] = []
    slots_TK = torch.zeros(1, 1, dtype=torch.int32 if dist.get_rank() else torch.int64)
    try:
        dispatcher.dispatch(torch.ones(1, 4), slots_TK, meanwhile=lambda: worked.append(1))
    except (ValueError, PeerRefused) as error:
        return type(error).__name__, len(worked)
    finally:
        dispatcher.close()
    return "no error", len(worked)


@pytest.mark.parametrize("name", ["gloo", "shm"])
def test_a_rank_that_refuses_does_no_work(pool_of: PoolOf, name: str) -> None:
    assert pool_of(2).run(refuse_beside, name) == [("PeerRefused", 1), ("ValueError", 0)]


def test_one_ranks_time_beside_is_not_counted_as_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = 0

    def clock() -> int:
        return now_ns

    def work() -> None:
        nonlocal now_ns
        now_ns += 1_000_000

    monkeypatch.setattr("dispatch.dispatcher.perf_counter_ns", clock)
    dispatcher = Dispatcher(LocalWire(), slots_per_rank=S)
    dispatcher.dispatch(torch.ones(1, 4), torch.zeros(1, 1, dtype=torch.int64), meanwhile=work)
    assert now_ns == 1_000_000 and dispatcher.waits.dispatch_ns == 0
