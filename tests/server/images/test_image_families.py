"""A whole service for each family with its own tokens around an image: answers equal `transformers`' whole model."""

import re
from collections.abc import Iterator, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoImageProcessor, AutoTokenizer, PreTrainedModel
from transformers.models.llama4.processing_llama4 import Llama4Processor

pytest.importorskip("PIL", reason="needs Pillow: pip install 'wideep[images]'")
from PIL import Image

from server.front.images.tiles import TileProcessor
from tests.support.models.seeing import MERGE, SHOWN, write_seeing_model
from tests.support.requests.pictures import data_url, png
from tests.support.service.real_service import START_S, RealService

pytestmark = pytest.mark.slow

STEPS = 8
WIDE, TALL, SMALL = png(112, 56, 1), png(56, 112, 2), png(40, 40, 3)
Parts = Sequence[str | bytes]  # texts and picture files


class Seen:
    """Runs a processor on pictures. Returns the inputs of the model, and the text of each picture's tokens.

    The text is written as by `transformers`' processors, which need torchvision.
    """

    def __init__(self, family: str, directory: Path) -> None:
        own = TileProcessor if family == "llama4" else None  # transformers' own needs torchvision
        read = partial((own or AutoImageProcessor).from_pretrained, directory, local_files_only=True)
        self._processor: Any = read() if own else read(backend="pil")
        self._mark, self._merged = SHOWN[family].mark, 14 * MERGE  # pixels of a row

    def __call__(self, contents: Sequence[bytes]) -> tuple[dict[str, torch.Tensor], list[str]]:
        """Process the pictures of a message."""
        pictures = [Image.open(BytesIO(content)).convert("RGB") for content in contents]
        if self._mark == "[IMG]" and pictures:  # it pads the pictures of a batch to one size
            inputs = dict(self._processor(images=pictures, return_tensors="pt", patch_size=self._merged))
        else:
            seen = [dict(self._processor(images=[picture], return_tensors="pt")) for picture in pictures]
            inputs = {name: torch.cat([each[name] for each in seen]) for name in (seen[0] if seen else ())}
        if "image_sizes" in inputs:
            sizes = [
                (height // self._merged, width // self._merged) for height, width in inputs["image_sizes"]
            ]
            return inputs, [
                "[IMG_BREAK]".join(["[IMG]" * columns] * lines) + "[IMG_END]" for lines, columns in sizes
            ]
        if "image_grid_thw" in inputs:
            before, place, after = re.findall(r"<.*?>", self._mark)
            counts = [int(grid.prod()) // MERGE**2 for grid in inputs["image_grid_thw"]]
            return inputs, [f"{before}{place * count}{after}" for count in counts]
        if "num_soft_tokens_per_image" in inputs:
            counts = inputs.pop("num_soft_tokens_per_image").tolist()
            return inputs, [f"<|image>{'<|image|>' * count}<image|>" for count in counts]
        canvases = inputs.pop("aspect_ratios").tolist() if pictures else []
        return inputs, [Llama4Processor._prompt_split_image(None, canvas, 4) for canvas in canvases]


class Oracle:
    """`transformers`' whole model."""

    def __init__(self, family: str, directory: Path, model: PreTrainedModel) -> None:
        self._mark, self._place = SHOWN[family].mark, SHOWN[family].place
        self._model, self._seen = model, Seen(family, directory)
        self._tokenizer = AutoTokenizer.from_pretrained(directory)
        self._known: dict[tuple[str | bytes, ...], list[int]] = {}

    def prompt(self, parts: Parts) -> dict[str, torch.Tensor]:
        """Return the model's inputs for a user's message."""
        content = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts
        ]
        text = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        inputs, of_pictures = self._seen([part for part in parts if isinstance(part, bytes)])
        texts = iter(of_pictures)
        text = re.sub(re.escape(self._mark), lambda _found: next(texts), text)
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return {"input_ids": torch.tensor([ids]), **inputs}

    @torch.inference_mode()
    def answer(self, parts: Parts) -> list[int]:
        """Return the greedy answer's tokens."""
        if (known := tuple(parts)) in self._known:
            return self._known[known]
        inputs = self.prompt(parts)
        num_prompt = inputs["input_ids"].shape[1]
        for _ in range(STEPS):
            if {"image_position_ids", "image_grid_thw"} & set(inputs):
                inputs["mm_token_type_ids"] = (inputs["input_ids"] == self._place).int()
            logits = self._model(**inputs).logits[0, -1]
            inputs["input_ids"] = torch.cat((inputs["input_ids"], logits.argmax()[None, None]), dim=1)
        self._known[known] = inputs["input_ids"][0, num_prompt:].tolist()
        return self._known[known]


class Served:
    """A service, and the oracle of its model."""

    def __init__(self, family: str, service: RealService, oracle: Oracle) -> None:
        self.family, self.service, self.oracle = family, service, oracle

    def send(self, parts: Parts) -> httpx.Response:
        """Send a chat."""
        content = [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image_url", "image_url": {"url": data_url(part)}}
            for part in parts
        ]
        greedy = {"temperature": 0, "ignore_eos": True, "max_tokens": STEPS, "return_token_ids": True}
        body = {"model": "tiny", "messages": [{"role": "user", "content": content}], **greedy}
        return self.service.post("/v1/chat/completions", json=body, timeout_s=START_S)

    def chat(self, parts: Parts) -> dict[str, Any]:
        """Return a chat's answer."""
        answer = self.send(parts)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())


