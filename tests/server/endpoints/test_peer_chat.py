"""What vLLM's published tests of /v1/chat/completions assert, of ours: whoever changes servers should not notice.

After tests/entrypoints/openai/chat_completion and tests/tool_use of vLLM 0.2x; what depends on a real model is left out.
"""

import json
from typing import Any

import openai
import pytest

from tests.support.front_process import FrontProcess

KEY = {"Authorization": "Bearer sesame"}
HELLO: list[Any] = [
    {"role": "system", "content": "you are a helpful assistant"},
    {"role": "user", "content": "what is 1+1?"},
]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather",
        "parameters": {"type": "object", "properties": {"location": {"type": "string"}}},
    },
}
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "get_weather"}}


def chat(client: openai.OpenAI, messages: Any = HELLO, **how: Any) -> Any:
    return client.chat.completions.create(
        **{"model": "tiny", "messages": messages, "max_completion_tokens": 5, **how}
    )


def refused(front: FrontProcess, **fields: Any) -> dict[str, Any]:
    response = front.post(
        "/v1/chat/completions", json={"model": "tiny", "messages": HELLO, **fields}, headers=KEY
    )
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def said_of(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize(("wanted", "num_top"), [(False, None), (True, 0), (True, 5), ("true", 20)])
def test_logprobs_are_told_as_wanted(client: openai.OpenAI, wanted: Any, num_top: int | None) -> None:
    choice = chat(client, logprobs=wanted, top_logprobs=num_top).choices[0]
    if not wanted:
        assert choice.logprobs is None
        return
    assert len(choice.logprobs.content) == 5
    assert all(len(entry.top_logprobs) == num_top for entry in choice.logprobs.content)
    assert all(entry.logprob >= -9999.0 for entry in choice.logprobs.content)


@pytest.mark.parametrize("streams", [True, False])
def test_too_many_logprobs_are_refused_and_the_server_still_works(
    client: openai.OpenAI, streams: bool
) -> None:
    with pytest.raises(openai.BadRequestError):
        chat(client, logprobs=True, top_logprobs=21, stream=streams)
    assert chat(client).choices[0].message.content is not None


@pytest.mark.parametrize("count", [0, 1, 2])
def test_prompt_logprobs_have_at_most_one_more_than_asked_for(client: openai.OpenAI, count: int) -> None:
    told = chat(client, extra_body={"prompt_logprobs": count}).prompt_logprobs
    assert told[0] is None and len(told) > 10
    assert all(max(count, 1) <= len(position) <= count + 1 for position in told[1:])
    assert set(told[1].popitem()[1]) == {"logprob", "rank", "decoded_token"}


def test_no_prompt_logprobs_unless_asked_for(client: openai.OpenAI) -> None:
    assert chat(client).prompt_logprobs is None
    with pytest.raises(openai.BadRequestError):
        chat(client, extra_body={"prompt_logprobs": -1})


def test_a_session_counts_its_tokens(front: FrontProcess, client: openai.OpenAI) -> None:
    answer = chat(client)
    usage = answer.usage
    assert (usage.completion_tokens, usage.total_tokens) == (5, usage.prompt_tokens + 5)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.tool_calls is None, "absent where there are none"
    history = [*HELLO, {"role": "assistant", "content": answer.choices[0].message.content}]
    assert chat(client, [*history, *said_of("as JSON")]).choices[0].message.role == "assistant"


def test_a_stream_s_last_chunk_has_text_and_the_reason(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("p-last", "one two three")
    whole = chat(client, said_of("p-last"), max_completion_tokens=10).choices[0]
    chunks = list(chat(client, said_of("p-last"), max_completion_tokens=10, stream=True))
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + [whole.finish_reason]
    assert chunks[-1].choices[0].delta.content
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)


def test_usage_grows_from_chunk_to_chunk(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("p-grows", "abcdefghij")
    options = {"include_usage": True, "continuous_usage_stats": True}
    last = 0
    for chunk in chat(
        client, said_of("p-grows"), max_completion_tokens=10, stream=True, stream_options=options
    ):
        usage = chunk.usage
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        grows = usage.completion_tokens > last or last == 0
        assert grows or (not chunk.choices and usage.completion_tokens == last)
        last = usage.completion_tokens
    assert last == len(front.encode("abcdefghij"))


def test_usage_comes_last_or_not_at_all(client: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": False}
    *chunks, last = chat(client, stream=True, stream_options=options)
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == [] and last.usage.completion_tokens == 5
    for options in ({"include_usage": False}, {}, {"include_usage": False, "continuous_usage_stats": True}):
        assert all(chunk.usage is None for chunk in chat(client, stream=True, stream_options=options))


@pytest.mark.parametrize("options", [{"include_usage": None}, {"include_usage": True}])
def test_stream_options_are_for_streams(front: FrontProcess, options: dict[str, Any]) -> None:
    assert refused(front, stream=False, stream_options=options)["param"] == "stream_options"


@pytest.mark.parametrize(("seed", "kind"), [(-(2**63) - 1, "greater_than_equal"), (2**63, "less_than_equal")])
def test_a_seed_has_64_bits(front: FrontProcess, seed: int, kind: str) -> None:
    error = refused(front, seed=seed)
    assert error["param"] == "seed" and kind in error["message"]


def test_extra_keys_and_parts_are_taken(client: openai.OpenAI) -> None:
    extra = [{"role": "user", "content": "what is 1+1?", "extra_field": "0"}]
    assert chat(client, extra, extra_body={"min_characters": 10}).choices[0].message.content is not None
    parts = [{"role": "user", "content": [{"type": "text", "text": "what is 1+1?"}]}]
    assert chat(client, parts).choices[0].message.content == chat(client, extra).choices[0].message.content


@pytest.mark.parametrize("echo", [True, False])
@pytest.mark.parametrize("streams", [True, False])
def test_an_echo_begins_with_the_message_that_is_continued(
    front: FrontProcess, client: openai.OpenAI, echo: bool, streams: bool
) -> None:
    saying = f"An apple a day keeps p-echo{echo}{streams}"
    front.script(f"p-echo{echo}{streams}", " the doctor away")
    wish = {"echo": echo, "continue_final_message": True, "add_generation_prompt": False}
    messages = [*HELLO, {"role": "assistant", "content": saying}]
    answer = chat(client, messages, max_completion_tokens=30, stream=streams, extra_body=wish)
    if streams:
        content = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
    else:
        content = answer.choices[0].message.content
    assert content == (saying if echo else "") + " the doctor away"


def test_an_echo_never_repeats_the_user(client: openai.OpenAI) -> None:
    wished = chat(client, extra_body={"echo": True}).choices[0].message.content
    assert wished == chat(client).choices[0].message.content


def test_add_generation_prompt_and_continue_final_message_exclude_each_other(front: FrontProcess) -> None:
    refused(front, add_generation_prompt=True, continue_final_message=True)


def test_choices_come_in_order_and_each_streams_its_own(front: FrontProcess, client: openai.OpenAI) -> None:
    answer = chat(client, n=3, seed=42, temperature=0.7)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert all(choice.message.content for choice in answer.choices)
    shown: dict[int, str] = {}
    for chunk in chat(client, n=2, stream=True):
        assert len(chunk.choices) == 1
        choice = chunk.choices[0]
        shown[choice.index] = shown.get(choice.index, "") + (choice.delta.content or "")
    assert set(shown) == {0, 1} and all(shown.values())


def test_invocations_answer_like_the_endpoint_itself(front: FrontProcess) -> None:
    body = {"model": "tiny", "messages": HELLO, "max_completion_tokens": 5, "temperature": 0.0}
    chats = [
        front.post(path, json=body, headers=KEY).json() for path in ("/v1/chat/completions", "/invocations")
    ]
    assert chats[0].keys() == chats[1].keys() and chats[0]["choices"] == chats[1]["choices"]
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 5, "temperature": 0.0}
    texts = [front.post(path, json=body, headers=KEY).json() for path in ("/v1/completions", "/invocations")]
    assert texts[0].keys() == texts[1].keys() and texts[0]["choices"] == texts[1]["choices"]


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


def test_no_tool_choice_is_as_null(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script(
        "p-null", '<tool_call>\n{"name": "get_weather", "arguments": {"location": "Paris"}}\n</tool_call>'
    )
    for choice in ({}, {"tool_choice": None}):
        answer = chat(client, said_of("p-null"), tools=[WEATHER], max_completion_tokens=200, **choice)
        assert answer.choices[0].finish_reason == "tool_calls"
    assert chat(client, extra_body={"tool_choice": None, "structured_outputs": {"regex": "a+"}}).choices


def test_ids_and_logprobs_line_up(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("p-ids", "I love cats 🐱")
    wish = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    answer = chat(client, said_of("p-ids"), logprobs=True, max_completion_tokens=60, extra_body=wish)
    choice = answer.choices[0]
    names = [int(entry.token.removeprefix("token_id:")) for entry in choice.logprobs.content]
    assert names == choice.token_ids and front.decode(names) == choice.message.content
    assert "p-ids" in front.decode(answer.prompt_token_ids)
    first, *others = chat(
        client, said_of("p-ids"), stream=True, max_completion_tokens=60, extra_body={"return_token_ids": True}
    )
    assert first.prompt_token_ids == answer.prompt_token_ids
    assert not any("prompt_token_ids" in chunk.model_dump() for chunk in others)
    told = [
        token for chunk in [first, *others] for token in chunk.choices[0].model_dump().get("token_ids") or ()
    ]
    assert told == choice.token_ids


def test_logprobs_of_chosen_ids_have_the_sampled_token_too(client: openai.OpenAI) -> None:
    wish = {"logprob_token_ids": [100, 200, 250], "return_tokens_as_token_ids": True}
    answer = chat(client, logprobs=True, top_logprobs=3, max_completion_tokens=1, extra_body=wish)
    [entry] = answer.choices[0].logprobs.content
    assert entry.token in {each.token for each in entry.top_logprobs}


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_prompt_is_truncated_on_the_side_that_is_said(client: openai.OpenAI, side: str) -> None:
    whole = chat(client, extra_body={"return_token_ids": True}).prompt_token_ids
    wish = {"return_token_ids": True, "truncate_prompt_tokens": 4, "truncation_side": side}
    cut = chat(client, max_completion_tokens=1, extra_body=wish).prompt_token_ids
    assert cut == (whole[:4] if side == "right" else whole[-4:])


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("shown", [True, False, None])
def test_reasoning_is_counted_whether_it_is_shown_or_not(
    front: FrontProcess, client: openai.OpenAI, streams: bool, shown: bool | None
) -> None:
    front.script("p-reason", "<think>hm, so and so</think>\n\ntwo")
    wish = {} if shown is None else {"include_reasoning": shown}
    how: dict[str, Any] = {"max_completion_tokens": 60, "extra_body": wish}
    if streams:
        chunks = list(
            chat(client, said_of("p-reason"), stream=True, stream_options={"include_usage": True}, **how)
        )
        usage = chunks[-1].usage
        deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
        reasoning = "".join(getattr(delta, "reasoning", None) or "" for delta in deltas)
        content = "".join(delta.content or "" for delta in deltas)
    else:
        answer = chat(client, said_of("p-reason"), **how)
        usage, message = answer.usage, answer.choices[0].message
        reasoning, content = message.reasoning or "", message.content
    assert content.strip() == "two" and bool(reasoning) is (shown is not False)
    num_thoughts = len(front.encode("hm, so and so"))
    assert num_thoughts <= usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens


def test_effort_none_turns_thinking_off_for_the_template(front: FrontProcess, client: openai.OpenAI) -> None:
    for effort in ("none", "low", "high"):
        assert chat(client, reasoning_effort=effort).choices


@pytest.mark.parametrize("streams", [True, False])
def test_a_call_s_arguments_are_json_and_the_same_in_a_stream(
    front: FrontProcess, client: openai.OpenAI, streams: bool
) -> None:
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"location": "Dallas, TX"}}\n</tool_call>'
    front.script("p-call", f"{call}\n{call}")
    answer = chat(client, said_of("p-call"), tools=[WEATHER], max_completion_tokens=300, stream=streams)
    calls: list[tuple[str, str, str]] = []
    if streams:
        for choice in (choice for chunk in answer for choice in chunk.choices):
            assert not choice.delta.tool_calls or len(choice.delta.tool_calls) == 1
            for each in choice.delta.tool_calls or ():
                if each.id:
                    calls.append((each.id, each.function.name, ""))
                head = calls[each.index]
                calls[each.index] = (*head[:2], head[2] + (each.function.arguments or ""))
            assert choice.finish_reason in (None, "tool_calls")
    else:
        message = answer.choices[0].message
        calls = [(each.id, each.function.name, each.function.arguments) for each in message.tool_calls]
        assert answer.choices[0].finish_reason == "tool_calls"
    assert len({call_id for call_id, _, _ in calls}) == 2 and all(
        len(call_id) > 16 for call_id, _, _ in calls
    )
    assert [name for _, name, _ in calls] == ["get_weather"] * 2
    assert [json.loads(text) for _, _, text in calls] == [{"location": "Dallas, TX"}] * 2


@pytest.mark.parametrize("arguments", ["{}", ""])
def test_a_call_without_arguments_goes_back_into_the_history(client: openai.OpenAI, arguments: str) -> None:
    call = {"id": "call_12345678901234567", "type": "function"}
    history = [
        *HELLO,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{**call, "function": {"name": "get_weather", "arguments": arguments}}],
        },
        {"role": "tool", "tool_call_id": call["id"], "content": "98 degrees"},
    ]
    answer = chat(client, history, tools=[WEATHER])
    assert answer.choices[0].finish_reason != "tool_calls" and answer.choices[0].message.content is not None


