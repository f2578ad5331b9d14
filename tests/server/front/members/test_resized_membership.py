"""The front's decisions about members while a resize runs: who waits, who meets, and what any failure leaves."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.front.members.membership import REGROUP_TIMEOUT_S, Absence, Effects, Epoch, Epochs, GivenUp, Phase
from tests.server.front.members.test_membership import NOTHING, meet, serving


def grown(epochs: Epochs, num_ranks: int) -> Epochs:
    """Begin an epoch with more ranks."""
    new = range(epochs.num_ranks, num_ranks)
    epochs.expect(num_ranks)
    for rank in new:
        assert epochs.attach(rank, 0.0) == NOTHING
    assert epochs.came == {*new} and epochs.is_whole, "nothing has changed for the others"
    assert epochs.in_epoch == {*epochs.ranks}
    assert epochs.resize(num_ranks, 0.0) == Effects(order=Epoch(1, tuple(range(num_ranks))))
    return epochs


def test_new_ranks_wait_and_meet_the_others_in_one_epoch() -> None:
    epochs = grown(serving(2), 4)
    assert epochs.is_resizing and epochs.settled == {0, 1}
    meet(epochs)
    assert epochs.is_whole and not epochs.is_resizing
    assert epochs.settled == {0, 1, 2, 3} and epochs.num_losses == dict.fromkeys(range(4), 0)


def test_the_last_ranks_leave_in_one_epoch_and_their_ends_are_no_losses() -> None:
    epochs = serving(4)
    assert epochs.resize(2, 0.0) == Effects(order=Epoch(1, (0, 1), (2, 3)))
    assert epochs.settled == {0, 1}, "requests leave them"
    assert epochs.in_epoch == {0, 1, 2, 3}, "their last steps may still run"
    assert epochs.lose(3, "killed", 0.0) == NOTHING
    meet(epochs)
    assert epochs.is_whole and epochs.num_ranks == 2 and epochs.in_epoch == {0, 1}
    assert epochs.lose(2, "stopped", 0.0) == NOTHING
    assert epochs.is_whole and epochs.missing == {} and sum(epochs.num_losses.values()) == 0


def test_a_new_rank_that_ends_before_it_is_needed_changes_nothing() -> None:
    epochs = serving(2)
    epochs.expect(3)
    epochs.attach(2, 0.0)
    assert epochs.lose(2, "killed", 0.0) == NOTHING
    assert epochs.came == frozenset() and epochs.is_whole
    epochs.attach(2, 0.0)
    epochs.expect(0)
    assert epochs.came == frozenset() and epochs.lose(2, "stopped", 0.0) == NOTHING


def test_a_new_rank_that_comes_after_the_resize_has_ended_is_given_up() -> None:
    epochs = serving(2)
    epochs.expect(4)
    epochs.attach(2, 0.0)
    epochs.expect(0)
    given_up = GivenUp(3, "the service has no such rank")
    assert epochs.attach(3, 0.0) == Effects(given_up=(given_up,))
    assert epochs.lose(3, given_up.reason, 0.0) == NOTHING and epochs.is_whole


def test_a_new_rank_that_dies_while_it_joins_leaves_the_former_ranks() -> None:
    epochs = grown(serving(2), 3)
    epochs.take_regrouped(0, 1, 0.0)
    assert epochs.lose(2, "killed", 0.0) == Effects(order=Epoch(2, (0, 1)))
    assert (epochs.num_ranks, epochs.missing, epochs.is_resizing) == (2, {}, False)
    meet(epochs)
    assert epochs.is_whole and epochs.settled == {0, 1}


def test_an_old_rank_that_dies_while_new_ones_join_leaves_the_former_ranks_without_it() -> None:
    epochs = grown(serving(2), 4)
    assert epochs.lose(0, "killed", 5.0) == Effects(order=Epoch(2, (1,)))
    assert epochs.num_ranks == 2 and epochs.missing == {0: Absence("killed", 5.0)}
    assert epochs.lose(3, "stopped", 6.0) == NOTHING, "it does not belong to the service"
    assert epochs.attach(0, 7.0) == Effects(order=Epoch(3, (0, 1)))


def test_ranks_that_were_to_leave_stay_if_the_others_do_not_meet() -> None:
    epochs = serving(3)
    epochs.resize(2, 0.0)
    epochs.take_regrouped(0, 1, 0.0)
    assert epochs.lose(1, "killed", 5.0) == Effects(order=Epoch(2, (0, 2)))
    assert epochs.num_ranks == 3 and {*epochs.missing} == {1}
    for rank in (0, 2):
        epochs.take_regrouped(rank, 2, 5.0)
    assert epochs.settled == {0, 2}


def test_a_leaving_rank_that_died_is_missing_if_the_others_do_not_meet() -> None:
    epochs = serving(3)
    epochs.resize(2, 0.0)
    epochs.lose(2, "killed", 3.0)
    assert epochs.lose(1, "killed too", 5.0) == Effects(order=Epoch(2, (0,)))
    assert epochs.missing == {1: Absence("killed too", 5.0), 2: Absence("killed", 3.0)}


@pytest.mark.parametrize("is_final", [False, True])
def test_a_rank_that_cannot_follow_the_resize_leaves_the_former_ranks(*, is_final: bool) -> None:
    epochs = grown(serving(2), 3)
    effects = epochs.take_fault(1, 1, "too little memory", is_final=is_final, now_s=0.0)
    assert effects == Effects(order=Epoch(2, (0, 1), stopped=(1,))) and epochs.num_ranks == 2
    meet(epochs)
    assert epochs.is_whole


def test_a_rank_that_never_answers_the_resize_is_given_up_and_the_former_ranks_meet() -> None:
    epochs = grown(serving(2), 3)
    for rank in (0, 1):
        epochs.take_regrouped(rank, 1, 0.0)
    effects = epochs.tick(REGROUP_TIMEOUT_S)
    assert effects.given_up == (GivenUp(2, "it did not answer the order of epoch 1 in time"),)
    assert epochs.lose(2, "dropped", REGROUP_TIMEOUT_S) == Effects(order=Epoch(2, (0, 1)))
    meet(epochs)
    assert epochs.is_whole and epochs.num_ranks == 2


def test_a_leaving_rank_may_reconnect() -> None:
    epochs = serving(3)
    epochs.resize(2, 0.0)
    epochs.lose(2, "its connection broke", 1.0)
    assert epochs.attach(2, 2.0) == NOTHING
    assert epochs.lose(1, "killed", 5.0) == Effects(order=Epoch(2, (0, 2)))
    assert {*epochs.missing} == {1}


_EVENTS = st.lists(
    st.tuples(st.sampled_from(["lose", "return", "meet", "fault"]), st.integers(0, 4)), max_size=20
)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([(2, 4), (4, 2), (3, 2), (2, 3), (4, 1), (1, 3)]), _EVENTS)
def test_any_events_end_with_the_old_or_the_new_number_of_ranks(
    sizes: tuple[int, int], events: list[tuple[str, int]]
) -> None:
    before, after = sizes
    epochs, now_s = serving(before), 0.0
    if after > before:
        grown(epochs, after)
    else:
        epochs.resize(after, now_s)
    alive = set(range(max(sizes)))
    for kind, rank in events:
        now_s += 0.1
        if kind == "lose" and rank in alive:
            alive.discard(rank)
            epochs.lose(rank, "killed", now_s)
        elif kind == "return" and rank in epochs.ranks and rank not in alive:
            alive.add(rank)
            epochs.attach(rank, now_s)
        elif kind == "meet":
            epochs.take_regrouped(rank, epochs.number, now_s)
        elif kind == "fault":
            epochs.take_fault(rank, epochs.number, "a time-out", is_final=False, now_s=now_s)
    for rank in [rank for rank in epochs.ranks if rank not in alive]:
        epochs.attach(rank, now_s)
    for _ in range(8):
        meet(epochs)
        if epochs.is_whole:
            break
        now_s += REGROUP_TIMEOUT_S
        epochs.tick(now_s)
    assert epochs.num_ranks in sizes and not epochs.is_resizing
    assert (epochs.phase, epochs.is_whole) == (Phase.SERVING, True)
    assert epochs.settled == {*range(epochs.num_ranks)}
