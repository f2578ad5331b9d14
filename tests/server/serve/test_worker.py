import json
import os
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dispatch.ports import free_port
from server.serve.children import END_NOW_SIGNAL, PARENT_END_SIGNAL, children_of
from server.serve.restarts import MAX_RESTARTS
from tests.support.models.fake_checkpoint import write_checkpoint
from tests.support.service.fake_child import FRONT_FAILED, KV_CACHE_BYTES
from tests.support.service.service_processes import Service, command_of, has_ended, kill, wait_until

PROMISED_S = 5.0  # from the signal to the end of the last process


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model")


def place(
    rank: int = 0, local_rank: int = 0, world_size: int = 1, local_world_size: int = 1
) -> dict[str, str]:
    """Return the variables that torchrun would set."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }


def start_worker(model: Path, environment: Mapping[str, str], *flags: str) -> Service:
    return Service(model.parent, ["worker", str(model), "--port=0", *flags], environment)


def engine_settings_of(child: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the engine among the options that a fake child received."""
    settings: dict[str, Any] = json.loads(child["argv"][child["argv"].index("--options") + 1])["engine"]
    return settings


def test_rank_0_starts_the_front_and_tells_its_engine_the_address(model: Path) -> None:
    environment = {**place(world_size=2, local_world_size=2), "WIDEEP_API_KEY": "from-environment"}
    with start_worker(model, environment, "--threads=3", "--api-key=secret", "--max-num-seqs=7") as service:
        engine, front = service.facts("engine-0"), service.facts("front-0")
        assert json.loads(engine["env"]["WIDEEP_FRONT"])["token"] == "t"
        assert engine["env"]["OMP_NUM_THREADS"] == "3"
        assert engine["env"]["WIDEEP_API_KEY"] == "secret from-environment"
        settings = engine_settings_of(engine)
        assert (settings["threads"], settings["max_num_seqs"]) == (3, 7)
        assert "secret" not in " ".join(engine["argv"] + front["argv"])
        assert "--ranks 2" in " ".join(front["argv"])
        assert "--ranks-host 127.0.0.1" in " ".join(front["argv"])
        service.wait_for_output("serving on 2 ranks at http://127.0.0.1:")


def test_other_ranks_start_no_front_and_print_nothing(model: Path) -> None:
    with start_worker(model, place(rank=1, local_rank=1, world_size=2, local_world_size=2)) as service:
        engine = service.facts("engine-1")
        assert engine["env"]["WIDEEP_FRONT"] is None
        service.process.send_signal(signal.SIGINT)
        assert service.end()[0] == 0
        assert set(service.pids()) == {"worker-1", "engine-1"}
        assert service.output() == ""


@pytest.mark.crossed("number", every=3)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_signal_ends_everything_with_status_0_and_the_front_first(
    model: Path, number: signal.Signals
) -> None:
    with start_worker(model, place()) as service:
        service.wait_for_output("serving on")
        service.process.send_signal(number)
        status, seconds = service.end()
        assert (status, seconds < PROMISED_S) == (0, True), service.output()
        service.wait_for_nobody(within_s=0)
        is_gentle = number == signal.SIGTERM
        assert ended_by(service, "front-0") == ("SIGTERM" if is_gentle else END_NOW_SIGNAL.name)
        assert ("exited with status 0" in service.output()) is is_gentle


def ended_by(service: Service, name: str) -> str:
    return (service.directory / f"{name}.ended-by").read_text()


def test_a_worker_without_the_front_waits_for_its_engine_to_be_told(model: Path) -> None:
    other_node = place(rank=1, local_rank=0, world_size=2, local_world_size=1)
    with start_worker(model, other_node, "--shutdown-timeout-seconds=30") as service:
        engine = service.pid("engine-1")
        service.wait_for_output("serving on")
        service.process.send_signal(signal.SIGTERM)
        assert not has_ended(engine, 0.3), "the engine was not stopped yet"
        os.kill(engine, signal.SIGTERM)  # as the front would do through the engine's link
        assert service.end()[0] == 0


def test_under_serve_sigterm_is_torchruns_and_ends_all_at_once(model: Path) -> None:
    with start_worker(model, {**place(), "WIDEEP_UNDER_SERVE": "1"}) as service:
        service.facts("engine-0")
        service.process.send_signal(signal.SIGTERM)
        assert service.end()[0] == 0
        assert ended_by(service, "front-0") == END_NOW_SIGNAL.name


