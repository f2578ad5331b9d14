"""An exchange by programs yields the bits of `Dispatcher`, for each part that the passes may leave to Python."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dispatch.compiled.team import Team, program_of, run_alone
from dispatch.cpu_kernels import passes
from dispatch.cpu_kernels.passes import pass_rows
from dispatch.dispatcher import Dispatcher
from dispatch.mode import Mode
from dispatch.programmed import ProgrammedExchange, Room
from dispatch.wires.shm import ShmWire
from tests.dispatch.exchange import catch
from tests.fixtures import PoolOf

HIDDEN, CHOICES, SLOTS = 24, 3, 4
PLENTY = 64


class Call(NamedTuple):
    """Rows that a rank sends, with slots and weights."""

    x_TH: Tensor
    slots_TK: Tensor
    weights_TK: Tensor


def calls_of(rank: int, world_size: int) -> list[Call]:
    """Return some calls of a rank, one of them without tokens."""
    draw = torch.Generator().manual_seed(rank)
    return [
        Call(
            torch.randn(tokens, HIDDEN, generator=draw),
            torch.randint(-1, SLOTS * world_size, (tokens, CHOICES), generator=draw),
            torch.rand(tokens, CHOICES, generator=draw),
        )
        for tokens in ((5 + 3 * rank, 1), (0, 7), (9, 2))[rank % 3]
    ]


def answers(x_NH: Tensor, row_P: Tensor, offsets: Tensor) -> Tensor:
    """Return each slot's answer to a row: a different multiple of it."""
    slot_P = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())
    return x_NH[row_P] * (1.0 + slot_P.unsqueeze(1))


def by_dispatcher(dispatcher: Dispatcher, call: Call, capacity: int) -> Tensor:
    """Run a call through the dispatcher. The oracle."""
    sent = dispatcher.dispatch(call.x_TH, call.slots_TK, Mode(capacity))
    y_PH = answers(sent.x_NH, sent.row_P, sent.slot_offsets)
    return dispatcher.combine(y_PH, call.weights_TK, sent)


class InPrograms:
    """Calls by programs, with room for `room` rows."""

    def __init__(self, exchange: ProgrammedExchange, room: int, threads: int = 1) -> None:
        self.exchange = exchange
        self.states: list[int] = []
        self._run = run_alone if threads == 1 else Team(threads).run
        self._received, self._row_of = (
            torch.empty(room, HIDDEN),
            torch.empty(room * CHOICES, dtype=torch.int64),
        )
        self._answers = torch.empty(room * CHOICES, HIDDEN)
        self._room = Room(self._received.data_ptr(), room, self._row_of.data_ptr(), room * CHOICES)

    def run(self, call: Call, capacity: int) -> Tensor:
        exchange, (x_TH, slots_TK, weights_TK) = self.exchange, call
        facts, out_TH = torch.tensor([len(x_TH)]), torch.full_like(x_TH, torch.nan)
        send, receive, answer, add = pass_rows(
            exchange.block, x=x_TH.data_ptr(), slots=slots_TK.data_ptr(), num_tokens=facts.data_ptr(),
            answers=self._answers.data_ptr(), weights=weights_TK.data_ptr(), out=out_TH.data_ptr(), hidden=HIDDEN,
        )  # fmt: skip
        exchange.open_rows(len(x_TH), CHOICES, HIDDEN, capacity, self._room)
        self._run(program_of([send]))
        self._note()
        exchange.finish_rows(x_TH, slots_TK, capacity)
        self._run(program_of([receive]))
        pairs = int(exchange.slot_offsets[-1])
        self._answers[:pairs] = answers(self._received, self._row_of[:pairs], exchange.slot_offsets)
        self._run(program_of([answer]))
        self._note()
        if not exchange.finish_answers(self._answers):
            x_NH, _ = exchange.take_rows()
            exchange.answer(answers(x_NH, exchange.row_of_pair, exchange.slot_offsets))
        self._run(program_of([add]))
        exchange.check()
        return out_TH

    def _note(self) -> None:
        self.states.append(int(exchange_state(self.exchange)))


def exchange_state(exchange: ProgrammedExchange) -> int:
    """Return why the passes stopped."""
    state: int = exchange._b[passes.STATE]
    return state


def opened(region_bytes: int | None = None) -> tuple[Dispatcher, ProgrammedExchange]:
    """Open a dispatcher of all ranks over shared memory, and the exchange that programs call."""
    wire = ShmWire(
        dist.group.WORLD, timeout_s=20.0, epoch=0, reason="it is tested", region_bytes=region_bytes
    )
    dispatcher = Dispatcher(wire, slots_per_rank=SLOTS)
    exchange = dispatcher.in_programs
    assert exchange is not None
    return dispatcher, exchange


class Found(NamedTuple):
    """Results of each call on a rank, both ways, and why passes stopped."""

    ours: list[Tensor]
    theirs: list[Tensor]
    states: set[int]
    sent: list[list[int]]
    counted: tuple[int, int]


