"""Products in FP8 in Triton's interpreter, against float64 with rows quantised by plain torch."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from moe.load.quantised_weight import QuantisedWeight
from tests.fixtures import OnDevice
from tests.moe.gpu.grouped_cases import BF16, E4M3, F32, Case, Problem, make_weights
from tests.support.gpu.path import build_interpreted, mixed_steps, run_steps
from tests.support.models.families import VOCABULARY
from tests.support.models.quantise import FP8_KEPT, write_quantised
from tests.support.ranks import RankPool

LENGTHS = (19, 8)  # of the sequences

TOLERANCE = 1e-4
HALF_STEP = 2.0**-4 * 1.001  # of e4m3's normal numbers, relative
HALF_SUBNORMAL = 2.0**-10 * 1.001


def quantised(x_TK: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Quantise rows in plain torch. Return their values in float64 and the scales. Both are on the CPU.

    On a GPU, torch divides a tensor by a number as a product with the rounded reciprocal.
    """
    T, K = x_TK.shape
    groups = torch.nn.functional.pad(x_TK.float().cpu(), (0, -K % group)).view(T, -1, group)
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=2.0**-100) / torch.tensor(448.0)
    codes = (groups / scales).to(E4M3)
    return (codes.double() * scales.double()).view(T, -1)[:, :K], scales.squeeze(-1)