def test_the_signal_of_the_parents_end_fails_the_rank_even_if_the_parents_pid_is_still_the_old_one(
    model: Path,
) -> None:
    with start_worker(model, place()) as service:
        service.wait_for_output("serving on")
        service.process.send_signal(PARENT_END_SIGNAL)
        assert service.end()[0] == 1
        assert ended_by(service, "front-0") == END_NOW_SIGNAL.name
        assert "the parent process of rank 0 is gone" in service.output()


@pytest.mark.slow
def test_children_that_ignore_signals_are_killed_within_the_bound(model: Path) -> None:
    with start_worker(model, {**place(), "FAKE_STUBBORN": "1"}, "--shutdown-timeout-seconds=0") as service:
        service.wait_for_output("serving on")
        service.process.send_signal(signal.SIGTERM)
        status, seconds = service.end()
        assert (status, seconds < PROMISED_S) == (0, True), service.output()
        service.wait_for_nobody(within_s=0)


def test_a_killed_front_is_named_and_started_again_with_what_the_first_one_announced(model: Path) -> None:
    with start_worker(model, place(), "--max-rank-restarts=2") as service:
        service.wait_for_output("serving on")
        first, engine = service.facts("front-0"), service.pid("engine-0")
        announced = service.facts("engine-0")["env"]["WIDEEP_FRONT"]
        for restart in range(2):
            victim = service.pid("front-0")
            os.kill(victim, signal.SIGKILL)
            wait_until(lambda: service.pid("front-0") != victim, service.output)  # noqa: B023
            assert service.facts("front-0")["env"]["WIDEEP_FRONT"] == announced
            assert service.facts("front-0")["env"]["WIDEEP_KEPT"] == first["env"]["WIDEEP_KEPT"]
            assert f"the front (pid {victim}) was killed by SIGKILL" in service.output()
            assert service.output().count("restarting it (at most 2 times in 10 minutes)") == restart + 1
        assert first["env"]["WIDEEP_FRONT"] is None and service.pid("engine-0") == engine
        os.kill(service.pid("front-0"), signal.SIGKILL)
        status, seconds = service.end()
        assert (status, seconds < PROMISED_S) == (1, True)
        assert "not restarting it (already restarted 2 times in 10 minutes)" in service.output()
        service.wait_for_nobody(within_s=0)


def test_what_a_killed_front_leaves_does_not_stay_as_a_zombie(model: Path) -> None:
    with start_worker(model, {**place(), "FAKE_FRONT_CHILD": "1"}) as service:
        service.wait_for_output("serving on")
        victim, path = service.pid("front-0"), service.directory / "front-0.child"
        child = int(path.read_text())
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: int(path.read_text()) != child, service.output)
        wait_until(lambda: not Path(f"/proc/{child}").exists(), service.output)


def copies(service: Service, name: str = "backup") -> set[int]:
    """Return the pids of the worker's spares: "backup" of engines, "spare" of fronts."""
    return {pid for pid in children_of(service.process.pid) if name in command_of(pid)}


def only_copy(service: Service, name: str = "backup") -> int:
    wait_until(lambda: len(copies(service, name)) == 1, service.output)
    return next(iter(copies(service, name)))


def test_the_copy_of_a_front_takes_its_place(model: Path) -> None:
    with start_worker(model, place(), "--max-rank-restarts=5") as service:
        service.wait_for_output("serving on")
        seen = [service.pid("front-0")]
        for _ in range(2):
            seen.append(only_copy(service, "spare"))
            os.kill(seen[-2], signal.SIGKILL)
            wait_until(lambda: service.pid("front-0") == seen[-1], service.output)
            assert "front" in command_of(seen[-1])
        for pid in (only_copy(service, "spare"), seen[-1]):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: service.pid("front-0") not in seen, service.output)
        last = only_copy(service, "spare")
        service.process.send_signal(signal.SIGINT)
        assert service.end()[0] == 0
        assert has_ended(last, 0)
        service.wait_for_nobody(within_s=0)


