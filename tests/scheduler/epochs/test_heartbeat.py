"""Stuck ranks and ranks that wait for them: heartbeats of the step loop's progress, and the front's conclusions."""

import errno
import threading

import pytest

from scheduler.epochs.heartbeat import COMPUTING, MOVES_TO_LEARN, PATIENCE, Heart, Heartbeat, Watch
from tests.support.clock import Clock

TIMEOUT_S = 2.0


class Rank:
    """A rank's heartbeat and exchanges, driven by the test."""

    def __init__(self, rank: int, clock: Clock) -> None:
        self.begun = self.ended = 0
        self.used_s = 0.0
        self.heart = Heart(
            rank, timeout_s=TIMEOUT_S, most_patience_s=30.0, clock=clock, processor=lambda: self.used_s
        )
        self.heart.progress.begin_epoch(4, lambda: (self.begun, self.ended))
        self.heart.progress.is_idle = False

    def wait(self) -> None:
        self.begun += 1

    def pass_on(self) -> None:
        self.ended = self.begun


class Service:
    """Ranks, and the watch of a front that gets their heartbeats at once."""

    def __init__(self, num_ranks: int) -> None:
        self.clock = Clock()
        self.ranks = [Rank(rank, self.clock) for rank in range(num_ranks)]
        self.watch = Watch(TIMEOUT_S)
        self.watch.begin_epoch(4, range(num_ranks))

    def let_pass(
        self, seconds: float, *, silent: tuple[int, ...] = (), computing: tuple[int, ...] = ()
    ) -> list[tuple[float, int]]:
        """Beat four times a second. Return the suspects with times. Ranks in `computing` use a tenth of a processor."""
        found = []
        for beat in range(int(seconds * 4)):
            self.clock.now_s += 0.25
            for number, rank in enumerate(self.ranks):
                rank.used_s += 0.025 if number in computing else 0.0
                if number not in silent:
                    self.watch.take(rank.heart.beat(), self.clock.now_s)
            found += [((beat + 1) / 4, each.rank) for each in self.watch.suspects(self.clock.now_s)]
        return found

    def walk(self, num_exchanges: int, every_s: float = 0.25) -> None:
        """Move all ranks through exchanges together."""
        for _ in range(num_exchanges):
            for rank in self.ranks:
                rank.wait()
                rank.pass_on()
            assert not self.let_pass(every_s)


def test_a_rank_that_computes_for_ever_is_suspected_and_not_those_that_wait_for_it() -> None:
    service = Service(3)
    service.walk(MOVES_TO_LEARN + 1)
    for rank in (0, 2):
        service.ranks[rank].wait()
    found = service.let_pass(3.0)
    assert {rank for _, rank in found} == {1}
    assert TIMEOUT_S <= found[0][0] <= TIMEOUT_S + 0.5


def test_what_is_said_of_it_names_the_step_and_who_confirms() -> None:
    service = Service(3)
    service.walk(MOVES_TO_LEARN + 1)
    service.ranks[1].heart.progress.step = 17
    for rank in (0, 2):
        service.ranks[rank].wait()
    service.let_pass(2.5)
    (suspect,) = service.watch.suspects(service.clock.now_s)
    assert suspect.reason == "its step 17 has not moved for 2.5 s, and ranks 0, 2 wait for it"


def test_nobody_is_suspected_without_another_rank_that_confirms_it() -> None:
    service = Service(2)
    service.walk(MOVES_TO_LEARN + 1)
    assert not service.let_pass(20.0), "both compute, perhaps in a long step"
    service.ranks[0].wait()
    assert not service.let_pass(20.0, silent=(0,)), "the rank that would wait sends no heartbeats"
    assert service.let_pass(3.0), "it sends heartbeats again"


def test_ranks_that_wait_for_each_other_are_not_suspected() -> None:
    """When a link is cut, the kernel detects it, not the heartbeats."""
    service = Service(2)
    service.walk(MOVES_TO_LEARN + 1)
    for rank in service.ranks:
        rank.wait()
    assert not service.let_pass(60.0)


