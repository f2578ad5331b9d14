"""Ollama's API as its clients use it: lines by default, one object on request, options, formats, thinking and calls."""

import json
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from scheduler.policy.request import FinishReason
from tests.support.models.tiny_tokenizer import MAX_LEN
from tests.support.service.front_process import FrontProcess

HELLO = [{"role": "user", "content": "hello"}]
COUNTS = ("total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration")
EVALS = ("eval_count", "eval_duration")
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


def said(word: str) -> list[dict[str, Any]]:
    """A conversation with one message."""
    return [{"role": "user", "content": word}]


def ask(front: FrontProcess, path: str, body: Mapping[str, Any], status: int = 200) -> httpx.Response:
    """Send a body as `curl -d` does, with a form's content type."""
    form = {**front.headers, "content-type": "application/x-www-form-urlencoded"}
    answer = front.post(path, content=json.dumps({"model": "tiny", **body}), headers=form)
    assert answer.status_code == status, answer.text
    return answer


def whole(front: FrontProcess, path: str, **body: Any) -> dict[str, Any]:
    """Return the object of an answer with "stream": false."""
    answer = ask(front, path, {"stream": False, **body})
    assert answer.headers["content-type"] == "application/json"
    content: dict[str, Any] = answer.json()
    return content


def lines(front: FrontProcess, path: str, **body: Any) -> list[dict[str, Any]]:
    """Return the objects of a stream, which is the default."""
    answer = ask(front, path, body)
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def test_a_chat_is_a_line_for_every_piece_and_one_that_counts(front: FrontProcess) -> None:
    front.script("o-chat", "one two three")
    *pieces, last = lines(front, "/api/chat", messages=said("o-chat"))
    assert "".join(each["message"]["content"] for each in pieces) == "one two three"
    assert all(each["done"] is False and each["message"]["role"] == "assistant" for each in pieces)
    assert {each["model"] for each in (*pieces, last)} == {"tiny"} and last["created_at"].endswith("Z")
    assert (last["done"], last["done_reason"], last["message"]["content"]) == (True, "stop", "")
    assert last["prompt_eval_count"] == len(front.asked("o-chat").prompt_ids)
    assert last["eval_count"] > 0 and last["eval_duration"] > 0
    assert last["total_duration"] >= last["prompt_eval_duration"] + last["eval_duration"] - 2, (
        "durations are in nanoseconds, rounded"
    )
    assert all(isinstance(last[name], int) for name in (*COUNTS, *EVALS))


def test_a_whole_answer_says_what_its_stream_says(front: FrontProcess) -> None:
    front.script("o-whole", "the cat")
    *pieces, last = lines(front, "/api/chat", messages=said("o-whole"))
    answer = whole(front, "/api/chat", messages=said("o-whole"))
    assert answer["message"]["content"] == "".join(each["message"]["content"] for each in pieces) == "the cat"
    assert answer.keys() == last.keys() and answer["eval_count"] == last["eval_count"]
    *pieces, last = lines(front, "/api/generate", prompt="o-whole")
    answer = whole(front, "/api/generate", prompt="o-whole")
    assert answer["response"] == "".join(each["response"] for each in pieces) == "the cat"
    assert answer.keys() == last.keys() and answer["done"] is True


def test_a_prompt_is_a_chat_unless_it_is_raw(front: FrontProcess) -> None:
    whole(front, "/api/generate", prompt="o-templated", system="be brief")
    text = front.decode(front.asked("o-templated").prompt_ids)
    assert text == "<|start|>system\nbe brief<|end|>\n<|start|>user\no-templated<|end|>\n<|start|>assistant\n"
    answer = whole(front, "/api/generate", prompt="o-raw", raw=True, options={"num_predict": 2})
    assert front.decode(front.asked("o-raw").prompt_ids) == "o-raw"
    assert (answer["eval_count"], answer["done_reason"]) == (2, "length")


