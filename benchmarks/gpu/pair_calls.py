"""One rank's dispatch as kernels: choices sorted into pairs, and each token's answers summed with their weights.

Legend: T tokens, K choices, S slots, P pairs, H hidden.
"""

import functools

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench, Call, bytes_of, spoiling
from dispatch.gpu.combine import combine_pairs
from dispatch.gpu.permute import PairOrder, PairOrders


def permute_call(bench: Bench, seed: int, *, rows: int, choices: int, slots: int) -> Call:
    """Sort choices by slot; each tenth is none."""
    slots_TK = _choices(bench, seed, rows, choices, slots)
    orders = PairOrders(slots, bench.device)

    def checked(order: PairOrder) -> Tensor:
        """All three results behind each other; memory behind the last pair is not defined but for its rows."""
        parts = (order.row_P, order.slot_offsets, order.pair_of_choice_TK.flatten())
        return torch.cat([part.float() for part in parts])

    def oracle(shift: int = 0) -> Tensor:
        flat = slots_TK.flatten().roll(shift)
        flat = torch.where(flat < 0, slots, flat)
        by_slot = flat.sort(stable=True)
        rank = torch.empty_like(flat).scatter(0, by_slot.indices, torch.arange(len(flat), device=flat.device))
        row_P = torch.where(by_slot.values < slots, by_slot.indices // choices, 0)
        ends = torch.bincount(flat, minlength=slots + 1)[:slots].cumsum(0)
        pair = torch.where(flat < slots, rank, -1)
        return torch.cat((row_P, ends.new_zeros(1), ends, pair)).float()

    return Call(
        run=functools.partial(orders.order, slots_TK), result=checked, oracle=oracle,
        control=functools.partial(oracle, 1), num_bytes=bytes_of(slots_TK) + rows * choices * 12 + 8 * slots,
    )  # fmt: skip


def combine_call(bench: Bench, seed: int, *, rows: int, choices: int, hidden: int) -> Call:
    """Sum each token's answers, which lie anywhere."""
    generator = bench.generator(seed)
    answers = bench.normal(generator, rows * choices, hidden)
    pairs = torch.randperm(rows * choices, generator=generator, device=bench.device).int().view(rows, choices)
    weights = torch.rand(rows, choices, generator=generator, device=bench.device)
    out = answers.new_empty(rows, hidden)

    def oracle(shift: int = 0) -> Tensor:
        own = answers[pairs.long().roll(shift, 0)].float()
        return (own * weights[..., None]).sum(1)

    return Call(
        run=functools.partial(combine_pairs, answers, pairs, weights, out), prepare=spoiling(out), oracle=oracle,
        control=functools.partial(oracle, 1), num_bytes=bytes_of(answers, out, weights, pairs),
    )  # fmt: skip


def _choices(bench: Bench, seed: int, rows: int, choices: int, slots: int) -> Tensor:
    generator = bench.generator(seed)
    drawn = torch.randint(0, slots, (rows, choices), generator=generator, device=bench.device)
    is_none = torch.rand(rows, choices, generator=generator, device=bench.device) < 0.1
    return drawn.masked_fill(is_none, -1)
