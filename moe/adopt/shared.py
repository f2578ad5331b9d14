"""Blocks that add the result of shared experts to that of routed ones: the layer of routed experts computes it while rows
travel between ranks, and adds it in the sum of the routed answers, which saves a launch per layer.

Two forms: the sum (DeepSeek-V3, GLM-4.5), and one with a second gate for the shared result (Qwen2-MoE, Qwen3-Next). A
block is recognised by a trial in which a cheap function of all inputs replaces the routed experts, so the trial is local.
Blocks that do anything else keep `transformers`' code.

Legend: T rows, D hidden dim, K choices.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from moe.adopt.adopt import Candidate, SampleRows
from moe.adopt.whole import AnyExperts

_ROWS = 4

Shared = Callable[[Any, Tensor], Tensor]  # a block and rows to rows


def _plain(block: Any, x_TD: Tensor) -> Tensor:
    out_TD: Tensor = block.shared_experts(x_TD)
    return out_TD


def _gated(block: Any, x_TD: Tensor) -> Tensor:
    out_TD: Tensor = functional.sigmoid(block.shared_expert_gate(x_TD)) * block.shared_expert(x_TD)
    return out_TD


# By the submodules that a block must have.
_FORMS: dict[tuple[str, ...], Shared] = {
    ("gate", "experts", "shared_experts"): _plain,
    ("gate", "experts", "shared_expert", "shared_expert_gate"): _gated,
}


class SharedSums:
    """Proposes the sum for blocks with shared experts if their layer can add rows."""

    def __init__(self) -> None:
        self._classes: dict[tuple[type[nn.Module], Shared], type[nn.Module]] = {}

    def __call__(self, module: Any, rows: SampleRows) -> Iterator[Candidate]:
        """Propose the sum for one module."""
        for parts, shared in _FORMS.items():
            found = [getattr(module, part, None) for part in parts]
            layer = getattr(found[1], "expert_layer", None)
            if all(isinstance(part, nn.Module) for part in found) and hasattr(layer, "adds"):
                yield Candidate(
                    own=partial(_on_any_experts, module, type(module).forward),
                    ours=partial(_on_any_experts, module, partial(_run_summed, shared=shared)),
                    arguments=lambda: (rows.draw(1, _ROWS, module.gate.weight.shape[1]),),
                    tolerance=0.0,
                    install=partial(self._install, module, shared),
                )

    def _install(self, module: nn.Module, shared: Shared) -> None:
        own = type(module)
        if (own, shared) not in self._classes:

            def forward(self: Any, hidden_states: Tensor) -> Tensor:
                return _run_summed(self, hidden_states, shared=shared)

            self._classes[own, shared] = type(own.__name__, (own,), {"forward": forward})
        module.__class__ = self._classes[own, shared]


def _run_summed(block: Any, hidden_states: Tensor, *, shared: Shared) -> Tensor:
    """Run a block, and let the layer of routed experts compute and add the shared result."""
    x_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
    _, weights_TK, ids_TK = block.gate(x_TD)
    block.experts.expert_layer.adds = partial(shared, block, x_TD)
    out_TD: Tensor = block.experts(x_TD, ids_TK, weights_TK)
    return out_TD.view(hidden_states.shape)


def _on_any_experts(module: Any, forward: Callable[[Any, Tensor], Any], hidden_states: Tensor) -> Any:
    """Run a block's forward in a trial."""
    layer = module.experts.expert_layer
    module.experts.expert_layer = AnyExperts()
    try:
        return forward(module, hidden_states)
    finally:
        module.experts.expert_layer = layer
