"""A front's start and end: readiness, keys, deadlines, a lost rank, signals, its parent's death."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from expert_placement.placement import linear_placement
from server.link.rank_link import LinkError
from server.serve.child_messages import FrontAddresses, announcement
from server.serve.children import END_NOW_SIGNAL, READY_VARIABLE
from server.serve.front import front_main
from server.serve.front.front import Front
from tests.support.service.forked import WIDEEP
from tests.support.service.front_process import TIMEOUT_S, FrontProcess, without_times
from tests.support.service.service_processes import wait_until
from tests.support.service.starts import options_for

FRONT = [*WIDEEP, "front"]
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def fronts(model_dir: Path) -> Iterator[list[FrontProcess]]:
    """Fronts that a test started, closed afterwards."""
    started: list[FrontProcess] = []
    yield started
    for process in started:
        process.close()


@pytest.mark.parametrize(
    ("num_fronts", "num_announced", "listens"),
    [(1, 0, True), (1, 1, True), (2, 0, True), (2, 1, True), (2, 2, False)],
    ids=["the only one", "its replacement", "the first of two", "the second", "a replacement of the second"],
)
def test_connections_do_not_wait_for_a_replacement_if_there_are_other_fronts(
    tmp_path: Path, num_fronts: int, num_announced: int, listens: bool
) -> None:
    announced = (
        announcement([FrontAddresses("http://h:1", "h:1", "t")] * num_announced) if num_announced else "null"
    )
    number = int(num_fronts == 2 and num_announced > 0)
    place = front_main._Place(number, json.loads(announced), "127.0.0.1", tmp_path)
    options = options_for(tmp_path, f"--api-server-count={num_fronts}")
    with front_main._listener(options, place, {}) as listener:
        assert bool(listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)) == listens


def test_a_port_is_reserved_for_a_standby_that_does_not_listen_yet() -> None:
    with front_main.bind_http("127.0.0.1", 0, listens=False) as listener:
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError, match="in use"):
                other.bind(listener.getsockname())
        listener.listen()


@pytest.mark.parametrize(("is_replaced", "stopped"), [(False, [0, 1, 2]), (True, [0, 2])])
def test_a_front_that_the_standby_has_replaced_stops_the_ranks_of_its_node_only(
    is_replaced: bool, stopped: list[int]
) -> None:
    ended: list[int] = []
    attached = dict.fromkeys(range(3))
    ranks = SimpleNamespace(attached=attached, retire=ended.extend, stop=lambda: ended.extend(attached))
    front: Any = SimpleNamespace(_is_replaced=is_replaced, _files=SimpleNamespace(near={0, 2}), _ranks=ranks)
    Front._stop_ranks(front)
    assert ended == stopped


def client_of(front: FrontProcess, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=front.url + "/v1", api_key=key, max_retries=0, timeout=TIMEOUT_S)


def test_it_is_ready_when_every_rank_is_and_checks_keys(model_dir: Path, fronts: list[FrontProcess]) -> None:
    front = FrontProcess(model_dir, "--api-key", "sesame", "--api-key", "second", "--served-model-name", "m")
    fronts.append(front)
    response = front.get("/health")
    assert response.status_code == 503 and "ranks 0, 1" in response.json()["error"]["message"]
    with client_of(front, "sesame") as client, pytest.raises(openai.InternalServerError, match="ranks 0, 1"):
        client.chat.completions.create(model="m", messages=HELLO)  # type: ignore[arg-type]
    front.attach(1)
    assert "rank 0" in front.get("/health").json()["error"]["message"]
    with pytest.raises(LinkError, match="already attached"):
        front.attach(1)
    front.attach(0)
    assert front.get("/health").status_code == 200
    for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "sesame"}):
        response = front.get("/v1/models", headers=header)
        assert response.status_code == 401 and response.json()["error"]["type"] == "AuthenticationError"
    for key in ("sesame", "second"):
        with client_of(front, key) as client:
            assert client.models.list().data[0].id == "m"
    assert front.get("/metrics").status_code == 200, "it is open without a key"
    maps = Path(f"/proc/{front.process.pid}/maps").read_text()
    assert "tokenizers" in maps and "libtorch" not in maps, "a front reads its tokenizer without torch"
    assert front.close() == (0, "")
    assert all(rank.stopped.is_set() for rank in front.ranks), "ranks are stopped first"


@pytest.mark.slow
def test_a_deadline_reaches_the_rank_and_then_the_client(model_dir: Path, fronts: list[FrontProcess]) -> None:
    front = FrontProcess(model_dir, "--request-timeout", "0.2", num_ranks=1).attach_all()
    fronts.append(front)
    never = threading.Event()
    front.script("l-late", "abc", gates={1: never})
    with client_of(front) as client:
        name = client.models.list().data[0].id
        assert name == model_dir.name, "the directory's name is the model's"
        messages = [{"role": "user", "content": "l-late"}]
        with pytest.raises(openai.APIStatusError) as caught:
            client.chat.completions.create(model=name, messages=messages)  # type: ignore[arg-type]
        assert caught.value.status_code == 504
    rank = front.ranks[0]
    request = rank.requests[-1]
    assert request.deadline_s is not None
    assert 0 < request.deadline_s - request.arrival_s < 0.201  # the clock is a float
    rank.wait_for(lambda told: request.request_id in told.aborted)
    never.set()


@pytest.mark.slow
def test_when_no_rank_comes_back_in_time_open_requests_fail_cleanly_and_the_front_ends(
    model_dir: Path, fronts: list[FrontProcess]
) -> None:
    front = FrontProcess(model_dir, "--served-model-name=m", "--rank-recovery-timeout=0.1").attach_all()
    fronts.append(front)
    front.ranks[0].begin(linear_placement(1, 2, 2))
    wait_until(lambda: front.get("/experts/history").status_code == 200, lambda: "the placement is not known")
    front.script("l-stream", "abc", gates={1: threading.Event()})
    front.script("l-whole", "abc", gates={0: threading.Event()})
    failures: list[Exception] = []

    def wait_for_whole() -> None:
        with client_of(front) as client:
            try:
                client.completions.create(model="m", prompt="l-whole")
            except openai.OpenAIError as error:
                failures.append(error)

    whole = threading.Thread(target=wait_for_whole)
    whole.start()
    front.served("l-whole")
    with client_of(front) as client:
        stream = client.completions.create(model="m", prompt="l-stream", stream=True)
        next(iter(stream))
        for rank in front.ranks:
            rank.link.close("out of memory")
        with pytest.raises(openai.APIError, match="no rank came back"):
            list(stream)
    whole.join(TIMEOUT_S)
    assert isinstance(failures[0], openai.InternalServerError) and failures[0].status_code == 503
    status, said = front.wait()
    lost = "; ".join(f"rank {rank} is lost: out of memory" for rank in (0, 1))
    assert status == 1 and said.endswith(f"wideep front: no rank came back for 0.1 s: {lost}\n")


@pytest.mark.slow
def test_a_rank_that_is_lost_before_the_service_has_begun_ends_the_front(
    model_dir: Path, fronts: list[FrontProcess]
) -> None:
    front = FrontProcess(model_dir)
    fronts.append(front)
    front.attach(1).link.close("out of memory")
    assert front.wait() == (1, "wideep front: rank 1 is lost: out of memory\n")


def test_a_signal_ends_open_streams_with_an_event(model_dir: Path, fronts: list[FrontProcess]) -> None:
    front = FrontProcess(model_dir, "--served-model-name", "m", num_ranks=1).attach_all()
    fronts.append(front)
    front.script("l-open", "abc", gates={1: threading.Event()})
    with client_of(front) as client:
        stream = client.completions.create(model="m", prompt="l-open", stream=True)
        next(iter(stream))
        front.process.send_signal(signal.SIGINT)
        with pytest.raises(openai.APIError, match="stopping"):
            list(stream)
    assert front.wait() == (0, "")


@pytest.mark.slow
def test_slow_readers_hold_nobody_up(model_dir: Path, fronts: list[FrontProcess]) -> None:
    front = FrontProcess(model_dir, "--served-model-name", "m", num_ranks=1).attach_all()
    fronts.append(front)
    front.script("l-slow", front.encode("x" * 400))
    front.script("l-fast", "quick")
    host, port = front.url.removeprefix("http://").split(":")
    body = b'{"model":"m","prompt":"l-slow","stream":true,"max_tokens":400,"n":100}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((host, int(port)))
        slow.sendall(head.encode() + body)  # and never reads
        front.ranks[0].wait_for(lambda rank: len(rank.requests) == 100)
        with client_of(front) as client:
            for _ in range(5):
                assert client.completions.create(model="m", prompt="l-fast").choices[0].text == "quick"


def test_a_port_in_use_is_one_error_that_names_it(model_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AssertionError) as caught:
            FrontProcess(model_dir, f"--port={port}")
    ended = (1, f"wideep front: port {port} on 127.0.0.1 is in use; choose another with --port\n")
    assert str(caught.value).startswith(f"the front did not announce its address: {ended}")


@pytest.mark.slow
def test_a_model_without_a_tokenizer_is_one_error(tmp_path: Path) -> None:
    done = subprocess.run(
        [*FRONT, str(tmp_path), "--port", "0", "--ranks", "1"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 1
    assert without_times(done.stderr).startswith(f"wideep front: cannot load a tokenizer from {tmp_path}")


def test_it_dies_with_its_parent(model_dir: Path) -> None:
    read_fd, write_fd = os.pipe()
    code = f"import subprocess, sys;subprocess.run(sys.argv[1:], pass_fds=({write_fd},))"
    command = [*FRONT, str(model_dir), "--port", "0", "--ranks", "1"]
    parent = subprocess.Popen(
        [sys.executable, "-c", code, *command],
        pass_fds=(write_fd,),
        env={**os.environ, READY_VARIABLE: str(write_fd)},
    )
    os.close(write_fd)
    with os.fdopen(read_fd) as ready:
        url = json.loads(ready.readline())["http"]
    parent.send_signal(signal.SIGKILL)
    parent.wait(TIMEOUT_S)
    host, port = url.removeprefix("http://").split(":")
    for _ in range(200):
        with socket.socket() as probe:
            if probe.connect_ex((host, int(port))) != 0:
                break
        threading.Event().wait(0.05)
    else:
        pytest.fail("the front outlived its parent")
    with pytest.raises(httpx.ConnectError):
        httpx.get(url + "/ping")


def test_a_front_that_is_stopped_amid_its_imports_says_nothing(model_dir: Path) -> None:
    python, *front = FRONT
    command = [python, "-X", "importtime", *front, str(model_dir), "--port", "0", "--ranks", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any("server.front.journal" in line for line in process.stderr), "its imports are under way"
        process.send_signal(END_NOW_SIGNAL)
        written, told = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == -END_NOW_SIGNAL, "its imports had ended"
    assert (written, [line for line in told.splitlines() if not line.startswith("import time:")]) == ("", [])
