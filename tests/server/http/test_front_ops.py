"""A front with operator flags: a root path, a key file, JSON logs with prompts, limits; and HTTPS."""

import json
import shutil
import signal
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.service.certificate import write_certificate
from tests.support.service.front_process import FrontProcess
from tests.support.service.service_processes import wait_until

KEY = {"Authorization": "Bearer sesame"}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file with the front's standard output."""
    return tmp_path_factory.mktemp("log") / "out.jsonl"


@pytest.fixture(scope="module")
def front(model_dir: Path, log: Path) -> Iterator[FrontProcess]:
    keys = log.with_name("keys")
    keys.write_text("sesame\n")
    flags = ["--served-model-name=m", f"--api-key-file={keys}", "--log-format=json", "--log-requests"]
    flags += ["--max-request-bytes=2K", "--root-path=/llm", '--allowed-origins=["https://chat.example"]']
    process = FrontProcess(model_dir, *flags, num_ranks=1, log=log).attach_all()
    process.script("o-hello", "abcd")
    yield process
    begun_s = time.monotonic()
    process.process.send_signal(signal.SIGTERM)
    assert process.wait() == (0, "")
    assert time.monotonic() - begun_s < 20, "an idle front does not wait the full 25 s"
    process.close()


def logged(log: Path, request_id: str, logger: str) -> dict[str, Any]:
    """Wait for a log record of a request and return it."""
    found: list[dict[str, Any]] = []

    def is_there() -> bool:
        lines = [line for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
        records = [json.loads(line) for line in lines]
        found[:] = [
            each for each in records if (each.get("request_id"), each["logger"]) == (request_id, logger)
        ]
        return bool(found)

    wait_until(is_there, lambda: f"{request_id} is not in the log:\n{log.read_text()}")
    return found[0]


def complete(
    front: FrontProcess, request_id: str, path: str = "/v1/completions", **how: Any
) -> httpx.Response:
    headers = {**KEY, "X-Request-Id": request_id}
    return front.post(path, json={"model": "m", "prompt": "o-hello"}, headers=headers, **how)


def test_a_request_s_id_tokens_and_prompt_are_in_the_log(front: FrontProcess, log: Path) -> None:
    response = complete(front, "log-1")
    assert (response.status_code, response.headers["x-request-id"]) == (200, "log-1")
    access = logged(log, "log-1", "wideep.access")
    usage = response.json()["usage"]
    assert (access["method"], access["path"], access["status"]) == ("POST", "/v1/completions", 200)
    assert (access["tokens_in"], access["tokens_out"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert access["duration_s"] > 0 and access["client"].startswith("127.0.0.1:")
    asked = logged(log, "log-1", "wideep.requests")
    assert asked["prompt"] == "o-hello" and asked["params"]["max_tokens"] == 16
    assert "sesame" not in log.read_text()


def test_the_root_path_may_be_there_or_taken_off(front: FrontProcess) -> None:
    for path in ("/v1/completions", "/llm/v1/completions"):
        assert complete(front, "root", path).status_code == 200
        assert front.post(path, json={}).status_code == 401
    assert front.get("/llm/v1/models").status_code == 401
    assert front.get("/server_info").json()["model_path"] == "m", "the path on this machine is not shown"
    assert front.get("/llm/health").status_code == 200


@pytest.mark.slow
def test_limits_and_origins_hold_over_a_real_connection(front: FrontProcess) -> None:
    response = front.post("/v1/completions", json={"prompt": "x" * 3000}, headers=KEY)
    assert response.status_code == 413 and response.json()["error"]["code"] == 413
    chunks = (b"x" * 1000 for _ in range(30))
    assert front.post("/v1/completions", content=chunks, headers=KEY).status_code == 413
    origin = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
    with httpx.Client() as client:
        leave = client.options(front.url + "/v1/completions", headers=origin)
    assert leave.headers["access-control-allow-origin"] == "https://chat.example"
    denied = front.post("/v1/completions", json={}, headers={"Origin": "https://chat.example"})
    assert denied.status_code == 401
    assert denied.headers["access-control-allow-origin"] == "https://chat.example", "so pages can read why"
    assert complete(front, "after").status_code == 200


def test_what_was_generated_is_in_the_throughput(front: FrontProcess) -> None:
    complete(front, "throughput")
    answer = front.get("/throughput")
    assert answer.status_code == 200, "it needs no key, as /metrics"
    now = answer.json()["now"]
    assert now["prompt_tokens_per_s"] > 0 and now["generation_tokens_per_s"] > 0 and now["ttft_s"] > 0
    assert "time" in answer.json()["series"]


def test_probes_are_not_in_the_log(front: FrontProcess, log: Path) -> None:
    front.get("/health")
    complete(front, "log-2")
    logged(log, "log-2", "wideep.access")
    assert '"/health"' not in log.read_text()


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("openssl") is None, reason="needs the `openssl` program to make a certificate"
)
def test_https_is_served_with_a_certificate(model_dir: Path, tmp_path: Path) -> None:
    certificate, key = write_certificate(tmp_path)
    front = FrontProcess(model_dir, f"--ssl-certfile={certificate}", f"--ssl-keyfile={key}", num_ranks=1)
    try:
        front.attach(0)
        assert front.url.startswith("https://")
        trusting = ssl.create_default_context(cafile=str(certificate))
        assert front.get("/health", verify=trusting).status_code == 200
        with pytest.raises(httpx.ConnectError):
            front.get("/health", verify=True)
    finally:
        front.close()


def test_a_page_elsewhere_can_change_nothing_on_a_front_without_keys(shared_front: FrontProcess) -> None:
    front, port = shared_front, shared_front.url.rpartition(":")[2]
    for path in ("/experts/apply", "/experts/rollback", "/start_expert_distribution_record"):
        for headers in (
            {"Origin": "http://evil.example"},
            {"Origin": f"http://evil.example:{port}", "Host": f"evil.example:{port}"},  # DNS rebinding
        ):
            refused = front.post(path, headers=headers)
            assert refused.status_code == 403 and "--allowed-origins" in refused.json()["error"]["message"]
    own = front.post("/stop_expert_distribution_record", headers={"Origin": front.url})
    assert "No recording is active" in own.json()["error"]["message"], "the service's own pages are allowed"
