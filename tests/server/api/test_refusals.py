"""Invalid requests: a 400 names the field and the remedy, and other requests are not disturbed.

One table for all endpoints. The texts are those that clients look for, including vLLM's (from its tests of refusals, 0.2x to
0.33). Further hostile requests are in tests/server/hard.
"""

import json
from typing import Any

import httpx
import openai
import pytest

from tests.support.models.tiny_tokenizer import MAX_LEN
from tests.support.service.front_process import FrontProcess

CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)
HELLO = [{"role": "user", "content": "hello"}]
NEEDED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO},
    COMPLETIONS: {"prompt": "hello"},
    RESPONSES: {"input": "hello"},
    MESSAGES: {"messages": HELLO, "max_tokens": 5},
    "/tokenize": {},
    "/detokenize": {},
    "/invocations": {},
}
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
OTHER = {"type": "function", "function": {"name": "other"}}
ITEM_TOOL = {"type": "function", "name": "get_weather"}
FORCED: dict[str, Any] = {"tools": [WEATHER], "tool_choice": "required"}
SCHEMA = "response_format.json_schema"
LENGTH = f"maximum context length is {MAX_LEN}"
NO_PROMPTS: tuple[Any, ...] = (
    None, 5, [], {}, "", [[]], ["a", 1], [1, "a"], [True], [-1], [99_999], [[1], "a"], ["a"] * 1000,
)  # fmt: skip
SINGLE: dict[str, list[tuple[str, Any]]] = {  # a field and an invalid value, which the message also names
    CHAT: [
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("min_p", 2),
        ("presence_penalty", 3),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("max_tokens", 0),
        ("max_tokens", "many"),
        ("n", 0),
        ("n", 10_000),
        ("seed", "x"),
        ("stop", 5),
        ("stop", [""]),
        ("stop", ["a"] * 1000),
        ("stop_token_ids", [-1]),
        ("top_logprobs", 21),
        ("top_logprobs", 2),  # without logprobs
        ("top_logprobs", -2),
        ("prompt_logprobs", -2),
        ("prompt_logprobs", 21),
        ("logprob_token_ids", [1]),
        ("stream", "perhaps"),
        ("messages", []),
        ("messages", "hello"),
        ("messages", HELLO * 10_001),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"1": "not_a_number"}),
        ("bad_words", [""]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [10_000]),
        ("truncate_prompt_tokens", -2),
        ("truncation_side", "middle"),
        ("stream_options", {"include_usage": True}),
        ("stream_options", {"include_usage": None}),
        ("response_format", {"type": "xml"}),
        ("response_format", "json"),
        ("guided_regex", "(a"),
        ("guided_regex", 5),
        ("guided_json", "{"),
        ("guided_json", 5),
        ("guided_choice", "yes"),
        ("guided_choice", ["yes", ""]),
        ("guided_grammar", "start: nothing\n"),
        ("model", 7),
        ("tools", "f"),
        ("parallel_tool_calls", "perhaps"),
        ("reasoning_effort", "huge"),
        ("functions", [{"name": "f"}]),
        ("priority", 3),
        ("prompt_embeds", "AAAA"),
        ("chat_template", "{{ messages }}"),
        ("use_beam_search", True),
    ],
    COMPLETIONS: [
        ("suffix", "x"),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("logprobs", 99),
        ("logprobs", -2),
        ("prompt_embeds", "AAAA"),
        *(("prompt", wrong) for wrong in NO_PROMPTS),
    ],
    RESPONSES: [
        ("max_output_tokens", 0),
        ("temperature", 1000),
        ("top_logprobs", 21),
        ("previous_response_id", 5),
    ],
}
# Fields about tokens, on /v1/completions.
OF_TOKENS: list[tuple[dict[str, Any], str, str]] = [
    ({"logit_bias": [1]}, "logit_bias", "object"),
    ({"logit_bias": {"bad1": 1, "2": 1, "-3": 1}}, "logit_bias", "'bad1', '-3'"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "not token ids"),
    ({"logit_bias": {"²": 1}}, "logit_bias", "not token ids"),
    ({"logit_bias": {"1": "much", "2": 101, "3": True, "4": None}}, "logit_bias", "'1', '2', '3', '4'"),
    ({"logit_bias": {"320": 1}}, "logit_bias", "vocabulary of 320"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "1024"),
    ({"allowed_token_ids": [320]}, "allowed_token_ids", "0 to 319"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "-1"),
    ({"logprob_token_ids": [3]}, "logprob_token_ids", "needs logprobs"),
    ({"logprob_token_ids": [999], "logprobs": 1}, "logprob_token_ids", "999"),
    ({"bad_words": ["ok", ""]}, "bad_words", "''"),
    ({"bad_words": ["  "]}, "bad_words", "character"),
    ({"bad_words": ["\ud800"]}, "bad_words", "ud800"),
    ({"bad_words": ["x" * 4096, "y" * 4097]}, "bad_words", "8192"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
    ({"best_of": 2}, "best_of", "n"),
    ({"best_of": [2]}, "best_of", "n"),
    ({"use_beam_search": True}, "use_beam_search", "not supported"),
    ({"length_penalty": 0.5}, "length_penalty", "not supported"),
    ({"priority": 1}, "priority", "--scheduling-policy priority"),
    ({"priority": "urgent"}, "priority", "int"),
    ({"priority": 0.5}, "priority", "int"),
    ({"priority": 2**63}, "priority", "9223372036854775807"),
    ({"cache_salt": ""}, "cache_salt", "at least 1 character"),
    ({"thinking_token_budget": 0}, "thinking_token_budget", "not supported"),
    ({"stream_options": {"include_usage": None}}, "stream_options", "stream=true"),
    ({"stream": True, "prompt_logprobs": 0}, "prompt_logprobs", "stream=false"),
    ({"n": 128, "prompt": ["a", "b"]}, "n", "128"),
]


NEVER_NEGATIVE = (
    "n",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "top_logprobs",
    "presence_penalty",
    "frequency_penalty",
)


def tool(name: Any = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


# Tools of a chat.
OF_TOOLS: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": "required", "tools": []}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": []}, "tool_choice"),
    ({"tools": ["f"]}, "tools.0.type"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"tools": [{"type": "function"}]}, "tools.0.function"),
    ({"tools": [tool("")]}, "tools.0.function.name"),
    ({"tools": [tool("a b")]}, "tools.0.function.name"),
    ({"tools": [tool(5)]}, "tools.0.function.name"),
    ({"tools": [tool(parameters=[])]}, "tools.0.function.parameters"),
    ({"tools": [tool(parameters=deep(70))]}, "tools.0"),
    ({"tools": [tool(description=5)]}, "tools.0.function.description"),
    ({"tools": [tool()], "tool_choice": 5}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": {"function": {"name": "f"}}}, "tool_choice"),
]
OF_INPUTS: list[tuple[Any, str]] = [
    ([], "input"),
    (5, "input"),
    ([{"role": "user", "content": "x"}] * 10_001, "input"),
    (["x"], "input.0"),
    ([{}], "input.0.type"),
    ([{"type": "item_reference", "id": "x"}], "input.0.type"),
    ([{"role": "pirate", "content": "x"}], "input.0.role"),
    ([{"role": "user"}], "input.0.content"),
    ([{"role": "user", "content": ["x"]}], "input.0.content.0.type"),
    ([{"role": "user", "content": [{"type": "input_image"}]}], "input.0.content.0.type"),
    ([{"role": "user", "content": [{"type": "input_text"}]}], "input.0.content.0.text"),
    *(
        ([{"role": role, "content": [part]}, {"role": "user", "content": "x"}], "input.0.content.0.type")
        for role in ("user", "system", "developer")
        for part in (
            {"type": "input_image", "image_url": "https://x/a.png"},
            {"type": "input_file", "file_id": "f"},
        )
    ),
    ([{"type": "function_call", "name": "f", "arguments": "{}"}], "input.0.call_id"),
    ([{"type": "function_call_output", "call_id": "c", "output": 5}], "input.0.output"),
    ([{"type": "reasoning", "content": "x"}], "input.0.content"),
    ([{"type": "reasoning", "summary": []}], "input"),
]
OF_RESPONSES: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function"}]}, "tools.0.name"),
    ({"tools": [{"type": "function", "name": "f"}], "tool_choice": {"type": "mcp"}}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.name"),
    *(
        ({name: value}, name)
        for name, value in [
            ("echo", True),
            ("conversation", "c"),
            ("prompt", {"id": "p"}),
            ("n", 2),
            ("prompt_logprobs", 0),
        ]
    ),
]
TOOL: dict[str, Any] = {"name": "add", "input_schema": {}}
OF_BLOCKS: list[tuple[str, Any, str]] = [
    ("user", "x", "messages.0.content.0"),
    ("user", {"text": "x"}, "messages.0.content.0"),
    ("user", {"type": "image", "source": {}}, "messages.0.content.0"),
    ("user", {"type": "tool_use", "id": "t", "name": "f", "input": {}}, "messages.0.content.0"),
    ("user", {"type": "text"}, "messages.0.content.0.text"),
    ("user", {"type": "tool_result", "content": "x"}, "messages.0.content.0.tool_use_id"),
    ("user", {"type": "tool_result", "tool_use_id": ""}, "messages.0.content.0.tool_use_id"),
    ("user", {"type": "tool_result", "tool_use_id": "t", "content": 5}, "messages.0.content.0.content"),
    ("assistant", {"type": "tool_use", "name": "f", "input": {}}, "messages.0.content.0.id"),
    ("assistant", {"type": "tool_use", "id": "t", "input": {}}, "messages.0.content.0.name"),
    ("assistant", {"type": "tool_use", "id": "t", "name": "f"}, "messages.0.content.0.input"),
    ("assistant", {"type": "thinking"}, "messages.0.content.0.thinking"),
    ("system", {"type": "image"}, "messages.0.content.0"),
]
OF_MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
]
ROWS: list[tuple[str, Any, str | None, str]] = [
    *((path, {field: value}, field, field) for path, rows in SINGLE.items() for field, value in rows),
    *((COMPLETIONS, fields, param, words) for fields, param, words in OF_TOKENS),
    *((CHAT, fields, param, "") for fields, param in OF_TOOLS),
    *((RESPONSES, {"input": given}, param, param.removesuffix(".type")) for given, param in OF_INPUTS),
    *((RESPONSES, fields, param, "") for fields, param in OF_RESPONSES),
    *(
        (MESSAGES, {"messages": [{"role": role, "content": [block]}]}, None, words)
        for role, block, words in OF_BLOCKS
    ),
    *((MESSAGES, fields, None, words) for fields, words in OF_MESSAGES),
    (CHAT, {"seed": -(2**63) - 1}, "seed", "greater_than_equal"),
    (CHAT, {"seed": 2**63}, "seed", "less_than_equal"),
    (CHAT, {"max_tokens": 2, "min_tokens": 3}, "min_tokens", "more than max_tokens (2)"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages.0.role", "missing"),
    (CHAT, {"messages": ["hello"]}, "messages.0", ""),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "text parts"),
    (CHAT, {"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content.0", "a type"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text", ""),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages.0.content.0.type",
        "supports only text",
    ),
    (CHAT, {"messages": [{"role": "pirate", "content": "x"}]}, "messages", "unknown role"),
    (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, "messages", "not valid Unicode"),
    (CHAT, {"messages": [{"role": "user", "content": "x " * 600}]}, "messages", LENGTH),
    (CHAT, {"messages": HELLO * (MAX_LEN + 1)}, "messages", LENGTH),
    (CHAT, {"max_tokens": MAX_LEN}, "max_tokens", LENGTH),
    (CHAT, {"add_generation_prompt": True, "continue_final_message": True}, "messages", ""),
    (CHAT, {"chat_template_kwargs": {"chat_template": "x"}}, "messages", "cannot set 'chat_template'"),
    (CHAT, {"truncate_prompt_tokens": MAX_LEN + 1}, "truncate_prompt_tokens", f"max_model_len ({MAX_LEN})"),
    (CHAT, {"logprob_token_ids": []}, "logprob_token_ids", "must not be an empty list"),
    (CHAT, {"logprob_token_ids": [100]}, "logprob_token_ids", "when using `logprob_token_ids`"),
    (CHAT, {"logit_bias": {"bad1": 50.0, "bad2": 20.0}}, "logit_bias", "'bad1', 'bad2'"),
    (CHAT, {"logit_bias": {"321": 1.0}}, "logit_bias", "321; its vocabulary of 320"),
    (CHAT, {"logprobs": True, "top_logprobs": -1, "stream": True}, "top_logprobs", "needs stream=false"),
    (CHAT, {"logprobs": True, "top_logprobs": -1, "n": 9}, "top_logprobs", "320 for each of"),
    (CHAT, {"tool_choice": "auto"}, "tool_choice", "When using `tool_choice`, `tools` must be set"),
    (CHAT, {"tool_choice": "required", "tools": None}, "tool_choice", "`tools` must be set"),
    (CHAT, {"tool_choice": NAMED}, "tool_choice", "`tools` must be set"),
    (CHAT, {"tools": [WEATHER], "tool_choice": {}}, "tool_choice", "an object"),
    (CHAT, {"tools": [WEATHER], "tool_choice": "bogus"}, "tool_choice", "'bogus'"),
    (CHAT, {"tools": [WEATHER], "tool_choice": OTHER}, "tool_choice", "'other'"),
    (CHAT, {"tools": [WEATHER, WEATHER]}, "tools.1.function.name", "two functions"),
    (CHAT, {"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name", "is missing"),
    (CHAT, {**FORCED, "guided_regex": "a"}, "guided_regex", "or tools, not both"),
    (
        CHAT,
        {"tools": [WEATHER], "tool_choice": NAMED, "structured_outputs": {"json": {"type": "object"}}},
        "structured_outputs",
        "structured outputs or tools, not both",
    ),
    (CHAT, {"response_format": {"type": "json_schema"}}, SCHEMA, "json_schema must be provided"),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        f"{SCHEMA}.schema",
        "JSON schema",
    ),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strnig"}}}},
        "response_format",
        "cannot be compiled",
    ),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"x-guidance": "abc"}}}},
        "response_format",
        "x-guidance must be an object",
    ),
    (CHAT, {"guided_choice": ["a"] * 10_001}, "guided_choice", "10000"),
    (CHAT, {"guided_regex": "a" * 300_000}, "guided_regex", "bytes"),
    (CHAT, {"guided_regex": "[.*", "stop": ["\n"]}, "guided_regex", "cannot be compiled"),
    (CHAT, {"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "both"),
    (CHAT, {"structured_outputs": 7}, "structured_outputs", "object"),
    (CHAT, {"structured_outputs": {"regex": {"1": "a"}}}, "structured_outputs.regex", "string"),
    (CHAT, {"structured_outputs": {"grammar": ""}}, "structured_outputs.grammar", "non-empty"),
    (CHAT, {"structured_outputs": {"choice": []}}, "structured_outputs.choice", "one or more"),
    (
        CHAT,
        {"structured_outputs": {"structural_tag": "{}"}},
        "structured_outputs.structural_tag",
        "not supported",
    ),
    (
        CHAT,
        {"structured_outputs": {"json": {"properties": {"a": "b"}}}},
        "structured_outputs.json",
        "compiled",
    ),
    (
        CHAT,
        {"structured_outputs": {"json": {}, "regex": ".*"}},
        "structured_outputs.regex",
        "You can only use one kind of constraints",
    ),
    (COMPLETIONS, {"prompt": None, "prompt_embeds": []}, "prompt", "Either prompt or prompt_embeds must be"),
    (COMPLETIONS, {"prompt": [999_999]}, "prompt", "out of vocabulary"),
    (COMPLETIONS, {"prompt": [[-1]]}, "prompt", "greater than or equal to 0"),
    (COMPLETIONS, {"prompt": [5] * MAX_LEN}, "prompt", LENGTH),
    (COMPLETIONS, {"prompt": [5] * 100_000}, "prompt", LENGTH),
    (COMPLETIONS, {"prompt": "y" * 100_000}, "prompt", LENGTH),
    (COMPLETIONS, {"prompt": ["a"] * 128, "logprobs": -1, "max_tokens": 30}, "logprobs", "than the 1000000"),
    (
        COMPLETIONS,
        {"prompt": [5] * 500, "n": 128, "prompt_logprobs": 20},
        "prompt_logprobs",
        "of 64000 tokens is more",
    ),
    (
        COMPLETIONS,
        {"prompt": [[5] * 500] * 128, "prompt_logprobs": 20},
        "prompt_logprobs",
        "of 64000 tokens is more",
    ),
    (COMPLETIONS, {"guided_json": '{"minimum": NaN}'}, "guided_json", "NaN"),
    (COMPLETIONS, {"guided_regex": "\ud800"}, "guided_regex", "not valid Unicode"),
    (RESPONSES, {"input": None}, "input", "non-empty list"),
    (RESPONSES, {"input": [{"type": "video"}]}, "input.0.type", "'video'"),
    (RESPONSES, {"input": "x" * 5000}, "input", LENGTH),
    (RESPONSES, {"instructions": "\ud800"}, "input", "not valid Unicode"),
    (RESPONSES, {"metadata": {"k": 5}}, "metadata.k", "a string"),
    (RESPONSES, {"background": True, "store": False}, "background", "only be used when `store` is true"),
    (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools.0.type", "'web_search'"),
    (RESPONSES, {"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name", "tools.0.name"),
    (RESPONSES, {"tools": [{"type": "function", "name": "f", "x": float("nan")}]}, None, "NaN is not JSON"),
    (RESPONSES, {"tool_choice": "required", "tools": []}, "tool_choice", "Tool choice 'required' must be"),
    (RESPONSES, {"tool_choice": ITEM_TOOL}, "tool_choice", "not found in 'tools' parameter"),
    (RESPONSES, {"tool_choice": {"type": "function"}, "tools": [ITEM_TOOL]}, "tool_choice.name", "not found"),
    (RESPONSES, {"seed": 2**63}, "seed", "less_than_equal"),
    (RESPONSES, {"reasoning": {"effort": "extreme"}}, "reasoning.effort", "reasoning.effort"),
    (RESPONSES, {"text": {"format": {"type": "xml"}}}, "text.format.type", "'xml'"),
    (
        RESPONSES,
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"$ref": "#/nowhere"}}}},
        "text.format",
        "text.format cannot be compiled",
    ),
    (
        RESPONSES,
        {
            "structured_outputs": {"regex": "a"},
            "text": {"format": {"type": "json_schema", "name": "x", "schema": {}}},
        },
        "structured_outputs",
        "Cannot specify both structured_outputs and text.format",
    ),
    *((CHAT, {"logprobs": True, field: -3}, field, field) for field in NEVER_NEGATIVE),
    *((COMPLETIONS, {field: -3}, field, field) for field in ("prompt_logprobs", "best_of")),
    (COMPLETIONS, {"prompt": [10**400]}, "prompt", "0 to 319"),
    (COMPLETIONS, {"allowed_token_ids": [-3]}, "allowed_token_ids", "-3"),
    (COMPLETIONS, {"logprobs": 1, "logprob_token_ids": [-3]}, "logprob_token_ids", "-3"),
    (COMPLETIONS, {"guided_choice": ["\udfff"]}, "guided_choice", "surrogate"),
    (COMPLETIONS, {"structured_outputs": {"json": {"const": "\ud800"}}}, "structured_outputs.json", ""),
    (CHAT, {"stream_options": {"include_usage": "maybe"}}, "stream_options.include_usage", "'maybe'"),
    (RESPONSES, {"top_logprobs": -3}, "top_logprobs", "top_logprobs"),
    ("/tokenize", {}, "prompt", "either prompt or messages"),
    ("/tokenize", {"prompt": "x", "messages": HELLO}, "prompt", "either"),
    ("/tokenize", {"prompt": 5}, "prompt", ""),
    ("/tokenize", {"prompt": "\ud800"}, "prompt", "Unicode"),
    ("/tokenize", {"prompt": "x" * ((1 << 20) + 1)}, "prompt", "characters"),
    ("/tokenize", {"messages": [{"role": "pirate", "content": "x"}]}, "messages", "unknown role"),
    (
        "/tokenize",
        {"messages": HELLO, "add_generation_prompt": True, "continue_final_message": True},
        "add_generation_prompt",
        "both",
    ),
    ("/detokenize", {}, "tokens", "missing"),
    *(("/detokenize", {"tokens": wrong}, "tokens", "tokens") for wrong in ([-1], [1, 99_999], "a", [2**70])),
    ("/invocations", {}, None, "Send messages"),
    ("/invocations", {"messages": []}, "messages", "at least 1"),
    ("/invocations", {"prompt": "x", "n": 0}, "n", "greater than"),
    (MESSAGES, {"max_tokens": None}, None, "max_tokens"),
    (MESSAGES, {"max_tokens": 0}, None, "max_tokens"),
    (MESSAGES, {"messages": []}, None, "messages"),
    (MESSAGES, {"messages": HELLO * 10_001}, None, "messages"),
    (MESSAGES, {"messages": [{"role": "pirate", "content": "x"}]}, None, "messages.0.role"),
    (MESSAGES, {"tools": [{"name": "f"}]}, None, "tools.0.input_schema"),
]


