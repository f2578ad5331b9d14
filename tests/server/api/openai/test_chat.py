"""POST /v1/chat/completions through the official client: whole answers and streams."""

import asyncio
import threading
from typing import Any

import openai
import pytest

from scheduler.policy.request import FinishReason
from tests.support.models.tiny_tokenizer import MAX_LEN
from tests.support.service.front_process import TIMEOUT_S, FrontProcess

TEXT = "hello wörld 😀!"


def chat(client: openai.OpenAI, word: str, **how: Any) -> Any:
    return client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": word}], **how)


def text_of(chunks: list[Any], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


def test_a_whole_answer_has_text_usage_and_one_finish_reason(
    front: FrontProcess, client: openai.OpenAI
) -> None:
    script = front.script("w-whole", TEXT, num_cached_tokens=3)
    answer = chat(client, "w-whole")
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-") and answer.model == "tiny"
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", TEXT, "stop")
    sent = front.asked("w-whole")
    assert answer.usage.prompt_tokens == len(sent.prompt_ids)
    assert answer.usage.completion_tokens == len(script.token_ids)
    assert answer.usage.total_tokens == len(sent.prompt_ids) + len(script.token_ids)
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert "cached_tokens_details" not in answer.usage.prompt_tokens_details.model_extra, (
        "all were on the device"
    )


def test_cached_tokens_are_reported_by_tier(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("w-tiers", TEXT, num_cached_tokens=9, num_host_tokens=4, num_disk_tokens=3)
    details = chat(client, "w-tiers").usage.prompt_tokens_details
    assert details.cached_tokens == 9
    assert details.cached_tokens_details == {"device": 2, "host": 4, "disk": 3}
    front.script("w-peers", TEXT, num_cached_tokens=9, num_peer_tokens=8)
    details = chat(client, "w-peers").usage.prompt_tokens_details
    assert details.cached_tokens_details == {"device": 1, "host": 0, "disk": 0, "peer": 8}


def test_the_prompt_is_the_chat_template_s(front: FrontProcess, client: openai.OpenAI) -> None:
    client.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "system", "content": "be brief"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "w-parts"}, {"type": "text", "text": "two"}],
            },
        ],
        max_completion_tokens=1,
    )
    request = front.asked("w-parts")
    expected = "<|start|>system\nbe brief<|end|>\n<|start|>user\nw-parts\ntwo<|end|>\n<|start|>assistant\n"
    assert front.decode(request.prompt_ids) == expected
    assert list(request.prompt_ids).count(0) == 3, "special tokens are single ids"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat", "/tokenize"])
def test_a_developer_s_instruction_is_in_the_prompt(front: FrontProcess, path: str) -> None:
    word = f"w-developer{path.replace('/', '-')}"
    messages = [{"role": "developer", "content": word}, {"role": "user", "content": "hi"}]
    answer = front.post(path, json={"model": "tiny", "messages": messages, "stream": False})
    assert answer.status_code == 200, answer.text
    ids = answer.json()["tokens"] if path == "/tokenize" else front.asked(word).prompt_ids
    assert front.decode(ids).startswith(f"<|start|>system\n{word}<|end|>\n<|start|>user\nhi<|end|>")


def test_a_stream_has_the_role_first_one_finish_reason_and_usage_last(
    front: FrontProcess, client: openai.OpenAI
) -> None:
    front.script("w-stream", TEXT)
    chunks = list(chat(client, "w-stream", stream=True, stream_options={"include_usage": True}))
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].delta.role for chunk in chunks[1:-1]] == [None] * (len(chunks) - 2)
    assert text_of(chunks) == TEXT
    assert chunks[-2].choices[0].delta.content and chunks[-2].choices[0].finish_reason, "in one chunk"
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert reasons == ["stop"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == len(front.encode(TEXT))


def test_the_wire_is_what_openai_documents(front: FrontProcess) -> None:
    front.script("w-wire", "ok")
    body = {"model": "tiny", "messages": [{"role": "user", "content": "w-wire"}], "stream": True}
    response = front.post("/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: {") for event in events[:-2])
    assert "usage" not in response.text, "usage is sent only on request"


