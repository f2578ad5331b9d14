"""Ways to exchange the tokens of one MoE layer, as run by each rank and timed by `benchmarks.dispatch`.

DeepSeek-V3's MoE layer scaled down: hidden 7168 / 7, 256 experts / 4, top-8 unchanged, uniform routing. Rows are float32, as
in the service on CPU; experts are the identity. Every way is checked against the sum computed without an exchange.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dispatch import layout
from dispatch.dispatcher import Dispatcher
from dispatch.fp8 import dequantise_fp8, quantise_fp8
from dispatch.mode import NORMAL, Mode, fitting_capacity, low_latency
from dispatch.row_formats import row_format
from dispatch.wires.open import open_wire
from dispatch.wires.wire import RankTable, Wire

HIDDEN, CHOICES, EXPERTS = 1024, 8, 64  # K is 8 unless set on the command line
SCALE = "DeepSeek-V3 with hidden 7168 / 7 = 1024, experts 256 / 4 = 64, top-8; float32 rows"
WIRES = ("shm", "gloo")
BLOCK = 10  # runs of one way before the next has its turn
CEILING_BYTES = 2 << 20  # per pair
CEILING_RUNS = 7
Times = tuple[float, float]  # seconds to the experts and back


class Layer(NamedTuple):
    """Input of one rank."""

    x_TH: Tensor
    slots_TK: Tensor
    weights_TK: Tensor


class MeasuredWay(NamedTuple):
    """Measurements of one rank."""

    seconds: dict[str, list[Times]]  # every run, by way
    sent_bytes: dict[str, tuple[int, int]]  # per layer to other ranks: dispatch, combine
    ceiling: dict[str, float]  # largest bytes per second that a rank sends, by wire


def measure(tokens: int, choices: int, runs: int) -> MeasuredWay:
    """Time every way on this rank, taking turns in blocks; the first block is the warm-up. Collective."""
    torch.manual_seed(dist.get_rank())
    layer = make_layer(tokens, choices)
    ways: dict[str, Callable[[], Times]] = {}
    sent_bytes: dict[str, tuple[int, int]] = {}
    ceiling: dict[str, float] = {}
    opened: list[Dispatcher] = []
    for name in WIRES:
        for kind, mode, rows in (
            ("normal", NORMAL, "auto"),
            ("low_latency", low_latency(fitting_capacity(tokens)), "auto"),
            ("fp8", NORMAL, "fp8"),
        ):
            dispatcher = open_dispatcher(name, rows)
            opened.append(dispatcher)
            check_layer(dispatcher, layer, mode)
            sent = dispatcher.traffic
            sent_bytes[f"{name} {kind}"] = (sent.dispatch_bytes, sent.combine_bytes)
            ways[f"{name} {kind}"] = lambda d=dispatcher, m=mode: time_layer(d, layer, m)  # type: ignore[misc]
        gathering = open_dispatcher(name, "auto")
        opened.append(gathering)
        ways[f"{name} all_gather"] = all_gather_floor(gathering, layer)
        ceiling[name] = measure_ceiling(gathering.wire)
    ways["plain"], sent_bytes["plain"] = plain_exchange(opened[0], layer)
    seconds: dict[str, list[Times]] = {name: [] for name in ways}
    for block in range(1 + -(-runs // BLOCK)):
        for name, way in ways.items():
            times = [way() for _ in range(BLOCK)]
            if block:
                seconds[name] += times
    for dispatcher in opened:
        dispatcher.close()
    return MeasuredWay(seconds, sent_bytes, ceiling)


def make_layer(tokens: int, choices: int = CHOICES) -> Layer:
    """Draw rows and distinct choices from torch's generator."""
    slots_TK = torch.stack([torch.randperm(EXPERTS)[:choices] for _ in range(tokens)])
    return Layer(torch.randn(tokens, HIDDEN), slots_TK, torch.rand(tokens, choices))


