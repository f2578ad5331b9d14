# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Top-k routing on GPUs: scores, choice of experts (in a family with groups, only in the best), weights.

Of equal scores the lower expert wins, so the choice is the same on every device. Softmax routers (Mixtral, Qwen) and
sigmoid routers with a correction bias for the choice only (DeepSeek-V3: "auxiliary-loss-free", 2024) are one kernel.

A row belongs to one warp, so no barrier separates the rounds of a choice. Choices are compared as integers of the same
order, for which a warp has one instruction (`redux.sync`); for floating-point numbers it has five.
Weights are rounded to the type that the model's own router returns, in the same launch.

Legend: T rows, E experts, K choices.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe.routing import Routing

_LEAST = tl.constexpr(-1.0e38)
_NEVER = tl.constexpr(-(2**31))  # below the key of every number
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)

_MANY_ROWS, _ROWS = (
    2048,
    4,
)  # from this number of rows on, a program takes several: they hide each other's latency


@triton.jit
def _key(values):
    """Return int32 keys in the order of float32 values; its own inverse on keys. Both zeros are one key."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & _MAGNITUDE)


@triton.jit
def _value(keys):
    """Return the float32 values of keys."""
    return (keys ^ ((keys >> 31) & _MAGNITUDE)).to(tl.float32, bitcast=True)


@triton.jit
def _best(key, index, END: tl.constexpr):
    """Return the lowest index of each row's largest key."""
    return tl.min(tl.where(key == tl.max(key, axis=1)[:, None], index[None, :], END), axis=1)


@triton.jit
def _keep_best_groups(
    key, expert, E: tl.constexpr, E_PAD: tl.constexpr, GROUPS: tl.constexpr, GROUPS_PAD: tl.constexpr,
    GROUPS_CHOSEN: tl.constexpr, BEST_OF_GROUP: tl.constexpr,
):  # fmt: skip
    """Keep only experts of the best groups, by each group's best score or the sum of its two best."""
    group, own = tl.arange(0, GROUPS_PAD), expert // (E // GROUPS)
    score = tl.full([key.shape[0], GROUPS_PAD], float("-inf"), tl.float32)
    for i in tl.static_range(GROUPS):
        inside = tl.where((own == i)[None, :], key, _NEVER)
        first = tl.max(inside, axis=1)
        total = _value(first)
        if not BEST_OF_GROUP:
            best = tl.min(tl.where(inside == first[:, None], expert[None, :], E_PAD), axis=1)
            second = tl.max(tl.where(expert[None, :] == best[:, None], _NEVER, inside), axis=1)
            total += _value(second)
        score = tl.where(group[None, :] == i, total[:, None], score)
    group_key = tl.where((group < GROUPS)[None, :], _key(score), _NEVER)
    is_kept = tl.zeros(key.shape, tl.int32)
    for _ in range(GROUPS_CHOSEN):
        best = _best(group_key, group, GROUPS_PAD)
        is_kept = tl.where(own[None, :] == best[:, None], 1, is_kept)
        group_key = tl.where(group[None, :] == best[:, None], _NEVER, group_key)
    return tl.where(is_kept > 0, key, _NEVER)