def test_idle_ranks_and_ranks_of_other_epochs_are_not_suspected() -> None:
    service = Service(2)
    service.walk(MOVES_TO_LEARN + 1)
    service.ranks[0].wait()
    service.ranks[1].heart.progress.is_idle = True
    assert not service.let_pass(10.0)
    service.ranks[1].heart.progress.is_idle = False
    service.watch.begin_epoch(5, (0, 1))
    assert not service.let_pass(10.0)


def test_a_slow_machine_is_given_the_time_that_it_takes() -> None:
    service = Service(2)
    service.walk(MOVES_TO_LEARN + 1, every_s=1.5)  # large prompts on a busy core
    service.ranks[0].wait()
    assert not service.let_pass(PATIENCE * 1.5 - 2.0), "it last moved 1.5 s ago"
    assert service.let_pass(2.0)


def test_a_pause_of_the_whole_process_is_not_the_steps() -> None:
    """Swapped out, without a processor, or blocked by the GIL: the heartbeat pauses too."""
    service = Service(2)
    service.walk(MOVES_TO_LEARN + 1)
    service.ranks[0].wait()
    assert not service.let_pass(1.0)
    service.clock.now_s += 10.0
    assert not service.let_pass(0.5)
    assert service.let_pass(2.0), "time before and after the pause must count"


def test_a_step_that_uses_the_processor_has_longer_than_one_that_sleeps() -> None:
    """For example, prompt logprobs after short steps."""
    service = Service(2)
    service.walk(MOVES_TO_LEARN + 1)
    service.ranks[0].wait()
    assert not service.let_pass(COMPUTING * TIMEOUT_S - 0.25, computing=(1,))
    assert service.let_pass(1.0, computing=(1,)), "the extra time must be limited"


def test_a_step_that_sleeps_is_found_as_soon_if_it_has_computed_before() -> None:
    service = Service(2)
    service.walk(MOVES_TO_LEARN + 1)
    service.ranks[0].wait()
    assert not service.let_pass(0.75, computing=(1,))
    assert service.let_pass(2.0)


def test_the_processor_time_is_the_step_loops() -> None:
    heart = Heart(0, timeout_s=60.0, most_patience_s=60.0)
    heart.start()
    try:
        before_s = heart.used_s()
        while heart.used_s() < before_s + 0.01:
            sum(range(1000))
    finally:
        heart.stop()


def test_until_its_pace_is_known_a_rank_has_the_time_of_a_collective() -> None:
    service = Service(2)
    service.walk(2)
    service.ranks[0].wait()
    assert not service.let_pass(29.0)
    assert service.let_pass(2.0)


def test_the_thread_beats_until_it_is_stopped_whatever_the_step_loop_does() -> None:
    heart, three = Heart(3, timeout_s=0.08, most_patience_s=1.0), threading.Event()
    beats: list[Heartbeat] = []

    def note(beat: Heartbeat) -> None:
        beats.append(beat)
        if len(beats) == 3:
            three.set()

    heart.on_heartbeat = note
    heart.start()
    assert three.wait(30)
    heart.stop()
    count = len(beats)
    heart.stop()
    assert len(beats) == count and beats[0].rank == 3 and beats[0].is_idle


def test_the_thread_beats_on_where_no_descriptor_was_free_for_a_moment() -> None:
    heart, beats, again = Heart(0, timeout_s=0.08, most_patience_s=1.0), 0, threading.Event()

    def note(_: Heartbeat) -> None:
        nonlocal beats
        beats += 1
        if beats == 1:
            raise OSError(errno.EMFILE, "Too many open files")
        again.set()

    heart.on_heartbeat = note
    heart.start()
    assert again.wait(30)
    heart.stop()


def test_heartbeats_can_be_switched_off() -> None:
    heart = Heart(0, timeout_s=0.0, most_patience_s=1.0)
    heart.on_heartbeat = lambda _: pytest.fail("it sent a heartbeat")
    heart.start()
    heart.stop()
    assert "heart" not in {thread.name for thread in threading.enumerate()}
