"""A service with KV tiers: flushes, a lost and a drained rank, a kill -9 of everything, a damaged file, and a wrong directory.

That tiers change no answer is tested without a service (tests/scheduler/test_tiered_answers.py).
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.support.requests.timed_streams import stream_all
from tests.support.service.real_service import START_S, RealService, write_tiny_model
from tests.support.service.service_processes import has_ended, wait_until

pytestmark = pytest.mark.slow

PROMPTS = [
    f"{name} " + "the cat sat on the mat and looked at the dog " * 6 for name in ("ann", "bob", "eve", "tom")
]


def tier_flags(directory: Path) -> list[str]:
    return ["--kv-offloading-size=64M", f"--kv-offloading-dir={directory}", "--kv-offloading-disk-size=64M"]


@contextlib.contextmanager
def running(model: Path, log: Path, *flags: str) -> Iterator[RealService]:
    with RealService.serve(model, log, "-dp=2", *flags) as service:
        yield service.wait_ready()


@pytest.fixture(scope="module")
def tiers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tier on disk."""
    return tmp_path_factory.mktemp("tiers") / "kv"


@pytest.fixture(scope="module")
def service(model: Path, tiers: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealService]:
    """Two ranks with a tier in host memory and one on disk. Each test of it leaves both ranks serving."""
    log = tmp_path_factory.mktemp("service") / "output.txt"
    with running(model, log, "--max-rank-restarts=3", *tier_flags(tiers)) as started:
        yield started


class Killed(NamedTuple):
    """What a service had when all of its processes were killed."""

    answers: list[str]  # to PROMPTS
    flags: list[str]
    blocks: Path  # file of the tier on disk
    first_byte: int  # of the records of PROMPTS in this file; records follow each other


@pytest.fixture(scope="module")
def killed(service: RealService, tiers: Path) -> Killed:
    """The service, killed after it has stored the blocks of its answers. No later test can use it."""
    flush(service)
    blocks = tiers / "blocks.kv"
    name, label = "wideep:kv_tier_store_bytes_total", 'tier="disk"'
    first_byte, before = used_bytes(blocks), figure(service, name, label)
    answers = [ask(service, prompt)[0] for prompt in PROMPTS]
    wait_until(lambda: figure(service, name, label) > before, lambda: "nothing is stored", within_s=60)
    processes = [*service.descendants(), *(process.pid for process in service.processes)]
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):  # it died with its parent
            os.kill(pid, signal.SIGKILL)
    assert all(has_ended(pid, 60) for pid in processes)
    return Killed(answers, tier_flags(tiers), blocks, first_byte)


def used_bytes(blocks: Path) -> int:
    """Return the end of the newest record: the rest of the file is empty."""
    return len(blocks.read_bytes().rstrip(b"\0"))


def flush(service: RealService) -> None:
    httpx.post(f"{service.url}/flush_cache", timeout=30).raise_for_status()


def ask(service: RealService, prompt: str) -> tuple[str, dict[str, Any]]:
    """Return a greedy answer and where its cached tokens came from."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{service.url}/v1/completions", json=body, timeout=120)
    answer.raise_for_status()
    content = answer.json()
    return content["choices"][0]["text"], content["usage"]["prompt_tokens_details"]


def figure(service: RealService, name: str, label: str = "") -> float:
    """Return the sum of a metric over all labels, or over those with `label`."""
    text = httpx.get(f"{service.url}/metrics", timeout=30).text
    rows = [
        line.rpartition(" ")
        for line in text.splitlines()
        if line.startswith((f"{name}{{", f"{name} ")) and label in line
    ]
    assert rows, f"no metric {name}"
    return sum(float(value) for _, _, value in rows)


def test_flushed_prefixes_are_not_found_again(service: RealService) -> None:
    ask(service, PROMPTS[0])
    assert ask(service, PROMPTS[0])[1]["cached_tokens"] > 0
    flush(service)
    assert ask(service, PROMPTS[0])[1]["cached_tokens"] == 0


def test_a_rank_that_is_killed_finds_its_blocks_in_the_memory_of_the_other(service: RealService) -> None:
    flush(service)
    first = [ask(service, prompt)[0] for prompt in PROMPTS]
    os.kill(service.engines()[0], signal.SIGKILL)
    wait_until(lambda: "rank 0 serves again" in service.output(), service.output, within_s=START_S)
    service.wait_whole()
    again = [ask(service, prompt) for prompt in PROMPTS]
    assert [text for text, _ in again] == first
    assert all(details["cached_tokens"] > 0 for _, details in again), "no prompt is computed again"
    assert sum(details.get("cached_tokens_details", {}).get("host", 0) for _, details in again) > 0


def test_a_drained_rank_hands_its_streams_on_and_their_blocks_come_from_host_memory(
    service: RealService,
) -> None:
    bodies = [
        {"model": "tiny", "prompt": prompt, "max_tokens": 150, "temperature": 0, "ignore_eos": True}
        for prompt in PROMPTS
    ]
    expected = [stream.said for stream in stream_all(service.url, bodies)]
    before = figure(service, "wideep:kv_tier_load_bytes_total", 'tier="host"')
    moved = figure(service, "wideep:request_moves_total")

    def drain(*, undo: bool = False) -> None:
        body = {"rank": 0, "undo": undo}
        answer = httpx.post(f"{service.url}/ranks/drain", json=body, timeout=60)
        assert answer.status_code == 200, answer.text

    # On a busy machine, all answers may end before the drain begins, or their blocks may be saved after it.
    for _ in range(10):
        flush(service)
        streams = stream_all(service.url, bodies, pieces=5, then=drain)
        drain(undo=True)
        assert [stream.said for stream in streams] == expected
        if figure(service, "wideep:kv_tier_load_bytes_total", 'tier="host"') > before:
            break
    assert figure(service, "wideep:request_moves_total") > moved, "no stream moved"
    assert figure(service, "wideep:kv_tier_load_bytes_total", 'tier="host"') > before


def test_the_directory_of_another_model_is_refused_and_left_alone(
    killed: Killed, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    before = killed.blocks.read_bytes()
    other = write_tiny_model(tmp_path_factory.mktemp("other") / "tiny", "mixtral")
    with RealService.serve(other, tmp_path / "output.txt", "-dp=2", *killed.flags) as service:
        assert service.wait_ended() != [0]
        assert "holds the KV blocks of another model, checkpoint or cache layout" in service.output()
    assert killed.blocks.read_bytes() == before


def test_after_a_kill_blocks_are_found_on_the_disk_and_damaged_ones_change_no_answer(
    killed: Killed, model: Path, tmp_path: Path
) -> None:
    data = bytearray(killed.blocks.read_bytes())
    end = used_bytes(killed.blocks)
    for at in range((killed.first_byte + end) // 2, end, 1 << 9):
        data[at] ^= 1
    killed.blocks.write_bytes(data)
    with running(model, tmp_path / "output.txt", *killed.flags) as service:
        answers = [ask(service, prompt) for prompt in PROMPTS]
        assert [text for text, _ in answers] == killed.answers
        found = [
            details["cached_tokens_details"]["disk"] for _, details in answers if details["cached_tokens"]
        ]
        assert sum(found) > 0, "the disk's blocks are used after kill -9"
        wait_until(
            lambda: figure(service, "wideep:kv_tier_faults_total") > 0, lambda: "no damaged block was read"
        )
