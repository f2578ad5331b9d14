"""Nodes fetch prefixes from each other: streams of a drained node and repeated prompts go on elsewhere with the same tokens."""

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.server.nodes.test_nodes import (
    ENDPOINT_NODE,
    HTTP_PORT,
    OTHER_NODE,
    URL,
    engine_of,
    members,
    stream_all,
    torchruns,
    wait_until_healthy,
)
from tests.support.service.namespaces import ask, made_namespaces
from tests.support.service.real_service import START_S, RealService, write_tiny_model
from tests.support.service.service_processes import wait_until

pytestmark = pytest.mark.slow

TEXT = "the cat sat on the mat and looked at the dog " * 8
FLAGS = ("--kv-offloading-size=64M", "--max-model-len=512")
# Together they have all kinds of records: blocks of heads, states, latents and indexes. All kinds of models are tested
# without a service (tests/scheduler/test_fetched_prefixes.py).
FAMILIES = {"recurrent": "qwen3_next", "sparse": "deepseek_v32"}  # a kind of cache -> a family


class TwoHosts(NamedTuple):
    """A service of two nodes with different host names, so that they share no memory."""

    names: list[str]  # of the namespaces
    service: RealService

    @property
    def here(self) -> str:
        return self.names[ENDPOINT_NODE]

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> str:
        answer = ask(self.here, method, f"{URL}{path}", body)
        assert answer is not None, (path, self.service.output())
        return answer

    def complete(self, prompt: str) -> tuple[str, dict[str, Any]]:
        """Return a greedy answer, and where its cached tokens came from."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        answer = json.loads(self.call("POST", "/v1/completions", body))
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]

    def drain(self, rank: int) -> None:
        self.call("POST", "/ranks/drain", {"rank": rank})

    def undrain(self, rank: int) -> None:
        self.call("POST", "/ranks/drain", {"rank": rank, "undo": True})

    def metric(self, name: str, label: str = "") -> float:
        """Return the sum of a metric over all rows with a label."""
        rows = [
            line.rpartition(" ")
            for line in self.call("GET", "/metrics").splitlines()
            if line.startswith(name)
        ]
        assert rows, f"no metric {name}"
        return sum(float(value) for labels, _, value in rows if label in labels)


@contextlib.contextmanager
def two_hosts(directory: Path, family: str, *flags: str) -> Iterator[TwoHosts]:
    model = write_tiny_model(directory / "tiny", family)
    with made_namespaces(2) as names:
        commands = [
            torchrun._replace(host_name=f"node-{node}")
            for node, torchrun in enumerate(torchruns(names, model, *FLAGS, *flags))
        ]
        with RealService(HTTP_PORT, commands, directory / "output.txt") as service:
            wait_until_healthy(service, names)
            yield TwoHosts(names, service)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_drained_node_s_streams_and_repeated_prompts_are_fetched(family: str, tmp_path: Path) -> None:
    with two_hosts(tmp_path, family) as hosts:
        expected = stream_all(hosts.here, prompt=TEXT)
        for _ in range(10):  # on a busy machine, all answers may end before the drain begins
            hosts.undrain(0)
            hosts.call("POST", "/flush_cache")
            received = hosts.metric("wideep:kv_peer_received_bytes_total")
            assert stream_all(hosts.here, prompt=TEXT, then=lambda: hosts.drain(0)) == expected
            if hosts.metric("wideep:request_moves_total"):
                break
        assert hosts.metric("wideep:request_moves_total") > 0, "no stream moved"
        assert hosts.metric("wideep:kv_peer_received_bytes_total") > received, "nothing was fetched"
        assert hosts.metric("wideep:kv_tier_faults_total") == 0
        hosts.undrain(0)
        prompts = [f"{name} {TEXT}" for name in ("ann", "bob", "eve", "tom")]
        first = [hosts.complete(prompt)[0] for prompt in prompts]
        for rank in (0, 1):
            hosts.drain(rank)
            again = [hosts.complete(prompt) for prompt in prompts]
            assert [text for text, _ in again] == first
            hosts.undrain(rank)
        # A cheap prefix may be computed, if that is predicted to be faster.
        assert hosts.metric("vllm:prompt_tokens_cached_by_source_total", 'source="p2p"') > 0
        assert hosts.metric("wideep:kv_peer_fetches_total", 'outcome="failed"') == 0
        assert hosts.metric("vllm:kv_cache_usage_perc") == 0


@pytest.mark.parametrize("backend", ["tcp", "nixl"])
def test_a_prompt_of_a_node_is_decoded_on_another_one(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "nixl":
        pytest.importorskip("nixl_cu12", reason="NIXL is not installed")
        monkeypatch.setenv("UCX_TLS", "tcp,self")  # otherwise it copies between processes of one machine
    flags = ("--pools=prefill:1,decode:1", f"--kv-transfer-backend={backend}")
    with two_hosts(tmp_path, "qwen3_next", *flags) as hosts:
        answers = stream_all(hosts.here, prompt=TEXT)
        received = hosts.metric("wideep:kv_peer_received_bytes_total")
        assert hosts.metric("wideep:kv_peer_nixl_bytes_total") == (received if backend == "nixl" else 0)
        assert hosts.metric("wideep:request_moves_total", 'cause="hand_over"') > 0, "nothing was handed over"
        assert hosts.metric("wideep:kv_peer_fetches_total", 'outcome="whole"') > 0, "nothing was fetched"
        assert hosts.metric("wideep:kv_peer_fetches_total", 'outcome="failed"') == 0
        for pool in ("prefill", "decode"):
            hosts.call("POST", "/pools", {"pool": pool, "role": "both"})
        hosts.call("POST", "/flush_cache")
        assert stream_all(hosts.here, prompt=TEXT) == answers


def test_a_node_that_dies_while_others_fetch_from_it_costs_no_token(tmp_path: Path) -> None:
    with two_hosts(tmp_path, "qwen3_moe", "--max-rank-restarts=20") as hosts:
        expected = stream_all(hosts.here, prompt=TEXT)
        other = engine_of(hosts.service, hosts.names[OTHER_NODE])

        def drain_and_kill() -> None:
            hosts.drain(0)
            with contextlib.suppress(ProcessLookupError):
                os.kill(other, signal.SIGKILL)

        assert stream_all(hosts.here, prompt=TEXT, then=drain_and_kill) == expected
        wait_until(lambda: members(hosts.here) == [0, 1], hosts.service.output, within_s=START_S)
        hosts.undrain(0)
        assert stream_all(hosts.here, prompt=TEXT) == expected
