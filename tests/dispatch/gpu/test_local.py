"""Dispatch of a single rank on a device, interpreted: the oracle's bits, and no read of a tensor by the host."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dispatch import layout
from dispatch.mode import NORMAL, low_latency
from tests.dispatch.exchange import catch
from tests.dispatch.gpu.ranks import Outcome, answer, check_pairs
from tests.dispatch.oracle import RankCase, make_cases
from tests.support.gpu.graph_safe import graph_safe_launches
from tests.support.ranks import RankPool

CPU, S = torch.device("cpu"), 4
LAYERS = {
    "some choices missing": make_cases(1, [5]),
    "repeated slots": make_cases(2, [3], choices=7, no_choice=0.0),
    "bfloat16": make_cases(3, [4], dtype=torch.bfloat16, hidden=33),
    "float16, several tiles": make_cases(4, [2], dtype=torch.float16, hidden=1100),
    "all to one slot": make_cases(5, [4], only_slot=3, no_choice=0.0),
    "no tokens": make_cases(6, [0]),
    "no token has an expert": make_cases(7, [3], no_choice=1.0),
}


def open_local(slots: int = S) -> Any:
    from dispatch.gpu.open import open_gpu_dispatcher  # noqa: PLC0415 - the interpreter is chosen before

    return open_gpu_dispatcher("auto", None, device=CPU, slots_per_rank=slots)


def run_all(layers: dict[str, list[RankCase]]) -> dict[str, list[Tensor]]:
    dispatcher, results = open_local(), {}
    for name, (case,) in layers.items():
        sent = dispatcher.dispatch(case.x_TH, case.slots_TK)
        weights_TK = torch.where(case.slots_TK < 0, float("nan"), case.weights_TK)
        pairs = sent.row_P[: int(sent.slot_offsets[-1])].clone()
        combined = dispatcher.combine(answer(sent, 0), weights_TK, sent)
        results[name] = [sent.x_NH[pairs], sent.slot_offsets.clone(), combined]
    return results


def test_pairs_and_sums_have_the_oracles_bits(interpreter: RankPool) -> None:
    (results,) = interpreter.run(run_all, LAYERS)
    for name, cases in LAYERS.items():
        check_pairs(Outcome(*results[name]), cases, 0, name, S)


def order_many(num_tokens: int, most: int) -> list[Tensor]:
    """Order choices in one launch, or in three if there are more than `most`."""
    from dispatch.gpu.kernels import ordering, pairs  # noqa: PLC0415 - the interpreter is chosen before

    kept, ordering.MOST_AT_ONCE = ordering.MOST_AT_ONCE, most
    (case,) = make_cases(8, [num_tokens])
    order = pairs.PairOrders(S, CPU).order(case.slots_TK)
    ordering.MOST_AT_ONCE = kept
    return compared(order, case.slots_TK)


def compared(order: Any, slots_TK: Tensor) -> list[Tensor]:
    """Return the parts of an order, each followed by the layout's, and the pairs of missing choices."""
    want, is_chosen = layout.order_pairs(slots_TK, S), slots_TK >= 0
    return [
        order.row_P[: len(want.row_P)], want.row_P, order.slot_offsets, want.slot_offsets,
        order.pair_of_choice_NK[is_chosen].long(), want.pair_of_answer, order.pair_of_choice_NK[~is_chosen],
    ]  # fmt: skip


def order_received(num_tokens: int, programs: int) -> list[Tensor]:
    """Order choices as low-latency calls receive them, from one source, with few or many programs."""
    import triton  # noqa: PLC0415 - the interpreter is chosen before

    from dispatch.gpu.kernels import flags, pairs  # noqa: PLC0415

    kept, pairs._PROGRAMS = pairs._PROGRAMS, programs
    (case,) = make_cases(8, [num_tokens])
    (N, K), received = case.slots_TK.shape, case.slots_TK.int()
    order = pairs.PairsOnDevice(
        torch.empty(N * K, dtype=torch.int64),
        torch.empty(S + 1, dtype=torch.int64),
        torch.empty(N, K, dtype=torch.int32),
    )
    chunk, tile = pairs.chunk_of(N * K, S)
    pairs._PROGRAMS = kept
    arrived = torch.full((1,), flags.CAME.value, dtype=torch.int32)
    pairs.order_pairs[(S, triton.cdiv(N * K, chunk))](
        received.data_ptr(), arrived, torch.zeros(1, dtype=torch.int64), 0, order.row_P, order.pair_of_choice_NK,
        order.slot_offsets, N * K, chunk, S=S, K=K, R=1, PER_SOURCE=N * K, TILE=tile, HAS_LABELS=False,
    )  # fmt: skip
    return compared(order, case.slots_TK)


