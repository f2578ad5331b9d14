"""Checks by two ranks that share a device: dispatch by kernels, eager and replayed from a graph.

They exchange the same tensors twice, by Triton kernels on the device and by our CPU code over gloo, and compare bits.
Experts are replaced by multiplication with powers of two, which does not round.

Legend: T tokens, K choices, H hidden, L experts of a rank, N rows of an expert.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu.bench import Bench, Call, bytes_of, capture, spoiling
from benchmarks.gpu.results import Row, Setting
from dispatch.dispatched import TokenDispatcher
from dispatch.dispatcher import Dispatcher
from dispatch.faces.low_latency import LowLatencyFace
from dispatch.gpu.dispatcher import DeviceDispatcher
from dispatch.gpu.exchange import LowLatencyBlocks, LowLatencyPairs
from dispatch.gpu.kernels.pairs import PairOrders, PairsOnDevice, combine_pairs
from dispatch.gpu.normal import NormalPairs
from dispatch.gpu.symmetric import OpenMemory, open_memory_for
from dispatch.low_latency.cpu import CpuExchange
from dispatch.mode import NORMAL, Mode
from dispatch.rows import HostRows
from dispatch.wires.open import open_wire
from dispatch.wires.wire import Wire


def permute_call(bench: Bench, seed: int, *, rows: int, choices: int, slots: int) -> Call:
    """Build a call that sorts choices by slot; every tenth choice is empty."""
    slots_TK = _choices(bench, seed, rows, choices, slots)
    orders = PairOrders(slots, bench.device)

    def checked(order: PairsOnDevice) -> Tensor:
        """Concatenate all three results; rows after the last pair are undefined."""
        is_pair = torch.arange(len(order.row_P), device=bench.device) < order.slot_offsets[-1]
        row_P = torch.where(is_pair, order.row_P, 0)
        return torch.cat(
            [part.float() for part in (row_P, order.slot_offsets, order.pair_of_choice_NK.flatten())]
        )

    def oracle(shift: int = 0) -> Tensor:
        flat = slots_TK.flatten().roll(shift)
        flat = torch.where(flat < 0, slots, flat)
        by_slot = flat.sort(stable=True)
        rank = torch.empty_like(flat).scatter(0, by_slot.indices, torch.arange(len(flat), device=flat.device))
        row_P = torch.where(by_slot.values < slots, by_slot.indices // choices, 0)
        ends = torch.bincount(flat, minlength=slots + 1)[:slots].cumsum(0)
        pair = torch.where(flat < slots, rank, -1)
        return torch.cat((row_P, ends.new_zeros(1), ends, pair)).float()

    return Call(
        run=functools.partial(orders.order, slots_TK), result=checked, oracle=oracle,
        control=functools.partial(oracle, 1), num_bytes=bytes_of(slots_TK) + rows * choices * 12 + 8 * slots,
    )  # fmt: skip


def combine_call(bench: Bench, seed: int, *, rows: int, choices: int, hidden: int) -> Call:
    """Build a call that sums each token's answers, which are in random order."""
    generator = bench.generator(seed)
    answers = bench.normal(generator, rows * choices, hidden)
    pairs = torch.randperm(rows * choices, generator=generator, device=bench.device).int().view(rows, choices)
    weights = torch.rand(rows, choices, generator=generator, device=bench.device)
    out = answers.new_empty(rows, hidden)

    def oracle(shift: int = 0) -> Tensor:
        own = answers[pairs.long().roll(shift, 0)].float()
        return (own * weights[..., None]).sum(1)

    return Call(
        run=functools.partial(combine_pairs, answers, pairs, weights, out), prepare=spoiling(out), oracle=oracle,
        control=functools.partial(oracle, 1), num_bytes=bytes_of(answers, out, weights, pairs),
    )  # fmt: skip


def _choices(bench: Bench, seed: int, rows: int, choices: int, slots: int) -> Tensor:
    generator = bench.generator(seed)
    drawn = torch.randint(0, slots, (rows, choices), generator=generator, device=bench.device)
    is_none = torch.rand(rows, choices, generator=generator, device=bench.device) < 0.1
    return drawn.masked_fill(is_none, -1)


WAIT_S = 100.0  # longest wait of a rank for the other, which may be interpreted
_LAYERS = 3


class Shape(NamedTuple):
    """Sizes of one layer's exchange."""

    max_tokens: int
    hidden: int
    choices: int
    experts_per_rank: int
    is_fp8: bool = False


