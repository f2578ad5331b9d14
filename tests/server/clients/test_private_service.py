"""A private service with fake engines and fronts: it starts, reports why it ended, and leaves no process behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from server.clients.private_service import PrivateService, ServiceEndedError
from server.options.reading import options_from_keywords
from tests.support.models.fake_checkpoint import write_checkpoint
from tests.support.service.forked import FAKE_SERVICE, ROOT, Kind, importing_once
from tests.support.service.service_processes import TIME_OUT_S, has_ended, wait_until

ALL = {"worker-0", "worker-1", "engine-0", "engine-1", "front-0"}
SCRIPT = f"""
import sys, threading
sys.path.insert(0, {str(ROOT)!r})
from server.options.reading import options_from_keywords
from server.clients.private_service import PrivateService
service = PrivateService(options_from_keywords(sys.argv[1], {{}}), command=sys.argv[2:])
print(service.wait_ready().url, flush=True)
threading.Event().wait()
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment with a folder for the fakes' pids and a launcher without torch."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("WIDEEP_", "FAKE_"))}
    return {**clean, "FAKE_DIRECTORY": str(tmp_path), "FAKE_LAUNCHER": "1", "TMPDIR": str(tmp_path)}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model that preflight accepts."""
    return write_checkpoint(tmp_path / "tiny")


def fake_serve() -> tuple[str, ...]:
    """Return the command of a service of fakes, up to its model. Its processes share their imports."""
    return (*importing_once(FAKE_SERVICE, Kind.FAKES), "serve")


def start(model: Path | str, environment: dict[str, str], **options: object) -> PrivateService:
    """Start a service of fakes."""
    return PrivateService(
        options_from_keywords(str(model), options), command=fake_serve(), environment=environment
    )


@pytest.fixture
def service(model: Path, environment: dict[str, str]) -> Iterator[PrivateService]:
    """A service that is ready."""
    with start(model, environment) as running:
        yield running.wait_ready()


def pids(directory: Path) -> dict[str, int]:
    """Return the pids of all processes, once all have written theirs."""
    wait_until(lambda: {path.stem for path in directory.glob("*-*.json")} >= ALL, lambda: "not all started")
    return {path.stem: json.loads(path.read_text())["pid"] for path in directory.glob("*-*.json")}


def test_it_answers_on_a_free_port_with_a_key_of_its_own_and_ends_with_all_processes(
    service: PrivateService, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert httpx.get(f"{service.url}/health").status_code == 200
    front = json.loads((tmp_path / "front-0.json").read_text())
    assert front["env"]["WIDEEP_API_KEY"] == service.api_key
    assert len(service.api_key) >= 32
    assert service.why_gone() is None
    assert service.num_places == 2 * 64
    below = pids(tmp_path)
    service.close()
    service.close()
    assert all(has_ended(pid, 0) for pid in below.values())
    assert "Ctrl-C stops everything" not in capfd.readouterr().out, "the output belongs to the script"


@pytest.mark.slow
def test_a_service_that_died_says_why(model: Path, environment: dict[str, str], tmp_path: Path) -> None:
    with start(model, environment, max_rank_restarts=0) as service:
        victim = pids(tmp_path)["front-0"]
        os.kill(victim, signal.SIGKILL)
        assert service.has_ended(within_s=TIME_OUT_S)
        said = service.why_gone()
    assert said is not None
    assert said.startswith(f"the service has ended: the front (pid {victim}) was killed by SIGKILL")


def test_a_start_that_fails_says_why(model: Path, environment: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with (
            start(model, environment, port=port) as service,
            pytest.raises(ServiceEndedError, match=f"did not start: port {port} on 127.0.0.1 is in use"),
        ):
            service.wait_ready()


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("./no-such-model", {}, "the service did not start: the model path ./no-such-model does not exist"),
        ("", {"host": "no.such.host.invalid"}, "the service did not start: "),
    ],
)
def test_a_wrong_model_or_host_starts_nothing(
    name: str, options: dict[str, str], says: str, model: Path, environment: dict[str, str]
) -> None:
    with pytest.raises(ServiceEndedError, match=says):
        start(name or model, environment, **options)
    assert not list(model.parent.glob("worker-*"))


@pytest.mark.slow
def test_the_end_of_the_thread_that_started_it_does_not_end_it(
    model: Path, environment: dict[str, str]
) -> None:
    started: list[PrivateService] = []
    thread = threading.Thread(target=lambda: started.append(start(model, environment)))
    thread.start()
    thread.join(TIME_OUT_S)
    [service] = started
    with service:
        service.wait_ready()


def test_nothing_is_left_when_the_script_is_killed(
    model: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    script = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(model), *fake_serve()],
        env=environment, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert script.stdout is not None
    with script, script.stdout:
        assert script.stdout.readline().startswith("http://127.0.0.1:")
        below = pids(tmp_path)
        script.kill()
    assert all(has_ended(pid, 5.0) for pid in below.values())
    wait_until(lambda: not list(tmp_path.glob("wideep_*")), lambda: "serve left its directory behind")
