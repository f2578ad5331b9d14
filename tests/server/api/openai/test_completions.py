"""POST /v1/completions, /v1/models and the operators' routes. The official client sends what it supports."""

import json
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.serving.service import greedy_tokens
from tests.support.models.tiny_tokenizer import MAX_LEN
from tests.support.service.front_process import FrontProcess


def test_a_prompt_is_completed_without_a_template(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("c-plain", " and more")
    answer = client.completions.create(model="tiny", prompt="c-plain")
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (" and more", "stop")
    request = front.asked("c-plain")
    assert front.decode(request.prompt_ids) == "c-plain"
    assert request.params.max_tokens == 16, "OpenAI's default here"


def test_the_benchmarks_client_reads_token_ids(shared_front: FrontProcess) -> None:
    front = shared_front  # the benchmarks send no key
    front.script("c-bench", "half a \u00e9")
    expected = front.encode("half a \u00e9")
    port = int(front.url.rpartition(":")[2])
    assert greedy_tokens(port, front.encode("c-bench"), len(expected)) == expected


def test_the_four_forms_of_a_prompt(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("c-forms", "ok")
    ids = front.encode("c-forms")
    for prompt, num_choices in (
        ("c-forms", 1),
        (["c-forms", "c-forms 2"], 2),
        (ids, 1),
        ([ids, ids, ids], 3),
    ):
        answer = client.completions.create(model="tiny", prompt=prompt)  # type: ignore[arg-type]
        assert [choice.index for choice in answer.choices] == list(range(num_choices))
        assert {choice.text for choice in answer.choices} == {"ok"}
        assert answer.usage is not None and answer.usage.completion_tokens == 2 * num_choices


def test_a_long_prompt_takes_the_default_from_no_other(front: FrontProcess, client: openai.OpenAI) -> None:
    front.forget()
    long = [5] * (MAX_LEN - 3)
    client.completions.create(model="tiny", prompt=[long, [5, 6, 7]])
    requests = {
        len(each.prompt_ids): each.params.max_tokens for rank in front.ranks for each in rank.requests
    }
    assert requests == {MAX_LEN - 3: 3, 3: 16}


def test_every_prompt_has_n_choices_in_a_row(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("c-first", "one")
    front.script("c-second", "two")
    answer = client.completions.create(model="tiny", prompt=["c-first", "c-second"], n=2, seed=5)
    assert [choice.text for choice in answer.choices] == ["one", "one", "two", "two"]
    for word in ("c-first", "c-second"):
        sent = [r for rank in front.ranks for r in rank.requests if word in front.decode(r.prompt_ids)]
        assert sorted(request.params.seed for request in sent) == [5, 6], "as if it had been sent alone"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(front.encode("c-first")) + len(front.encode("c-second"))
    stream = client.completions.create(model="tiny", prompt=["c-first", "c-second"], n=2, stream=True)
    ends = [choice.index for chunk in stream for choice in chunk.choices if choice.finish_reason]
    assert sorted(ends) == [0, 1, 2, 3]


@pytest.mark.parametrize("prompt", ["c-echo", ["c-echo"], None])
def test_echo_puts_the_prompt_before_the_answer(
    front: FrontProcess, client: openai.OpenAI, prompt: str | list[str] | None
) -> None:
    front.script("c-echo", "!")
    sent = front.encode("c-echo") if prompt is None else prompt
    answer = client.completions.create(model="tiny", prompt=sent, echo=True)
    assert answer.choices[0].text == "c-echo!"
    stream = client.completions.create(model="tiny", prompt=sent, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "c-echo!"


def test_logprobs_hold_the_chosen_token_and_offsets(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("c-logprobs", "hé!")
    answer = client.completions.create(model="tiny", prompt="c-logprobs", logprobs=0)
    logprobs: Any = answer.choices[0].logprobs
    assert logprobs.tokens[0] == "h" and logprobs.tokens[-1] == "!"
    assert logprobs.token_logprobs == [-0.5] * 4
    assert [set(top) for top in logprobs.top_logprobs] == [{token} for token in logprobs.tokens]
    assert logprobs.text_offset == [0, 1, 1, 2], "offsets count characters of the text; é is two tokens"
    chunks = client.completions.create(model="tiny", prompt="c-logprobs", logprobs=2, stream=True)
    pieces = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    assert [offset for piece in pieces for offset in piece.text_offset or []] == [0, 1, 1, 2]


@pytest.mark.parametrize("logprobs_asked", [0, 1])
def test_echo_with_logprobs_tells_of_the_prompt_too(
    front: FrontProcess, client: openai.OpenAI, logprobs_asked: int
) -> None:
    word = f"c-scored{logprobs_asked}"
    front.script(word, "!?")
    ids = front.encode(word)
    for prompt in (word, ids, [ids]):
        answer = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=2, echo=True, logprobs=logprobs_asked, temperature=0
        )
        [choice] = answer.choices
        logprobs: Any = choice.logprobs
        assert choice.text == f"{word}!?"
        assert "".join(logprobs.tokens) == choice.text and len(logprobs.tokens) == len(ids) + 2
        assert logprobs.token_logprobs == [None] + [-0.5] * (len(ids) + 1)
        assert logprobs.top_logprobs[0] is None
        assert all(len(top) == 1 for top in logprobs.top_logprobs[1:]), (
            "the fake's own token is the likeliest"
        )
        ends = [*logprobs.text_offset[1:], len(choice.text)]
        cut = [choice.text[a:b] for a, b in zip(logprobs.text_offset, ends, strict=True)]
        assert cut == logprobs.tokens
        request = front.asked(word)
        assert request.params.num_prompt_logprobs == logprobs_asked


def test_streamed_echo_with_logprobs_is_the_whole_answer_in_pieces(
    front: FrontProcess, client: openai.OpenAI
) -> None:
    front.script("c-flow", "é!")
    asked: Any = {
        "model": "tiny",
        "prompt": ["c-flow", "c-flow 2"],
        "max_tokens": 3,
        "echo": True,
        "logprobs": 1,
    }
    whole = client.completions.create(**asked)
    for index, choice in enumerate(whole.choices):
        stream = client.completions.create(**asked, stream=True)
        own = [part for chunk in stream for part in chunk.choices if part.index == index]
        assert "".join(part.text for part in own) == choice.text
        pieces: list[Any] = [part.logprobs for part in own if part.logprobs]
        wanted: Any = choice.logprobs
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [value for piece in pieces for value in getattr(piece, name)] == getattr(wanted, name)


@pytest.mark.parametrize("stream", [False, True])
def test_echo_of_no_tokens_scores_the_prompt_alone(front: FrontProcess, stream: bool) -> None:
    front.script("c-none", [1])
    body = {"model": "tiny", "prompt": "c-none", "max_tokens": 0, "echo": True, "logprobs": 1}
    ids = front.encode("c-none")
    if stream:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        events = front.post("/v1/completions", json=body | options).text.split("\n\n")
        chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
        [choice], usage = [chunk["choices"][0] for chunk in chunks[:-1]], chunks[-1]["usage"]
    else:
        answer = front.post("/v1/completions", json=body).json()
        [choice], usage = answer["choices"], answer["usage"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("c-none", "length", None)
    assert choice["logprobs"]["token_logprobs"] == [None] + [-0.5] * (len(ids) - 1)
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(ids), 0)
    assert usage["total_tokens"] == len(ids)
    assert front.asked("c-none").params.max_tokens == 1


def test_a_prompt_that_fills_the_context_is_scored(front: FrontProcess) -> None:
    ids = [40] * MAX_LEN
    body = {"model": "tiny", "prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 1}
    answer = front.post("/v1/completions", json=body).json()
    [choice] = answer["choices"]
    assert choice["logprobs"]["token_logprobs"] == [None] + [-0.5] * (MAX_LEN - 1)
    assert answer["usage"]["total_tokens"] == MAX_LEN
    longer = front.post("/v1/completions", json=body | {"prompt": [*ids, 40]})
    assert longer.status_code == 400 and f"{MAX_LEN + 1} prompt tokens." in longer.text
    more = front.post("/v1/completions", json=body | {"max_tokens": 1})
    assert more.status_code == 400 and "1 output tokens" in more.text


def test_a_rank_s_long_message_comes_in_its_place(front: FrontProcess) -> None:
    """The message is read in a thread. Later messages of the rank come after it."""
    front.script("c-long", "abc")
    prompt = front.encode("c-long") + [5] * 200
    asked = {"model": "tiny", "prompt": prompt, "prompt_logprobs": -1, "max_tokens": 3}
    (choice,) = front.post("/v1/completions", json=asked).json()["choices"]
    assert choice["text"] == "abc" and len(choice["prompt_logprobs"]) == len(prompt)
    assert all(len(each) == 320 for each in choice["prompt_logprobs"][1:])


def test_prompt_logprobs_are_vllm_s(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("c-prompted", "ok")
    ids = front.encode("c-prompted")
    answer: Any = client.completions.create(
        model="tiny", prompt=["c-prompted", "c-prompted"], extra_body={"prompt_logprobs": 2}
    )
    for choice in answer.choices:
        assert choice.text == "ok" and choice.logprobs is None
        first, *others = choice.prompt_logprobs
        assert first is None and len(others) == len(ids) - 1
        for token_id, entry in zip(ids[1:], others, strict=True):
            assert list(entry) == [str(token_id), str(token_id + 1)]
            assert entry[str(token_id)]["rank"] == 1 and entry[str(token_id)]["logprob"] == -0.5
            assert entry[str(token_id)]["decoded_token"] == front.decode([token_id])
    several: Any = client.completions.create(
        model="tiny", prompt="c-prompted", n=3, extra_body={"prompt_logprobs": 2}
    )
    assert [choice.prompt_logprobs for choice in several.choices] == 3 * [answer.choices[0].prompt_logprobs]
    plain: Any = client.completions.create(model="tiny", prompt="c-prompted")
    assert plain.choices[0].prompt_logprobs is None


def test_token_ids_come_along_when_asked_for(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("c-ids", [*front.encode("é!"), 1])
    ids = front.encode("c-ids")
    asked: Any = {"model": "tiny", "prompt": "c-ids", "extra_body": {"return_token_ids": True}}
    choice: Any = client.completions.create(**asked).choices[0]
    assert (choice.prompt_token_ids, choice.token_ids) == (ids, [*front.encode("é!"), 1])
    chunks: list[Any] = list(client.completions.create(**asked, stream=True))
    assert [token for chunk in chunks for token in chunk.choices[0].token_ids] == choice.token_ids
    assert chunks[0].choices[0].prompt_token_ids == ids
    assert not any("prompt_token_ids" in chunk.choices[0].model_dump() for chunk in chunks[1:])
    plain: Any = client.completions.create(model="tiny", prompt="c-ids").choices[0]
    assert plain.token_ids is None and plain.prompt_token_ids is None


def test_a_truncated_prompt_is_what_is_echoed(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("c-cut", "!")
    cut = {"truncate_prompt_tokens": len(front.encode("c-cut")), "return_token_ids": True}
    for prompt in ("before-c-cut", front.encode("before-c-cut")):
        choice: Any = client.completions.create(
            model="tiny", prompt=prompt, echo=True, extra_body=cut
        ).choices[0]
        assert (choice.text, choice.prompt_token_ids) == ("c-cut!", front.encode("c-cut"))


def test_the_operators_routes_answer(front: FrontProcess) -> None:
    assert front.get("/health").status_code == 200
    assert front.get("/ping").status_code == 200
    assert set(front.get("/version").json()) == {"version"}


def test_metrics_have_vllm_s_names_and_count(front: FrontProcess, client: openai.OpenAI) -> None:
    front.script("c-metrics", "abcd", num_cached_tokens=1)

    def samples() -> dict[str, float]:
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(front.get("/metrics").text):
            for sample in family.samples:
                if "le" not in sample.labels:
                    found[sample.name] = found.get(sample.name, 0) + sample.value
        return found

    before = samples()
    client.completions.create(model="tiny", prompt="c-metrics")
    list(client.completions.create(model="tiny", prompt="c-metrics", stream=True))
    after = samples()
    grown = {name: after[name] - before.get(name, 0) for name in after}
    num_prompt = len(front.encode("c-metrics"))
    assert grown["vllm:prompt_tokens_total"] == 2 * num_prompt
    assert grown["vllm:generation_tokens_total"] == 8
    assert grown["vllm:request_success_total"] == 2
    for name in (
        "time_to_first_token_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_decode_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_max_num_generation_tokens",
        "request_params_n",
        "request_params_max_tokens",
    ):
        assert grown[f"vllm:{name}_count"] == 2, name
    assert grown["vllm:inter_token_latency_seconds_count"] <= 6
    assert grown["vllm:prefix_cache_queries_total"] == 10 * grown["vllm:prefix_cache_hits_total"] > 0
    assert grown["http_requests_total"] >= 2 and grown["http_request_duration_seconds_count"] >= 2
    assert {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:num_preemptions_total",
        "vllm:iteration_tokens_total_count",
        "vllm:cache_config_info",
    } <= set(after)


def test_metrics_answer_head_and_label_routes_not_paths(front: FrontProcess) -> None:
    assert httpx.head(front.url + "/metrics").status_code == 200
    front.get("/no/such/path/at/all")
    text = front.get("/metrics").text
    assert "/no/such" not in text
    assert 'handler="/v1/completions"' in text


# The tests below follow vLLM's published tests (tests/entrypoints/openai/completion).
TEXT = "Hello, my name is"


def complete(client: openai.OpenAI, prompt: Any = TEXT, **how: Any) -> Any:
    return client.completions.create(
        **{"model": "tiny", "prompt": prompt, "max_tokens": 5, "temperature": 0.0, **how}
    )


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


def test_tokens_as_ids_spell_the_text_and_come_first_among_the_likeliest(
    front: FrontProcess, client: openai.OpenAI
) -> None:
    wish = {"return_tokens_as_token_ids": True}
    choice = complete(client, "Say 'Hello, world! 🎉'", echo=True, logprobs=1, extra_body=wish).choices[0]
    tokens = choice.logprobs.tokens
    assert [next(iter(top)) for top in choice.logprobs.top_logprobs[1:]] == tokens[1:]
    assert front.decode([int(token.removeprefix("token_id:")) for token in tokens]) == choice.text
