"""A worker with several fronts (`--api-server-count`), with fake children."""

import json
import os
import signal
from pathlib import Path

import pytest

from dispatch.ports import free_port
from server.serve.child_messages import FrontAddresses, announcement, ranks_addresses
from server.serve.children import END_NOW_SIGNAL
from server.serve.preflight.unix_socket import listening_at
from tests.server.serve.test_worker import PROMISED_S, model, place, start_worker
from tests.support.service.service_processes import Service, wait_until

__all__ = ["model"]
NAMES = ("front-0", "front-0-1", "front-0-2")


def ended_by(service: Service, name: str) -> str | None:
    path = service.directory / f"{name}.ended-by"
    return path.read_text() if path.exists() else None


def test_addresses_of_one_front_are_announced_as_ever_and_those_of_several_in_order() -> None:
    leading, second, third = (FrontAddresses("http://h:1", f"h:{port}", "t") for port in (2, 3, 4))
    alone = json.loads(announcement([leading]))
    assert alone == {"http": "http://h:1", "ranks_address": "h:2", "token": "t"}
    assert ranks_addresses(alone) == ["h:2"]
    assert ranks_addresses(json.loads(announcement([leading, second, third]))) == ["h:2", "h:3", "h:4"]


def test_the_engine_starts_when_all_fronts_are_bound_to_one_port(model: Path) -> None:
    with start_worker(model, place(), "--api-server-count=3") as service:
        service.wait_for_output("serving on")
        fronts = [service.facts(name) for name in NAMES]
        announced = service.facts("engine-0")["env"]["WIDEEP_FRONT"]
        assert ranks_addresses(json.loads(announced)) == ["x:1", "x:2", "x:3"]
        assert fronts[0]["env"]["WIDEEP_FRONT"] is None
        for number, front in enumerate(fronts):
            assert f"--front-number {number}" in " ".join(front["argv"])
            assert front["env"]["WIDEEP_KEPT"] == fronts[0]["env"]["WIDEEP_KEPT"]
        port = int(json.loads(announced)["http"].rpartition(":")[2])
        for front in fronts[1:]:
            assert ranks_addresses(json.loads(front["env"]["WIDEEP_FRONT"])) == ["x:1"]
            assert json.loads(front["argv"][front["argv"].index("--options") + 1])["port"] == port
        service.process.send_signal(signal.SIGINT)
        assert service.end()[0] == 0
        assert [ended_by(service, name) for name in NAMES] == [END_NOW_SIGNAL.name] * 3


def test_several_fronts_inherit_one_unix_socket(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "w.sock"
    with start_worker(model, place(), "--api-server-count=2", f"--uds={path}") as service:
        service.wait_for_output("serving on")
        sockets = {
            os.readlink(f"/proc/{front['pid']}/fd/{front['env']['WIDEEP_LISTENER_FD']}")
            for front in map(service.facts, NAMES[:2])
        }
        assert len(sockets) == 1 and sockets.pop().startswith("socket:")
        service.process.send_signal(signal.SIGINT)
        assert service.end()[0] == 0
    assert not path.exists()


def test_a_unix_socket_that_cannot_be_bound_ends_the_start_with_a_message(
    model: Path, tmp_path: Path
) -> None:
    with (
        listening_at(path := str(tmp_path / "w.sock")),
        start_worker(model, place(), "--api-server-count=2", f"--uds={path}") as service,
    ):
        assert service.end()[0] == 1
        assert f"--uds is {path}, which another program listens on; choose another path" in service.output()


@pytest.mark.crossed("name", every=2)
@pytest.mark.parametrize("name", NAMES[:2])
def test_a_killed_front_is_started_again_while_the_others_run(model: Path, name: str) -> None:
    with start_worker(model, place(), "--api-server-count=3", "--max-rank-restarts=1") as service:
        service.wait_for_output("serving on")
        others = {each: service.pid(each) for each in NAMES if each != name}
        announced = service.facts("engine-0")["env"]["WIDEEP_FRONT"]
        for _ in range(3):
            victim = service.pid(name)
            os.kill(victim, signal.SIGKILL)
            wait_until(lambda: service.pid(name) != victim, service.output)  # noqa: B023
            assert service.facts(name)["env"]["WIDEEP_FRONT"] == announced
        assert {each: service.pid(each) for each in others} == others
        assert (
            service.output().count("restarting it (at most 3 times in 10 minutes). Its answers are lost") == 3
        )
        os.kill(service.pid(name), signal.SIGKILL)
        status, seconds = service.end()
        assert (status, seconds < PROMISED_S) == (1, True)
        assert "not restarting it (already restarted 3 times in 10 minutes)" in service.output()
        service.wait_for_nobody(within_s=0)


def test_sigterm_drains_every_front_and_the_service_ends_with_its_engine(model: Path) -> None:
    with start_worker(model, place(), "--api-server-count=3") as service:
        service.wait_for_output("serving on")
        service.process.send_signal(signal.SIGTERM)
        wait_until(lambda: all(ended_by(service, name) for name in NAMES), service.output)
        assert [ended_by(service, name) for name in NAMES] == ["SIGTERM"] * 3
        service.wait_for_output("exited with status 0: stopping the service")
        assert service.end()[0] == 0


def test_a_front_that_exits_by_itself_ends_the_service(model: Path) -> None:
    with start_worker(model, {**place(), "FAKE_EXIT": "front-0-1:3"}, "--api-server-count=2") as service:
        status, _ = service.end()
        assert (
            status == 1 and "front 1 (pid " in service.output() and "exited with status 3" in service.output()
        )


def test_each_node_has_fronts_that_wait_for_those_of_the_others(model: Path) -> None:
    """The engine next to the leading front announces it, and that of another node its own fronts."""
    for rank, variable in ((0, "WIDEEP_FRONT"), (1, "WIDEEP_NODE_FRONTS")):
        environment = place(rank=rank, world_size=2)
        port = f"--port={free_port()}"
        with start_worker(model, environment, "--api-server-count=2", "--fronts=per-node", port) as service:
            service.wait_for_output("serving on")
            fronts = [service.facts(f"front-{rank}{number}") for number in ("", "-1")]
            assert ["--has-other-nodes" in front["argv"] for front in fronts] == [True, True]
            engine = service.facts(f"engine-{rank}")["env"]
            announced = {name: engine[name] for name in ("WIDEEP_FRONT", "WIDEEP_NODE_FRONTS")}
            assert ranks_addresses(json.loads(announced.pop(variable))) == ["x:1", "x:2"]
            assert list(announced.values()) == [None]
            assert engine["WIDEEP_KEPT"] == fronts[0]["env"]["WIDEEP_KEPT"]
            service.process.send_signal(signal.SIGINT)
            assert service.end()[0] == 0


def test_a_service_on_one_node_is_not_changed_by_fronts_on_every_node(model: Path) -> None:
    with start_worker(model, place(), "--fronts=per-node", f"--port={free_port()}") as service:
        service.wait_for_output("serving on")
        assert "--has-other-nodes" not in service.facts("front-0")["argv"]
        assert service.facts("engine-0")["env"]["WIDEEP_NODE_FRONTS"] is None
        service.process.send_signal(signal.SIGINT)
        assert service.end()[0] == 0
