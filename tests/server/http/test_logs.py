"""Logs: lines that people and programs can read, without prompts, and without delaying the service."""

import io
import json
import logging
import threading
from typing import Any

import pytest

from server.front.errors import ApiError
from server.http.exchanges import HttpExchange
from server.http.observability import logs
from server.http.observability.logs import AccessLog, RequestLog, logging_to
from server.options.table import LogOptions
from tests.support.requests.answers import ByteDecoder, ask_of, ended_answer, ended_exchange

QUIET = LogOptions().quiet_paths


def access_lines(*exchanges: HttpExchange, **options: Any) -> list[str]:
    out, error = io.StringIO(), io.StringIO()
    with logging_to(LogOptions(**options), out=out, error=error):
        for exchange in exchanges:
            AccessLog(QUIET).note(exchange)
    assert error.getvalue() == ""
    return out.getvalue().splitlines()


def test_an_access_line_says_who_asked_what_and_what_it_cost() -> None:
    exchange = ended_exchange(ended_answer("my secret", "abcd", "ef"))
    (line,) = access_lines(exchange)
    assert line.endswith(
        'INFO    127.0.0.1:5000 "POST /v1/chat/completions" 200, 3.500 s, 18 tokens in, 6 out'
    )
    (line,) = access_lines(exchange, format="json")
    content = json.loads(line)
    assert content.pop("time").endswith("Z") and content.pop("message")
    assert content == {
        "level": "info",
        "logger": "wideep.access",
        "client": "127.0.0.1:5000",
        "method": "POST",
        "path": "/v1/chat/completions",
        "status": 200,
        "duration_s": 3.5,
        "tokens_in": 18,
        "tokens_out": 6,
    }
    assert "secret" not in line


def test_a_stream_that_failed_after_its_status_says_why() -> None:
    exchange = ended_exchange(ended_answer("p", "a", failure=ApiError(503, "rank 1 is lost")))
    assert access_lines(exchange)[0].endswith("failed: rank 1 is lost")
    assert json.loads(access_lines(exchange, format="json")[0])["error"] == "rank 1 is lost"


def test_a_line_has_no_control_characters_of_clients() -> None:
    exchange = ended_exchange(
        ended_answer("p", "a", failure=ApiError(503, "\x1b[2J\u009b\n\r\u2028\x7f\u00e4"))
    )
    (line,) = access_lines(exchange)
    assert line.endswith(r"failed: \x1b[2J\x9b\n\r\u2028\x7f" + "\u00e4")


def test_probes_are_not_logged() -> None:
    probes = [ended_exchange(path=path, handler=path) for path in ("/health", "/metrics", "/ping")]
    assert access_lines(*probes, ended_exchange(path="/version", handler="/version")) != []
    assert access_lines(*probes) == []


def test_a_level_above_info_silences_the_access_log() -> None:
    assert access_lines(ended_exchange(), level="warning") == []


def test_nobody_writes_a_line_of_somebody_else_s() -> None:
    exchange = ended_exchange(ended_answer("p", "a", failure=ApiError(500, "x\n2026 INFO forged")))
    assert len(access_lines(exchange)) == 1


@pytest.mark.parametrize("format", ["text", "json"])
def test_errors_go_to_the_other_stream_with_their_traceback(format: str) -> None:
    out, error = io.StringIO(), io.StringIO()
    with logging_to(LogOptions(format=format), out=out, error=error):
        try:
            raise RuntimeError("a bug")
        except RuntimeError:
            logging.getLogger("uvicorn.error").exception("Exception in ASGI application")
        logging.getLogger("uvicorn.error").info("Shutting down")
    assert out.getvalue() == ""
    assert "RuntimeError: a bug" in error.getvalue() and "Shutting down" not in error.getvalue()
    if format == "json":
        content = json.loads(error.getvalue())
        assert (content["level"], content["message"]) == ("error", "Exception in ASGI application")
        assert "Traceback" in content["traceback"]


def test_prompts_are_logged_only_by_the_log_for_those_who_ask() -> None:
    out = io.StringIO()
    with logging_to(LogOptions(format="json"), out=out):
        RequestLog(ByteDecoder()).note(ask_of("cmpl-1-0", b"hello", temperature=0.5, stop_token_ids=(7,)))
    content = json.loads(out.getvalue())
    assert (content["id"], content["prompt"]) == ("cmpl-1-0", "hello")
    assert content["params"] == {"max_tokens": 9, "temperature": 0.5, "stop_token_ids": "(7,)"}


class StuckStream(io.StringIO):
    """A terminal that blocks writers until the test releases it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_read = threading.Event()

    def write(self, text: str) -> int:
        self.is_read.wait(60)
        return super().write(text)


def test_a_terminal_that_is_not_read_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_QUEUE_LINES", 5)
    stuck = StuckStream()
    log = logging.getLogger("wideep")
    with logging_to(LogOptions(), out=io.StringIO(), error=stuck):
        for number in range(50):
            log.error("line %d", number)
        stuck.is_read.set()
        while "line 4" not in stuck.getvalue():
            threading.Event().wait(0.01)
        log.error("the last")
    lines = stuck.getvalue().splitlines()
    assert 5 <= len(lines) <= 8
    assert "lines dropped) the last" in lines[-1]


class BrokenStream(io.StringIO):
    """A closed terminal."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_closed_terminal_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    with logging_to(LogOptions(), out=io.StringIO(), error=BrokenStream()):
        logging.getLogger("wideep").error("this is not printed")
    assert capsys.readouterr().err == ""
