"""Top-k routing on CPU, as a kernel: scores, choice of experts (in a family with groups, only in the best), weights.

Of equal scores the lower expert wins, and NaN is chosen last: the choice depends on the row alone. See `moe.routing`.

Legend: T rows, E experts, K choices.
"""

import math

import numpy as np
import torch
from numba import njit
from torch import Tensor

from attention.cpu.tiles import TILES_VERSION
from dispatch.compiled.native import bits_of, float_of, floats, words
from dispatch.compiled.team import Kernel, program_of, run_alone
from moe.routing import Routing

_TILE_ROWS = 16
_LEAST = np.float32(-1.0e38)
_NEVER = np.float32(-np.inf)


@njit(nogil=True, inline="always")
def _keep_best_groups(choice, E, groups, chosen, by_best, group_score):  # type: ignore[no-untyped-def]
    # Keep only experts of the best groups, by each group's best score or the sum of its two best.
    size = E // groups
    for group in range(groups):
        first, second = _NEVER, _NEVER
        for expert in range(group * size, (group + 1) * size):
            if choice[expert] > first:
                first, second = choice[expert], first
            elif choice[expert] > second:
                second = choice[expert]
        group_score[group] = first if by_best != 0 else first + second
    for _ in range(chosen):
        best = -1
        for group in range(groups):
            if not math.isnan(group_score[group]) and (best < 0 or group_score[group] > group_score[best]):
                best = group
        group_score[best] = np.float32(np.nan)  # kept
    for group in range(groups):
        if not math.isnan(group_score[group]):
            choice[group * size : (group + 1) * size] = _NEVER


def _route(  # type: ignore[no-untyped-def]
    tile, logits, stride, E, K, bias, rows_at, is_sigmoid, softmax_after, normalise, by_best, scale_bits, groups,
    groups_chosen, ids, weights,
):  # fmt: skip
    rows, scale = words(rows_at, 1)[0], float_of(scale_bits)
    if tile < 0:
        return (rows + _TILE_ROWS - 1) // _TILE_ROWS
    score, choice, group_score = (
        np.empty(E, np.float32),
        np.empty(E, np.float32),
        np.empty(groups, np.float32),
    )
    one = np.float32(1.0)
    for row in range(tile * _TILE_ROWS, min((tile + 1) * _TILE_ROWS, rows)):
        logit = floats(logits + row * stride, E)
        if is_sigmoid != 0:
            for expert in range(E):
                score[expert] = one / (one + math.exp(-logit[expert]))
        elif softmax_after != 0:
            score[:] = logit
        else:
            top, total = logit[0], np.float32(0.0)
            for expert in range(1, E):
                top = max(top, logit[expert])
            for expert in range(E):
                score[expert] = math.exp(logit[expert] - top)
                total += score[expert]
            for expert in range(E):
                score[expert] /= total
        choice[:] = score
        if bias != 0:
            added = floats(bias, E)
            for expert in range(E):
                choice[expert] += added[expert]
        for expert in range(E):
            if math.isnan(choice[expert]):
                choice[expert] = _LEAST
        if groups > groups_chosen:
            _keep_best_groups(choice, E, groups, groups_chosen, by_best, group_score)
        chosen, weight = words(ids + row * K * 8, K), floats(weights + row * K * 4, K)
        for k in range(K):
            best = 0
            for expert in range(1, E):
                if choice[expert] > choice[best]:
                    best = expert
            chosen[k], weight[k] = best, score[best]
            choice[best] = _NEVER
        total = np.float32(0.0)
        if softmax_after != 0:
            top = weight[0]
            for k in range(K):
                weight[k] = math.exp(weight[k] - top)
                total += weight[k]
            for k in range(K):
                weight[k] /= total
        if normalise != 0:
            total = np.float32(1e-20)
            for k in range(K):
                total += weight[k]
            for k in range(K):
                weight[k] /= total
        for k in range(K):
            weight[k] *= scale
    return 0


ROUTE = Kernel(_route, TILES_VERSION)


def route_row(
    logits: int, stride: int, num_experts: int, rule: Routing, bias: int, ids: int, weights: int, rows_at: int
) -> list[int]:
    """Return a program row that chooses experts.

    Args:
        logits: Address of [T, E or more] float32. stride: Bytes between two rows.
        num_experts: E. bias: Address of [E] float32, added to scores to choose experts, or 0.
        ids, weights: Addresses of [T, K], int64 and float32. rows_at: Address of T, read when the program runs.
    """
    return ROUTE.row(
        logits, stride, num_experts, rule.choices, bias, rows_at, rule.is_sigmoid, rule.softmax_after, rule.normalise,
        rule.best_of_group, bits_of(rule.scale), rule.groups, rule.groups_chosen, ids, weights,
    )  # fmt: skip


def route(
    logits_TE: Tensor, rule: Routing, *, bias_E: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Choose experts.

    Args:
        logits_TE: float32, contiguous.
        bias_E: float32, added to scores to choose experts, not to weights.
        dtype: Type of the weights.

    Returns:
        ids int64 [T, K], best first, and weights [T, K].
    """
    T, E = logits_TE.shape
    ids = torch.empty(T, rule.choices, dtype=torch.int64)
    weights, rows = torch.empty(T, rule.choices), np.array([T])
    bias = 0 if bias_E is None else bias_E.data_ptr()
    row = route_row(
        logits_TE.data_ptr(), E * 4, E, rule, bias, ids.data_ptr(), weights.data_ptr(), rows.ctypes.data
    )
    run_alone(program_of([row]))
    return ids, weights.to(dtype)
