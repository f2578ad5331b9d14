"""A whole service with experts for images: they are counted and moved while it answers, and answers equal `transformers`'."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("PIL", reason="needs Pillow: pip install 'wideep[images]'")

from expert_placement.files import from_json, to_json
from expert_placement.moves import align
from tests.server.images.test_images import TALL, WIDE, Oracle, Parts, chat, tokens_of
from tests.support.models.seeing import BEGIN, END, IMAGE_TOKEN, PLACE, write_seeing_model
from tests.support.placement.placements import random_placement
from tests.support.service.real_service import START_S, RealService
from tests.support.service.service_processes import wait_until

pytestmark = pytest.mark.slow

CHATS: list[Parts] = [
    [WIDE],
    ["What is this? ", TALL, " the cat"],
    ["A: ", TALL, "B: ", WIDE],
    ["no picture"],
]


class OracleWithExperts(Oracle):
    """Gives `transformers`' model the kinds of rows that its processor finds."""

    def kinds_of(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        of_images = torch.tensor([IMAGE_TOKEN + offset for offset in (0, BEGIN - PLACE, END - PLACE)])
        return {**super().kinds_of(ids), "moe_mm_token_type_ids": torch.isin(ids, of_images).int()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Oracle]:
    directory = tmp_path_factory.mktemp("tiny")
    return directory, OracleWithExperts(directory, write_seeing_model(directory, "ernie4_5_vl_moe"))


@pytest.fixture(scope="module")
def service(model: tuple[Path, Oracle], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealService]:
    log = tmp_path_factory.mktemp("log") / "log"
    flags = ("-dp", "2", "--served-model-name", "tiny", "--max-model-len", "256")
    with RealService.serve(model[0], log, *flags) as service:
        yield service.wait_ready()


@pytest.fixture(scope="module")
def wanted(model: tuple[Path, Oracle]) -> list[list[int]]:
    return [model[1].answer(parts) for parts in CHATS]


def answers(service: RealService) -> list[list[int]]:
    return [tokens_of(chat(service, parts)) for parts in CHATS]


def test_answers_equal_transformers_before_and_after_experts_moved(
    service: RealService, wanted: list[list[int]]
) -> None:
    assert answers(service) == wanted
    now = from_json(service.get("/experts/history").json()["serving"])
    assert now.num_layers == 4, "experts for text and for images in two layers"
    target = align(random_placement(now.num_layers, now.num_experts, 2, now.slots_per_rank, seed=5), now)
    moved = service.post("/experts/apply", json={"placement": to_json(target)}, timeout_s=START_S)
    assert moved.status_code == 200 and moved.json()["moves"] > 0, moved.text
    assert answers(service) == wanted


def test_experts_for_images_have_their_own_rows_in_the_load(service: RealService) -> None:
    chat(service, CHATS[2])
    load = service.get("/experts/load").json()
    assert load["layers"] == [1, 4, 2, 5], "those for images are numbered after the model's three layers"
    assert "vllm:eplb_balancedness" in service.get("/metrics").text


def test_answers_stay_the_same_after_a_rank_was_killed(service: RealService, wanted: list[list[int]]) -> None:
    os.kill(service.engines()[1], signal.SIGKILL)
    assert answers(service) == wanted
    wait_until(lambda: "rank 1 serves again" in service.output(), service.output, within_s=START_S)
    assert answers(service) == wanted
