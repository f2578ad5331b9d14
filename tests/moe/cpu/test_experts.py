"""The expert layer against a plain loop over tokens and choices: layouts, gates, biases, empty slots."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.integrations.moe import use_experts_implementation

from dispatch.dispatcher import Dispatcher
from dispatch.wires.open import open_wire
from expert_placement.placement import Placement
from kvcache.step import Span, Step
from moe.backend import serve_experts
from moe.cpu.experts import PackedExpertLayer
from moe.cpu.weights.slots import PackedSlots
from moe.load_counts import LoadCounts
from moe.slot_choice import slot_choices

EXPERTS, HIDDEN, CHOICES = 5, 24, 2
TOLERANCE = {"atol": 2e-5, "rtol": 2e-5}  # sums of up to 40 products, in another order than the library's


class Form(NamedTuple):
    """A kind of experts module."""

    intermediate: int = 32
    activation: str = "silu"
    has_gate: bool = True
    has_bias: bool = False
    is_interleaved: bool = False  # gate0, up0, gate1, up1, ... with the module's own gate function

    @property
    def has_silu(self) -> bool:
        """Return whether the fused kernel has its gate."""
        is_plain = self.has_gate and not self.is_interleaved
        return is_plain and self.activation == "silu" and self.intermediate % 16 == 0


FORMS = {
    "fused gate": Form(),
    "intermediate not a multiple of 16": Form(intermediate=20),
    "gelu": Form(activation="gelu"),
    "no gate": Form(has_gate=False, activation="relu2"),
    "biases": Form(has_bias=True),
    "interleaved with biases": Form(has_bias=True, is_interleaved=True, intermediate=40),
}


def experts_module(form: Form) -> Any:
    """Return a module as `transformers` decorates them, with seeded weights [E, out, in]."""

    class Experts(nn.Module):
        def __init__(self, _config: Any) -> None:
            super().__init__()
            self.act_fn = ACT2FN[form.activation]

        if form.is_interleaved:

            def _apply_gate(self, x: Tensor) -> Tensor:
                gate, up = x[..., ::2], x[..., 1::2]
                return (up.clamp(-7, 7) + 1) * gate * torch.sigmoid(gate * 1.7)

        def forward(self) -> None:
            raise AssertionError("the expert layer must answer instead")

    decorated = use_experts_implementation(has_gate=form.has_gate, has_bias=form.has_bias)(Experts)
    module = decorated(None)
    generator = torch.Generator().manual_seed(0)
    up_dim = form.intermediate * (2 if form.has_gate else 1)
    module.up_EUD = torch.randn(EXPERTS, up_dim, HIDDEN, generator=generator) * 0.3
    module.down_EDI = torch.randn(EXPERTS, HIDDEN, form.intermediate, generator=generator) * 0.3
    module.up_bias_EU = torch.randn(EXPERTS, up_dim, generator=generator)
    module.down_bias_ED = torch.randn(EXPERTS, HIDDEN, generator=generator)
    return module


def layer_of(
    module: Any, form: Form, slot_expert: list[int], dtype: torch.dtype = torch.float32
) -> PackedExpertLayer:
    """Return a layer with all experts in this rank's slots, in the given order; -1 is an empty slot."""
    sides = []
    for weight, bias in ((module.up_EUD, module.up_bias_EU), (module.down_EDI, module.down_bias_ED)):
        own_bias = bias if form.has_bias else [None] * EXPERTS
        slots = PackedSlots.like(weight[0].to(dtype), own_bias[0], len(slot_expert))
        for slot, expert in enumerate(slot_expert):
            if expert >= 0:
                slots.put(slot, weight[expert].to(dtype), own_bias[expert])
        sides.append(slots)
    wire = open_wire("auto", None, timeout_s=10.0, epoch=0)
    step = Step(max_tokens=32, max_sequences=1, max_blocks=2, block_tokens=16)
    choice = slot_choices(Placement(np.array([slot_expert]), EXPERTS, 1), 0)[0]
    dispatcher = Dispatcher(wire, slots_per_rank=len(slot_expert))
    counts = LoadCounts(1, num_experts=EXPERTS, num_ranks=1, slots_per_rank=len(slot_expert)).layers[0]
    return PackedExpertLayer(sides[0], sides[1], choice, EXPERTS, dispatcher, step, form.has_silu, counts)


def counted(layer: PackedExpertLayer) -> list[int]:
    """Return how often each expert was chosen so far."""
    assert layer.counts is not None
    return layer.counts.expert_E.tolist()  # type: ignore[no-any-return]


