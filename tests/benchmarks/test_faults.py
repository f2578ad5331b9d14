"""The campaign of faults: processes follow its orders, it cuts connections, and small campaigns over moves, tiers and pools end well."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults.__main__ import _parser, _possible, main
from benchmarks.faults.kinds import FAULTS, OF_NODES, OF_RESIZES, OF_TIERS, OUTAGES
from benchmarks.faults.links import connections, cut
from benchmarks.faults.orders import FaultOrders
from benchmarks.faults.resizes import ResizeCycles
from tests.support.service.real_service import REPOSITORY, write_tiny_model

Campaign = Callable[..., dict[str, Any]]
USE_STORE = """
import os, sys, time
from kvcache.tiers.records import ReadResult, RecordLayout, RecordStore

fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
store = RecordStore(fd, RecordLayout(bytes(32), bytes(32), 4096), 1 << 20, name=sys.argv[1])
data, read = bytes(range(256)) * 16, bytearray(4096)
begun_s = time.perf_counter()
try:
    store.write(b"k" * 16, [memoryview(data)], 7)
    take = lambda: 7 if bytes(read) == data else 8
    outcome = store.read(b"k" * 16, [memoryview(read)], take, is_use=False).name
except OSError as error:
    outcome = error.strerror
print(outcome, time.perf_counter() - begun_s)
"""


WRITE_IN_PARTS = """
place = store.begin(b"k" * 16)
    for at in (0, 2048):
        store.write_part(place, at, [memoryview(data)[at : at + 2048]])
    store.complete(place, b"k" * 16, 7)
""".strip()
USE_PARTS = USE_STORE.replace('store.write(b"k" * 16, [memoryview(data)], 7)', WRITE_IN_PARTS)


FETCH_RECORD = """
import socket, threading, time
from kvcache.tiers.frames import HEADER_BYTES, Channel, RecordHeader

