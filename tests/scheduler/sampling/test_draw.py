"""Drawn tokens match a full sort of the row, for every truncation and any other rows in the batch."""

from typing import Any

import numpy as np
import pytest

from dispatch.compiled.team import Team
from scheduler.policy.request import SamplingParams
from scheduler.sampling.draw import NOTHING, draw_tokens, likeliest_tokens, uniform_at

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "hot": {"temperature": 3.0},
    "cold": {"temperature": 1e-6},
    "top_k": {"top_k": 20},
    "a large top_k": {"top_k": 5000, "temperature": 2.0},
    "top_k beyond the vocabulary": {"top_k": 10**9},
    "top_p": {"top_p": 0.9},
    "a tiny top_p": {"top_p": 1e-9},
    "nearly all": {"top_p": 0.999999},
    "min_p": {"min_p": 0.05},
    "all of them": {"top_k": 300, "top_p": 0.95, "min_p": 0.001, "temperature": 1.3},
}
ROWS = {"as models have": 3.0, "peaked": 12.0, "flat": 0.05}


def asked(**fields: Any) -> SamplingParams:
    """Return parameters, with a default temperature of 1."""
    return SamplingParams(**{"max_tokens": 1, "temperature": 1.0, **fields})


def intervals(logits_V: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """Return the remaining tokens, likeliest first (lower id on ties), and the end of each token's share of [0, 1]."""
    x = logits_V.astype(np.float64)
    weights = np.exp((x - x.max()) / max(params.temperature, 1e-5))
    order = np.lexsort((np.arange(weights.size), -weights.astype(np.float32)))
    if params.top_k:
        order = order[: params.top_k]
    order = order[weights[order] >= params.min_p]
    sorted_ = weights[order]
    before = np.cumsum(sorted_) - sorted_
    kept = before < params.top_p * sorted_.sum()
    kept[0] = True
    return order[kept], np.cumsum(sorted_[kept]) / sorted_[kept].sum()


def distance(token: int, uniform: float, logits_V: np.ndarray, params: SamplingParams) -> float:
    """Return the distance of the random number from the drawn token's share, or infinity if it has none."""
    if not params.top_k and params.top_p >= 1 and params.min_p <= 0:  # a plain row is walked in order of ids
        x = logits_V.astype(np.float64)
        weights = np.exp((x - x.max()) / max(params.temperature, 1e-5))
        ids, ends = np.arange(weights.size), np.cumsum(weights) / weights.sum()
    else:
        ids, ends = intervals(logits_V, params)
    (places,) = np.nonzero(ids == token)
    if not places.size:
        return float("inf")
    begin = ends[places[0] - 1] if places[0] else 0.0
    return float(max(begin - uniform, uniform - ends[places[0]], 0.0))


@pytest.mark.parametrize("shape", ROWS)
@pytest.mark.parametrize("way", WAYS)
def test_a_token_is_drawn_where_a_full_sort_has_it(way: str, shape: str) -> None:
    """Up to rounding: weights are float32, and nearly equal tokens may come in another order."""
    params, most = asked(**WAYS[way]), 2e-3 if shape == "flat" else 2e-5
    for size in (1, 15, 16, 17, 500, 4097, 49152):
        generator = np.random.default_rng(size)
        rows = (generator.standard_normal((6, size)) * ROWS[shape]).astype(np.float32)
        seeds = [int(seed) for seed in generator.integers(0, 2**63, 6)]
        each = [asked(**WAYS[way], seed=seed) for seed in seeds]
        tokens = draw_tokens(list(rows.copy()), each, [3] * 6)
        for row, seed, token in zip(rows, seeds, tokens, strict=True):
            assert distance(token, uniform_at(seed, 3), row, params) < most, size


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**63 - 1, 2**63, 2**64 - 1])
def test_random_numbers_are_numpys(seed: int) -> None:
    for position in (0, 1, 7, 100_000):
        numpys = np.random.Generator(np.random.Philox(key=seed, counter=position)).random()
        assert uniform_at(seed, position) == numpys


def test_rows_do_not_depend_on_each_other_nor_on_threads() -> None:
    generator = np.random.default_rng(0)
    rows = (generator.standard_normal((33, 3000)) * 3).astype(np.float32)
    each = [asked(**way, seed=seed) for seed, way in enumerate(list(WAYS.values()) * 3)]
    positions = list(range(33))
    alone = [
        draw_tokens([row.copy()], [params], [position])[0]
        for row, params, position in zip(rows, each, positions, strict=True)
    ]
    team = Team(2)
    assert draw_tokens(list(rows.copy()), each, positions, team) == alone
    team.close()


@pytest.mark.parametrize("way", WAYS)
def test_only_what_is_left_by_masks_is_drawn(way: str) -> None:
    row = np.full(5000, -np.inf, np.float32)
    row[[4, 4321, 4999]] = 1.0, 2.0, 1.5
    tokens = {draw_tokens([row.copy()], [asked(**WAYS[way], seed=seed)], [0])[0] for seed in range(60)}
    assert tokens <= {4, 4321, 4999} and 4321 in tokens


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_drawn_from_rows_that_say_nothing(way: str) -> None:
    empty, broken = np.full(300, -np.inf, np.float32), np.ones(300, np.float32)
    broken[77] = np.nan
    assert draw_tokens([empty, broken], [asked(**WAYS[way])] * 2, [0, 0]) == [NOTHING, NOTHING]


def test_of_equal_weights_the_lower_token_comes_first() -> None:
    row = np.zeros(1000, np.float32)
    drawn = {draw_tokens([row.copy()], [asked(top_k=3, seed=seed)], [0])[0] for seed in range(100)}
    assert drawn == {0, 1, 2}


@pytest.mark.parametrize("size", [1, 5, 64, 4095, 4096, 4097, 9001])
def test_the_likeliest_is_the_first_of_the_largest_and_what_is_no_number_comes_before(size: int) -> None:
    draw = np.random.default_rng(size)
    rows = draw.normal(size=(12, size)).astype(np.float32)
    rows[1] = np.round(rows[1])  # many are equal
    rows[2, -1] = rows[3, 0] = rows[4, size // 2] = 99.0
    rows[5], rows[6] = -np.inf, 0.0
    rows[7, size // 3] = np.nan
    rows[8, [size // 2, -1]] = np.nan
    rows[9, -1] = np.inf
    rows[10, : size // 2] = -np.inf
    wanted = [int(row.argmax()) for row in rows]
    for team in (None, Team(3)):
        assert likeliest_tokens(list(rows), team) == wanted
