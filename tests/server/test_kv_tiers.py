"""A service with KV tiers: two ranks, a kill -9 of everything, a restart, a damaged file, a lost rank, and bad directories."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.requests.timed_streams import stream_all
from tests.support.service.real_service import RealService, write_tiny_model
from tests.support.service.service_processes import has_ended, wait_until

pytestmark = pytest.mark.slow

PROMPTS = [
    f"{name} " + "the cat sat on the mat and looked at the dog " * 6 for name in ("ann", "bob", "eve", "tom")
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def tier_flags(directory: Path) -> list[str]:
    return ["--kv-offloading-size=64M", f"--kv-offloading-dir={directory}", "--kv-offloading-disk-size=64M"]


@contextlib.contextmanager
def running(model: Path, log: Path, *flags: str) -> Iterator[RealService]:
    with RealService.serve(model, log, "-dp=2", *flags) as service:
        yield service.wait_ready()


def ask(service: RealService, prompt: str) -> tuple[str, dict[str, Any]]:
    """Return a greedy answer and where its cached tokens came from."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{service.url}/v1/completions", json=body, timeout=120)
    answer.raise_for_status()
    content = answer.json()
    return content["choices"][0]["text"], content["usage"]["prompt_tokens_details"]


def figure(service: RealService, name: str) -> float:
    """Return the sum of a metric over all labels."""
    text = httpx.get(f"{service.url}/metrics", timeout=30).text
    rows = [line.rpartition(" ") for line in text.splitlines() if line.startswith(name)]
    assert rows, f"no metric {name}"
    return sum(float(value) for _, _, value in rows)


def test_a_service_that_was_killed_finds_its_blocks_and_gives_the_same_answers(
    model: Path, tmp_path: Path
) -> None:
    flags = tier_flags(tmp_path / "kv")
    with running(model, tmp_path / "plain.txt") as service:
        plain = [ask(service, prompt)[0] for prompt in PROMPTS]
    with running(model, tmp_path / "first.txt", *flags) as service:
        assert [ask(service, prompt)[0] for prompt in PROMPTS] == plain
        wait_until(
            lambda: figure(service, "vllm:kv_offload_store_bytes") > 0,
            lambda: "nothing is stored",
            within_s=60,
        )
        processes = [*service.descendants(), *(process.pid for process in service.processes)]
        for pid in processes:
            os.kill(pid, signal.SIGKILL)
        assert all(has_ended(pid, 60) for pid in processes)
    blocks = tmp_path / "kv" / "blocks.kv"
    data = bytearray(blocks.read_bytes())
    for at in range(len(data) // 2, len(data), 1 << 12):
        data[at] ^= 1  # some records are damaged
    blocks.write_bytes(data)
    with running(model, tmp_path / "second.txt", *flags) as service:
        answers = [ask(service, prompt) for prompt in PROMPTS]
        assert [text for text, _ in answers] == plain
        found = [
            details["cached_tokens_details"]["disk"] for _, details in answers if details["cached_tokens"]
        ]
        assert sum(found) > 0, "the disk's blocks are used after kill -9"


def test_a_rank_that_is_killed_finds_its_blocks_in_the_memory_of_the_other(
    model: Path, tmp_path: Path
) -> None:
    with running(
        model, tmp_path / "output.txt", "--kv-offloading-size=64M", "--max-rank-restarts=3"
    ) as service:
        first = [ask(service, prompt)[0] for prompt in PROMPTS]
        engines = service.engines()
        os.kill(engines[0], signal.SIGKILL)
        status = f"{service.url}/v1/fault_tolerance/status"
        wait_until(
            lambda: (
                (found := httpx.get(status, timeout=30).json())["phase"] == "serving"
                and len(found["members"]) == 2
            ),
            lambda: service.output(),
            within_s=300,
        )
        assert engines[0] not in service.engines().values()
        again = [ask(service, prompt) for prompt in PROMPTS]
        assert [text for text, _ in again] == first
        assert all(details["cached_tokens"] > 0 for _, details in again), "no prompt is computed again"
        assert sum(details.get("cached_tokens_details", {}).get("host", 0) for _, details in again) > 0


def test_flushed_prefixes_are_not_found_again(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path / "output.txt", *tier_flags(tmp_path / "kv")) as service:
        ask(service, PROMPTS[0])
        assert ask(service, PROMPTS[0])[1]["cached_tokens"] > 0
        httpx.post(f"{service.url}/flush_cache", timeout=30).raise_for_status()
        assert ask(service, PROMPTS[0])[1]["cached_tokens"] == 0


def test_the_directory_of_another_model_is_refused_and_left_alone(
    model: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    flags = tier_flags(tmp_path / "kv")
    with running(model, tmp_path / "first.txt", *flags) as service:
        ask(service, PROMPTS[0])
    before = (tmp_path / "kv" / "blocks.kv").read_bytes()
    other = write_tiny_model(tmp_path_factory.mktemp("other") / "tiny", "mixtral")
    with RealService.serve(other, tmp_path / "second.txt", "-dp=2", *flags) as service:
        assert service.wait_ended() != [0]
        assert "holds the KV blocks of another model, checkpoint or cache layout" in service.output()
    assert (tmp_path / "kv" / "blocks.kv").read_bytes() == before


def test_a_drained_rank_hands_its_streams_on_and_their_blocks_come_from_host_memory(
    model: Path, tmp_path: Path
) -> None:
    bodies = [
        {"model": "tiny", "prompt": prompt, "max_tokens": 150, "temperature": 0, "ignore_eos": True}
        for prompt in PROMPTS
    ]
    with running(model, tmp_path / "output.txt", "--kv-offloading-size=64M") as service:
        expected = [stream.said for stream in stream_all(service.url, bodies)]
        httpx.post(f"{service.url}/flush_cache", timeout=30).raise_for_status()
        before = figure(service, "vllm:kv_offload_load_bytes_total")

        def drain() -> None:
            httpx.post(f"{service.url}/ranks/drain", json={"rank": 0}, timeout=60).raise_for_status()

        for _ in range(10):  # on a busy machine, all answers may end before the drain begins
            streams = stream_all(service.url, bodies, pieces=5, then=drain)
            assert [stream.said for stream in streams] == expected
            if figure(service, "wideep:request_moves_total"):
                break
            undrain = {"rank": 0, "undo": True}
            httpx.post(f"{service.url}/ranks/drain", json=undrain, timeout=60).raise_for_status()
            httpx.post(f"{service.url}/flush_cache", timeout=30).raise_for_status()
        assert figure(service, "wideep:request_moves_total") > 0, "no stream moved"
        assert figure(service, "vllm:kv_offload_load_bytes_total") > before
