"""Dispatch between devices of several ranks, interpreted in two processes: the oracle's bits in both modes."""

import threading
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dispatch.errors import PeerLost
from dispatch.gpu.symmetric import SharedMemory
from dispatch.mode import NORMAL, Mode, low_latency
from tests.dispatch.exchange import catch
from tests.dispatch.gpu.ranks import (
    CPU,
    Outcome,
    S,
    answer,
    check_pairs,
    open_wide,
    run_layer,
    run_on_cpu,
)
from tests.dispatch.gpu.test_replay import recording
from tests.dispatch.oracle import RankCase, make_cases, simulate
from tests.support.gpu.graph_safe import graph_safe_launches
from tests.support.gpu.interpreted import needs_triton
from tests.support.gpu.launches import counting_launches
from tests.support.ranks import RankPool

pytestmark = needs_triton

BF16 = torch.bfloat16


def draw(seed: int, tokens: list[int], **settings: Any) -> list[RankCase]:
    return make_cases(seed, tokens, slots_per_rank=S, **settings)


LAYERS = {
    "uneven": draw(1, [3, 1]),
    "one rank has all tokens, and as many as it may": draw(2, [4, 0], dtype=BF16, hidden=33),
    "no rank has tokens": draw(3, [0, 0]),
    "no token has an expert": draw(4, [1, 1], no_choice=1.0),
    "all to one slot, repeated": draw(5, [2, 2], only_slot=4, no_choice=0.0),
    "more choices than slots": draw(6, [2, 1], choices=8, no_choice=0.0, dtype=torch.float16),
}


def run_layers(
    backend: str, rows: str, modes: list[Mode], layers: list[list[RankCase]]
) -> list[list[Outcome]]:
    dispatcher = open_wide(backend, rows=rows)
    results = [[run_layer(dispatcher, cases[dist.get_rank()], mode) for cases in layers] for mode in modes]
    dist.barrier()
    dispatcher.close()
    return results


@pytest.mark.parametrize("backend", ["auto", pytest.param("gloo", marks=pytest.mark.slow)])
def test_both_modes_have_the_oracles_bits(interpreting_pair: RankPool, backend: str) -> None:
    """With auto, low-latency steps use kernels. Through host memory they use normal mode."""
    modes = [NORMAL, low_latency(4)]
    results = interpreting_pair.run(run_layers, backend, "auto", modes, list(LAYERS.values()))
    for index, (name, cases) in enumerate(LAYERS.items()):
        for rank in range(2):
            for mode, ours in zip(("normal", "low latency"), results[rank], strict=True):
                check_pairs(ours[index], cases, rank, f"{name}, {mode}")


def run_fp8(layers: list[list[RankCase]]) -> tuple[list[list[Outcome]], list[Outcome]]:
    return run_layers("auto", "fp8", [NORMAL, low_latency(4)], layers), run_on_cpu(layers, "fp8")


def test_rows_in_fp8_have_the_cpus_bits(interpreting_pair: RankPool) -> None:
    layers = [draw(1, [3, 1], hidden=200, choices=2), draw(2, [2, 3], hidden=260, dtype=BF16, choices=2)]
    layers[0][0].x_TH[0, 3] = 1e-9  # a subnormal code and a block of zeros
    layers[0][0].x_TH[1, 128:] = 0.0
    for rank, (modes, want) in enumerate(interpreting_pair.run(run_fp8, layers)):
        for mode, ours in enumerate(modes):
            for index in range(len(layers)):
                for field, got, cpus in zip(Outcome._fields, ours[index], want[index], strict=True):
                    assert torch.equal(got, cpus), f"layer {index}, mode {mode}, rank {rank}, {field}"


def open_unwatched(**settings: Any) -> Any:
    """Open low-latency mode as on a GPU: the host reads nothing."""
    from dispatch.gpu.dispatcher import DeviceDispatcher  # noqa: PLC0415 - the interpreter is chosen before
    from dispatch.gpu.exchange import LowLatencyPairs  # noqa: PLC0415

    def open_memory(size: int) -> SharedMemory:
        return SharedMemory(dist.group.WORLD, size, timeout_s=20.0)

    exchange = LowLatencyPairs(
        open_memory, dist.get_world_size(), num_bytes=1 << 16, is_blocking=False, slots_per_rank=S, **settings
    )
    return DeviceDispatcher(
        exchange, None, world_size=2, device=CPU, row_format="as they are", name="test", reason="of a test"
    )


def replay(layers: list[list[RankCase]]) -> tuple[list[Tensor], tuple[list[int], list[int]]]:
    """Record a layer's launches under the guard, then repeat them with other contents."""
    dispatcher, rank = open_unwatched(timeout_s=5.0), dist.get_rank()
    case = RankCase(*(tensor.clone() for tensor in layers[0][rank]))
    out_TH, mode = torch.zeros_like(case.x_TH), low_latency(3)
    y_PH = answer(dispatcher.dispatch(case.x_TH, case.slots_TK, mode), rank)
    dist.barrier()
    with recording() as launches, graph_safe_launches():
        sent = dispatcher.dispatch(case.x_TH, case.slots_TK, mode)
        num_there = len(launches)
        dispatcher.combine(y_PH, case.weights_TK, sent, out=out_TH)
    results = []
    for layer in layers:
        for held, wanted in zip(case, layer[rank], strict=True):
            held.copy_(wanted)
        for launch in launches[:num_there]:
            launch()
        y_PH.copy_(answer(sent, rank))
        for launch in launches[num_there:]:
            launch()
        results.append(out_TH.clone())
    sent_bytes = dispatcher.sent_to_ranks()
    dispatcher.begin_check()()
    dist.barrier()
    dispatcher.close()
    return results, sent_bytes


