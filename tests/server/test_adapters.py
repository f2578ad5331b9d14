"""A service with adapters: two ranks, several adapters and the base model at once, while experts move and a rank dies."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from transformers import AutoModelForCausalLM, PreTrainedModel

from expert_placement.files import from_json, to_json
from expert_placement.moves import align
from tests.server.serve.front.test_real_fronts import fronts
from tests.support.models.adapters import FUSED, SINGLE, write_adapter
from tests.support.placement.placements import random_placement
from tests.support.requests.timed_streams import stream_all
from tests.support.service.real_service import START_S, RealService, write_tiny_model
from tests.support.service.service_processes import wait_until

pytestmark = pytest.mark.slow

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate")
NAMES = ("tiny", "one", "two", "three")


class Running(NamedTuple):
    service: RealService
    root: Path
    model: PreTrainedModel


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Two ranks with redundant experts, three places, and as many adapters."""
    root = tmp_path_factory.mktemp("service")
    directory = write_tiny_model(root / "tiny")
    model = AutoModelForCausalLM.from_pretrained(directory)
    for seed, name in enumerate(NAMES[1:], start=1):
        write_adapter(root / name, model, modules=MODULES, experts=FUSED if seed % 2 else SINGLE, seed=seed)
    modules = [f"{name}={root / name}" for name in NAMES[1:]]
    targets = ("--lora-target-modules", *MODULES, "experts")
    flags = (
        "--enable-lora",
        "--max-loras=3",
        *targets,
        "--lora-modules",
        *modules,
        "-dp=2",
        "--max-rank-restarts=20",
    )
    redundant = '--eplb-config={"num_redundant_experts": 4}'
    with RealService.serve(directory, root / "output.txt", *flags, redundant) as service:
        yield Running(service.wait_ready(), root, model)


def bodies(names: tuple[str, ...] = NAMES, max_tokens: int = 60) -> list[dict[str, Any]]:
    return [
        {
            "model": name, "prompt": f"{copy} the cat", "max_tokens": max_tokens, "ignore_eos": True,
            **({"temperature": 0, "logprobs": 2} if copy else {"temperature": 1.0, "seed": 5}),
        }
        for copy in range(2)
        for name in names
    ]  # fmt: skip


def answers(service: RealService, asked: list[dict[str, Any]]) -> list[Any]:
    return [each.said for each in stream_all(service.url, asked)]


def wait_until_whole(service: RealService) -> None:
    wait_until(lambda: service.status()["members"] == [0, 1], service.output, within_s=START_S)


def test_answers_in_a_mixed_batch_are_those_alone(running: Running) -> None:
    asked = bodies()
    alone = [answers(running.service, [body])[0] for body in asked]
    assert answers(running.service, asked) == alone
    by_name = {
        body["model"]: str(said) for body, said in zip(asked[len(NAMES) :], alone[len(NAMES) :], strict=True)
    }
    assert len(set(by_name.values())) == len(NAMES), "every adapter changes the answer"


def test_sglang_s_names_choose_the_same_adapters(running: Running) -> None:
    service, body = running.service, bodies(("one",))[1]
    assert answers(service, [body]) == answers(service, [{**body, "model": "tiny:one"}])
    params = {"max_new_tokens": 60, "temperature": 0, "ignore_eos": True}
    asked = {"text": body["prompt"], "lora_path": "one", "sampling_params": params}
    generated = service.post("/generate", json=asked).json()["text"]
    assert (
        generated
        == service.post("/v1/completions", json={**body, "logprobs": None}).json()["choices"][0]["text"]
    )


def test_streams_stay_the_same_while_experts_move(running: Running) -> None:
    service, asked = running.service, bodies()
    expected = answers(service, asked)
    for seed in range(3):
        now = from_json(service.get("/experts/history").json()["serving"])
        sizes = now.num_layers, now.num_experts, now.num_ranks, now.slots_per_rank
        target = align(random_placement(*sizes, seed=seed), now)

        def move(target: Any = target) -> None:
            response = service.post("/experts/apply", json={"placement": to_json(target)}, timeout_s=120)
            assert response.status_code == 200, response.text

        assert [each.said for each in stream_all(service.url, asked, pieces=3, then=move)] == expected
    assert answers(service, asked) == expected


@pytest.mark.parametrize("rank", [0, 1])
def test_streams_stay_the_same_when_a_rank_dies_and_returns(running: Running, rank: int) -> None:
    service, asked = running.service, bodies(max_tokens=120)
    wait_until_whole(service)
    expected = answers(service, asked)

    def kill() -> None:
        os.kill(service.engines()[rank], signal.SIGKILL)

    assert [each.said for each in stream_all(service.url, asked, pieces=3, then=kill)] == expected
    wait_until_whole(service)
    assert answers(service, asked) == expected


