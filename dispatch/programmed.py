"""An exchange through shared memory with passes that run in programs; see `dispatch.cpu_kernels.passes`.

A program that sends is opened before it runs and finished after it. Finishing waits for the peers:

    open_rows; a program with the first pass; finish_rows;
    one with the second and third; finish_answers; open_rows; one with the last, and the next layer's first; ...

If a pass could not do its work, `Exchange`'s methods do it here, or raise its errors.

Legend: as in `exchange`.
"""

from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dispatch.arguments import slot_problem
from dispatch.cpu_kernels import passes
from dispatch.exchange import Exchange, Sent
from dispatch.wires.shm import ShmWire


class Room(NamedTuple):
    """The caller's memory for received rows and pairs. Fields are addresses and counts."""

    rows: int  # of [num_rows, H] float32
    num_rows: int
    row_of_pair: int  # of [num_pairs] int64
    num_pairs: int


class ProgrammedExchange(Exchange):
    """See the module. Rows are float32 and travel unchanged.

    Attributes:
        block: Address of the words that the passes read; it never changes.
    """

    def __init__(self, wire: ShmWire, *, slots_per_rank: int) -> None:
        super().__init__(wire, slots_per_rank=slots_per_rank)
        self._words_of_block = np.zeros(passes.BLOCK_WORDS, np.int64)
        self._b: Any = memoryview(self._words_of_block)  # type: ignore[arg-type]
        self.block = int(self._words_of_block.ctypes.data)
        self._shm = wire
        signals, regions, R, rank, region_bytes, numbers, mask = wire.place
        for place, word in {
            passes.RANKS: R, passes.RANK: rank, passes.SLOTS: slots_per_rank, passes.TABLES_AT: self._tables,
            passes.HEADER_AT: self._header_at, passes.HOMES_AT: self._homes_at, passes.MASK_AT: mask,
            passes.ROW_SIZES_AT: self._send_bytes.address, passes.ANSWER_SIZES_AT: self._answer_send.address,
            passes.ANSWERS_DUE_AT: self._answer_recv.address, passes.SEND_AT: wire.send_addresses.address,
            passes.RECV_AT: wire.recv_addresses.address, passes.OFFSETS_AT: self._offsets_at,
            passes.SIGNALS_AT: signals, passes.REGIONS_AT: regions, passes.REGION_BYTES: region_bytes,
            passes.NUMBERS_AT: numbers,
        }.items():  # fmt: skip
            self._b[place] = word

    @property
    def num_rows(self) -> int:
        """Address of the number of received rows."""
        return self.block + 8 * passes.NUM_ROWS

    def open_rows(self, num_tokens: int, num_choices: int, hidden: int, capacity: int, room: Room) -> None:
        """Prepare for a program that sends rows. Call before it. Local.

        Args:
            num_tokens: T. capacity: As in `send_rows`.
            room: Memory for the peers' rows.
        """
        b, num_entries = self._b, num_tokens * (1 + num_choices)
        self.calls += 2
        if num_entries > self._entry_room:
            self._reserve_entries(num_entries)
        if room.num_pairs > self._pair_of_answer.capacity:
            self._reserve_pairs(room.num_pairs)
        code = self.rows.code(torch.float32)
        self._write_header(self.calls, 4 * hidden, num_choices, self.slots_per_rank, capacity, code)
        b[passes.STATE], b[passes.EXCHANGE] = passes.FINE, self._shm.next_number
        b[passes.CHOICES_AT], b[passes.OWN_TOKENS_AT] = self._choices.address, self._own_tokens.address
        b[passes.OWN_ENTRIES_AT], b[passes.PAIR_OF_ANSWER_AT] = (
            self._own_entries.address,
            self._pair_of_answer.address,
        )
        b[passes.ROWS_AT], b[passes.ROW_ROOM] = room.rows, room.num_rows
        b[passes.ROW_OF_PAIR_AT], b[passes.PAIR_ROOM] = room.row_of_pair, room.num_pairs

    def finish_rows(self, x_TH: Tensor, slots_TK: Tensor, capacity: int) -> None:
        """Wait for the peers' rows. Call after the program. Collective; raises as `Dispatcher.dispatch` and `check`.

        Args:
            x_TH, slots_TK: The tokens and choices that the program sent.
        """
        self.check()
        (T, H), K, sizes = x_TH.shape, slots_TK.shape[1], self._send_bytes
        self._sent = Sent(x_TH, H, torch.float32, x_TH.data_ptr(), T, K, capacity, 0, False)
        state = self._b[passes.STATE]
        if state == passes.BAD_SLOT:
            problem = slot_problem(slots_TK, self._b[passes.FOUND], self._shape[1], self.slots_per_rank)
            self.wire.refuse(problem)
            raise ValueError(problem)
        if state == passes.ROWS_TOO_LARGE:
            self._b[passes.STATE] = passes.FINE
            self._send_planned(slots_TK.data_ptr(), 0)
        else:
            self._note_begun()
            self._shm.note_begun(sizes, None)
        self._end(self.dispatch_clock)
        self._b[passes.EXCHANGE] = self._shm.next_number
        self._b[passes.ANSWER_CALL], self._b[passes.ANSWER_CHOICES] = self.calls + 1, K

    def finish_answers(self, y_PH: Tensor) -> bool:
        """Wait for the peers' answers, after a program that received rows and sent answers. Collective.

        Args:
            y_PH: Memory of the program's answers; it may be larger.

        Returns:
            False if there was no room for the received rows. Then nothing was sent or waited for: the caller gets the
            rows with `take_rows` and answers with `send_answers` and `receive_answers`.

        Raises:
            As `Exchange.receive_rows`.
        """
        state, sent, received = self._b[passes.STATE], self._answer_send, self._answer_recv
        if state == passes.OTHER_CALL:
            self._disagree(self._b[passes.FOUND])
        if state == passes.NO_ROOM:
            self._b[passes.STATE] = passes.FINE
            return False
        self._answers = (y_PH.data_ptr(), self._pair_of_answer.address, 4 * y_PH.shape[1], self.calls + 1)
        if state == passes.ANSWERS_TOO_LARGE:
            self._b[passes.STATE] = passes.FINE
            self._send_sized(y_PH.data_ptr(), 4 * y_PH.shape[1], self.calls + 1)
        else:
            self._note_begun()
            self._shm.note_begun(sent, received)
        self._end(self.combine_clock)
        return True

    def answer(self, y_PH: Tensor) -> None:
        """Send answers and wait for the peers' if `finish_answers` returned False. Collective; raises as `receive_answers`."""
        self.send_answers(y_PH, call=self.calls + 1, keeps=True)
        self.receive_answers()
        self._b[passes.ANSWERS_AT], self._b[passes.ANSWER_PAIRS_AT] = self._answers[:2]

    def check(self) -> None:
        """Check the result of a program that summed answers.

        Raises:
            RanksDisagree: A peer's message was not the answer to this call.
        """
        if self._b[passes.STATE] == passes.OTHER_ANSWERS:
            self._disagree_on_answers(self._b[passes.FOUND])

    def _note_begun(self) -> None:
        self.num_begun += 1
        self._begun_ns = perf_counter_ns()
