"""Experts that are spread over ranks, in programs. A layer's program is cut only at its waits for other ranks.

The kernel chooses slots and counts, like `expert_placement.choose` and `moe.load_counts`. Dispatch and combine are the
passes of `dispatch.cpu_kernels.passes`. `moe.cpu.kernels.local_experts` does the same for a lone rank.

Legend: T rows, K choices, P = T x K pairs, S slots of a rank, E experts, R ranks, C copies of all experts, D hidden dim.
"""

import zlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
from numba import carray, types
from torch import Tensor

from attention.cpu.tiles import TILES_VERSION
from dispatch.compiled.native import pointer, words
from dispatch.compiled.team import Kernel, Program, program_of
from dispatch.cpu_kernels.passes import pass_rows
from dispatch.dispatcher import Dispatcher
from dispatch.programmed import ProgrammedExchange, Room
from expert_placement import choose
from expert_placement.choose import ReplicaChoice, choose_slots
from expert_placement.kernels import compiled
from kvcache.step import Step
from moe import load_counts
from moe.backend import ExpertLayer
from moe.cpu.experts import PackedExpertLayer
from moe.cpu.program.activations import Activations, Rows
from moe.cpu.program.expert_rows import ExpertsClock, RoutedRows, expert_rows
from moe.load_counts import LayerCounts, count


