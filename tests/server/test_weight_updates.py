"""Real services change their base weights under load: answers are those of a fresh service, also if processes are lost."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import save

from tests.server.faults.test_faults import kill
from tests.server.faults.test_moves_between_ranks import wait_until_nothing_is_open
from tests.support.engines.versions import some_names, tensors_of, write_merged, write_tensors
from tests.support.models.families import write_checkpoint
from tests.support.requests.timed_streams import stream_all
from tests.support.service.real_service import RealService, write_tiny_model
from tests.support.service.service_processes import has_ended, wait_until

pytestmark = pytest.mark.slow

CALL_S = 300.0
NUM_TOKENS = 60
PIECES = 3


def bodies(num_tokens: int = NUM_TOKENS) -> list[dict[str, Any]]:
    """Return requests with answers that depend on all earlier tokens."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 7},
        {"temperature": 0, "logprobs": 2},
    ]
    return [
        {"prompt": f"{name} the cat sat on the mat", "max_tokens": num_tokens, "ignore_eos": True, **kind}
        for name in ("ann", "bob")
        for kind in kinds
    ]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three checkpoints of one configuration."""
    made = [write_tiny_model(tmp_path_factory.mktemp("models") / f"tiny{seed}") for seed in range(3)]
    for seed, directory in enumerate(made):
        write_checkpoint("qwen3_moe", directory, seed=seed, vocab_size=320)
    return made


@pytest.fixture(scope="module")
def expected(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Any]:
    """A function that returns the answers of a fresh service with a checkpoint."""
    known: dict[Path, Any] = {}

    def answers(directory: Path) -> Any:
        if directory not in known:
            log = tmp_path_factory.mktemp("fresh") / "output.txt"
            with RealService.serve(directory, log, "-dp=1") as fresh:
                known[directory] = said(fresh.wait_ready())
        return known[directory]

    return answers


@pytest.fixture(scope="module")
def service(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealService]:
    """Two ranks with copies of some experts, and a tier in host memory."""
    log = tmp_path_factory.mktemp("service") / "output.txt"
    eplb = '--eplb-config={"num_redundant_experts": 2}'
    flags = ("-dp=2", "--max-num-seqs=32", "--max-rank-restarts=20", "--kv-offloading-size=64M", eplb)
    with RealService.serve(models[0], log, *flags) as running:
        yield running.wait_ready()


@pytest.fixture(autouse=True)
def whole(service: RealService) -> Iterator[None]:
    yield
    service.wait_whole()
    wait_until_nothing_is_open(service)


def said(service: RealService) -> list[tuple[object, ...]]:
    return [each.said for each in stream_all(service.url, bodies())]


def call(service: RealService, path: str, /, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{service.url}{path}", json=body, timeout=CALL_S)
    assert answer.status_code == 200, f"{answer.text}\n{service.output()[-3000:]}"
    return dict(answer.json())


def update(service: RealService, folder: Path, **begin: Any) -> dict[str, Any]:
    call(service, "/start_weight_update", **begin)
    call(service, "/update_weights", path=str(folder))
    return call(service, "/finish_weight_update")


def test_answers_after_each_update_are_those_of_a_fresh_service(
    service: RealService, models: list[Path], expected: Callable[[Path], Any]
) -> None:
    for directory in (models[1], models[2], models[1]):
        update(service, directory)
        for _ in range(2):  # the second time from the prefix cache
            assert said(service) == expected(directory)
    assert call(service, "/weight_checker")["success"] is True


def test_streams_go_on_through_an_update(
    service: RealService, models: list[Path], expected: Callable[[Path], Any]
) -> None:
    streams = stream_all(service.url, bodies(400), pieces=PIECES, then=lambda: update(service, models[2]))
    assert all(each.usage is None or each.usage["completion_tokens"] == 400 for each in streams)
    assert [each.finish_reasons for each in streams] == [{0: "length"}] * len(streams)
    assert said(service) == expected(models[2])


def test_kept_requests_of_a_paused_service_continue_with_the_new_weights(
    service: RealService, models: list[Path], expected: Callable[[Path], Any]
) -> None:
    def change() -> None:
        assert httpx.post(f"{service.url}/pause?mode=keep", timeout=CALL_S).json()["is_paused"] is True
        update(service, models[1])
        call(service, "/resume")

    streams = stream_all(service.url, bodies(400), pieces=PIECES, then=change)
    assert [each.finish_reasons for each in streams] == [{0: "length"}] * len(streams)
    assert said(service) == expected(models[1])


def test_a_partial_upload_changes_only_its_tensors(
    service: RealService, models: list[Path], tmp_path: Path, expected: Callable[[Path], Any]
) -> None:
    update(service, models[1])
    newer = some_names(models[2], lambda name: ".experts.3." in name or "norm" in name)
    call(service, "/start_weight_update", partial=True)
    sent = httpx.post(
        f"{service.url}/update_weights",
        content=save({name: tensor.contiguous() for name, tensor in newer.items()}),
        headers={"Content-Type": "application/octet-stream"},
        timeout=CALL_S,
    )
    assert sent.json()["tensors"] == len(newer)
    folders = call(service, "/finish_weight_update")["folders"]
    assert len(folders) == 2 and folders[0] == str(models[1])
    folder = write_tensors(newer, tmp_path / "newer")
    assert said(service) == expected(write_merged(models[1], folder, tmp_path / "merged"))


def test_bad_weights_are_refused_and_change_nothing(
    service: RealService, models: list[Path], tmp_path: Path, expected: Callable[[Path], Any]
) -> None:
    update(service, models[1])
    before = service.get("/weight_info").json()
    tensors = tensors_of(models[2])
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    write_tensors({**tensors, name: tensors[name][:, :8]}, tmp_path / "bad")
    answer = httpx.post(
        f"{service.url}/update_weights_from_disk", json={"model_path": str(tmp_path / "bad")}, timeout=CALL_S
    )
    assert answer.status_code == 400 and f"{name}: [64, 8] instead of [64, 64]" in answer.text
    assert service.get("/weight_info").json() == before
    assert said(service) == expected(models[1])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_rank_returns_with_the_newest_weights(
    service: RealService, models: list[Path], expected: Callable[[Path], Any], rank: int
) -> None:
    update(service, models[2])
    kill(service, rank)
    wait_until(lambda: service.status()["members"] == [1 - rank], service.output)
    assert said(service) == expected(models[2])
    service.wait_whole()
    assert said(service) == expected(models[2])
    assert call(service, "/weight_checker")["success"] is True


def test_a_rank_that_is_lost_while_ranks_load_delays_the_update(
    service: RealService, models: list[Path], expected: Callable[[Path], Any]
) -> None:
    update(service, models[2])
    killer = threading.Timer(0.2, lambda: kill(service, 1))
    killer.start()
    update(service, models[1])
    killer.join()
    assert said(service) == expected(models[1])
    service.wait_whole()
    assert said(service) == expected(models[1])


def test_a_killed_front_learns_the_version_from_the_ranks(
    service: RealService, models: list[Path], expected: Callable[[Path], Any]
) -> None:
    number = update(service, models[2], weight_version="before the loss")["number"]
    front = service.find("front")
    os.kill(front, signal.SIGKILL)
    assert has_ended(front, CALL_S)
    service.wait_whole()
    info = service.get("/weight_info").json()
    assert (info["number"], info["weight_version"]) == (number, "before the loss")
    assert said(service) == expected(models[2])
    kill(service, 1)
    wait_until(lambda: service.status()["members"] == [0], service.output)
    service.wait_whole()
    assert said(service) == expected(models[2])
    assert update(service, models[1])["number"] > number
    assert said(service) == expected(models[1])
