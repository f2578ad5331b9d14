"""A proposed replacement of a module is adopted only if it returns what the module returns."""

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from moe.adopt.adopt import Candidate, SampleRows, adopt
from moe.adopt.gates import Gate, apply, arranged, gate_of, gelu_tanh, silu, swiglu_oai
from tests.support.models.families import make_model
from tests.support.ranks import RankPool

ROWS = SampleRows(torch.float32, torch.device("cpu"))


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def candidate(module: nn.Module, ours: Callable[[Tensor], Tensor], tolerance: float = 0.0) -> Candidate:
    return Candidate(
        own=module.forward,
        ours=ours,
        arguments=lambda: (ROWS.draw(3, 4),),
        tolerance=tolerance,
        install=partial(setattr, module, "forward", ours),
    )


def is_adopted(ours: Callable[[Tensor], Tensor], tolerance: float = 0.0) -> bool:
    module = Doubling()

    def proposal(each: nn.Module, _rows: SampleRows) -> Iterator[Candidate]:
        yield candidate(each, ours, tolerance)

    count = adopt([module], (proposal,), ROWS)["proposal"]
    assert (module.forward is ours) == bool(count)
    return bool(count)


@pytest.mark.parametrize(
    ("ours", "tolerance", "agrees"),
    [
        (lambda x: x + x, 0.0, True),
        (lambda x: x * 2.0001, 0.0, False),
        (lambda x: x * 2.0001, 1e-3, True),
        (lambda x: (x + x).double(), 1e-3, False),  # another type
        (lambda x: (x + x)[:2], 1e-3, False),  # another shape
        (lambda x: (x + x, x), 1e-3, False),  # an additional result
        (lambda x: x.mul_(2), 0.0, True),  # written in place: each side has its own rows
    ],
)
def test_a_candidate_takes_a_modules_place_where_it_gives_the_same(
    ours: Callable[[Tensor], Tensor], tolerance: float, agrees: bool
) -> None:
    assert is_adopted(ours, tolerance) == agrees


def test_a_module_that_wants_other_arguments_keeps_its_own() -> None:
    class Wanting(Doubling):
        def forward(self, x: Tensor, more: Tensor) -> Tensor:  # type: ignore[override]
            return x + more

    module = Wanting()
    assert not adopt([module], (lambda each, _rows: iter([candidate(each, torch.sin)]),), ROWS)
    assert "forward" not in vars(module)


def test_the_first_candidate_that_agrees_is_taken_and_a_kind_is_tried_once() -> None:
    tried: list[str] = []

    def ours(name: str, factor: float, x: Tensor) -> Tensor:
        tried.append(name)
        return x * factor

    def proposals(module: nn.Module, _rows: SampleRows) -> Iterator[Candidate]:
        for name, factor in (("wrong", 3.0), ("right", 2.0), ("late", 2.0)):
            yield candidate(module, partial(ours, name, factor))._replace(kind=name)

    assert adopt([Doubling(), Doubling()], (proposals,), ROWS)["proposals"] == 2
    assert tried == ["wrong", "right"]


def module(gate: Any, *, has_gate: bool = True) -> SimpleNamespace:
    return SimpleNamespace(has_gate=has_gate, _apply_gate=gate, act_fn=torch.relu)


def by_halves(x: Tensor) -> Tensor:
    return silu(*x.chunk(2, dim=-1))


def in_turn(x: Tensor) -> Tensor:
    return swiglu_oai(x[..., ::2], x[..., 1::2])


def other_limit(x: Tensor) -> Tensor:
    return swiglu_oai(x[..., ::2].clamp(max=5.0), x[..., 1::2])


@pytest.mark.parametrize(
    ("gate", "found"),
    [
        (by_halves, Gate("silu")),
        (in_turn, Gate("swiglu_oai", True)),
        (lambda x: silu(x[..., ::2], x[..., 1::2]), Gate("silu", True)),
        (lambda x: torch.nn.functional.gelu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], Gate("gelu")),
        (lambda x: gelu_tanh(*x.chunk(2, -1)), Gate("gelu_tanh")),
        (lambda x: torch.relu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], Gate("none")),
        (other_limit, Gate("none")),
        (lambda x: silu(*reversed(x.chunk(2, -1))), Gate("none")),
    ],
)
def test_the_gate_is_the_one_that_gives_the_modules_values(gate: Any, found: Gate) -> None:
    assert gate_of(module(gate)) == found