def check_order(found: list[Tensor]) -> None:
    for ours, want in zip(found[0:6:2], found[1:6:2], strict=True):
        assert torch.equal(ours, want)
    assert (found[6] == -1).all() and len(found[6]) > 100


@pytest.mark.parametrize(("num_tokens", "most"), [(400, 4096), (400, 100)])
def test_many_pairs_are_ordered_as_the_layout_says(interpreter: RankPool, num_tokens: int, most: int) -> None:
    (found,) = interpreter.run(order_many, num_tokens, most)
    check_order(found)


@pytest.mark.parametrize(("num_tokens", "programs"), [(400, 512), (1000, S), (1000, 2 * S)])
def test_received_pairs_are_ordered_as_the_layout_says(
    interpreter: RankPool, num_tokens: int, programs: int
) -> None:
    (found,) = interpreter.run(order_received, num_tokens, programs)
    check_order(found)


def run_twice() -> tuple[list[int], list[int]]:
    """Run a size again under the guard, after smaller and larger ones."""
    dispatcher, (case,) = open_local(), make_cases(1, [5])
    out_TH, addresses = torch.empty_like(case.x_TH), []
    sent = dispatcher.dispatch(case.x_TH, case.slots_TK, low_latency(8))
    answers = answer(sent, 0)
    for (other,) in (make_cases(2, [2]), make_cases(3, [5])):
        dispatcher.dispatch(other.x_TH, other.slots_TK)
    for _ in range(2):
        with graph_safe_launches():
            sent = dispatcher.dispatch(case.x_TH, case.slots_TK, low_latency(8))
            dispatcher.combine(answers, case.weights_TK, sent, out=out_TH)
        addresses.append([sent.row_P.data_ptr(), sent.slot_offsets.data_ptr(), out_TH.data_ptr()])
    return addresses[0], addresses[1]


def test_a_call_of_a_known_size_neither_allocates_nor_looks(interpreter: RankPool) -> None:
    ((first, second),) = interpreter.run(run_twice)
    assert first == second


def grow() -> tuple[bool, bool]:
    """The memory of a smaller order stays alive when a larger one outgrows it: a graph may hold its address."""
    dispatcher, (small,), (large,) = open_local(), make_cases(1, [2]), make_cases(2, [50])
    before = dispatcher.dispatch(small.x_TH, small.slots_TK).row_P.clone()
    kept = dispatcher.dispatch(small.x_TH, small.slots_TK).row_P
    dispatcher.dispatch(large.x_TH, large.slots_TK)
    rooms = dispatcher._normal._orders._rows._rooms
    return torch.equal(kept, before), any(room.data_ptr() == kept.data_ptr() for room in rooms)


def test_outgrown_memory_is_kept(interpreter: RankPool) -> None:
    assert interpreter.run(grow) == [(True, True)]


def complain(change: str) -> str:
    dispatcher, (case,) = open_local(), make_cases(1, [5])
    x_TH, slots_TK, mode = case.x_TH, case.slots_TK, NORMAL
    if change == "dtype":
        x_TH = x_TH.double()
    if change == "slots":
        slots_TK = slots_TK.int()
    if change == "tokens":
        mode = low_latency(3)

    def call() -> None:
        sent = dispatcher.dispatch(x_TH, slots_TK, mode)
        if change == "stale":
            dispatcher.dispatch(x_TH, slots_TK)
        y_PH = answer(sent, 0)
        dispatcher.combine(y_PH[1:] if change == "answers" else y_PH, case.weights_TK, sent)

    return catch(call)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            "dtype",
            "x_TH is torch.float64 [5, 16] on cpu; the kernels of this device support torch.bfloat16, ",
        ),
        (
            "slots",
            "slots_TK is torch.int32 [5, 3] on cpu; it must be a 2-dimensional int64 tensor on the CPU",
        ),
        ("tokens", "x_TH has 5 tokens; low-latency mode allows at most 3"),
        ("stale", "dispatched is not from the last dispatch"),
        ("answers", "y_PH is torch.float32 [14, 16] on cpu; it must be torch.float32 [15, 16] on the CPU"),
    ],
)
def test_bad_arguments_are_named(interpreter: RankPool, change: str, text: str) -> None:
    (said,) = interpreter.run(complain, change)
    assert said.startswith(f"ValueError: {text}"), said
