"""`wideep experts load` and `record`: the table, refusals in the service's words, a recording's order of calls."""

import argparse
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from expert_placement.placement import linear_placement
from scheduler.epochs.orders import Order
from server.cli import build_parser, main
from server.clients.experts import live as experts_live
from server.experts.load import ExpertsLoad
from server.http.client import ServiceClient, ServiceError
from tests.support.placement.load_reports import RANKS, counts, expert_map, load_answer, report, told


def answer(step: int = 8) -> dict[str, object]:
    """Return the load that a front with two ranks reports."""
    load = ExpertsLoad("m")
    load.take_experts(expert_map())
    for rank in range(RANKS):
        load.note_rank(rank, f"host{rank}")
        if step:
            load.take_load(report(rank, step, counts(rank)))
    return told(load)


def test_the_table_shows_phases_ranks_layers_and_experts() -> None:
    text = experts_live.load_table(answer(), rows=2)
    assert "the last 8 steps, 0.8 s" in text
    assert "waiting: " in text
    lines = text.splitlines()
    ranks = lines[next(i for i, line in enumerate(lines) if line.startswith(" rank")) + 1 :][:2]
    assert sorted(line.split()[1] for line in ranks) == ["host0", "host1"]
    assert "... and 1 more layers (--rows)" in text
    hot = [line.split() for line in lines[-2:]]
    assert float(hot[0][3]) >= float(hot[1][3]) > 1.0


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (200, 60), (40, 12)])
def test_a_live_table_fits_the_terminal_with_its_head(width: int, height: int) -> None:
    load = load_answer(58, 256, 64)
    text = experts_live.fitting_table(load, 8, width=width, height=height)
    lines = text.splitlines()
    assert len(lines) <= height and max(map(len, lines)) <= width
    assert lines[0].startswith("made-up: 58 MoE layers of 256 experts")
    if height >= 24:
        for title in (
            "balancedness",
            "waiting: ",
            " rank host",
            "worst layers first",
            "hottest experts first",
        ):
            assert title in text, title
    if height == 60:
        assert "... and 56 more ranks (--rows)" in text, "the table has the requested number of rows"


def test_a_key_may_be_openai_s(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[str | None] = []

    class Noted(ServiceClient):
        def __init__(self, url: str, api_key: str | None, query: dict[str, str] | None) -> None:
            seen.append(api_key)
            super().__init__(url, api_key, query=query)

    monkeypatch.setattr(experts_live, "ServiceClient", Noted)
    args = build_parser().parse_args(["experts", "load", "http://127.0.0.1:1"])
    for environment in ({"OPENAI_API_KEY": "a"}, {"OPENAI_API_KEY": "a", "WIDEEP_API_KEY": "b c"}, {}):
        assert experts_live.run_live(args, environment=environment) == 1
    assert seen == ["a", "b", None]
    capsys.readouterr()


def test_the_table_names_the_ranks_that_are_left() -> None:
    load = ExpertsLoad("m")
    load.take_experts(expert_map())
    load.note_rank(1, "host1")
    load.regroup(Order(1, (1,), linear_placement(3, 6, 1).with_version(1)))
    alone, not_sent = np.full((3, 2, 7), 5), np.zeros(1, dtype=np.int64)
    load.take_load(report(1, 4, alone, epoch=1, dispatch_bytes=not_sent, combine_bytes=not_sent))
    assert "    1 host1" in experts_live.load_table(told(load), rows=2)


def test_layers_are_called_by_their_number_in_the_model() -> None:
    lines = experts_live.load_table(answer(), rows=9).splitlines()
    start = next(i for i, line in enumerate(lines) if "worst layers first" in line)
    assert {line.split()[0] for line in lines[start + 1 : start + 4]} == {"2", "3", "5"}


def test_no_load_is_said() -> None:
    assert experts_live.load_table(answer(0), rows=2).endswith("no load yet: no step has run")


def test_a_record_starts_waits_stops_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []
    pools: list[str | None] = []

    def serve(request: httpx.Request) -> httpx.Response:
        pools.append(request.url.params.get("pool"))
        calls.append(f"{request.method} {request.url.path} {request.headers.get('Authorization')}")
        shape = {"num_ranks": 2, "slots_per_rank": 20}
        is_load = request.url.path == "/experts/load"
        return httpx.Response(200, json=shape) if is_load else httpx.Response(200, content=b"the record")

    class Client(ServiceClient):
        def __init__(self, url: str, api_key: str | None, query: dict[str, str] | None) -> None:
            headers = {"Authorization": f"Bearer {api_key}"}
            super().__init__(
                url, query=query, http=httpx.Client(transport=httpx.MockTransport(serve), headers=headers)
            )

    monkeypatch.setattr(experts_live, "ServiceClient", Client)
    args = argparse.Namespace(verb="record", url="h:1", seconds=4.0, out=tmp_path / "load.npz", pool="decode")
    status = experts_live.run_live(
        args,
        sleep=lambda seconds: calls.append(f"sleep {seconds:g}"),
        environment={"WIDEEP_API_KEY": "k other"},
    )
    assert status == 0 and set(pools) == {"decode"}
    assert args.out.read_bytes() == b"the record"
    assert f"wideep experts simulate {args.out} --ranks 2 --slots 40" in capsys.readouterr().out
    assert calls == [
        "GET /experts/load Bearer k",
        "POST /start_expert_distribution_record Bearer k",
        "sleep 4",
        "POST /stop_expert_distribution_record Bearer k",
        "GET /experts/record Bearer k",
    ]


def test_refusals_are_the_services_words_and_a_hint() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        return httpx.Response(401, json={"error": {"message": "A key is wanted."}})

    with (
        ServiceClient("h", http=httpx.Client(transport=httpx.MockTransport(refuse))) as client,
        pytest.raises(ServiceError, match=r"refused \(401\): A key is wanted. Set WIDEEP_API_KEY"),
    ):
        client.post("/x")


@pytest.mark.parametrize("body", [b"<html>", json.dumps([1]).encode()])
def test_another_kind_of_service_is_found_out(body: bytes) -> None:
    transport = httpx.MockTransport(lambda _request: httpx.Response(200, content=body))
    with (
        ServiceClient("h", http=httpx.Client(transport=transport)) as client,
        pytest.raises(ServiceError, match="is this a WideEP service"),
    ):
        client.get_json("/experts/load")


def test_nobody_there_is_one_line_and_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experts", "load", "http://127.0.0.1:9"]) == 1
    assert "no service answers at http://127.0.0.1:9" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--every", "0"], ["--every", "nan"], ["--rows", "0"], ["--rows", "x"]])
def test_values_that_make_no_sense_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["experts", "load", *flags])
    assert "must be" in capsys.readouterr().err


def test_a_server_s_words_do_not_act_on_the_terminal() -> None:
    load: dict[str, Any] = {**answer(), "model": "\x1b[2Jm"}
    load["ranks"] = [{**rank, "host": "\x9b2J"} for rank in load["ranks"]]
    for text in (
        experts_live.load_table(load, rows=2),
        experts_live.load_table({**answer(0), "model": "\x1b[2Jm"}, rows=2),
        experts_live.fitting_table(load, 2, width=80, height=24),
    ):
        assert "\\x1b[2Jm" in text and not set(text) & set("\x1b\x9b")
