"""A front with a real encoder process and scripted ranks: what a request with pictures becomes, and what is refused."""

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("PIL", reason="needs Pillow: pip install 'wideep[images]'")

from kvcache.images import read_rows
from scheduler.policy.request import Request
from server.api.openai.batches.bulk_client import BulkClient
from server.clients.llm.requests import LLMError, Question, complete_all
from server.clients.llm.results import RequestOutput, SamplingParams
from tests.support.models.seeing import IMAGE_TOKEN, write_seeing_model
from tests.support.requests.pictures import data_url, png
from tests.support.service.front_process import FrontProcess
from tests.support.service.service_processes import command_of, wait_until

WIDE, TALL = png(112, 56, 1), png(56, 112, 2)  # 8 rows each
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontProcess]:
    directory = tmp_path_factory.mktemp("tiny")
    write_seeing_model(directory)
    allowed = ("--allowed-media-domains", "127.0.0.1")
    process = FrontProcess(
        directory, "--served-model-name", "tiny", "--device", "cpu", *allowed, num_ranks=1
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


@pytest.mark.slow
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


@pytest.fixture(scope="module")
def web() -> Iterator[str]:
    """Return the URL of a picture."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(WIDE)

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/wide.png"
        server.shutdown()


@pytest.fixture(scope="module")
def file_id(seeing: FrontProcess) -> str:
    """Return the id of an uploaded picture."""
    return uploaded(seeing, "vision", WIDE)


def uploaded(front: FrontProcess, purpose: str, content: bytes) -> str:
    """Upload a file and return its id."""
    answer = httpx.post(f"{front.url}/v1/files", data={"purpose": purpose}, files={"file": ("x", content)})
    return str(answer.json()["id"])


def digests(request: Request) -> list[str]:
    """Return the digests of a request's images, in order."""
    return [image.digest for image in request.images]


def test_each_turn_of_a_chat_may_have_images(seeing: FrontProcess) -> None:
    alone = [asked(seeing, f"alone {number}", each) for number, each in enumerate((WIDE, TALL))]
    [first] = chat(WIDE, text="first turn")["messages"]
    body = chat(TALL, WIDE, text="last turn")
    body["messages"] = [first, {"role": "assistant", "content": "fine"}, *body["messages"]]
    seeing.script("last turn", "fine")
    assert seeing.post(CHAT, json=body).status_code == 200
    request = seeing.asked("last turn")
    wide, tall = (digests(each)[0] for each in alone)
    assert digests(request) == [wide, tall, wide]
    begin = alone[0].images[0]
    assert request.images[0][:3] == begin[:3], "the first turn is at the beginning"
    between = request.prompt_ids[request.images[0].end : request.images[1].start]
    assert "first turn" in seeing.decode(between) and "fine" in seeing.decode(between)


def test_anthropics_images_may_be_urls_and_files(seeing: FrontProcess, web: str, file_id: str) -> None:
    wanted = digests(asked(seeing, "for messages", WIDE))
    for source in ({"type": "url", "url": web}, {"type": "file", "file_id": file_id}):
        word = f"messages with {source['type']}"
        seeing.script(word, "fine")
        blocks = [{"type": "image", "source": source}, {"type": "text", "text": word}]
        body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": blocks}]}
        answer = seeing.post("/v1/messages", json=body)
        assert answer.status_code == 200, answer.text
        assert digests(seeing.asked(word)) == wanted
        assert answer.json()["usage"]["input_tokens"] == len(seeing.asked(word).prompt_ids)


def test_responses_images_may_be_urls_and_files_and_stay_in_the_conversation(
    seeing: FrontProcess, web: str, file_id: str
) -> None:
    [wide] = digests(asked(seeing, "for responses", WIDE))
    [tall] = digests(asked(seeing, "for responses too", TALL))
    previous: dict[str, Any] = {}
    seen: list[str] = []
    for word, part, more in (
        ("responses with a url", {"image_url": web}, wide),
        ("responses with a file", {"file_id": file_id}, wide),
        ("responses with data", {"image_url": data_url(TALL)}, tall),
    ):
        seeing.script(word, "fine")
        content = [{"type": "input_image", **part}, {"type": "input_text", "text": word}]
        answer = seeing.post(
            "/v1/responses",
            json={"model": "tiny", "input": [{"role": "user", "content": content}], **previous},
        )
        assert answer.status_code == 200, answer.text
        previous = {"previous_response_id": answer.json()["id"]}
        seen.append(more)
        assert digests(seeing.asked(word)) == seen


def test_lines_of_batches_and_the_offline_chat_take_uploaded_files(
    seeing: FrontProcess, file_id: str
) -> None:
    wanted = digests(asked(seeing, "for a batch", WIDE))
    content = [{"type": "input_image", "file_id": file_id}, {"type": "text", "text": "in a batch"}]
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 4}
    line = {"custom_id": "one", "method": "POST", "url": CHAT, "body": body}
    seeing.script("in a batch", "fine")
    asked_for = {
        "input_file_id": uploaded(seeing, "batch", json.dumps(line).encode()),
        "endpoint": CHAT,
        "completion_window": "24h",
    }
    path = f"/v1/batches/{seeing.post('/v1/batches', json=asked_for).json()['id']}"
    wait_until(lambda: seeing.get(path).json()["status"] == "completed", lambda: seeing.get(path).text)
    assert seeing.get(path).json()["request_counts"]["completed"] == 1
    assert digests(seeing.asked("in a batch")) == wanted
    content[1]["text"] = "offline with a file"
    seeing.script("offline with a file", "fine")
    [result] = offline(seeing, body, params=SamplingParams(max_tokens=4))
    assert result.outputs[0].text == "fine" and digests(seeing.asked("offline with a file")) == wanted


