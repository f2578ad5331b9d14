"""A trainer updates a service ten times under load, while experts move: every answer is that of a fresh engine with the same weights."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save

from expert_placement.files import from_json, to_json
from expert_placement.moves import align
from tests.server.test_weight_updates import CALL_S, call
from tests.support.engines.serving import build, request, serve
from tests.support.engines.versions import tensors_of
from tests.support.models.families import make_model
from tests.support.placement.placements import random_placement
from tests.support.service.real_service import RealService, write_tiny_model

pytestmark = pytest.mark.slow

NUM_UPDATES, NUM_TOKENS, VOCABULARY = 10, 24, 320
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 7},
    {"temperature": 1.0, "seed": 8},
)


def prompts() -> list[list[int]]:
    return [[(11 * number + 5 * place) % 250 + 10 for place in range(40)] for number in range(len(WAYS))]


class Trainer:
    """A tiny model that learns random texts by heart."""

    def __init__(self) -> None:
        self._model = make_model("qwen3_moe", vocab_size=VOCABULARY).train()
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.05)
        self._generator = torch.Generator().manual_seed(0)

    def step(self, directory: Path) -> None:
        """Train on one batch, and write the weights."""
        tokens = torch.randint(10, 260, (4, 24), generator=self._generator)
        loss = self._model(input_ids=tokens, labels=tokens).loss
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self._model.save_pretrained(directory)


@contextmanager
def under_load(service: RealService) -> Iterator[list[int]]:
    """Keep streams open. Yields the statuses of their answers."""
    statuses: list[int] = []
    is_over = threading.Event()

    def ask_again_and_again(number: int) -> None:
        body = {
            "prompt": prompts()[number % len(WAYS)],
            "max_tokens": 80,
            "ignore_eos": True,
            "temperature": 0,
        }
        while not is_over.is_set():
            statuses.append(
                httpx.post(f"{service.url}/v1/completions", json=body, timeout=CALL_S).status_code
            )

    threads = [threading.Thread(target=ask_again_and_again, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield statuses
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def move_experts(service: RealService, seed: int) -> None:
    now = from_json(service.get("/experts/history").json()["serving"])
    sizes = now.num_layers, now.num_experts, now.num_ranks, now.slots_per_rank
    target = align(random_placement(*sizes, seed=seed), now)
    moved = service.post("/experts/apply", json={"placement": to_json(target)}, timeout_s=CALL_S)
    assert moved.status_code == 200, moved.text


def send(service: RealService, directory: Path, number: int) -> None:
    """Update the weights from a folder or from the body, in turn."""
    call(service, "/start_weight_update", weight_version=number)
    if number % 2:
        call(service, "/update_weights", path=str(directory))
    else:
        tensors = {name: tensor.contiguous() for name, tensor in tensors_of(directory).items()}
        sent = httpx.post(
            f"{service.url}/update_weights",
            content=save(tensors),
            headers={"Content-Type": "application/octet-stream"},
            timeout=CALL_S,
        )
        assert sent.status_code == 200, sent.text
    call(service, "/finish_weight_update")


def answers_of(service: RealService) -> list[tuple[list[int], list[float], str]]:
    """Return the tokens, their log-probabilities and the version of each answer."""
    found = []
    for prompt, way in zip(prompts(), WAYS, strict=True):
        fields = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 0, "return_token_ids": True}
        body = call(service, "/v1/completions", prompt=prompt, **fields, **way)
        choice = body["choices"][0]
        found.append((choice["token_ids"], choice["logprobs"]["token_logprobs"], body["weight_version"]))
    return found


def fresh_answers(directory: Path, version: str) -> list[tuple[list[int], list[float], str]]:
    """Return the answers of an engine that starts with these weights."""
    built = build(directory, max_model_len=160)
    served = serve(
        built,
        [
            request(str(number), prompt, max_tokens=NUM_TOKENS, num_logprobs=0, **way)
            for number, (prompt, way) in enumerate(zip(prompts(), WAYS, strict=True))
        ],
    )
    logprobs: dict[str, list[float]] = {}
    for output in served.outputs:
        logprobs.setdefault(output.request_id, []).extend(each.logprob for each in output.logprobs)
    return [(served.token_ids[key], logprobs[key], version) for key in map(str, range(len(WAYS)))]


def test_ten_updates_of_a_training_loop(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    trainer = Trainer()
    eplb = '--eplb-config={"num_redundant_experts": 2}'
    flags = ("-dp=2", "--max-num-seqs=16", "--max-model-len=160", eplb)
    seen = []
    with RealService.serve(model, tmp_path / "output.txt", *flags) as service:
        service.wait_ready()
        with under_load(service) as statuses:
            for number in range(1, NUM_UPDATES + 1):
                directory = tmp_path / f"step{number}"
                trainer.step(directory)
                send(service, directory, number)
                if number % 3 == 0:
                    move_experts(service, seed=number)
                seen.append(answers_of(service))
        assert set(statuses) == {200}
        assert call(service, "/weight_checker")["success"] is True
        info = service.get("/weight_info").json()
        assert info["weight_version"] == str(NUM_UPDATES) and info["number"] == NUM_UPDATES
    wanted = [fresh_answers(tmp_path / f"step{number}", str(number)) for number in range(1, NUM_UPDATES + 1)]
    assert seen == wanted
    assert len({str(each) for each in seen}) == NUM_UPDATES, "each update changes the answers"