_SHAPES = {"qwen3": Shape(128, 2048, 8, 64), "deepseek fp8": Shape(128, 7168, 8, 128, True)}
_TINY_SHAPES = {"tiny": Shape(4, 128, 2, 2), "tiny fp8": Shape(4, 128, 2, 2, True)}


class CallInputs(NamedTuple):
    """Inputs of a rank for one layer."""

    x_TH: Tensor
    topk_TK: Tensor
    weights_TK: Tensor

    def to(self, device: torch.device) -> "CallInputs":
        """Copy to a device."""
        return CallInputs(*(part.to(device) for part in self))


Layer = Callable[[CallInputs], tuple[Tensor, ...]]


def low_latency(setting: Setting, bench: Bench) -> Iterator[Row]:
    """Check DeepEP's low-latency calls: dispatch, answer and combine, both ways, layer after layer through one buffer each."""
    for name, shape in _shapes(setting).items():
        ours = functools.partial(_face_layer, LowLatencyFace(_open_blocks(bench)), shape)
        theirs = functools.partial(_face_layer, LowLatencyFace(CpuExchange(_open_gloo())), shape)
        yield _compare(f"low latency, {name}", shape, _on_device(bench, ours), theirs)


def service(setting: Setting, bench: Bench) -> Iterator[Row]:
    """Check the service's dispatcher on the device, in both modes, against its dispatcher on CPUs."""
    for name, shape in _shapes(setting).items():
        if shape.is_fp8:
            continue
        ours = _open_wide(bench, shape)
        theirs = Dispatcher(_open_gloo(), slots_per_rank=shape.experts_per_rank)
        for mode in (NORMAL, Mode(shape.max_tokens)):
            layer = functools.partial(_service_layer, shape=shape, mode=mode)
            words = "low latency" if mode.capacity else "normal"
            yield _compare(
                f"service, {words} mode, {name}",
                shape,
                _on_device(bench, functools.partial(layer, ours)),
                functools.partial(layer, theirs),
            )


def replayed(setting: Setting, bench: Bench) -> Iterator[Row]:
    """Check a low-latency layer of each kind, captured once and replayed on other inputs."""
    for name, shape in _shapes(setting).items():
        face = functools.partial(_face_layer, LowLatencyFace(_open_blocks(bench)), shape)
        theirs = functools.partial(_face_layer, LowLatencyFace(CpuExchange(_open_gloo())), shape)
        yield _compare(f"replayed calls, {name}", shape, _replaying(bench, shape, face), theirs, _note(bench))
        if shape.is_fp8:
            continue
        layer = functools.partial(_service_layer, shape=shape, mode=Mode(shape.max_tokens), shows_rows=False)
        wide = _open_wide(bench, shape)
        host = Dispatcher(_open_gloo(), slots_per_rank=shape.experts_per_rank)
        again = _replaying(bench, shape, functools.partial(layer, wide))
        yield _compare(
            f"replayed service, {name}", shape, again, functools.partial(layer, host), _note(bench)
        )


CHECKS: dict[str, Callable[[Setting, Bench], Iterator[Row]]] = {
    "low latency": low_latency,
    "service": service,
    "replayed": replayed,
}


def _compare(name: str, shape: Shape, ours: Layer, theirs: Layer, note: str = "") -> Row:
    """Run layers both ways; the control is a layer with other inputs."""
    equal = []
    for seed in range(_LAYERS):
        inputs = _draw(shape, seed)
        result = ours(inputs)
        equal.append(_equal(result, theirs(inputs)))
    is_control_equal = _equal(result, theirs(_draw(shape, _LAYERS)))
    figures = {"layers": _LAYERS, "equal": sum(equal), "control": "equal" if is_control_equal else "differs"}
    return Row(name=name, figures=figures, is_right=all(equal) and not is_control_equal, note=note)


def _on_device(bench: Bench, layer: Layer) -> Layer:
    return lambda inputs: layer(inputs.to(bench.device))


def _replaying(bench: Bench, shape: Shape, layer: Layer) -> Layer:
    """Capture a layer on fixed input tensors. Return a function that copies inputs into them and replays the layer."""
    own = _draw(shape, _LAYERS + 1).to(bench.device)
    for _ in range(2):  # allocates memory for alternating results and compiles kernels
        layer(own)
    held: list[tuple[Tensor, ...]] = []
    if bench.device.type == "cuda":
        replay: Callable[[], object] = capture([lambda: held.append(layer(own))]).replay
    else:

        def replay() -> None:
            held[:] = [layer(own)]

    def run(inputs: CallInputs) -> tuple[Tensor, ...]:
        for part, new in zip(own, inputs, strict=True):
            part.copy_(new)
        replay()
        return held[0]

    return run


