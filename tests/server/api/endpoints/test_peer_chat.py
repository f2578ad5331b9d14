"""What vLLM's published tests of /v1/chat/completions assert, of ours: whoever changes servers should not notice.

After tests/entrypoints/openai/chat_completion and tests/tool_use of vLLM 0.2x; what depends on a real model is left out.
"""

from typing import Any

import openai
import pytest

from tests.server.api.endpoints.peer_chat import HELLO, KEY, chat, said_of
from tests.support.front_process import FrontProcess


@pytest.mark.parametrize(("wanted", "num_top"), [(False, None), (True, 0), (True, 5), ("true", 20)])
def test_logprobs_are_told_as_wanted(client: openai.OpenAI, wanted: Any, num_top: int | None) -> None:
    choice = chat(client, logprobs=wanted, top_logprobs=num_top).choices[0]
    if not wanted:
        assert choice.logprobs is None
        return
    assert len(choice.logprobs.content) == 5
    assert all(len(entry.top_logprobs) == num_top for entry in choice.logprobs.content)
    assert all(entry.logprob >= -9999.0 for entry in choice.logprobs.content)


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
