"""What vLLM's published tests of /v1/completions and /tokenize assert, of ours.

After tests/entrypoints/openai/completion, basic/test_return_token_ids.py and serve/tokenize of vLLM; what depends on a
real model, and beam search, are left out.
"""

from typing import Any

import openai
import pytest

from tests.support.front_process import FrontProcess
from tests.support.tiny_tokenizer import MAX_LEN

KEY = {"Authorization": "Bearer sesame"}
IDS = [65, 66, 67, 68, 69]
TEXT = "Hello, my name is"


def complete(client: openai.OpenAI, prompt: Any = TEXT, **how: Any) -> Any:
    return client.completions.create(
        **{"model": "tiny", "prompt": prompt, "max_tokens": 5, "temperature": 0.0, **how}
    )


def refused(front: FrontProcess, **fields: Any) -> dict[str, Any]:
    response = front.post("/v1/completions", json={"model": "tiny", "prompt": TEXT, **fields}, headers=KEY)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def test_a_completion_counts_its_tokens(front: FrontProcess, client: openai.OpenAI) -> None:
    answer = complete(client)
    [choice] = answer.choices
    assert choice.finish_reason == "length" and choice.prompt_logprobs is None
    num_prompt_tokens = len(front.encode(TEXT))
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (num_prompt_tokens, 5)
    assert usage.total_tokens == num_prompt_tokens + 5 and usage.prompt_tokens_details.cached_tokens == 0
    assert len(complete(client, IDS).choices[0].text) == 5


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_prompt_is_truncated_on_the_side_that_is_said(client: openai.OpenAI, side: str) -> None:
    prompt = list(range(8))
    wish = {"return_token_ids": True, "truncate_prompt_tokens": 4, "truncation_side": side}
    choice = complete(client, prompt, max_tokens=1, extra_body=wish).choices[0]
    assert choice.prompt_token_ids == (prompt[:4] if side == "right" else prompt[-4:])


@pytest.mark.parametrize(("count", "least", "most"), [(None, 0, 0), (0, 1, 1), (1, 1, 2), (5, 5, 6)])
def test_logprobs_have_the_chosen_token(client: openai.OpenAI, count: Any, least: int, most: int) -> None:
    logprobs = complete(client, IDS, logprobs=count).choices[0].logprobs
    if count is None:
        assert logprobs is None
        return
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 5
    assert all(least <= len(top) <= most for top in logprobs.top_logprobs)


@pytest.mark.parametrize("streams", [False, True])
def test_too_many_logprobs_are_refused(client: openai.OpenAI, streams: bool) -> None:
    with pytest.raises(openai.BadRequestError):
        complete(client, IDS, logprobs=21, stream=streams)
    assert complete(client, IDS).choices[0].text


@pytest.mark.parametrize("count", [None, 0, 1])
def test_every_prompt_of_a_batch_has_its_logprobs(client: openai.OpenAI, count: int | None) -> None:
    prompts = ["A robot may not injure another robot", "My name is"]
    choices = complete(client, prompts, extra_body={"prompt_logprobs": count}).choices
    assert all((choice.prompt_logprobs is None) is (count is None) for choice in choices)
    with pytest.raises(openai.BadRequestError):
        complete(client, prompts, extra_body={"prompt_logprobs": -1})


def test_a_stream_s_last_chunk_has_text_and_the_reason(client: openai.OpenAI) -> None:
    whole = complete(client).choices[0]
    chunks = list(complete(client, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"] and chunks[-1].choices[0].text


def test_choices_of_a_stream_each_have_one_end(client: openai.OpenAI) -> None:
    answer = complete(client, n=3, seed=42, temperature=1.0, logprobs=0)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert all(choice.finish_reason for choice in answer.choices)
    ends = []
    for chunk in complete(client, n=3, seed=42, temperature=1.0, stream=True):
        [choice] = chunk.choices
        ends += [choice.index] if choice.finish_reason else []
    assert sorted(ends) == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "each", "last"),
    [
        ({"include_usage": False, "continuous_usage_stats": False}, False, False),
        ({"include_usage": False, "continuous_usage_stats": True}, False, False),
        ({"include_usage": True, "continuous_usage_stats": False}, False, True),
        ({"include_usage": True, "continuous_usage_stats": True}, True, True),
        ({}, False, False),
        (None, False, False),
    ],
)
def test_usage_is_where_stream_options_want_it(
    client: openai.OpenAI, options: Any, each: bool, last: bool
) -> None:
    chunks = list(complete(client, stream=True, stream_options=options))
    final = chunks.pop() if last else None
    assert all((chunk.usage is not None) is each for chunk in chunks)
    for usage in (chunk.usage for chunk in [*chunks, final] if chunk is not None and chunk.usage):
        assert usage.prompt_tokens > 0 and usage.completion_tokens > 0
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert final is None or final.choices == []


@pytest.mark.parametrize(
    "options",
    [{"include_usage": None}, {"include_usage": True}, {"continuous_usage_stats": None}],
)
def test_stream_options_are_for_streams(front: FrontProcess, options: dict[str, Any]) -> None:
    assert refused(front, stream=False, stream_options=options)["param"] == "stream_options"


@pytest.mark.parametrize("prompts", [[TEXT] * 2, [IDS] * 2])
def test_a_batch_has_a_choice_per_prompt(client: openai.OpenAI, prompts: Any) -> None:
    batch = complete(client, prompts)
    assert len(batch.choices) == 2 and batch.choices[0].text == batch.choices[1].text
    assert [choice.index for choice in complete(client, prompts, n=2).choices] == [0, 1, 2, 3]
    texts = ["", ""]
    for chunk in complete(client, prompts, stream=True):
        [choice] = chunk.choices
        texts[choice.index] += choice.text
    assert texts == [choice.text for choice in batch.choices]


