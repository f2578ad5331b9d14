"""The oracle against brute force: every order written as loops over dictionaries."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dispatch import layout
from tests.dispatch.oracle import RankCase, compute_pairs, make_cases, simulate

S = 3


@st.composite
def groups(draw: st.DrawFn) -> list[RankCase]:
    """Draw 1 to 4 ranks with 0 to 5 tokens each, K from 1 (fewer than ranks) to 6 (more than ranks)."""
    tokens = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    one_slot = draw(st.booleans())
    return make_cases(
        draw(st.integers(0, 1 << 30)),
        tokens,
        hidden=4,
        choices=draw(st.integers(1, 6)),
        slots_per_rank=S,
        no_choice=draw(st.sampled_from([0.0, 0.3, 1.0])),
        only_slot=len(tokens) * S - 1 if one_slot else None,
    )


def brute_rows(cases: list[RankCase], rank: int) -> list[tuple[int, int]]:
    """Return (source rank, token) of each row that `rank` receives."""
    return [
        (source, t)
        for source, case in enumerate(cases)
        for t in range(case.slots_TK.shape[0])
        if any(int(slot) // S == rank for slot in case.slots_TK[t] if slot >= 0)
    ]


def brute_pairs(cases: list[RankCase], rank: int) -> list[tuple[int, int, int, int]]:
    """Return (local slot, source rank, token, choice) of each pair of `rank`, in order."""
    return sorted(
        (int(slot) - rank * S, source, t, k)
        for source, case in enumerate(cases)
        for t, slots in enumerate(case.slots_TK)
        for k, slot in enumerate(slots)
        if slot >= 0 and int(slot) // S == rank
    )


def brute_combine(case: RankCase) -> Tensor:
    """Return each token's sum, one choice after the other, without an exchange."""
    total_TH = torch.zeros_like(case.x_TH)
    for t, slots in enumerate(case.slots_TK):
        for k, slot in enumerate(slots.tolist()):
            if slot >= 0:
                offsets = torch.zeros(S + 1, dtype=torch.int64)
                offsets[slot % S + 1 :] = 1
                y_H = compute_pairs(
                    case.x_TH[t : t + 1], torch.zeros(1, dtype=torch.int64), offsets, slot // S
                )[0]
                total_TH[t] = total_TH[t] + case.weights_TK[t, k] * y_H
    return total_TH


@settings(max_examples=60, deadline=None)
@given(groups())
def test_oracle_equals_brute_force(cases: list[RankCase]) -> None:
    for rank, result in enumerate(simulate(cases, S)):
        rows = brute_rows(cases, rank)
        assert result.x_NH.shape[0] == len(rows)
        for row, (source, t) in zip(result.x_NH, rows, strict=True):
            assert torch.equal(row, cases[source].x_TH[t])
        pairs = brute_pairs(cases, rank)
        assert result.row_P.tolist() == [rows.index((source, t)) for _, source, t, _ in pairs]
        assert result.slot_offsets.tolist() == [sum(p[0] < s for p in pairs) for s in range(S + 1)]
        assert torch.equal(result.combined_TH, brute_combine(cases[rank]))


def test_a_token_goes_once_to_a_rank_that_holds_several_of_its_choices() -> None:
    slots_TK = torch.tensor([[0, 1, 5], [5, 4, 3]])
    route = layout.route(slots_TK, S, 2)
    assert route.token_N.tolist() == [0, 0, 1]
    assert route.row_counts_R.tolist() == [1, 2]
    assert route.pair_counts_R.tolist() == [2, 4]
    assert route.local_slots_NK.tolist() == [[0, 1, -1], [-1, -1, 2], [2, 1, 0]]


def test_the_sum_ignores_what_stands_beside_no_choice() -> None:
    position_TK, weights_TK = torch.tensor([[0, -1]]), torch.tensor([[2.0, float("nan")]])
    total_TH = layout.sum_answers(torch.tensor([[3.0]]), position_TK, weights_TK, torch.float32)
    assert total_TH.tolist() == [[6.0]]