def open_dispatcher(name: str, rows: str) -> Dispatcher:
    """Open a dispatcher over all ranks."""
    wire = open_wire(name, dist.group.WORLD)
    return Dispatcher(wire, slots_per_rank=EXPERTS // wire.world_size, rows=row_format(rows))


def time_layer(dispatcher: Dispatcher, layer: Layer, mode: Mode) -> Times:
    """Return the seconds of one dispatch and of one combine, without the experts."""
    begin = time.perf_counter()
    dispatched = dispatcher.dispatch(layer.x_TH, layer.slots_TK, mode)
    middle = time.perf_counter()
    y_PH = dispatched.x_NH[dispatched.row_P]
    resumed = time.perf_counter()
    dispatcher.combine(y_PH, layer.weights_TK, dispatched)
    return middle - begin, time.perf_counter() - resumed


def check_layer(dispatcher: Dispatcher, layer: Layer, mode: Mode) -> None:
    """Compare with the sum computed without an exchange, bit for bit."""
    dispatched = dispatcher.dispatch(layer.x_TH, layer.slots_TK, mode)
    combined = dispatcher.combine(dispatched.x_NH[dispatched.row_P], layer.weights_TK, dispatched)
    is_fp8 = dispatcher.row_format != row_format("auto").name
    x_TH = dequantise_fp8(*quantise_fp8(layer.x_TH), torch.float32) if is_fp8 else layer.x_TH
    token_TK = torch.arange(len(x_TH)).unsqueeze(1).expand_as(layer.slots_TK)
    want = layout.sum_answers(x_TH, token_TK, layer.weights_TK, torch.float32)
    assert torch.equal(combined, want), f"{dispatcher.wire.name}, {mode}: wrong sums"


def all_gather_floor(dispatcher: Dispatcher, layer: Layer) -> Callable[[], Times]:
    """Return a function that times the least cost of a mode that sends every token to every rank.

    Rows and slots are copied in, exchanged, and all rows are copied out. Not included: finding the pairs, and dropping
    rows for other ranks. The usual combine follows, so that caches are as cold as in the other ways.
    """
    wire, dispatched = dispatcher.wire, dispatcher.dispatch(layer.x_TH, layer.slots_TK)
    slots, x = (tensor.view(-1).view(torch.uint8) for tensor in (layer.slots_TK, layer.x_TH))
    sizes = _equal_sizes(wire, len(slots) + len(x))
    peers = [peer for peer in range(wire.world_size) if peer != wire.rank]

    def time_floor() -> Times:
        begin = time.perf_counter()
        wire.open_windows(sizes)
        for peer in peers:
            window = wire.send_window(peer)
            window[: len(slots)] = slots
            window[len(slots) :] = x
        wire.exchange(sizes, sizes)
        torch.cat([x, *(wire.received(peer) for peer in peers)])
        middle = time.perf_counter()
        y_PH = dispatched.x_NH[dispatched.row_P]
        resumed = time.perf_counter()
        dispatcher.combine(y_PH, layer.weights_TK, dispatched)
        return middle - begin, time.perf_counter() - resumed

    return time_floor


def measure_ceiling(wire: Wire) -> float:
    """Return the bytes per second that a rank sends in the largest exchange: copied in, exchanged, copied out."""
    sizes = _equal_sizes(wire, CEILING_BYTES)
    source = torch.ones(CEILING_BYTES, dtype=torch.uint8)
    peers = [peer for peer in range(wire.world_size) if peer != wire.rank]
    target = torch.empty(len(peers), CEILING_BYTES, dtype=torch.uint8)
    times = []
    for _ in range(CEILING_RUNS):
        begin = time.perf_counter()
        wire.open_windows(sizes)
        for peer in peers:
            wire.send_window(peer).copy_(source)
        wire.exchange(sizes, sizes)
        for index, peer in enumerate(peers):
            target[index].copy_(wire.received(peer))
        times.append(time.perf_counter() - begin)
    return len(peers) * CEILING_BYTES / min(times)


def _equal_sizes(wire: Wire, num_bytes: int) -> RankTable:
    sizes = RankTable(wire.world_size)
    sizes.values[:] = num_bytes
    sizes.values[wire.rank] = 0
    return sizes


def plain_exchange(dispatcher: Dispatcher, layer: Layer) -> tuple[Callable[[], Times], tuple[int, int]]:
    """Return a function that times all_to_all_single (gloo) with the rows of dispatch, then of combine; and their bytes.

    Sizes are known in advance, unlike those of a dispatch, and rows are ready to send. Between the two calls the experts'
    rows are gathered as in the other ways, so that caches are as cold.
    """
    group, rank = dist.group.WORLD, dist.get_rank()
    dispatched = dispatcher.dispatch(layer.x_TH, layer.slots_TK)
    route = layout.route(layer.slots_TK, EXPERTS // dist.get_world_size(), dist.get_world_size())
    sends = [counts.clone().index_fill_(0, torch.tensor(rank), 0) for counts in route[2:]]
    receives = [torch.empty_like(counts) for counts in sends]
    for sent, received in zip(sends, receives, strict=True):
        dist.all_to_all_single(received, sent, group=group)
    receives[1], sends[1] = sends[1], receives[1]  # answers travel in the opposite direction
    splits = [(sent.tolist(), received.tolist()) for sent, received in zip(sends, receives, strict=True)]
    buffers = [(torch.zeros(sum(s), HIDDEN), torch.zeros(sum(r), HIDDEN)) for s, r in splits]

    def exchange(index: int) -> float:
        (sent, received), (outgoing, incoming) = splits[index], buffers[index]
        begin = time.perf_counter()
        dist.all_to_all_single(incoming, outgoing, received, sent, group=group)
        return time.perf_counter() - begin

    def time_both() -> Times:
        to_experts = exchange(0)
        _ = dispatched.x_NH[dispatched.row_P]
        return to_experts, exchange(1)

    return time_both, (buffers[0][0].nbytes, buffers[1][0].nbytes)
