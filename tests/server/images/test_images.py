"""A whole service with images: answers equal `transformers`' whole model, on every endpoint, also after faults."""

import json
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoImageProcessor, AutoTokenizer, PreTrainedModel

pytest.importorskip("PIL", reason="needs Pillow: pip install 'wideep[images]'")
from PIL import Image

from server.offline import LLM, LLMError, SamplingParams
from tests.support.models.seeing import IMAGE_TOKEN, MERGE, write_seeing_model
from tests.support.requests.pictures import data_url, png, png_of
from tests.support.requests.web_pictures import WebPictures
from tests.support.service.private_services import import_once
from tests.support.service.real_service import START_S, RealService
from tests.support.service.service_processes import wait_until

pytestmark = pytest.mark.slow

STEPS = 24
WIDE, TALL, SMALL = png(112, 56, 1), png(56, 112, 2), png(30, 30, 3)
WHERE = "messages.0.content.0.image_url.url"
Parts = Sequence[str | bytes]  # texts, picture files, and http URLs of pictures


class Oracle:
    """`transformers`' whole model with its own image processor."""

    def __init__(self, directory: Path, model: PreTrainedModel) -> None:
        self._model = model
        self._tokenizer = AutoTokenizer.from_pretrained(directory)
        self._processor: Any = AutoImageProcessor.from_pretrained(directory, backend="pil")

    def prompt(self, parts: Parts) -> dict[str, torch.Tensor]:
        """Return the model's inputs for a user's message."""
        content = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts
        ]
        text = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        pictures = [Image.open(BytesIO(part)).convert("RGB") for part in parts if isinstance(part, bytes)]
        seen = dict(self._processor(images=pictures, return_tensors="pt")) if pictures else {}
        counts = iter([int(grid.prod()) // MERGE**2 for grid in seen.get("image_grid_thw", ())])
        ids: list[int] = []
        for token_id in self._tokenizer.encode(text, add_special_tokens=False):
            ids += [token_id] * (next(counts) if token_id == IMAGE_TOKEN else 1)
        return {"input_ids": torch.tensor([ids]), **seen}

    def kinds_of(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the model's inputs that mark the rows of images."""
        return {"mm_token_type_ids": (ids == IMAGE_TOKEN).int()}

    @torch.inference_mode()
    def answer(self, parts: Parts, num_tokens: int = STEPS) -> list[int]:
        """Return the greedy answer's tokens."""
        inputs = self.prompt(parts)
        num_prompt = inputs["input_ids"].shape[1]
        for _ in range(num_tokens):
            ids = inputs["input_ids"]
            logits = self._model(**inputs, **self.kinds_of(ids)).logits[0, -1]
            inputs["input_ids"] = torch.cat((ids, logits.argmax()[None, None]), dim=1)
        found: list[int] = inputs["input_ids"][0, num_prompt:].tolist()
        return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Oracle]:
    directory = tmp_path_factory.mktemp("tiny")
    return directory, Oracle(directory, write_seeing_model(directory))


@pytest.fixture(scope="module")
def oracle(model: tuple[Path, Oracle]) -> Oracle:
    return model[1]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of pictures that file:// URLs may name."""
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "wide.png").write_bytes(WIDE)
    return folder


@pytest.fixture(scope="module")
def service(
    model: tuple[Path, Oracle], pictures: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealService]:
    log = tmp_path_factory.mktemp("log") / "log"
    flags = ("-dp", "2", "--served-model-name", "tiny", "--max-model-len", "256")
    allowed = ("--allowed-media-domains", "127.0.0.1", "--allowed-local-media-path", str(pictures))
    limits = ("--limit-mm-per-prompt", '{"image": 3}', "--max-image-pixels", "1000000")
    with RealService.serve(model[0], log, *flags, *allowed, *limits) as service:
        yield service.wait_ready()


def content_of(parts: Parts) -> list[dict[str, Any]]:
    urls = [data_url(part) if isinstance(part, bytes) else part for part in parts]
    return [
        {"type": "image_url", "image_url": {"url": url}}
        if url.startswith(("data:", "http:"))
        else {"type": "text", "text": url}
        for url in urls
    ]


def chat_body(parts: Parts, **fields: Any) -> dict[str, Any]:
    message = {"role": "user", "content": content_of(parts)}
    greedy = {"temperature": 0, "ignore_eos": True, "max_tokens": STEPS, "return_token_ids": True}
    return {"model": "tiny", "messages": [message], **greedy, **fields}


def chat(service: RealService, parts: Parts, **fields: Any) -> dict[str, Any]:
    """Return a chat's answer."""
    answer = service.post("/v1/chat/completions", json=chat_body(parts, **fields), timeout_s=START_S)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def tokens_of(answer: dict[str, Any]) -> list[int]:
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


def counter(service: RealService, name: str) -> float:
    """Return a counter of /metrics."""
    lines = service.get("/metrics").text.splitlines()
    return float(next(line.rpartition(" ")[2] for line in lines if line.startswith(name)))


@pytest.mark.parametrize(
    "parts",
    [
        [WIDE],
        ["What is this? ", TALL, " the cat"],
        ["A: ", WIDE, "B: ", TALL, "which is the mat?"],
        ["B: ", TALL, "A: ", WIDE, "which is the mat?"],
        [SMALL, SMALL, "the cat"],
        ["no picture at all"],
    ],
    ids=["one", "between texts", "two", "two in turn", "twice", "none"],
)
def test_answers_equal_transformers(parts: Parts, service: RealService, oracle: Oracle) -> None:
    answer = chat(service, parts)
    assert tokens_of(answer) == oracle.answer(parts)
    assert answer["usage"]["prompt_tokens"] == oracle.prompt(parts)["input_ids"].shape[1]


def test_another_picture_gives_another_answer(service: RealService) -> None:
    """The control."""
    answers = [tokens_of(chat(service, ["the ", picture, "cat"])) for picture in (WIDE, png(112, 56, 7))]
    assert answers[0] != answers[1]


def test_a_repeated_picture_is_encoded_once_and_its_prefix_is_cached(service: RealService) -> None:
    name = 'wideep:images_total{outcome="encoded"}'
    parts = [
        png(84, 84, 11),
        "the cat sat on the mat and on the mat " * 4,
    ]  # the router remembers 64 tokens and more
    before = counter(service, name)
    first, again = (chat(service, parts) for _ in range(2))
    assert counter(service, name) == before + 1
    assert tokens_of(first) == tokens_of(again)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 9


def test_other_endpoints_give_the_same_answer(service: RealService, pictures: Path) -> None:
    text, picture = "What is this?", data_url(WIDE)
    wanted = chat(service, [WIDE, text])["choices"][0]["message"]["content"]
    common = {"model": "tiny", "temperature": 0, "ignore_eos": True}
    responses = service.post(
        "/v1/responses",
        json={
            **common,
            "max_output_tokens": STEPS,
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_image", "image_url": picture},
                        {"type": "input_text", "text": text},
                    ],
                }
            ],
        },
    ).json()
    assert responses["output"][0]["content"][0]["text"] == wanted
    source = {"type": "base64", "media_type": "image/png", "data": picture.partition(",")[2]}
    messages = service.post(
        "/v1/messages",
        json={
            **common,
            "max_tokens": STEPS,
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image", "source": source}, {"type": "text", "text": text}],
                }
            ],
        },
    ).json()
    assert messages["content"][0]["text"] == wanted
    form = {"data": {"purpose": "vision"}, "files": {"file": ("wide.png", WIDE)}}
    file_id = service.post("/v1/files", **form).json()["id"]
    body = chat_body([text])
    body["messages"][0]["content"].insert(0, {"type": "input_image", "file_id": file_id})
    uploaded = service.post("/v1/chat/completions", json=body).json()
    assert uploaded["choices"][0]["message"]["content"] == wanted
    url = f"file://{pictures}/wide.png"
    body = chat_body([text])
    body["messages"][0]["content"].insert(0, {"type": "image_url", "image_url": {"url": url}})
    local = service.post("/v1/chat/completions", json=body).json()
    assert local["choices"][0]["message"]["content"] == wanted