@triton.jit(do_not_specialize=["num_rows"])
def choose_experts(
    logits, bias, ids, weights, scale, num_rows,
    E: tl.constexpr, E_PAD: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, GROUPS: tl.constexpr,
    GROUPS_PAD: tl.constexpr, GROUPS_CHOSEN: tl.constexpr, IS_SIGMOID: tl.constexpr, SOFTMAX_AFTER: tl.constexpr,
    NORMALISE: tl.constexpr, HAS_BIAS: tl.constexpr, BEST_OF_GROUP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program (tile of rows). NaN is chosen last, and an id is always a valid expert, so no access is out of bounds."""
    row, expert, k = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, E_PAD), tl.arange(0, K_PAD)
    is_row, is_expert = row < num_rows, expert < E
    own = logits + tl.minimum(row, num_rows - 1).to(tl.int64)[:, None] * E
    is_read = tl.broadcast_to(is_expert[None, :], [ROWS, E_PAD])
    logit = tl.load(own + expert[None, :], mask=is_read, other=float("-inf")).to(tl.float32)
    top, total = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    if IS_SIGMOID:
        choice = 1 / (1 + tl.exp(-logit))
    elif SOFTMAX_AFTER:
        choice = logit
    else:
        top = tl.max(logit, axis=1)
        choice = tl.exp(logit - top[:, None])
        total = tl.sum(choice, axis=1)
        choice = choice / total[:, None]
    if HAS_BIAS:
        choice = choice + tl.load(bias + expert, mask=is_expert, other=0.0).to(tl.float32)[None, :]
    key = tl.where(is_expert[None, :], _key(tl.where(choice == choice, choice, _LEAST)), _NEVER)
    if GROUPS > GROUPS_CHOSEN:
        key = _keep_best_groups(key, expert, E, E_PAD, GROUPS, GROUPS_PAD, GROUPS_CHOSEN, BEST_OF_GROUP)
    chosen = tl.zeros([ROWS, K_PAD], tl.int32)
    for i in range(K):
        best = _best(key, expert, E_PAD)
        chosen = tl.where(k[None, :] == i, best[:, None], chosen)
        key = tl.where(expert[None, :] == best[:, None], _NEVER, key)
    is_choice = is_row[:, None] & (k < K)[None, :]
    # The chosen logits again, from the cache: the scores of all experts need no place in registers.
    weight = tl.load(own + chosen, mask=(k < K)[None, :], other=float("-inf")).to(tl.float32)
    if IS_SIGMOID:
        weight = 1 / (1 + tl.exp(-weight))
    elif SOFTMAX_AFTER:
        weight = tl.exp(weight - tl.max(weight, axis=1)[:, None])
        weight = weight / tl.sum(weight, axis=1)[:, None]
    else:
        weight = tl.exp(weight - top[:, None]) / total[:, None]
    weight = tl.where((k < K)[None, :], weight, 0.0)
    if NORMALISE:
        weight = weight / (tl.sum(weight, axis=1) + 1e-20)[:, None]
    place = row.to(tl.int64)[:, None] * K + k[None, :]
    tl.store(ids + place, chosen.to(tl.int64), mask=is_choice)
    tl.store(weights + place, (weight * scale).to(weights.dtype.element_ty), mask=is_choice)


def route(
    logits_TE: Tensor, routing: Routing, *, bias_E: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Choose experts.

    Args:
        logits_TE: Contiguous, any floating-point type.
        bias_E: Any floating-point type, added to scores to choose experts, not to weights.
        dtype: Type of the weights, which are computed in float32 and rounded once.

    Returns:
        ids int64 [T, K], best first, and weights [T, K].
    """
    T, E = logits_TE.shape
    ids = torch.empty(T, routing.choices, dtype=torch.int64, device=logits_TE.device)
    weights = torch.empty(T, routing.choices, dtype=dtype, device=logits_TE.device)
    if T == 0:
        return ids, weights
    rows = _ROWS if T >= _MANY_ROWS else 1
    choose_experts[(triton.cdiv(T, rows),)](
        logits_TE, bias_E, ids, weights, routing.scale, T, E=E, E_PAD=triton.next_power_of_2(E), K=routing.choices,
        K_PAD=triton.next_power_of_2(routing.choices), GROUPS=routing.groups,
        GROUPS_PAD=triton.next_power_of_2(routing.groups), GROUPS_CHOSEN=routing.groups_chosen,
        IS_SIGMOID=routing.is_sigmoid, SOFTMAX_AFTER=routing.softmax_after, NORMALISE=routing.normalise,
        HAS_BIAS=bias_E is not None, BEST_OF_GROUP=routing.best_of_group, ROWS=rows, num_warps=1,
    )  # fmt: skip
    return ids, weights


def multiply_wide(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """Multiply rows with a weight of the same short type. Return [T, E] float32: exact products, summed in float32."""
    return torch.mm(x_TD, weight_ED.t(), out_dtype=torch.float32)


def can_multiply_wide(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether this build of torch has `multiply_wide` on a device."""
    x = torch.zeros(16, 16, dtype=dtype, device=device)
    try:
        multiply_wide(x, x)
    except (RuntimeError, TypeError):  # raised by torch for devices and types without this product
        return False
    return True
