"""A front with a real encoder process and scripted ranks: what a request with pictures becomes, and what is refused."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL", reason="needs Pillow: pip install 'wideep[images]'")

from kvcache.images import read_rows
from scheduler.policy.request import Request
from tests.support.models.seeing import IMAGE_TOKEN, write_seeing_model
from tests.support.requests.pictures import data_url, png
from tests.support.service.front_process import FrontProcess
from tests.support.service.service_processes import wait_until

WIDE, TALL = png(112, 56, 1), png(56, 112, 2)  # 8 rows each
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontProcess]:
    directory = tmp_path_factory.mktemp("tiny")
    write_seeing_model(directory)
    process = FrontProcess(
        directory, "--served-model-name", "tiny", "--device", "cpu", num_ranks=1
    ).attach_all()
    yield process
    status, said = process.close()
    assert (status, said) == (0, ""), "the front and its encoder print nothing"


def chat(*pictures: bytes, text: str) -> dict[str, Any]:
    """Return the body of a chat with pictures before a text."""
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": data_url(each)}} for each in pictures
    ]
    message = {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
    return {"model": "tiny", "messages": [message], "max_tokens": 4}


def asked(front: FrontProcess, text: str, *pictures: bytes) -> Request:
    """Send a chat, and return the request that its rank got."""
    front.script(text, "fine")
    answer = front.post(CHAT, json=chat(*pictures, text=text))
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == len(front.asked(text).prompt_ids)
    return front.asked(text)


def test_a_rank_of_another_host_gets_one_token_per_row_and_the_rows(seeing: FrontProcess) -> None:
    request = asked(seeing, "two pictures", WIDE, TALL)
    places = [place for place, token in enumerate(request.prompt_ids) if token == IMAGE_TOKEN]
    first, second = request.images
    assert places == [*range(first.start, first.end), *range(second.start, second.end)]
    assert (first.height, first.width, second.height, second.width) == (2, 4, 4, 2)
    assert first.rows is not None, "it cannot map the front's memory"
    for image in read_rows(request.images, 64):
        assert image.rows is not None and image.rows.shape == (3, 8, 64)
    assert first.digest != second.digest


def test_an_equal_picture_has_the_same_rows_and_another_one_other_keys(seeing: FrontProcess) -> None:
    once, again, other = (
        asked(seeing, text, picture) for text, picture in (("aa", WIDE), ("aa b", WIDE), ("aa c", TALL))
    )
    assert once.images[0].path == again.images[0].path
    assert once.prompt_ids[:12] == other.prompt_ids[:12], "the tokens do not differ"
    assert list(once.key_ids)[:12] == list(again.key_ids)[:12] != list(other.key_ids)[:12]


def test_an_encoder_that_was_killed_is_replaced(seeing: FrontProcess) -> None:
    before = asked(seeing, "before", WIDE)
    [pid] = [int(each) for each in _children(seeing.process.pid) if "image-encoder" in _command(each)]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: str(pid) not in _children(seeing.process.pid), lambda: "it is still there")
    assert asked(seeing, "after", WIDE).images[0].digest == before.images[0].digest
    assert asked(seeing, "new", png(60, 60, 5)).images[0].length == 4


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"hello", "not an image of a supported format"),
        (WIDE[:200], "damaged"),
    ],
)
def test_a_bad_picture_is_refused_by_its_part(content: bytes, reason: str, seeing: FrontProcess) -> None:
    answer = seeing.post(CHAT, json=chat(WIDE, content, text="bad"))
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "messages.0.content.1.image_url.url"
    assert reason in error["message"]


def test_a_model_that_sees_lists_images(seeing: FrontProcess) -> None:
    [card] = seeing.get("/v1/models").json()["data"]
    assert card["input_modalities"] == ["text", "image"]
    assert 'wideep:images_total{outcome="encoded"}' in seeing.get("/metrics").text


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def _command(pid: str) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()