def test_each_token_is_sent_when_it_comes_and_no_character_is_broken(
    front: FrontProcess, client: openai.OpenAI
) -> None:
    token_ids = front.encode(TEXT)
    gates = {number: threading.Event() for number in range(len(token_ids) + 1)}
    front.script("w-gated", token_ids, gates=gates)
    gates[0].set()  # headers come with the first piece
    chunks = iter(chat(client, "w-gated", stream=True))
    contents = (chunk.choices[0].delta.content for chunk in chunks)
    shown = ""
    for number in range(len(token_ids)):
        gates[number].set()
        whole = front.decode(token_ids[: number + 1])
        if not whole.endswith("\ufffd"):
            piece = next(content for content in contents if content)
            assert shown + piece == whole, "each token's text arrives before the next token is sent"
            shown = whole
    gates[len(token_ids)].set()
    assert shown == TEXT and not any(contents)


def test_n_choices_are_n_requests_with_seeds_in_a_row(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("w-n", "same")
    answer = chat(client, "w-n", n=3, seed=41)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == ["same"] * 3
    sent = [r for rank in front.ranks for r in rank.requests if "w-n" in front.decode(r.prompt_ids)]
    assert sorted(request.params.seed for request in sent) == [41, 42, 43]
    assert answer.usage.prompt_tokens == len(sent[0].prompt_ids), "the prompt is counted once for all choices"
    assert answer.usage.completion_tokens == 3 * len(front.encode("same"))
    chunks = list(chat(client, "w-n", n=3, stream=True))
    assert [text_of(chunks, index) for index in range(3)] == ["same"] * 3
    reasons = [(c.index, c.finish_reason) for chunk in chunks for c in chunk.choices if c.finish_reason]
    assert sorted(reasons) == [(0, "stop"), (1, "stop"), (2, "stop")]


def test_sampling_parameters_reach_the_rank(front: FrontProcess, client: openai.OpenAI) -> None:
    chat(
        client,
        "w-params",
        max_completion_tokens=5,
        temperature=0.3,
        top_p=0.8,
        presence_penalty=-1.5,
        frequency_penalty=1.25,
        seed=-1,
        extra_body={
            "top_k": 3,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "min_tokens": 2,
            "stop_token_ids": [77],
        },
    )
    params = front.asked("w-params").params
    assert (params.max_tokens, params.min_tokens, params.seed) == (5, 2, 2**64 - 1)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.3, 0.8, 3, 0.05)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (-1.5, 1.25, 1.1)
    assert params.stop_token_ids == (1, 77) and params.num_logprobs is None


def test_defaults_reach_to_the_context_s_end_and_come_from_the_checkpoint(
    front: FrontProcess, client: openai.OpenAI
) -> None:
    front.script("w-default", "ok")
    chat(client, "w-default")
    chat(client, "w-default")
    first, second = [
        r for rank in front.ranks for r in rank.requests if "w-default" in front.decode(r.prompt_ids)
    ]
    assert first.params.max_tokens == MAX_LEN - len(first.prompt_ids)
    assert (first.params.temperature, first.params.top_k) == (1.0, 7), "top_k is in generation_config.json"
    assert first.params.seed != second.params.seed, "each request without a seed gets a different one"
    chat(client, "w-eosless", max_tokens=1, extra_body={"ignore_eos": True})
    assert front.asked("w-eosless").params.stop_token_ids == ()


def test_max_tokens_ends_with_length(client: openai.OpenAI) -> None:
    assert chat(client, "w-length", max_tokens=2).choices[0].finish_reason == "length"


@pytest.mark.parametrize("streamed", [False, True])
def test_a_stop_string_ends_the_answer_at_the_rank_too(
    front: FrontProcess, client: openai.OpenAI, streamed: bool
) -> None:
    word = f"w-stop{streamed}"
    more = threading.Event()
    front.script(word, "one<EN two<END> three", gates={15: more}, finish=FinishReason.LENGTH)
    if streamed:
        chunks = list(chat(client, word, stream=True, stop=["<END>", "zzz"]))
        assert text_of(chunks) == "one<EN two"
        assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["stop"]
    else:
        answer = chat(client, word, stop="<END>")
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("one<EN two", "stop")
        assert answer.choices[0].stop_reason == "<END>"
    rank = front.served(word)
    request_id = rank.requests[-1].request_id
    rank.wait_for(lambda told: request_id in told.aborted)
    more.set()


