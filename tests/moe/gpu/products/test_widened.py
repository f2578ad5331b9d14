"""Products with decoded weights, in Triton's interpreter: the bits of the product that decodes inside, and float64."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.moe.gpu.grouped_cases import E4M3, F16, F32, FORMS, TOLERANCE, Case, Problem
from tests.support.ranks import RankPool

CPU = torch.device("cpu")


def multiply(case: Case, most_bytes: int) -> int:
    """Compare with the grouped product of one tile, and with float64. Return the number of passes."""
    from moe.gpu.products.grouped import grouped_linear  # noqa: PLC0415 - in the interpreter
    from moe.gpu.products.tiles import QUANTISED_DECODE_TILE  # noqa: PLC0415
    from moe.gpu.products.widened import Workspace, multiply_widened, slot_bytes  # noqa: PLC0415

    problem = Problem(case)
    arguments, pairs = problem.arguments(), problem.num_pairs
    workspace = Workspace(CPU, most_bytes)
    assert workspace.takes(arguments["weights"], case.dtype)
    # Whole tiles of inputs, which numpy adds in one order for both.
    common = {"num_pairs": pairs + 3, "tile": QUANTISED_DECODE_TILE._replace(programs=1)}
    ours = [
        multiply_widened(x, workspace=workspace, rows_P=rows, **common, **arguments)[:pairs]
        for x, rows in ((problem.x, problem.rows), (problem.x[problem.rows], None))
    ]
    inside = grouped_linear(problem.x, rows_P=problem.rows, **common, **arguments)[:pairs]
    assert torch.equal(ours[0], ours[1])
    if case.gate == "none":
        assert torch.equal(ours[0], inside)
    else:  # numpy may multiply both halves at once for some formats, and then adds in another order
        torch.testing.assert_close(ours[0], inside)
    tolerance, wanted = TOLERANCE[case.dtype], problem.want()
    torch.testing.assert_close(inside.double(), wanted, atol=tolerance, rtol=tolerance)
    problem.spoil()
    spoiled = multiply_widened(
        problem.x, workspace=workspace, rows_P=problem.rows, **common, **problem.arguments()
    )
    error = (spoiled[:pairs].double() - wanted).abs().max()
    assert error > 10 * tolerance, "the control did not fail"
    assert 0 < workspace.num_bytes <= most_bytes
    size = slot_bytes(arguments["weights"], case.dtype)
    return len(list(workspace.passes(len(case.counts), size)))


FAST = [
    (Case([3, 0, 17, 1], 40, 160, "swiglu_oai", F32, "mxfp4", has_bias=True), 2),
    (Case([2, 0, 3], 40, 192, "none", F32, "nvfp4"), 1),
    (Case([4, 3], 72, 160, "none", F16, "int4, 64, zeros", has_bias=True), 2),
    (Case([3, 2], 40, 144, "silu", F32, "mxfp8"), 1),
]
WIDENED = [name for name, form in FORMS.items() if 0 < form.block < 128]


def check(interpreter: RankPool, case: Case, passes: int) -> None:
    """Give the workspace room for all slots in a number of passes."""
    size = case.N * (1 if case.gate == "none" else 2) * case.K * case.dtype.itemsize
    most_bytes = -(-len(case.counts) // passes) * size
    assert interpreter.run(multiply, case, most_bytes)[0] == passes


@pytest.mark.parametrize(("case", "passes"), FAST, ids=str)
def test_decoding_before_the_product_keeps_the_bits_of_every_row(
    interpreter: RankPool, case: Case, passes: int
) -> None:
    check(interpreter, case, passes)


@pytest.mark.slow
@pytest.mark.parametrize(("gate", "dtype"), [("none", F32), ("none", F16), ("silu", F32)])
@pytest.mark.parametrize("weights", WIDENED)
def test_decoding_before_the_product_keeps_the_bits_in_every_format(
    interpreter: RankPool, weights: str, gate: str, dtype: torch.dtype
) -> None:
    check(interpreter, Case([4, 0, 18, 5, 0], 72, 288, gate, dtype, weights, has_bias=True), 3)


def decode(weights: str) -> tuple[Tensor, Tensor, bool]:
    """Return decoded weights of two slots, the exact ones in the order of the rows, and if a slot without rows kept its memory."""
    from moe.gpu.products.widened import _in_order, widen  # noqa: PLC0415 - in the interpreter

    problem = Problem(Case([2, 0, 3], 72, 160, weights=weights))
    placed: Any = problem.arguments()["weights"]
    out = torch.full((3, 72, 160), torch.nan)
    widen(placed, problem.offsets, problem.places, out)
    wide = torch.stack(
        [placed._replace(row_scales=None).wide(place) for place in problem.places[::2].tolist()]
    )
    ordered = _in_order(wide.flatten(0, 1), placed, None, 1).view_as(wide)
    assert torch.equal(ordered.sort(-1).values, wide.sort(-1).values), "an order of the same values"
    return out[::2], ordered, bool(out[1].isnan().all())


@pytest.mark.parametrize("weights", WIDENED)
def test_decoded_weights_are_exact_in_the_order_of_the_rows_and_only_of_slots_with_rows(
    interpreter: RankPool, weights: str
) -> None:
    decoded, wanted, is_left = interpreter.run(decode, weights)[0]
    assert torch.equal(decoded, wanted) and is_left


def order_some() -> list[Tensor]:
    """Order rows for words of four codes: up to the number of pairs, and all rows of a map."""
    from moe.gpu.products.widened import _in_order  # noqa: PLC0415
    from moe.gpu.weights.formats import DeviceFormat, PlacedWeights  # noqa: PLC0415 - in the interpreter

    weights = PlacedWeights(torch.zeros(1, 8, 32).to(E4M3), DeviceFormat("e4m3", "e8m0", 16))
    x = torch.arange(64.0).view(2, 32)
    return [_in_order(x, weights, offsets, 2) for offsets in (torch.tensor([0, 1, 1]), None)]


def test_rows_are_copied_in_the_order_of_words(interpreter: RankPool) -> None:
    some, whole = interpreter.run(order_some)[0]
    places = torch.arange(32).view(2, 4, 2, 2)  # groups, words, halves, codes
    order = places.permute(0, 3, 1, 2).flatten()
    x = torch.arange(64.0).view(2, 32)
    assert torch.equal(whole, x[:, order]) and torch.equal(some[:1], x[:1, order])


def refusals() -> list[bool]:
    """Return whether a workspace takes: whole groups of words, other scales, plain weights, FP8 rows, half groups, larger
    weights; then whether fewer rows and enough rows pay."""
    from moe.gpu.products.widened import Workspace  # noqa: PLC0415
    from moe.gpu.weights.formats import PLAIN, DeviceFormat, PlacedWeights  # noqa: PLC0415 - in the interpreter

    workspace, four = Workspace(CPU, most_bytes=64 * 256 * 4), torch.zeros(1, 64, 128, dtype=torch.uint8)
    eight = torch.zeros(1, 64, 256).to(E4M3)
    mxfp4 = DeviceFormat("e2m1", "e8m0", 32)
    weights = [
        PlacedWeights(four, mxfp4),
        PlacedWeights(four, DeviceFormat("int4", "float", 128)),
        PlacedWeights(four, DeviceFormat("int4", "float", 256)),
        PlacedWeights(torch.zeros(1, 64, 256), PLAIN),
        PlacedWeights(eight, DeviceFormat("e4m3", "float", 64, fp8_rows=True)),
        PlacedWeights(eight[..., :196], DeviceFormat("e4m3", "e8m0", 32)),
        PlacedWeights(torch.zeros(1, 65, 128, dtype=torch.uint8), mxfp4),
    ]
    taken = [workspace.takes(each, F32) for each in weights]
    least = Workspace(CPU, least_rows=10)
    return [*taken, least.pays(weights[0], F32, 29, 3), least.pays(weights[0], F32, 30, 3)]


def test_only_formats_with_equal_results_and_many_rows_are_decoded_first(interpreter: RankPool) -> None:
    assert interpreter.run(refusals)[0] == [True, *[False] * 6, False, True]


def shares() -> list[list[tuple[int, int]]]:
    from moe.gpu.products.widened import Workspace  # noqa: PLC0415 - in the interpreter

    workspace = Workspace(CPU)
    up, down = 2 * 2880 * 2880 * 2, 2880 * 2880 * 2  # gpt-oss
    cases = (
        (32, up),
        (32, down),
        (9, 4096 * 7168 * 2),
        (12, 4096 * 7168 * 2),
        (13, 100 << 20),
        (3, 300 << 20),
    )
    return [[(each.start, each.stop) for each in workspace.passes(*case)] for case in cases]


def test_passes_are_few_and_even_and_begin_at_even_slots(interpreter: RankPool) -> None:
    found = interpreter.run(shares)[0]
    assert found[:4] == [[(0, 16), (16, 32)], [(0, 32)], [(0, 9)], [(0, 6), (6, 12)]]
    assert found[4:] == [[(0, 5), (5, 10), (10, 13)], [(0, 1), (1, 2), (2, 3)]]
    for passes in found:
        assert all(before[1] == after[0] for before, after in pairwise(passes))


def run_layers() -> tuple[list[tuple[str, ...]], list[int], bool]:
    """Run a layer's step that a graph may hold, one with few rows, a trial of an expert, and one with many rows; then a
    second layer."""
    from moe.gpu.products.widened import Workspace  # noqa: PLC0415 - in the interpreter
    from tests.moe.gpu.test_expert_launches import EXPERTS, HIDDEN, INNER, ROWS, launches, open_layer  # noqa: PLC0415

    workspace = Workspace(CPU, least_rows=2)  # of even loads, which are 12 / 8 below and 24 / 8 above
    layers = [open_layer(torch.zeros(0), torch.zeros(0)) for _ in range(2)]
    for layer in layers:
        layer.workspace = workspace
        for slots, height, K in ((layer.up, 2 * INNER, HIDDEN), (layer.down, HIDDEN, INNER)):
            slots.store.device = CPU
            problem = Problem(Case([1] * EXPERTS, height, K, weights="nvfp4"))
            slots.store.weights = problem.arguments()["weights"]
    kernels: list[tuple[str, ...]] = []
    sizes = []

    def run(layer: Any, choices: int, *, has_fixed_shape: bool = False) -> Tensor:
        layer.step.has_fixed_shape = has_fixed_shape
        ids = torch.arange(ROWS * choices).view(ROWS, choices) % EXPERTS
        with launches() as seen:
            out: Tensor = layer.run(
                SimpleNamespace(), torch.ones(ROWS, HIDDEN), ids, torch.ones(ROWS, choices)
            )
        kernels.append(
            tuple(sorted(name for name in seen.kernels if name in ("widen_tiles", "grouped_rows")))
        )
        sizes.append(workspace.num_bytes)
        return out

    layer = layers[0]
    held = run(layer, 4, has_fixed_shape=True)
    run(layer, 2)
    one: list[Any] = [
        SimpleNamespace(places_S=each.places_S[:1], store=each.store) for each in (layer.up, layer.down)
    ]
    layer.try_out(SimpleNamespace(), *one, torch.ones(100, HIDDEN))
    with launches() as seen:
        layer.launch_tiles()  # what the largest step does not compile
    assert seen.kernels == {"grouped_rows": 2}
    sizes.append(workspace.num_bytes)
    free = run(layer, 4)
    run(layers[1], 4)
    return kernels, sizes, torch.allclose(held, free, atol=1e-5)


def test_only_large_steps_without_a_graph_use_the_workspace_and_all_layers_share_it(
    interpreter: RankPool,
) -> None:
    """The largest step allocates all of it, so the measurement of the largest step counts it."""
    kernels, sizes, is_close = interpreter.run(run_layers)[0]
    inside, before = ("grouped_rows",), ("grouped_rows", "widen_tiles")
    assert kernels == [inside, inside, before, before]
    assert sizes[:3] == [0, 0, 0] and sizes[3] == sizes[4] > 0
    assert is_close