def test_a_module_without_a_gate_has_none() -> None:
    plain = module(None, has_gate=False)
    assert gate_of(plain) == Gate("none")
    assert apply(plain, torch.tensor([[-1.0, 2.0]])).tolist() == [[0.0, 2.0]]


def test_rows_of_a_gate_in_turn_are_put_one_after_the_other() -> None:
    rows = torch.arange(6)[:, None]
    assert arranged(rows, Gate("swiglu_oai", True)).flatten().tolist() == [0, 2, 4, 1, 3, 5]
    assert arranged(rows, Gate("silu")) is rows
    assert arranged(rows, Gate("none", True)) is rows


class PlainRMSNorm(nn.Module):
    """As in Llama."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16) + 0.5)
        self.variance_epsilon = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


class OffsetRMSNorm(PlainRMSNorm):
    """As in Gemma."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (1 + self.weight) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


class CentredRMSNorm(PlainRMSNorm):
    """Not an RMSNorm despite its name."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))


def exchange_norms() -> tuple[int, list[bool], float]:
    """Exchange the norms of a small model. Return how many, which, and the deviation of an exchanged one."""
    from moe.adopt.adopt import SampleRows, adopt  # noqa: PLC0415 - in the interpreter
    from moe.adopt.norms import Norms  # noqa: PLC0415
    from moe.gpu.norm import rms_norm  # noqa: PLC0415

    torch.manual_seed(0)
    net = nn.ModuleList(
        [PlainRMSNorm(1e-2), OffsetRMSNorm(), CentredRMSNorm(), nn.LayerNorm(16), nn.Linear(16, 4)]
    )
    x = torch.randn(1, 3, 2, 16).transpose(1, 2)
    wanted = [net[index](x) for index in range(2)]
    count = adopt(net.modules(), (Norms(rms_norm),), SampleRows(torch.float32, torch.device("cpu")))["Norms"]
    exchanged = ["forward" in vars(module) for module in net]
    return count, exchanged, max(float((net[index](x) - own).abs().max()) for index, own in enumerate(wanted))


def test_only_norms_that_the_kernel_computes_are_exchanged(interpreter: RankPool) -> None:
    count, exchanged, difference = interpreter.run(exchange_norms)[0]
    assert count == 2 and exchanged == [True, True, False, False, False]
    assert difference < 1e-5


class Rotated(NamedTuple):
    """Number of exchanged modules, number of layers, and change of the logits."""

    exchanged: int
    layers: int
    difference: float
    is_file_untouched: bool


def exchange_rotary(family: str) -> Rotated:
    from moe.adopt.adopt import SampleRows, adopt  # noqa: PLC0415 - in the interpreter
    from moe.adopt.rotary import rotary  # noqa: PLC0415

    model = make_model(family)
    file = importlib.import_module(type(model).__module__)
    before = file.apply_rotary_pos_emb
    tokens = torch.randint(3, 200, (1, 3), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        wanted = model(tokens).logits
        exchanged = adopt(model.modules(), (rotary,), SampleRows(torch.float32, torch.device("cpu")))[
            "rotary"
        ]
        found = model(tokens).logits
    untouched = file.apply_rotary_pos_emb is before
    return Rotated(exchanged, len(model.model.layers), float((found - wanted).abs().max()), untouched)


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_moe",
        pytest.param("glm4_moe", marks=pytest.mark.slow),  # rotates half of each head
        pytest.param("gpt_oss", marks=pytest.mark.slow),  # its angles cover half of a head
        pytest.param("deepseek_v3", marks=pytest.mark.slow),  # calls one of two functions
        pytest.param("ernie4_5_moe", marks=pytest.mark.slow),  # rotates neighbours
    ],
)
def test_modules_that_rotate_as_the_kernel_does_use_it(family: str, interpreter: RankPool) -> None:
    found: Rotated = interpreter.run(exchange_rotary, family)[0]
    assert found.exchanged == found.layers
    assert found.difference < 1e-5 and found.is_file_untouched
