"""A rank's own choices of experts, interpreted: the layout's order, and exact counters by phase. Padding rows choose nothing."""

import pytest
import torch
from torch import Tensor

from dispatch import layout
from tests.support.ranks import RankPool

EXPERTS, SLOTS, CHOICES = 12, 13, 8  # one slot is empty


def make_ids(rows: int, num_real: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, some of which are no expert, cache slots, and the ids that count."""
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(-1, EXPERTS + 1, (rows, CHOICES), generator=generator)
    ids[rows // 2 :] = 5  # one expert takes all later rows
    cache_slots = torch.where(torch.arange(rows) < num_real, torch.arange(rows), -1)
    is_choice = (ids >= 0) & (ids < EXPERTS) & (cache_slots >= 0)[:, None]
    return ids, cache_slots, torch.where(is_choice, ids, -1)


def order_experts(rows: int, num_real: int, num_decodes: int, most: int) -> tuple[list[Tensor], list[Tensor]]:
    """Order twice through one object, counting both times. Return what was found, and what is right."""
    from dispatch.gpu.kernels import ordering, pairs  # noqa: PLC0415 - the interpreter is chosen before

    kept, ordering.MOST_AT_ONCE = ordering.MOST_AT_ONCE, most
    ids, cache_slots, real = make_ids(rows, num_real)
    slot_E = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(1))[:EXPERTS]
    counts, orders = (
        torch.zeros(2, EXPERTS + 1, dtype=torch.int64),
        pairs.PairOrders(SLOTS, torch.device("cpu")),
    )
    choices = ordering.ExpertChoices(ids, slot_E, cache_slots, torch.tensor([num_decodes]), counts)
    for _ in range(2):
        order = orders.order_experts(choices)
    ordering.MOST_AT_ONCE = kept
    slots = torch.where(real >= 0, slot_E[real.clamp(min=0)], -1)
    want, is_chosen = layout.order_pairs(slots, SLOTS), slots >= 0
    phases = real[num_decodes:], real[:num_decodes]
    of_experts = torch.stack([torch.bincount(phase[phase >= 0], minlength=EXPERTS) for phase in phases])
    found = [
        order.row_P[: len(want.row_P)], order.slot_offsets, order.pair_of_choice_NK[is_chosen].long(),
        order.pair_of_choice_NK[~is_chosen].unique(), counts,
    ]  # fmt: skip
    none = torch.tensor([-1] if (~is_chosen).any() else [], dtype=torch.int32)
    return found, [
        want.row_P, want.slot_offsets, want.pair_of_answer, none, 2 * torch.cat((of_experts, of_experts.sum(1)[:, None]), 1)
    ]  # fmt: skip


@pytest.mark.parametrize("most", [4096, 0], ids=["one launch", "three launches"])
@pytest.mark.parametrize(
    ("rows", "num_real", "num_decodes"),
    [(1, 1, 1), (8, 5, 5), (90, 90, 0), (90, 70, 40), (90, 90, 90), (8, 0, 0)],
    ids=["one row", "padded decodes", "prompts", "decodes and prompts", "decodes", "an idle step"],
)
def test_experts_are_ordered_by_slot_and_counted_by_phase(
    interpreter: RankPool, rows: int, num_real: int, num_decodes: int, most: int
) -> None:
    ((found, want),) = interpreter.run(order_experts, rows, num_real, num_decodes, most)
    assert all(torch.equal(ours, right) for ours, right in zip(found, want, strict=True)), (found, want)