def test_a_decode_step_can_be_replayed_and_the_host_looks_at_nothing(interpreting_pair: RankPool) -> None:
    layers = [draw(seed, [3, 3]) for seed in (1, 2)]
    for rank, (results, (dispatched, combined)) in enumerate(interpreting_pair.run(replay, layers)):
        for index, ours in enumerate(results):
            assert torch.equal(ours, simulate(layers[index], S)[rank].combined_TH), (
                f"layer {index}, rank {rank}"
            )
        assert dispatched[rank] == combined[rank] == 0
        assert dispatched[1 - rank] % (16 * 4) == 3 * 3 * 4 * 4 % (16 * 4)  # rows, and entries of four calls
        assert combined[1 - rank] > 0 and combined[1 - rank] % (16 * 4) == 0


def add_shared(mode: Mode) -> tuple[list[str], Tensor, Tensor]:
    """Run a layer with rows that are computed meanwhile and added. Return what a dispatch launched, the sums, and those of torch."""
    dispatcher, case, rank = open_wide(), draw(1, [3, 1])[dist.get_rank()], dist.get_rank()
    added_TH = torch.linspace(-1, 1, case.x_TH.numel()).view_as(case.x_TH)
    with counting_launches() as names:
        sent = dispatcher.dispatch(case.x_TH, case.slots_TK, mode, lambda: names.append("shared"))
    found = dispatcher.combine(answer(sent, rank), case.weights_TK, sent, added_TH=added_TH)
    wanted = run_layer(dispatcher, case, mode).combined_TH + added_TH
    dist.barrier()
    dispatcher.close()
    return names, found, wanted


@pytest.mark.parametrize("mode", [NORMAL, low_latency(4)])
def test_shared_experts_run_between_send_and_wait_and_are_added_as_by_torch(
    interpreting_pair: RankPool, mode: Mode
) -> None:
    for names, found, wanted in interpreting_pair.run(add_shared, mode):
        assert torch.equal(found, wanted) and names.count("shared") == 1
        if mode.capacity:
            after = [name for name in names[names.index("send_rows") :] if not name.startswith("aten::")]
            assert after[:3] == ["send_rows", "shared", "wait_flags"], "polls may follow"
            assert after[-2:] == ["order_pairs", "deliver_rows"]


def refuse_one(mode: Mode) -> tuple[str, Tensor]:
    """Pass a wrong type on rank 1, then run a layer that must work."""
    cases, rank = draw(1, [3, 2]), dist.get_rank()
    dispatcher, case = open_wide(), cases[rank]
    slots_TK = case.slots_TK.int() if rank == 1 else case.slots_TK
    said = catch(lambda: dispatcher.dispatch(case.x_TH, slots_TK, mode))
    outcome = run_layer(dispatcher, case, mode)
    dist.barrier()
    dispatcher.close()
    return said, outcome.combined_TH


@pytest.mark.parametrize("mode", [pytest.param(NORMAL, marks=pytest.mark.slow), low_latency(4)])
def test_a_refusal_reaches_every_rank_and_the_next_call_works(
    interpreting_pair: RankPool, mode: Mode
) -> None:
    text = "slots_TK is torch.int32 [2, 3] on cpu; it must be a 2-dimensional int64 tensor on the CPU"
    (peers, first), (own, second) = interpreting_pair.run(refuse_one, mode)
    assert peers == f"PeerRefused: rank 1 refused the call: {text}"
    assert own == f"ValueError: {text}"
    want = simulate(draw(1, [3, 2]), S)
    assert torch.equal(first, want[0].combined_TH) and torch.equal(second, want[1].combined_TH)


def come_late() -> tuple[str, str, str]:
    """Make two calls on rank 0 without rank 1. Only the first one waits."""
    dispatcher, (case, _) = open_unwatched(timeout_s=1e-5), draw(1, [3, 3])
    y_PH, said = torch.zeros(18, 16), "no error"
    if dist.get_rank() == 0:
        sent = dispatcher.dispatch(case.x_TH, case.slots_TK, low_latency(3))
        dispatcher._normal._timeout_s = 1000.0  # longer than this test may run
        dispatcher.combine(y_PH, case.weights_TK, sent)
        said = catch(dispatcher.begin_check())
    again = catch(dispatcher.begin_check())
    dist.barrier()
    if dist.get_rank() == 1:
        dispatcher.combine(
            y_PH, case.weights_TK, dispatcher.dispatch(case.x_TH, case.slots_TK, low_latency(3))
        )
    dist.barrier()
    dispatcher.close()
    return said, again, dispatcher.name


