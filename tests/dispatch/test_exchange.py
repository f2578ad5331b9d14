"""A single exchange: data sent with the rows, data that it keeps, and its duration."""

import random
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dispatch.exchange import CLOCK_BLOCK as BLOCK
from dispatch.exchange import Exchange, ExchangeClock
from dispatch.wires.open import open_wire
from tests.dispatch.exchange import catch
from tests.fixtures import PoolOf


def test_total_is_the_sum_and_wires_come_in_whole_blocks() -> None:
    clock = ExchangeClock()
    for _ in range(BLOCK - 1):
        clock.add(5)
    assert (clock.total_ns, clock.wire_ns) == (5 * (BLOCK - 1), 0)
    clock.add(3)
    assert (clock.total_ns, clock.wire_ns) == (5 * (BLOCK - 1) + 3, 3 * BLOCK)


def test_ranks_that_are_late_in_turn_find_the_wires_time() -> None:
    """Four ranks, each equally often the last: an exchange lasts until the last rank's arrival, plus the wire time."""
    draw, clocks, wire_ns, rounds = random.Random(0), [ExchangeClock() for _ in range(4)], 20, 10 * BLOCK
    for _ in range(rounds):
        arrivals = [draw.randrange(1000) for _ in clocks]
        for clock, arrival in zip(clocks, arrivals, strict=True):
            clock.add(max(arrivals) - arrival + wire_ns)
    assert min(clock.wire_ns for clock in clocks) == wire_ns * rounds
    assert min(clock.total_ns for clock in clocks) > 10 * wire_ns * rounds


def test_a_rank_that_is_never_last_does_not_hide_the_one_that_is() -> None:
    early, last = ExchangeClock(), ExchangeClock()
    for _ in range(BLOCK):
        early.add(500 + 20)
        last.add(20)
    assert min(early.wire_ns, last.wire_ns) == 20 * BLOCK


class Heard(NamedTuple):
    """What a rank received in a dispatch of bytes."""

    rows: Tensor
    origins: list[int]
    counts: list[int]
    notes: list[list[int]]
    answers: Tensor


def send_bytes_with_notes(name: str) -> Heard:
    """Send row i to rank i % R with a note on every rank. Answers are the doubled rows, sent during another exchange."""
    wire = open_wire(name, dist.group.WORLD, timeout_s=20.0)
    R, rank = wire.world_size, wire.rank
    first, second = (Exchange(wire, slots_per_rank=1) for _ in range(2))
    x_TB = torch.arange(5, dtype=torch.uint8).unsqueeze(1).expand(5, 6) + 10 * rank
    to_T1 = (torch.arange(5) % R).unsqueeze(1)
    assert first.send_rows(x_TB.contiguous(), to_T1, call=7, note=(rank, -rank, 9)) == -1
    x_NB, num_pairs = first.receive_rows()
    heard = x_NB.clone(), first.origins().tolist(), first.counts(), first.notes()
    assert num_pairs == len(x_NB)
    doubled_NH = 2.0 * x_NB.to(torch.float32)
    assert second.send_rows(torch.ones(1, 3), torch.tensor([[R - 1]]), call=8) == -1  # uses its own buffers
    second.receive_rows()
    first.send_answers(doubled_NH, call=9)
    first.receive_answers()
    out_TH = torch.empty(5, 6)
    first.sum_answers(torch.ones(5, 1), out_TH)
    wire.close()
    return Heard(*heard, out_TH)


@pytest.mark.parametrize(("name", "world_size"), [("shm", 2), ("gloo", 3)])
def test_bytes_travel_with_their_origins_and_every_rank_hears_the_notes(
    pool_of: PoolOf, name: str, world_size: int
) -> None:
    for rank, heard in enumerate(pool_of(world_size).run(send_bytes_with_notes, name)):
        tokens = list(range(rank, 5, world_size))
        assert heard.origins == tokens * world_size
        assert heard.counts == [len(tokens)] * world_size
        assert heard.notes == [[source, -source, 9] for source in range(world_size)]
        want = [10 * source + token for source in range(world_size) for token in tokens]
        assert heard.rows[:, 0].tolist() == want and heard.rows.shape[1] == 6
        assert heard.answers[:, 5].tolist() == [2.0 * (10 * rank + token) for token in range(5)]


def send_notes_of_other_lengths() -> str:
    wire = open_wire("shm", dist.group.WORLD, timeout_s=20.0)
    exchange = Exchange(wire, slots_per_rank=1)
    exchange.send_rows(torch.ones(1, 2), torch.tensor([[0]]), call=1, note=(1,) * (1 + wire.rank))
    said = catch(exchange.receive_rows)
    wire.close()
    return said


def test_notes_of_other_lengths_are_another_call(pool_of: PoolOf) -> None:
    assert all("dtype, row format and note" in text for text in pool_of(2).run(send_notes_of_other_lengths))


def keep_what_is_overwritten() -> tuple[Tensor, Tensor]:
    """Rows and answers change after they were sent. A slot repeated by a token is one pair and counts twice."""
    wire = open_wire("shm", dist.group.WORLD, timeout_s=20.0)
    exchange, R = Exchange(wire, slots_per_rank=1), wire.world_size
    x_TH, slots_TK = torch.full((2, 3), 1.0 + wire.rank), torch.tensor([[0, 0, 1], [1, -1, 1]])
    exchange.send_rows(x_TH, slots_TK, call=1, capacity=2, is_unique=True, keeps=True)
    x_TH.fill_(float("nan"))
    x_NH, num_pairs = exchange.receive_rows()
    assert num_pairs == (R if wire.rank == 0 else 2 * R), "repeated slots must be one pair"
    received, y_PH = x_NH.clone(), x_NH[exchange.row_of_pair].contiguous()
    exchange.send_answers(y_PH, call=2, keeps=True)
    y_PH.fill_(float("nan"))
    exchange.receive_answers()
    out_TH = torch.empty(2, 3)
    exchange.sum_answers(torch.tensor([[1.0, 10.0, 100.0], [1.0, 10.0, 100.0]]), out_TH)
    wire.close()
    return received, out_TH


def test_what_is_kept_may_be_overwritten_and_twins_count_twice(pool_of: PoolOf) -> None:
    for rank, (received_NH, out_TH) in enumerate(pool_of(2).run(keep_what_is_overwritten)):
        assert received_NH[:, 0].tolist() == ([1.0, 2.0] if rank == 0 else [1.0, 1.0, 2.0, 2.0])
        assert out_TH[:, 0].tolist() == [111.0 * (1 + rank), 101.0 * (1 + rank)]
