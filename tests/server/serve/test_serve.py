import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from dispatch.ports import free_port
from server.cli import build_parser
from server.options.reading import options_from
from server.serve import serve
from server.serve.children import DRAIN_SIGNAL, SUPERVISOR_STATE_VARIABLE
from server.serve.greeting import greeting
from server.serve.preflight.probe import Capacity, is_healthy, reachable_host
from tests.support.models.fake_checkpoint import write_checkpoint
from tests.support.service.service_processes import Service, has_ended, wait_until

PROMISED_S = 5.0  # from Ctrl-C to the end of the last process
ALL = {"worker-0", "worker-1", "engine-0", "engine-1", "front-0"}


def start_serve(model: Path, *flags: str, **environment: str) -> Service:
    return Service(model.parent, ["serve", str(model), *flags], environment)


@contextlib.contextmanager
def serving(directory: Path, *flags: str, **environment: str) -> Iterator[Service]:
    """Run a service of two ranks until it answers."""
    model = write_checkpoint(directory / "tiny")
    with start_serve(model, f"--port={free_port()}", *flags, **environment) as running:
        running.wait_for_output("Ctrl-C stops everything")
        for name in ALL:
            running.facts(name)
        for rank in (0, 1):
            told = directory / f"engine-{rank}.told"
            wait_until(told.exists, running.output)
        yield running


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    """A service under the real launcher."""
    with serving(tmp_path) as running:
        yield running


@pytest.fixture
def quick_service(tmp_path: Path) -> Iterator[Service]:
    """A service under a launcher that does not load torch."""
    with serving(tmp_path, FAKE_LAUNCHER="1") as running:
        yield running


def agent_pid(service: Service) -> int:
    return int(service.facts("worker-0")["ppid"])


def test_ctrl_c_ends_every_process_with_status_0(quick_service: Service) -> None:
    service, agent = quick_service, agent_pid(quick_service)
    service.process.send_signal(signal.SIGINT)
    status, seconds = service.end()
    assert (status, seconds < PROMISED_S) == (0, True), service.output()
    service.wait_for_nobody(within_s=0)
    assert has_ended(agent, 0)
    output = service.output()
    assert "serving tiny on 2 ranks at http://127.0.0.1:" in output
    assert output.rstrip().endswith("wideep: stopping")  # no other process prints anything afterwards


@pytest.mark.parametrize("launcher_is_fake", ["1", pytest.param("0", marks=pytest.mark.slow)])
def test_a_front_that_is_killed_too_often_ends_everything_and_is_named_once(
    tmp_path: Path, launcher_is_fake: str
) -> None:
    with serving(tmp_path, "--max-rank-restarts=0", FAKE_LAUNCHER=launcher_is_fake) as service:
        victim, agent = service.pid("front-0"), agent_pid(service)
        os.kill(victim, signal.SIGKILL)
        status, seconds = service.end()
        assert (status, seconds < PROMISED_S) == (1, True), service.output()
        service.wait_for_nobody(within_s=0)
        assert has_ended(agent, 0)
        last = service.output().strip().splitlines()[-1]
        assert last.startswith(f"wideep serve: the front (pid {victim}) was killed by SIGKILL")
        assert "Traceback" not in service.output()
        assert service.output().count("killed by") == 1


@pytest.mark.slow
def test_a_killed_engine_is_started_again_below_the_same_launcher(service: Service) -> None:
    victim, agent, front = service.pid("engine-1"), agent_pid(service), service.pid("front-0")
    os.kill(victim, signal.SIGKILL)
    service.wait_for_output("rank 1 serves again")
    assert service.output().count(f"rank 1's engine (pid {victim}) was killed by SIGKILL") == 1
    assert (agent_pid(service), service.pid("front-0")) == (agent, front)
    service.process.send_signal(signal.SIGINT)
    assert service.end()[0] == 0
    service.wait_for_nobody(within_s=0)


