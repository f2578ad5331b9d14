"""HTTP on a Unix domain socket: a real front, and obstacles at the path."""

import asyncio
import contextlib
import os
import signal
import socket
from pathlib import Path

import httpx
import pytest

from server.api.openai.batches.bulk_client import BulkClient
from server.http.client import ServiceClient, ServiceError
from server.options.flag import OptionsError
from server.serve.child_messages import FrontAddresses, announcement
from server.serve.greeting import greeting
from server.serve.preflight.probe import is_healthy
from server.serve.preflight.unix_socket import check_path, listening_at
from tests.support.models.tiny_tokenizer import write_tokenizer
from tests.support.service.front_process import TIMEOUT_S, FrontProcess
from tests.support.service.service_processes import wait_until
from tests.support.service.starts import options_for


def test_a_front_answers_on_the_socket_alone_and_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "w.sock"
    front = FrontProcess(write_tokenizer(tmp_path / "model"), f"--uds={path}")
    assert front.url == f"unix:{path}"
    for rank in range(front.num_ranks):
        front.attach(rank)
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=TIMEOUT_S) as client:
        models = client.get("http://localhost/v1/models").json()
    assert [each["id"] for each in models["data"]] == ["model"]
    with ServiceClient(front.url) as connection:
        assert connection.get_json("/v1/models") == models, "the request of `wideep chat unix:PATH`"
    reply = asyncio.run(BulkClient(front.url, None, concurrency=1).get("/v1/models"))
    assert reply.body == models, "the request of `wideep run-batch --url unix:PATH`"
    assert front.close() == (0, "")
    assert not path.exists()
    with (
        ServiceClient(front.url) as connection,
        pytest.raises(ServiceError, match=f"no service answers at unix:{path}"),
    ):
        connection.get_json("/v1/models")


def test_several_fronts_answer_on_one_socket_and_one_of_them_suffices(tmp_path: Path) -> None:
    path, model = tmp_path / "w.sock", write_tokenizer(tmp_path / "model")
    flags = (f"--uds={path}", "--api-server-count=2", "--served-model-name=m")
    environment = {"WIDEEP_KEPT": str(tmp_path)}
    with listening_at(str(path)) as listener, contextlib.ExitStack() as closing:
        fronts: list[FrontProcess] = []
        for number in range(2):
            fronts.append(
                FrontProcess(
                    model, *flags, f"--front-number={number}", environment=environment, listener=listener
                )
            )
            closing.callback(fronts[-1].close)
            said = FrontAddresses(fronts[0].url, fronts[0].ranks_address, fronts[0].token)
            environment |= {"WIDEEP_FRONT": announcement([said])}
        for front in fronts:
            front.script("f-say", "one two")
            for rank in range(2):
                front.attach(rank)

        def answer() -> httpx.Response:
            with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=TIMEOUT_S) as client:
                body = {"model": "m", "prompt": "f-say", "max_tokens": 8}
                return client.post("http://localhost/v1/completions", json=body)

        wait_until(lambda: answer().status_code == 200, lambda: "no front answers")
        os.kill(fronts[0].process.pid, signal.SIGKILL)
        fronts[0].wait()
        assert [answer().json()["choices"][0]["text"] for _ in range(4)] == ["one two"] * 4


def test_health_is_asked_over_the_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "w.sock")
    assert not is_healthy("127.0.0.1", 0, uds=path)
    with listening_at(path) as listener:
        listener.close()
        assert not is_healthy("127.0.0.1", 0, uds=path), "no server listens on the file"


def test_a_file_that_a_killed_service_left_is_taken_over(tmp_path: Path) -> None:
    path = str(tmp_path / "w.sock")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path)
    check_path(path)
    with (
        listening_at(path),
        pytest.raises(OptionsError, match="which another program listens on; choose another"),
    ):
        check_path(path)


def test_what_is_in_the_way_is_named_and_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(OptionsError, match="which is not a socket; choose another path or remove the file"):
        check_path(str(file))
    with pytest.raises(OptionsError, match=r"no/such is not a writable folder"):
        check_path(str(tmp_path / "no" / "such" / "w.sock"))
    assert file.read_text() == "mine"


def test_the_greeting_says_how_to_ask_on_the_socket(tmp_path: Path) -> None:
    text = greeting(options_for(tmp_path, "-dp=1", "--uds=/run/w.sock"), None, seconds=3.0)
    assert "at /run/w.sock (ready after 3 s)" in text
    assert "curl --unix-socket /run/w.sock http://localhost/v1/chat/completions -H" in text
    assert "wideep chat unix:/run/w.sock\n" in text and "/dashboard" not in text
