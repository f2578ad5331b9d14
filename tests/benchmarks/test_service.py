"""The client against a stub server: fixed bytes over a real socket."""

import asyncio
import json

import pytest

from benchmarks.closed_loop import RequestTiming
from benchmarks.service import ServiceError, stream_completion

OK = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _event(content: object) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def _stream(pieces: int, tokens: int) -> bytes:
    piece = _chunk(_event({"choices": [{"text": "data: {\n"}], "usage": None}))
    usage = _event({"choices": [], "usage": {"completion_tokens": tokens}})
    return OK + piece * pieces + _chunk(usage + b"data: [DONE]\n\n") + b"0\r\n\r\n"


def _ask(answer: bytes, num_tokens: int) -> tuple[RequestTiming, dict[str, object]]:
    """Let a stub answer one request; return the timing and the body that it got."""
    bodies = []

    async def stub(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length:")[2].split()[0])
        bodies.append(json.loads(await reader.readexactly(length)))
        writer.write(answer)
        writer.close()
        await writer.wait_closed()

    async def run() -> RequestTiming:
        server = await asyncio.start_server(stub, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await asyncio.wait_for(stream_completion(port, [5, 6], num_tokens=num_tokens), 10)

    return asyncio.run(run()), bodies[0]


def test_a_stream_is_timed_piece_by_piece_and_counted_by_its_usage() -> None:
    timing, body = _ask(_stream(pieces=3, tokens=4), num_tokens=4)
    assert timing.num_tokens == 4
    assert len(timing.arrivals_s) == 3  # one piece had two tokens
    assert timing.start_s <= timing.arrivals_s[0] <= timing.arrivals_s[-1]
    assert body["prompt"] == [5, 6]
    assert (body["max_tokens"], body["temperature"], body["ignore_eos"]) == (4, 0, True)


def test_fewer_tokens_than_asked_for_are_an_error() -> None:
    with pytest.raises(ServiceError, match=r"a stream of 4 tokens ended with {'completion_tokens': 2}"):
        _ask(_stream(pieces=2, tokens=2), num_tokens=4)


def test_an_error_inside_a_stream_is_quoted() -> None:
    answer = (
        OK + _chunk(_event({"error": {"message": "rank 1 is gone"}}) + b"data: [DONE]\n\n") + b"0\r\n\r\n"
    )
    with pytest.raises(ServiceError, match="rank 1 is gone"):
        _ask(answer, num_tokens=4)


def test_a_refusal_is_quoted() -> None:
    with pytest.raises(ServiceError, match=r"answered 400: .*too long"):
        _ask(b"HTTP/1.1 400 Bad Request\r\n\r\ntoo long", num_tokens=4)
