"""One dispatch and its combine over a wire, step by step: the basis of every CPU exchange.

`send_rows` plans and writes the messages and sends them; `receive_rows` waits for the peers' messages and reads them;
`send_answers`, `receive_answers` and `sum_answers` bring the answers back. `Dispatcher` runs both halves at once, DeepEP's
low-latency calls leave time between them, and node-limited dispatch joins two exchanges. Exchanges may share a wire, one
call at a time. Each keeps the state of its own last dispatch, so other exchanges' calls may come before its combine.

An exchange connects the compiled passes to the wire's windows and owns the memory: buffers grow and are never released.
The caller checks arguments, except the values of slots, which are checked once while they are counted.

Legend: T tokens of this rank, K choices, H hidden, N rows received, P pairs, R ranks, S slots per rank.
"""

from collections.abc import Sequence
from time import perf_counter_ns
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from dispatch import cpu_kernels as kernels
from dispatch import layout
from dispatch.buffers import GrowingBuffer
from dispatch.compiled.native import compile_all
from dispatch.cpu_kernels import message
from dispatch.errors import RanksDisagree
from dispatch.row_formats import PlainRows, RowFormat
from dispatch.wires.wire import RankTable, Wire

CLOCK_BLOCK = 64  # exchanges, a few steps of most models
_NEVER = 1 << 62
_SUMS = {torch.float32: kernels.sum_answers_float32, torch.bfloat16: kernels.sum_answers_bfloat16}


class ExchangeClock:
    """Time that exchanges take, and how much of it wires take, in nanoseconds. Counters.

    A rank cannot distinguish waiting for a late peer from waiting for a wire. But an exchange in which this rank is the
    last takes only the wires' time. So if it is the last in some of a block's exchanges, CLOCK_BLOCK times the shortest
    is at most what the wires took in the block. On a rank that is never last the figure is too high, so the smallest
    figure of all ranks is the right one. Rejected: time stamps in messages (need equal clocks).

    Attributes:
        total_ns: Time in exchanges.
        wire_ns: The wires' share of it as estimated, whole blocks only; a lower bound on the rank with the smallest.
    """

    __slots__ = ("_left", "_shortest_ns", "total_ns", "wire_ns")

    def __init__(self) -> None:
        self.total_ns = self.wire_ns = 0
        self._shortest_ns, self._left = _NEVER, CLOCK_BLOCK

    def add(self, taken_ns: int) -> None:
        """Count one exchange."""
        self.total_ns += taken_ns
        if taken_ns < self._shortest_ns:
            self._shortest_ns = taken_ns
        self._left -= 1
        if not self._left:
            self.wire_ns += CLOCK_BLOCK * self._shortest_ns
            self._shortest_ns, self._left = _NEVER, CLOCK_BLOCK


class Sent(NamedTuple):
    """A dispatch that was sent, or received."""

    x_TH: Tensor
    hidden: int
    dtype: torch.dtype
    rows: int  # address of the rows in their format on the wire
    num_tokens: int
    num_choices: int
    capacity: int
    num_notes: int
    is_in_place: bool  # all rows received must be x_TH


