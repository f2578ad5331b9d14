"""Normal mode between devices, over collectives (here CPU tensors over gloo): the oracle's bits and one read by the host.

The kernels that sort and sum are interpreted, as in the other tests here.
"""

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dispatch.errors import DispatchTimeout, PeerLost
from dispatch.gpu.nccl import NcclRows
from dispatch.rows import HostRows
from dispatch.wires.open import open_wire
from tests.dispatch.exchange import catch
from tests.dispatch.gpu.ranks import CPU, Outcome, S, check_pairs, run_layer
from tests.dispatch.oracle import RankCase, make_cases, simulate
from tests.fixtures import PoolOf
from tests.support.gpu.interpreted import needs_triton
from tests.support.models.no_reads import CountedReads
from tests.support.ranks import RankPool

pytestmark = needs_triton


def open_normal(timeout_s: float = 20.0, *, through_hosts: bool = False) -> Any:
    from dispatch.gpu.dispatcher import DeviceDispatcher  # noqa: PLC0415 - the interpreter is chosen before
    from dispatch.gpu.normal import NormalPairs  # noqa: PLC0415

    world = dist.group.WORLD
    if through_hosts:
        mover: Any = HostRows(open_wire("gloo", world, timeout_s=timeout_s), CPU)
    else:
        mover = NcclRows(world, device=CPU, timeout_s=timeout_s, epoch=0)
    normal = NormalPairs(mover, device=CPU, slots_per_rank=S, is_fp8=False)
    return DeviceDispatcher(
        normal, None, world_size=dist.get_world_size(), device=CPU, row_format="as they are", name="test", reason="."
    )  # fmt: skip


LAYERS = [
    make_cases(1, [3, 1], slots_per_rank=S),
    make_cases(2, [4, 0], slots_per_rank=S, dtype=torch.bfloat16, hidden=33),
    make_cases(3, [0, 0], slots_per_rank=S),
    make_cases(4, [2, 2], slots_per_rank=S, only_slot=4, no_choice=0.0),
    make_cases(5, [1, 1], slots_per_rank=S, no_choice=1.0),
]


def run_layers(layers: list[list[RankCase]]) -> tuple[list[Outcome], list[str], tuple[list[int], list[int]]]:
    dispatcher, rank = open_normal(), dist.get_rank()
    results = [run_layer(dispatcher, cases[rank]) for cases in layers]
    case = layers[0][rank]
    weights_TK = case.weights_TK.contiguous()
    with CountedReads() as counted:  # the interpreter, which emulates a GPU, may read its tensors
        sent = dispatcher.dispatch(case.x_TH, case.slots_TK)
        dispatcher.combine(torch.zeros(sent.handle.num_pairs, case.x_TH.shape[1]), weights_TK, sent)
    dist.barrier()
    return results, counted.reads, dispatcher.sent_to_ranks()


def test_collectives_give_the_oracles_bits_with_one_look_of_the_host_per_layer(
    interpreting_pair: RankPool,
) -> None:
    """Earlier there was one per peer and call, some seventy per layer between eight ranks."""
    for rank, (results, reads, sent_bytes) in enumerate(interpreting_pair.run(run_layers, LAYERS)):
        for index, (ours, cases) in enumerate(zip(results, LAYERS, strict=True)):
            check_pairs(ours, cases, rank, f"layer {index}")
        assert reads == ["tolist of a tensor"]
        assert sent_bytes[0][rank] == sent_bytes[1][rank] == 0 < sent_bytes[0][1 - rank]


def refuse_a_call(is_combine: bool) -> tuple[str, str, Tensor]:
    """Pass a wrong type to a dispatch or a combine on rank 1, then run a layer that must work."""
    dispatcher, rank, cases = open_normal(), dist.get_rank(), LAYERS[0]
    case, is_wrong = cases[rank], rank == 1

    def call() -> None:
        slots_TK = case.slots_TK.int() if is_wrong and not is_combine else case.slots_TK
        sent = dispatcher.dispatch(case.x_TH, slots_TK)
        y_PH = torch.zeros(sent.handle.num_pairs, 16, dtype=torch.float64 if is_wrong else torch.float32)
        dispatcher.combine(y_PH, case.weights_TK, sent)

    message, later = catch(call), catch(dispatcher.begin_check())
    combined = run_layer(dispatcher, case).combined_TH
    dist.barrier()
    return message, later, combined