def test_a_stop_token_is_counted_and_not_shown(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("w-eos", [*front.encode("hi!"), 1])
    answer = chat(client, "w-eos", extra_body={"skip_special_tokens": False})
    assert (answer.choices[0].message.content, answer.usage.completion_tokens) == ("hi!", 4)
    assert answer.choices[0].stop_reason is None
    mark = front.encode("!")
    front.script("w-own", [*front.encode("hi"), *mark])
    answer = chat(client, "w-own", extra_body={"stop_token_ids": mark})
    assert (answer.choices[0].message.content, answer.choices[0].stop_reason) == ("hi", mark[0])
    answer = chat(client, "w-own", extra_body={"stop_token_ids": mark, "include_stop_str_in_output": True})
    assert answer.choices[0].message.content == "hi!"


def test_logprobs_come_with_their_alternatives(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("w-logprobs", "hé")
    answer = chat(client, "w-logprobs", logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in content) == "hé".encode()
    assert [entry.logprob for entry in content] == [-0.5] * 3
    assert [len(entry.top_logprobs) for entry in content] == [2, 2, 2]
    assert content[0].top_logprobs[0].token == content[0].token == "h"
    streamed = list(chat(client, "w-logprobs", logprobs=True, stream=True))
    entries = [e for c in streamed if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert [entry.token for entry in entries] == [entry.token for entry in content]
    assert all(entry.top_logprobs == [] for entry in entries)


def test_chats_tell_of_token_ids_and_of_the_prompt_when_asked_to(
    front: FrontProcess, client: openai.OpenAI
) -> None:
    front.script("w-ids", [*front.encode("hé"), 1])
    wishes = {"return_token_ids": True, "return_tokens_as_token_ids": True, "prompt_logprobs": 1}
    answer = chat(client, "w-ids", logprobs=True, extra_body=wishes)
    sent = list(front.asked("w-ids").prompt_ids)
    assert (answer.prompt_token_ids, answer.choices[0].token_ids) == (sent, [*front.encode("hé"), 1])
    names = [entry.token for entry in answer.choices[0].logprobs.content]
    assert names == [f"token_id:{token}" for token in answer.choices[0].token_ids]
    assert [entry and list(entry) for entry in answer.prompt_logprobs] == [
        None,
        *([str(t)] for t in sent[1:]),
    ]
    chunks = list(chat(client, "w-ids", stream=True, extra_body={"return_token_ids": True}))
    told = [token for chunk in chunks for token in chunk.choices[0].token_ids]
    assert told == answer.choices[0].token_ids
    assert chunks[0].prompt_token_ids == sent
    assert not any("prompt_token_ids" in chunk.model_dump() for chunk in chunks[1:])
    plain = chat(client, "w-ids")
    assert plain.prompt_token_ids is plain.prompt_logprobs is plain.choices[0].token_ids is None


def test_logprobs_of_given_ids_reach_the_rank(front: FrontProcess, client: openai.OpenAI) -> None:
    chat(client, "w-given", logprobs=True, max_tokens=1, extra_body={"logprob_token_ids": [7, 5]})
    params = front.asked("w-given").params
    assert (params.num_logprobs, params.logprob_token_ids) == (0, (7, 5))


def test_a_failure_at_the_rank_is_a_status_or_an_event(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("w-fails", "", finish=FinishReason.ERROR, error="out of luck")
    with pytest.raises(openai.InternalServerError, match="out of luck"):
        chat(client, "w-fails")
    with pytest.raises(openai.InternalServerError, match="out of luck"):
        chat(client, "w-fails", stream=True)
    front.script(
        "w-breaks", "ab", finish=FinishReason.ERROR, error="out of luck", gates={1: threading.Event()}
    )
    stream = chat(client, "w-breaks", stream=True)
    next(iter(stream))
    front.served("w-breaks").scripts["w-breaks"].gates[1].set()
    with pytest.raises(openai.APIError, match="out of luck"):
        list(stream)


def test_many_streams_at_once_each_get_their_own_text(front: FrontProcess) -> None:
    words = [f"w-many{number:02d}" for number in range(20)]
    for word in words:
        front.script(word, f"{word} é😀 done")

    async def one(client: openai.AsyncOpenAI, word: str) -> str:
        stream = await client.chat.completions.create(
            model="claude-alias", messages=[{"role": "user", "content": word}], stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=front.url + "/v1", api_key="sesame", max_retries=0, timeout=TIMEOUT_S
        ) as client:
            return await asyncio.gather(*(one(client, word) for word in words))

    assert asyncio.run(all_of_them()) == [f"{word} é😀 done" for word in words]


HELLO: list[Any] = [
    {"role": "system", "content": "you are a helpful assistant"},
    {"role": "user", "content": "what is 1+1?"},
]


def say(client: openai.OpenAI, messages: Any = HELLO, **how: Any) -> Any:
    """Request a chat answer of a few tokens."""
    return client.chat.completions.create(
        **{"model": "tiny", "messages": messages, "max_completion_tokens": 5, **how}
    )


def said_of(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


# The tests below follow vLLM's published tests (tests/entrypoints/openai/chat_completion): migrating should change nothing.


def test_usage_grows_from_chunk_to_chunk(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("p-grows", "abcdefghij")
    options = {"include_usage": True, "continuous_usage_stats": True}
    last = 0
    for chunk in say(
        client, said_of("p-grows"), max_completion_tokens=10, stream=True, stream_options=options
    ):
        usage = chunk.usage
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        grows = usage.completion_tokens > last or last == 0
        assert grows or (not chunk.choices and usage.completion_tokens == last)
        last = usage.completion_tokens
    assert last == len(front.encode("abcdefghij"))


def test_extra_keys_and_parts_are_taken(client: openai.OpenAI) -> None:
    extra = [{"role": "user", "content": "what is 1+1?", "extra_field": "0"}]
    assert say(client, extra, extra_body={"min_characters": 10}).choices[0].message.content is not None
    parts = [{"role": "user", "content": [{"type": "text", "text": "what is 1+1?"}]}]
    assert say(client, parts).choices[0].message.content == say(client, extra).choices[0].message.content


@pytest.mark.parametrize("echo", [True, False])
@pytest.mark.parametrize("streams", [True, False])
def test_an_echo_begins_with_the_message_that_is_continued(
    front: FrontProcess, client: openai.OpenAI, echo: bool, streams: bool
) -> None:
    saying = f"An apple a day keeps p-echo{echo}{streams}"
    front.script(f"p-echo{echo}{streams}", " the doctor away")
    wish = {"echo": echo, "continue_final_message": True, "add_generation_prompt": False}
    messages = [*HELLO, {"role": "assistant", "content": saying}]
    answer = say(client, messages, max_completion_tokens=30, stream=streams, extra_body=wish)
    if streams:
        content = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
    else:
        content = answer.choices[0].message.content
    assert content == (saying if echo else "") + " the doctor away"


def test_an_echo_never_repeats_the_user(client: openai.OpenAI) -> None:
    wished = say(client, extra_body={"echo": True}).choices[0].message.content
    assert wished == say(client).choices[0].message.content


def test_invocations_answer_like_the_endpoint_itself(front: FrontProcess) -> None:
    body = {"model": "tiny", "messages": HELLO, "max_completion_tokens": 5, "temperature": 0.0}
    chats = [front.post(path, json=body).json() for path in ("/v1/chat/completions", "/invocations")]
    assert chats[0].keys() == chats[1].keys() and chats[0]["choices"] == chats[1]["choices"]
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 5, "temperature": 0.0}
    texts = [front.post(path, json=body).json() for path in ("/v1/completions", "/invocations")]
    assert texts[0].keys() == texts[1].keys() and texts[0]["choices"] == texts[1]["choices"]


def test_logprobs_of_chosen_ids_have_the_sampled_token_too(client: openai.OpenAI) -> None:
    wish = {"logprob_token_ids": [100, 200, 250], "return_tokens_as_token_ids": True}
    answer = say(client, logprobs=True, top_logprobs=3, max_completion_tokens=1, extra_body=wish)
    [entry] = answer.choices[0].logprobs.content
    assert entry.token in {each.token for each in entry.top_logprobs}


def test_all_logprobs_are_the_vocabulary_s(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("p-all", "ab")
    answer = say(client, said_of("p-all"), logprobs=True, top_logprobs=-1, extra_body={"prompt_logprobs": -1})
    params = front.asked("p-all").params
    assert params.num_logprobs == params.num_prompt_logprobs == 320
    assert [len(entry.top_logprobs) for entry in answer.choices[0].logprobs.content] == [320] * 2
    assert all(len(position) == 320 for position in answer.prompt_logprobs[1:])
    text = client.completions.create(model="tiny", prompt="p-all", logprobs=-1, max_tokens=2)
    logprobs: Any = text.choices[0].logprobs
    assert front.asked("p-all").params.num_logprobs in (320, None) and len(logprobs.tokens) == 2


@pytest.mark.parametrize("streams", [False, True])
def test_what_stopped_an_answer_is_told_in_sglang_s_field_too(
    front: FrontProcess, client: openai.OpenAI, streams: bool
) -> None:
    mark = front.encode("w")[0]
    cases: list[tuple[list[int], dict[str, Any], str | int | None]] = [
        (front.encode("one<END> two"), {"stop": "<END>"}, "<END>"),
        ([*front.encode("one"), mark], {"extra_body": {"stop_token_ids": [mark]}}, mark),
        ([*front.encode("one"), 1], {}, 1),
        (front.encode("one"), {"max_completion_tokens": 2}, None),
    ]
    for number, (token_ids, how, wanted) in enumerate(cases):
        word = f"p-stops{streams}{number}"
        front.script(word, token_ids)
        asked: dict[str, Any] = {"max_completion_tokens": 40, "stream": streams, **how}
        answer = say(client, said_of(word), **asked)
        choice = list(answer)[-1].choices[0] if streams else answer.choices[0]
        assert choice.matched_stop == wanted


def test_every_answer_has_the_same_fields(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("p-fields", "<think>hm</think>\n\nyes")
    front.script("p-plain", "yes")
    keys = []
    for word, text, thoughts in (("p-fields", "yes", "hm"), ("p-plain", "yes", None)):
        answer = say(client, said_of(word), max_completion_tokens=60)
        message = answer.choices[0].message
        assert (message.content, message.reasoning, message.reasoning_content) == (text, thoughts, thoughts)
        assert (answer.usage.completion_tokens_details.reasoning_tokens > 0) is (thoughts is not None)
        keys.append({*answer.model_dump(), *message.model_dump(), *answer.usage.model_dump()})
    assert keys[0] == keys[1]


def test_reasoning_may_stay_where_the_model_wrote_it(front: FrontProcess, client: openai.OpenAI) -> None:
    text = "<think>hm</think>\n\nyes"
    front.script("p-whole", text)
    how: dict[str, Any] = {"max_completion_tokens": 60, "extra_body": {"separate_reasoning": False}}
    message = say(client, said_of("p-whole"), **how).choices[0].message
    assert (message.content, message.reasoning_content) == (text, None)
    assert text_of(list(say(client, said_of("p-whole"), stream=True, **how))) == text


@pytest.mark.parametrize("streams", [False, True])
def test_an_answer_tells_how_long_it_took(front: FrontProcess, client: openai.OpenAI, streams: bool) -> None:
    front.script("p-times", "abcd")
    options = {"stream": True, "stream_options": {"include_usage": True}} if streams else {}
    answer = say(client, said_of("p-times"), **options)
    metrics = (list(answer)[-1] if streams else answer).metrics
    assert metrics["time_to_first_token_ms"] > 0 and metrics["queue_time_ms"] >= 0
    assert say(client, said_of("p-times"), n=2).metrics is None, "several choices share the time"