@pytest.mark.slow
def test_serve_ends_when_no_rank_is_left(tmp_path: Path) -> None:
    again = {"FAKE_EXIT_AGAIN": "engine-1:7", "FAKE_LAUNCHER": "1"}
    with serving(tmp_path, **again) as service:
        wait_until(
            lambda: (service.directory / "engine-1.told").exists(), lambda: "the second rank does not serve"
        )
        os.kill(service.pid("engine-1"), signal.SIGKILL)
        service.wait_for_output("the service continues without rank 1")
        assert not has_ended(service.process.pid, 0.3)
        for restarts in range(1, 4):
            os.kill(service.pid("engine-0"), signal.SIGKILL)
            service.wait_for_output("rank 0 serves again")
            service.facts_after("engine-0", restarts)
            wait_until(
                lambda: service.output().count("rank 0 serves again") == restarts,  # noqa: B023
                lambda: f"rank 0 does not serve again:\n{service.output()}",
            )
        os.kill(service.pid("engine-0"), signal.SIGKILL)
        status, seconds = service.end()
        assert (status, seconds < PROMISED_S) == (1, True), service.output()
        last = service.output().strip().splitlines()[-1]
        assert last.startswith("wideep serve: rank ") and "no rank is left" in last
        service.wait_for_nobody(within_s=0)


def test_nothing_is_left_when_the_launcher_is_killed(quick_service: Service) -> None:
    agent = agent_pid(quick_service)
    os.kill(agent, signal.SIGKILL)
    status, seconds = quick_service.end()
    assert (status, seconds < PROMISED_S) == (1, True), quick_service.output()
    quick_service.wait_for_nobody(within_s=0)
    assert f"wideep serve: the launcher (pid {agent}) was killed by SIGKILL" in quick_service.output()


def test_nothing_is_left_when_serve_is_killed(quick_service: Service) -> None:
    agent = agent_pid(quick_service)
    quick_service.process.kill()
    assert quick_service.end()[0] == -signal.SIGKILL
    quick_service.wait_for_nobody(within_s=PROMISED_S)
    assert has_ended(agent, PROMISED_S)
    wait_until(
        lambda: not list(quick_service.directory.glob("wideep_*")), lambda: "serve's folder is left behind"
    )


def state_of(supervisor: int) -> Path:
    """Return the file in which a supervisor stores its state, once it serves."""
    told = Path(f"/proc/{supervisor}/environ").read_text().split("\0")
    (path,) = (each.partition("=")[2] for each in told if each.startswith(f"{SUPERVISOR_STATE_VARIABLE}="))
    return Path(path)


def test_a_killed_supervisor_is_started_again_and_its_sibling_lives(quick_service: Service) -> None:
    service = quick_service
    first, sibling = service.facts("front-0"), service.pid("engine-1")
    announced = service.facts("engine-0")["env"]["WIDEEP_FRONT"]
    victim, engine = service.pid("worker-0"), service.pid("engine-0")
    wait_until(state_of(victim).exists, service.output)  # the state for its successor
    os.kill(victim, signal.SIGKILL)
    service.wait_for_output("rank 0 serves again")
    assert not any(Path(f"/proc/{pid}").exists() for pid in (victim, engine, first["pid"])), (
        "not even zombies are left"
    )
    assert f"wideep: rank 0's supervisor (pid {victim}) was killed by SIGKILL" in service.output()
    assert service.facts("engine-0")["env"]["WIDEEP_RESTARTS"] == "1"
    # The new front writes its facts once it has started.
    wait_until(lambda: service.facts("front-0")["pid"] != first["pid"], service.output)
    front = service.facts("front-0")
    assert front["env"]["WIDEEP_FRONT"] == announced
    assert front["env"]["WIDEEP_KEPT"] == first["env"]["WIDEEP_KEPT"]
    assert service.pid("engine-1") == sibling and not has_ended(sibling, 0)
    os.kill(service.pid("engine-0"), signal.SIGKILL)
    service.facts_after("engine-0", restarts=2)
    service.process.send_signal(signal.SIGINT)
    assert service.end()[0] == 0, service.output()
    service.wait_for_nobody(within_s=0)