def test_a_rank_that_is_late_is_waited_for_once_and_named_by_a_check(interpreting_pair: RankPool) -> None:
    (said, again, _), _ = interpreting_pair.run(come_late)
    assert said.startswith("DispatchTimeout: rank 1 sent nothing for ")
    assert again == "no error"


def be_interrupted(is_blocking: bool) -> tuple[str, str]:
    """Interrupt rank 0 from a thread while rank 1 never comes."""
    from dispatch.gpu.exchange import LowLatencyPairs  # noqa: PLC0415 - the interpreter is chosen before

    def open_memory(size: int) -> SharedMemory:
        return SharedMemory(dist.group.WORLD, size, timeout_s=20.0)

    exchange = LowLatencyPairs(
        open_memory, 2, num_bytes=1 << 16, is_blocking=is_blocking, slots_per_rank=S, timeout_s=1000.0
    )
    (case, _), texts = draw(1, [3, 3]), []
    if dist.get_rank() == 0:
        timer = threading.Timer(0.2, exchange.interrupt, [PeerLost(1, "its heart stands still")])
        timer.start()
        texts.append(catch(lambda: exchange.dispatch(case.x_TH, case.slots_TK, 3)))
        texts.append(catch(exchange.begin_check()))
    dist.barrier()
    exchange.close()
    return tuple(texts)  # type: ignore[return-value]


@pytest.mark.parametrize("is_blocking", [False, True])
def test_the_host_ends_what_a_kernel_waits_for(interpreting_pair: RankPool, is_blocking: bool) -> None:
    """Otherwise it would spin until the timeout: a thousand seconds here."""
    (called, checked), _ = interpreting_pair.run(be_interrupted, is_blocking)
    lost = "PeerLost: rank 1 is lost: its heart stands still"
    assert (called, checked) == (lost if is_blocking else "no error", lost)


def count_launches() -> tuple[int, int]:
    dispatcher, case = open_unwatched(timeout_s=20.0), draw(1, [3, 3])[dist.get_rank()]
    counts = []
    for _ in range(2):
        with recording() as launches:
            sent = dispatcher.dispatch(case.x_TH, case.slots_TK, low_latency(3))
            counts.append(len(launches))
            dispatcher.combine(answer(sent, dist.get_rank()), case.weights_TK, sent)
        counts.append(len(launches))
        dist.barrier()
    dispatcher.close()
    return counts[2], counts[3] - counts[2]


def test_a_layer_takes_seven_launches(interpreting_pair: RankPool) -> None:
    """Send, wait, order, deliver; answer, wait, sum. Each launch costs time in a decode step."""
    assert interpreting_pair.run(count_launches) == [(4, 3)] * 2


def exchange_with_few_counted(most: int) -> list[list[int]]:
    """Dispatch and combine with a limit to the programs that count themselves; return the sums' bits."""
    from dispatch.gpu import calls  # noqa: PLC0415 - the interpreter is chosen before

    with mock.patch.object(calls, "_MOST_COUNTED", most):
        dispatcher, case = open_unwatched(timeout_s=20.0), draw(1, [3, 3])[dist.get_rank()]
        sums = []
        for _ in range(3):
            sent = dispatcher.dispatch(case.x_TH, case.slots_TK, low_latency(3))
            out_TH = dispatcher.combine(answer(sent, dist.get_rank()), case.weights_TK, sent)
            sums.append(out_TH.view(torch.int32).flatten().tolist())
        dispatcher.begin_check()()
        dist.barrier()
        dispatcher.close()
    return sums


def test_calls_that_publish_themselves_and_calls_that_do_not_have_the_same_bits(
    interpreting_pair: RankPool,
) -> None:
    """3: rows publish themselves, answers (6 places of 2 choices) do not. 0: neither does."""
    every, rows_only, none = (interpreting_pair.run(exchange_with_few_counted, most) for most in (4096, 3, 0))
    assert every == rows_only == none


def wait_and_check() -> list[tuple[int, int]]:
    """Return the dispatcher's waits before and after the check that ends a step in which rank 1 was waited for."""
    dispatcher, case = open_unwatched(timeout_s=20.0), draw(1, [3, 3])[dist.get_rank()]
    sent = dispatcher.dispatch(case.x_TH, case.slots_TK, low_latency(3))
    dispatcher.combine(answer(sent, dist.get_rank()), case.weights_TK, sent)
    exchange = dispatcher._low_latency
    exchange.dispatch_ns[1] += 5  # the interpreter has no clock
    exchange.combine_ns[1] += 7
    seen = [tuple(dispatcher.waits)[:2]]
    dispatcher.begin_check()()
    seen.append(tuple(dispatcher.waits)[:2])
    dist.barrier()
    dispatcher.close()
    return seen


def test_waits_arrive_with_the_errors_of_a_step(interpreting_pair: RankPool) -> None:
    """One read of the device per step, not five."""
    assert interpreting_pair.run(wait_and_check) == [[(0, 0), (5, 7)]] * 2