def post(front: FrontProcess, path: str, body: Any) -> Any:
    """Send a body. Lone surrogates in it are escaped."""
    content = json.dumps({**NEEDED[path], "model": "tiny", **body} if isinstance(body, dict) else body)
    return front.post(path, content=content, headers=front.headers | {"content-type": "application/json"})


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    ROWS,
    ids=[f"{path.rpartition('/')[2]}-{param}-{number}" for number, (path, _, param, _) in enumerate(ROWS)],
)
def test_what_is_wrong_is_a_400_that_names_the_field(
    front: FrontProcess, path: str, fields: Any, param: str | None, words: str
) -> None:
    response = post(front, path, fields)
    error = response.json()["error"]
    assert response.status_code == 400 and words in error["message"], error
    assert len(error["message"]) <= 2000
    if path == MESSAGES:
        assert error["type"] == "invalid_request_error"
    else:
        assert error == {"message": error["message"], "type": "BadRequestError", "param": param, "code": 400}


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"",
        b"[1]",
        b"nonsense",
        b"42",
        b"null",
        b'"this is not an object{{{"',
        b'{"model": "\xff"}',
        b"[" * 100_000,
        b'{"temperature": NaN}',
    ],
)
def test_a_body_that_is_no_json_object_is_a_400(front: FrontProcess, content: bytes) -> None:
    response = front.post(CHAT, content=content, headers=front.headers | {"content-type": "application/json"})
    assert response.status_code == 400 and response.json()["error"]["message"], response.text


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_number_that_is_none_is_a_400(front: FrontProcess, value: str) -> None:
    body = f'{{"model": "tiny", "messages": {json.dumps(HELLO)}, "temperature": {value}}}'
    response = front.post(CHAT, content=body, headers=front.headers | {"content-type": "application/json"})
    assert response.status_code == 400 and f"{value} is " in response.json()["error"]["message"]


