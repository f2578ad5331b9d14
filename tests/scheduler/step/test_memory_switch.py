"""When a rank may release its memory, when it has it back, and what a regrouping does in between."""

import threading
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.policy.request import MemoryOrder
from scheduler.step.lockstep import Decision, Header, agree_on_memory
from scheduler.step.memory_switch import MemoryParts, MemorySwitch

WAIT_S = 20.0
SLEEP, DEEP, AWAKE = MemoryOrder(1, False), MemoryOrder(1, False, False), MemoryOrder(2)


class Rank:
    """A memory switch over parts that record their calls. Reading waits for `may_read`."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.switched: list[int] = []
        self.may_read = threading.Event()
        self.has_read = threading.Event()  # set after each end of reading
        self.error: Exception | None = None
        self.has_experts = True
        self.switch = MemorySwitch(MemoryParts(lambda: self.calls.append("cache"), self._free, self._read))
        self.switch.on_switched = self.switched.append
        self.switch.on_news = self.has_read.set

    def _free(self) -> None:
        self.calls.append("experts")
        self.has_experts = False

    def _read(self, is_over: Callable[[], bool]) -> bool:
        while not self.may_read.wait(0.001):
            if is_over():
                return False
        if self.error is not None:
            raise self.error
        self.calls.append("read")
        self.has_experts = True
        return True

    def follow(self, *, is_idle: bool = True) -> int:
        """Post, and switch as if all ranks had posted the same."""
        number = self.switch.number_to_post(is_idle=is_idle)
        self.switch.switch(number)
        return number

    def wait_until(self, is_true: Callable[[], bool]) -> None:
        """Wait for the reader's thread."""
        for _ in range(int(WAIT_S / 0.01)):
            if is_true():
                return
            self.has_read.wait(0.01)
            self.has_read.clear()
        raise AssertionError("the reader does not end")


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    rank.switch.end_epoch()


def test_a_rank_without_orders_does_nothing(rank: Rank) -> None:
    assert rank.follow() == 0 and not rank.switch.has_news(is_idle=True)
    assert rank.calls == [] and rank.switched == []


def test_memory_is_released_once_the_rank_is_idle_and_once_only(rank: Rank) -> None:
    rank.switch.order(SLEEP)
    assert not rank.switch.has_news(is_idle=False)
    assert rank.follow(is_idle=False) == 0 and rank.calls == []
    assert rank.switch.has_news(is_idle=True)
    assert rank.follow() == 1 and not rank.switch.has_news(is_idle=True)
    assert rank.follow() == 1
    assert rank.calls == ["cache"] and rank.switched == [1]


def test_a_repeated_order_is_confirmed_and_an_older_one_ignored(rank: Rank) -> None:
    rank.switch.order(MemoryOrder(5, False))
    rank.follow()
    rank.switch.order(MemoryOrder(5, False))
    rank.switch.order(MemoryOrder(4))
    assert rank.follow() == 5 and rank.switched == [5, 5] and rank.calls == ["cache"]


def test_a_rank_posts_that_it_is_awake_when_its_experts_are_read(rank: Rank) -> None:
    rank.switch.order(DEEP)
    rank.follow()
    assert rank.calls == ["cache", "experts"]
    rank.switch.order(AWAKE)
    assert rank.follow() == 1 and not rank.switch.has_news(is_idle=True)
    rank.may_read.set()
    rank.wait_until(lambda: rank.switch.has_news(is_idle=True))
    assert rank.has_experts and rank.follow() == 2
    assert rank.calls == ["cache", "experts", "read"] and rank.switched == [1, 2]


def test_the_experts_alone_come_back_first_if_that_is_ordered(rank: Rank) -> None:
    rank.may_read.set()
    for number, order in enumerate((DEEP, MemoryOrder(2, False, True), MemoryOrder(3)), start=1):
        rank.switch.order(order)
        rank.wait_until(lambda number=number: rank.follow() == number)
    assert rank.calls == ["cache", "experts", "read"]


def test_an_order_to_wake_that_overtakes_the_one_to_sleep_leaves_the_memory_alone(rank: Rank) -> None:
    rank.switch.order(DEEP)
    assert rank.switch.number_to_post(is_idle=True) == 1
    rank.switch.order(AWAKE)
    rank.may_read.set()
    rank.switch.switch(1)  # all had posted it
    rank.wait_until(lambda: rank.follow() == 2)
    assert rank.has_experts and rank.switched == [1, 2]
    other = Rank()
    other.switch.order(DEEP)
    other.switch.order(AWAKE)
    assert other.follow() == 2 and other.calls == []


def test_sleeping_again_stops_the_reading(rank: Rank) -> None:
    rank.switch.order(DEEP)
    rank.follow()
    rank.switch.order(AWAKE)
    rank.switch.order(MemoryOrder(3, False, False))
    rank.wait_until(lambda: rank.follow() == 3)
    assert not rank.has_experts and "read" not in rank.calls
    rank.may_read.set()
    rank.switch.order(MemoryOrder(4))
    rank.wait_until(lambda: rank.follow() == 4)
    assert rank.has_experts


