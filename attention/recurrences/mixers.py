"""Replace the recurrences of `transformers`' mixers with ours, which take a packed batch and keep each sequence's state.

A mixer (gated delta net, KDA, Mamba, Mamba-2, short convolution, lightning attention) projects, convolves and runs a
recurrence, the last two through functions of its modeling module that assume one sequence per batch row. Our functions
replace them by name in the forward of one module instance: a copy of its code looks names up in a separate dictionary, so
other models of the process are not affected. The rest of a mixer is not changed. Modules that read a state but call none
of these functions are rejected (`moe.rehearsal`). Lightning attention (MiniMax-01, 2025) has no such function, so the
whole forward of its modules is replaced.

The arguments of a replaced function become a record. A CPU, a GPU and the rehearsal each run the same four records.

Legend: T rows of the batch, C channels, H heads, K key dim, V value dim, P head dim, N state dim, Z state slots, G groups.
"""

import inspect
import math
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attention.transformers_names import mixer_cache

# Modes of the delta rule: queries times K^-0.5; queries and keys normalised to length one first; neither, with values added whole.
SCALED, UNIT_LENGTH, ADDED = 0, 1, 2
# Options of recurrences for chunking and return values; our kernels choose these themselves.
_WITHOUT_EFFECT = {
    "chunk_size", "initial_state", "initial_states", "output_final_state", "use_associative_scan", "use_mambapy",
}  # fmt: skip
# Attributes that identify lightning attention: silu(qkv), a decay per head, a norm, a gate.
LIGHTNING_PARTS = (
    "slope_rate", "qkv_proj", "act_fn", "norm", "output_gate", "out_proj", "num_attention_heads", "head_dim", "layer_idx",
)  # fmt: skip


class Derived:
    """Values computed from a mixer's weights, for all its calls."""

    def __init__(self, derive: Callable[[], list[Tensor | None]]) -> None:
        """Compute them."""
        self._derive, self.values = derive, derive()

    def refresh(self) -> None:
        """Compute them again after the weights were overwritten, at the same addresses."""
        for value, new in zip(self.values, self._derive(), strict=True):
            if value is not None and new is not None:
                value.copy_(new)


class MixerCall:
    """The running forward of one mixer, with the context that its recurrences need."""

    def __init__(self, layer: int) -> None:
        """`layer` is the mixer's layer in the cache."""
        self.layer = layer
        self.pages: Any = None  # the cache passed to the forward
        self.kept: dict[str, Any] = {}  # values derived from the mixer's weights, for later calls


class Convolution(NamedTuple):
    """Convolve every sequence's channels with the last inputs of that sequence: x [1, C, T], weight [C, taps], bias [C].

    Attributes:
        unknown: Options of the replaced function that the kernels do not support, here and below.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    has_silu: bool = False
    unknown: frozenset[str] = frozenset()


class DeltaRule(NamedTuple):
    """Run the gated delta rule: S = exp(decay) S; S += k (rate (v - k S)); out = q S. If ADDED, S += k (rate v).

    Attributes:
        query, key: [1, T, key heads, K]. value: [1, T, H, V].
        decay: [1, T, H], or [1, T, H, K]. rate: [1, T, H].
        mode: SCALED, UNIT_LENGTH or ADDED.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    rate: Tensor
    mode: int
    unknown: frozenset[str] = frozenset()

    @property
    def x(self) -> Tensor:
        """The output has its shape."""
        return self.value

    @property
    def state(self) -> tuple[int, ...]:
        """Shape of a sequence's state: [H, K, V]."""
        return self.value.shape[2], self.key.shape[3], self.value.shape[3]


class HeadScan(NamedTuple):
    """Run Mamba-2's scan: S = exp(dt rate) S + dt write x; out = read S + skip x.

    Attributes:
        x: [1, T, H, P]. dt: [1, T, H]. rate_H, skip_H, bias_H: the bias is added to dt.
        write, read: [1, T, G, N].
        limits: Smallest and largest dt.
    """

    x: Tensor
    dt: Tensor
    rate_H: Tensor
    write: Tensor
    read: Tensor
    skip_H: Tensor | None = None
    bias_H: Tensor | None = None
    has_softplus: bool = False
    limits: tuple[float, float] = (0.0, math.inf)
    unknown: frozenset[str] = frozenset()

    @property
    def state(self) -> tuple[int, ...]:
        """Shape of a sequence's state: [H, N, P]."""
        return self.x.shape[2], self.write.shape[3], self.x.shape[3]


class ChannelScan(NamedTuple):
    """Run Mamba's selective scan: S = exp(dt rate) S + dt write x; out = (read S + skip x) silu(gate).

    Attributes:
        x, dt, gate: [1, C, T]. rate_CN, skip_C, bias_C: the bias is added to dt.
        write, read: [1, N, T].
    """

    x: Tensor
    dt: Tensor
    rate_CN: Tensor
    write: Tensor
    read: Tensor
    skip_C: Tensor | None = None
    gate: Tensor | None = None
    bias_C: Tensor | None = None
    has_softplus: bool = False
    unknown: frozenset[str] = frozenset()

    @property
    def state(self) -> tuple[int, ...]:
        """Shape of a sequence's state: [N, C]."""
        return self.rate_CN.shape[1], self.rate_CN.shape[0]


# Runs a record. Returns an output of the shape of `x` with finite rows of padding (zeros on CPU), and leaves the states in
# the cache's `states`, [Z, *record.state].
Recurrence = Callable[[MixerCall, Any], Tensor]
Recurrences = Mapping[type, Recurrence]


def floats_of(*vectors: Tensor | None) -> list[Tensor | None]:
    """Return float32 forms of vectors with contiguous values."""
    return [None if each is None else each.float().contiguous() for each in vectors]