def test_a_killed_engine_is_named_and_its_copy_takes_its_place(model: Path) -> None:
    with start_worker(model, place(), "--kv-cache-memory=1M", "--max-rank-restarts=5") as service:
        service.wait_for_output("serving on")
        first = service.facts("engine-0")
        seen = [first["pid"]]
        for restarts in (1, 2):
            seen.append(only_copy(service))
            os.kill(seen[-2], signal.SIGKILL)
            successor = service.facts_after("engine-0", restarts)
            assert successor["pid"] == seen[-1], "it was started before"
            assert successor["env"]["WIDEEP_FRONT"] == first["env"]["WIDEEP_FRONT"]
            assert engine_settings_of(successor)["kv_cache_bytes"] == KV_CACHE_BYTES, (
                "the first engine's size"
            )
            assert "engine" in command_of(seen[-1])
            wait_until(lambda: service.output().count("serves again") == restarts, service.output)  # noqa: B023
            killed = f"wideep: rank 0's engine (pid {seen[-2]}) was killed by SIGKILL"
            [line] = [line for line in service.output().splitlines() if line.startswith(killed)]
            assert line.endswith("restarting it (at most 5 times in 10 minutes)")
        copy = only_copy(service)
        for pid in (copy, seen[-1]):
            os.kill(pid, signal.SIGKILL)
            assert has_ended(pid, PROMISED_S)
        assert service.facts_after("engine-0", restarts=3)["pid"] not in (copy, *seen), "started as at first"
        wait_until(lambda: service.output().count("serves again") == 3, service.output)
        last = only_copy(service)
        service.process.send_signal(signal.SIGINT)
        assert service.end()[0] == 0
        assert has_ended(last, 0)
        service.wait_for_nobody(within_s=0)


def test_processes_that_are_not_started_again_leave_no_copies(model: Path) -> None:
    with start_worker(model, place(), "--max-rank-restarts=0") as service:
        service.wait_for_output("serving on")
        assert copies(service) == copies(service, "spare") == set()
        assert len(children_of(service.process.pid)) == 2, "only the front and the engine"


def test_an_engine_that_is_stopped_is_killed_and_started_again(model: Path) -> None:
    with start_worker(model, place(), "--heartbeat-timeout-seconds=0.5") as service:
        service.wait_for_output("serving on")
        victim = service.pid("engine-0")
        os.kill(victim, signal.SIGSTOP)
        service.facts_after("engine-0", restarts=1)
        service.wait_for_output("rank 0 serves again, after ")
        hung = f"wideep: rank 0's engine (pid {victim}) hung and was killed: it is stopped and sent no heartbeat for "
        [line] = [line for line in service.output().splitlines() if line.startswith(hung)]
        assert line.endswith("restarting it (at most 3 times in 10 minutes)")
        assert has_ended(victim, 1.0)


def test_an_engine_that_is_stopped_before_its_first_beat_is_killed_too(model: Path) -> None:
    environment = {**place(), "FAKE_STOPS_WHEN_READY": "1"}
    with start_worker(model, environment, "--heartbeat-timeout-seconds=0.5") as service:
        service.wait_for_output("hung and was killed: it is stopped and sent no heartbeat for ")
        service.wait_for_output("rank 0 serves again, after ")


def test_without_a_heartbeat_timeout_an_engine_may_be_stopped_for_a_debugger(model: Path) -> None:
    with start_worker(model, place(), "--heartbeat-timeout-seconds=0") as service:
        service.wait_for_output("serving on")
        os.kill(service.pid("engine-0"), signal.SIGSTOP)
        assert not has_ended(service.pid("engine-0"), 0.5)


def kill_until_the_budget_ends(service: Service, name: str) -> None:
    for restarts in range(1, MAX_RESTARTS + 1):
        os.kill(service.pid(name), signal.SIGKILL)
        service.facts_after(name, restarts)
        wait_until(
            lambda: service.output().count("serves again") == restarts,  # noqa: B023
            lambda: f"does not serve again:\n{service.output()}",
        )
    os.kill(service.pid(name), signal.SIGKILL)


def test_one_of_several_engines_that_dies_too_often_stays_away_and_its_supervisor_waits(model: Path) -> None:
    with start_worker(model, place(rank=1, local_rank=1, world_size=2, local_world_size=2)) as service:
        engine = service.pid("engine-1")
        wait_for_serving(service, "engine-1")
        kill_until_the_budget_ends(service, "engine-1")
        service.wait_for_output("the service continues without rank 1")
        assert not has_ended(service.process.pid, 0.2)
        assert engine != service.pid("engine-1")
        service.process.send_signal(signal.SIGTERM)
        status, seconds = service.end()
        assert (status, seconds < PROMISED_S) == (0, True), "there is no engine to wait for"


