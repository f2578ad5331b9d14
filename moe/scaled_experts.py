"""Experts outside `transformers`' experts interface. They are put behind it if a trial shows the same results.

Some experts only lack the interface (Step-3.5 and 3.7, 2026): `gate_up_proj` and `down_proj`, a gate, weighted outputs.
Others scale their inputs by the routing weights instead of their outputs (Llama 4, 2025).

Llama 4's blocks multiply every row by its score for every expert (0 if not chosen), run all experts on all rows, and add.
Nothing is dispatched, and `transformers` has no interface for it. An exchanged block scales each row once per choice and
calls the experts interface with a weight of 1. Experts without biases map 0 to 0, so the sum is the same. Before a block
is exchanged, a trial with a small twin of it verifies this.
Rejected: sending weights to the experts with the rows, for one family; its published models choose one expert.

Legend: T rows, D hidden dim, E experts, K choices, I intermediate dim.
"""

import copy
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

_SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_local_experts": 5}  # sizes of the twin
_TRIED_ROWS = 7
_TOLERANCE = 1e-5
_PLAIN = "batched_mm"  # takes the place of the experts organ in the trial
# Errors of a block that takes other sizes or returns something else.
_FOREIGN_ERRORS = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)


def use_experts(model: PreTrainedModel, name: str) -> None:
    """Let a model's experts be computed by the function registered as `name`."""
    model.set_experts_implementation(name)
    for block in blocks(model):
        block.experts.implementation = name


def blocks(model: nn.Module) -> list[Any]:
    """Return the exchanged blocks."""
    return [
        module
        for module in model.modules()
        if isinstance(getattr(module, "experts", None), nn.Module)
        and hasattr(module.experts, "implementation")
    ]


def exchange(model: PreTrainedModel) -> None:
    """Put experts outside the experts interface behind it, if a trial shows the same results."""
    for experts in [each for block in model.modules() if (each := _plain_experts(block)) is not None]:
        if _is_plain(experts):
            _put_behind(experts, _PlainExperts)
    verdicts: dict[type[nn.Module], bool] = {}
    for module in [module for module in model.modules() if _may_scale(module)]:
        kind = type(module)
        if kind not in verdicts:
            verdicts[kind] = _scales(kind, model.config.get_text_config(decoder=True))
        if verdicts[kind]:
            _exchange(module)


def _plain_experts(block: nn.Module) -> Any:
    """Return a block's experts if they have the weights of the interface but lack the interface, otherwise None."""
    experts = getattr(block, "experts", None)
    if (
        not isinstance(experts, nn.Module)
        or hasattr(experts, "is_concatenated")
        or not hasattr(experts, "_apply_gate")
    ):
        return None
    held = {name: tensor.dim() for name, tensor in experts.named_parameters()}
    return experts if held == {"gate_up_proj": 3, "down_proj": 3} and not [*experts.named_buffers()] else None


@torch.no_grad()
def _is_plain(experts: Any) -> bool:
    """Return whether a small twin gives the same results behind the interface as alone; on the CPU."""
    num_experts, dim, inner = 5, 16, 8
    generator = torch.Generator().manual_seed(0)
    twin = copy.copy(experts)
    twin._parameters = {
        "gate_up_proj": nn.Parameter(torch.randn(num_experts, 2 * inner, dim, generator=generator) * 2),
        "down_proj": nn.Parameter(torch.randn(num_experts, dim, inner, generator=generator)),
    }
    twin.num_experts = num_experts
    x_TD = torch.randn(_TRIED_ROWS, dim, generator=generator)
    ids_TK = torch.rand(_TRIED_ROWS, num_experts, generator=generator).topk(2).indices
    weights_TK = torch.rand(_TRIED_ROWS, 2, generator=generator)
    try:
        wanted = twin(x_TD, ids_TK, weights_TK).clone()
        _put_behind(twin, _PlainExperts)
        found = twin(x_TD, ids_TK, weights_TK)
    except _FOREIGN_ERRORS:
        return False
    return found.shape == wanted.shape and torch.allclose(found, wanted, rtol=_TOLERANCE, atol=_TOLERANCE)


def _put_behind(experts: Any, interface: type[nn.Module]) -> None:
    own = type(experts)
    experts.__class__ = type(own.__name__, (interface, own), {})
    experts.implementation = _PLAIN


def _may_scale(module: Any) -> bool:
    experts = getattr(module, "experts", None)
    held = {name for name, _ in experts.named_parameters()} if isinstance(experts, nn.Module) else set()
    parts = {name for name, _ in module.named_children()}
    return (
        held == {"gate_up_proj", "down_proj"}
        and not hasattr(experts, "is_concatenated")
        and parts == {"experts", "router", "shared_expert"}
    )


@torch.no_grad()
def _scales(kind: Any, config: Any) -> bool:
    """Return whether a small twin gives the same results exchanged as before; on the CPU."""
    small = copy.deepcopy(config)
    for name, size in _SMALL.items():
        setattr(small, name, size)
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.device("cpu"):
            twin = kind(small).float()
        for parameter in twin.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        x_TD = torch.randn(1, _TRIED_ROWS, small.hidden_size, generator=generator)
        wanted = twin(x_TD)[0].clone()
        _exchange(twin)
        twin.experts.implementation = _PLAIN
        found = twin(x_TD)[0]
    except _FOREIGN_ERRORS:
        return False
    return found.shape == wanted.shape and torch.allclose(found, wanted, rtol=_TOLERANCE, atol=_TOLERANCE)


def _exchange(block: Any) -> None:
    _put_behind(block.experts, _ScaledExperts)
    this = ref(block)

    def forward(hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        module: Any = this()
        x_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores_TE, logits_TE = module.router(x_TD)
        ids_TK = logits_TE.topk(module.top_k, dim=1).indices
        scores_TK = scores_TE.gather(1, ids_TK)
        ones_T1 = torch.ones_like(scores_TK[:, :1])
        out_TD = module.shared_expert(x_TD)
        for choice in range(module.top_k):
            here = slice(choice, choice + 1)
            out_TD = out_TD + module.experts(x_TD * scores_TK[:, here], ids_TK[:, here], ones_T1)
        return out_TD, logits_TE

    block.forward = forward


class _PlainExperts(nn.Module):
    """The experts interface for weights [E, 2 * I, D] (all gates, then all ups) and [E, D, I]."""

    has_gate = is_concatenated = True
    is_transposed = has_bias = has_post_expert_norm = _is_expert_parallel = False
    implementation: str

    def forward(self, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        run = ALL_EXPERTS_FUNCTIONS[self.implementation]
        out_TD: Tensor = run(self, hidden_TD, ids_TK, weights_TK)
        return out_TD


class _ScaledExperts(_PlainExperts):
    """The same for weights [E, D, 2 * I] and [E, I, D], and experts without their own gate function."""

    is_transposed = True
    act_fn: Any

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        gated: Tensor = self.act_fn(gate) * up
        return gated
