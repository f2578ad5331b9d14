"""The front's decisions about membership: each rule, and that any order of events ends in one whole epoch."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.front.members.membership import (
    FAULT_GRACE_S,
    MAX_FAULTS,
    REGROUP_TIMEOUT_S,
    RELEASE_S,
    Effects,
    Epoch,
    Epochs,
    GivenUp,
    Phase,
)

RECOVERY_S = 600.0
NOTHING = Effects()


def serving(num_ranks: int = 3) -> Epochs:
    """Return a service that has started."""
    epochs = Epochs(num_ranks, recovery_timeout_s=RECOVERY_S)
    for rank in reversed(range(num_ranks)):
        assert epochs.attach(rank, 0.0) == NOTHING
    assert (epochs.phase, epochs.number, epochs.members) == (Phase.SERVING, 0, tuple(range(num_ranks)))
    return epochs


def phase_of(epochs: Epochs) -> Phase:
    """Return the current phase. Type checkers keep an attribute narrowed by an assertion, even after calls change it."""
    return epochs.phase


def meet(epochs: Epochs) -> None:
    """Let all members of the current epoch answer."""
    for rank in epochs.members:
        epochs.take_regrouped(rank, epochs.number, 0.0)


def test_a_service_begins_when_all_ranks_have_attached() -> None:
    epochs = Epochs(2, recovery_timeout_s=RECOVERY_S)
    epochs.attach(1, 0.0)
    assert (epochs.phase, epochs.members, epochs.absent) == (Phase.STARTING, (), [0])
    assert epochs.in_epoch == {0, 1}, "they meet without an order"
    epochs.attach(0, 0.0)
    assert epochs.is_whole and epochs.settled == {0, 1} == epochs.in_epoch


def test_a_pool_has_the_numbers_of_its_ranks_in_the_service() -> None:
    epochs = Epochs(2, recovery_timeout_s=RECOVERY_S, first_rank=3)
    epochs.attach(4, 0.0)
    assert epochs.absent == [3]
    epochs.attach(3, 0.0)
    assert (epochs.phase, epochs.members, epochs.num_losses) == (Phase.SERVING, (3, 4), {3: 0, 4: 0})
    assert epochs.lose(3, "killed", 5.0) == Effects(order=Epoch(1, (4,)))
    assert epochs.num_losses == {3: 1, 4: 0} and epochs.absent == [3]


def test_a_pool_that_joins_waits_for_all_of_its_ranks_without_a_time_limit() -> None:
    epochs = Epochs(2, recovery_timeout_s=RECOVERY_S, first_rank=3)
    epochs.gather(5.0)
    assert (epochs.phase, epochs.next_due_s(), list(epochs.missing)) == (Phase.WAITING, None, [3, 4])
    assert epochs.attach(3, 6.0) == NOTHING and not epochs.in_epoch
    assert epochs.lose(3, "killed", 7.0) == NOTHING, "nothing has failed: it has not served"
    assert epochs.missing[3].reason == "killed" and epochs.next_due_s() is None
    assert epochs.attach(4, 8.0) == NOTHING
    assert epochs.take_fault(4, 0, "stuck", is_final=True, now_s=9.0) == NOTHING
    assert epochs.attach(3, 2e6) == Effects(order=Epoch(1, (3, 4)))
    assert not epochs.missing and not epochs.is_resuming and epochs.in_epoch == {3, 4}
    meet(epochs)
    assert epochs.is_whole and epochs.settled == {3, 4}
    assert epochs.lose(4, "killed", 3e6) == Effects(order=Epoch(2, (3,))), "from now on like any pool"


def test_a_rank_that_is_lost_before_the_service_has_begun_ends_it() -> None:
    epochs = Epochs(2, recovery_timeout_s=RECOVERY_S)
    epochs.attach(1, 0.0)
    assert epochs.lose(1, "no memory", 0.0) == Effects(failure="rank 1 is lost: no memory")
    assert epochs.take_fault(1, 0, "a bug", is_final=False, now_s=0.0).failure == "rank 1 cannot serve: a bug"


def test_a_lost_rank_begins_the_next_epoch_without_it() -> None:
    epochs = serving()
    assert epochs.lose(1, "killed", 5.0) == Effects(order=Epoch(1, (0, 2)))
    assert (epochs.phase, epochs.settled, epochs.absent) == (Phase.REGROUPING, frozenset({0, 2}), [1])
    assert (epochs.missing[1].reason, epochs.missing[1].since_s) == ("killed", 5.0)
    epochs.take_regrouped(0, 1, 0.0)
    assert phase_of(epochs) is Phase.REGROUPING
    epochs.take_regrouped(2, 1, 0.0)
    assert phase_of(epochs) is Phase.SERVING and not epochs.is_whole
    assert epochs.next_due_s() is None, "with members left it continues forever"
    assert epochs.describe() == "rank 1 is lost: killed"


def test_a_rank_that_comes_back_is_a_member_at_once_and_gets_requests_when_it_serves() -> None:
    epochs = serving()
    epochs.lose(1, "killed", 5.0)
    meet(epochs)
    assert epochs.attach(1, 6.0) == Effects(order=Epoch(2, (0, 1, 2)))
    assert epochs.settled == {0, 2} and not epochs.missing and not epochs.is_whole
    meet(epochs)
    assert epochs.is_whole and epochs.settled == {0, 1, 2}


def test_an_order_overtakes_another_one_and_answers_to_the_older_are_passed_over() -> None:
    epochs = serving()
    epochs.lose(1, "killed", 5.0)
    epochs.take_regrouped(0, 1, 0.0)
    assert epochs.lose(2, "killed too", 5.1) == Effects(order=Epoch(2, (0,)))
    epochs.take_regrouped(0, 1, 0.0)
    epochs.take_fault(0, 1, "a peer is gone", is_final=True, now_s=5.2)
    assert phase_of(epochs) is Phase.REGROUPING and not epochs.faults
    epochs.take_regrouped(0, 2, 0.0)
    assert phase_of(epochs) is Phase.SERVING


def test_a_fault_waits_for_the_stream_s_end_that_explains_it() -> None:
    epochs = serving()
    assert epochs.take_fault(0, 0, "a peer is gone", is_final=False, now_s=5.0) == NOTHING
    assert (epochs.phase, epochs.next_due_s()) == (Phase.REGROUPING, 5.0 + FAULT_GRACE_S)
    assert epochs.lose(1, "killed", 5.3) == Effects(order=Epoch(1, (0, 2), stopped=(0,)))
    assert epochs.next_due_s() == 5.3 + REGROUP_TIMEOUT_S


def test_a_fault_that_nothing_explains_is_tried_again_with_the_same_members() -> None:
    epochs = serving()
    epochs.take_fault(0, 0, "a time-out", is_final=False, now_s=5.0)
    epochs.take_fault(1, 0, "a peer is gone", is_final=False, now_s=5.4)
    assert epochs.tick(5.4) == NOTHING
    assert epochs.tick(5.0 + FAULT_GRACE_S) == Effects(order=Epoch(1, (0, 1, 2), stopped=(0, 1)))
    meet(epochs)
    assert epochs.is_whole


def test_the_rank_whose_steps_break_off_first_again_and_again_is_given_up() -> None:
    epochs = serving()
    for turn in range(MAX_FAULTS):
        epochs.take_fault(2, turn, "a time-out", is_final=False, now_s=10.0 * turn)
        epochs.take_fault(0, turn, "a peer is gone", is_final=False, now_s=10.0 * turn + 0.1)
        assert epochs.tick(10.0 * turn + 2).order == Epoch(turn + 1, (0, 1, 2), stopped=(0, 2))
        meet(epochs)
    epochs.take_fault(2, MAX_FAULTS, "a time-out", is_final=False, now_s=55.0)
    epochs.take_fault(0, MAX_FAULTS, "a peer is gone", is_final=False, now_s=55.1)
    (given_up,) = epochs.tick(56.0).given_up
    assert given_up.rank == 2 and given_up.reason == "steps failed 6 times: a time-out"
    assert epochs.lose(2, given_up.reason, 56.0).order == Epoch(MAX_FAULTS + 1, (0, 1), stopped=(0,))


def test_a_rank_that_does_not_answer_an_order_is_given_up_once() -> None:
    epochs = serving()
    epochs.lose(1, "killed", 5.0)
    epochs.take_regrouped(0, 1, 0.0)
    due_s = epochs.next_due_s()
    assert due_s == 5.0 + REGROUP_TIMEOUT_S
    reason = "it did not answer the order of epoch 1 in time"
    assert epochs.tick(due_s) == Effects(given_up=(GivenUp(2, reason),))
    assert epochs.tick(due_s + 1) == NOTHING
    assert epochs.lose(2, reason, due_s).order == Epoch(2, (0,))


def test_a_rank_that_hangs_is_given_up_for_it_though_others_break_off_meanwhile() -> None:
    epochs = serving()
    epochs.take_fault(0, 0, "a time-out", is_final=False, now_s=40.0)
    epochs.take_fault(2, 0, "a peer is gone", is_final=False, now_s=40.0)
    now_s, number = 41.0, 1
    assert epochs.tick(now_s).order == Epoch(1, (0, 1, 2), stopped=(0, 2))
    epochs.grant(7.0)
    while not (given_up := epochs.tick(now_s).given_up):
        for rank in (0, 2):
            epochs.take_fault(rank, epochs.number, "rank 1 did not come", is_final=False, now_s=now_s)
        now_s = epochs.next_due_s() or 0.0
        epochs.grant(5.0)  # a retry has less to read
        number += 1
        assert number < 2 * REGROUP_TIMEOUT_S / FAULT_GRACE_S, "the hang is noticed"
    assert [each.rank for each in given_up] == [1] and now_s == 41.0 + 7.0 + REGROUP_TIMEOUT_S


def test_a_rank_that_has_much_to_read_may_take_longer() -> None:
    epochs = serving()
    epochs.lose(1, "killed", 5.0)
    epochs.grant(100.0)
    epochs.take_regrouped(0, 1, 6.0)
    assert epochs.next_due_s() == 105.0 + REGROUP_TIMEOUT_S


def test_each_order_for_another_membership_may_be_answered_anew() -> None:
    epochs = serving()
    epochs.lose(1, "killed", 5.0)
    epochs.attach(1, 30.0)
    assert epochs.next_due_s() == 30.0 + REGROUP_TIMEOUT_S


def test_members_that_cannot_hold_the_experts_wait_for_a_rank_to_come_back() -> None:
    epochs = serving()
    epochs.lose(1, "killed", 5.0)
    assert epochs.take_fault(0, 1, "no memory: 5 of 9 GB", is_final=True, now_s=5.5) == NOTHING
    epochs.take_fault(2, 1, "a peer is gone", is_final=False, now_s=5.6)
    assert (epochs.phase, epochs.next_due_s()) == (Phase.WAITING, 5.5 + RECOVERY_S)
    assert epochs.in_epoch == {0, 2}, (
        "their requests go on in the next epoch, with the adapters that they have"
    )
    assert (
        epochs.describe() == "rank 1 is lost: killed; rank 0 cannot continue without it: no memory: 5 of 9 GB"
    )
    assert epochs.tick(50.0) == NOTHING, "no order would help"
    assert epochs.lose(2, "killed", 50.0) == NOTHING, "not even with fewer members"
    assert epochs.attach(1, 60.0).order == Epoch(2, (0, 1), stopped=(0,))
    meet(epochs)
    assert epochs.phase is Phase.SERVING


def test_when_the_one_that_could_not_go_on_is_lost_the_others_try() -> None:
    epochs = serving()
    epochs.lose(1, "killed", 5.0)
    epochs.take_fault(0, 1, "a read failed", is_final=True, now_s=5.5)
    assert epochs.lose(0, "killed", 6.0).order == Epoch(2, (2,))


def test_a_final_fault_with_all_ranks_there_gives_up_the_rank_itself() -> None:
    epochs = serving()
    effects = epochs.take_fault(0, 0, "a read failed", is_final=True, now_s=5.0)
    assert effects == Effects(given_up=(GivenUp(0, "a read failed"),))
    assert epochs.tick(100.0) == NOTHING
    assert epochs.lose(0, "a read failed", 5.0).order == Epoch(1, (1, 2))


def test_with_nobody_left_the_service_waits_so_long_and_no_longer() -> None:
    epochs = serving(1)
    assert epochs.lose(0, "killed", 5.0) == NOTHING
    assert (epochs.phase, epochs.members, epochs.settled) == (Phase.WAITING, (), frozenset())
    assert epochs.tick(5.0 + RECOVERY_S - 1) == NOTHING
    failure = epochs.tick(5.0 + RECOVERY_S).failure
    assert failure == "no rank came back for 600 s: rank 0 is lost: killed"
    assert epochs.attach(0, 700.0).order == Epoch(1, (0,))
    assert not epochs.settled
    meet(epochs)
    assert epochs.is_whole and epochs.settled == {0}


EVENT = st.tuples(
    st.sampled_from(["lose", "attach", "fault", "final", "regrouped", "stale", "time"]),
    st.integers(0, 3),
    st.floats(0.0, 40.0),
)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), st.lists(EVENT, max_size=40))
def test_any_order_of_events_ends_in_one_epoch_of_exactly_the_attached_ranks(
    num_ranks: int, events: list[tuple[str, int, float]]
) -> None:
    service = _Service(num_ranks)
    for kind, rank, seconds in events:
        service.play(kind, rank % num_ranks, seconds)
        service.check()
    service.calm_down()


@pytest.mark.parametrize("kind", ["fault", "final"])
def test_the_property_s_service_notices_a_fault_that_is_never_followed(kind: str) -> None:
    service = _Service(2)
    service.play(kind, 0, 0.0)
    with pytest.raises(AssertionError, match="serves"):
        service.check_serving()


class _Service:
    """Ranks that come, go and answer as a test directs. Orders and removals take effect."""

    def __init__(self, num_ranks: int) -> None:
        self.epochs, self.attached, self.now_s = serving(num_ranks), set(range(num_ranks)), 0.0
        self.ordered = 0

    def play(self, kind: str, rank: int, seconds: float) -> None:
        epochs = self.epochs
        if kind == "time":
            self.now_s += seconds
            self.follow(epochs.tick(self.now_s))
        elif kind == "attach" and rank not in self.attached:
            self.attached.add(rank)
            self.follow(epochs.attach(rank, self.now_s))
        elif rank not in self.attached:
            return
        elif kind == "lose":
            self.lose(rank, "killed")
        elif kind == "regrouped":
            epochs.take_regrouped(rank, epochs.number, self.now_s)
        elif kind == "stale":
            epochs.take_regrouped(rank, epochs.number - 1, self.now_s)
        elif kind in ("fault", "final"):
            self.follow(
                epochs.take_fault(rank, epochs.number, "why", is_final=kind == "final", now_s=self.now_s)
            )

    def lose(self, rank: int, reason: str) -> None:
        self.attached.discard(rank)
        self.follow(self.epochs.lose(rank, reason, self.now_s))

    def follow(self, effects: Effects) -> None:
        if effects.order is not None:
            assert effects.order.number > self.ordered, "numbers are never reused"
            assert effects.order.members == tuple(sorted(self.attached))
            self.ordered = effects.order.number
        for rank, reason in effects.given_up:
            assert rank in self.attached
            self.lose(rank, reason)

    def check(self) -> None:
        epochs = self.epochs
        assert epochs.number == self.ordered
        assert epochs.members == tuple(sorted(self.attached))
        assert epochs.settled <= self.attached
        assert set(epochs.absent) == set(range(epochs.num_ranks)) - self.attached == set(epochs.missing)
        if epochs.phase is not Phase.SERVING:
            assert epochs.next_due_s() is not None, "every wait has a deadline"

    def calm_down(self) -> None:
        """Let absent ranks return, members answer and time pass, without further faults."""
        for rank in self.epochs.absent:
            self.play("attach", rank, 0.0)
        for _ in range(10):
            self.play("time", 0, max(0.0, (self.epochs.next_due_s() or 0.0) - self.now_s))
            for rank in self.epochs.absent:
                self.play("attach", rank, 0.0)
            meet(self.epochs)
        self.check()
        self.check_serving()

    def check_serving(self) -> None:
        assert self.epochs.phase is Phase.SERVING, "the service serves"
        assert self.epochs.is_whole


def test_ranks_that_come_back_to_another_front_meet_in_a_newer_epoch_when_all_have() -> None:
    epochs = Epochs(3, recovery_timeout_s=600.0)
    epochs.resume(100.0)
    assert epochs.attach(0, 101.0, epoch=4) == epochs.attach(2, 101.5, epoch=3) == NOTHING
    assert epochs.take_fault(0, 4, "the front is gone", is_final=False, now_s=101.6) == NOTHING
    assert epochs.lose(2, "killed", 102.0) == NOTHING
    assert epochs.attach(2, 103.0) == NOTHING
    assert epochs.attach(1, 104.0, epoch=4).order == Epoch(5, (0, 1, 2))
    for rank in range(3):
        epochs.take_regrouped(rank, 5, 105.0)
    assert epochs.is_whole and not epochs.is_resuming


def test_ranks_that_do_not_come_back_to_another_front_are_missing_and_may_come_later() -> None:
    epochs = Epochs(3, recovery_timeout_s=600.0)
    epochs.resume(100.0)
    epochs.attach(1, 101.0, epoch=0)
    assert epochs.next_due_s() == 103.0, "the others retry as often as the first one did"
    epochs.attach(2, 102.0, epoch=0)
    epochs.lose(2, "killed", 102.5)
    assert epochs.next_due_s() == 103.0
    assert epochs.tick(103.0).order == Epoch(1, (1,))
    assert set(epochs.missing) == {0, 2}
    assert epochs.attach(0, 120.0).order == Epoch(2, (0, 1))


def test_ranks_do_not_wait_for_those_that_were_lost_with_the_former_front() -> None:
    epochs = Epochs(4, recovery_timeout_s=600.0)
    epochs.resume(100.0, lost=[0, 1])
    assert epochs.attach(3, 101.0, epoch=4) == NOTHING
    assert epochs.attach(2, 101.1, epoch=4).order == Epoch(5, (2, 3))
    assert set(epochs.missing) == {0, 1} and not epochs.is_resuming
    assert epochs.attach(0, 120.0).order == Epoch(6, (0, 2, 3))


def test_a_front_to_which_nobody_comes_back_waits_as_for_ranks_that_are_lost() -> None:
    epochs = Epochs(2, recovery_timeout_s=600.0)
    epochs.resume(100.0)
    assert epochs.tick(110.0) == NOTHING and epochs.phase is Phase.WAITING
    assert epochs.next_due_s() == 710.0
    assert epochs.attach(0, 200.0).order == Epoch(1, (0,))


class Pools:
    """A pool of three ranks next to another one."""

    def __init__(self) -> None:
        self.others_serve = True
        self.epochs = Epochs(3, recovery_timeout_s=RECOVERY_S, others_serve=lambda: self.others_serve)
        for rank in range(3):
            self.epochs.attach(rank, 0.0)


def test_requests_move_to_other_pools_if_the_members_have_not_met_in_time() -> None:
    epochs = Pools().epochs
    epochs.lose(1, "killed", 5.0)
    assert (epochs.settled, epochs.next_due_s()) == (frozenset({0, 2}), 5.0 + RELEASE_S)
    epochs.lose(2, "killed", 5.5)
    assert epochs.tick(5.0 + RELEASE_S) == NOTHING, "a newer order does not extend the time"
    assert not epochs.settled and epochs.next_due_s() == 5.5 + REGROUP_TIMEOUT_S
    assert epochs.released == {0}
    epochs.take_regrouped(0, 2, 9.0)
    assert not epochs.released
    assert epochs.phase is Phase.SERVING and epochs.settled == {0} and epochs.next_due_s() is None


def test_requests_stay_while_no_other_pool_serves() -> None:
    pools = Pools()
    epochs, pools.others_serve = pools.epochs, False
    epochs.lose(1, "killed", 5.0)
    epochs.tick(5.0 + RELEASE_S)
    assert epochs.settled == {0, 2} and epochs.next_due_s() == 5.0 + 2 * RELEASE_S
    assert not epochs.released
    pools.others_serve = True
    epochs.tick(5.0 + 2 * RELEASE_S)
    assert not epochs.settled and epochs.released == {0, 2}
    epochs.lose(2, "killed", 8.0)
    assert epochs.released == {0}


def test_requests_leave_ranks_that_wait_for_a_lost_one() -> None:
    epochs = Pools().epochs
    epochs.lose(1, "killed", 5.0)
    epochs.take_fault(0, 1, "no memory", is_final=True, now_s=5.5)
    assert (epochs.phase, epochs.next_due_s()) == (Phase.WAITING, 5.0 + RELEASE_S)
    epochs.tick(5.0 + RELEASE_S)
    assert not epochs.settled and epochs.next_due_s() == 5.5 + RECOVERY_S


def test_ranks_that_met_after_the_release_have_their_own_time() -> None:
    epochs = Pools().epochs
    epochs.take_fault(0, 0, "a peer is gone", is_final=False, now_s=5.0)
    epochs.tick(5.0 + FAULT_GRACE_S)
    epochs.tick(5.0 + RELEASE_S)
    epochs.take_regrouped(0, 1, 20.0)
    assert epochs.settled == {0} and epochs.next_due_s() == 20.0 + RELEASE_S
    epochs.tick(20.0 + RELEASE_S)
    assert not epochs.settled and epochs.phase is Phase.REGROUPING
