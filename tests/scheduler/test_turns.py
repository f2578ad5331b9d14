"""Two programs in turns: never both at once, in one order whatever the time, and both end when one fails."""

import threading
from collections.abc import Callable, Iterator

import pytest

from scheduler.turns import FIRST, SECOND, AbandonedError, Turns


@pytest.fixture
def turns() -> Iterator[Turns]:
    made = Turns()
    yield made
    made.close()


def counting(turns: Turns, said: list[str], name: str, times: int) -> Callable[[], str]:
    """Say a number before each hand-over and after the last."""

    def program() -> str:
        for number in range(times):
            said.append(f"{name}{number}")
            turns.hand_over()
        said.append(f"{name}{times}")
        return name

    return program


def test_the_first_leads_and_they_alternate(turns: Turns) -> None:
    said: list[str] = []
    assert turns.run(counting(turns, said, "a", 3), counting(turns, said, "b", 3)) == ("a", "b")
    assert said == ["a0", "b0", "a1", "b1", "a2", "b2", "a3", "b3"]


@pytest.mark.parametrize(
    ("times", "order"),
    [
        ((0, 2), ["a0", "b0", "b1", "b2"]),
        ((2, 0), ["a0", "b0", "a1", "a2"]),
        ((1, 3), ["a0", "b0", "a1", "b1", "b2", "b3"]),
    ],
)
def test_who_is_left_runs_on_alone(turns: Turns, times: tuple[int, int], order: list[str]) -> None:
    said: list[str] = []
    turns.run(counting(turns, said, "a", times[0]), counting(turns, said, "b", times[1]))
    assert said == order


def test_every_turn_is_told_and_the_first_s_comes_last(turns: Turns) -> None:
    told: list[tuple[int, int]] = []
    turns.on_turn = lambda index: told.append((index, turns.current))
    turns.run(counting(turns, [], "a", 1), counting(turns, [], "b", 1))
    assert told == [(index, index) for index in (FIRST, SECOND, FIRST, SECOND, FIRST)]
    turns.hand_over()
    assert len(told) == 5, "nothing runs in turns"


def test_the_first_runs_here_and_the_second_on_one_thread_that_was_prepared() -> None:
    seen: list[str] = []

    def note(program: str) -> None:
        seen.append(f"{program} on {threading.current_thread().name}")

    turns = Turns(lambda: note("prepared"))
    for _ in range(2):
        turns.run(lambda: note("first"), lambda: note("second"))
    turns.close()
    here, there = threading.current_thread().name, "second-half_0"
    own = [f"first on {here}", f"second on {there}"]
    assert sorted(seen) == sorted([f"prepared on {there}", *own, *own])


def raising(turns: Turns, hand_overs: int) -> Callable[[], None]:
    def program() -> None:
        for _ in range(hand_overs):
            turns.hand_over()
        raise ValueError("broken")

    return program


def enduring(turns: Turns, ends: list[type[BaseException]]) -> Callable[[], None]:
    """Hand over for ever; notes what ends it."""

    def program() -> None:
        try:
            while True:
                turns.hand_over()
        except AbandonedError as error:
            ends.append(type(error))
            raise

    return program


@pytest.mark.parametrize("hand_overs", [1, 4])
@pytest.mark.parametrize("failing", [FIRST, SECOND])
def test_one_that_fails_ends_both_and_the_next_pair_runs(turns: Turns, failing: int, hand_overs: int) -> None:
    ends: list[type[BaseException]] = []
    programs = [enduring(turns, ends), enduring(turns, ends)]
    programs[failing] = raising(turns, hand_overs)
    with pytest.raises(ValueError, match="broken"):
        turns.run(*programs)
    assert ends == [AbandonedError] and turns.current == FIRST
    assert turns.run(counting(turns, [], "a", 2), counting(turns, [], "b", 2)) == ("a", "b")


def test_one_that_fails_before_the_other_began_ends_both(turns: Turns) -> None:
    begun: list[int] = []
    with pytest.raises(ValueError, match="broken"):
        turns.run(raising(turns, 0), lambda: begun.append(1))
    assert begun == []
