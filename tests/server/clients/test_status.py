"""`wideep status`: sentences for each state of the ranks, and an exit status for scripts."""

import json
from typing import Any

import httpx
import pytest

from server.cli import main
from server.clients import status as client_status
from server.front.events import EventLog
from server.front.members.membership import Epochs
from server.front.routing.moves import Drain
from server.http.client import ServiceClient
from server.http.observability.ops import status_of
from server.options.pools import Role


def shown(monkeypatch: pytest.MonkeyPatch, answer: Any, *words: str) -> int:
    """Run the command against a service with this status."""

    class Client(ServiceClient):
        def __init__(self, url: str, api_key: str | None = None) -> None:
            transport = httpx.MockTransport(lambda _request: httpx.Response(200, json=answer))
            super().__init__(url, api_key, http=httpx.Client(transport=transport))

    monkeypatch.setattr(client_status, "ServiceClient", Client)
    return main(["status", *words])


def answer_of(epochs: Epochs, events: EventLog) -> dict[str, Any]:
    return {
        **status_of({"both": epochs}, 14.0, 1000.0),
        "replays": 3,
        "waiting_requests": 0,
        "events": events.to_json(),
    }


def test_a_lost_rank_is_named_with_its_reason_and_the_last_events(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    epochs, events = Epochs(2, recovery_timeout_s=9.0), EventLog(calendar=lambda: 0.0)
    epochs.attach(0, 0.0)
    assert shown(monkeypatch, answer_of(epochs, events)) == 1, "a service that starts does not serve yet"
    epochs.attach(1, 0.0)
    assert shown(monkeypatch, answer_of(epochs, events)) == 0
    assert "serving: 2 of 2 ranks serve, epoch 0" in capsys.readouterr().out
    epochs.lose(1, "killed\x1b[2J", 10.0)
    epochs.take_regrouped(0, 1, 10.0)
    for number in range(7):
        events.note("rank_lost", f"event {number}", rank=1)
    assert shown(monkeypatch, answer_of(epochs, events)) == 0, "one rank serves"
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["serving: 1 of 2 ranks serve, epoch 1", "rank 1 is missing for 4 s: killed\\x1b[2J"]
    assert "3 requests continued on another rank" in lines[2]
    assert [line[-7:] for line in lines[3:]] == [f"event {number}" for number in range(2, 7)]


def test_several_pools_have_a_line_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pools = {
        "prefill": Epochs(1, recovery_timeout_s=9.0),
        "decode": Epochs(3, recovery_timeout_s=9.0, first_rank=1),
    }
    for epochs in pools.values():
        for rank in epochs.ranks:
            epochs.attach(rank, 0.0)
    pools["decode"].lose(2, "killed", 10.0)
    roles = {"prefill": Role.PREFILL, "decode": Role.BOTH}
    answer = {**answer_of(pools["prefill"], EventLog()), **status_of(pools, 14.0, 1000.0, roles=roles)}
    assert shown(monkeypatch, answer) == 0, "one pool serves"
    assert capsys.readouterr().out.splitlines()[:4] == [
        "serving: 3 of 4 ranks serve, epoch 1",
        "pool prefill (prefill, rank 0): serving, 1 of 1 serve, epoch 0",
        "pool decode (both, ranks 1 to 3): regrouping, 2 of 3 serve, epoch 1",
        "rank 2 is missing for 4 s: killed",
    ]


def test_a_draining_rank_is_named_with_its_requests(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    epochs = Epochs(2, recovery_timeout_s=9.0)
    for rank in (0, 1):
        epochs.attach(rank, 0.0)
    for num_requests, text in ((0, "no requests left"), (1, "1 request left"), (7, "7 requests left")):
        status = status_of({"both": epochs}, 14.0, 1000.0, [Drain(1, num_requests, 3.2)])
        assert shown(monkeypatch, answer_of(epochs, EventLog()) | status) == 0
        assert f"rank 1 is draining for 3 s: {text}" in capsys.readouterr().out


def test_scripts_get_the_service_s_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = answer_of(Epochs(1, recovery_timeout_s=9.0), EventLog())
    assert shown(monkeypatch, answer, "--json") == 1 and json.loads(capsys.readouterr().out) == answer
    assert shown(monkeypatch, {"phase": "serving"}) == 1
    assert "http://127.0.0.1:8000 did not return a status of WideEP" in capsys.readouterr().err


def test_tiers_have_a_line_per_node_and_a_disabled_disk_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    epochs = Epochs(1, recovery_timeout_s=9.0)
    epochs.attach(0, 0.0)
    node = {
        "host": "node-0", "ranks": [0], "host_bytes": 3 << 29, "host_capacity_bytes": 4 << 30, "disk_bytes": 5 << 30,
        "disk_capacity_bytes": 200 << 30, "is_disk_off": False, "host_hit_tokens": 12_345, "disk_hit_tokens": 16,
        "faults": 2, "dropped": 7,
    }  # fmt: skip
    only_memory = {**node, "host": "node-1", "disk_bytes": 0, "disk_capacity_bytes": 0}
    failed = {
        **node,
        "host": "node-2",
        "host_capacity_bytes": 0,
        "is_disk_off": True,
        "peer_hit_tokens": 4_096,
    }
    answer = {**answer_of(epochs, EventLog()), "tiers": [node, only_memory, failed]}
    assert shown(monkeypatch, answer) == 0
    memory = "memory 1.5 of 4.0 GiB (12,345 prompt tokens found)"
    disk = "disk 5.0 of 200.0 GiB (16 prompt tokens found"
    faults = "2 damaged and 7 dropped blocks"
    assert capsys.readouterr().out.splitlines()[2:] == [
        f"KV tiers of node-0: {memory}, {disk}), {faults}",
        f"KV tiers of node-1: {memory}, {faults}",
        f"KV tiers of node-2: {disk}; disabled after an error, until the next start), "
        f"4,096 prompt tokens from other nodes, {faults}",
    ]


def test_a_running_resize_is_named_with_its_phase(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    epochs = Epochs(1, recovery_timeout_s=9.0)
    epochs.attach(0, 0.0)
    resize = {
        "is_scaling_elastic_ep": True, "operation_id": "a", "phase": "preparing", "stage": "ranks to read experts",
        "requested_data_parallel_size": 2,
    }  # fmt: skip
    line = "operation a resizes the service to 2 ranks: preparing, waits for ranks to read experts"
    for state, is_shown in ((resize, True), (resize | {"is_scaling_elastic_ep": False}, False)):
        shown(monkeypatch, answer_of(epochs, EventLog()) | {"resize": state})
        assert (line in capsys.readouterr().out) is is_shown