def test_a_regrouping_stops_the_reading_and_the_next_epoch_starts_it_again(rank: Rank) -> None:
    rank.switch.begin_epoch()
    rank.switch.order(DEEP)
    rank.follow()
    rank.switch.order(AWAKE)
    rank.switch.end_epoch()
    assert rank.switch._reader is None and rank.follow() == 1
    rank.may_read.set()
    rank.switch.order(AWAKE)
    assert rank.switch._reader is None, "nothing is read between epochs: the slots may be rearranged"
    rank.switch.begin_epoch()
    rank.wait_until(lambda: rank.follow() == 2)
    assert rank.has_experts


def test_experts_are_read_again_if_they_moved_before_all_ranks_had_theirs(rank: Rank) -> None:
    rank.may_read.set()
    rank.switch.order(DEEP)
    rank.follow()
    rank.switch.note_moved()
    assert rank.switch._reader is None, "a sleeping rank reads nothing"
    rank.switch.order(AWAKE)
    rank.wait_until(lambda: rank.switch._reader is None)
    rank.switch.note_moved()
    rank.wait_until(lambda: rank.follow() == 2)
    assert rank.calls.count("read") == 2


def test_a_reading_during_which_experts_moved_does_not_count(rank: Rank) -> None:
    rank.switch._parts = rank.switch._parts._replace(read_experts=lambda _is_over: read_once(rank))
    rank.switch.order(DEEP)
    rank.follow()
    rank.switch.order(AWAKE)
    rank.wait_until(lambda: rank.follow() == 2)
    assert rank.calls.count("read") == 2


def read_once(rank: Rank) -> bool:
    """Read completely, while experts move for the first time."""
    rank.calls.append("read")
    if rank.calls.count("read") == 1:
        rank.switch.note_moved()
    return True


def test_moved_experts_are_not_read_if_none_were_released(rank: Rank) -> None:
    rank.may_read.set()
    for number, order in enumerate((SLEEP, MemoryOrder(2)), start=1):
        rank.switch.order(order)
        rank.wait_until(lambda number=number: rank.follow() == number)
        rank.switch.note_moved()
    assert rank.follow() == 2 and rank.calls == ["cache"]


def test_a_failed_read_ends_the_step_loop(rank: Rank) -> None:
    rank.switch.order(DEEP)
    rank.follow()
    rank.error = OSError("the disk is gone")
    rank.may_read.set()
    rank.switch.order(AWAKE)
    rank.wait_until(lambda: rank.switch._reader is None)
    assert rank.switch.has_news(is_idle=True)
    with pytest.raises(OSError, match="the disk is gone"):
        rank.switch.number_to_post(is_idle=True)


def header(number: int) -> Header:
    return Header(1, 0, 0, 0, 0, 0, 0, 0, memory_number=number)


def test_ranks_switch_only_together_and_only_without_work() -> None:
    assert agree_on_memory([header(3), header(3)], Decision.SLEEP) == 3
    assert agree_on_memory([header(3), header(2)], Decision.SLEEP) is None
    for decision in (Decision.RUN, Decision.REGROUP, Decision.STOP):
        assert agree_on_memory([header(3), header(3)], decision) is None


@settings(max_examples=60)
@given(
    acts=st.lists(
        st.tuples(
            st.sampled_from(["order", "post", "regroup"]), st.integers(0, 1), st.booleans(), st.booleans()
        ),
        max_size=30,
    )
)
def test_in_any_history_no_rank_is_awake_without_its_experts(acts: list[tuple[str, int, bool, bool]]) -> None:
    """Two ranks get the same orders at different times, and switch when both have posted the same number."""
    ranks, orders = (Rank(), Rank()), [MemoryOrder(0)]
    known = [0, 0]
    for rank in ranks:
        rank.may_read.set()

    def round_of_headers() -> None:
        numbers = [rank.switch.number_to_post(is_idle=True) for rank in ranks]
        if numbers[0] == numbers[1]:
            for rank in ranks:
                rank.switch.switch(numbers[0])
                assert rank.has_experts or not orders[numbers[0]].has_experts

    for what, which, has_cache, has_experts in acts:
        if what == "order":
            orders.append(MemoryOrder(len(orders), has_cache, has_experts))
            known[which] = len(orders) - 1
            ranks[which].switch.order(orders[-1])
        elif what == "regroup":
            for rank in ranks:
                rank.switch.end_epoch()
                rank.switch.begin_epoch()
        else:
            round_of_headers()
    for rank, number in zip(ranks, known, strict=True):
        if number < len(orders) - 1:
            rank.switch.order(orders[-1])
    for _ in range(int(WAIT_S / 0.001)):
        round_of_headers()
        if all(rank.switch._followed is orders[-1] for rank in ranks) or len(orders) == 1:
            break
        ranks[0].has_read.wait(0.001)
    else:
        raise AssertionError("the ranks do not follow the last order")
    assert all(rank.has_experts == orders[-1].has_experts for rank in ranks)
    for rank in ranks:
        rank.switch.end_epoch()