def both_ways(room: int, region_bytes: int | None, capacity: int, threads: int) -> Found:
    """Run every call by the dispatcher and by programs, alternating over one wire."""
    dispatcher, exchange = opened(region_bytes)
    programs, ours, theirs, sent = InPrograms(exchange, room, threads), [], [], []
    for call in calls_of(dist.get_rank(), dist.get_world_size()):
        theirs.append(by_dispatcher(dispatcher, call, capacity))
        sent.append([sum(each) for each in dispatcher.sent_to_ranks()])
        ours.append(programs.run(call, capacity))
        sent.append([sum(each) for each in dispatcher.sent_to_ranks()])
    counted = dispatcher.exchanges
    dispatcher.close()
    return Found(ours, theirs, set(programs.states), sent, (counted.begun, counted.ended))


@pytest.mark.crossed("threads", "capacity", "world_size", every=2)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("capacity", [0, 16])
@pytest.mark.parametrize("threads", [1, 2])
def test_programs_give_the_dispatcher_s_bits(
    pool_of: PoolOf, world_size: int, capacity: int, threads: int
) -> None:
    for found in pool_of(world_size).run(both_ways, PLENTY, None, capacity, threads):
        assert all(map(torch.equal, found.ours, found.theirs))
        assert found.states == {passes.FINE}
        assert found.counted == (8, 8)
        before = [0, 0]
        steps = []
        for total in found.sent:
            steps.append([now - then for now, then in zip(total, before, strict=True)])
            before = total
        assert steps[0::2] == steps[1::2]  # both send equally many bytes


def test_messages_larger_than_their_windows_go_in_parts(pool_of: PoolOf) -> None:
    found = pool_of(2).run(both_ways, PLENTY, 192, 0, 1)
    assert all(torch.equal(*pair) for each in found for pair in zip(each.ours, each.theirs, strict=True))
    assert {passes.ROWS_TOO_LARGE, passes.ANSWERS_TOO_LARGE} <= set.union(*(each.states for each in found))


def test_more_rows_than_there_is_room_for_are_taken_by_python(pool_of: PoolOf) -> None:
    found = pool_of(2).run(both_ways, 4, None, 0, 1)
    assert all(torch.equal(*pair) for each in found for pair in zip(each.ours, each.theirs, strict=True))
    assert all(passes.NO_ROOM in each.states for each in found)


def without_a_rank() -> list[Tensor]:
    """Run the first two ranks without the last, which takes no part."""
    dispatcher, exchange = opened()
    found = []
    if dist.get_rank() < 2:
        dispatcher.wire.mask.values[2] = 1
        call = calls_of(dist.get_rank(), 3)[0]
        found = [by_dispatcher(dispatcher, call, 0), InPrograms(exchange, PLENTY).run(call, 0)]
    dist.barrier()
    dispatcher.close()
    return found


def test_a_masked_rank_takes_no_part(pool_of: PoolOf) -> None:
    for found in pool_of(3).run(without_a_rank)[:2]:
        assert torch.equal(*found)


def with_a_bad_slot() -> tuple[str, Tensor, Tensor]:
    """Send from rank 0 to a slot that does not exist. The next call must work."""
    dispatcher, exchange = opened()
    programs, call = InPrograms(exchange, PLENTY), calls_of(dist.get_rank(), 2)[0]
    bad = call.slots_TK.clone()
    if dist.get_rank() == 0:
        bad[1, 2] = 2 * SLOTS
    error = catch(lambda: programs.run(call._replace(slots_TK=bad), 0))
    found = error, programs.run(call, 0), by_dispatcher(dispatcher, call, 0)
    dispatcher.close()
    return found


def test_a_slot_that_nobody_has_is_named_on_all_ranks_and_the_next_call_works(pool_of: PoolOf) -> None:
    for text, ours, theirs in pool_of(2).run(with_a_bad_slot):
        assert "slots_TK[1, 2] is 8; it must be -1 or in [0, 8)" in text
        assert torch.equal(ours, theirs)


def out_of_step(spoil: Callable[[ProgrammedExchange], None]) -> str:
    """Let rank 1 be at another call."""
    dispatcher, exchange = opened()
    if dist.get_rank() == 1:
        spoil(exchange)
    call = calls_of(dist.get_rank(), 2)[0]
    error = catch(lambda: InPrograms(exchange, PLENTY).run(call, 0))
    dispatcher.close()
    return error


def at_another_call(exchange: ProgrammedExchange) -> None:
    """Skip two calls."""
    exchange.calls += 2


def with_other_answers(exchange: ProgrammedExchange) -> None:
    """Answer another call than the one received."""
    finish = exchange.finish_rows

    def finish_wrongly(x_TH: Tensor, slots_TK: Tensor, capacity: int) -> None:
        finish(x_TH, slots_TK, capacity)
        exchange._b[passes.ANSWER_CALL] += 2

    exchange.finish_rows = finish_wrongly  # type: ignore[method-assign]


def test_ranks_at_different_calls_are_told_so(pool_of: PoolOf) -> None:
    for rank, text in enumerate(pool_of(2).run(out_of_step, at_another_call)):
        assert f"rank {1 - rank} made another call than rank {rank}'s" in text and "call number" in text


def test_answers_to_another_call_are_not_summed(pool_of: PoolOf) -> None:
    for rank, text in enumerate(pool_of(2).run(out_of_step, with_other_answers)):
        assert (
            text
            == f"RanksDisagree: rank {1 - rank} made another call than rank {rank}'s combine with answers of 96 bytes"
        )
