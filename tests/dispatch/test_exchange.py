"""What of exchanges' time is put down to wires, when it is known what was."""

import random

from dispatch.exchange import CLOCK_BLOCK as BLOCK
from dispatch.exchange import ExchangeClock


def test_total_is_the_sum_and_wires_come_in_whole_blocks() -> None:
    clock = ExchangeClock()
    for _ in range(BLOCK - 1):
        clock.add(5)
    assert (clock.total_ns, clock.wire_ns) == (5 * (BLOCK - 1), 0)
    clock.add(3)
    assert (clock.total_ns, clock.wire_ns) == (5 * (BLOCK - 1) + 3, 3 * BLOCK)


def test_ranks_that_are_late_in_turn_find_the_wires_time() -> None:
    """Four ranks, each as often the last: an exchange lasts from a rank's arrival to the last one's, and the wire."""
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