@pytest.mark.parametrize(
    ("content", "reason"), [(b"hello", "not an image of a supported format"), (WIDE[:200], "damaged")]
)
def test_other_apis_name_the_part_of_a_bad_picture(content: bytes, reason: str, seeing: FrontProcess) -> None:
    part = {"type": "input_image", "image_url": data_url(content)}
    source = {"type": "base64", "media_type": "image/png", "data": base64_of(content)}
    text = {"type": "text", "text": "x"}
    for path, body, where in (
        ("/v1/responses", {"input": [{"role": "user", "content": [text, part]}]}, "input.0.content.1"),
        (
            "/v1/messages",
            {
                "max_tokens": 1,
                "messages": [{"role": "user", "content": [text, {"type": "image", "source": source}]}],
            },
            "messages.0.content.1",
        ),
    ):
        answer = seeing.post(path, json={"model": "tiny", **body})
        message = answer.json()["error"]["message"]
        assert answer.status_code == 400 and message.startswith(f"{where}: the image cannot be used"), message
        assert reason in message


@pytest.mark.slow
def test_an_encoder_that_was_killed_is_replaced(seeing: FrontProcess) -> None:
    before = asked(seeing, "before", WIDE)
    [pid] = [int(each) for each in _children(seeing.process.pid) if "image-encoder" in command_of(int(each))]
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


def base64_of(picture: bytes) -> str:
    """Return a picture as Ollama's clients send it."""
    return data_url(picture).partition(",")[2]


def ollama(front: FrontProcess, path: str, word: str, **body: Any) -> Request:
    """Send a request to Ollama's API, and return the request that its rank got."""
    front.script(word, "fine")
    answer = front.post(path, json={"model": "tiny", "stream": False, **body})
    assert answer.status_code == 200, answer.text
    assert answer.json()["prompt_eval_count"] == len(front.asked(word).prompt_ids)
    return front.asked(word)


def test_ollamas_images_come_before_the_text(seeing: FrontProcess) -> None:
    wanted = asked(seeing, "ollama as chat", WIDE, TALL)
    encoded = [base64_of(WIDE), base64_of(TALL)]
    message = {"role": "user", "content": "ollama own", "images": encoded}
    chatted = ollama(seeing, "/api/chat", "ollama own", messages=[message])
    generated = ollama(seeing, "/api/generate", "ollama once", prompt="ollama once", images=encoded)
    for found in (chatted, generated):
        assert [image.digest for image in found.images] == [image.digest for image in wanted.images]
        assert [image.start for image in found.images] == [image.start for image in wanted.images]
        end = wanted.images[-1].end
        assert found.prompt_ids[:end] == wanted.prompt_ids[:end]
    swapped = ollama(seeing, "/api/generate", "ollama swap", prompt="ollama swap", images=encoded[::-1])
    assert [image.digest for image in swapped.images] == [image.digest for image in wanted.images[::-1]]
    assert "vision" in seeing.post("/api/show", json={"model": "tiny"}).json()["capabilities"]


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        ("", "messages.1.images.0 is an empty image"),
        ("%%%", "messages.1.images.0 is not valid base64"),
        (data_url(WIDE), "messages.1.images.0 is not valid base64"),
        ("aGVsbG8=", "messages.1.images.0: the image cannot be used: it is not an image"),
    ],
)
def test_a_bad_image_of_ollama_is_refused_by_its_place(image: str, reason: str, seeing: FrontProcess) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "user", "content": "y", "images": [image]}]
    answer = seeing.post("/api/chat", json={"model": "tiny", "messages": messages})
    assert answer.status_code == 400 and answer.json()["error"].startswith(reason), answer.text


def image_part(picture: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(picture)}}