@pytest.mark.parametrize("is_combine", [False, True])
def test_a_refusal_reaches_the_peer_by_its_next_look(interpreting_pair: RankPool, is_combine: bool) -> None:
    (message, later, first), (own, _, second) = interpreting_pair.run(refuse_a_call, is_combine)
    assert own.startswith("ValueError: y_PH is" if is_combine else "ValueError: slots_TK is")
    assert (later if is_combine else message) == own.replace(
        "ValueError: ", "PeerRefused: rank 1 refused the call: "
    )
    assert (message if is_combine else later) == "no error"
    want = simulate(LAYERS[0], S)
    assert torch.equal(first, want[0].combined_TH) and torch.equal(second, want[1].combined_TH)


def disagree(through_hosts: bool) -> str:
    dispatcher, hidden = open_normal(through_hosts=through_hosts), 16 + dist.get_rank()
    message = catch(lambda: dispatcher.dispatch(torch.zeros(2, hidden), torch.tensor([[0, 3], [1, 4]])))
    dist.barrier()
    return message


@pytest.mark.parametrize("through_hosts", [False, True])
def test_ranks_that_disagree_are_told(interpreting_pair: RankPool, through_hosts: bool) -> None:
    for rank, message in enumerate(interpreting_pair.run(disagree, through_hosts)):
        assert message.startswith(f"RanksDisagree: rank {1 - rank} made another call than rank {rank}")


class NeverDone:
    """A collective that a peer does not join, as with NCCL: waiting for it does not block the host."""

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        raise AssertionError("NCCL's wait would return, and the next read of a result would hang")


def wait_for_nobody(timeout_s: float, interrupt_after_s: float) -> str:
    rows = NcclRows(dist.group.WORLD, device=CPU, timeout_s=timeout_s)
    timer = threading.Timer(interrupt_after_s, rows.interrupt, [PeerLost(1, "its heart stands still")])
    timer.start()
    message = catch(lambda: rows.wait(NeverDone()))
    timer.cancel()
    return f"{message}; {catch(lambda: rows.refuse('later'))}"


def test_a_collective_that_does_not_end_is_given_up(interpreting_pair: RankPool) -> None:
    """It ends by the timeout, or when the host learns otherwise that a peer is lost."""
    for rank, message in enumerate(interpreting_pair.run(wait_for_nobody, 0.05, 60.0)):
        assert message.startswith(f"{DispatchTimeout.__name__}: rank {1 - rank} sent nothing for 0.05 s")
        assert message.endswith("DispatchError: these collectives are closed")
    for message in interpreting_pair.run(wait_for_nobody, 60.0, 0.05):
        assert message.startswith("PeerLost: rank 1 is lost: its heart stands still")


class BrokenWork:
    """A collective that fails like NCCL's and gloo's when a peer is lost: they do not name the peer."""

    def is_completed(self) -> bool:
        raise RuntimeError("Connection closed by peer")


def wait_for_broken() -> str:
    rows = NcclRows(dist.group.WORLD, device=CPU, timeout_s=60.0)
    return catch(lambda: rows.wait(BrokenWork()))


def test_a_lost_peer_is_one_also_where_nobody_can_say_which(pool_of: PoolOf) -> None:
    """Only after a lost peer can an engine continue without it."""
    reason = "is lost: Connection closed by peer"
    assert pool_of(3).run(wait_for_broken) == [f"PeerLost: a peer {reason}"] * 3
    assert pool_of(2).run(wait_for_broken) == [f"PeerLost: rank {rank} {reason}" for rank in (1, 0)]
