"""What vLLM's published tests of /v1/chat/completions assert of requests that are refused, of ours."""

from typing import Any

import openai
import pytest

from tests.server.api.endpoints.peer_chat import HELLO, KEY, NAMED, WEATHER, chat
from tests.support.front_process import FrontProcess


def refused(front: FrontProcess, **fields: Any) -> dict[str, Any]:
    response = front.post(
        "/v1/chat/completions", json={"model": "tiny", "messages": HELLO, **fields}, headers=KEY
    )
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


@pytest.mark.parametrize("streams", [True, False])
def test_too_many_logprobs_are_refused_and_the_server_still_works(
    client: openai.OpenAI, streams: bool
) -> None:
    with pytest.raises(openai.BadRequestError):
        chat(client, logprobs=True, top_logprobs=21, stream=streams)
    assert chat(client).choices[0].message.content is not None


@pytest.mark.parametrize("options", [{"include_usage": None}, {"include_usage": True}])
def test_stream_options_are_for_streams(front: FrontProcess, options: dict[str, Any]) -> None:
    assert refused(front, stream=False, stream_options=options)["param"] == "stream_options"


@pytest.mark.parametrize(("seed", "kind"), [(-(2**63) - 1, "greater_than_equal"), (2**63, "less_than_equal")])
def test_a_seed_has_64_bits(front: FrontProcess, seed: int, kind: str) -> None:
    error = refused(front, seed=seed)
    assert error["param"] == "seed" and kind in error["message"]


def test_add_generation_prompt_and_continue_final_message_exclude_each_other(front: FrontProcess) -> None:
    refused(front, add_generation_prompt=True, continue_final_message=True)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, None),
        ({"messages": []}, "messages"),
        ({"prompt": "x", "n": 0}, "n"),
        ({"messages": 5}, "messages"),
    ],
)
def test_a_wrong_invocation_names_the_field(front: FrontProcess, body: Any, param: str | None) -> None:
    response = front.post("/invocations", json=body, headers=KEY)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert front.post("/invocations", json=body).status_code == 401


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"response_format": {"type": "json_schema"}}, "json_schema must be provided"),
        ({"structured_outputs": {"regex": {"1": "Python"}}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": {}, "regex": ".*"}}, "You can only use one kind of constraints"),
        (
            {"structured_outputs": {"json": {"type": "object"}, "regex": ".*"}},
            "only use one kind of constraints",
        ),
        ({"structured_outputs": {"grammar": ""}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": 3}, "structured_outputs"),
        ({"structured_outputs": {"regex": "[.*"}, "stop": ["\n"]}, "structured_outputs.regex"),
        ({"guided_regex": "[.*", "stop": ["\n"]}, "guided_regex"),
        ({"structured_outputs": {"json": {"properties": {"foo": "bar"}}}}, "structured_outputs.json"),
        ({"guided_grammar": 'root ::= missing\ncolumn ::= "a" | "b"'}, "guided_grammar"),
        (
            {"tools": [WEATHER], "tool_choice": NAMED, "structured_outputs": {"json": {"type": "object"}}},
            "structured outputs or tools, not both",
        ),
        ({"tools": [WEATHER], "tool_choice": "required", "guided_regex": "a"}, "or tools, not both"),
        ({"tool_choice": "auto"}, "When using `tool_choice`, `tools` must be set."),
        ({"tool_choice": "required", "tools": None}, "When using `tool_choice`, `tools` must be set"),
        ({"tool_choice": NAMED}, "`tools` must be set"),
        ({"tools": [WEATHER], "tool_choice": {}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "bogus"}, "'bogus'"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "other"}}},
            "'other'",
        ),
        ({"logprob_token_ids": []}, "must not be an empty list"),
        ({"logprob_token_ids": [100]}, "when using `logprob_token_ids`"),
        ({"logprob_token_ids": "123", "logprobs": True}, "logprob_token_ids"),
        ({"logit_bias": {"bad1": 50.0, "bad2": 20.0}}, "'bad1', 'bad2'"),
        ({"logit_bias": {"321": 1.0}}, "321; its vocabulary of 320"),
        ({"logit_bias": {"1": "not_a_number"}}, "logit_bias"),
        ({"stop_token_ids": [321]}, "321; its vocabulary of 320"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"truncate_prompt_tokens": 513}, "is greater than max_model_len (512)"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"priority": 1}, "priority"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 0}, "n is wrong"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
    ],
)
def test_an_error_has_the_words_that_are_looked_for(
    front: FrontProcess, fields: dict[str, Any], words: str
) -> None:
    error = refused(front, **fields)
    assert words in error["message"] and error["type"] == "BadRequestError" and error["code"] == 400


@pytest.mark.parametrize("body", ['"this is not an object{{{"', '["not", "an", "object"]', "42", "null"])
def test_a_body_that_is_no_object_is_a_400(front: FrontProcess, body: str) -> None:
    response = front.post(
        "/v1/chat/completions", content=body, headers=KEY | {"content-type": "application/json"}
    )
    assert response.status_code == 400 and response.json()["error"]["message"]


def test_another_content_type_is_refused(front: FrontProcess, client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError):
        chat(client, extra_headers={"Content-Type": "application/x-www-form-urlencoded"})