def test_ollamas_endpoints_give_the_same_answer(service: RealService) -> None:
    text, picture = "What is this?", data_url(WIDE).partition(",")[2]
    # Ollama has no ignore_eos: compare the beginning that both have.
    wanted = chat(service, [WIDE, text], ignore_eos=False)["choices"][0]["message"]["content"]
    common = {"model": "tiny", "stream": False, "options": {"temperature": 0, "num_predict": STEPS}}
    message = {"role": "user", "content": text, "images": [picture]}
    chatted = service.post("/api/chat", json={**common, "messages": [message]}).json()
    assert chatted["message"]["content"] == wanted
    generated = service.post("/api/generate", json={**common, "prompt": text, "images": [picture]}).json()
    assert generated["response"] == wanted


def test_lines_of_a_batch_have_pictures(service: RealService, oracle: Oracle) -> None:
    chats: dict[str, Parts] = {"wide": [WIDE, "the cat"], "tall": ["the mat ", TALL]}
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": chat_body(parts)}
        for name, parts in chats.items()
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    form = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", content)}}
    batch = {
        "input_file_id": service.post("/v1/files", **form).json()["id"],
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }
    path = f"/v1/batches/{service.post('/v1/batches', json=batch).json()['id']}"
    wait_until(lambda: service.get(path).json()["status"] == "completed", service.output, within_s=START_S)
    output = service.get(f"/v1/files/{service.get(path).json()['output_file_id']}/content").text
    answers = {
        entry["custom_id"]: tokens_of(entry["response"]["body"])
        for entry in map(json.loads, output.splitlines())
    }
    assert answers == {name: oracle.answer(parts) for name, parts in chats.items()}


