# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Top-k routing on GPUs: scores, choice of experts (in a family with groups, only in the best), weights.

Of equal scores the lower expert wins, so the choice is the same on every device. Softmax routers (Mixtral, Qwen) and
sigmoid routers with a correction bias for the choice only (DeepSeek-V3: "auxiliary-loss-free", 2024) are one kernel.

Legend: T rows, E experts, K choices.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe.routing import Routing

_LEAST = tl.constexpr(-1.0e38)


@triton.jit
def choose_experts(
    logits, bias, ids, weights, scale,
    E: tl.constexpr, E_PAD: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, GROUPS: tl.constexpr,
    GROUPS_PAD: tl.constexpr, GROUPS_CHOSEN: tl.constexpr, IS_SIGMOID: tl.constexpr, SOFTMAX_AFTER: tl.constexpr,
    NORMALISE: tl.constexpr, HAS_BIAS: tl.constexpr, BEST_OF_GROUP: tl.constexpr,
):  # fmt: skip
    """Program (row). NaN is chosen last, and an id is always a valid expert, so no access is out of bounds."""
    row, expert = tl.program_id(0).to(tl.int64), tl.arange(0, E_PAD)
    is_expert = expert < E
    logit = tl.load(logits + row * E + expert, mask=is_expert, other=float("-inf")).to(tl.float32)
    if IS_SIGMOID:
        score = 1 / (1 + tl.exp(-logit))
    elif SOFTMAX_AFTER:
        score = logit
    else:
        score = tl.exp(logit - tl.max(logit, axis=0))
        score = score / tl.sum(score, axis=0)
    choice = score
    if HAS_BIAS:
        choice = choice + tl.load(bias + expert, mask=is_expert, other=0.0)
    choice = tl.where(is_expert, tl.where(choice == choice, choice, _LEAST), float("-inf"))
    if GROUPS > GROUPS_CHOSEN:
        choice = _keep_best_groups(choice, expert, E, GROUPS, GROUPS_PAD, GROUPS_CHOSEN, BEST_OF_GROUP)
    k = tl.arange(0, K_PAD)
    chosen, weight = tl.full([K_PAD], -1, tl.int64), tl.full([K_PAD], 0.0, tl.float32)
    for i in range(K):
        best = tl.min(tl.where(choice == tl.max(choice, axis=0), expert, E_PAD), axis=0)
        chosen = tl.where(k == i, best, chosen)
        weight = tl.where(k == i, tl.sum(tl.where(expert == best, score, 0.0), axis=0), weight)
        choice = tl.where(expert == best, float("-inf"), choice)
    if SOFTMAX_AFTER:
        weight = tl.where(k < K, weight, float("-inf"))
        weight = tl.exp(weight - tl.max(weight, axis=0))
        weight = weight / tl.sum(weight, axis=0)
    if NORMALISE:
        weight = weight / (tl.sum(weight, axis=0) + 1e-20)
    tl.store(ids + row * K + k, chosen, mask=k < K)
    tl.store(weights + row * K + k, weight * scale, mask=k < K)


@triton.jit
def _keep_best_groups(
    choice,
    expert,
    E: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    GROUPS_CHOSEN: tl.constexpr,
    BEST_OF_GROUP: tl.constexpr,
):
    """Keep only experts of the best groups, by each group's best score or the sum of its two best."""
    group, own = tl.arange(0, GROUPS_PAD), expert // (E // GROUPS)
    is_member = own[None, :] == group[:, None]
    inside = tl.where(is_member, choice[None, :], float("-inf"))
    first = tl.max(inside, axis=1)
    where_first = tl.min(tl.where(inside == first[:, None], expert[None, :], expert.shape[0]), axis=1)
    second = tl.max(tl.where(expert[None, :] == where_first[:, None], float("-inf"), inside), axis=1)
    score = tl.where(group < GROUPS, first if BEST_OF_GROUP else first + second, float("-inf"))
    is_kept = tl.zeros([GROUPS_PAD], tl.int32)
    for _ in range(GROUPS_CHOSEN):
        best = tl.min(tl.where(score == tl.max(score, axis=0), group, GROUPS_PAD), axis=0)
        is_kept = tl.where(group == best, 1, is_kept)
        score = tl.where(group == best, float("-inf"), score)
    keeps = tl.sum(tl.where(is_member, is_kept[:, None], 0), axis=0)
    return tl.where(keeps > 0, choice, float("-inf"))


def route(logits_TE: Tensor, routing: Routing, *, bias_E: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose experts.

    Args:
        logits_TE: Contiguous, any floating-point type.
        bias_E: float32, added to scores to choose experts, not to weights.

    Returns:
        ids int64 [T, K], best first, and weights float32 [T, K].
    """
    T, E = logits_TE.shape
    ids = torch.empty(T, routing.choices, dtype=torch.int64, device=logits_TE.device)
    weights = torch.empty(T, routing.choices, dtype=torch.float32, device=logits_TE.device)
    choose_experts[(T,)](
        logits_TE, bias_E, ids, weights, routing.scale, E=E, E_PAD=triton.next_power_of_2(E), K=routing.choices,
        K_PAD=triton.next_power_of_2(routing.choices), GROUPS=routing.groups,
        GROUPS_PAD=triton.next_power_of_2(routing.groups), GROUPS_CHOSEN=routing.groups_chosen,
        IS_SIGMOID=routing.is_sigmoid, SOFTMAX_AFTER=routing.softmax_after, NORMALISE=routing.normalise,
        HAS_BIAS=bias_E is not None, BEST_OF_GROUP=routing.best_of_group, num_warps=4,
    )  # fmt: skip
    return ids, weights