def test_an_engine_that_cannot_start_again_ends_with_its_budget(model: Path) -> None:
    environment = {**place(), "FAKE_EXIT_AGAIN": "engine-0:7"}
    with start_worker(model, environment, "--max-rank-restarts=2") as service:
        service.wait_for_output("serving on")
        os.kill(service.pid("engine-0"), signal.SIGKILL)
        assert service.end()[0] == 1
        assert service.output().count("restarting it (at most 2 times in 10 minutes)") == 2
        last = service.output().splitlines()[-1]
        assert "exited with status 7" in last
        assert "not restarting it (already restarted 2 times in 10 minutes)" in last
        service.wait_for_nobody(within_s=0)


def test_an_engine_that_has_lost_the_front_is_not_started_again(model: Path) -> None:
    with start_worker(model, place(rank=1, local_rank=1, world_size=2, local_world_size=2)) as service:
        wait_for_serving(service, "engine-1")
        os.kill(service.pid("engine-1"), signal.SIGUSR2)
        assert service.end()[0] == 1
        assert "rank 1 lost its connection to the front and left the service" in service.output()
        assert service.facts("engine-1")["env"]["WIDEEP_RESTARTS"] is None
    waiting = [path for path in Path("/proc").glob("[0-9]*/cmdline") if mentions(path, str(model))]
    assert not waiting, "no process waits, because the worker was not started by torchrun"


def mentions(command_line: Path, text: str) -> bool:
    """Return whether a process, which may have ended, has a text in its command line."""
    try:
        return text in command_line.read_text()
    except OSError:
        return False


def test_an_engine_that_dies_while_the_service_stops_stays_dead(model: Path) -> None:
    other_node = place(rank=1, local_rank=0, world_size=2, local_world_size=1)
    with start_worker(model, other_node, "--shutdown-timeout-seconds=30") as service:
        service.wait_for_output("serving on")
        service.process.send_signal(signal.SIGTERM)
        assert not has_ended(service.pid("engine-1"), 0.2)
        os.kill(service.pid("engine-1"), signal.SIGKILL)
        status, seconds = service.end()
        assert (status, seconds < PROMISED_S) == (0, True)
        assert "the service is stopping" in service.output()
        assert service.facts("engine-1")["env"]["WIDEEP_RESTARTS"] is None


def wait_for_serving(service: Service, name: str) -> None:
    """Wait until an engine serves. Only its supervisor knows: quiet ranks print nothing."""
    path = service.directory / f"{name}.told"
    wait_until(path.exists, lambda: f"{name} reports nothing:\n{service.output()}")


@pytest.mark.parametrize("name, called", [("engine-0", "rank 0's engine"), ("front-0", "the front")])
def test_a_child_that_fails_at_once_is_named_with_its_status(model: Path, name: str, called: str) -> None:
    with start_worker(model, {**place(), "FAKE_EXIT": f"{name}:7"}) as service:
        assert service.end()[0] == 1
        assert f"{called} (pid {service.pid(name)}) exited with status 7" in service.output()
        service.wait_for_nobody(within_s=0)


def test_an_engine_that_ends_in_order_ends_the_worker_in_order(model: Path) -> None:
    with start_worker(model, {**place(), "FAKE_EXIT": "engine-0:0"}) as service:
        assert service.end()[0] == 0
        assert "exited with status 0" in service.output()
        service.wait_for_nobody(within_s=0)


def test_a_front_that_fails_after_it_has_stopped_the_engine_fails_the_worker(model: Path) -> None:
    with start_worker(model, place()) as service:
        service.wait_for_output("serving on")
        os.kill(service.pid("engine-0"), signal.SIGTERM)
        is_reaped = lambda: service.pid("engine-0") not in children_of(service.process.pid)  # noqa: E731
        wait_until(is_reaped, service.output)
        kill(service.pid("front-0"), signal.SIGUSR1)
        assert service.end()[0] == 1
        assert (
            f"the front (pid {service.pid('front-0')}) exited with status {FRONT_FAILED}" in service.output()
        )


def test_children_die_with_a_worker_killed_by_sigkill(model: Path) -> None:
    with start_worker(model, {**place(), "FAKE_STUBBORN": "1"}) as service:
        service.wait_for_output("serving on")
        copy = only_copy(service)
        service.process.kill()
        assert service.end()[0] == -signal.SIGKILL
        service.wait_for_nobody(within_s=PROMISED_S)
        assert has_ended(copy, PROMISED_S)


def test_the_reason_goes_into_torchruns_error_file(model: Path, tmp_path: Path) -> None:
    error_file = tmp_path / "error.json"
    environment = {**place(), "FAKE_EXIT": "engine-0:7", "TORCHELASTIC_ERROR_FILE": str(error_file)}
    with start_worker(model, environment) as service:
        assert service.end()[0] == 1
    message = json.loads(error_file.read_text())["message"]
    assert "rank 0's engine" in message["message"]
    assert message["extraInfo"]["py_callstack"] == message["message"]


