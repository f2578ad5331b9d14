"""`wideep scale`: the requests to the service, the output, and the exit status."""

import json
from typing import Any

import httpx
import pytest

from server.cli import build_parser
from server.clients.commands import SCALE
from server.clients.scale import run_scale
from server.http.client import ServiceClient
from server.options.flag import OptionsError

STATE = {
    "is_scaling_elastic_ep": False, "operation_id": "a", "phase": "completed", "stage": "", "error": None, "seconds": 4.25,
    "epoch": 3, "requested_data_parallel_size": 4, "effective_data_parallel_size": 4,
}  # fmt: skip
PREPARING = STATE | {
    "is_scaling_elastic_ep": True, "phase": "preparing", "stage": "new ranks to load", "effective_data_parallel_size": 2,
}  # fmt: skip
FAILED = STATE | {"phase": "failed", "error": "rank 2 is lost", "effective_data_parallel_size": 2}


class PlayedService:
    """Answers with one state after the other, and records requests."""

    def __init__(self, *states: dict[str, Any], refusal: str = "") -> None:
        self.asked: list[tuple[str, Any]] = []
        self._states, self._refusal = list(states), refusal

    def run(self, *words: str) -> int:
        """Run a command line against it."""
        args = build_parser().parse_args(["scale", *words])
        http = httpx.Client(transport=httpx.MockTransport(self._answer))
        return run_scale(
            *SCALE.prepare(args),
            environment={},
            client=ServiceClient("http://s", http=http),
            sleep=lambda _seconds: None,
        )

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append((request.url.path, json.loads(request.content or b"null")))
        if self._refusal:
            return httpx.Response(409, json={"error": {"message": self._refusal}})
        return httpx.Response(200, json=self._states.pop(0))


@pytest.mark.parametrize(
    ("words", "states", "status", "text"),
    [
        (("4",), [PREPARING, PREPARING, STATE], 0, "preparing: waiting for new ranks to load\n4 ranks serve; the resize took 4.2 s\n"),
        (("4",), [PREPARING, FAILED], 1, "preparing: waiting for new ranks to load\n2 ranks serve; operation a failed after 4.2 s: rank 2 is lost\n"),
        ((), [PREPARING], 0, "2 ranks serve; operation a is preparing to 4 ranks\n"),
        ((), [STATE | {"operation_id": None}], 0, "4 ranks serve; there was no resize\n"),
        (("--abort",), [FAILED], 0, "2 ranks serve; operation a failed after 4.2 s: rank 2 is lost\n"),
    ],
)  # fmt: skip
def test_the_output_and_the_exit_status(
    words: tuple[str, ...],
    states: list[dict[str, Any]],
    status: int,
    text: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert PlayedService(*states).run(*words) == status
    assert capsys.readouterr().out == text


def test_flags_become_fields(capsys: pytest.CaptureFixture[str]) -> None:
    service = PlayedService(STATE)
    assert service.run("4", "--id", "mine", "--drain-timeout", "5", "--timeout", "60", "--json") == 0
    form = {
        "new_data_parallel_size": 4,
        "drain_timeout": 5.0,
        "operation_id": "mine",
        "wait": False,
        "timeout": 60.0,
    }
    assert service.asked == [("/scale_elastic_ep", form)]
    assert json.loads(capsys.readouterr().out) == STATE
    service = PlayedService(FAILED)
    service.run("--abort")
    assert service.asked == [("/scale_elastic_ep/abort", {})]


def test_a_refusal_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert PlayedService(refusal="Operation a resizes the service").run("4") == 1
    assert "wideep scale: " in (said := capsys.readouterr().err) and "Operation a resizes the service" in said


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("two",), "'two' must be a number of ranks"),
        (("0",), "'0' must be"),
        (("3", "--abort"), "or --abort"),
    ],
)
def test_wrong_words_are_named(words: tuple[str, ...], text: str) -> None:
    with pytest.raises(OptionsError, match=text):
        PlayedService().run(*words)


def test_a_url_may_stand_alone() -> None:
    args = SCALE.prepare(build_parser().parse_args(["scale", "http://s:1"]))[0]
    assert (args.ranks, args.url) == (None, "http://s:1")