def test_adapters_are_loaded_listed_and_unloaded_while_serving(running: Running) -> None:
    service, root = running.service, running.root
    write_adapter(root / "late", running.model, modules=MODULES, seed=9)
    before = answers(service, bodies())
    response = service.post(
        "/v1/load_lora_adapter", json={"lora_name": "late", "lora_path": str(root / "late")}
    )
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'late' added successfully.")
    cards = {card["id"]: card["parent"] for card in service.get("/v1/models").json()["data"]}
    assert cards == {"tiny": None, **dict.fromkeys(("one", "two", "three", "late"), "tiny")}
    late = answers(service, bodies(("late",)))
    assert answers(service, bodies()) == before
    rotating = bodies(("late", *NAMES))  # four adapters at three places
    expected = [answers(service, [body])[0] for body in rotating]
    assert answers(service, rotating) == expected
    metrics = service.get("/metrics").text
    assert 'wideep:adapter_choices_total{lora_name="late",model_name="tiny"}' in metrics
    again = {"lora_name": "late", "lora_path": str(root / "one"), "load_inplace": True}
    assert service.post("/load_lora_adapter", json=again).json()["success"]
    assert answers(service, bodies(("late",))) == answers(service, bodies(("one",))) != late
    assert service.post("/v1/unload_lora_adapter", json={"lora_name": "late"}).status_code == 200
    body = {"model": "late", "prompt": "a", "max_tokens": 1}
    assert service.post("/v1/completions", json=body).status_code == 404


def test_two_fronts_serve_the_same_adapters_also_after_one_was_killed(
    running: Running, tmp_path: Path
) -> None:
    """Four adapters rotate over three places. The expected answers are those of one front."""
    write_adapter(running.root / "four", running.model, modules=MODULES, seed=11)
    load = {"lora_name": "four", "lora_path": str(running.root / "four")}
    assert running.service.post("/v1/load_lora_adapter", json=load).status_code == 200
    asked = 3 * bodies((*NAMES, "four"))
    expected = answers(running.service, asked)
    assert running.service.post("/v1/unload_lora_adapter", json={"lora_name": "four"}).status_code == 200
    modules = [f"{name}={running.root / name}" for name in NAMES[1:]]
    flags = ("--enable-lora", "--max-loras=3", "--lora-modules", *modules, "-dp=2", "--api-server-count=2")
    with RealService.serve(running.root / "tiny", tmp_path / "output.txt", *flags) as service:
        service.wait_ready()
        assert service.post("/v1/load_lora_adapter", json=load).status_code == 200
        assert answers(service, asked) == expected
        for number in (1, 0):
            os.kill(fronts(service)[number], signal.SIGKILL)
            wait_until(lambda: len(fronts(service)) == 2, service.output)
            wait_until(lambda: _serves_at_all_fronts(service, "four"), service.output, within_s=START_S)
            assert answers(service, asked) == expected
        assert service.post("/v1/unload_lora_adapter", json={"lora_name": "four"}).status_code == 200
        body = {"model": "four", "prompt": "a", "max_tokens": 1}
        assert {service.post("/v1/completions", json=body).status_code for _ in range(8)} == {404}
        metrics = service.get("/metrics").text
        assert 'wideep:adapter_running_choices{lora_name="one",model_name="tiny"} 0.0' in metrics
        assert service.status()["losses"] == 0


def _serves_at_all_fronts(service: RealService, name: str) -> bool:
    """Return whether each of some new connections, which the kernel spreads, finds a model."""
    try:
        states = [service.get("/health").status_code for _ in range(12)]
        cards = [service.get("/v1/models").json()["data"] for _ in range(12)]
    except httpx.TransportError:
        return False
    return states == [200] * 12 and all(name in {card["id"] for card in each} for each in cards)


def test_bad_adapters_are_named_and_nothing_is_loaded(running: Running) -> None:
    service, root = running.service, running.root
    write_adapter(root / "dora", running.model, modules=MODULES, experts="", use_dora=True)
    write_adapter(root / "large", running.model, modules=MODULES, experts="", rank=65)
    write_adapter(root / "head", running.model, modules=("lm_head",), experts="")
    for name, path, says in (
        ("x", "head", "adapts lm_head; --lora-target-modules allows only q_proj"),
        ("x", "missing", "has no adapter_config.json"),
        ("x", "dora", "DoRA is not supported"),
        ("x", "large", "above the limit of 64"),
        ("one", "one", "'one' is loaded already"),
        ("tiny", "one", "'tiny' is a name of the base model"),
    ):
        response = service.post(
            "/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(root / path)}
        )
        assert response.status_code == 400 and says in response.json()["error"]["message"], response.text
    assert [each["name"] for each in service.get("/adapters").json()["adapters"]] == list(NAMES[1:])


def test_a_start_without_room_for_its_adapters_is_refused(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "tiny")
    flags = ("--enable-lora", "--max-cpu-loras=100000000")
    with RealService.serve(directory, tmp_path / "output.txt", *flags) as service:
        assert service.wait_ended() != [0]
        assert "for up to 100000000 adapters of rank 64" in service.output()