def test_options_reach_the_rank(front: FrontProcess) -> None:
    options = {
        "temperature": 0.3,
        "top_p": 0.8,
        "top_k": 3,
        "min_p": 0.05,
        "seed": 7,
        "num_predict": 5,
        "repeat_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "num_ctx": 4096,  # concerns only how a runner uses its machine
        "mirostat": 0,
        "repeat_last_n": -1,
    }
    for word, path, body in (
        ("o-chat-options", "/api/chat", {"messages": said("o-chat-options")}),
        ("o-raw-options", "/api/generate", {"prompt": "o-raw-options", "raw": True}),
    ):
        whole(front, path, **body, options=options)
        asked = front.asked(word).params
        assert (asked.temperature, asked.top_p, asked.top_k, asked.min_p) == (0.3, 0.8, 3, 0.05)
        assert (asked.seed, asked.max_tokens, asked.repetition_penalty) == (7, 5, 1.1)
        assert (asked.presence_penalty, asked.frequency_penalty) == (0.5, 0.25)


@pytest.mark.parametrize("num_predict", [-1, -2, 10**6])
@pytest.mark.parametrize("raw", [False, True])
def test_no_end_and_one_beyond_the_context_are_the_context_s(
    front: FrontProcess, num_predict: int, raw: bool
) -> None:
    word = f"o-long{num_predict}{raw}"
    front.script(word, "short")
    whole(front, "/api/generate", prompt=word, raw=raw, options={"num_predict": num_predict, "seed": -1})
    asked = front.asked(word)
    assert len(asked.prompt_ids) + asked.params.max_tokens == MAX_LEN


