"""Replace the recurrences of `transformers`' mixers with ours, which take a packed batch and keep each sequence's state.

A mixer (gated delta net, KDA, Mamba, Mamba-2, short convolution, lightning attention) projects, convolves and runs a
recurrence, the last two through functions of its modeling module that assume one sequence per batch row. Our functions
replace them by name in the forward of one module instance: a copy of its code looks names up in a separate dictionary, so
other models of the process are not affected. The rest of a mixer is not changed. Modules that read a state but call none
of these functions are rejected (`moe.rehearsal`). Lightning attention (MiniMax-01, 2025) has no such function, so the
whole forward of its modules is replaced.
"""

import inspect
import weakref
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from attention.transformers_names import mixer_cache

# Names of these functions in modeling modules, by kind.
CONVOLUTION, DELTA, MAMBA2, MAMBA, LIGHTNING = "convolution", "delta", "mamba2", "mamba", "lightning"
KIND_OF_NAME = {
    "causal_conv1d_fn": CONVOLUTION,
    "chunk_gated_delta_rule": DELTA,
    "torch_chunk_gated_delta_rule": DELTA,
    "chunk_kda": DELTA,
    "chunk_kimi_delta_attention": DELTA,
    "mamba_chunk_scan_combined": MAMBA2,
    "mamba2_chunk_scan": MAMBA2,
    "selective_scan_fn": MAMBA,
    "mamba_selective_scan": MAMBA,
}
# Attributes that identify lightning attention: silu(qkv), a decay per head, a norm, a gate.
LIGHTNING_PARTS = (
    "slope_rate", "qkv_proj", "act_fn", "norm", "output_gate", "out_proj", "num_attention_heads", "head_dim", "layer_idx",
)  # fmt: skip


class MixerCall:
    """The running forward of one mixer, with the context that its recurrences need."""

    def __init__(self, layer: int) -> None:
        """`layer` is the mixer's layer in the cache."""
        self.layer = layer
        self.pages: Any = None  # the cache passed to the forward
        self.kept: dict[str, Any] = {}  # values derived from the mixer's weights, for later calls


Recurrence = Callable[..., Any]  # (call, arguments of the replaced function)


def exchange(net: nn.Module, recurrences: Mapping[str, Recurrence]) -> int:
    """Make every mixer run other recurrences. Return the number of changed mixers.

    Args:
        recurrences: Recurrences by kind.
    """
    found = 0
    for module in lightning_modules(net):
        module.forward = _lightning(module, recurrences[LIGHTNING])
        found += 1
    for module in net.modules():
        forward = inspect.unwrap(type(module).forward)
        code = getattr(forward, "__code__", None)
        names = set(code.co_names) & set(KIND_OF_NAME) if code is not None else set()
        if names and isinstance(forward, FunctionType) and hasattr(module, "layer_idx"):
            module.forward = _bound(
                module, forward, {name: recurrences[KIND_OF_NAME[name]] for name in names}
            )
            found += 1
    return found


def lightning_modules(net: nn.Module) -> list[Any]:
    """Return the modules of lightning attention. A model with any of them checks its cache's class, unless told to use none."""
    return [module for module in net.modules() if all(hasattr(module, name) for name in LIGHTNING_PARTS)]


def _lightning(module: Any, recurrence: Recurrence) -> Callable[..., Any]:
    call, own = MixerCall(int(module.layer_idx)), weakref.ref(module)

    def run(hidden_states: Tensor, *_inputs: Any, **options: Any) -> tuple[Tensor, None]:
        layer: Any = own()
        call.pages = mixer_cache(options)
        heads, dim = int(layer.num_attention_heads), int(layer.head_dim)
        rows = layer.act_fn(layer.qkv_proj(hidden_states))
        query, key, value = rows.view(*rows.shape[:2], heads, 3 * dim).split(dim, 3)
        mixed = recurrence(call, query, key, value, layer.slope_rate.view(heads))
        gates = torch.sigmoid(layer.output_gate(hidden_states))
        return layer.out_proj(gates * layer.norm(mixed.reshape(*rows.shape[:2], heads * dim))), None

    return run


def _bound(module: Any, forward: FunctionType, recurrences: Mapping[str, Recurrence]) -> Callable[..., Any]:
    call = MixerCall(int(module.layer_idx))

    def calling(name: str, recurrence: Recurrence) -> Callable[..., Any]:
        known = set(inspect.signature(forward.__globals__[name]).parameters)

        def run(*inputs: Any, **options: Any) -> Any:  # drops options that are unknown to the original
            return recurrence(
                call, *inputs, **{key: option for key, option in options.items() if key in known}
            )

        return run

    ours = {name: calling(name, recurrence) for name, recurrence in recurrences.items()}
    own = FunctionType(
        forward.__code__, {**forward.__globals__, **ours}, forward.__name__, forward.__defaults__, forward.__closure__
    )  # fmt: skip
    own.__kwdefaults__ = forward.__kwdefaults__

    def run(*inputs: Any, **options: Any) -> Any:
        call.pages = mixer_cache(options)
        return own(module, *inputs, **options)

    return run
