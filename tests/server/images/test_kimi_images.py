"""A whole service of a Kimi model with WideEP's own image processor: answers equal `transformers`' whole model."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

pytest.importorskip("PIL", reason="needs Pillow: pip install 'wideep[images]'")

from server.front.images.encoder_process import read_processor
from tests.server.images.test_images import SMALL, TALL, WIDE, Oracle, Parts, chat, tokens_of
from tests.support.models.seeing import write_seeing_model
from tests.support.requests.pictures import png
from tests.support.service.real_service import RealService

pytestmark = pytest.mark.slow

CHATS: list[Parts] = [[WIDE], ["A: ", TALL, "B: ", WIDE, "which?"], [SMALL, "the cat"], ["no picture"]]


class KimiOracle(Oracle):
    """`transformers`' model has positions on one axis, and no image processor without torchvision."""

    def __init__(self, directory: Path, model: PreTrainedModel) -> None:
        self._model = model
        self._tokenizer = AutoTokenizer.from_pretrained(directory)
        self._processor = read_processor(directory)

    def kinds_of(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {}


def test_answers_equal_transformers(tmp_path: Path) -> None:
    directory = tmp_path / "tiny"
    oracle = KimiOracle(directory, write_seeing_model(directory, "kimi_k25"))
    flags = ("-dp", "2", "--served-model-name", "tiny", "--max-model-len", "256")
    with RealService.serve(directory, tmp_path / "log", *flags) as service:
        service.wait_ready()
        for parts in CHATS:
            answer = chat(service, parts)
            assert tokens_of(answer) == oracle.answer(parts)
            assert answer["usage"]["prompt_tokens"] == oracle.prompt(parts)["input_ids"].shape[1]
        pictures = [png(112, 56, seed) for seed in (1, 7)]
        one, other = (tokens_of(chat(service, ["the ", picture, "cat"])) for picture in pictures)
        assert one != other, "the control: another picture gives another answer"