near, far = socket.socketpair()
record = bytearray(100)
sending = threading.Thread(
    target=Channel(near, b"").send_record, args=(RecordHeader(0, 0), memoryview(bytearray(HEADER_BYTES + 100)))
)
begun_s = time.perf_counter()
sending.start()
channel = Channel(far, b"")
channel.receive_header(begun_s + 60)
channel.receive_record(memoryview(record), begun_s + 60)
print("changed" if any(record) else "equal", time.perf_counter() - begun_s)
"""


def run(orders: FaultOrders, script: str) -> tuple[str, float]:
    """Run a script in a process that starts like the service's. Return the outcome and the seconds that it prints."""
    orders.disk.mkdir(exist_ok=True)
    ended = subprocess.run(
        [sys.executable, "-c", script, str(orders.disk / "blocks.kv")],
        cwd=REPOSITORY, env={**os.environ, **orders.environment}, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    outcome, _, seconds = ended.stdout.rpartition(" ")
    return outcome, float(seconds)


def use(orders: FaultOrders, script: str = USE_STORE) -> tuple[str, float]:
    """Write and read a record."""
    found = run(orders, script)
    (orders.disk / "blocks.kv").unlink()
    return found


def test_the_disk_does_what_the_campaign_orders(tmp_path: Path) -> None:
    orders = FaultOrders(tmp_path)
    assert use(orders)[0] == "WHOLE"
    with orders.given(disk=0.2):
        outcome, seconds = use(orders)
        assert outcome == "WHOLE" and seconds >= 0.4
        assert use(orders, USE_PARTS)[0] == "WHOLE", (
            "records that are written in parts follow the orders, too"
        )
    with orders.given(disk="full"):
        assert use(orders)[0] == "No space left on device"
        assert use(orders, USE_PARTS)[0] == "No space left on device"
    assert use(orders)[0] == "WHOLE"


def test_a_changed_record_is_noticed_and_counted(tmp_path: Path) -> None:
    orders = FaultOrders(tmp_path)
    with orders.given(flips=True):
        assert use(orders)[0] == "DAMAGED"
        assert orders.flips == (1, 0)
        assert run(orders, FETCH_RECORD)[0] == "changed"
        assert orders.flips == (2, 0)
    with orders.given(transfers=0.3):
        outcome, seconds = run(orders, FETCH_RECORD)
        assert outcome == "equal" and seconds >= 0.3
    assert orders.flips == (2, 0)


def test_damage_changes_records_and_leaves_the_header(tmp_path: Path) -> None:
    orders = FaultOrders(tmp_path)
    run(orders, USE_STORE)
    path = orders.disk / "blocks.kv"
    before = path.read_bytes()
    orders.damage(random.Random(1))
    after = path.read_bytes()
    assert after != before and after[: len(after) // 2] == before[: len(after) // 2]


def test_connections_between_processes_are_found_and_cut() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname(), timeout=60)
        far, _ = listener.accept()
        with near, far:
            found = connections(os.getpid(), [os.getpid()])
            assert {near.fileno(), far.fileno()} <= {*found}
            assert not connections(os.getpid(), [os.getppid()])
            cut(os.getpid(), [near.fileno()])
            assert (near.recv(1), far.recv(1)) == (b"", b"")
            assert near.fileno() not in connections(os.getpid(), [os.getpid()])


def test_every_kind_has_one_name() -> None:
    groups = (FAULTS, OF_RESIZES, OF_TIERS, OF_NODES)
    assert len({name for group in groups for name in group}) == sum(map(len, groups))
    assert {*OUTAGES} <= {*FAULTS, *OF_RESIZES}


@pytest.mark.parametrize(
    ("words", "left_out"),
    [
        ((), {*OF_TIERS, *OF_NODES, "kill a front"}),
        (("--fronts=2", "--tiers"), {*OF_NODES}),
        (("--nodes=2", "--tiers"), {*OF_RESIZES, "kill a front", "kill a supervisor"}),
    ],
)
def test_kinds_that_a_service_cannot_suffer_are_left_out(words: tuple[str, ...], left_out: set[str]) -> None:
    every = {*FAULTS, *OF_RESIZES, *OF_TIERS, *OF_NODES}
    assert every - _possible(_parser().parse_args(words)).keys() == left_out


def test_cycles_of_resizes_kill_in_every_phase_of_every_resize() -> None:
    kinds = [kind for kind, _ in ResizeCycles().plan(2, 6)]
    sizes = ["2 -> 4 ranks", "4 -> 3 ranks", "3 -> 2 ranks"]
    assert kinds[:3] == sizes
    phases = ("preparing", "committing", "completed")
    assert sorted(kinds) == sorted(
        3 * sizes + [f"{size}, kill when {phase}" for size in sizes for phase in phases]
    )


@pytest.mark.parametrize("words", [("--random=3",), ("--kinds=kill one",), ("--pools=both:2",)])
def test_resizes_and_other_faults_are_separate_campaigns(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(("--resizes=2", *words))
    assert "--resizes excludes" in capsys.readouterr().err


@pytest.fixture
def campaign(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Campaign:
    """Return a function that runs a campaign, which must lose, change and leave behind nothing, and returns its result."""
    model = write_tiny_model(tmp_path / "tiny")
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its own

    def result_of(*words: str) -> dict[str, Any]:
        main((str(model), *words))
        *_, told = capsys.readouterr().out.splitlines()
        result: dict[str, Any] = json.loads(told)
        # On a busy machine, streams may pause for longer than a campaign allows.
        assert (result["lost"], result["changed"], result["left_behind"]) == (0, 0, {}), told
        assert result["unseen_flips"] == 0
        return result

    return result_of


@pytest.mark.slow
def test_a_campaign_over_tiers_and_moves_loses_and_changes_nothing(campaign: Campaign) -> None:
    kinds = (
        "drain two ranks",
        "kill during a drain",
        "clients leave during a drain",
        "sleep and wake",
        *OF_TIERS,
    )
    words = ("--ranks=2", "--tiers", "--open=6", "--tokens=80", f"--kinds={','.join(kinds)}")
    result = campaign(*words)
    assert result["faults"] == len(kinds) and result["answers"] > len(kinds)
    assert result["left_out"] == {} and result["flips"] > 0 and result["moves"] > 0


@pytest.mark.slow
def test_a_campaign_over_links_of_pools_on_two_nodes_loses_and_changes_nothing(campaign: Campaign) -> None:
    kinds = (
        "cut transfers",
        "bytes flipped in transit",
        "cut a link to the front",
        "slow link to the front",
        "cut links of a pool",
    )
    words = ("--pools=prefill:2,decode:2", "--nodes=2", "--tiers", "--open=6", "--tokens=80")
    result = campaign(*words, f"--kinds={','.join(kinds)}")
    assert result["left_out"] == {} and result["faults"] == len(kinds)
    assert result["hand_overs"] > 0 and result["flips"] > 0


@pytest.mark.slow
@pytest.mark.usefixtures("forked_services")
def test_a_campaign_of_resizes_loses_changes_and_refuses_nothing(campaign: Campaign) -> None:
    words = ("--ranks=2", "--open=6", "--tokens=80", "--resizes=2")
    result = campaign(*words)
    assert (result["faults"], result["refused_while_resizing"], result["failed_resizes"]) == (6, 0, [])
    assert sum(sum(ends.values()) for ends in result["kills"].values()) == 3
    assert result["resize_s"].keys() == {"2 -> 4 ranks", "4 -> 3 ranks", "3 -> 2 ranks"}
    assert result["accepted_drafts"] > 0
    assert all(rates["p50"] > 0 for rates in result["tokens_per_s"].values())


@pytest.mark.slow
@pytest.mark.usefixtures("forked_services")
def test_a_campaign_of_killed_fronts_loses_and_changes_nothing(campaign: Campaign) -> None:
    words = ("--ranks=2", "--fronts=2", "--open=8", "--tokens=150")
    result = campaign(*words, "--kinds=kill a front", "--random=3")
    assert result["faults"] == 3 and result["asked_again"] > 0
    assert result["kinds"]["kill a front"]["cut_off_s"]["num"] > 0
