"""Background responses: made without a waiting client, polled, followed from any event on, and cancelled."""

import threading
import time
from typing import Any

import openai
import pytest

from scheduler.policy.request import FinishReason
from tests.support.service.front_process import TIMEOUT_S, FrontProcess

KEY = {"Authorization": "Bearer sesame"}


def begin(client: openai.OpenAI, given: Any, **how: Any) -> Any:
    return client.responses.create(model="tiny", input=given, background=True, **how)


def ended(client: openai.OpenAI, response_id: str) -> Any:
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        response = client.responses.retrieve(response_id)
        if response.status not in ("queued", "in_progress"):
            return response
        threading.Event().wait(0.02)
    raise AssertionError("the response did not end")


def test_a_response_is_queued_and_then_completed(front: FrontProcess, client: openai.OpenAI) -> None:
    more = threading.Event()
    front.script("b-queued", "vwxyz", gates={2: more})
    response = begin(client, "b-queued")
    assert (response.status, response.background, response.output) == ("queued", True, [])
    assert client.responses.retrieve(response.id).status == "queued"
    more.set()
    whole = ended(client, response.id)
    assert (whole.id, whole.status, whole.output_text) == (response.id, "completed", "vwxyz")
    assert whole.usage.output_tokens == 5
    client.responses.create(model="tiny", input="b-next", previous_response_id=response.id)
    prompt = front.decode(front.asked("b-next").prompt_ids)
    assert "<|start|>assistant\nvwxyz<|end|>\n<|start|>user\nb-next" in prompt


def test_store_null_is_true_and_false_is_refused(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("b-store", "ok")
    assert ended(client, begin(client, "b-store", extra_body={"store": None}).id).output_text == "ok"
    with pytest.raises(openai.BadRequestError, match="background can only be used when `store` is true"):
        begin(client, "b-store", store=False)


def test_a_cancelled_response_stays_cancelled_and_frees_its_place(
    front: FrontProcess, client: openai.OpenAI
) -> None:
    never = threading.Event()
    front.script("b-cancel", "abc", gates={2: never})
    stream = iter(begin(client, "b-cancel", stream=True))
    events = [next(stream)]
    while events[-1].type != "response.output_text.delta":
        events.append(next(stream))
    response_id = events[0].response.id
    assert client.responses.retrieve(response_id).status == "in_progress"
    cancelled = client.responses.cancel(response_id)
    assert (cancelled.status, cancelled.output_text) == ("cancelled", "ab"[: len(cancelled.output_text)])
    rank = front.served("b-cancel")
    rank.wait_for(lambda told: rank.requests[-1].request_id in told.aborted)
    never.set()
    assert list(stream)[-1].response.status == "cancelled"
    assert client.responses.retrieve(response_id).status == "cancelled"
    assert client.responses.cancel(response_id).status == "cancelled", "a second cancellation does no harm"


def test_what_has_ended_cannot_be_cancelled(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("b-ended", "ok")
    response = begin(client, "b-ended")
    ended(client, response.id)
    with pytest.raises(openai.BadRequestError, match="has ended: its status is 'completed'"):
        client.responses.cancel(response.id)


def test_a_stream_is_followed_again_from_where_it_was_left(
    front: FrontProcess, client: openai.OpenAI
) -> None:
    more = threading.Event()
    front.script("b-follow", "abcd", gates={2: more})
    with begin(client, "b-follow", stream=True) as stream:
        first = [next(iter(stream)) for _ in range(2)]
    assert [event.type for event in first] == ["response.created", "response.queued"]
    response_id = first[0].response.id
    more.set()  # no client listens, and the run continues
    ended(client, response_id)
    events = list(client.responses.retrieve(response_id, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    assert events[-1].type == "response.completed"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-1].response.output_text == "abcd"
    rest = list(client.responses.retrieve(response_id, stream=True, starting_after=4))
    assert rest == events[5:]
    assert list(client.responses.retrieve(response_id, stream=True, starting_after=10_000)) == []


def test_a_response_that_was_waited_for_has_no_events(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("b-sync", "ok")
    response = client.responses.create(model="tiny", input="b-sync")
    with pytest.raises(openai.BadRequestError, match="background=true"):
        list(client.responses.retrieve(response.id, stream=True))
    with pytest.raises(openai.NotFoundError):
        list(client.responses.retrieve("resp_unknown", stream=True))


def test_an_unfinished_response_is_no_history(front: FrontProcess, client: openai.OpenAI) -> None:
    never = threading.Event()
    front.script("b-unfinished", "abc", gates={1: never})
    response = begin(client, "b-unfinished")
    with pytest.raises(openai.BadRequestError, match="still running"):
        client.responses.create(model="tiny", input="x", previous_response_id=response.id)
    client.responses.delete(response.id)
    rank = front.served("b-unfinished")
    rank.wait_for(lambda told: rank.requests[-1].request_id in told.aborted)
    never.set()
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_a_failure_is_the_response_s_status(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("b-fails", "", finish=FinishReason.ERROR, error="out of luck")
    response = ended(client, begin(client, "b-fails").id)
    assert response.status == "failed" and "out of luck" in response.error.message


def test_a_wrong_request_is_refused_at_once(front: FrontProcess, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        begin(client, "x" * 5000)