def run(layer: PackedExpertLayer, module: Any, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Run rows through the layer, padded as in a step. Return the rows without padding."""
    layer.step.fill([Span(0, len(x_TD), range(2))] if len(x_TD) else [])
    padding = layer.step.num_padded - len(x_TD)
    x = torch.cat((x_TD, torch.full((padding, HIDDEN), 3.0)))
    ids = torch.cat((ids_TK, torch.zeros(padding, CHOICES, dtype=torch.int64)))
    weights = torch.cat((weights_TK, torch.ones(padding, CHOICES)))
    module.expert_layer = layer
    out = serve_experts(module, x, ids, weights)
    assert not out[len(x_TD) :].any(), "padding must stay zero"
    return out[: len(x_TD)]


def oracle(module: Any, form: Form, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Compute one token and one choice at a time, in plain torch."""
    out_TD = torch.zeros_like(x_TD)
    for token in range(len(x_TD)):
        for choice in range(CHOICES):
            expert = int(ids_TK[token, choice])
            raised = module.up_EUD[expert] @ x_TD[token]
            if form.has_bias:
                raised = raised + module.up_bias_EU[expert]
            lowered = module._apply_gate(raised) if form.has_gate else module.act_fn(raised)
            result = module.down_EDI[expert] @ lowered
            if form.has_bias:
                result = result + module.down_bias_ED[expert]
            out_TD[token] += weights_TK[token, choice] * result
    return out_TD


def routed(tokens: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Return seeded rows, distinct choices per token, and weights."""
    generator = torch.Generator().manual_seed(seed)
    x_TD = torch.randn(tokens, HIDDEN, generator=generator)
    ids_TK = torch.stack([torch.randperm(EXPERTS, generator=generator)[:CHOICES] for _ in range(tokens)])
    return x_TD, ids_TK, torch.rand(tokens, CHOICES, generator=generator)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_organ_equals_a_loop_over_choices(form: Form) -> None:
    module = experts_module(form)
    layer = layer_of(module, form, [0, 1, 2, 3, 4])
    for tokens in (1, 2, 7, 8, 19):
        rows = routed(tokens)
        torch.testing.assert_close(run(layer, module, *rows), oracle(module, form, *rows), **TOLERANCE)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_row_has_the_same_bits_alone_and_wherever_its_experts_are(form: Form) -> None:
    module = experts_module(form)
    straight, scattered = (
        layer_of(module, form, order) for order in ([0, 1, 2, 3, 4], [-1, 3, 1, -1, 4, 0, 2])
    )
    x, ids, weights = routed(19)
    whole = run(straight, module, x, ids, weights)
    assert torch.equal(run(scattered, module, x, ids, weights), whole)
    for row in range(19):
        alone = run(straight, module, x[row : row + 1], ids[row : row + 1], weights[row : row + 1])
        assert torch.equal(alone[0], whole[row])


def test_one_expert_takes_all() -> None:
    form = FORMS["biases"]
    module = experts_module(form)
    x, _, weights = routed(19)
    ids = torch.tensor([[4, 2]]).expand(19, 2).contiguous()
    ours = run(layer_of(module, form, [0, 1, 2, 3, 4]), module, x, ids, weights)
    torch.testing.assert_close(ours, oracle(module, form, x, ids, weights), **TOLERANCE)


def test_no_tokens_give_padding_only() -> None:
    form = Form()
    module = experts_module(form)
    layer = layer_of(module, form, [0, 1, 2, 3, 4])
    rows = torch.zeros(0, HIDDEN), torch.zeros(0, CHOICES, dtype=torch.int64), torch.zeros(0, CHOICES)
    assert run(layer, module, *rows).shape == (0, HIDDEN)
    assert counted(layer) == [0] * EXPERTS


def test_load_counts_the_choices_of_real_rows() -> None:
    form = Form()
    module = experts_module(form)
    layer = layer_of(module, form, [0, 1, 2, 3, 4])
    for seed in (1, 2):
        run(layer, module, *routed(11, seed))
    both = torch.cat([routed(11, seed)[1] for seed in (1, 2)])
    assert counted(layer) == torch.bincount(both.flatten(), minlength=EXPERTS).tolist()


def test_an_empty_slot_takes_memory_but_is_no_experts_bytes() -> None:
    weight = torch.zeros(20, 24, dtype=torch.bfloat16)
    slots = PackedSlots.like(weight, None, 3)
    assert slots.slot_bytes == 20 * 24 * 2
    assert slots.num_bytes == 3 * 32 * 24 * 2
    assert PackedSlots.like(weight, torch.zeros(20), 3).slot_bytes == 20 * 24 * 2 + 20 * 4


def test_a_slots_memory_is_its_own_so_that_it_can_go_back_to_the_system() -> None:
    slots = PackedSlots.like(torch.randn(20, 24), torch.randn(20), 3)
    for slot in range(3):
        for name, tensor in slots.at(slot).tensors().items():
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size(), name
