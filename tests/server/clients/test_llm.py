"""The offline LLM's requests and results, against a front with scripted ranks. `test_llm_service` uses real engines."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from server.api.openai.batches.bulk_client import BulkClient
from server.clients.llm.llm import LLM, _listed, _params_for, _prompt_of
from server.clients.llm.requests import LLMError, Question, complete_all
from server.clients.llm.results import Logprob, RequestOutput, SamplingParams, output_from
from server.options.flag import OptionsError
from tests.support.models.tiny_tokenizer import MAX_LEN
from tests.support.service.front_process import FrontProcess


def ask(front: FrontProcess, prompts: Sequence[Any], params: SamplingParams) -> list[RequestOutput]:
    """Have the front complete prompts."""
    questions = [Question(index, prompt, params) for index, prompt in enumerate(prompts)]
    return asyncio.run(complete_all(questions, BulkClient(front.url, None, concurrency=4), shows_bar=False))


def test_texts_and_token_ids_come_back_with_theirs_in_order(front: FrontProcess) -> None:
    script = front.script("o-text", "an answer é😀")
    prompts = ["the cat o-text", front.encode("o-text on the mat")] * 4
    results = ask(front, prompts, SamplingParams(max_tokens=64))
    for prompt, result in zip(prompts, results, strict=True):
        given = prompt if isinstance(prompt, str) else None
        assert (result.prompt, result.finished) == (given, True)
        assert result.prompt_token_ids == (front.encode(prompt) if isinstance(prompt, str) else prompt)
        [output] = result.outputs
        assert (output.text, output.token_ids) == ("an answer é😀", list(script.token_ids))
        assert (output.finish_reason, output.logprobs, output.cumulative_logprob) == ("stop", None, None)


def test_a_chat_is_rendered_as_the_endpoint_renders_it(front: FrontProcess) -> None:
    front.script("o-chat", "hello")
    chat = {"messages": [{"role": "user", "content": "o-chat"}], "add_generation_prompt": True}
    [result] = ask(front, [chat], SamplingParams())
    assert result.prompt == "<|start|>user\no-chat<|end|>\n<|start|>assistant\n"
    assert front.decode(result.prompt_token_ids) == result.prompt
    assert result.outputs[0].text == "hello"


def test_sixteen_tokens_are_the_default_and_none_is_the_rest_of_the_context(front: FrontProcess) -> None:
    ask(front, ["o-length"], SamplingParams())
    assert front.asked("o-length").params.max_tokens == 16
    for word, prompt in (("o-rest", "o-rest"), ("o-ids", front.encode("o-ids"))):  # words of no other test
        [result] = ask(front, [prompt], SamplingParams(max_tokens=None))
        assert front.asked(word).params.max_tokens == MAX_LEN - len(result.prompt_token_ids)


def test_choices_and_logprobs_have_vllms_shape(front: FrontProcess) -> None:
    script = front.script("o-logprobs", "ab")
    [result] = ask(front, ["o-logprobs"], SamplingParams(n=2, logprobs=2))
    assert [output.index for output in result.outputs] == [0, 1]
    for output in result.outputs:
        assert output.logprobs is not None
        assert len(output.logprobs) == len(output.token_ids) == len(script.token_ids)
        for token_id, position in zip(output.token_ids, output.logprobs, strict=True):
            assert position[token_id] == Logprob(logprob=-0.5, rank=1)
            assert position[token_id + 1].rank == 2
        assert output.cumulative_logprob == pytest.approx(-0.5 * len(script.token_ids))


def test_a_token_beyond_the_likeliest_has_no_rank() -> None:
    logprobs = {
        "tokens": ["token_id:9"],
        "token_logprobs": [-4.0],
        "top_logprobs": [{"token_id:1": -1.0, "token_id:9": -4.0}],
    }
    choice = {
        "text": "x",
        "token_ids": [9],
        "prompt_token_ids": [5],
        "finish_reason": "length",
        "stop_reason": None,
    }
    body = {
        "id": "cmpl-1",
        "choices": [{**choice, "logprobs": logprobs}],
        "usage": {"prompt_tokens_details": None},
    }
    [output] = output_from(body, None, SamplingParams(logprobs=1)).outputs
    assert output.logprobs == [{1: Logprob(logprob=-1.0, rank=1), 9: Logprob(logprob=-4.0, rank=None)}]


def test_prompt_logprobs_are_by_token_id() -> None:
    told = [None, {"7": {"logprob": -1.5, "rank": 3, "decoded_token": "x"}}]
    choice = {"text": "", "token_ids": [], "prompt_token_ids": [5, 7], "finish_reason": "length"}
    body = {"id": "cmpl-1", "choices": [{**choice, "prompt_logprobs": told}], "usage": {}}
    result = output_from(body, None, SamplingParams(prompt_logprobs=0))
    assert result.prompt_logprobs == [None, {7: Logprob(logprob=-1.5, rank=3, decoded_token="x")}]


def test_a_refusal_names_the_prompt_and_the_reason(front: FrontProcess) -> None:
    with pytest.raises(LLMError, match=r"prompt 1: .*maximum context length") as caught:
        ask(front, ["fine", "x" * 3000], SamplingParams())
    assert caught.value.status == 400
    with pytest.raises(LLMError, match=r"prompt 0: temperature is invalid: .*; got -1"):
        ask(front, ["fine"], SamplingParams(temperature=-1))


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("x", ["x"]),
        ([1, 2], [[1, 2]]),
        (["x", [1], {"prompt": "y"}, {"prompt_token_ids": (3,)}], ["x", [1], "y", [3]]),
        ({"prompt": "y"}, ["y"]),
        ([], []),
    ],
)
def test_one_or_several_prompts_in_any_form(given: Any, prompts: list[Any]) -> None:
    assert [_prompt_of(prompt) for prompt in _listed(given)] == prompts


def test_params_are_for_all_or_one_for_each() -> None:
    one, other = SamplingParams(n=1), SamplingParams(n=2)
    assert _params_for(["a", "b"], None) == [SamplingParams()] * 2
    assert _params_for(["a", "b"], one) == [one, one]
    assert _params_for(["a", "b"], [one, other]) == [one, other]
    with pytest.raises(LLMError, match="2 prompts, but 1 sampling_params; give one for each"):
        _params_for(["a", "b"], [one])


def test_a_prompt_without_text_is_a_sentence() -> None:
    with pytest.raises(LLMError, match="give 'prompt' or 'prompt_token_ids'"):
        _prompt_of({"text": "x"})


def test_only_what_is_said_is_sent() -> None:
    assert SamplingParams().body() == {"n": 1, "max_tokens": 16}
    said = SamplingParams(max_tokens=None, stop=("a", "b"), temperature=0, structured_outputs={"regex": "a+"})
    assert said.body() == {
        "n": 1,
        "temperature": 0,
        "stop": ["a", "b"],
        "structured_outputs": {"regex": "a+"},
    }


def test_a_wrong_option_starts_nothing() -> None:
    with pytest.raises(OptionsError, match="--tensor-parallel-size 2: attention runs data-parallel"):
        LLM("demo", tensor_parallel_size=2)
