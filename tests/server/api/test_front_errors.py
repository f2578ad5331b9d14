"""Bad input: the right status, the field's name, words that say what to do, and nobody else is disturbed."""

import json
from typing import Any

import openai
import pytest

from tests.support.front_process import FrontProcess
from tests.support.tiny_tokenizer import MAX_LEN

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


def refusal(front: FrontProcess, path: str, body: Any, **how: Any) -> tuple[int, dict[str, Any]]:
    response = front.post(path, json=body, **how)
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == response.status_code
    return response.status_code, error


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"),
        ("temperature", -0.1),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("min_p", 2),
        ("presence_penalty", 3),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("max_tokens", 0),
        ("max_completion_tokens", -5),
        ("max_tokens", "many"),
        ("n", 0),
        ("n", 10_000),
        ("seed", "x"),
        ("seed", 2**70),
        ("stop", 5),
        ("stop", [""]),
        ("stop", ["a"] * 1000),
        ("stop_token_ids", [10_000]),
        ("min_tokens", -1),
        ("top_logprobs", 21),
        ("top_logprobs", 2),
        ("stream", "perhaps"),
        ("messages", []),
        ("messages", "hello"),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"5": 101}),
        ("bad_words", [""]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [10_000]),
        ("truncate_prompt_tokens", -2),
        ("truncation_side", "middle"),
        ("priority", 3),
        ("stream_options", {"include_usage": True}),
        ("functions", [{"name": "f"}]),
        ("response_format", {"type": "xml"}),
        ("guided_regex", "(a"),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 21),
        ("logprob_token_ids", [1]),
        ("model", 7),
    ],
)
def test_a_wrong_value_is_a_400_that_names_the_field(front: FrontProcess, field: str, value: Any) -> None:
    status, error = refusal(front, CHAT, {"model": "tiny", "messages": HELLO, field: value})
    assert (status, error["param"], error["type"]) == (400, field, "BadRequestError")
    assert field in error["message"]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": "x"}, "messages.0.role"),
        ({"role": "user", "content": 5}, "messages.0.content"),
        ({"role": "user", "content": ["x"]}, "messages.0.content.0"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages.0.content.0.text"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages.0.content.0.type",
        ),
        ({"role": "pirate", "content": "x"}, "messages"),
        ({"role": "user", "content": "\ud800"}, "messages"),
        ("hello", "messages.0"),
    ],
)
def test_a_wrong_message_is_a_400_that_says_where(front: FrontProcess, message: Any, param: str) -> None:
    body = json.dumps({"model": "tiny", "messages": [message]})
    response = front.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "prompt",
    [None, 5, [], {}, "", [[]], ["a", 1], [1, "a"], [True], [-1], [99_999], [[1], "a"], ["a"] * 1000],
)
def test_a_wrong_prompt_is_a_400(front: FrontProcess, prompt: Any) -> None:
    status, error = refusal(front, COMPLETIONS, {"model": "tiny", "prompt": prompt})
    assert (status, error["param"]) == (400, "prompt")


@pytest.mark.parametrize(
    ("field", "value"),
    [("suffix", "x"), ("best_of", 3), ("max_tokens", 0), ("logprobs", 99), ("use_beam_search", True)],
)
def test_what_completions_cannot_do_is_said(front: FrontProcess, field: str, value: Any) -> None:
    body = {"model": "tiny", "prompt": "x", "logprobs": 1, field: value}
    status, error = refusal(front, COMPLETIONS, body)
    assert (status, error["param"]) == (400, field)


@pytest.mark.parametrize(
    "content", [b"{", b"", b"[1]", b"nonsense", b'{"model": "\xff"}', b"[" * 100_000, b'{"temperature": NaN}']
)
def test_a_body_that_is_not_a_json_object_is_a_400(front: FrontProcess, content: bytes) -> None:
    response = front.post(CHAT, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"]


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_number_that_is_none_is_a_400(front: FrontProcess, value: str) -> None:
    body = f'{{"model": "tiny", "messages": {json.dumps(HELLO)}, "temperature": {value}}}'
    response = front.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "temperature")


def test_a_prompt_that_is_too_long_says_maximum_context_length(
    front: FrontProcess, client: openai.OpenAI
) -> None:
    for call in (
        lambda: client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x " * 600}]
        ),
        lambda: client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=MAX_LEN),  # type: ignore[arg-type]
        lambda: client.completions.create(model="tiny", prompt=[5] * MAX_LEN),
        lambda: client.completions.create(model="tiny", prompt="y" * 100_000),
    ):
        with pytest.raises(openai.BadRequestError, match=f"maximum context length is {MAX_LEN}"):
            call()
    exact = client.completions.create(model="tiny", prompt=[5] * (MAX_LEN - 1))
    assert exact.usage is not None and exact.usage.total_tokens == MAX_LEN, "what just fits is served"


def test_min_tokens_over_max_tokens_is_a_400(front: FrontProcess) -> None:
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 2, "min_tokens": 3}
    assert refusal(front, CHAT, body)[1]["param"] == "min_tokens"


def test_an_unknown_model_is_a_404_that_lists_the_known_ones(front: FrontProcess) -> None:
    for model in ("gpt-4", "\ud800", ""):
        content = json.dumps({"model": model, "messages": HELLO})
        response = front.post(CHAT, content=content, headers={"content-type": "application/json"})
        error = response.json()["error"]
        if model == "\ud800":  # not a string in JSON's eyes either
            assert response.status_code in (400, 404)
            continue
        assert (response.status_code, error["type"], error["param"]) == (404, "NotFoundError", "model")
        assert "'tiny', 'org/tiny-alias'" in error["message"]


def test_no_model_is_the_first_served_one(front: FrontProcess) -> None:
    assert front.post(CHAT, json={"messages": HELLO, "max_tokens": 1}).json()["model"] == "tiny"


def test_unknown_keys_and_nulls_are_accepted(front: FrontProcess) -> None:
    body = {"model": "tiny", "messages": [{**HELLO[0], "name": "me", "odd": 1}], "max_tokens": 1}
    body |= {
        "temperature": None,
        "stop": None,
        "tools": [],
        "logit_bias": {},
        "response_format": {"type": "text"},
    }
    body |= {"made_up": {"deep": [1]}, "user": "u", "store": False, "tool_choice": "none", "best_of": 1}
    assert front.post(CHAT, json=body).status_code == 200


def test_paths_and_methods_that_do_not_exist(front: FrontProcess) -> None:
    assert refusal(front, "/v1/nothing", {})[1]["type"] == "NotFoundError"
    assert refusal(front, "/v1/models", {})[0] == 405


def test_a_chat_template_may_not_come_from_the_client(front: FrontProcess) -> None:
    body = {"model": "tiny", "messages": HELLO, "chat_template": "{{ messages }}"}
    assert refusal(front, CHAT, body)[1]["param"] == "chat_template"
    body = {"model": "tiny", "messages": HELLO, "chat_template_kwargs": {"chat_template": "x"}}
    assert refusal(front, CHAT, body)[0] == 400


def test_after_all_this_a_good_request_is_answered(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("e-after", "fine")
    answer = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "e-after"}])
    assert answer.choices[0].message.content == "fine"