def test_a_named_call_has_empty_content(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("p-named", '{"location": "Paris"}')
    how: dict[str, Any] = {"tools": [WEATHER], "tool_choice": NAMED, "max_completion_tokens": 50}
    message = chat(client, said_of("p-named"), **how).choices[0].message
    assert message.content == "" and json.loads(message.tool_calls[0].function.arguments) == {
        "location": "Paris"
    }
    reasons = []
    for chunk in chat(client, said_of("p-named"), stream=True, **how):
        assert not chunk.choices[0].delta.content
        reasons += [chunk.choices[0].finish_reason] if chunk.choices[0].finish_reason else []
    assert len(reasons) == 1


def test_a_call_that_is_cut_off_before_its_name_is_none(client: openai.OpenAI) -> None:
    choice = chat(client, tools=[WEATHER], tool_choice="required", max_completion_tokens=1).choices[0]
    assert choice.finish_reason == "length" and choice.message.tool_calls is None


def test_the_model_s_card_has_vllm_s_fields(client: openai.OpenAI) -> None:
    card = client.models.list().data[0].model_dump()
    assert set(card) >= {
        "id",
        "object",
        "created",
        "owned_by",
        "root",
        "parent",
        "max_model_len",
        "permission",
    }
    assert card["permission"][0]["object"] == "model_permission" and card["id"] == card["root"] == "tiny"


def test_an_answer_has_one_request_id(front: FrontProcess) -> None:
    given = front.get("/v1/models", headers=KEY | {"X-Request-Id": "caller"})
    assert given.headers.get_list("x-request-id") == ["caller"]
    drawn = front.get("/v1/models", headers=KEY).headers.get_list("x-request-id")
    assert len(drawn) == 1 and len(bytes.fromhex(drawn[0])) == 16
