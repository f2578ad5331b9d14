"""`wideep experts apply`, `rollback` and `history`: the requests to the service, the output, and the exit status."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from expert_placement.files import save_placement
from expert_placement.placement import linear_placement
from server.cli import build_parser
from server.clients.experts.change import run_change
from server.clients.url_flag import pool_query
from server.http.client import ServiceClient

ENTRY: dict[str, Any] = {
    "time": 1.0, "change": 7, "kind": "repair", "version": 4, "reason": "it pays", "predicted_gain": 0.03, "measured_gain": None,
    "moves": 5, "bytes": 2_000_000, "seconds": 0.5, "stages": [1, 1], "failed": None,
}  # fmt: skip


class PlayedService:
    """Answer as a service would, and record requests."""

    def __init__(self, entry: dict[str, Any], looks: int = 0) -> None:
        """Args: looks: Number of history requests that still show the change as under way."""
        self.asked: list[tuple[str, Any]] = []
        self.pools: list[str | None] = []  # chosen by the requests
        self._entry, self._looks = entry, looks

    def run(self, *words: str) -> int:
        """Run a command line against it."""
        args = build_parser().parse_args(["experts", *words])
        http = httpx.Client(transport=httpx.MockTransport(self._answer))
        client = ServiceClient("http://s", query=pool_query(args), http=http)
        return run_change(args, environment={}, client=client, sleep=lambda _: None)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else None
        self.asked.append((request.url.path, body))
        self.pools.append(request.url.params.get("pool"))
        if request.url.path == "/experts/history":
            nothing = {"time": 2.0, "kind": "nothing", "version": 4, "reason": "too few steps"}
            self._looks -= 1
            under_way = {"change": 7, "kind": "repair", "stages": [0, 1]} if self._looks >= 0 else None
            history = [nothing] if under_way else [self._entry, nothing]
            return httpx.Response(
                200, json={"history": history, "under_way": under_way, "serving": {"version": 4}}
            )
        if body.get("wait") is False:
            return httpx.Response(202, json={"change": 7})
        return httpx.Response(200, json=self._entry)


def test_apply_plans_by_policy_and_says_what_became_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    service = PlayedService(ENTRY)
    assert service.run("apply", "--policy", "shares") == 0
    assert service.asked[0] == ("/experts/apply", {"policy": "shares", "wait": False})
    assert "placement 4 serves: 5 moves, 2.0 MB in 0.5 s" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["apply", "rollback", "history"])
def test_a_verb_concerns_the_named_pool(verb: str) -> None:
    service = PlayedService(ENTRY)
    assert service.run(verb) == service.run(verb, "--pool", "decode") == 0
    assert set(service.pools) == {None, "decode"} and service.pools[-1] == "decode"


def test_a_change_that_takes_long_is_looked_at_until_it_has_ended(capsys: pytest.CaptureFixture[str]) -> None:
    service = PlayedService(ENTRY, looks=1000)
    assert service.run("apply") == 0
    told = capsys.readouterr()
    assert "placement 4 serves: 5 moves" in told.out and told.err == "0 of 1 stages serve\n"


def test_a_change_that_is_in_no_history_fails_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert PlayedService({**ENTRY, "change": 6}).run("apply") == 1
    assert "the service was restarted" in capsys.readouterr().err


def test_what_changed_nothing_is_said_and_is_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    entry = {**ENTRY, "moves": 0, "stages": [0, 0], "reason": "repair: saves 0.000 ms of a step"}
    assert PlayedService(entry).run("apply") == 0
    said = capsys.readouterr().out
    assert said.startswith("repair: saves 0.000 ms") and "placement 4 still serves" in said


def test_a_dry_run_only_plans(capsys: pytest.CaptureFixture[str]) -> None:
    service = PlayedService(ENTRY)
    assert service.run("apply", "--dry-run") == 0
    assert service.asked == [("/experts/plan", {"policy": "repair"})]
    assert capsys.readouterr().out == "it pays\nnothing was changed\n"


def test_a_file_is_sent_whole(tmp_path: Path) -> None:
    placement, service = linear_placement(2, 4, 2), PlayedService(ENTRY)
    save_placement(placement, tmp_path / "p.json")
    assert service.run("apply", "--placement", str(tmp_path / "p.json")) == 0
    assert service.asked[0][1]["placement"]["digest"] == placement.digest()


def test_a_file_that_is_no_placement_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert PlayedService(ENTRY).run("apply", "--placement", str(tmp_path / "absent.json")) == 2
    assert "absent.json cannot be read: No such file" in capsys.readouterr().err


def test_a_dropped_change_is_said_and_fails_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    service = PlayedService({**ENTRY, "failed": "rank 1: a check sum", "stages": [0, 2]})
    assert service.run("rollback") == 1
    assert service.asked[0] == ("/experts/rollback", {"wait": False})
    assert "dropped after 0 of 2 stages: rank 1: a check sum" in capsys.readouterr().out


def test_the_history_shows_moves_and_decisions_with_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert PlayedService(ENTRY).run("history") == 0
    shown = capsys.readouterr().out
    assert (
        "repair" in shown and "3.00%" in shown and "too few steps" in shown and "placement 4 serves" in shown
    )
    assert PlayedService(ENTRY).run("history", "--json", "--rows", "1") == 0
    assert json.loads(capsys.readouterr().out)["serving"] == {"version": 4}


@pytest.mark.crossed("field", "verb", every=2)
@pytest.mark.parametrize("verb", ["apply", "rollback", "history"])
@pytest.mark.parametrize("field", ["reason", "kind", "failed"])
def test_a_server_s_words_do_not_act_on_the_terminal(
    verb: str, field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    PlayedService({**ENTRY, field: "\x1b]0;mine\x07\x9b2J"}).run(verb)
    said = capsys.readouterr()
    assert not set(said.out + said.err) & set("\x1b\x07\x9b")
    assert verb == "history" or "\\x1b]0;mine" in said.out