# Pictures of mistral_large4 are those of mistral3; tests/moe/vision/test_images.py has its decoder.
@pytest.fixture(scope="module", params=sorted({*SHOWN} - {"mistral_large4"}))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp(request.param)
    oracle = Oracle(request.param, directory, write_seeing_model(directory, request.param))
    log = tmp_path_factory.mktemp("log") / "log"
    flags = ("-dp", "2", "--served-model-name", "tiny", "--max-model-len", "256")
    cuts = ("--max-num-seqs", "8", "--max-num-batched-tokens", "80")
    with RealService.serve(directory, log, *flags, *cuts) as service:
        yield Served(request.param, service.wait_ready(), oracle)


@pytest.mark.parametrize(
    "parts",
    [
        [WIDE],
        ["What is this? ", TALL, " the cat"],
        ["A: ", WIDE, "B: ", SMALL, "which is the mat?"],
        ["B: ", SMALL, "A: ", WIDE, "which is the mat?"],
        ["no picture at all"],
    ],
    ids=["one", "between texts", "two", "two in turn", "none"],
)
def test_answers_and_prompt_tokens_equal_transformers(parts: Parts, served: Served) -> None:
    answer = served.chat(parts)
    assert answer["usage"]["prompt_tokens"] == served.oracle.prompt(parts)["input_ids"].shape[1]
    assert answer["choices"][0]["token_ids"] == served.oracle.answer(parts)


def test_a_repeated_prompt_hits_its_cached_prefix_and_another_picture_does_not(served: Served) -> None:
    first, other = (["the cat sat ", png(112, 56, seed), " on the mat"] for seed in (11, 12))
    asked = (first, first, first, other)  # each of two ranks has the first prompt after at most two requests
    answers = [served.chat(parts) for parts in asked]
    assert [answer["choices"][0]["token_ids"] for answer in answers] == [
        served.oracle.answer(parts) for parts in asked
    ]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    start = served.oracle.prompt(first)["input_ids"][0].tolist().index(SHOWN[served.family].place)
    assert max(cached[1:3]) >= 16 and cached[3] <= start, "a prefix ends inside the picture"


def test_an_image_that_must_stay_whole_and_is_larger_than_a_step_is_refused(tmp_path: Path) -> None:
    oracle = Oracle("gemma4", tmp_path, write_seeing_model(tmp_path, "gemma4"))
    flags = ("--served-model-name", "tiny", "--max-num-seqs", "8", "--max-num-batched-tokens", "32")
    with RealService.serve(tmp_path, tmp_path / "log", "-dp", "1", *flags) as service:
        small = Served("gemma4", service.wait_ready(), oracle)
        refused = small.send([WIDE])
        error = refused.json()["error"]
        assert refused.status_code == 400 and error["param"] == "messages.0.content.0.image_url.url"
        assert "tokens, which one step must run, and a step has at most 32" in error["message"]
        assert small.chat(["no picture"])["choices"][0]["token_ids"] == oracle.answer(["no picture"])