def test_a_completion_takes_one_image_for_each_image_token(seeing: FrontProcess) -> None:
    wanted = asked(seeing, "as a chat", WIDE, TALL)
    messages = chat(WIDE, TALL, text="as a prompt")["messages"]
    rendered = seeing.post("/tokenize", json={"model": "tiny", "messages": messages}).json()["tokens"]
    assert rendered.count(IMAGE_TOKEN) == 2, "one token for each image"
    seeing.script("as a prompt", "fine")
    body = {"model": "tiny", "prompt": rendered, "images": [image_part(WIDE), image_part(TALL)]}
    answer = seeing.post(COMPLETION, json={**body, "max_tokens": 100_000})
    assert answer.status_code == 200, answer.text
    found = seeing.asked("as a prompt")
    assert [image.digest for image in found.images] == [image.digest for image in wanted.images]
    assert answer.json()["usage"]["prompt_tokens"] == len(found.prompt_ids) == len(rendered) + 14
    assert found.params.max_tokens < 100_000, "reduced to the space left in the context"


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"images": "x"}, "images", "must be a list of image parts"),
        ({"images": ["x"]}, "images.0", "must be a part of type image_url"),
        ({"images": [{"type": "text", "text": "x"}]}, "images.0", "must be a part of type image_url"),
        ({"images": [{"type": "image_url"}]}, "images.0.image_url", "must be a URL"),
        ({"images": [image_part(b"hello")]}, "images.0.image_url.url", "not an image of a supported format"),
        ({"images": [image_part(WIDE)] * 2}, "prompt", "has the image token 1 times, but images has 2 parts"),
        ({"images": [image_part(WIDE)], "prompt": [[1, 2], [3]]}, "prompt", "images belong to a single one"),
    ],
)
def test_images_that_do_not_fit_a_completion_are_refused(
    fields: dict[str, Any], param: str, reason: str, seeing: FrontProcess
) -> None:
    answer = seeing.post(COMPLETION, json={"model": "tiny", "prompt": [5, IMAGE_TOKEN, 6], **fields})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and reason in error["message"]


@pytest.mark.parametrize("in_base64", [False, True])
def test_sglangs_generate_takes_one_image_for_each_image_token(seeing: FrontProcess, in_base64: bool) -> None:
    word = f"generated {in_base64}"
    wanted = asked(seeing, f"as a chat {in_base64}", WIDE, TALL)
    messages = chat(WIDE, TALL, text=word)["messages"]
    rendered = seeing.post("/tokenize", json={"model": "tiny", "messages": messages}).json()["tokens"]
    seeing.script(word, "fine")
    images = [base64_of(each) if in_base64 else data_url(each) for each in (WIDE, TALL)]
    answer = seeing.post("/generate", json={"input_ids": rendered, "image_data": images})
    assert answer.status_code == 200, answer.text
    found = seeing.asked(word)
    assert [image.digest for image in found.images] == [image.digest for image in wanted.images]
    assert answer.json()["meta_info"]["prompt_tokens"] == len(found.prompt_ids) == len(rendered) + 14


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"image_data": 5}, "image_data", "must be a URL or a base64 text, or a list"),
        ({"image_data": [[base64_of(WIDE)]]}, "image_data", "must be a URL or a base64 text, or a list"),
        ({"image_data": "%%%"}, "image_data", "is not valid base64"),
        ({"image_data": ["ftp://x/y"]}, "image_data.0", "must be a data, http or https URL"),
        ({"image_data": [base64_of(WIDE)] * 2}, "input_ids", "but image_data has 2 parts"),
        (
            {"image_data": base64_of(WIDE), "input_ids": [[1], [3]]},
            "input_ids",
            "images belong to a single one",
        ),
    ],
)
def test_images_that_do_not_fit_a_generation_are_refused(
    fields: dict[str, Any], param: str, reason: str, seeing: FrontProcess
) -> None:
    answer = seeing.post("/generate", json={"input_ids": [5, IMAGE_TOKEN, 6], **fields})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and reason in error["message"], error


def offline(front: FrontProcess, *chats: dict[str, Any], params: SamplingParams) -> list[RequestOutput]:
    """Have `LLM` answer chats."""
    questions = [Question(place, {"messages": body["messages"]}, params) for place, body in enumerate(chats)]
    return asyncio.run(complete_all(questions, BulkClient(front.url, None, concurrency=4), shows_bar=False))


def test_the_offline_chat_takes_images(seeing: FrontProcess) -> None:
    wanted = asked(seeing, "online", WIDE, TALL)
    seeing.script("offline", "fine")
    [result] = offline(seeing, chat(WIDE, TALL, text="offline"), params=SamplingParams(max_tokens=None))
    found = seeing.asked("offline")
    assert [image.digest for image in found.images] == [image.digest for image in wanted.images]
    assert [image.start for image in found.images] == [image.start for image in wanted.images]
    assert result.outputs[0].text == "fine"
    assert result.prompt_token_ids == list(found.prompt_ids)
    assert result.prompt is not None and result.prompt.count("<|image_pad|>") == 2
    assert found.params.max_tokens > 1


def test_an_image_that_the_offline_chat_cannot_use_is_named(seeing: FrontProcess) -> None:
    with pytest.raises(LLMError, match=r"prompt 1: messages\.0\.content\.1: .*not an image of a supported"):
        offline(seeing, chat(WIDE, text="fine"), chat(WIDE, b"hello", text="x"), params=SamplingParams())


def test_a_model_that_sees_lists_images(seeing: FrontProcess) -> None:
    [card] = seeing.get("/v1/models").json()["data"]
    assert card["input_modalities"] == ["text", "image"]
    assert 'wideep:images_total{outcome="encoded"}' in seeing.get("/metrics").text


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
