"""`wideep drain`: the requests to the service, the output, and the exit status."""

import json
from typing import Any

import httpx
import pytest

from server.cli import build_parser
from server.clients.drain import run_drain
from server.http.client import ServiceClient


class PlayedService:
    """Answers as a service would, and records requests. A clock that the command's pauses move."""

    def __init__(self, left: list[int | None], *, refusal: str = "") -> None:
        """Args: left: Requests at the rank at each look; None if it is not draining any more."""
        self.asked: list[Any] = []
        self._left, self._refusal, self._now_s = left, refusal, 0.0

    def run(self, *words: str) -> int:
        """Run a command line against it."""
        http = httpx.Client(transport=httpx.MockTransport(self._answer))
        return run_drain(
            build_parser().parse_args(["drain", *words]),
            environment={},
            client=ServiceClient("http://s", http=http),
            clock=lambda: self._now_s,
            sleep=self._sleep,
        )

    def _sleep(self, seconds: float) -> None:
        self._now_s += seconds

    def _answer(self, request: httpx.Request) -> httpx.Response:
        if self._refusal:
            return httpx.Response(409, json={"error": {"message": self._refusal}})
        count = self._left.pop(0)
        if request.url.path == "/ranks/drain":
            self.asked.append(json.loads(request.content))
            return httpx.Response(200, json={"rank": 1, "draining": count is not None, "requests": count})
        assert request.url.path == "/v1/fault_tolerance/status"
        draining = [] if count is None else [{"rank": 1, "requests": count, "seconds": 1.0}]
        return httpx.Response(200, json={"draining": draining})


@pytest.mark.parametrize(
    ("words", "left", "status", "text"),
    [
        ((), [3, 2, 0], 0, "rank 1 has no requests left after 0.4 s"),
        ((), [0], 0, "rank 1 has no requests left after 0.0 s"),
        (
            ("--timeout", "0.5"),
            [3, 2, 2, 1],
            1,
            "rank 1 has 1 request left after 0.6 s, and is still draining",
        ),
        (("--timeout", "0"), [3], 1, "rank 1 has 3 requests left after 0.0 s, and is still draining"),
        ((), [3, None], 1, "rank 1 is not draining any more: it was lost, or the drain was undone"),
        (("--undo",), [None], 0, "rank 1 takes requests again"),
    ],
)
def test_a_drain_waits_for_the_last_request_or_reports_how_many_remain(
    words: tuple[str, ...],
    left: list[int | None],
    status: int,
    text: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    service = PlayedService([*left])
    assert service.run("1", *words) == status
    assert service.asked == [{"rank": 1, "undo": "--undo" in words, "timeout_s": 0}]
    assert capsys.readouterr().out == f"{text}\n"


def test_scripts_get_json_and_a_refusal_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert PlayedService([1, 0]).run("1", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"rank": 1, "draining": True, "requests": 0}
    assert PlayedService([], refusal="Rank 1 is the last rank").run("1") == 1
    assert "wideep drain: " in (said := capsys.readouterr().err) and "Rank 1 is the last rank" in said


@pytest.mark.parametrize("words", [("-1",), ("one",), ("1", "--timeout", "-1"), ("1", "--timeout", "inf")])
def test_invalid_values_are_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as ended:
        build_parser().parse_args(["drain", *words])
    assert ended.value.code == 2
