# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""The five launches of sampling on GPUs; `scheduler.sampling.gpu.sampling` says what they are for and in which order they run.

Compile without floating-point fusion: the same weight comes out wherever it is computed.

Legend: R rows, V vocabulary, S parts of a row, L levels, E edits, C candidates.
"""

import triton
import triton.language as tl

from scheduler.sampling.gpu.row_weights import (
    LEVELS,
    draw_filtered,
    level_bits,
    pick_level,
    units_of,
    wanted_mass,
    weight_bits,
)

_LEVELS, _LAST_LEVEL = tl.constexpr(LEVELS), tl.constexpr(LEVELS - 1)


@triton.jit(do_not_specialize=["E"])
def edit_logits(logits, edit_rows, edit_ids, biases, seen, subtracted, penalties, E, V, BLOCK: tl.constexpr):
    """Program (block of edits): bias, repetition penalty, then frequency and presence. No edit names a place twice."""
    edit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_edit = edit < E
    row = tl.load(edit_rows + edit, mask=is_edit, other=0)
    at = row.to(tl.int64) * V + tl.load(edit_ids + edit, mask=is_edit, other=0)
    x = tl.load(logits + at, mask=is_edit, other=0.0) + tl.load(biases + edit, mask=is_edit, other=0.0)
    penalty = tl.load(penalties + row, mask=is_edit, other=1.0)
    is_seen = tl.load(seen + edit, mask=is_edit, other=0) > 0
    x = tl.where(is_seen, tl.where(x > 0, tl.div_rn(x, penalty), x * penalty), x)
    tl.store(logits + at, x - tl.load(subtracted + edit, mask=is_edit, other=0.0), mask=is_edit)


@triton.jit
def find_tops(
    logits, masks, mask_rows, top_values, top_ids, V, W, HAS_MASKS: tl.constexpr, PART: tl.constexpr
):
    """Program (row, part): forbid what the row's mask does not allow, and note the first of the greatest; NaN is that."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * PART + tl.arange(0, PART)
    x = tl.load(logits + row * V + at, mask=at < V, other=float("-inf"))
    if HAS_MASKS:
        mask_row = tl.load(mask_rows + row).to(tl.int64)
        is_masked = (at < V) & (mask_row >= 0)
        word = tl.load(masks + mask_row * W + at // 32, mask=is_masked, other=-1)
        x = tl.where(((word >> (at % 32)) & 1) != 0, x, float("-inf"))
        tl.store(logits + row * V + at, x, mask=is_masked)
    x = tl.where(x != x, float("inf"), x)
    top = tl.max(x, axis=0)
    place = row * tl.num_programs(1) + part
    tl.store(top_values + place, top)
    tl.store(top_ids + place, tl.min(tl.where(x == top, at, V), axis=0))


@triton.jit
def _top_of(top_values, row, S: tl.constexpr, S_PAD: tl.constexpr):
    part = tl.arange(0, S_PAD)
    return tl.max(tl.load(top_values + row * S + part, mask=part < S, other=float("-inf")), axis=0)


@triton.jit
def _is_drawn(inverse, top):
    """Whether chance decides: not where the row is greedy, or nothing or NaN is left to draw."""
    return (inverse >= 0) & (top > float("-inf")) & (top < float("inf"))


@triton.jit
def weigh_parts(
    logits, inverses, top_values, counts, masses, V, S: tl.constexpr, S_PAD: tl.constexpr, PART: tl.constexpr
):  # fmt: skip
    """Program (row, part): count and weigh what reaches each level."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    inverse, top = tl.load(inverses + row), _top_of(top_values, row, S, S_PAD)
    if not _is_drawn(inverse, top):
        return
    own = weight_bits(logits + row * V, part * PART + tl.arange(0, PART), V, top, inverse)
    units = units_of(own)
    for level in tl.static_range(_LEVELS):
        reaches = own >= level_bits(level)
        place = (row * S + part) * _LEVELS + level
        tl.store(counts + place, tl.sum(reaches.to(tl.int32), axis=0))
        tl.store(masses + place, tl.sum(tl.where(reaches, units, 0), axis=0))


@triton.jit
def gather_candidates(
    logits, inverses, least_weights, top_ks, top_ps, top_values, counts, masses, candidates, candidate_ids, V,
    C: tl.constexpr, S: tl.constexpr, S_PAD: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Program (row, part): copy what may be drawn behind the other parts' candidates, by id, if there is room."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    inverse, top = tl.load(inverses + row), _top_of(top_values, row, S, S_PAD)
    least_bits = tl.load(least_weights + row).to(tl.int32, bitcast=True)
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
    is_filtered = (top_k > 0) | (least_bits > 0) | (top_p < 1.0)
    if not (_is_drawn(inverse, top) & is_filtered):
        return
    level, num_candidates, _ = pick_level(counts, masses, row, least_bits, top_k, top_p, S, S_PAD)
    if num_candidates > C:
        return
    other = tl.arange(0, S_PAD)
    before = tl.load(counts + (row * S + other) * _LEVELS + level, mask=other < part, other=0)
    at = part * PART + tl.arange(0, PART)
    is_candidate = weight_bits(logits + row * V, at, V, top, inverse) >= level_bits(level)
    place = row * C + tl.sum(before, axis=0) + tl.cumsum(is_candidate.to(tl.int32), axis=0) - 1
    x = tl.load(logits + row * V + at, mask=is_candidate, other=0.0)
    tl.store(candidates + place, x, mask=is_candidate)
    tl.store(candidate_ids + place, at, mask=is_candidate)


@triton.jit
def _draw_by_id(logits, masses, row, V, top, inverse, uniform, S: tl.constexpr, S_PAD: tl.constexpr, PART: tl.constexpr):  # fmt: skip
    """Draw from the whole row, in the order of ids."""
    part = tl.arange(0, S_PAD)
    mass_S = tl.load(masses + (row * S + part) * _LEVELS + _LAST_LEVEL, mask=part < S, other=0)
    ends = tl.cumsum(mass_S, axis=0)
    wanted = wanted_mass(uniform, tl.sum(mass_S, axis=0))
    chosen = tl.min(tl.where(ends > wanted, part, S_PAD - 1), axis=0)
    before = tl.sum(tl.where(part < chosen, mass_S, 0), axis=0)
    at = chosen * PART + tl.arange(0, PART)
    passed = before + tl.cumsum(units_of(weight_bits(logits + row * V, at, V, top, inverse)), axis=0)
    return tl.min(tl.where(passed > wanted, at, V - 1), axis=0)


@triton.jit
def choose_tokens(
    logits, inverses, least_weights, top_ks, top_ps, uniforms, top_values, top_ids, counts, masses, candidates,
    candidate_ids, ids, V, C: tl.constexpr, S: tl.constexpr, S_PAD: tl.constexpr, PART: tl.constexpr,
    DRAWS: tl.constexpr,
):  # fmt: skip
    """Program (row). Without DRAWS every row is greedy, and only tops are read."""
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, S_PAD)
    top_S = tl.load(top_values + row * S + part, mask=part < S, other=float("-inf"))
    top = tl.max(top_S, axis=0)
    is_top = (top_S == top) & (part < S)
    token = tl.min(tl.where(is_top, tl.load(top_ids + row * S + part, mask=part < S, other=0), V), axis=0)
    if not DRAWS:
        tl.store(ids + row, token.to(tl.int64))
        return
    inverse = tl.load(inverses + row)
    if not _is_drawn(inverse, top):
        tl.store(ids + row, token.to(tl.int64))
        return
    uniform, top_k, top_p = tl.load(uniforms + row), tl.load(top_ks + row), tl.load(top_ps + row)
    least_bits = tl.load(least_weights + row).to(tl.int32, bitcast=True)
    if (top_k > 0) | (least_bits > 0) | (top_p < 1.0):
        _, number, total = pick_level(counts, masses, row, least_bits, top_k, top_p, S, S_PAD)
        if number > C:
            token = draw_filtered(
                logits + row * V, V, top, inverse, total, least_bits, top_k, top_p, uniform, PART
            )
        else:
            place = draw_filtered(
                candidates + row * C, number, top, inverse, total, least_bits, top_k, top_p, uniform, PART
            )
            token = tl.load(candidate_ids + row * C + place)
    else:
        token = _draw_by_id(logits, masses, row, V, top, inverse, uniform, S, S_PAD, PART)
    tl.store(ids + row, token.to(tl.int64))
