"""The MoE layer's kernels as operators of PyTorch, for code that torch.compile compiles: it does not look into them, and
no graph breaks there. Each public function is called like the one of its kernel's module and returns new tensors.

Importing this registers the operators, under `torch.ops.wideep`.
"""

import torch
from torch import Tensor

from dispatch.fp8 import Quantised, num_blocks
from moe.gpu import grouped, norm, quantise, routing
from moe.gpu.gated import GATES
from moe.gpu.routing import Routing
from moe.gpu.tiles import GroupedTile


@torch.library.custom_op("wideep::grouped_linear", mutates_args=())
def _grouped_linear(
    x: Tensor, weights: Tensor, slot_offsets: Tensor, places: Tensor, num_pairs: int, rows: Tensor | None, gate: str,
    x_scales: Tensor | None, scales: Tensor | None, biases: Tensor | None, tile: list[int],
) -> Tensor:  # fmt: skip
    return grouped.grouped_linear(
        x, weights, slot_offsets, places, num_pairs=num_pairs, rows_P=rows, gate=gate, x_scales_TB=x_scales,
        scales_WBB=scales, biases_WN=biases, tile=GroupedTile(*tile) if tile else None,
    )  # fmt: skip


@_grouped_linear.register_fake
def _like_grouped_linear(
    x: Tensor, weights: Tensor, slot_offsets: Tensor, places: Tensor, num_pairs: int, rows: Tensor | None, gate: str,
    x_scales: Tensor | None, scales: Tensor | None, biases: Tensor | None, tile: list[int],
) -> Tensor:  # fmt: skip
    columns = weights.shape[1] // 2 if GATES[gate] else weights.shape[1]
    return x.new_empty(num_pairs, columns, dtype=grouped.result_type(x))


def grouped_linear(
    x_TK: Tensor,
    weights_WNK: Tensor,
    slot_offsets: Tensor,
    places_S: Tensor,
    *,
    num_pairs: int,
    rows_P: Tensor | None = None,
    gate: str = "none",
    x_scales_TB: Tensor | None = None,
    scales_WBB: Tensor | None = None,
    biases_WN: Tensor | None = None,
    tile: GroupedTile | None = None,
) -> Tensor:
    """See `grouped.grouped_linear`."""
    result: Tensor = torch.ops.wideep.grouped_linear(
        x_TK, weights_WNK, slot_offsets, places_S, num_pairs, rows_P, gate, x_scales_TB, scales_WBB, biases_WN,
        list(tile or ()),
    )  # fmt: skip
    return result


@torch.library.custom_op("wideep::rms_norm", mutates_args=())
def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return norm.rms_norm(x, weight, eps)


@_rms_norm.register_fake
def _like_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("wideep::rms_norm_of_sum", mutates_args=("residual",))
def _rms_norm_of_sum(x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> Tensor:
    return norm.rms_norm(x, weight, eps, residual_TD=residual)


@_rms_norm_of_sum.register_fake
def _like_rms_norm_of_sum(x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> Tensor:
    return torch.empty_like(x)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float, *, residual_TD: Tensor | None = None) -> Tensor:
    """See `norm.rms_norm`: the residual is set to the sum."""
    if residual_TD is None:
        normed: Tensor = torch.ops.wideep.rms_norm(x_TD, weight_D, eps)
    else:
        normed = torch.ops.wideep.rms_norm_of_sum(x_TD, weight_D, eps, residual_TD)
    return normed


@torch.library.custom_op("wideep::route", mutates_args=())
def _route(
    logits: Tensor, bias: Tensor | None, choices: int, is_sigmoid: bool, softmax_after: bool, normalise: bool,
    scale: float, groups: int, groups_chosen: int, best_of_group: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    chosen = Routing(
        choices=choices, is_sigmoid=is_sigmoid, softmax_after=softmax_after, normalise=normalise, scale=scale,
        groups=groups, groups_chosen=groups_chosen, best_of_group=best_of_group,
    )  # fmt: skip
    return routing.route(logits, chosen, bias_E=bias)


@_route.register_fake
def _like_route(logits: Tensor, bias: Tensor | None, choices: int, *_rest: object) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], choices)
    return logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape, dtype=torch.float32)


def route(logits_TE: Tensor, rule: Routing, *, bias_E: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `routing.route`."""
    ids, weights = torch.ops.wideep.route(
        logits_TE, bias_E, rule.choices, rule.is_sigmoid, rule.softmax_after, rule.normalise, rule.scale, rule.groups,
        rule.groups_chosen, rule.best_of_group,
    )  # fmt: skip
    return ids, weights


@torch.library.custom_op("wideep::quantise_rows", mutates_args=())
def _quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    cast = quantise.quantise_rows(x)
    return cast.x_TH, cast.scales


@_quantise_rows.register_fake
def _like_quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    scales = x.new_empty(x.shape[0], num_blocks(x.shape[1]), dtype=torch.float32)
    return torch.empty_like(x, dtype=torch.float8_e4m3fn), scales


def quantise_rows(x_TK: Tensor) -> Quantised:
    """See `quantise.quantise_rows`."""
    return Quantised(*torch.ops.wideep.quantise_rows(x_TK))
