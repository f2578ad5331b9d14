"""The journal: the data for a replay while a request is open, and one outcome when it ends."""

import pytest

from scheduler.policy.request import FinishReason, Request, SamplingParams
from server.front.journal import INCIDENT_S, MAX_INCIDENTS, Journal


def request(name: str) -> Request:
    return Request(
        request_id=name, prompt_ids=(1, 2), params=SamplingParams(max_tokens=4, seed=9), arrival_s=1.0
    )


def test_an_open_entry_holds_what_a_replay_needs() -> None:
    journal = Journal()
    journal.accept(request("a"), 3, now_s=1.0)
    journal.deliver("a", [5])
    journal.deliver("a", [6, 7])
    entry = journal.open_entries["a"]
    assert (entry.request, entry.rank, entry.delivered_ids) == (request("a"), 3, [5, 6, 7])


def test_every_request_gets_exactly_one_outcome() -> None:
    journal = Journal()
    for number, reason in enumerate(FinishReason):
        journal.accept(request(str(number)), 0, now_s=0.0)
        journal.deliver(str(number), [1])
        journal.close(str(number), reason, now_s=2.0, error="why")
        with pytest.raises(AssertionError, match="second outcome"):
            journal.close(str(number), reason, now_s=3.0)
    assert not journal.open_entries
    assert [outcome.reason for outcome in journal.outcomes] == list(FinishReason)
    assert journal.num_ended.total() == journal.num_accepted == len(FinishReason)
    last = journal.outcomes[-1]
    assert (last.num_prompt_tokens, last.num_output_tokens, last.ended_s, last.error) == (2, 1, 2.0, "why")


def test_a_request_survives_so_many_incidents_and_no_more() -> None:
    journal = Journal()
    journal.accept(request("a"), 0, now_s=0.0)
    for incident in range(MAX_INCIDENTS):
        begun_s = incident * INCIDENT_S
        assert all(journal.replay("a", now_s=begun_s + share * INCIDENT_S) for share in (0.0, 0.5, 0.9))
    assert not journal.replay("a", now_s=MAX_INCIDENTS * INCIDENT_S)
    assert journal.num_replayed == 3 * MAX_INCIDENTS


def test_a_request_that_gets_on_between_incidents_survives_any_number() -> None:
    journal = Journal()
    journal.accept(request("a"), 0, now_s=0.0)
    for incident in range(5 * MAX_INCIDENTS):
        assert journal.replay("a", now_s=incident * INCIDENT_S)
        journal.deliver("a", [incident])


def test_a_request_is_accepted_once() -> None:
    journal = Journal()
    journal.accept(request("a"), 0, now_s=0.0)
    with pytest.raises(AssertionError, match="already"):
        journal.accept(request("a"), 1, now_s=0.0)


def test_the_history_is_bounded_and_the_counts_are_not() -> None:
    journal = Journal(history=2)
    for name in "abc":
        journal.accept(request(name), 0, now_s=0.0)
        journal.close(name, FinishReason.STOP, now_s=0.0)
    assert [outcome.request_id for outcome in journal.outcomes] == ["b", "c"]
    assert journal.num_ended[FinishReason.STOP] == 3
