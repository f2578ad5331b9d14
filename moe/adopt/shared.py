"""Blocks that add the result of shared experts to that of routed ones (DeepSeek-V3, GLM-4.5): the sum of the routed answers
adds it, which saves a launch per layer.

A block is recognised by a trial in which a cheap function of all inputs replaces the routed experts, so the trial is local.
Blocks that scale or gate the shared result keep `transformers`' code.

Legend: T rows, D hidden dim, K choices.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from moe.adopt.adopt import Candidate, SampleRows

_ROWS = 4
_PARTS = ("gate", "experts", "shared_experts")


class _AnyExperts:
    """Replaces a layer of experts in a trial."""

    added_TD: Tensor | None = None

    def run(self, module: Any, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Scale each row by a sum over its choices and weights, and add what a layer would add."""
        share_T1 = (weights_TK.float() * (ids_TK + 1)).sum(-1, keepdim=True) / int(module.num_experts)
        routed_TD = (hidden_TD * share_T1).to(hidden_TD.dtype)
        return routed_TD if self.added_TD is None else routed_TD + self.added_TD


class SharedSums:
    """Proposes the sum for blocks with shared experts if their layer has `added_TD`."""

    def __init__(self) -> None:
        self._classes: dict[type[nn.Module], type[nn.Module]] = {}

    def __call__(self, module: Any, rows: SampleRows) -> Iterator[Candidate]:
        """Propose the sum for one module."""
        parts = [getattr(module, part, None) for part in _PARTS]
        layer = getattr(parts[1], "expert_layer", None)
        if not all(isinstance(part, nn.Module) for part in parts) or not hasattr(layer, "added_TD"):
            return
        yield Candidate(
            own=partial(_on_any_experts, module, type(module).forward),
            ours=partial(_on_any_experts, module, _run_summed),
            arguments=lambda: (rows.draw(1, _ROWS, module.gate.weight.shape[1]),),
            tolerance=0.0,
            install=partial(self._install, module),
        )

    def _install(self, module: nn.Module) -> None:
        own = type(module)
        if own not in self._classes:
            self._classes[own] = type(own.__name__, (own,), {"forward": _run_summed})
        module.__class__ = self._classes[own]


def _run_summed(self: Any, hidden_states: Tensor) -> Tensor:
    """Run a block. The shared experts come first, because the layer adds their result to its own."""
    x_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
    _, weights_TK, ids_TK = self.gate(x_TD)
    self.experts.expert_layer.added_TD = self.shared_experts(x_TD)
    out_TD: Tensor = self.experts(x_TD, ids_TK, weights_TK)
    return out_TD.view(hidden_states.shape)


def _on_any_experts(module: Any, forward: Callable[[Any, Tensor], Any], hidden_states: Tensor) -> Any:
    """Run a block's forward in a trial."""
    layer = module.experts.expert_layer
    module.experts.expert_layer = _AnyExperts()
    try:
        return forward(module, hidden_states)
    finally:
        module.experts.expert_layer = layer