def test_a_supervisor_that_is_killed_too_often_ends_everything(tmp_path: Path) -> None:
    with serving(tmp_path, "--max-rank-restarts=0", FAKE_LAUNCHER="1") as service:
        victim = service.pid("worker-1")
        os.kill(victim, signal.SIGKILL)
        status, seconds = service.end()
        assert (status, seconds < PROMISED_S) == (1, True), service.output()
        service.wait_for_nobody(within_s=0)
        assert f"wideep serve: rank 1's supervisor (pid {victim}) was killed by SIGKILL" in service.output()


@pytest.mark.slow
def test_sigterm_ends_a_launcher_that_hangs_and_children_that_are_deaf(tmp_path: Path) -> None:
    with serving(tmp_path, "--shutdown-timeout-seconds=0", FAKE_LAUNCHER="1", FAKE_STUBBORN="1") as service:
        agent = agent_pid(service)
        os.kill(agent, signal.SIGSTOP)
        service.process.send_signal(signal.SIGTERM)
        status, seconds = service.end()
        assert (status, seconds < PROMISED_S) == (0, True), service.output()
        service.wait_for_nobody(within_s=0)
        assert has_ended(agent, 0)


def test_a_port_in_use_is_one_line_before_anything_starts(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "tiny")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with start_serve(model, f"--port={port}") as service:
            assert service.end()[0] == 1
            assert service.output() == (
                f"wideep serve: port {port} on 127.0.0.1 is in use by another program; choose another --port "
                "(0 chooses a free one)\n"
            )
            assert service.pids() == {}


def test_pools_and_another_number_of_ranks_are_one_line_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["serve", "m", "--device=cpu", "--pools=both:1,both:1", "-dp=3"]
    assert serve.run_serve(options_from(build_parser().parse_args(words), {})) == 1
    assert (
        "--data-parallel-size is 3, but --pools both:1,both:1 has 2 ranks; remove" in capsys.readouterr().err
    )


def test_the_greeting_has_the_url_a_curl_line_and_the_chat_command() -> None:
    options = options_from(
        build_parser().parse_args(["serve", "m", "--host=0.0.0.0", "--served-model-name=it's"]), {}
    )
    options = replace(options, data_parallel_size=1)
    text = greeting(options, Capacity(200_000, 128, 8192), seconds=3.4, environment={})
    assert "serving it's on 1 rank at http://127.0.0.1:8000 (ready after 3 s)" in text
    assert "curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' -d '" in text
    assert "wideep chat http://127.0.0.1:8000" in text
    assert "Authorization" not in text and "export" not in text
    for path in ("dashboard", "docs", "metrics"):
        assert f"  http://127.0.0.1:8000/{path} " in text
    assert (
        "KV cache: 200,000 tokens, for 24.4 requests of 8,192 tokens in parallel, or up to 128 shorter ones."
        in text
    )
    assert "KV cache" not in greeting(options, None, seconds=3.4, environment={})


def test_the_greeting_names_the_pools() -> None:
    options = options_from(build_parser().parse_args(["serve", "m", "--pools=prefill:1,decode:2"]), {})
    options = replace(options, data_parallel_size=3)
    text = greeting(options, None, seconds=3.4, environment={})
    assert "serving m on 3 ranks (prefill 1, decode 2) at http://127.0.0.1:8000" in text