class Exchange:
    """See the module. Calls are local, except those that wait: these are collective, in the same order on all ranks.

    Args:
        wire: Not owned.
        slots_per_rank: S; physical slot p is local slot p % S of rank p // S.
        rows: Format of rows on the wire; this exchange uses its memory.
        names: Numbers that errors use for the wire's ranks (default: the wire's own).

    Attributes:
        row_of_pair, slot_offsets: Result of `receive_rows`: int64 [P] and [S+1], see `dispatched.Dispatched`.
        dispatch_clock, combine_clock: Time from sending until everything has arrived.
        calls: Number for the next call; the owner counts it.
        num_begun, num_ended: Exchanges so far, of rows and of answers; the first rises before this rank waits for peers.
    """

    def __init__(
        self,
        wire: Wire,
        *,
        slots_per_rank: int,
        rows: RowFormat | None = None,
        names: Sequence[int] | None = None,
    ) -> None:
        R = wire.world_size
        self.wire, self.slots_per_rank, self.rows = wire, slots_per_rank, rows or PlainRows()
        self._names = range(R) if names is None else names
        self._shape = (slots_per_rank, R, wire.rank)
        self._send_bytes, self._answer_send, self._answer_recv = (RankTable(R) for _ in range(3))
        self._counts: Any = np.zeros((message.NUM_TABLES, R), dtype=np.int64)
        self._header = torch.zeros(message.HEADER_WORDS, dtype=torch.int64)
        self._words: Any = memoryview(self._header.numpy())  # type: ignore[arg-type]
        self._common: tuple[int, ...] = ()  # the header's words that repeat from the last call
        self._rank_of_slot = torch.arange(R, dtype=torch.int32).repeat_interleave(slots_per_rank)
        self.row_of_pair = torch.empty(0, dtype=torch.int64)
        self.slot_offsets = torch.zeros(slots_per_rank + 1, dtype=torch.int64)
        self._tables, self._header_at = int(self._counts.ctypes.data), self._header.data_ptr()
        self._offsets_at, self._homes_at = self.slot_offsets.data_ptr(), self._rank_of_slot.data_ptr()
        self._scratch, self._kept = GrowingBuffer(torch.uint8), GrowingBuffer(torch.uint8)
        self._row_of_pair, self._pair_of_answer = GrowingBuffer(torch.int64), GrowingBuffer(torch.int64)
        self._choices, self._own_entries = GrowingBuffer(torch.int32), GrowingBuffer(torch.int32)
        self._own_tokens, self._note = GrowingBuffer(torch.int64), GrowingBuffer(torch.int64)
        self.dispatch_clock, self.combine_clock = ExchangeClock(), ExchangeClock()
        self.num_begun = self.num_ended = self.calls = 0
        self._begun_ns = self._num_rows = self._entry_room = 0
        compile_all(*kernels.KERNELS)

    def make_room(self, like_TH: Tensor, num_choices: int, capacity: int, kept_bytes: int) -> None:
        """Take the memory for calls of this shape now, so that no such call takes any.

        Args:
            like_TH: Tensor with the H and type of tokens and answers.
            capacity: Most tokens of any rank.
            kept_bytes: Size of rows or answers that are kept.
        """
        self.rows.encode(like_TH, capacity)
        self._reserve_entries(capacity * (1 + num_choices))
        self._reserve_pairs(self._shape[1] * capacity * num_choices)
        self._scratch.reserve(8 * like_TH.shape[1])
        self._kept.reserve(max(kept_bytes, capacity * self.rows.row_bytes(like_TH.shape[1], like_TH.dtype)))

    def send_rows(
        self,
        x_TH: Tensor,
        slots_TK: Tensor,
        *,
        call: int,
        capacity: int = 0,
        note: Sequence[int] = (),
        is_unique: bool = False,
        keeps: bool = False,
        travelling: int | None = None,
        origins_T: Tensor | None = None,
    ) -> int:
        """Send each token's row once to every rank that holds one of its choices.

        Args:
            x_TH: Contiguous, on the CPU.
            slots_TK: int64, contiguous, physical slots in [0, R*S), -1 for no choice.
            call: Number that identifies this call; equal on all ranks, as are `capacity` and the length of `note`.
            capacity: Tokens to make room for at once; 0 makes room for T.
            note: Integers for every rank.
            is_unique: If true, a slot that a token repeats is one pair and its answer counts twice. Otherwise it is two.
            keeps: Whether x_TH may change before `receive_rows`.
            travelling: Address of the rows if they already have their format on the wire. Then only the H and type of
                x_TH are used.
            origins_T: int32, the origin of each row for the receiver (default: its token).

        Returns:
            -1, or the flat index of the first slot that is out of range; then nothing was sent.
        """
        (S, R, rank), (T, K), wire = self._shape, slots_TK.shape, self.wire
        hidden, dtype, rows_format, num_notes = x_TH.shape[1], x_TH.dtype, self.rows, len(note)
        slots, sizes, room = slots_TK.data_ptr(), self._send_bytes, capacity if capacity > T else T
        row_bytes = rows_format.row_bytes(hidden, dtype)
        format_word = rows_format.code(dtype) | num_notes << message.NOTE_SHIFT
        rows = rows_format.encode(x_TH, room) if travelling is None else travelling
        is_own = travelling is None and not rows_format.copies
        if is_own and keeps:
            rows, is_own = self._keep_rows(x_TH, room * row_bytes), False
        if room * (1 + K) > self._entry_room:
            self._reserve_entries(room * (1 + K))
        bad = kernels.plan(
            slots, T, K, S, R, rank, self._tables, row_bytes, format_word,
            self._homes_at, wire.mask.address, sizes.address, self._choices.address, int(is_unique),
        )  # fmt: skip
        if bad >= 0:
            return int(bad)
        self._write_header(call, row_bytes, K, S, capacity, format_word)
        if note:
            self._note.reserve(num_notes)
            self._note.view(num_notes).copy_(torch.tensor(note, dtype=torch.int64))
        self._sent = Sent(x_TH, hidden, dtype, rows, T, K, capacity, num_notes, R == 1 and is_own)
        self._send_planned(slots, 0 if origins_T is None else origins_T.data_ptr())
        return -1

    def receive_rows(self, num_groups: int = 1) -> tuple[Tensor, int]:
        """Wait for all rows, order their pairs and gather them. Collective.

        Args:
            num_groups: Origins are less than this, and every source sends its rows in order of origin. Rows are ordered
                by origin, then source. 1 orders them by source only.

        Returns:
            x_NH in the tokens' type (a view if possible) and P.

        Raises:
            RanksDisagree: A peer made another call.
            PeerRefused, PeerLost, DispatchTimeout: As the wire.
        """
        self._end(self.dispatch_clock)
        return self.take_rows(num_groups)

    def take_rows(self, num_groups: int = 1) -> tuple[Tensor, int]:
        """Run the rest of `receive_rows`, after all rows have arrived. Local."""
        sent, rows, R = self._sent, self.rows, self._shape[1]
        in_place = sent.num_tokens if sent.is_in_place else -1
        num_rows, num_pairs, row_room, stranger = self._read(num_groups, in_place)
        if stranger >= 0:
            self._disagree(stranger)
        if num_pairs > self._pair_of_answer.capacity or row_room < num_rows != in_place:
            self._reserve_pairs(max(R * sent.capacity * sent.num_choices, num_pairs))
            rows.reserve(max(R * sent.capacity, num_rows), sent.hidden, sent.dtype)
            self._read(num_groups, in_place)
        self._num_rows, self.row_of_pair = num_rows, self._row_of_pair.view(num_pairs)
        x_NH = sent.x_TH if num_rows == in_place else rows.decode(num_rows, sent.hidden, sent.dtype)
        return x_NH, num_pairs

    def receive_to_hand_on(self) -> tuple[int, Tensor, Tensor]:
        """Wait for rows that go on to other ranks. Collective; raises as `receive_rows`.

        This rank then owes one answer per (row, choice), numbered row * K + choice.

        Returns:
            Address of the rows in their format on the wire; int64 [N, K], their choices as slots of this rank; and
            int32 [N], the rank that each row came from. They live until the next call.
        """
        self._end(self.dispatch_clock)
        sent, (_, R, rank) = self._sent, self._shape
        windows, K = self.wire.recv_addresses.address, sent.num_choices
        num_rows, num_pairs = self._count_rows()
        self.rows.reserve(num_rows, sent.hidden, sent.dtype)
        self._reserve_pairs(num_pairs)
        rows_at, _ = self.rows.room(sent.hidden, sent.dtype)
        slots_NK = torch.empty(num_rows, K, dtype=torch.int64)
        source_N = torch.empty(num_rows, dtype=torch.int32)
        kernels.unpack(
            sent.rows, self._header_at, K, R, rank, 1, self._tables, windows, self._own_tokens.address,
            self._own_entries.address, rows_at,
        )  # fmt: skip
        kernels.forward(
            self._header_at, K, R, rank, self._tables, windows, self._own_entries.address, slots_NK.data_ptr(),
            source_N.data_ptr(), self._pair_of_answer.address,
        )  # fmt: skip
        return rows_at, slots_NK, source_N

    def receive_blocks(self, room: int, *results: int) -> None:
        """Wait for all rows and copy each to every slot that chose it. `results` are the arguments of
        `cpu_kernels.deliver` from `value_bytes` on. Collective; raises as `receive_rows`."""
        self._end(self.dispatch_clock)
        sent, (S, R, rank) = self._sent, self._shape
        self._reserve_pairs(R * sent.capacity * sent.num_choices)
        self._count_rows()
        kernels.deliver(
            self._header_at, sent.num_choices, S, R, rank, self._tables, self.wire.recv_addresses.address,
            self._own_entries.address, self._own_tokens.address, sent.rows, room, self._pair_of_answer.address, *results,
        )  # fmt: skip

    def send_answers(self, y: Tensor, *, call: int, keeps: bool = False) -> None:
        """Send the answers.

        Args:
            y: Contiguous; one row of the last dimension per pair, in the order that receiving the rows returned.
            call: As in `send_rows`.
            keeps: Whether y may change before `receive_answers`.
        """
        (_, R, rank), row_bytes = self._shape, y.shape[-1] * y.dtype.itemsize
        own, pairs = y.data_ptr(), self._pair_of_answer.address
        kernels.size_answers(
            row_bytes, R, rank, self._tables, self.wire.mask.address, self._answer_send.address,
            self._answer_recv.address,
        )  # fmt: skip
        if keeps:
            kept = self._kept.reserve(int(self._counts[message.RECV_PAIRS, rank]) * row_bytes)
            kernels.keep_own_answers(own, row_bytes, R, rank, self._tables, pairs, kept)
        self._send_sized(own, row_bytes, call)
        self._answers = (kept if keeps else own, 0 if keeps else pairs, row_bytes, call)

    def receive_answers(self) -> None:
        """Wait for all answers. Collective.

        Raises:
            As `receive_rows`.
        """
        self._end(self.combine_clock)

    def sum_answers(self, weights_TK: Tensor, out_TH: Tensor, choices: int = 0) -> None:
        """Sum the received answers as `Dispatcher.combine` does. `choices`: address of replacement choices, or 0.

        Raises:
            RanksDisagree: A peer's message is not the answer to this call.
        """
        _, R, rank = self._shape
        own, pairs, _, call = self._answers
        (T, H), K = out_TH.shape, weights_TK.shape[1]
        choices = choices or self._choices.address
        if out_TH.dtype not in _SUMS:
            answer_QH, has_choice_TK = self._gather(choices, out_TH.dtype)
            position_TK = torch.where(has_choice_TK, torch.arange(T * K).view(T, K), layout.NO_CHOICE)
            out_TH.copy_(layout.sum_answers(answer_QH, position_TK, weights_TK, out_TH.dtype))
            return
        weights_TK = weights_TK.float().contiguous()
        stranger = _SUMS[out_TH.dtype](
            own, weights_TK.data_ptr(), choices, T, K, H, R, rank, self._tables, self.wire.recv_addresses.address,
            pairs, self._scratch.reserve(8 * H), out_TH.data_ptr(), call,
        )  # fmt: skip
        if stranger >= 0:
            self._disagree_on_answers(stranger)

    def gather_answers(self, dtype: torch.dtype) -> Tensor:
        """Return the received answers, one row for each choice, [T*K, H]. Rows of -1 choices are undefined."""
        return self._gather(self._choices.address, dtype)[0]

    def choose_again(self, chosen_TK: Tensor, sent_TK: Tensor, out: int) -> int:
        """Run `cpu_kernels.choose_again`; `sum_answers` then takes `out`."""
        choices = self._choices.address
        return int(
            kernels.choose_again(chosen_TK.data_ptr(), sent_TK.data_ptr(), choices, chosen_TK.numel(), out)
        )

    def counts(self) -> list[int]:
        """Return the number of rows received from each rank. Rows are ordered by rank."""
        counts: list[int] = self._counts[message.RECV_ROWS].tolist()
        return counts

    def origins(self) -> Tensor:
        """Return int32 [N], the origin of each received row: its token at the source, or the `origins_T` sent."""
        _, R, rank = self._shape
        origin_N = torch.empty(self._num_rows, dtype=torch.int32)
        kernels.read_origins(
            self._header_at, self._sent.num_choices, R, rank, self._tables, self.wire.recv_addresses.address,
            self._own_entries.address, origin_N.data_ptr(),
        )  # fmt: skip
        return origin_N

    def notes(self) -> list[list[int]]:
        """Return every rank's note, by rank; a lost rank's is empty. Call it before the next send over the wire."""
        begin, end = message.HEADER_BYTES, message.HEADER_BYTES + 8 * self._sent.num_notes
        notes: list[list[int]] = []
        for peer in range(self._shape[1]):
            own = peer == self._shape[2]
            words = self._note.view(self._sent.num_notes) if own else self.wire.received(peer)[begin:end]
            notes.append(words.view(torch.int64).tolist())
        return notes

    def sent_bytes(self) -> tuple[list[int], list[int]]:
        """Return the bytes sent to each rank so far, by dispatches and by combines, including headers."""
        return self._counts[message.SENT_BYTES].tolist(), self._counts[message.ANSWERED_BYTES].tolist()

    def _write_header(self, call: int, *words: int) -> None:
        """Set the words that all messages of this call share: its number, then all other words after HEADER_PAIRS."""
        if words != self._common:
            self._common = words
            places = range(message.HEADER_ROW_BYTES, message.HEADER_WORDS)
            for place, word in zip((p for p in places if p != message.HEADER_CALL), words, strict=True):
                self._words[place] = word
        self._words[message.HEADER_CALL] = call

    def _send_planned(self, slots: int, origins: int) -> None:
        """Write the planned messages and send them. `slots` and `origins` are addresses."""
        (S, R, rank), wire, sent, sizes = self._shape, self.wire, self._sent, self._send_bytes
        wire.open_windows(sizes)
        kernels.pack(
            sent.rows, slots, self._choices.address, origins, sent.num_tokens, sent.num_choices, S, R, rank,
            self._tables, self._header_at, self._note.address, wire.mask.address, wire.send_addresses.address,
            self._own_tokens.address, self._own_entries.address,
        )  # fmt: skip
        self._begin(sizes, None)

    def _send_sized(self, answers: int, row_bytes: int, call: int) -> None:
        """Write the answers at an address and send them. The messages' sizes are known."""
        wire, sent, (_, R, rank) = self.wire, self._answer_send, self._shape
        wire.open_windows(sent)
        kernels.pack_answers(
            answers, row_bytes, R, rank, self._tables, sent.address, wire.send_addresses.address,
            self._pair_of_answer.address, call,
        )  # fmt: skip
        self._begin(sent, self._answer_recv)

    def _begin(self, sent: RankTable, received: RankTable | None) -> None:
        self.num_begun += 1
        self._begun_ns = perf_counter_ns()
        self.wire.begin_exchange(sent, received)

    def _end(self, clock: ExchangeClock) -> None:
        """Wait for the end of the exchange. Its time includes what the caller did since it began."""
        self.wire.finish_exchange()
        clock.add(perf_counter_ns() - self._begun_ns)
        self.num_ended += 1

    def _read(self, num_groups: int, in_place: int) -> tuple[int, int, int, int]:
        """Read the messages if there is room. Return rows, pairs, room for rows, and a peer that disagrees or -1."""
        sent, (S, R, rank) = self._sent, self._shape
        rows_at, row_room = self.rows.room(sent.hidden, sent.dtype)
        num_rows, num_pairs, stranger = kernels.receive(
            self._header_at, sent.num_choices, S, R, rank, num_groups, self._tables, self.wire.recv_addresses.address,
            self._own_entries.address, self._row_of_pair.address, self._offsets_at, self._pair_of_answer.address,
            self._pair_of_answer.capacity, sent.rows, self._own_tokens.address, rows_at, row_room, in_place,
        )  # fmt: skip
        return num_rows, num_pairs, row_room, stranger

    def _count_rows(self) -> tuple[int, int]:
        _, R, rank = self._shape
        num_rows, num_pairs, stranger = kernels.read_headers(
            self._header_at, R, rank, self._tables, self.wire.recv_addresses.address
        )
        if stranger >= 0:
            self._disagree(stranger)
        self._num_rows = num_rows
        return num_rows, num_pairs

    def _keep_rows(self, x_TH: Tensor, room_bytes: int) -> int:
        """Copy rows that may change before they are read, and return the copy's address."""
        address, taken = self._kept.reserve(room_bytes), x_TH.numel() * x_TH.element_size()
        self._kept.view(taken).copy_(x_TH.view(torch.uint8).view(-1))
        return address

    def _reserve_entries(self, num_entries: int) -> None:
        """Make room for the entries of all tokens and their choices."""
        self._choices.reserve(2 * num_entries)
        self._own_entries.reserve(num_entries)
        self._own_tokens.reserve(num_entries)
        self._entry_room = num_entries

    def _reserve_pairs(self, num_pairs: int) -> None:
        self._row_of_pair.reserve(num_pairs)
        self._pair_of_answer.reserve(num_pairs)

    def _gather(self, choices: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Copy each choice's answer to its place. Return [T*K, H], and bool [T, K], whether a choice has an answer."""
        _, R, rank = self._shape
        own, pairs, row_bytes, call = self._answers
        T, K, windows = self._sent.num_tokens, self._sent.num_choices, self.wire.recv_addresses.address
        stranger = kernels.check_answers(row_bytes, R, rank, windows, call)
        if stranger >= 0:
            self._disagree_on_answers(stranger)
        gathered = self._scratch.reserve(T * K * row_bytes)
        has_choice_TK = torch.empty(T, K, dtype=torch.bool)
        kernels.gather_answers(
            own, row_bytes, choices, T, K, R, rank, self._tables, windows, pairs, gathered, has_choice_TK.data_ptr()
        )  # fmt: skip
        answer_QH = self._scratch.view(T * K * row_bytes).view(dtype).view(T * K, row_bytes // dtype.itemsize)
        return answer_QH, has_choice_TK

    def _disagree_on_answers(self, peer: int) -> NoReturn:
        ours = f"rank {self._names[self.wire.rank]}'s combine with answers of {self._answers[2]} bytes"
        raise RanksDisagree(f"rank {self._names[peer]} made another call than {ours}")

    def _disagree(self, peer: int) -> NoReturn:
        """Name what differs. Every rank gets here: unless all are equal, each rank has a peer that differs."""
        theirs = self.wire.received(peer)[: message.HEADER_BYTES].view(torch.int64).tolist()
        ours, sent = list(self._words), self._sent
        wrong = [
            f"its {name} is {theirs[i]}, here {ours[i]}"
            for i, name in message.FIELDS.items()
            if theirs[i] != ours[i]
        ]
        made = f"H={sent.hidden}, K={sent.num_choices}, {sent.dtype}, slots per rank {self.slots_per_rank}"
        raise RanksDisagree(
            f"rank {self._names[peer]} made another call than rank {self._names[self.wire.rank]}'s dispatch with {made}: {'; '.join(wrong)}"
        )