def _choose(  # type: ignore[no-untyped-def]
    tile, ids, num_choices, num_experts, num_copies, first, slot, until, phase, facts, table, num_ranks,
    slots_per_rank, slots, adapters, num_groups,
):  # fmt: skip
    if tile < 0:
        return 1
    num_decodes, pairs = words(facts, 3)[2], words(facts, 3)[0] * num_choices
    choose_slots(
        words(ids, pairs),
        words(first, num_experts + 1),
        words(slot, num_copies),
        carray(pointer(until), (num_copies,), types.float64),
        carray(pointer(phase), (num_experts,), types.float64),
        words(slots, pairs),
    )
    if table != 0:
        count(ids, slots, pairs, num_decodes * num_choices, num_experts, num_ranks, slots_per_rank, table)
    if num_groups != slots_per_rank:
        chosen, place = words(slots, pairs), words(adapters, words(facts, 3)[0])
        copies = num_groups // slots_per_rank
        for pair in range(pairs):
            chosen[pair] = chosen[pair] * copies + place[pair // num_choices] + 1
    return 0


_VERSION = zlib.crc32(
    b"".join(Path(str(module.__file__)).read_bytes() for module in (choose, compiled, load_counts)),
    TILES_VERSION,
)
CHOOSE = Kernel(_choose, _VERSION)


def choose_row(
    ids: int, num_choices: int, choice: ReplicaChoice, layer: int, counts: LayerCounts | None, shape: tuple[int, int],
    facts: int, slots: int, adapters: int = 0, num_groups: int = 0,
) -> list[int]:  # fmt: skip
    """Return a program row that chooses a copy for every choice, and counts.

    Args:
        ids: Address of [T, K] int64. num_choices: K.
        choice: Its tables must stay alive while the row is used. layer: Index of the table.
        counts: Counters; None disables counting.
        shape: R and S.
        facts: See `moe.cpu.kernels.local_experts.SORT_PAIRS`.
        slots: Address of [T, K] int64, written: the slots, or the groups of `moe.cpu.experts.PackedExpertLayer.groups_of`.
        adapters: Address of [T] int64, the place of each row's adapter. num_groups: Groups of a rank; 0 if there are only slots.
    """
    table, phase_E = choice.table(layer), choice.phase_E
    return CHOOSE.row(
        ids, num_choices, len(phase_E), len(table.slot), table.first.ctypes.data, table.slot.ctypes.data,
        table.until.ctypes.data, phase_E.ctypes.data, facts, 0 if counts is None else counts.address, *shape, slots,
        adapters, num_groups or shape[1],
    )  # fmt: skip


class Chosen(NamedTuple):
    """Output of a layer's rows before the experts, with as many rows as a step can have."""

    x_TD: Tensor
    ids_TK: Tensor
    weights_TK: Tensor


class SpreadExperts:
    """A layer's experts in programs, with the parts that Python runs. Methods are local unless marked collective.

    Attributes:
        sending, answering, summing: Its rows. An exchange with other ranks follows the first and the second.
        sums_TD: Output of the last.
    """

    def __init__(
        self, module: Any, layer: PackedExpertLayer, chosen: Chosen, step: Step, activations: Activations,
        clock: ExpertsClock,
    ) -> None:  # fmt: skip
        """Write the rows of a layer with a dispatcher `in_programs`, for `activations.tokens_per_rank`."""
        exchange = exchange_of(layer)
        assert exchange is not None
        self._module, self._layer, self._chosen, self._step = module, layer, chosen, step
        self._exchange, self._activations = exchange, activations
        num_ranks, num_slots = layer.dispatcher.world_size, layer.up.num_slots
        D, K = chosen.x_TD.shape[1], chosen.ids_TK.shape[1]
        most = num_ranks * activations.tokens_per_rank
        received = activations.room("received", D, rows=most)
        row_of = activations.room("row_of", 1, torch.int64, rows=most * K).data_ptr()
        self._room = Room(received.data_ptr(), most, row_of, most * K)
        self._slots_TK = activations.room("slots", K, torch.int64)
        self.sums_TD = activations.room("summed", D)
        facts = step.facts.data_ptr() + 8
        asked = RoutedRows(
            received, exchange.num_rows, row_of, exchange.slot_offsets.data_ptr(), most * K, layer.num_groups
        )
        products, self._answers_PD = expert_rows(layer, asked, activations, clock)
        send, receive, answer, add = pass_rows(
            exchange.block, x=chosen.x_TD.data_ptr(), slots=self._slots_TK.data_ptr(), num_tokens=facts,
            answers=self._answers_PD.data_ptr(), weights=chosen.weights_TK.data_ptr(), out=self.sums_TD.data_ptr(), hidden=D,
        )  # fmt: skip
        choose_slots = choose_row(
            chosen.ids_TK.data_ptr(), K, layer.choice.replicas, layer.choice.layer, layer.counts,
            (num_ranks, num_slots), facts, self._slots_TK.data_ptr(), step.adapter_T.data_ptr(), layer.num_groups,
        )  # fmt: skip
        self.sending: Rows = [choose_slots, send]
        self.answering: Program = program_of([receive, *products, answer])
        self.summing: Rows = [add]

    def open(self) -> None:
        """Prepare the program that sends rows."""
        step, (_, D), K = self._step, self._chosen.x_TD.shape, self._chosen.ids_TK.shape[1]
        self._exchange.open_rows(step.num_tokens, K, D, step.agreed_tokens, self._room)

    def meet_with_rows(self) -> None:
        """Wait for other ranks' rows, after the program that sends. Collective; raises as `Dispatcher.dispatch`."""
        step, rows = self._step, self._step.num_tokens
        self._exchange.finish_rows(self._chosen.x_TD[:rows], self._slots_TK[:rows], step.agreed_tokens)

    def meet_with_answers(self) -> None:
        """Wait for other ranks' answers, after the program that answers. Collective; raises as `Dispatcher.combine`."""
        exchange = self._exchange
        if not exchange.finish_answers(self._answers_PD):
            x_ND, _ = exchange.take_rows()
            answers = self._layer.compute(
                self._module, x_ND, exchange.row_of_pair, exchange.slot_offsets, self._step.team
            )
            exchange.answer(answers)
            # Takes effect in the next step.
            self._activations.make_room(-(-len(x_ND) // self._layer.dispatcher.world_size))

    def finish(self) -> None:
        """Check the exchange, after the last program that summed answers; raises as `Dispatcher.combine`."""
        self._exchange.check()


def exchange_of(layer: ExpertLayer) -> ProgrammedExchange | None:
    """Return the exchange that programs can use for a layer's tokens, or None."""
    if not isinstance(layer, PackedExpertLayer) or not isinstance(layer.dispatcher, Dispatcher):
        return None
    return layer.dispatcher.in_programs