def test_another_content_type_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError):
        client.chat.completions.create(
            model="tiny",
            messages=HELLO,  # type: ignore[arg-type]
            extra_headers={"Content-Type": "application/x-www-form-urlencoded"},
        )


@pytest.mark.parametrize(
    ("path", "field"),
    [(CHAT, "model"), ("/tokenize", "model"), ("/detokenize", "model"), (RESPONSES, "model")],
)
def test_an_unknown_model_is_a_404_that_lists_the_known_ones(
    front: FrontProcess, path: str, field: str
) -> None:
    for name in ("gpt-4", "", "m" * 9999):
        body: dict[str, Any] = {field: name, **({"prompt": "x"} if path == "/tokenize" else {"tokens": []})}
        response = post(front, path, body)
        error = response.json()["error"]
        assert (response.status_code, error["type"], error["param"]) == (404, "NotFoundError", "model")
        assert "'tiny', 'claude-alias'" in error["message"]


def test_an_unknown_response_is_a_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=r"Response with id .* not found"):
        client.responses.create(model="tiny", input="x", previous_response_id="resp_unknown")


def test_paths_and_methods_that_do_not_exist(front: FrontProcess) -> None:
    assert front.post("/v1/nothing", json={}).json()["error"]["type"] == "NotFoundError"
    assert front.post("/v1/models", json={}).status_code == 405
    for path, status in (("/v1/messages/nothing", 404), ("/v1/messages", 400)):
        response = front.post(
            path, content=b"{", headers=front.headers | {"content-type": "application/json"}
        )
        assert response.status_code == status and set(response.json()["error"]) == {"type", "message"}
    assert front.get("/v1/messages").status_code == 405
    assert front.get(CHAT).headers["allow"] == "POST"
    for method in ("HEAD", "OPTIONS", "DELETE"):
        assert httpx.request(method, front.url + CHAT, headers=front.headers).status_code == 405


def test_unknown_keys_and_nulls_are_accepted(front: FrontProcess) -> None:
    body: dict[str, Any] = {"messages": [{**HELLO[0], "name": "me", "odd": 1}], "max_tokens": 1}
    body |= {
        "temperature": None,
        "stop": None,
        "tools": [],
        "logit_bias": {},
        "response_format": {"type": "text"},
    }
    body |= {"made_up": {"deep": [1]}, "user": "u", "store": False, "tool_choice": "none", "best_of": 1}
    body |= {"use_beam_search": False, "model": None}
    response = post(front, CHAT, body)
    assert response.status_code == 200 and response.json()["model"] == "tiny", "the first served name"


def test_what_just_fits_is_served_after_all_this(client: openai.OpenAI) -> None:
    exact = client.completions.create(model="tiny", prompt=[5] * (MAX_LEN - 1))
    assert exact.usage is not None and exact.usage.total_tokens == MAX_LEN
