"""Dispatch and combine of a whole group in one process, from `dispatch.layout` only: the reference of every backend."""

from typing import NamedTuple

import torch
from torch import Tensor

from dispatch import layout


class RankCase(NamedTuple):
    """Inputs of one rank for one layer."""

    x_TH: Tensor
    slots_TK: Tensor
    weights_TK: Tensor


class RankResult(NamedTuple):
    """Expected results of one rank: from dispatch (the first three) and from combine."""

    x_NH: Tensor
    row_P: Tensor
    slot_offsets: Tensor
    combined_TH: Tensor


def make_cases(
    seed: int,
    tokens: list[int],
    *,
    hidden: int = 16,
    choices: int = 3,
    slots_per_rank: int = 4,
    no_choice: float = 0.2,
    dtype: torch.dtype = torch.float32,
    only_slot: int | None = None,
) -> list[RankCase]:
    """Draw random cases, one rank per entry of `tokens`. A share of the choices is -1, and duplicates may occur."""
    generator = torch.Generator().manual_seed(seed)
    cases = []
    for T in tokens:
        slots_TK = torch.randint(0, len(tokens) * slots_per_rank, (T, choices), generator=generator)
        if only_slot is not None:
            slots_TK.fill_(only_slot)
        slots_TK[torch.rand(T, choices, generator=generator) < no_choice] = -1
        x_TH = torch.randn(T, hidden, generator=generator).to(dtype)
        cases.append(RankCase(x_TH, slots_TK, torch.randn(T, choices, generator=generator)))
    return cases


def compute_pairs(x_NH: Tensor, row_P: Tensor, slot_offsets: Tensor, rank: int) -> Tensor:
    """Compute the experts' answers: a function of (row, physical slot) that is exact in any order."""
    S = slot_offsets.numel() - 1
    slot_P = torch.repeat_interleave(torch.arange(S), slot_offsets.diff()) + rank * S
    return (x_NH[row_P].float() * (slot_P + 1).unsqueeze(1) - slot_P.unsqueeze(1)).to(x_NH.dtype)


def simulate(cases: list[RankCase], slots_per_rank: int) -> list[RankResult]:
    """Run dispatch, `compute_pairs` and combine for all ranks."""
    R = len(cases)
    routes = [layout.route(case.slots_TK, slots_per_rank, R) for case in cases]
    dispatched, answers = [], []
    for rank in range(R):
        parts = [_part(routes[source], rank) for source in range(R)]
        x_NH = torch.cat([cases[s].x_TH[route_token] for s, (route_token, _) in enumerate(parts)])
        order = layout.order_pairs(torch.cat([local for _, local in parts]), slots_per_rank)
        y_PH = compute_pairs(x_NH, order.row_P, order.slot_offsets, rank)
        pair_counts = [int(routes[source].pair_counts_R[rank]) for source in range(R)]
        dispatched.append((x_NH, order.row_P, order.slot_offsets))
        answers.append(y_PH[order.pair_of_answer].split(pair_counts))
    results = []
    for rank, (case, parts_of) in enumerate(zip(cases, dispatched, strict=True)):
        answer_QH = torch.cat([answers[source][rank] for source in range(R)])
        position_TK = layout.answer_positions(case.slots_TK, slots_per_rank)
        combined = layout.sum_answers(answer_QH, position_TK, case.weights_TK, case.x_TH.dtype)
        results.append(RankResult(*parts_of, combined))
    return results


def _part(route: layout.RowsToSend, rank: int) -> tuple[Tensor, Tensor]:
    """Return the rows of `route` for one rank."""
    counts = route.row_counts_R.tolist()
    return route.token_N.split(counts)[rank], route.local_slots_NK.split(counts)[rank]
