"""The expert side of a layer on one rank: its number of launches, its result, and that it reads no rows back."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu
from torch.utils._python_dispatch import TorchDispatchMode

from expert_placement.choose import ReplicaChoice
from expert_placement.placement import linear_placement
from moe.slot_choice import SlotChoice
from tests.moe.adopt.test_routers import kind_of_router
from tests.support.ranks import RankPool

EXPERTS, HIDDEN, INNER, ROWS, CHOICES, DECODES = 8, 16, 32, 6, 2, 2  # of the routers' class: 8, 16 and 2
CPU = torch.device("cpu")
# From the router's product to the layer's result: choice, order with counts, two grouped products, sum.
FEW = Counter(choose_experts=1, order_few=1, grouped_rows=2, sum_pairs=1)
MANY = FEW - Counter(order_few=1) + Counter(count_chunks=1, add_chunks=1, place_chunks=1)
FREE = ("empty", "new_empty", "view", "slice", "select", "alias", "detach", "t", "transpose", "_unsafe_view")


class Seen(NamedTuple):
    """What the router and the experts of a step did."""

    kernels: Counter[str]
    operators: list[str]  # other launches
    difference: float  # of the result from a plain one
    counts: Tensor
    has_sample: bool


class Launches(TorchDispatchMode):
    """Records kernels, and torch operators outside of them that are launches on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.operators: list[str] = []
        self.is_inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").partition(".")[0]
        if not self.is_inside and name not in FREE:
            self.operators.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def launches() -> Iterator[Launches]:
    from triton.runtime.interpreter import InterpretedFunction  # noqa: PLC0415 - in the interpreter

    run, seen = InterpretedFunction.run, Launches()

    def recorded(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        seen.kernels[kernel.fn.__name__] += 1
        seen.is_inside = True
        try:
            return run(kernel, *args, **kwargs)
        finally:
            seen.is_inside = False

    InterpretedFunction.run = recorded
    try:
        with seen:
            yield seen
    finally:
        InterpretedFunction.run = run


def open_layer(up: Tensor, down: Tensor) -> Any:
    """Open a layer of one rank with a step of prompts. Its last row is padding."""
    from dispatch.gpu.open import open_gpu_dispatcher  # noqa: PLC0415 - in the interpreter
    from moe.adopt.gates import Gate  # noqa: PLC0415
    from moe.gpu.choose import DeviceLoadCounts  # noqa: PLC0415
    from moe.gpu.experts import DeviceExpertLayer  # noqa: PLC0415
    from moe.gpu.weights.formats import PLAIN, PlacedWeights  # noqa: PLC0415

    cache_slots = torch.arange(ROWS)
    cache_slots[-1] = -1
    placed = SimpleNamespace(cache_slot_P=cache_slots, num_decodes_1=torch.tensor([DECODES]))
    step: Any = SimpleNamespace(
        device=CPU, is_decode_only=False, has_fixed_shape=False, num_tokens=ROWS - 1, on_device=placed
    )
    slots: list[Any] = [
        SimpleNamespace(
            places_S=torch.arange(EXPERTS, dtype=torch.int32),
            store=SimpleNamespace(weights=PlacedWeights.of({"": weight}, PLAIN), bias=None),
        )
        for weight in (up, down)
    ]
    choice = SlotChoice(ReplicaChoice(linear_placement(1, EXPERTS, 1), 0), 0)
    dispatcher = open_gpu_dispatcher("auto", None, device=CPU, slots_per_rank=EXPERTS)
    layer = DeviceExpertLayer(
        slots[0], slots[1], choice, EXPERTS, dispatcher, step, gate=Gate("silu"), dtype=torch.float32
    )
    counts = DeviceLoadCounts(1, num_experts=EXPERTS, num_ranks=1, slots_per_rank=EXPERTS, device=CPU)
    layer.counts = counts.layers[0]
    return layer


def run_step(most: int) -> Seen:
    """Run a router and its layer. More choices than `most` take three launches to order."""
    from dispatch.gpu.kernels import ordering  # noqa: PLC0415 - in the interpreter
    from moe.adopt.adopt import SampleRows, adopt  # noqa: PLC0415
    from moe.adopt.routers import Routers  # noqa: PLC0415
    from moe.gpu.routing import route  # noqa: PLC0415

    torch.manual_seed(0)
    up, down = torch.randn(EXPERTS, 2 * INNER, HIDDEN) / 4, torch.randn(EXPERTS, HIDDEN, INNER) / 6
    layer, net = open_layer(up, down), torch.nn.ModuleList([kind_of_router()()])
    assert adopt(net.modules(), (Routers(route),), SampleRows(torch.float32, CPU))["Routers"] == 1
    module, x = SimpleNamespace(), torch.randn(ROWS, HIDDEN)
    kept, ordering.MOST_AT_ONCE = ordering.MOST_AT_ONCE, most
    with torch.no_grad():
        layer.run(module, x, *reversed(net[0](x)[1:]))  # makes memory
        layer.counts.device_table.zero_()
        with launches() as seen:
            _, weights, ids = net[0](x)
            out = layer.run(module, x, ids, weights)
    ordering.MOST_AT_ONCE = kept
    want = torch.zeros(ROWS, HIDDEN)
    for row in range(ROWS - 1):
        for weight, expert in zip(weights[row], ids[row], strict=True):
            gate, raised = (up[expert] @ x[row]).chunk(2)
            want[row] += weight * (down[expert] @ (silu(gate) * raised))
    counts = torch.stack(
        [torch.bincount(part.flatten(), minlength=EXPERTS) for part in (ids[DECODES:-1], ids[:DECODES])]
    )
    assert torch.equal(layer.counts.device_table, torch.cat((counts, counts.sum(1)[:, None]), 1))
    difference = float((out - want).abs().max())
    return Seen(seen.kernels, seen.operators, difference, counts, layer.sample_TD is not None)


@pytest.mark.parametrize(("most", "kernels"), [(4096, FEW), (0, MANY)], ids=["few choices", "many"])
def test_a_step_on_one_rank_needs_few_launches_and_reads_nothing_back(
    most: int, kernels: Counter[str], interpreter: RankPool
) -> None:
    seen: Seen = interpreter.run(run_step, most)[0]
    assert seen.kernels == kernels
    assert len(seen.operators) == 1 and seen.operators[0] in ("mm", "addmm"), "only the router's product"
    assert seen.difference < 1e-4 and not seen.has_sample
    assert seen.counts.sum(1).tolist() == [(ROWS - 1 - DECODES) * CHOICES, DECODES * CHOICES]


def keep_rows() -> tuple[list[bool], int, bool]:
    """Return which steps without eager prompts kept rows, how many others do, and whether these are the first."""
    layer = open_layer(torch.zeros(EXPERTS, 2 * INNER, HIDDEN), torch.zeros(EXPERTS, HIDDEN, INNER))
    layer.dispatcher, served = SimpleNamespace(world_size=2), torch.randn(12, HIDDEN)
    kept = []
    for is_decode_only, has_fixed_shape in ((True, False), (True, True), (False, True)):
        layer.step = SimpleNamespace(
            is_decode_only=is_decode_only, has_fixed_shape=has_fixed_shape, num_tokens=11
        )
        layer._keep_sample(served)
        kept.append(layer.sample_TD is not None)
    layer.step.has_fixed_shape = False
    layer._keep_sample(served)
    return kept, len(layer.sample_TD), torch.equal(layer.sample_TD, served[: len(layer.sample_TD)])


def test_with_several_ranks_experts_that_arrive_are_tried_with_rows_that_were_served(
    interpreter: RankPool,
) -> None:
    assert interpreter.run(keep_rows)[0] == ([False, False, False], 8, True)


def warm_a_model_up() -> bool:
    """Return whether a warm-up leaves its rows for trials."""
    from kvcache.gpu.step import DeviceStep  # noqa: PLC0415 - in the interpreter
    from moe.gpu.backend import GpuDevice, warm_up  # noqa: PLC0415

    step = DeviceStep(max_tokens=16, max_sequences=2, max_blocks=2, block_tokens=16, device=CPU)
    layer = SimpleNamespace(sample_TD=None)

    def forward(*_args: Any) -> None:
        layer.sample_TD = torch.ones(1, HIDDEN)

    counts = SimpleNamespace(clear=lambda: None)
    model: Any = SimpleNamespace(
        step=step, forward=forward, layers=[layer], load_counts=counts, num_mtp_layers=0
    )
    warm_up(GpuDevice(device=CPU, dtype=torch.float32), model, SimpleNamespace(num_blocks=2))  # type: ignore[arg-type]
    return layer.sample_TD is not None


def test_rows_of_the_warm_up_are_not_kept(interpreter: RankPool) -> None:
    assert not interpreter.run(warm_a_model_up)[0]
