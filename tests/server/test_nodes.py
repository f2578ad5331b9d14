"""A service over two nodes that share nothing but a network: real torchrun agents and engines in namespaces."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.real_service import START_S, WIDEEP, RealService, write_tiny_model
from tests.support.service_processes import wait_until

ENDPOINT_NODE, HTTP_PORT = 1, 8000  # inside its namespace every port is free
URL = f"http://10.213.7.{ENDPOINT_NODE + 1}:{HTTP_PORT}"
ASK = """
import sys, httpx
answer = httpx.request(sys.argv[1], sys.argv[2], content=sys.argv[3] or None, headers={'content-type': 'application/json'}, timeout=30)
print(answer.text); sys.exit(answer.status_code != 200)
"""


def ask(namespace: str, method: str, path: str, body: dict[str, Any] | None = None) -> str | None:
    """Send a request from inside a namespace; None when it is not answered with 200."""
    content = json.dumps(body) if body else ""
    command = ["ip", "netns", "exec", namespace, sys.executable, "-c", ASK, method, URL + path, content]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return answer.stdout if answer.returncode == 0 else None


@pytest.mark.slow
def test_two_nodes_serve_together_over_gloo(namespaces: list[str], tmp_path: Path) -> None:
    model, wideep = write_tiny_model(tmp_path / "tiny"), tmp_path / "wideep"
    wideep.write_text(f'#!/bin/sh\nGLOO_SOCKET_IFNAME=veth0 exec {" ".join(WIDEEP)} "$@"\n')
    wideep.chmod(0o755)
    commands = [
        [
            *("ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--local-addr=10.213.7.{node + 1}"),
            *(f"--rdzv-endpoint=10.213.7.{ENDPOINT_NODE + 1}:29400", f"--rdzv-conf=is_host={node}"),
            *("--no-python", str(wideep), "worker", str(model), "--host", f"10.213.7.{ENDPOINT_NODE + 1}"),
            *("--kv-cache-memory", "16M", "--all2all-backend", "gloo"),
        ]
        for node, name in enumerate(namespaces)
    ]
    body = {"model": "tiny", "prompt": "the cat", "max_tokens": 16, "temperature": 0}
    with RealService(HTTP_PORT, commands, tmp_path / "output.txt") as service:
        healthy = lambda: ask(namespaces[0], "GET", "/health") is not None  # noqa: E731
        wait_until(healthy, service.output, within_s=START_S)
        answers = [ask(name, "POST", "/v1/completions", body) for name in namespaces]
        texts = [json.loads(answer)["choices"][0]["text"] for answer in answers if answer]
        assert len(texts) == 2
        assert texts[0] == texts[1]
    assert service.output().count(URL) >= 2