def test_the_offline_chat_gives_the_same_answer(
    model: tuple[Path, Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    import_once()
    chats: list[Parts] = [["A: ", WIDE, "B: ", TALL, "which?"], ["no picture"], [TALL]]
    params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)
    with LLM(str(model[0]), kv_cache_memory="16M", data_parallel_size=1, max_model_len=256) as llm:
        conversations = [[{"role": "user", "content": content_of(parts)}] for parts in chats]
        results = llm.chat(conversations, params)
        with pytest.raises(LLMError, match=r"messages\.0\.content\.0: .*not an image of a supported format"):
            llm.chat([{"role": "user", "content": content_of([b"hello"])}], params)
    for parts, result in zip(chats, results, strict=True):
        assert result.outputs[0].token_ids == model[1].answer(parts)
        assert result.prompt_token_ids == model[1].prompt(parts)["input_ids"][0].tolist()


def test_a_picture_from_the_web(service: RealService, oracle: Oracle) -> None:
    with WebPictures() as web:
        body, url = chat_body(["the cat"]), web.url_of(TALL)
        part = {"type": "image_url", "image_url": {"url": url}}
        body["messages"][0]["content"].append(part)
        found = service.post("/v1/chat/completions", json=body).json()
        assert tokens_of(found) == oracle.answer(["the cat", TALL])
        part["image_url"]["url"] = url.replace("127.0.0.1", "localhost")  # type: ignore[index]
        refused = service.post("/v1/chat/completions", json=body)
        assert refused.status_code == 400 and "localhost' are not allowed" in refused.text


@pytest.mark.parametrize(
    ("url", "param", "reason"),
    [
        ("file-none", WHERE.replace("image_url.url", "file_id"), "No such File object"),
        (data_url(b"hello"), WHERE, "not an image of a supported format"),
        (data_url(png(64, 64)[:700]), WHERE, "damaged"),
        (data_url(png_of(1 << 20, 1 << 20, b"")), WHERE, "at most 1000000 pixels"),
        (data_url(png_of(300, 1, bytes(901))), WHERE, "image processor refuses it"),
        ("file:///etc/passwd", WHERE, "outside the folder"),
        ("http://10.1.2.3/x.png", WHERE, "are not allowed here"),
        ("nonsense", WHERE, "must be a data, http or https URL"),
    ],
)
def test_bad_pictures_are_refused_by_the_part(
    url: str, param: str, reason: str, service: RealService
) -> None:
    is_file = url.startswith("file-")
    part = {"type": "image_url", **({"file_id": url} if is_file else {"image_url": {"url": url}})}
    message = {"role": "user", "content": [part]}
    answer = service.post("/v1/chat/completions", json={"model": "tiny", "messages": [message]})
    assert answer.status_code == (404 if is_file else 400)
    error = answer.json()["error"]
    assert error["param"] == param and reason in error["message"]


def test_too_many_pictures_and_too_long_prompts_are_refused(service: RealService) -> None:
    many = service.post("/v1/chat/completions", json=chat_body([SMALL] * 4))
    assert many.status_code == 400 and "at most 3 are allowed" in many.text
    assert many.json()["error"]["param"] == "messages.0.content.3.image_url.url"
    long = service.post("/v1/chat/completions", json=chat_body([WIDE, "the cat " * 130], max_tokens=1))
    assert long.status_code == 400 and "maximum context length" in long.text
    cut = service.post("/v1/chat/completions", json=chat_body([WIDE], truncate_prompt_tokens=5))
    assert cut.status_code == 400 and "cannot cut a prompt with images" in cut.text


def test_video_is_refused_by_name(service: RealService) -> None:
    part = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
    body = {"model": "tiny", "messages": [{"role": "user", "content": [part]}]}
    answer = service.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400 and "video is not supported" in answer.text


def test_the_model_lists_images(service: RealService) -> None:
    [card] = service.get("/v1/models").json()["data"]
    assert card["input_modalities"] == ["text", "image"]


def test_a_dead_encoder_is_replaced(service: RealService, oracle: Oracle) -> None:
    os.kill(service.find("image-encoder"), signal.SIGKILL)
    picture = png(60, 90, 21)
    for _ in range(3):  # the kill may meet the image
        answer = service.post("/v1/chat/completions", json=chat_body([picture, "x"]), timeout_s=START_S)
        if answer.status_code == 200:
            break
        assert answer.status_code == 503
    assert tokens_of(answer.json()) == oracle.answer([picture, "x"])


class Stream(threading.Thread):
    """Reads a streamed chat's tokens."""

    def __init__(self, service: RealService, parts: Parts, num_tokens: int) -> None:
        super().__init__(daemon=True)
        self.token_ids: list[int] = []
        self._url = f"{service.url}/v1/chat/completions"
        self._body = chat_body(parts, stream=True, max_tokens=num_tokens)
        self.start()

    def run(self) -> None:
        """Read to the end."""
        with httpx.stream("POST", self._url, json=self._body, timeout=START_S, trust_env=False) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[len("data: ") :])["choices"]:
                        self.token_ids += choice.get("token_ids") or []


