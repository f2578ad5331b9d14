"""The client that times streams, against scripted bytes and a clock that stops between them."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from server.tools.bench.stream import StreamClient, StreamedAnswer
from tests.support.requests.stub_service import (
    DONE,
    END,
    OK,
    Piece,
    SteppedClock,
    chunk,
    event,
    said,
    stub_service,
    usage,
)

CHAT = "/v1/chat/completions"
TIMEOUT_S = 30.0
LAST = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
LISTED = {"prompt_tokens_details": [1]}
WHOLE = OK + chunk(said("x")) + chunk(event(LAST) + event({"choices": [], "usage": usage(5, 1)}) + DONE) + END


def ask(answer: Sequence[Piece], **body: Any) -> StreamedAnswer:
    """Send one request, with a clock that the service moves, starting at 100 s."""

    async def run() -> StreamedAnswer:
        clock = SteppedClock()
        async with stub_service([answer], clock=clock) as service, asyncio.timeout(TIMEOUT_S):
            client = StreamClient(service.url, clock=clock)
            try:
                return await client.ask(CHAT, body)
            finally:
                client.close()

    return asyncio.run(run())


def ask_all(
    answers: Sequence[bytes], count: int, *, key: str | None = None, **how: Any
) -> tuple[list[StreamedAnswer], Any]:
    """Send requests one after the other, and return the answers and the service."""

    async def run() -> tuple[list[StreamedAnswer], Any]:
        async with stub_service(answers, **how) as service, asyncio.timeout(TIMEOUT_S):
            client = StreamClient(service.url + "/base", key)
            try:
                return [await client.ask(CHAT, {"n": number}) for number in range(count)], service
            finally:
                client.close()

    return asyncio.run(run())


def test_chunks_are_timed_when_their_bytes_arrive() -> None:
    role = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    reasoning = event({"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}}]})
    end = event(LAST) + event({"choices": [], "usage": usage(7, 4, cached=5)}) + DONE
    answer = ask(
        [
            Piece(0.5, OK + chunk(role)),
            Piece(0.5, chunk(reasoning)),
            Piece(0.25, chunk(said("a")) + chunk(said("b"))),
            Piece(0.25, chunk(said("c"))),
            Piece(0.125, chunk(end) + END),
        ]
    )
    assert answer.failure == ""
    assert answer.start_s == 100.0
    assert answer.arrivals_s == [101.0, 101.25, 101.25, 101.5], "the role's chunk has no token"
    assert (answer.first_s, answer.end_s) == (101.0, 101.625)
    assert (answer.prompt_tokens, answer.output_tokens, answer.cached_tokens) == (7, 4, 5)
    assert answer.has_usage and answer.counts == []


def test_an_event_in_two_pieces_has_come_with_the_second() -> None:
    whole = chunk(said("word"))
    answer = ask([Piece(0.5, OK + whole[:20]), Piece(0.5, whole[20:]), Piece(0.5, chunk(DONE) + END)])
    assert answer.arrivals_s == [101.0]
    assert answer.failure == "" and answer.output_tokens == 1 and not answer.has_usage


def test_usage_in_every_chunk_says_how_many_tokens_it_has() -> None:
    pieces = [
        Piece(0.5, OK + chunk(said("ab", usage=usage(3, 2)))),
        Piece(0.5, chunk(said("cde", usage=usage(3, 5)))),
    ]
    answer = ask([*pieces, Piece(0.0, chunk(event(LAST) + DONE) + END)])
    assert answer.counts == [2, 5] and answer.output_tokens == 5


def test_an_answer_whose_tokens_are_all_hidden_has_its_end() -> None:
    end = event(LAST) + event({"choices": [], "usage": usage(3, 2)}) + DONE
    answer = ask(
        [
            Piece(0.5, OK + chunk(event({"choices": [{"delta": {"role": "assistant"}}]}))),
            Piece(0.5, chunk(end) + END),
        ]
    )
    assert answer.failure == "" and answer.first_s == answer.end_s == 101.0


def test_a_connection_is_used_again_with_path_and_key() -> None:
    answers, service = ask_all([WHOLE], 3, key="sesame")
    assert [answer.failure for answer in answers] == ["", "", ""]
    assert service.num_connections == 1
    assert [body["n"] for body in service.bodies] == [0, 1, 2]
    assert service.heads[0].startswith(b"POST /base/v1/chat/completions HTTP/1.1\r\n")
    assert b"Authorization: Bearer sesame\r\n" in service.heads[0]


def test_a_connection_that_the_service_closed_meanwhile_is_replaced() -> None:
    answers, service = ask_all([WHOLE], 3, closes_after=lambda number: number == 0)
    assert [answer.failure for answer in answers] == ["", "", ""]
    assert service.num_connections == 2


def whole(status: bytes, body: bytes) -> bytes:
    """Return an answer that is not streamed."""
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


FAILURES = {
    "a refusal as text": (
        whole(b"404 Not Found", b'{"error": {"message": "no such"}}'),
        "the service refused (404): no such",
    ),
    "a refusal without a length": (
        b"HTTP/1.1 400 Bad Request\r\n\r\ntoo long",
        "the service refused (400): too long",
    ),
    "no stream": (
        whole(b"200 OK", b'{"choices": []}'),
        "the answer is not a stream of tokens: {'choices': []}",
    ),
    "an empty stream": (OK + END, "the answer is not a stream of tokens: it is empty"),
    "an error in the stream": (
        OK + chunk(said("x") + event({"error": {"message": "rank 1 is gone"}}) + DONE) + END,
        "rank 1 is gone",
    ),
    "an event that is not JSON": (
        OK + chunk(b"data: {oh\n\n") + END,
        "an event is not a chunk of an answer: {oh",
    ),
    "an event that is not an object": (
        OK + chunk(b"data: [1]\n\n") + END,
        "an event is not a chunk of an answer: [1]",
    ),
    "an end too early": (OK + chunk(said("x")), "the connection was lost: the service closed it"),
    "no HTTP": (b"220 smtp.example ESMTP\r\n", "invalid HTTP"),
    "another usage": (
        OK + chunk(said("x") + event({"choices": [], "usage": {"tokens": 3}}) + DONE) + END,
        "usage is not in OpenAI's format: {'tokens': 3}",
    ),
    "a usage without an end": (
        OK + chunk(said("x") + event({"choices": [], "usage": usage(3, float("inf"))}) + DONE) + END,
        "usage is not in OpenAI's format: {'prompt_tokens': 3, 'completion_tokens': inf",
    ),
    "details that are a list": (
        OK + chunk(said("x") + event({"choices": [], "usage": {**usage(3, 1), **LISTED}}) + DONE) + END,
        "usage is not in OpenAI's format",
    ),
    "a stream without its answer's end": (
        OK + chunk(said("x")) + END,
        "the stream ended before the answer was complete",
    ),
}


@pytest.mark.parametrize(("sent", "words"), FAILURES.values(), ids=FAILURES)
def test_what_goes_wrong_is_said_in_the_answer(sent: bytes, words: str) -> None:
    [answer], _ = ask_all([sent], 1, closes_after=lambda _: True)
    assert words in answer.failure


def test_an_error_that_is_null_is_none() -> None:
    sent = OK + chunk(said("x") + event({"choices": [], "error": None}) + DONE) + END
    [answer], _ = ask_all([sent], 1)
    assert answer.failure == ""


def test_a_stream_without_a_length_ends_with_its_connection() -> None:
    sent = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + said("x") + DONE
    [answer], _ = ask_all([sent], 1, closes_after=lambda _: True)
    assert answer.failure == "" and answer.output_tokens == 1


def test_a_service_on_a_socket_is_asked(tmp_path: Path) -> None:
    async def run() -> StreamedAnswer:
        async with stub_service([WHOLE], socket=tmp_path / "s") as service, asyncio.timeout(TIMEOUT_S):
            client = StreamClient(service.url)
            try:
                return await client.ask(CHAT, {})
            finally:
                client.close()

    assert asyncio.run(run()).failure == ""


def test_nobody_listens_is_a_failure_of_the_answer() -> None:
    async def run() -> StreamedAnswer:
        return await StreamClient("http://127.0.0.1:1").ask(CHAT, {})

    assert "no connection" in asyncio.run(run()).failure


def test_who_is_cancelled_hangs_up() -> None:
    async def run() -> bool:
        hung_up = asyncio.Event()
        asked = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            asked.set()
            try:
                while await reader.read(100):
                    pass
            except ConnectionError:
                pass
            hung_up.set()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server, asyncio.timeout(TIMEOUT_S):
            port = server.sockets[0].getsockname()[1]
            asking = asyncio.create_task(StreamClient(f"http://127.0.0.1:{port}").ask(CHAT, {}))
            await asked.wait()
            asking.cancel()
            await asyncio.wait([asking])
            await hung_up.wait()
            return asking.cancelled()

    assert asyncio.run(run())