@pytest.mark.parametrize(
    ("environment", "header", "export"),
    [
        (
            {},
            "$WIDEEP_API_KEY",
            "First, replace KEY with a key from --api-key:\n\n  export WIDEEP_API_KEY=KEY\n",
        ),
        ({"WIDEEP_API_KEY": "secret"}, "$WIDEEP_API_KEY", None),
        ({"WIDEEP_API_KEY": "secret other"}, "${WIDEEP_API_KEY%% *}", None),
    ],
)
def test_with_keys_the_greeting_s_lines_work_in_the_shell_that_has_one_or_say_what_is_missing(
    environment: dict[str, str], header: str, export: str | None
) -> None:
    options = options_from(build_parser().parse_args(["serve", "m", "--host=::1"]), {})
    options = replace(options, api_keys=("secret",), data_parallel_size=2)
    text = greeting(options, None, seconds=3.4, environment=environment)
    assert "http://[::1]:8000" in text and "secret" not in text
    assert f'"Authorization: Bearer {header}"' in text
    assert export in text if export else "export" not in text
    command = next(line for line in text.splitlines() if line.startswith("  curl "))
    shown = subprocess.run(
        ["/bin/sh", "-c", command.replace("  curl ", "printf '%s\\n' ", 1)],
        env={"WIDEEP_API_KEY": "secret", **environment},
        capture_output=True, text=True, check=True, timeout=10,
    )  # fmt: skip
    assert "Authorization: Bearer secret\n" in shown.stdout, "the header as a shell expands it"


def test_a_key_file_is_named_where_keys_come_from_it() -> None:
    options = options_from(build_parser().parse_args(["serve", "m"]), {})
    options = replace(options, http=replace(options.http, api_key_file="keys"), data_parallel_size=1)
    assert "First, replace KEY with a key from keys:" in greeting(options, None, seconds=3.4, environment={})


@pytest.mark.parametrize("host, reached", [("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("10.1.2.3", "10.1.2.3")])
def test_a_server_on_all_addresses_is_reached_on_this_machine(host: str, reached: str) -> None:
    assert reachable_host(host) == reached


def test_who_does_not_answer_is_not_healthy() -> None:
    assert not is_healthy("127.0.0.1", free_port())
    assert not is_healthy("127.0.0.1", free_port(), scheme="https")


def test_sigterm_ends_the_front_gently_and_then_the_rest_with_status_0(quick_service: Service) -> None:
    engine = quick_service.pid("engine-1")
    quick_service.process.send_signal(signal.SIGTERM)
    path = quick_service.directory / "front-0.ended-by"
    wait_until(
        lambda: path.exists() and path.read_text() == "SIGTERM",  # later signals overwrite it
        lambda: f"the front did not get SIGTERM:\n{quick_service.output()}",
    )
    os.kill(engine, signal.SIGTERM)  # a real front stops the engines before it ends
    assert quick_service.end()[0] == 0, quick_service.output()
    quick_service.wait_for_nobody(within_s=0)
    assert "finishing open requests, for up to 25 s" in quick_service.output()
    assert quick_service.output().rstrip().endswith("wideep: stopped")


@pytest.mark.parametrize("answers", [True, False])
def test_a_service_is_asked_whether_it_answers_before_sigterm_ends_it_at_once(
    answers: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: list[int] = []
    monkeypatch.setattr(serve, "signal_children_of", lambda _pid, number: told.append(number))
    monkeypatch.setattr(serve, "is_healthy", lambda *_place, **_how: answers)
    options = options_from(build_parser().parse_args(["serve", "m", "-dp=1"]), {})
    watch = serve._Watch(Mock(), serve._Start(options, options, 0.0, tmp_path, None), Mock())
    assert watch._drains([signal.SIGTERM]) is answers
    assert told == [DRAIN_SIGNAL] * answers


@pytest.mark.slow
def test_a_second_sigterm_does_not_wait(tmp_path: Path) -> None:
    with serving(tmp_path, FAKE_LAUNCHER="1", FAKE_STUBBORN="1") as service:
        service.process.send_signal(signal.SIGTERM)
        service.wait_for_output("finishing open requests")
        service.process.send_signal(signal.SIGTERM)
        status, seconds = service.end()
        assert (status, seconds < PROMISED_S) == (0, True), service.output()
        service.wait_for_nobody(within_s=0)


@pytest.mark.slow
def test_what_does_not_finish_in_time_is_ended(tmp_path: Path) -> None:
    flag = "--shutdown-timeout-seconds=0.2"
    with serving(tmp_path, flag, FAKE_LAUNCHER="1", FAKE_STUBBORN="1") as service:
        service.process.send_signal(signal.SIGTERM)
        assert service.end()[0] == 0, service.output()
        service.wait_for_nobody(within_s=0)
