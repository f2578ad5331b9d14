"""Real doctors on nodes that share only a network: network namespaces. Each takes the time of importing torch."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.fake_checkpoint import write_checkpoint, write_safetensors
from tests.support.service.forked import WIDEEP
from tests.support.service.namespaces import close_ports, other_version

pytestmark = pytest.mark.slow

ENDPOINT = "10.213.7.1:29400"
WAIT_S = 300.0  # on a busy machine; a doctor alone needs a twentieth
CONFIG = {"hidden_size": 256, "num_experts_per_tok": 2, "num_local_experts": 4}


@contextlib.contextmanager
def doctors(
    namespaces: Sequence[str],
    words: Sequence[Sequence[str]],
    environments: Sequence[dict[str, str]] | None = None,
    *,
    wait_s: float = WAIT_S,
    num_nodes: int | None = None,
) -> Iterator[list[subprocess.Popen[str]]]:
    """Run a doctor in each namespace, in order. The endpoint is in the fixture's first namespace."""
    flags = [
        "--json",
        "--nnodes",
        str(num_nodes or len(words)),
        "--rdzv-endpoint",
        ENDPOINT,
        f"--wait-seconds={wait_s:g}",
    ]
    processes = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, *WIDEEP, "doctor", *flags, *own],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "veth0", **environment},
        )
        for name, own, environment in zip(namespaces, words, environments or [{}] * len(words), strict=True)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def results(processes: Sequence[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    """Return the findings and exit status of each doctor."""
    found = []
    for process in processes:
        said, _ = process.communicate(timeout=WAIT_S)
        found.append({**json.loads(said), "exit": process.returncode})
    return found


def checks_of(result: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [check for check in result["checks"] if check["check"] == name]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["head first", "head last"])
def test_two_equal_nodes_are_green_and_their_link_and_dispatch_are_measured(
    namespaces: list[str], tmp_path: Path, order: tuple[int, int]
) -> None:
    model = str(write_checkpoint(tmp_path, **CONFIG))
    with doctors([namespaces[at] for at in order], [[model], [model]]) as running:
        for result in results(running):
            failed = [check for check in result["checks"] if check["status"] == "failure"]
            assert (result["exit"], failed) == (0, [])
            for name in ("versions", "checkpoints", "reach"):
                assert [check["status"] for check in checks_of(result, name)] == ["ok"]
            (link,) = checks_of(result, "link")  # a loaded machine may make it slow, which is a warning
            assert link["figures"]["there_gbit"] > 0 and link["figures"]["latency_ms"] > 0
            dispatches = checks_of(result, "dispatch")
            assert [check["status"] for check in dispatches] == ["ok", "ok"]
            assert dispatches[0]["text"].startswith("64 tokens per node (256 x bfloat16, 2 of 4 experts)")
            assert dispatches[1]["figures"]["sent_bytes"] > dispatches[0]["figures"]["sent_bytes"] > 0


def test_another_checkpoint_other_libraries_and_a_wrong_interface_are_named_on_both_nodes(
    namespaces: list[str], tmp_path: Path
) -> None:
    models = [str(write_checkpoint(tmp_path / name, **CONFIG)) for name in ("one", "two")]
    write_safetensors(Path(models[1]) / "model.safetensors", {"w": [3, 3]})
    other = {"PYTHONPATH": str(other_version("transformers", "5.18.0", tmp_path)), "GLOO_SOCKET_IFNAME": "lo"}
    with doctors(namespaces, [[models[0]], [models[1]]], [{}, other]) as running:
        for result in results(running):
            said = {
                name: checks_of(result, name)[0] for name in ("versions", "checkpoints", "reach", "dispatch")
            }
            assert result["exit"] == 1
            assert "transformers is 5.23.0 on" in said["versions"]["text"].replace("5.18.0", "5.23.0")
            assert "5.18.0 on" in said["versions"]["text"] and "(10.213.7.2)" in said["versions"]["text"]
            assert said["checkpoints"]["text"].startswith(
                "the nodes have different checkpoints: model.safetensors"
            )
            assert [said[name]["status"] for name in ("versions", "checkpoints", "reach")] == ["failure"] * 3
            assert "127.0.0.1 is a loopback address" in said["reach"]["text"]
            assert said["dispatch"]["status"] == "not here"
            gloo = [check for check in checks_of(result, "gloo interface") if check["status"] == "failure"]
            assert len(gloo) == 1 and "set GLOO_SOCKET_IFNAME=veth0 (10.213.7.2)" in gloo[0]["remedy"]


def test_a_node_that_does_not_come_is_named_within_seconds_by_those_that_do(namespaces: list[str]) -> None:
    words: list[list[str]] = [[], []]
    with doctors(namespaces, words, num_nodes=3) as running:
        begun_s = time.monotonic()
        for process in running:
            assert process.stderr is not None
            told = next(line for line in process.stderr if "waiting for 1 of 3 nodes (joined: " in line)
            assert "(10.213.7.1)" in told and "(10.213.7.2)" in told and "run the same command there" in told
        assert time.monotonic() - begun_s < WAIT_S / 2


def test_the_endpoints_node_that_does_not_come_is_named_within_seconds(namespaces: list[str]) -> None:
    with doctors(namespaces[1:], [[]], num_nodes=2) as (process,):
        assert process.stderr is not None
        begun_s = time.monotonic()
        line = process.stderr.readline()
        assert line.startswith(
            f"wideep doctor: trying to reach the endpoint: nothing listens at {ENDPOINT}; run the"
        )
        assert time.monotonic() - begun_s < WAIT_S / 2


def test_a_firewall_before_the_endpoint_is_named(namespaces: list[str]) -> None:
    close_ports(namespaces[0], "29400")
    with doctors(namespaces, [[], []], wait_s=8) as (head, other):
        found, said = results([head])[0], results([other])[0]
    assert "1 of 2 nodes (joined: " in checks_of(found, "nodes")[0]["text"]
    (nodes,) = checks_of(said, "nodes")
    assert (
        "this node cannot reach the endpoint: 10.213.7.1:29400 does not answer; check the address"
        in nodes["text"]
    )
    assert [found["exit"], said["exit"]] == [1, 1]


def test_a_firewall_before_the_ports_of_ranks_is_named_on_both_nodes(namespaces: list[str]) -> None:
    close_ports(namespaces[0], "32768-60999")
    with doctors(namespaces, [[], []]) as running:
        for result in results(running):
            texts = [check["text"] for check in checks_of(result, "reach")]
            assert any(
                "(10.213.7.2) cannot reach " in text and "does not answer" in text for text in texts
            ), texts
            assert [check["status"] for check in checks_of(result, "dispatch")] == ["not here"]
            assert result["exit"] == 1


def test_an_endpoint_where_another_program_listens_is_named(namespaces: list[str]) -> None:
    listen = (
        "import socket, time; s = socket.create_server(('', 29400)); print(1, flush=True); time.sleep(600)"
    )
    inside = ["ip", "netns", "exec", namespaces[0], sys.executable, "-c", listen]
    with subprocess.Popen(inside, stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None and other.stdout.readline()
            with doctors(namespaces, [[], []]) as running:
                for result in results(running):
                    (nodes,) = checks_of(result, "nodes")
                    assert nodes["text"].startswith(f"another program uses {ENDPOINT}")
        finally:
            other.kill()