def test_a_worker_without_torchrun_says_how_it_is_started(model: Path) -> None:
    with start_worker(model, {}) as service:
        assert service.end()[0] == 1
        assert "RANK is not set: torchrun must start `wideep worker`" in service.output()


def test_a_contradicting_number_of_ranks_is_refused(model: Path) -> None:
    with start_worker(model, place(), "--data-parallel-size=2") as service:
        assert service.end()[0] == 1
        assert "--data-parallel-size is 2, but torchrun started 1 workers" in service.output()


def test_pools_of_another_number_of_ranks_are_refused(model: Path) -> None:
    environment = place(world_size=2, local_world_size=2)
    with start_worker(model, environment, "--pools=both:1,both:2") as service:
        assert service.end()[0] == 1
        assert "--pools both:1,both:2 has 3 ranks, but the service has 2" in service.output()


def test_all_children_get_the_pools_and_the_same_default_tier(model: Path) -> None:
    flag = "--pools=prefill:1,decode:1"
    sizes = []
    for rank in (0, 1):
        environment = place(rank=rank, local_rank=rank, world_size=2, local_world_size=2)
        with start_worker(model, environment, flag) as service:
            engine = service.facts(f"engine-{rank}")
            options = json.loads(engine["argv"][engine["argv"].index("--options") + 1])
            assert options["pools"] == "prefill:1,decode:1"
            sizes.append(options["engine"]["kv_offloading_bytes"])
            if rank == 0:
                service.wait_for_output("serving on 2 ranks (prefill 1, decode 1) at http://")
                assert "of host memory for handing requests over" in service.output()
    assert sizes[0] == sizes[1] > 0


def test_preflight_errors_come_before_any_child(model: Path) -> None:
    (model / "model.safetensors").unlink()
    with start_worker(model, place()) as service:
        assert service.end()[0] == 1
        assert "has no .safetensors weights" in service.output()
        assert set(service.pids()) == {"worker-0"}


def test_the_worker_on_the_standbys_node_starts_a_front_that_stands_by(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as second_store:  # this process is the agent
        port = second_store.getsockname()[1]
        environment = {
            **place(rank=1, local_rank=0, world_size=2, local_world_size=1),
            "PET_RDZV_BACKEND": "wideep",
            "PET_RDZV_ENDPOINT": "127.0.0.1:1",
        }
        command = ["worker", str(model), f"--port={free_port()}", f"--standby=127.0.0.1:{port}"]
        with Service(model.parent, command, environment, is_forked=False) as service:
            front, engine = service.facts("front-1"), service.facts("engine-1")
            assert "--stands-by" in front["argv"]
            assert "--ranks-host 127.0.0.1" in " ".join(front["argv"])
            assert json.loads(engine["env"]["WIDEEP_STANDBY"])["ranks_address"] == "x:1"
            assert engine["env"]["WIDEEP_FRONT"] is None
            assert engine["env"]["WIDEEP_KEPT"] == front["env"]["WIDEEP_KEPT"]
            service.wait_for_output("serving on")
            service.process.send_signal(PARENT_END_SIGNAL)
            assert service.end()[0] == 1
            assert not (service.directory / "front-1.ended-by").exists(), (
                "it is killed: it does not end in order"
            )


@pytest.mark.parametrize(
    ("backend", "port", "world_size", "says"),
    [
        ("c10d", 1, 2, "--standby needs torchrun --rdzv-backend wideep, but the backend is 'c10d'"),
        ("wideep", 1, 1, "--standby names a second node, but this service has only one"),
        ("wideep", 29400, 2, "--standby is 127.0.0.1:29400, which has the port of --rdzv-endpoint"),
    ],
)
def test_a_service_that_cannot_have_a_standby_is_refused(
    model: Path, backend: str, port: int, world_size: int, says: str
) -> None:
    environment = {
        **place(world_size=world_size),
        "PET_RDZV_BACKEND": backend,
        "PET_RDZV_ENDPOINT": "127.0.0.1:29400",
    }
    command = ["worker", str(model), f"--port={free_port()}", f"--standby=127.0.0.1:{port}"]
    with Service(model.parent, command, environment) as service:
        assert service.end()[0] == 1
        assert says in service.output()
        assert service.pids().keys() == {"worker-0"}
