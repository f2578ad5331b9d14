"""Concurrent requests: which failures are retried, which are not, and how many requests run at once."""

import asyncio
import json
from collections.abc import Callable, Iterator

import httpx
import pytest

from server.api.openai.batches.bulk_client import (
    LONGEST_PAUSE_S,
    PAUSES_S,
    BulkClient,
    Reply,
    ServiceLostError,
    for_each,
)
from server.http.client import ServiceError

Answer = httpx.Response | Exception


def client_of(
    answers: list[Answer] | Callable[[httpx.Request], httpx.Response],
    pauses: list[float] | None = None,
    why_gone: Callable[[], str | None] = lambda: None,
) -> BulkClient:
    """Return a client of a service that gives these answers in turn. Pauses are recorded and not made."""

    def answer(request: httpx.Request) -> httpx.Response:
        if callable(answers):
            return answers(request)
        given = answers.pop(0)
        if isinstance(given, Exception):
            raise given
        return given

    async def sleep(seconds: float) -> None:
        assert pauses is not None, "no pause is expected here"
        pauses.append(seconds)

    return BulkClient(
        "http://x", "k", concurrency=4, why_gone=why_gone, sleep=sleep, transport=httpx.MockTransport(answer)
    )


def post(client: BulkClient) -> Reply:
    return asyncio.run(client.post("/v1/completions", {"prompt": "é\ud800"}))


def test_a_request_carries_the_key_and_any_string() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url == "http://x/v1/completions"
        assert request.headers["authorization"] == "Bearer k"
        assert json.loads(request.content) == {"prompt": "é\ud800"}
        return httpx.Response(200, json={"id": "cmpl-1"}, headers={"x-request-id": "r1"})

    assert post(client_of(answer)) == Reply(200, "r1", {"id": "cmpl-1"})


def test_the_answers_own_id_stands_in_for_a_request_id() -> None:
    assert post(client_of([httpx.Response(200, json={"id": "cmpl-1"})])).request_id == "cmpl-1"


@pytest.mark.parametrize("status", [400, 401, 404, 413, 500])
def test_a_refusal_is_an_answer_and_is_not_tried_again(status: int) -> None:
    body = {"error": {"message": "no such model"}}
    reply = post(client_of([httpx.Response(status, json=body)]))
    assert (reply.status, reply.body, reply.is_good, reply.complaint) == (
        status,
        body,
        False,
        "no such model",
    )


def test_an_answer_that_is_not_json_is_kept_as_text() -> None:
    reply = post(client_of([httpx.Response(502, text="Bad Gateway")]))
    assert (reply.body, reply.complaint) == ("Bad Gateway", "Bad Gateway")


@pytest.mark.parametrize(
    "trouble", [httpx.Response(429), httpx.Response(503), httpx.ConnectError("refused"), httpx.ReadError("")]
)
def test_trouble_that_may_pass_is_waited_out(trouble: Answer) -> None:
    pauses: list[float] = []
    good = httpx.Response(200, json={})
    assert post(client_of([trouble, trouble, good], pauses)).is_good
    assert pauses == list(PAUSES_S[:2])


def test_retry_after_is_honoured_within_bounds() -> None:
    pauses: list[float] = []
    answers = [httpx.Response(503, headers={"retry-after": text}) for text in ("7", "99999", "tomorrow", "0")]
    post(client_of([*answers, httpx.Response(200, json={})], pauses))
    assert pauses == [7.0, LONGEST_PAUSE_S, PAUSES_S[2], PAUSES_S[3]]


def test_trouble_that_stays_is_a_sentence() -> None:
    pauses: list[float] = []
    refusal = httpx.Response(503, json={"error": {"message": "waiting for rank 1"}})
    client = client_of([refusal] * (len(PAUSES_S) + 1), pauses)
    with pytest.raises(
        ServiceLostError,
        match=r"stopped after 8 attempts: http://x refuses requests \(503\): waiting for rank 1",
    ):
        post(client)
    assert pauses == list(PAUSES_S)


def test_nobody_waits_for_a_service_that_is_known_to_be_gone() -> None:
    client = client_of([httpx.ReadError("")], why_gone=lambda: "the service has ended: killed")
    with pytest.raises(ServiceLostError, match="the service has ended: killed"):
        post(client)


def test_a_get_is_tried_once() -> None:
    client = client_of([httpx.ConnectError("refused")])
    with pytest.raises(ServiceLostError, match=r"no service answers at http://x \(refused\)"):
        asyncio.run(client.get("/v1/models"))


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:port", ""])
def test_what_is_no_url_is_refused_at_once(url: str) -> None:
    with pytest.raises(ServiceError, match="is not a URL of a service; try http://127"):
        BulkClient(url, None, concurrency=1)


@pytest.mark.parametrize("url", ["http://x:80/", "x:80", "http://x:80/v1", "x:80/v1/"])
def test_a_url_may_be_written_in_several_ways(url: str) -> None:
    assert BulkClient(url, None, concurrency=1).url == "http://x:80"


def test_every_job_is_worked_on_once_and_no_more_at_once_than_allowed() -> None:
    most = running = 0
    done: list[int] = []

    async def work(job: int) -> None:
        nonlocal most, running
        running += 1
        most = max(most, running)
        for _ in range(job % 3):
            await asyncio.sleep(0)
        running -= 1
        done.append(job)

    asyncio.run(for_each(range(50), work, concurrency=4))
    assert sorted(done) == list(range(50))
    assert most == 4


def test_jobs_are_taken_only_when_there_is_room() -> None:
    taken: list[int] = []

    async def main() -> None:
        gate = asyncio.Event()

        async def work(_: int) -> None:
            await gate.wait()

        def jobs() -> Iterator[int]:
            for job in range(10):
                taken.append(job)
                yield job

        task = asyncio.create_task(for_each(jobs(), work, concurrency=3))
        for _ in range(10):
            await asyncio.sleep(0)
        assert taken == [0, 1, 2]
        gate.set()
        await task

    asyncio.run(main())
    assert taken == list(range(10))


def test_the_first_failure_ends_the_others() -> None:
    cancelled: list[int] = []

    async def work(job: int) -> None:
        if job == 2:
            raise ServiceLostError("gone")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(job)
            raise

    with pytest.raises(ServiceLostError, match="gone"):
        asyncio.run(for_each(range(10), work, concurrency=3))
    assert sorted(cancelled) == [0, 1]