def taps_of(call: MixerCall, convolution: Convolution) -> list[Any]:
    """Return the weight [taps, C] and the bias [C] of a mixer's convolution in float32. Converts them once."""
    if "taps" not in call.kept:
        call.kept["taps"] = Derived(partial(floats_of, convolution.weight.t(), convolution.bias))
    kept: list[Any] = call.kept["taps"].values
    return kept


def decaying_sum(query: Tensor, key: Tensor, value: Tensor, slope_H: Tensor) -> DeltaRule:
    """Return lightning attention's recurrence, S = exp(-slope) S + k v; out = q S, as a delta rule."""
    decay = (-slope_H.float()).expand(key.shape[:3]).contiguous()
    return DeltaRule(query, key, value, decay, torch.ones_like(decay), ADDED)


# The replaced functions: each has the arguments and the results of `transformers`' own, after the first two.


def _convolve(
    run: Recurrences, call: MixerCall, hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None,
    activation: str | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    if activation not in (None, "silu", "swish"):
        options[f"activation={activation}"] = True
    convolution = Convolution(hidden_states, weight, bias, activation is not None, _unknown(options))
    return run[Convolution](call, convolution)


def _delta_rule(
    run: Recurrences, call: MixerCall, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    mode = UNIT_LENGTH if use_qk_l2norm_in_kernel else SCALED
    out = run[DeltaRule](call, DeltaRule(query, key, value, g, beta, mode, _unknown(options)))
    return out, call.pages.states[call.layer]


def _scan_heads(
    run: Recurrences, call: MixerCall, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
    D: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf), return_final_states: bool = False, **options: Any,
) -> Any:  # fmt: skip
    scan = HeadScan(hidden_states, dt, A, B, C, D, dt_bias, dt_softplus, dt_limit, _unknown(options))
    out = run[HeadScan](call, scan)
    return (out, call.pages.states[call.layer]) if return_final_states else out


def _scan_channels(
    run: Recurrences, call: MixerCall, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
    D: Tensor | None = None, z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False,
    return_last_state: bool = False, **options: Any,
) -> Any:  # fmt: skip
    scan = ChannelScan(hidden_states, dt, A, B, C, D, z, delta_bias, delta_softplus, _unknown(options))
    out = run[ChannelScan](call, scan)
    return (out, call.pages.states[call.layer]) if return_last_state else out


# By their names in modeling modules.
REPLACED: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolve,
    "chunk_gated_delta_rule": _delta_rule,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kda": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba_chunk_scan_combined": _scan_heads,
    "mamba2_chunk_scan": _scan_heads,
    "selective_scan_fn": _scan_channels,
    "mamba_selective_scan": _scan_channels,
}


def _unknown(options: dict[str, Any]) -> frozenset[str]:
    return frozenset(
        name for name, option in options.items() if option is not None and name not in _WITHOUT_EFFECT
    )


def exchange(net: nn.Module, recurrences: Recurrences) -> int:
    """Make every mixer run other recurrences. Return the number of changed mixers.

    Args:
        recurrences: Recurrences by the record that they run.
    """
    found = 0
    for module in lightning_modules(net):
        module.forward = _lightning(module, recurrences[DeltaRule])
        found += 1
    for module in net.modules():
        forward = inspect.unwrap(type(module).forward)
        code = getattr(forward, "__code__", None)
        names = REPLACED.keys() & set(code.co_names) if code is not None else set()
        if names and isinstance(forward, FunctionType) and hasattr(module, "layer_idx"):
            module.forward = _bound(module, forward, names, recurrences)
            found += 1
    return found


def lightning_modules(net: nn.Module) -> list[Any]:
    """Return the modules of lightning attention. A model with any of them checks its cache's class, unless it runs without a cache."""
    return [module for module in net.modules() if all(hasattr(module, name) for name in LIGHTNING_PARTS)]


def _lightning(module: Any, run_rule: Recurrence) -> Callable[..., Any]:
    call, own = MixerCall(int(module.layer_idx)), weakref.ref(module)

    def run(hidden_states: Tensor, *_inputs: Any, **options: Any) -> tuple[Tensor, None]:
        layer: Any = own()
        call.pages = mixer_cache(options)
        heads, dim = int(layer.num_attention_heads), int(layer.head_dim)
        rows = layer.act_fn(layer.qkv_proj(hidden_states))
        query, key, value = rows.view(*rows.shape[:2], heads, 3 * dim).split(dim, 3)
        mixed = run_rule(call, decaying_sum(query, key, value, layer.slope_rate.view(heads)))
        gates = torch.sigmoid(layer.output_gate(hidden_states))
        return layer.out_proj(gates * layer.norm(mixed.reshape(*rows.shape[:2], heads * dim))), None

    return run


def _bound(
    module: Any, forward: FunctionType, names: set[str], recurrences: Recurrences
) -> Callable[..., Any]:
    call = MixerCall(int(module.layer_idx))

    def replacing(name: str) -> Callable[..., Any]:
        replaced = partial(REPLACED[name], recurrences, call)
        known = set(inspect.signature(forward.__globals__[name]).parameters)

        def run(*inputs: Any, **options: Any) -> Any:  # drops options that are unknown to the original
            return replaced(*inputs, **{key: option for key, option in options.items() if key in known})

        return run

    ours = {name: replacing(name) for name in names}
    own = FunctionType(
        forward.__code__, {**forward.__globals__, **ours}, forward.__name__, forward.__defaults__, forward.__closure__
    )  # fmt: skip
    own.__kwdefaults__ = forward.__kwdefaults__

    def run(*inputs: Any, **options: Any) -> Any:
        call.pages = mixer_cache(options)
        return own(module, *inputs, **options)

    return run