def test_a_stop_ends_an_answer_and_the_most_tokens_are_a_length(front: FrontProcess) -> None:
    front.script("o-stop", "one END two", finish=FinishReason.LENGTH)
    answer = whole(front, "/api/chat", messages=said("o-stop"), options={"stop": ["END"]})
    assert (answer["message"]["content"], answer["done_reason"]) == ("one ", "stop")
    assert whole(front, "/api/chat", messages=said("o-stop"))["done_reason"] == "length"


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_a_format_is_a_structure(front: FrontProcess, path: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for word, form, kind in (("o-json", "json", "json_object"), ("o-schema", schema, "json_schema")):
        front.script(word, '{"a": 1}')
        body = {"messages": said(word)} if path == "/api/chat" else {"prompt": word}
        whole(front, path, **body, format=form)
        structure = front.asked(word).params.structure
        assert structure is not None and structure.kind == kind


def test_thinking_is_told_apart_and_can_be_turned_on_and_off(front: FrontProcess) -> None:
    front.script("o-think", "<think>hm, yes</think>\n\nfine")
    message = whole(front, "/api/chat", messages=said("o-think"))["message"]
    assert (message["thinking"].strip(), message["content"].strip()) == ("hm, yes", "fine")
    pieces = lines(front, "/api/generate", prompt="o-think")
    assert "".join(each.get("thinking", "") for each in pieces).strip() == "hm, yes"
    assert "".join(each["response"] for each in pieces).strip() == "fine"
    for think, opened in ((True, True), ("low", True), (False, False)):
        word = f"o-think-{think}"
        whole(front, "/api/chat", messages=said(word), think=think)
        assert front.decode(front.asked(word).prompt_ids).endswith("<think>\n") is opened


def test_calls_are_whole_objects_and_come_back_with_their_results(front: FrontProcess) -> None:
    front.script("o-call", '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>')
    body = {"messages": said("o-call"), "tools": [WEATHER]}
    message = whole(front, "/api/chat", **body)["message"]
    [call] = message["tool_calls"]
    assert call["function"] == {"index": 0, "name": "get_weather", "arguments": {"city": "Rome"}}
    streamed = [each["message"].get("tool_calls") for each in lines(front, "/api/chat", **body)]
    assert [calls[0]["function"] for calls in streamed if calls] == [call["function"]]
    result = {"role": "tool", "tool_name": "get_weather", "content": "o-sunny"}
    thought = {**message, "thinking": "I look"}
    whole(front, "/api/chat", messages=[*said("weather?"), thought, result], tools=[WEATHER])
    text = front.decode(front.asked("o-sunny").prompt_ids)
    assert "<think>I look</think>" in text and '<tool_call>get_weather{"city": "Rome"}</tool_call>' in text


def test_nothing_to_answer_asks_whether_the_model_is_loaded(front: FrontProcess) -> None:
    chat = ask(front, "/api/chat", {"messages": [], "keep_alive": "5m"}).json()
    assert (chat["done"], chat["done_reason"], chat["message"]["content"]) == (True, "load", "")
    assert ask(front, "/api/generate", {"keep_alive": -1}).json()["done_reason"] == "load"
    for forever in (0, "0", "0s"):
        error = ask(front, "/api/generate", {"keep_alive": forever}, 400).json()["error"]
        assert "stays in memory while the service runs" in error


def test_the_model_is_listed_and_shown(front: FrontProcess) -> None:
    entries = front.get("/api/tags").json()["models"]
    assert [entry["name"] for entry in entries] == ["tiny", "claude-alias"]
    assert all(len(entry["digest"]) == 64 and entry["details"]["family"] == "mixtral" for entry in entries)
    for asked in ({"model": "tiny:latest"}, {"name": "tiny"}):
        shown = front.post("/api/show", json=asked).json()
        assert shown["parameters"] == "top_k 7" and "<|start|>" in shown["template"]
        assert shown["model_info"]["mixtral.context_length"] == MAX_LEN
        assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert front.get("/api/version").json()["version"] == front.get("/version").json()["version"]
    assert front.get("/api/tags", headers={}).status_code == 401, "it needs a key, as at /v1/models"


def test_a_name_may_have_ollama_s_tag(front: FrontProcess) -> None:
    answer = whole(front, "/api/chat", model="tiny:latest", messages=HELLO, options={"num_predict": 1})
    assert answer["model"] == "tiny:latest", "clients look for the name that they sent"


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/api/chat", {"model": "other", "messages": HELLO}, 404, "The model 'other' does not exist"),
        ("/api/chat", {"model": None, "messages": HELLO}, 400, "model is invalid"),
        ("/api/chat", {"messages": [{**HELLO[0], "images": ["iVBO"]}]}, 400, "messages.0.images: this model supports only text, because it has no image tower"),
        ("/api/chat", {"messages": [{**HELLO[0], "images": [7]}]}, 400, "messages.0.images must be a list of base64 texts"),
        ("/api/chat", {"messages": HELLO, "images": ["iVBO"]}, 400, "images is not supported: send images in a message"),
        ("/api/chat", {"messages": [{"content": "x"}]}, 400, "messages.0.role is missing"),
        ("/api/chat", {"messages": "hello"}, 400, "messages is invalid"),
        ("/api/chat", {"messages": HELLO, "logprobs": True}, 400, "logprobs is not supported"),
        ("/api/chat", {"messages": HELLO, "format": "xml"}, 400, "format must be 'json' or a JSON schema"),
        ("/api/chat", {"messages": HELLO, "format": {"type": "none"}}, 400, "format"),
        ("/api/chat", {"messages": HELLO, "think": "hard"}, 400, "think must be true, false or one of low"),
        ("/api/chat", {"messages": HELLO, "options": {"temprature": 1}}, 400, "options.temprature is unknown"),
        ("/api/chat", {"messages": HELLO, "options": {"mirostat": 2}}, 400, "options.mirostat is 2; this server"),
        ("/api/chat", {"messages": HELLO, "options": {"top_p": 7}}, 400, "options.top_p is invalid"),
        ("/api/chat", {"messages": HELLO, "options": {"repeat_penalty": 0}}, 400, "options.repeat_penalty is invalid"),
        ("/api/chat", {"messages": HELLO, "options": {"num_predict": 0}}, 400, "options.num_predict is invalid"),
        ("/api/chat", {"messages": HELLO, "options": {"stop": [""]}}, 400, "options.stop contains an empty string"),
        ("/api/chat", {"messages": HELLO, "tools": [{"type": "x"}]}, 400, "tools.0"),
        ("/api/generate", {"prompt": "x", "images": ["iVBO"]}, 400, "images: this model supports only text, because it has no image tower"),
        ("/api/generate", {"prompt": "x", "images": "iVBO"}, 400, "images must be a list of base64 texts"),
        ("/api/generate", {"prompt": "x", "raw": True, "images": ["iVBO"]}, 400, "images needs the chat template"),
        ("/api/generate", {"prompt": "x", "suffix": "y"}, 400, "suffix is not supported"),
        ("/api/generate", {"prompt": "x", "template": "{{ .Prompt }}"}, 400, "template is not supported"),
        ("/api/generate", {"prompt": "x", "context": [1, 2]}, 400, "context is not supported"),
        ("/api/generate", {"prompt": "x", "raw": True, "system": "y"}, 400, "system needs the chat template"),
        ("/api/generate", {"prompt": "x" * 9000}, 400, "maximum context length"),
        ("/api/generate", {"prompt": "x", "raw": True, "options": {"seed": "y"}}, 400, "options.seed is invalid"),
        ("/api/show", {"model": ""}, 400, "model is missing"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_a_text_that_names_it(
    front: FrontProcess, path: str, body: dict[str, Any], status: int, words: str
) -> None:
    error = ask(front, path, body, status).json()
    assert (error.keys() == {"error"} and error["error"].startswith(words)) or words in error["error"], error


@pytest.mark.parametrize(
    ("method", "path", "words"),
    [
        ("POST", "/api/embed", "This server does not support embeddings: its model generates text."),
        ("POST", "/api/embeddings", "This server does not support embeddings: its model generates text."),
        ("POST", "/api/pull", "This server serves only the model that it was started with, 'tiny'; models are not pulled here."),
        ("POST", "/api/push", "models are not pushed here."),
        ("POST", "/api/create", "models are not created here."),
        ("POST", "/api/blobs/sha256:29fd", "models are not created here."),
        ("POST", "/api/copy", "models are not copied here."),
        ("DELETE", "/api/delete", "models are not deleted here."),
    ],
)  # fmt: skip
def test_what_is_not_served_is_one_sentence(front: FrontProcess, method: str, path: str, words: str) -> None:
    answer = httpx.request(method, front.url + path, json={"model": "x"}, headers=front.headers)
    assert answer.status_code == 400 and answer.json().keys() == {"error"}
    assert answer.json()["error"].endswith(words)


def test_the_one_model_is_in_memory_for_ever(front: FrontProcess) -> None:
    [running] = front.get("/api/ps").json()["models"]
    [tagged, _] = front.get("/api/tags").json()["models"]
    assert running["name"] == running["model"] == "tiny" and running["digest"] == tagged["digest"]
    assert (running["size_vram"], running["context_length"]) == (0, MAX_LEN)
    assert running["expires_at"] > "9999" and running["details"] == tagged["details"]


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_the_root_says_what_ollama_says(front: FrontProcess, method: str) -> None:
    answer = httpx.request(method, front.url + "/")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    assert answer.text == ("Ollama is running" if method == "GET" else "")
    assert answer.headers["content-length"] == str(len("Ollama is running"))


def test_the_root_sends_a_browser_to_the_dashboard(front: FrontProcess) -> None:
    answer = httpx.get(front.url + "/", headers={"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    assert (answer.status_code, answer.headers["location"]) == (307, "dashboard")
    icon = httpx.get(front.url + "/favicon.ico")
    assert (icon.status_code, icon.headers["content-type"]) == (200, "image/svg+xml")


def test_what_ollama_has_no_shape_for_is_a_text_too(front: FrontProcess) -> None:
    assert front.post("/api/other", json={"model": "x"}).json() == {
        "error": "There is no endpoint /api/other. GET /docs lists the endpoints."
    }
    assert ask(front, "/api/chat", {}).json()["done_reason"] == "load"
    refused = front.post("/api/chat", content="{", headers=front.headers)
    assert refused.status_code == 400 and "not valid JSON" in refused.json()["error"]
