"""Images of a chat get their ranges of the prompt, and requests that cannot be seen are refused by the part."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from server.api.images import ImagePart, PromptImages, encode_images, image_part, image_parts
from server.api.schemas import Message
from server.api.template_messages import template_messages, text_of
from server.front.errors import ApiError
from server.front.images.encoder import EncodedImage, EncoderCounts
from server.front.images.input import ImageInput
from server.front.images.seeing import ImageTokens
from tests.support.service.front_process import FrontProcess

MARK = 9
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
WHERE = "messages.0.content.0"


class Sources:
    """Takes the place of the sources: a URL is its own content."""

    async def read(self, url: str, where: str) -> bytes:
        if url == "bad":
            raise ApiError(400, f"{where} is bad.", param=where)
        return url.encode()


class Rows:
    """Takes the place of the encoder: an image has as many rows as its content has bytes."""

    counts = EncoderCounts()

    @contextlib.asynccontextmanager
    async def room(self, _where: str) -> AsyncIterator[None]:
        yield

    def count(self, **_more: float) -> None:
        """Count nothing."""

    async def encode(self, content: bytes, _where: str) -> EncodedImage:
        times = dict.fromkeys(("decode_s", "process_s", "tower_s"), 0.0)
        size = {"num_rows": len(content), "num_bytes": 8 * len(content), "height": 1, "width": len(content)}
        size |= {"part": 0, "columns": 1}
        return EncodedImage(os.memfd_create("rows"), content.hex(), {**size, **times})


def seen(
    prompt_ids: Sequence[int], urls: Sequence[str], most: int = 4, *, most_rows: int = 0, most_bytes: int = 0
) -> tuple[list[int], PromptImages]:
    """See images at these URLs."""
    parts = [ImagePart(f"messages.0.content.{number}", url) for number, url in enumerate(urls)]

    async def read_file(file_id: str, _where: str) -> bytes:
        return file_id.encode()

    tokens, sources, encoder = ImageTokens(MARK, MARK), Sources(), Rows()
    limits = most, sources, encoder, lambda: most_rows, lambda: most_bytes
    taken = ImageInput(tokens, *limits, read_file)  # type: ignore[arg-type]
    return asyncio.run(encode_images(prompt_ids, parts, taken))


def test_each_image_gets_one_token_per_row_in_order() -> None:
    ids, images = seen([1, MARK, 2, MARK, MARK, 3], ["ab", "c", "def"])
    assert ids == [1, 9, 9, 2, 9, 9, 9, 9, 3]
    assert [(image.start, image.length) for image in images.ranges] == [(1, 2), (4, 1), (5, 3)]
    assert [image.digest for image in images.ranges] == [b"ab".hex(), b"c".hex(), b"def".hex()]
    assert [image.path for image in images.ranges] == [file.path for file in images.files]


def test_an_image_that_one_step_cannot_run_is_refused_if_it_must_stay_whole() -> None:
    assert len(seen([MARK, MARK], ["ab", "abc"], most_rows=3)[0]) == 5
    with pytest.raises(ApiError, match=r"the image has 4 tokens.*a step has at most 3") as caught:
        seen([MARK, MARK], ["ab", "abcd"], most_rows=3)
    assert caught.value.status == 400 and caught.value.param == "messages.0.content.1"


def test_images_with_rows_that_no_far_rank_takes_are_refused_at_the_first_that_does_not_fit() -> None:
    urls = ["abc", "abc", "de", "f"]
    assert len(seen([MARK] * 4, urls, most_bytes=48)[0]) == 9, "equal images count once"
    with pytest.raises(
        ApiError, match=r"have 40 bytes.* on another host than the front take at most 39"
    ) as caught:
        seen([MARK] * 4, urls, most_bytes=39)
    assert caught.value.status == 400 and caught.value.param == "messages.0.content.2"


@pytest.mark.parametrize(
    ("prompt_ids", "urls", "param", "reason"),
    [
        ([1, MARK], ["a", "b"], "messages", "shows 1 images, but the messages have 2"),
        ([1, MARK, MARK], ["a"], "messages", "shows 2 images, but the messages have 1"),
        ([MARK] * 5, ["a"] * 5, "messages.0.content.4", "at most 4 are allowed"),
        ([MARK, MARK], ["a", "bad"], "messages.0.content.1", "is bad"),
    ],
)
def test_images_that_do_not_fit_are_refused(
    prompt_ids: list[int], urls: list[str], param: str, reason: str
) -> None:
    with pytest.raises(ApiError, match=reason) as caught:
        seen(prompt_ids, urls)
    assert caught.value.status == 400 and caught.value.param == param


def test_images_are_found_in_every_message() -> None:
    contents = ["text", [{"type": "text", "text": "a"}, IMAGE], None, [IMAGE]]
    assert [part.where for part in image_parts(contents)] == [
        "messages.1.content.1.image_url.url",
        "messages.3.content.0.image_url.url",
    ]


@pytest.mark.parametrize(
    "part",
    [
        IMAGE,
        {"type": "image_url", "image_url": "data:image/png;base64,AAAA"},
        {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"},
        {"type": "image", "image": "data:image/png;base64,AAAA"},
    ],
)
def test_every_spelling_of_an_image_is_read(part: dict[str, Any]) -> None:
    assert image_part(part, WHERE).url == "data:image/png;base64,AAAA"


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"type": "image_url"}, "messages.0.content.0.image_url must be a URL"),
        ({"type": "image_url", "image_url": {}}, "messages.0.content.0.image_url.url must be a URL"),
        ({"type": "image_url", "image_url": {"url": 5}}, "messages.0.content.0.image_url.url must be a URL"),
        ({"type": "input_image"}, "messages.0.content.0.image_url must be a URL"),
    ],
)
def test_parts_without_a_url_are_refused(part: dict[str, Any], reason: str) -> None:
    with pytest.raises(ApiError, match=reason):
        image_part(part, WHERE)


@pytest.mark.parametrize(
    "part", [{"type": "input_image", "file_id": "file-1"}, {"type": "image_url", "file_id": "file-1"}]
)
def test_an_uploaded_file_is_named_by_its_id(part: dict[str, Any]) -> None:
    assert image_part(part, WHERE) == ImagePart(f"{WHERE}.file_id", file_id="file-1")


def chat(*parts: Any) -> list[Message]:
    return [Message(role="user", content=list(parts))]


def test_the_template_gets_images_as_parts() -> None:
    text = {"type": "text", "text": "What?"}
    [message] = template_messages(chat(IMAGE, text), "")
    assert message["content"] == [{"type": "image"}, text]
    [message] = template_messages(chat(IMAGE), "")
    assert message["content"] == [{"type": "image"}], "one image is not joined to a text"
    assert text_of(message["content"]) == ""


@pytest.mark.parametrize(
    ("kind", "why_no_images", "reason"),
    [
        ("image_url", "it is late", "'image_url'; this model supports only text, because it is late"),
        ("video_url", "", "'video_url'; video is not supported"),
        ("video_url", "it is late", "'video_url'; video is not supported"),
        ("input_audio", "", "'input_audio'; audio is not supported"),
        ("file", "", "'file'; this model supports text and images"),
        ("file", "it is late", "'file'; this model supports only text"),
    ],
)
def test_other_media_are_refused_by_name(kind: str, why_no_images: str, reason: str) -> None:
    with pytest.raises(ApiError, match=reason) as caught:
        template_messages(chat({"type": kind, kind: {"url": "x"}}), why_no_images)
    assert caught.value.param == "messages.0.content.0.type"


def test_a_service_without_a_tower_refuses_images_on_every_endpoint(front: FrontProcess) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    block, part = {"type": "image", "source": source}, {"type": "input_image", "image_url": "data:,"}
    for path, body, where in (
        ("/v1/completions", {"prompt": "x", "images": [IMAGE]}, "images"),
        ("/generate", {"text": "x", "image_data": "AAAA"}, "image_data"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [IMAGE]}]}, WHERE),
        ("/v1/responses", {"input": [{"role": "user", "content": [part]}]}, "input.0.content.0"),
        (
            "/v1/messages",
            {"max_tokens": 1, "messages": [{"role": "user", "content": [block]}]},
            "messages.0.content.0",
        ),
    ):
        named = {} if path == "/generate" else {"model": "tiny"}
        answer = front.post(path, json={**named, **body})
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert message.startswith(where) and "it has no image tower" in message


def test_a_model_without_a_tower_lists_text_only(front: FrontProcess) -> None:
    [card, *_] = front.get("/v1/models").json()["data"]
    assert card["input_modalities"] == ["text"]
