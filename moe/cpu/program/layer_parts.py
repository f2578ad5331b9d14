"""What a program needs of a decoder layer's modules: weights in panels, norms, a router's rule.

A layer has these parts if its modules have the usual names and shapes of `transformers`. A later trial shows whether it
computes with them what a program computes (`moe.cpu.adopt_layers`). All shapes are checked here, because programs
only have addresses.

Legend: H query heads, D head dim of queries and keys, G KV heads, V value dim, E experts, I intermediate dim.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attention.cpu.latents import AbsorbedWeight
from attention.cpu.tiles import LANES
from kvcache.paged_cache import LayerShape
from moe.adopt.norms import epsilon, weight_of
from moe.adopt.routers import correction
from moe.cpu.kernels.panels import Format, format_of
from moe.cpu.weights.packed_weight import PackedWeight
from moe.lora.tables import FactorTable
from moe.routing import Routing


class Norm(NamedTuple):
    """An RMSNorm."""

    weight: Tensor  # float32
    eps: float


class Adapted(NamedTuple):
    """The adapters of one of the weights that a matrix joins."""

    begin: int  # its first output
    num: int  # its outputs
    table: FactorTable


class Matrix(NamedTuple):
    """A weight in panels, or several with the same inputs."""

    panels: Tensor
    scales: Tensor | None
    format: Format
    adapted: tuple[Adapted, ...] = ()  # empty if the model takes no adapters


class Attention(NamedTuple):
    """Multi-head attention: queries, keys and values of heads, and the output projection."""

    layer: int
    heads: int
    kv_heads: int
    qkv: Matrix  # [H * D + G * D + G * V, hidden]
    qkv_bias: Tensor | None
    output: Matrix
    output_bias: Tensor | None
    query_norm: Norm | None  # per head
    key_norm: Norm | None
    sinks_H: Tensor | None
    scale: float
    # Queries are [query | gate] of each head; the attention's output is multiplied by sigmoid(gate).
    has_gate: bool


class DeltaNet(NamedTuple):
    """A gated delta net: queries, keys, values and gates, and rates of decay (fading) and update (following) of states."""

    layer: int
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    first: Matrix  # [q + k + v + gate, hidden]
    # Reorders its rows to [q | k | v | gate], see `cpu_delta_net.ORDER`. None keeps the order.
    order: np.ndarray | None
    rates: Sequence[Matrix]  # of fading and following, or one for both
    rates_at: tuple[np.ndarray, np.ndarray]  # indexes of heads' values in them
    factors_H: Tensor  # for fading
    biases_H: Tensor
    taps_KC: Tensor  # of the convolution
    norm: Norm
    output: Matrix
    output_bias: Tensor | None


class Latents(NamedTuple):
    """Multi-head latent attention: queries, one latent and one rotary key for all heads, and the output projection."""

    layer: int
    heads: int
    # [Q + L + E, hidden]: queries or the values that `query` turns into them; then latent and rotary key.
    first: Matrix
    query_dim: int  # Q
    query_norm: Norm | None  # before `query`; None if `first` gives the queries
    query: Matrix | None  # [H * (U + E), Q]
    latent_norm: Norm
    absorbed: AbsorbedWeight
    rotary_dim: int  # E
    is_interleaved: bool
    output: Matrix
    output_bias: Tensor | None
    scale: float


class Mlp(NamedTuple):
    """down(silu(gate(x)) * up(x)), times sigmoid(share(x)) if there is such a weight."""

    gate_up: Matrix  # [2 * I, hidden], like the experts of one slot
    down: Matrix
    addresses: np.ndarray  # [2, 1] int64: addresses of `gate_up`'s panels and scales
    share: Matrix | None  # [1, hidden]


class Chooser(NamedTuple):
    """A router: its product and its rule for choosing experts."""

    weight: Matrix  # [E, hidden]
    bias: Tensor | None  # of the product
    correction_E: Tensor | None
    rule: Routing


class LayerParts(NamedTuple):
    """A decoder layer: `h = x + attention(norm(x)); h + feed_forward(norm(h))`."""

    hidden: int
    input_norm: Norm
    attention: Attention | Latents | DeltaNet
    post_norm: Norm
    router: Chooser | None  # None: the layer is dense
    experts: Any  # module next to the router
    mlp: Mlp | None  # the feed-forward of a dense layer, or the shared expert


class _UnfitError(Exception):
    """The layer has other parts."""


def parts_of(module: Any, shapes: Sequence[LayerShape]) -> LayerParts | None:
    """Return a layer's parts, or None if it has others. Joins weights that are multiplied with the same rows.

    Args:
        shapes: Shapes of what layers cache.
    """
    try:
        input_norm, post_norm = (
            _norm(module, name) for name in ("input_layernorm", "post_attention_layernorm")
        )
        hidden = input_norm.weight.numel()
        _require(hidden % LANES == 0 and post_norm.weight.numel() == hidden)
        attention = _mixer(module, shapes, hidden)
        feed_forward = module.mlp
        if not hasattr(feed_forward, "experts"):
            return LayerParts(
                hidden, input_norm, attention, post_norm, None, None, _mlp(feed_forward, hidden)
            )
        named = {name for name, _ in feed_forward.named_children()}
        chooser = {"gate", "router"} & named
        shared_name = {"shared_experts", "shared_expert"} & named
        _require(len(chooser) == 1 and len(shared_name) <= 1)
        _require(named - chooser - shared_name <= {"experts", "shared_expert_gate"})
        share = getattr(feed_forward, "shared_expert_gate", None)
        shared = _mlp(getattr(feed_forward, shared_name.pop()), hidden, share) if shared_name else None
        router = _router(getattr(feed_forward, chooser.pop()), hidden, int(feed_forward.experts.num_experts))
        return LayerParts(hidden, input_norm, attention, post_norm, router, feed_forward.experts, shared)
    except (AttributeError, _UnfitError):
        return None


def _require(holds: bool) -> None:
    if not holds:
        raise _UnfitError


def _norm(module: Any, name: str) -> Norm:
    norm = getattr(module, name)
    eps = epsilon(norm)
    _require(eps is not None)
    assert eps is not None
    return Norm(weight_of(norm), eps)


def _mixer(module: Any, shapes: Sequence[LayerShape], hidden: int) -> Attention | Latents | DeltaNet:
    if hasattr(module, "linear_attn"):
        return _delta_net(module.linear_attn, shapes, hidden)
    kind = _latents if shapes[int(module.self_attn.layer_idx)].latent else _attention
    return kind(module.self_attn, shapes, hidden)


def _delta_net(module: Any, shapes: Sequence[LayerShape], hidden: int) -> DeltaNet:
    layer, key_heads, heads = int(module.layer_idx), int(module.num_k_heads), int(module.num_v_heads)
    K, V = int(module.head_k_dim), int(module.head_v_dim)
    keys, values, group = key_heads * K, heads * V, heads // key_heads
    state = shapes[layer].state
    _require(state is not None and state.recurrent == (heads, K, V) and heads % key_heads == 0)
    taps = module.conv1d.weight
    assert state is not None
    _require(module.conv1d.bias is None and state.tail == (taps.shape[2] - 1, 2 * keys + values))
    _require(module.activation in ("silu", "swish") and getattr(module.norm, "activation", "silu") == "silu")
    order, heads_at = None, np.arange(heads)
    rates_at = (heads_at, heads_at)
    rates: Sequence[PackedWeight]
    sides: Sequence[PackedWeight]
    if hasattr(module, "in_proj_qkvz"):  # by key head: [q | k | its v | their gates], and [follow | fade]
        first, both = _packed(module.in_proj_qkvz.weight), _packed(module.in_proj_ba.weight)
        rates, width = (both,), 2 * K + 2 * group * V
        of_heads = [(0, K, 0, K), (K, K, keys, K), (2 * K, group * V, 2 * keys, group * V)]
        of_heads.append((2 * K + group * V, group * V, 2 * keys + values, group * V))
        order = np.array([
            (head * width + begin, length, to + head * step)
            for head in range(key_heads) for begin, length, to, step in of_heads
        ])  # fmt: skip
        in_pair = heads_at // group * 2 * group + heads_at % group
        rates_at = (in_pair + group, in_pair)
        matrix, sides = _matrix(first), (first,)
    else:
        sides = (_packed(module.in_proj_qkv.weight), _packed(module.in_proj_z.weight))
        rates = (_packed(module.in_proj_a.weight), _packed(module.in_proj_b.weight))
        matrix = _together(sides)
    _require(sum(each.out_dim for each in sides) == 2 * keys + 2 * values)
    _require(all(each.in_dim == hidden for each in (*sides, *rates)))
    _require(int(rates_at[0].max()) < rates[0].out_dim and int(rates_at[1].max()) < rates[-1].out_dim)
    output = _packed(module.out_proj.weight)
    _require(output.in_dim == values and output.out_dim == hidden and module.norm.weight.numel() == V)
    return DeltaNet(
        layer=layer,
        key_heads=key_heads,
        heads=heads,
        key_dim=K,
        value_dim=V,
        first=matrix,
        order=order,
        rates=[_matrix(each) for each in rates],
        rates_at=rates_at,
        factors_H=-module.A_log.detach().float().exp(),
        biases_H=module.dt_bias.detach().float().contiguous(),
        taps_KC=taps.detach().float()[:, 0].t().contiguous(),
        norm=Norm(
            module.norm.weight.detach(),
            float(getattr(module.norm, "variance_epsilon", 0.0) or module.norm.eps),
        ),
        output=_matrix(output),
        output_bias=module.out_proj.bias,
    )


def _attention(module: Any, shapes: Sequence[LayerShape], hidden: int) -> Attention:
    layer = int(module.layer_idx)
    shape = shapes[layer]
    _require(shape.num_kv_heads > 0 and not shape.latent)
    projections = [getattr(module, f"{name}_proj") for name in "qkvo"]
    query, key, value, output = (_packed(each.weight) for each in projections)
    heads, kv_heads, D, V = (
        output.in_dim // shape.value_dim,
        shape.num_kv_heads,
        shape.key_dim,
        shape.value_dim,
    )
    has_gate = query.out_dim == 2 * heads * D and D == V
    _require((has_gate or query.out_dim == heads * D) and heads % kv_heads == 0)
    _require(key.out_dim == kv_heads * D and value.out_dim == kv_heads * V)
    _require(output.in_dim == heads * V and output.out_dim == hidden)
    _require(query.in_dim == key.in_dim == value.in_dim == hidden)
    norms = [_norm(module, name) if hasattr(module, name) else None for name in ("q_norm", "k_norm")]
    _require(all(norm is None or norm.weight.numel() == D for norm in norms))
    _require(len({norm and norm.eps for norm in norms}) == 1)
    sinks = getattr(module, "sinks", None)
    _require(sinks is None or (sinks.numel() == heads and sinks.dtype is torch.float32))
    biases = [each.bias for each in projections[:3]]
    qkv_bias = None
    if any(bias is not None for bias in biases):
        parts = (query, key, value)
        qkv_bias = torch.cat([
            torch.zeros(part.out_dim) if bias is None else bias for part, bias in zip(parts, biases, strict=True)
        ])  # fmt: skip
    return Attention(
        layer=layer,
        heads=heads,
        kv_heads=kv_heads,
        qkv=_together((query, key, value)),
        qkv_bias=qkv_bias,
        output=_matrix(output),
        output_bias=projections[3].bias,
        query_norm=norms[0],
        key_norm=norms[1],
        sinks_H=sinks,
        scale=float(module.scaling),
        has_gate=has_gate,
    )


def _latents(module: Any, shapes: Sequence[LayerShape], hidden: int) -> Latents:
    _require(not hasattr(module, "indexer"))
    layer, heads = int(module.layer_idx), int(module.num_heads)
    latent_dim, rotary_dim = int(module.kv_lora_rank), int(module.qk_rope_head_dim)
    unrotated, absorbed = int(module.qk_nope_head_dim), module.absorbed
    latent_norm, value_dim = _norm(module, "kv_a_layernorm"), absorbed.value_dim
    _require(latent_norm.weight.numel() == latent_dim and shapes[layer].key_dim == latent_dim + rotary_dim)
    _require(absorbed.key.shape[0] == heads and absorbed.key.shape[2] == unrotated and value_dim % LANES == 0)
    _require(absorbed.value.shape[1] * LANES == value_dim and absorbed.value.shape[2] == latent_dim)
    _require(rotary_dim % 2 == 0)
    is_plain = module.q_lora_rank is None
    sources = [module.q_proj if is_plain else module.q_a_proj, module.kv_a_proj_with_mqa]
    _require(all(each.bias is None for each in sources))
    queries, latents = (_packed(each.weight) for each in sources)
    _require(queries.in_dim == latents.in_dim == hidden and latents.out_dim == latent_dim + rotary_dim)
    last = queries if is_plain else _packed(module.q_b_proj.weight)
    _require(last.out_dim == heads * (unrotated + rotary_dim))
    query_norm = None if is_plain else _norm(module, "q_a_layernorm")
    if query_norm is not None:
        _require(query_norm.weight.numel() == queries.out_dim == last.in_dim and module.q_b_proj.bias is None)
    output = _packed(module.o_proj.weight)
    _require(output.in_dim == heads * value_dim and output.out_dim == hidden)
    return Latents(
        layer=layer,
        heads=heads,
        first=_together((queries, latents)),
        query_dim=queries.out_dim,
        query_norm=query_norm,
        query=None if is_plain else _matrix(last),
        latent_norm=latent_norm,
        absorbed=absorbed,
        rotary_dim=rotary_dim,
        is_interleaved=bool(getattr(module.config, "rope_interleave", False)),
        output=_matrix(output),
        output_bias=module.o_proj.bias,
        scale=float(module.scaling),
    )


def _mlp(module: Any, hidden: int, share: Any = None) -> Mlp:
    projections = [getattr(module, f"{name}_proj") for name in ("gate", "up", "down")]
    _require(all(each.bias is None for each in projections))
    gate, up, down = (_packed(each.weight) for each in projections)
    _require(gate.in_dim == up.in_dim == down.out_dim == hidden and gate.out_dim == up.out_dim == down.in_dim)
    both = _together((gate, up))
    scales = 0 if both.scales is None else both.scales.data_ptr()
    share_weight = None if share is None else _packed(share.weight)
    _require(share_weight is None or (share_weight.in_dim == hidden and share_weight.out_dim == 1))
    _require(share is None or share.bias is None)
    return Mlp(
        both, _matrix(down), np.array([[both.panels.data_ptr()], [scales]]),
        None if share_weight is None else _matrix(share_weight),
    )  # fmt: skip


def _router(module: Any, hidden: int, num_experts: int) -> Chooser:
    weight, rule = _packed(module.weight), module.form.rule
    _require(weight.in_dim == hidden and weight.out_dim == num_experts)
    correction_E, bias_E = correction(module), module._parameters.get("bias")
    _require(correction_E is None or correction_E.numel() == num_experts)
    bias = None
    if bias_E is not None:
        bias = torch.zeros(weight.format.panels * LANES)
        bias[:num_experts] = bias_E
    return Chooser(_matrix(weight), bias, correction_E, rule)


def _packed(weight: Any) -> PackedWeight:
    _require(isinstance(weight, PackedWeight))
    packed: PackedWeight = weight
    return packed


def _matrix(weight: PackedWeight) -> Matrix:
    return Matrix(weight.panels, weight.scales, weight.format, _adapted([weight]))


def _adapted(weights: Sequence[PackedWeight]) -> tuple[Adapted, ...]:
    found, begin = [], 0
    for weight in weights:
        if weight.adapters is not None:
            found.append(Adapted(begin, weight.out_dim, weight.adapters))
        begin += weight.out_dim
    return tuple(found)


def _together(weights: Sequence[PackedWeight]) -> Matrix:
    """Join weights with the same inputs. The originals become views of the joint memory."""
    first = weights[0]
    _require(all(each.out_dim % LANES == 0 for each in weights))
    _require(len({(each.panels.dtype, each.quantised, each.panels.shape[1:]) for each in weights}) == 1)
    panels = torch.cat([each.panels.view(torch.uint8) for each in weights]).view(first.panels.dtype)
    parts = [each.scales for each in weights if each.scales is not None]
    scales = torch.cat(parts) if parts else None
    begin = 0
    for each in weights:
        end = begin + each.format.panels
        each.panels, each.scales = panels[begin:end], None if scales is None else scales[begin:end]
        begin = end
    return Matrix(panels, scales, format_of(panels, scales, first.quantised), _adapted(weights))