class Fp8Problem(Problem):
    """A case with quantised rows."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        values, _ = quantised(self.x, 128 if case.weights == "fp8" else case.K)
        self._wide_PK = values[self.rows]

    def arguments(self) -> dict[str, Any]:
        found = super().arguments()
        weights = found["weights"]
        return {**found, "weights": weights._replace(format=weights.format._replace(fp8_rows=True))}


# Largest magnitude, a value halfway between two codes, and the magnitude of its code. Factors instead of divisions give others.
HALFWAY = [(196.0, 175.0, 384.0), (138.0, 103.5, 320.0), (138.0, -51.75, 160.0)]


def quantise(device: str, dtype: torch.dtype) -> None:
    """Quantise rows with zeros, subnormals, outliers and short groups; check every bit."""
    from moe.gpu.products import fp8  # noqa: PLC0415 - in the interpreter
    from moe.gpu.weights.formats import DeviceFormat, PlacedWeights  # noqa: PLC0415

    torch.manual_seed(1)
    for K in (72, 200, 256):
        for block, group in ((128, 128), (K, K)):
            x = (
                torch.randn(5 + len(HALFWAY), K)
                * torch.tensor([1.0, 0.0, 1e-3, 300.0, 1.0, 1.0, 1.0, 1.0])[:, None]
            ).to(dtype)
            x[4, ::3] *= 1e4
            x[5:, :2] = torch.tensor([each[:2] for each in HALFWAY], dtype=dtype)
            form = DeviceFormat("e4m3", "float", block, 1, fp8_rows=True)
            weights = PlacedWeights(torch.zeros(1, 16, K).to(E4M3), form)
            rows = fp8.quantise_rows(x.to(device), weights)
            codes, found = rows.codes.double().cpu(), rows.scales.cpu()
            values, scales = quantised(x, group if block < K else K)
            assert torch.equal(found, scales)
            each = scales.double().repeat_interleave(128 if block < K else K, 1)[:, :K]
            assert torch.equal(codes * each, values)
            assert codes[5:, 1].abs().tolist() == [each[2] for each in HALFWAY]
            assert rows.dtype is dtype
    assert len(fp8.quantise_rows(x[:0].to(device), weights).codes) == 0


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_rows_are_quantised_as_in_torch(on_device: OnDevice, dtype: torch.dtype) -> None:
    on_device(quantise, dtype)


def multiply(case: Case, rows_per_slot: int) -> None:
    """Rows without a map have the same bits, nothing is written after the last pair, and a changed scale is detected."""
    from moe.gpu.products import fp8  # noqa: PLC0415 - in the interpreter

    problem = Fp8Problem(case)
    arguments = problem.arguments()
    weights, gate, biases = (arguments.pop(name) for name in ("weights", "gate", "biases_WN"))
    tile = fp8.choose_tile(rows_per_slot, weights, gate)
    rows = fp8.quantise_rows(problem.x, weights)
    out = torch.full((problem.num_pairs + 3, case.N), 7.0, dtype=case.dtype)

    def run(rows: Any = rows, rows_P: Tensor | None = problem.rows) -> Tensor:
        fp8.launch(
            rows, weights, arguments["slot_offsets"], arguments["places_S"], out, None, tile=tile,
            expected=problem.num_pairs, rows_P=rows_P, gate=gate, biases_WN=biases,
        )  # fmt: skip
        return out[: problem.num_pairs].double()

    found = run()
    torch.testing.assert_close(found, problem.want(), atol=TOLERANCE, rtol=TOLERANCE)
    assert (out[problem.num_pairs :] == 7.0).all()
    assert torch.equal(run(fp8.quantise_rows(problem.x[problem.rows], weights), None), found)
    problem.spoil()
    assert (run() - problem.want()).abs().max() > 10 * TOLERANCE, "the control did not fail"


FAST = [(Case([5, 0, 2], 128, 256, "silu", F32, "fp8"), 0), (Case([3, 1], 200, 208, "none", F32, "fp8"), 100)]
SLOW = [
    (Case([3, 0, 17, 1], 80, 200, "none", F32, "fp8", has_bias=True), 0),
    (Case([0, 70, 0], 192, 256, "silu", F32, "fp8"), 40),
    (Case([3, 66], 300, 256, "none", F32, "fp8"), 40),
    (Case([130, 0, 2], 128, 208, "silu", F32, "fp8", has_bias=True), 100),
    (Case([130, 2], 256, 128, "silu", F32, "fp8"), 100),
    (Case([130, 2], 136, 128, "silu", F32, "fp8", has_bias=True), 100),
    (Case([130, 2], 520, 256, "none", F32, "fp8", has_bias=True), 100),
    (Case([3, 1], 136, 208, "silu", F32, "fp8, rows"), 100),
    (Case([3, 1], 136, 200, "none", F32, "fp8"), 100),
    (Case([3, 1], 136, 200, "silu", F32, "fp8, rows"), 0),
    (Case([3, 18], 72, 256, "none", F32, "fp8, rows", has_bias=True), 100),
]


@pytest.mark.parametrize(
    ("case", "rows_per_slot"),
    [*FAST, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)],
    ids=str,
)
def test_quantised_rows_meet_their_slots_weight(
    interpreter: RankPool, case: Case, rows_per_slot: int
) -> None:
    interpreter.run(multiply, case, rows_per_slot)


def feed(weights: str) -> None:
    """Apply gate and up, then down: the rows in between are quantised by the first product, or before the second."""
    from moe.gpu.products import fp8  # noqa: PLC0415 - in the interpreter
    from moe.gpu.weights.formats import DeviceFormat, PlacedWeights  # noqa: PLC0415

    case = Case([5, 0, 2], 192, 256, "silu", F32, weights)
    problem = Fp8Problem(case)
    made = make_weights(5, 200, case._replace(K=192))
    assert made.form is not None
    down = PlacedWeights(format=DeviceFormat(*made.form, fp8_rows=True), **made.stored)
    run = {name: problem.arguments()[name] for name in ("slot_offsets", "places_S")}
    inputs = {**problem.arguments(), "num_pairs": problem.num_pairs, "rows_P": problem.rows}
    raised = fp8.multiply_rows(problem.x, feeds=down, **inputs)
    lowered = fp8.multiply_rows(raised, down, num_pairs=problem.num_pairs, **run)
    assert isinstance(lowered, Tensor)
    want_PN, group = problem.want(), 128 if weights == "fp8" else 192
    if weights == "fp8":
        assert isinstance(raised, fp8.QuantisedRows)
        scales = raised.scales.double()
        _, wanted_scales = quantised(want_PN.float(), 128)
        torch.testing.assert_close(scales, wanted_scales.double(), atol=0, rtol=1e-5)
        each = scales.repeat_interleave(128, 1)[:, :192]
        between = raised.codes.double() * each
        assert ((between - want_PN).abs() <= want_PN.abs() * HALF_STEP + each * HALF_SUBNORMAL + 1e-6).all()
    else:
        assert isinstance(raised, Tensor)
        between, _ = quantised(raised, group)
    for slot, place in enumerate(problem.places.tolist()):
        rows = slice(int(problem.offsets[slot]), int(problem.offsets[slot + 1]))
        want = between[rows] @ made.wide[place].T
        torch.testing.assert_close(lowered[rows].double(), want, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("weights", ["fp8", "fp8, rows"])
def test_the_first_product_quantises_the_rows_of_the_second(interpreter: RankPool, weights: str) -> None:
    interpreter.run(feed, weights)


def compare_rows() -> None:
    """A row has the same bits alone and among others, with the tile of batch invariance."""
    from moe.gpu.products import fp8, tiles  # noqa: PLC0415 - in the interpreter

    problem = Fp8Problem(Case([2, 19], 64, 256, "none", F32, "fp8"))
    arguments = {**problem.arguments(), "tile": tiles.QUANTISED_DECODE_TILE}
    whole = fp8.multiply_rows(problem.x, num_pairs=problem.num_pairs, rows_P=problem.rows, **arguments)
    for pair in (2, problem.num_pairs - 1):
        alone = fp8.multiply_rows(
            problem.x[problem.rows[pair : pair + 1]], num_pairs=1, **{**arguments, "slot_offsets": torch.tensor([0, 0, 1])}
        )  # fmt: skip
        assert torch.equal(alone[0], whole[pair])
    plain = super(Fp8Problem, problem).arguments()
    same = fp8.multiply_rows(problem.x, num_pairs=problem.num_pairs, rows_P=problem.rows, **plain)
    assert isinstance(same, Tensor) and isinstance(whole, Tensor)
    error = (same - whole).norm() / same.norm()
    assert 1e-3 < error < 0.05, "rows were not quantised, or far off"


def test_a_row_is_the_same_alone_and_in_a_crowd(interpreter: RankPool) -> None:
    interpreter.run(compare_rows)


def refusals() -> list[str]:
    from moe.gpu.products import fp8  # noqa: PLC0415 - in the interpreter

    problem = Fp8Problem(Case([2], 64, 256, "silu", F32, "fp8"))
    weights = problem.arguments()["weights"]
    rows, out = fp8.quantise_rows(problem.x, weights), torch.empty(2, 64)
    tile, flow = fp8.choose_tile(0, weights, "silu"), fp8.Fp8FlowTile(128, 128, 2, 8, 8, 4)
    short = weights._replace(codes=weights.codes[:, :, :200].contiguous())
    short_rows = fp8.quantise_rows(problem.x[:, :200].contiguous(), short)
    found = []
    for changed in (
        {"rows": rows._replace(scales=rows.scales[:, :1])},
        {"tile": flow._replace(halves=1)},
        {"tile": tile._replace(columns=64), "out_scales": torch.empty(2, 1)},
        {"weights": weights._replace(format=weights.format._replace(scale="e8m0"))},
        {"tile": flow, "weights": short, "rows": short_rows},
        {"tile": flow},
    ):
        given = {"rows": rows, "weights": weights, "tile": tile, "out_scales": None, **changed}
        with pytest.raises(ValueError) as caught:
            fp8.launch(
                slot_offsets=problem.offsets,
                places_S=problem.places,
                out=out,
                expected=2,
                gate="silu",
                **given,
            )
        found.append(str(caught.value))
    return found


def test_what_the_kernel_cannot_multiply_is_refused(interpreter: RankPool) -> None:
    found = interpreter.run(refusals)[0]
    assert "the weights need 256 columns and scales [2, 2]" in found[0]
    assert "with a gate it needs 2" in found[1]
    assert "a quantised output needs 128" in found[2]
    assert "e4m3 weights with e8m0 scales for 128 inputs" in found[3]
    assert "the weights have 200 inputs, which do not begin at multiples of 16 bytes" in found[4]
    assert (
        "the weights have 64 outputs with a scale for 128 and 128 inputs; the kernel needs whole blocks of 128"
        in found[5]
    )


def multiply_as_module(fp8_rows: bool) -> tuple[float, float]:
    """Return the deviation of a linear layer from its quantised and from its plain rows."""
    from moe.gpu.device_weight import DeviceWeight, OneGroup  # noqa: PLC0415 - in the interpreter

    case = Case([1], 144, 256, weights="fp8")
    stored = {name: part[0] for name, part in make_weights(1, 144, case).stored.items()}
    stored["scales"] = stored["scales"].repeat_interleave(128, 0)[:144].contiguous()
    weight = QuantisedWeight(kind="e4m3", block=128, fp8_rows=True, **stored)
    device = torch.device("cpu")
    held = DeviceWeight(weight, OneGroup(device, is_invariant=False, fp8_rows=fp8_rows), F32, device)
    x = torch.randn(1, 3, 256)
    found, plain = torch.nn.functional.linear(x, held)[0].double(), weight.dequantised().double()
    values, _ = quantised(x[0], 128)
    return float((found - values @ plain.T).abs().max()), float((found - x[0].double() @ plain.T).abs().max())


def test_a_linear_layer_quantises_its_rows_only_on_request(interpreter: RankPool) -> None:
    of_quantised, of_plain = interpreter.run(multiply_as_module, True)[0]
    assert of_quantised < TOLERANCE < 1e-3 < of_plain
    of_quantised, of_plain = interpreter.run(multiply_as_module, False)[0]
    assert of_plain < TOLERANCE < 1e-3 < of_quantised


def answer(directory: Path, sequences: list[list[int]], **settings: Any) -> list[np.ndarray]:
    """Return the logits of sequences, run in mixed steps."""
    built = build_interpreted(directory, **settings)
    layers: Any = built.model.layers
    layers[0].launch_tiles()
    return run_steps(built, sequences, mixed_steps(LENGTHS))


def emulated(oracle: PreTrainedModel, sequence: list[int], monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Return the logits of the oracle with rows quantised before every FP8 weight."""
    plain = torch.nn.functional.linear
    kept = {
        weight.untyped_storage().data_ptr()
        for name, weight in oracle.named_parameters()
        if name.removesuffix(".weight").rpartition(".")[2] in FP8_KEPT
    }

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.untyped_storage().data_ptr() in kept:
            return plain(x, weight, bias)
        values, _ = quantised(x.reshape(-1, x.shape[-1]), 128)
        return plain(values.float().view(x.shape), weight, bias)

    with monkeypatch.context() as patch, torch.inference_mode():
        patch.setattr(torch.nn.functional, "linear", linear)
        logits: np.ndarray = oracle(torch.tensor([sequence])).logits[0].numpy()
    return logits


@pytest.mark.slow
def test_whole_models_answer_like_the_emulation(
    interpreter: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not to the bit: a last digit decides how a value is rounded. Rows that are not quantised are much further away."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 2}
    oracle = write_quantised("qwen3_moe", tmp_path, block=(128, 128), **sizes)
    generator = torch.Generator().manual_seed(5)
    sequences = [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in LENGTHS]
    found = interpreter.run(partial(answer, activation_dtype="fp8"), tmp_path, sequences, timeout_s=500.0)[0]
    for ours, sequence in zip(found, sequences, strict=True):
        wanted = emulated(oracle, sequence, monkeypatch)
        with torch.inference_mode():
            plain = oracle(torch.tensor([sequence])).logits[0].numpy()
        assert np.linalg.norm(ours - wanted) < 0.3 * np.linalg.norm(plain - wanted)
        assert np.linalg.norm(plain - wanted) > 1e-2 * np.linalg.norm(plain), "rows were not quantised"