def _note(bench: Bench) -> str:
    return "" if bench.device.type == "cuda" else "no graphs in the interpreter: eager"


def _face_layer(face: LowLatencyFace, shape: Shape, inputs: CallInputs) -> tuple[Tensor, ...]:
    """Run one layer. Return received rows (undefined ones zeroed) and the sums, in the memory of the exchange."""
    experts = 2 * shape.experts_per_rank
    received, count_L, handle, _, _ = face.low_latency_dispatch(
        inputs.x_TH, inputs.topk_TK, shape.max_tokens, experts, use_fp8=shape.is_fp8
    )
    values, scales = received if isinstance(received, tuple) else (received, None)
    wide = values.float()
    if scales is not None:
        wide = wide * scales.repeat_interleave(128, -1)[..., : wide.shape[-1]]
    row_N = torch.arange(wide.shape[1], device=wide.device)
    wide = wide.masked_fill((row_N >= count_L[:, None])[..., None], 0.0)
    powers = 2.0 ** (torch.arange(shape.experts_per_rank, device=wide.device) % 3)
    answers = (wide * powers[:, None, None]).to(inputs.x_TH.dtype)
    combined, _, _ = face.low_latency_combine(answers, inputs.topk_TK, inputs.weights_TK, handle)
    return wide, count_L, combined


def _service_layer(
    dispatcher: TokenDispatcher, inputs: CallInputs, *, shape: Shape, mode: Mode, shows_rows: bool = True
) -> tuple[Tensor, ...]:
    """Run one layer of the service. Return offsets and sums, and the pairs' rows if the host may read them."""
    sent = dispatcher.dispatch(inputs.x_TH, inputs.topk_TK, mode)
    is_pair = torch.arange(len(sent.row_P), device=sent.row_P.device) < sent.slot_offsets[-1]
    rows = sent.x_NH[torch.where(is_pair, sent.row_P, 0)]
    pair_P = torch.arange(len(rows), device=rows.device)
    slot_P = torch.searchsorted(sent.slot_offsets[1:].contiguous(), pair_P, right=True)
    answers = rows * (2.0 ** (slot_P % 3)).to(rows.dtype)[:, None]
    combined = dispatcher.combine(answers, inputs.weights_TK, sent)
    if not shows_rows:
        return sent.slot_offsets, combined
    return sent.slot_offsets, rows[: int(sent.slot_offsets[shape.experts_per_rank])], combined


def _equal(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(left.cpu(), right.cpu()) for left, right in zip(ours, theirs, strict=True))


def _draw(shape: Shape, seed: int) -> CallInputs:
    """Draw inputs on the CPU, in bfloat16. A token's choices differ, as a router's do, and a fifth of them is empty."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    T, K = shape.max_tokens, shape.choices
    topk_TK = torch.rand(T, 2 * shape.experts_per_rank, generator=generator).argsort(1)[:, :K].contiguous()
    topk_TK[torch.rand(T, K, generator=generator) < 0.2] = -1
    x_TH = torch.randn(T, shape.hidden, generator=generator).bfloat16()
    return CallInputs(x_TH, topk_TK, torch.rand(T, K, generator=generator))


def _shapes(setting: Setting) -> dict[str, Shape]:
    return _TINY_SHAPES if setting.is_tiny else _SHAPES


def _open_gloo() -> Wire:
    return open_wire("gloo", _world(), timeout_s=WAIT_S)


def _open_blocks(bench: Bench) -> LowLatencyBlocks:
    return LowLatencyBlocks(_memory(bench), 2, num_bytes=1 << 18, timeout_s=WAIT_S)


def _open_wide(bench: Bench, shape: Shape) -> DeviceDispatcher:
    """Open a dispatcher as the service does between GPUs of one host, but without NCCL, which rejects two ranks per device."""
    options: Any = {"slots_per_rank": shape.experts_per_rank, "is_fp8": False}
    return DeviceDispatcher(
        NormalPairs(HostRows(_open_gloo(), bench.device), device=bench.device, **options),
        LowLatencyPairs(_memory(bench), 2, timeout_s=WAIT_S, **options),
        world_size=2, device=bench.device, row_format="as they are", name="pair", reason="it is checked",
    )  # fmt: skip


def _memory(bench: Bench) -> OpenMemory:
    kind = "CUDA" if bench.device.type == "cuda" else "shared"
    return open_memory_for(kind, _world(), bench.device, timeout_s=WAIT_S)


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "the group was made"
    return world
