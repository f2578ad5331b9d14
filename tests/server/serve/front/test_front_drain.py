"""SIGTERM lets open requests end: /health first, no new requests, whole answers, status 0. A second signal ends it at once."""

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from tests.support.service.front_process import TIMEOUT_S, FrontProcess

Start = Callable[..., FrontProcess]


@pytest.fixture
def start(model_dir: Path) -> Iterator[Start]:
    """Start a front with one rank. It is ended afterwards."""
    started: list[FrontProcess] = []

    def start_front(*flags: str) -> FrontProcess:
        process = FrontProcess(model_dir, "--served-model-name", "m", *flags, num_ranks=1)
        started.append(process)
        return process.attach_all()

    yield start_front
    for process in started:
        process.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    """Threads for waiting clients."""
    with ThreadPoolExecutor(4) as pool:
        yield pool


def complete(front: FrontProcess, prompt: str, **how: object) -> httpx.Response:
    return front.post("/v1/completions", json={"model": "m", "prompt": prompt, **how})


def wait_until_draining(front: FrontProcess) -> httpx.Response:
    """Wait until /health no longer returns 200."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while (response := front.get("/health")).status_code == 200:
        assert time.monotonic() < deadline_s, "SIGTERM had no effect"
        threading.Event().wait(0.01)
    return response


def test_open_requests_end_whole_and_new_ones_are_refused(start: Start, threads: ThreadPoolExecutor) -> None:
    front = start()
    gate = threading.Event()
    front.script("d-stream", "abc", gates={1: gate})
    front.script("d-whole", "xyz", gates={0: gate})
    with openai.OpenAI(
        base_url=front.url + "/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S
    ) as client:
        stream = iter(client.completions.create(model="m", prompt="d-stream", stream=True))
        text = next(stream).choices[0].text
        whole: Future[httpx.Response] = threads.submit(complete, front, "d-whole")
        front.served("d-whole")
        front.process.send_signal(signal.SIGTERM)
        health = wait_until_draining(front)
        assert health.status_code == 503 and "shutting down" in health.json()["error"]["message"]
        assert not front.ranks[0].stopped.is_set()
        refused = complete(front, "too late")
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        assert "shutting down" in refused.json()["error"]["message"]
        assert front.get("/v1/models").status_code == 200, "cheap requests are still answered"
        gate.set()
        text += "".join(chunk.choices[0].text for chunk in stream)
    assert (text, whole.result(TIMEOUT_S).json()["choices"][0]["text"]) == ("abc", "xyz")
    assert front.wait() == (0, "")
    assert front.ranks[0].stopped.is_set(), "ranks are stopped afterwards"


def end_amid_a_request(front: FrontProcess, threads: ThreadPoolExecutor) -> Future[httpx.Response]:
    """Send SIGTERM during a request that never ends by itself."""
    front.script("d-never", "abc", gates={1: threading.Event()})
    never = threads.submit(complete, front, "d-never")
    front.served("d-never")
    front.process.send_signal(signal.SIGTERM)
    return never


@pytest.mark.slow
def test_what_does_not_end_in_time_gets_an_error(start: Start, threads: ThreadPoolExecutor) -> None:
    front = start("--shutdown-timeout-seconds=0.3")
    never = end_amid_a_request(front, threads)
    assert never.result(TIMEOUT_S).status_code == 503
    assert front.wait() == (0, "")


@pytest.mark.slow
def test_a_second_signal_does_not_wait(start: Start, threads: ThreadPoolExecutor) -> None:
    front = start()
    never = end_amid_a_request(front, threads)
    wait_until_draining(front)
    front.process.send_signal(signal.SIGTERM)
    assert never.result(TIMEOUT_S).status_code == 503
    assert front.wait() == (0, "")


@pytest.mark.slow
def test_a_rank_that_is_lost_meanwhile_is_a_failure(start: Start, threads: ThreadPoolExecutor) -> None:
    front = start()
    never = end_amid_a_request(front, threads)
    wait_until_draining(front)
    front.ranks[0].link.close("out of memory")
    assert "rank 0 is lost" in never.result(TIMEOUT_S).json()["error"]["message"]
    assert front.wait() == (1, "wideep front: rank 0 is lost: out of memory\n")


@pytest.mark.slow
def test_a_rank_that_is_killed_once_all_requests_have_ended_is_no_failure(start: Start) -> None:
    """A client still reads its answer, which is larger than the sockets' buffers."""
    front = start("--disable-access-log")
    front.script("d-long", front.encode("x" * 400))
    body = b'{"model":"m","prompt":"d-long","stream":true,"max_tokens":400,"n":100}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    host, port = front.url.removeprefix("http://").split(":")
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((host, int(port)))
        slow.sendall(head.encode() + body)
        front.ranks[0].wait_for(lambda rank: len(rank.requests) == 100)
        front.process.send_signal(signal.SIGTERM)
        wait_until_closed(host, int(port))
        front.ranks[0].kill()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        answer = b"".join(iter(lambda: slow.recv(1 << 20), b""))
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert front.wait() == (0, "wideep front: rank 0 is lost while the service ends: its connection closed\n")


def wait_until_closed(host: str, port: int) -> None:
    """Wait until connections are refused."""
    deadline_s = time.monotonic() + TIMEOUT_S
    with contextlib.suppress(ConnectionRefusedError):
        while time.monotonic() < deadline_s:
            socket.create_connection((host, port), timeout=TIMEOUT_S).close()
            threading.Event().wait(0.01)
        raise AssertionError("it still listens")