def test_streams_continue_after_a_rank_was_killed(service: RealService, oracle: Oracle) -> None:
    """The front replays requests with the rows that it has. No picture is read or encoded again."""
    chats = [[png(56, 84, 31 + number), "the mat"] for number in range(4)]
    num_tokens = 180
    wanted = [tokens_of(chat(service, parts, max_tokens=num_tokens)) for parts in chats]
    assert wanted[0][:STEPS] == oracle.answer(chats[0])
    encoded = counter(service, 'wideep:images_total{outcome="encoded"}')
    streams = [Stream(service, parts, num_tokens) for parts in chats]
    wait_until(lambda: all(len(each.token_ids) >= 3 for each in streams), service.output)
    os.kill(service.engines()[1], signal.SIGKILL)
    assert any(len(each.token_ids) < num_tokens for each in streams), "all streams ended before the kill"
    for stream, token_ids in zip(streams, wanted, strict=True):
        stream.join(START_S)
        assert stream.token_ids == token_ids
    assert counter(service, 'wideep:images_total{outcome="encoded"}') == encoded
    wait_until(lambda: "rank 1 serves again" in service.output(), service.output, within_s=START_S)


def test_a_decode_pool_continues_prompts_with_pictures(model: tuple[Path, Oracle], tmp_path: Path) -> None:
    pools = ("--pools=prefill:1,decode:1", "--prefill-threshold=0", "--kv-offloading-size=64M")
    flags = ("--served-model-name", "tiny", "--max-model-len", "256")
    with RealService.serve(model[0], tmp_path / "log", *pools, *flags) as service:
        service.wait_ready()
        for parts in (["the cat", WIDE, "sat"], [TALL, WIDE, "on the mat"]):
            assert tokens_of(chat(service, parts)) == model[1].answer(parts)
        assert counter(service, 'wideep:request_moves_total{cause="hand_over"') == 2


def test_an_uploaded_picture_is_found_by_every_front(
    model: tuple[Path, Oracle], oracle: Oracle, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first-key\nsecond-key\n")
    flags = (
        "-dp",
        "1",
        "--served-model-name",
        "tiny",
        "--api-server-count",
        "2",
        "--api-key-file",
        str(keys),
    )
    with RealService.serve(model[0], tmp_path / "log", *flags) as service:
        service.wait_ready()

        def post(path: str, key: str, **body: Any) -> httpx.Response:
            headers = {"Authorization": f"Bearer {key}"}
            return httpx.post(f"{service.url}{path}", headers=headers, timeout=60, **body)

        form = {"data": {"purpose": "vision"}, "files": {"file": ("wide.png", WIDE)}}
        file_id = post("/v1/files", "first-key", **form).json()["id"]
        body = chat_body(["the cat"])
        body["messages"][0]["content"].insert(0, {"type": "input_image", "file_id": file_id})
        wanted = oracle.answer([WIDE, "the cat"])
        for _ in range(8):  # connections, which the kernel spreads over the fronts
            assert tokens_of(post("/v1/chat/completions", "first-key", json=body).json()) == wanted
            refused = post("/v1/chat/completions", "second-key", json=body)
            assert refused.status_code == 404 and "No such File object" in refused.json()["error"]["message"]
            assert refused.json()["error"]["param"] == "messages.0.content.0.file_id"
