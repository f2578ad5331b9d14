"""Functions that interpreting ranks run in tests of dispatch between devices.

Kernel modules are imported within functions: the interpreter must be chosen first, and only in these processes."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dispatch.dispatched import Dispatched
from dispatch.dispatcher import Dispatcher
from dispatch.gpu.symmetric import SharedMemory
from dispatch.mode import NORMAL, Mode
from dispatch.row_formats import row_format
from dispatch.wires.open import open_wire
from tests.dispatch.oracle import RankCase, compute_pairs, simulate

CPU, S = torch.device("cpu"), 3


class Outcome(NamedTuple):
    """Results of one layer on one rank."""

    x_PH: Tensor  # the row of each pair
    slot_offsets: Tensor
    combined_TH: Tensor


def open_wide(backend: str = "auto", **settings: Any) -> Any:
    """Open a dispatcher with interpreted kernels over all ranks of the pool. Collective."""
    from dispatch.gpu.open import open_gpu_dispatcher  # noqa: PLC0415 - the interpreter is chosen before

    return open_gpu_dispatcher(
        backend, dist.group.WORLD, device=CPU, slots_per_rank=S, timeout_s=20.0, **settings
    )


def answer(sent: Dispatched, rank: int) -> Tensor:
    """Answer the existing pairs. Memory after them is NaN."""
    num_pairs = int(sent.slot_offsets[-1])
    y_PH = torch.full((sent.handle.num_pairs, sent.handle.hidden), float("nan"), dtype=sent.handle.dtype)
    y_PH[:num_pairs] = compute_pairs(sent.x_NH, sent.row_P[:num_pairs], sent.slot_offsets, rank)
    return y_PH


def run_layer(dispatcher: Any, case: RankCase, mode: Mode = NORMAL) -> Outcome:
    """Dispatch, compute, combine, and copy the results. Weights next to a -1 are NaN and must not be read."""
    rank = dist.get_rank()
    sent = dispatcher.dispatch(case.x_TH, case.slots_TK, mode)
    x_PH = sent.x_NH[sent.row_P[: int(sent.slot_offsets[-1])]].clone()
    offsets = sent.slot_offsets.clone()
    weights_TK = torch.where(case.slots_TK < 0, float("nan"), case.weights_TK)
    combined = dispatcher.combine(answer(sent, rank), weights_TK, sent)
    dispatcher.begin_check()()
    return Outcome(x_PH, offsets, combined.clone())


def check_pairs(ours: Outcome, cases: list[RankCase], rank: int, where: str, slots: int = S) -> None:
    """Check that rows, offsets and sums equal the oracle's."""
    want = simulate(cases, slots)[rank]
    wanted = Outcome(want.x_NH[want.row_P], want.slot_offsets, want.combined_TH)
    for field, got, oracle in zip(Outcome._fields, ours, wanted, strict=True):
        assert got.dtype == oracle.dtype and torch.equal(got, oracle), f"{where}, rank {rank}, {field}"


def run_on_cpu(layers: list[list[RankCase]], rows: str) -> list[Outcome]:
    """Run the same layers through the CPU's dispatcher, which every device must match."""
    wire = open_wire("gloo", dist.group.WORLD, timeout_s=20.0)
    dispatcher = Dispatcher(wire, slots_per_rank=S, rows=row_format(rows))
    results = [run_layer(dispatcher, cases[wire.rank]) for cases in layers]
    dispatcher.close()
    return results


def without_repeats(case: RankCase) -> RankCase:
    """Remove repeated slots of a token, which low-latency mode delivers once."""
    slots_TK = case.slots_TK.clone()
    for k in range(1, slots_TK.shape[1]):
        repeats = (case.slots_TK[:, :k] == case.slots_TK[:, k : k + 1]).any(dim=1)
        slots_TK[repeats, k] = -1
    return case._replace(slots_TK=slots_TK)


def open_interpreted(num_bytes: int = 1 << 18, **kwargs: Any) -> Any:
    """Open an exchange with interpreted kernels. Collective."""
    from dispatch.gpu.exchange import LowLatencyBlocks  # noqa: PLC0415

    def open_memory(size: int) -> SharedMemory:
        return SharedMemory(dist.group.WORLD, size, timeout_s=20.0)

    options = {"timeout_s": 20.0, **kwargs}
    return LowLatencyBlocks(open_memory, dist.get_world_size(), num_bytes=num_bytes, **options)