@pytest.mark.parametrize("count", [1, 0])
@pytest.mark.parametrize("prompt", [TEXT, IDS])
def test_an_echo_has_the_prompt_s_logprobs(
    front: FrontProcess, client: openai.OpenAI, prompt: Any, count: int
) -> None:
    choice = complete(client, prompt, echo=True, logprobs=count).choices[0]
    assert choice.text.startswith(prompt if isinstance(prompt, str) else front.decode(prompt))
    logprobs = choice.logprobs
    assert logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None
    assert all(max(count, 1) <= len(top) <= count + 1 for top in logprobs.top_logprobs[1:])
    assert len(logprobs.tokens) == len(logprobs.text_offset) > 5


def test_tokens_as_ids_spell_the_text_and_come_first_among_the_likeliest(
    front: FrontProcess, client: openai.OpenAI
) -> None:
    wish = {"return_tokens_as_token_ids": True}
    choice = complete(client, "Say 'Hello, world! 🎉'", echo=True, logprobs=1, extra_body=wish).choices[0]
    tokens = choice.logprobs.tokens
    assert [next(iter(top)) for top in choice.logprobs.top_logprobs[1:]] == tokens[1:]
    assert front.decode([int(token.removeprefix("token_id:")) for token in tokens]) == choice.text


def test_ids_line_up_with_logprobs_whole_and_streamed(front: FrontProcess, client: openai.OpenAI) -> None:
    wish = {"return_token_ids": True, "return_tokens_as_token_ids": True, "prompt_logprobs": 1}
    choice = complete(client, echo=True, logprobs=1, extra_body=wish).choices[0]
    named = [int(token.removeprefix("token_id:")) for token in choice.logprobs.tokens]
    assert named == choice.prompt_token_ids + choice.token_ids and choice.prompt_logprobs is not None
    assert front.decode(choice.prompt_token_ids) == TEXT
    wish.pop("prompt_logprobs")
    chunks = [chunk.choices[0] for chunk in complete(client, stream=True, logprobs=1, extra_body=wish)]
    assert chunks[0].prompt_token_ids == choice.prompt_token_ids
    told = [token for chunk in chunks for token in chunk.token_ids]
    streamed = [token for chunk in chunks for token in chunk.logprobs.tokens]
    assert [f"token_id:{token}" for token in told] == streamed and told == choice.token_ids
    plain = complete(client, logprobs=1, extra_body={"return_token_ids": False}).model_dump()
    assert plain["choices"][0]["token_ids"] is None and plain.get("prompt_token_ids") is None


def test_offsets_do_not_depend_on_streaming(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("p-offsets", "the cat!")
    how: dict[str, Any] = {"logprobs": 0, "stop": ["\n\n"], "max_tokens": 20}
    whole = complete(client, "p-offsets", **how).choices[0].logprobs.text_offset
    chunks = list(complete(client, "p-offsets", stream=True, **how))
    assert [offset for chunk in chunks for offset in chunk.choices[0].logprobs.text_offset] == whole
    assert whole[0] == 0 and len(whole) == len(front.encode("the cat!"))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"prompt": None, "prompt_embeds": []},
            "Either prompt or prompt_embeds must be provided and non-empty",
        ),
        ({"prompt": []}, "prompt or prompt_embeds"),
        ({"prompt": [999_999]}, "out of vocabulary"),
        ({"prompt": [-1]}, "greater than or equal to 0"),
        ({"prompt": [[-1]]}, "greater than or equal to 0"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"response_format": {"type": "json_schema"}}, "json_schema must be provided"),
        ({"structured_outputs": {"regex": "[.*"}, "stop": ["\n"]}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "root ::= missing"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"json": {"properties": {"foo": "bar"}}}}, "structured_outputs.json"),
        ({"logprob_token_ids": []}, "must not be an empty list"),
        ({"logprob_token_ids": [100]}, "when using `logprob_token_ids`"),
        ({"suffix": "x"}, "suffix"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": MAX_LEN + 1}, f"greater than max_model_len ({MAX_LEN})"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"prompt": [5] * MAX_LEN}, "maximum context length"),
        ({"seed": 2**63}, "less_than_equal"),
        ({"best_of": 2}, "best_of"),
    ],
)
def test_an_error_has_the_words_that_are_looked_for(
    front: FrontProcess, fields: dict[str, Any], words: str
) -> None:
    error = refused(front, **fields)
    assert words in error["message"] and (error["type"], error["code"]) == ("BadRequestError", 400)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("continues", [False, True])
def test_a_chat_is_tokenized_as_its_template_says(
    front: FrontProcess, special: bool, begins: bool, continues: bool
) -> None:
    talk = [{"role": "user", "content": "Hi there!"}, {"role": "assistant", "content": "Sure,"}]
    wish = {
        "add_special_tokens": special,
        "add_generation_prompt": begins,
        "continue_final_message": continues,
    }
    response = front.post("/tokenize", json={"model": "tiny", "messages": talk, **wish}, headers=KEY)
    if begins and continues:
        assert response.status_code == 400
        return
    answer = response.json()
    text = "<|start|>user\nHi there!<|end|>\n<|start|>assistant\nSure," + ("" if continues else "<|end|>\n")
    assert front.decode(answer["tokens"]) == text + "<|start|>assistant\n" * begins
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), MAX_LEN)
    assert answer["token_strs"] is None
