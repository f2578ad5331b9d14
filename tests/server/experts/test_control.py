"""The front's control of the placement, with scripted ranks: stages, drops, rollback, decisions, HTTP."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from expert_placement.config import EplbConfig
from expert_placement.files import from_json, save_placement, to_json
from expert_placement.history import History
from expert_placement.load import LoadFigures
from expert_placement.placement import Placement, linear_placement
from expert_placement.survivors import surviving
from scheduler.epochs.orders import Order
from scheduler.moves.reports import ExpertMap, LoadReport, MoveState, PlacementReport
from server.cli import build_parser
from server.clients.experts.change import run_change
from server.experts import control as placement_control
from server.experts.control import PlacementControl
from server.experts.load import ExpertsLoad
from server.experts.routes import placement_routes
from server.front.errors import ApiError
from server.http.app import build_app
from server.http.client import ServiceClient
from server.http.guards import ApiKeys
from server.link.messages import DropPlacement, PlacementUpdate, Prepare
from tests.support.placement.placements import held, random_placement
from tests.support.requests.asgi import client_of

START = random_placement(3, 8, 2, 6, seed=1)
OTHER = random_placement(3, 8, 2, 6, seed=2)
COMPILE_S = 600.0  # in a fresh checkout a planner is compiled first, which takes minutes on a busy machine
CONFIG = EplbConfig(window_size=10, step_interval=20, min_gain=0.0)


class PlayedRanks:
    """Two ranks that follow orders. Rank 1 fails at some versions."""

    num_ranks = 2

    def __init__(self, failing: tuple[int, ...] = ()) -> None:
        self.told: list[tuple[str, int]] = []
        self.placements: list[Placement] = []
        self.failing = failing
        self.control: PlacementControl

    def resize(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks

    def post_all(self, message: Prepare | DropPlacement) -> None:
        if isinstance(message, Prepare):
            self.told.append(("prepare", message.placement.version))
            self._prepare(message.placement)
        else:
            self.told.append(("drop", message.version))
            self._say(0, message.version, MoveState.DROPPED)

    def _prepare(self, placement: Placement) -> None:
        self.placements.append(placement)
        self._say(0, placement.version, MoveState.VERIFIED)
        if placement.version in self.failing:
            self._say(1, placement.version, MoveState.FAILED, "a bit turned over")
            return
        self._say(1, placement.version, MoveState.VERIFIED)
        for rank in range(2):
            self._say(rank, placement.version, MoveState.SERVING)

    def _say(self, rank: int, version: int, state: MoveState, reason: str = "") -> None:
        report = PlacementReport(
            rank=rank, version=version, state=state, reason=reason, num_moves=2, num_bytes=10
        )
        asyncio.get_running_loop().call_soon(self.control.take_update, PlacementUpdate(report, None, 0))


def control_of(
    ranks: PlayedRanks,
    config: EplbConfig = CONFIG,
    file: Path | None = None,
    start: Placement = START,
    why_no_change: Callable[[], str | None] = lambda: None,
) -> tuple[PlacementControl, ExpertsLoad]:
    load = ExpertsLoad("m", window_steps=config.window_size)
    ranks.control = control = PlacementControl(
        ranks, load, config, History(file), clock=lambda: 1.0, why_no_change=why_no_change
    )
    load.take_experts(ExpertMap(start.version, 8, 2, (0, 1, 2), 3, start.slot_expert))
    report = PlacementReport(rank=0, version=start.version, state=MoveState.SERVING)
    control.take_update(PlacementUpdate(report, start, 1000))
    return control, load


def seen(load: ExpertsLoad, steps: int) -> None:
    """Let both ranks report a skewed load after some steps."""
    counts = np.zeros((3, 2, 10), dtype=np.uint32)
    counts[:, 1, :8] = np.array([900, 5, 5, 5, 5, 5, 5, 70]) * steps
    counts[:, 1, 8:] = np.array([900, 100]) * steps
    figures = LoadFigures(steps=steps, decode_tokens=500 * steps, experts_s=0.5 * steps, step_s=1.0 * steps)
    for rank in range(2):
        load.take_load(LoadReport(rank=rank, step=steps, placement_version=0, counts=counts, figures=figures))


def play(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), COMPILE_S))


def test_a_placement_is_applied_and_rolled_back_under_new_versions(tmp_path: Path) -> None:
    async def test() -> None:
        ranks = PlayedRanks()
        control, load = control_of(ranks, file=tmp_path / "h")
        applied = await control.apply(OTHER, "apply", "by request", None)
        assert applied["failed"] is None and applied["moves"] > 0
        assert [kind for kind, _ in ranks.told] == ["prepare"] * applied["stages"][1]
        assert held(control.serving()) == held(OTHER)
        back = await control.begin_rollback()
        assert back["kind"] == "rollback" and back["version"] > applied["version"]
        assert held(control.serving()) == held(START)
        assert [entry["kind"] for entry in load.history] == ["apply", "rollback"]
        assert [e["kind"] for e in History(tmp_path / "h").entries] == ["apply", "rollback"]
        with pytest.raises(ApiError, match="There is no earlier placement"):
            await control.begin_rollback()

    play(test)


def test_after_a_restart_there_is_a_way_back_if_it_starts_where_the_last_run_ended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def test() -> None:
        control, _ = control_of(PlayedRanks(), file=tmp_path / "h")
        await control.apply(OTHER, "apply", "by request", None)
        ended = control.serving()
        warm, _ = control_of(PlayedRanks(), file=tmp_path / "h", start=ended)
        back = await warm.begin_rollback()
        assert back["failed"] is None and back["version"] > ended.version
        assert held(warm.serving()) == held(START)
        await warm.apply(OTHER, "apply", "by request", None)
        cold, _ = control_of(PlayedRanks(), file=tmp_path / "h", start=START)
        with pytest.raises(ApiError, match="There is no earlier placement"):
            await cold.begin_rollback()

    play(test)
    assert "the start is not the last placement of the history" in capfd.readouterr().err


def test_a_stage_that_fails_on_one_rank_is_dropped_on_all_and_its_version_never_used_again() -> None:
    async def test() -> None:
        ranks = PlayedRanks(failing=(1,))
        control, _ = control_of(ranks)
        entry = await control.apply(OTHER, "apply", "by request", None)
        assert entry["failed"] == "rank 1: a bit turned over" and entry["moves"] == 0
        assert ranks.told == [("prepare", 1), ("drop", 1)]
        assert control.serving() is START
        again = await control.apply(OTHER, "apply", "by request", None)
        assert again["failed"] is None and ranks.told[2] == ("prepare", 2)

    play(test)


def test_one_change_at_a_time() -> None:
    async def test() -> None:
        control, _ = control_of(PlayedRanks())
        first = asyncio.create_task(control.apply(OTHER, "apply", "by request", None))
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="is in progress") as caught:
            await control.apply(OTHER, "apply", "by request", None)
        assert caught.value.status == 409
        await first

    play(test)


def test_a_placement_of_another_size_is_refused() -> None:
    async def test() -> None:
        ranks = PlayedRanks()
        control, _ = control_of(ranks)
        with pytest.raises(ApiError, match="does not fit this service"):
            await control.apply(linear_placement(3, 8, 4), "apply", "by request", None)
        assert ranks.told == []

    play(test)


def test_decisions_are_made_every_interval_noted_with_their_reasons_and_measured(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(placement_control, "POLL_S", 0.001)

    async def until(fits: Callable[[], bool]) -> None:
        while not fits():
            await asyncio.sleep(0.002)

    async def test() -> None:
        control, load = control_of(PlayedRanks())
        running = asyncio.create_task(control.run())
        seen(load, 20)
        await until(lambda: len(load.history) == 1)
        assert load.history[0]["predicted_gain"] > 0
        seen(load, 40)
        await until(lambda: load.history[0]["measured_gain"] is not None)
        kinds = [entry["kind"] for entry in control.history.entries]
        assert kinds[:2] == [load.history[0]["kind"], "measured"]
        await until(lambda: len(control.history.entries) > 2)
        running.cancel()

    play(test)
    assert "did nothing, because" in capfd.readouterr().err


class SilentRanks(PlayedRanks):
    """Begin to move and never finish."""

    def _prepare(self, placement: Placement) -> None:
        self._say(0, placement.version, MoveState.VERIFIED)


def test_a_change_is_given_up_when_the_epoch_ends_and_home_stays() -> None:
    async def test() -> None:
        ranks = SilentRanks()
        control, load = control_of(ranks)
        seen(load, 20)
        changing = asyncio.create_task(control.apply(OTHER, "apply", "by request", None))
        while not ranks.told:
            await asyncio.sleep(0)
        version = control.next_version()
        order = Order(1, (0,), surviving(START, (0,)).with_version(version))
        control.regroup(order, "rank 1 is lost: killed")
        entry = await changing
        assert entry["failed"] == "the epoch ended (rank 1 is lost: killed)" and entry["cause"] == "epoch"
        assert entry["digest"] == START.digest() and entry["stages"][0] == 0
        assert control.serving() is order.placement and control.home is START
        assert version > ranks.told[0][1], "versions are never reused"
        assert not any(verb == "drop" for verb, _ in ranks.told), "ranks follow the order"
        whole = START.with_version(control.next_version())
        control.regroup(Order(2, (0, 1), whole), "")
        assert control.home is whole and control.serving() is whole

    play(test)


def test_a_change_whose_epoch_ends_before_its_first_stage_asks_no_rank() -> None:
    async def test() -> None:
        ranks = PlayedRanks()
        control, _ = control_of(ranks)
        change = control.begin(OTHER, "apply", "by request", None)
        control.regroup(Order(1, (0,), surviving(START, (0,)).with_version(control.next_version())), "gone")
        entry = await change
        assert entry["cause"] == "epoch" and entry["stages"][0] == 0 and ranks.told == []

    play(test)


def test_a_rank_that_came_back_does_not_say_what_serves() -> None:
    control, _ = control_of(PlayedRanks())
    report = PlacementReport(rank=0, version=0, state=MoveState.SERVING)
    control.take_update(PlacementUpdate(report, OTHER, 1000))
    assert control.serving() is START and control.home is START


def test_nothing_is_planned_or_changed_while_a_rank_is_away() -> None:
    async def test() -> None:
        ranks = PlayedRanks()
        control, load = control_of(ranks, why_no_change=lambda: "rank 1 is lost: killed")
        seen(load, 20)
        for change in (control.propose("repair", CONFIG), control.apply(OTHER, "apply", "by request", None)):
            with pytest.raises(ApiError, match=r"rank 1 is lost: killed\. Try again") as caught:
                await change
            assert caught.value.status == 409
        assert ranks.told == []

    play(test)


def test_over_http_plans_change_nothing_and_applying_does() -> None:
    async def test() -> None:
        ranks = PlayedRanks()
        control, load = control_of(ranks)
        app = build_app([placement_routes({"both": control}, CONFIG)], version="0", keys=ApiKeys(("k",)))
        key = {"Authorization": "Bearer k"}
        async with client_of(app) as client:

            async def post(path: str, body: Any = None, headers: Any = key) -> tuple[int, Any]:
                answer = await client.post(path, json=body, headers=headers)
                return answer.status_code, answer.json()

            assert (await post("/experts/apply", headers={}))[0] == 401
            status, refused = await post("/experts/plan")
            assert status == 400 and "Send requests, then plan" in refused["error"]["message"]
            seen(load, 20)
            status, plan = await post("/experts/plan", {"policy": "plan"})
            assert status == 200 and plan["imbalance_after"] < plan["imbalance_before"] and ranks.told == []
            status, entry = await post("/experts/apply", {"placement": plan["placement"]})
            assert status == 200 and entry["failed"] is None and ranks.told
            assert (await post("/experts/apply", {"policy": "magic"}))[0] == 400
            assert (await post("/experts/apply", {"placement": {"layers": []}}))[0] == 400
            assert (await post("/experts/rollback"))[1]["kind"] == "rollback"
            told = (await client.get("/experts/history", headers=key)).json()
            assert [e["kind"] for e in told["history"]] == ["apply", "rollback"]
            assert [e["change"] for e in told["history"]] == [1, 2] and told["under_way"] is None
            assert held(from_json(told["serving"])) == held(START)

    play(test)


def test_over_http_a_change_that_is_dropped_is_an_error_that_says_what_serves(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async def test() -> None:
        control, _ = control_of(PlayedRanks(failing=(1,)))
        app = build_app([placement_routes({"both": control}, CONFIG)], version="0", keys=ApiKeys())
        async with client_of(app) as client:
            answer = await client.post("/experts/apply", json={"placement": to_json(OTHER)})
        told = answer.json()
        assert answer.status_code == 500 and told["failed"] == "rank 1: a bit turned over"
        assert "dropped after 0 of" in told["error"]["message"]
        assert told["error"]["message"].endswith("Placement 0 serves.")

    play(test)
    said = capfd.readouterr().err.strip().splitlines()
    assert len(said) == 1 and "apply: dropped after 0 of" in said[0] and "placement 0 serves" in said[0]


def test_over_http_a_change_may_be_begun_and_looked_at_until_it_ends() -> None:
    async def test() -> None:
        ranks = SilentRanks()
        control, _ = control_of(ranks)
        app = build_app([placement_routes({"both": control}, CONFIG)], version="0", keys=ApiKeys())
        async with client_of(app) as client:
            begun = await client.post("/experts/apply", json={"placement": to_json(OTHER), "wait": False})
            assert (begun.status_code, begun.json()) == (202, {"change": 1})
            under_way = (await client.get("/experts/history")).json()["under_way"]
            assert under_way["change"] == 1 and under_way["stages"][0] == 0
            assert (await client.post("/experts/rollback", json={"wait": False})).status_code in (400, 409)
            while not ranks.told:
                await asyncio.sleep(0)
            control.regroup(
                Order(1, (0,), surviving(START, (0,)).with_version(control.next_version())), "gone"
            )
            while control.is_changing:
                await asyncio.sleep(0)
            told = (await client.get("/experts/history")).json()
            assert told["under_way"] is None and told["history"][-1]["change"] == 1

    play(test)


def test_the_command_line_and_the_front_understand_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    control, _ = control_of(PlayedRanks())
    app = build_app([placement_routes({"both": control}, CONFIG)], version="0", keys=ApiKeys())
    save_placement(OTHER, tmp_path / "other.json")
    with TestClient(app, base_url="http://127.0.0.1") as http:  # one event loop for all requests

        def run(*words: str) -> int:
            args = build_parser().parse_args(["experts", *words])
            service = ServiceClient("http://127.0.0.1", http=http)
            service.close = lambda: None  # type: ignore[method-assign]  # the next command uses it
            return run_change(args, environment={}, client=service, sleep=lambda _: None)

        assert run("apply", "--placement", str(tmp_path / "other.json")) == 0
        assert held(control.serving()) == held(OTHER)
        assert run("rollback") == 0
        assert held(control.serving()) == held(START)
        control._stages._ranks.failing = (control._last_version + 1,)  # type: ignore[attr-defined]
        assert run("apply", "--placement", str(tmp_path / "other.json")) == 1
    assert "dropped after 0 of" in capsys.readouterr().out
