"""POST /generate as SGLang's scripts use it: forms of prompts and answers, streams, logprobs, and refusals that name the field."""

import json
import threading
from itertools import pairwise
from typing import Any

import httpx
import pytest

from scheduler.policy.request import FinishReason
from server.api.sglang.generate import LONG_EVENT
from tests.support.models.tiny_tokenizer import MAX_LEN
from tests.support.service.front_process import FrontProcess


def generate(front: FrontProcess, status: int = 200, **body: Any) -> Any:
    """POST a body and return the answer's JSON."""
    answer = front.post("/generate", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_an_answer_has_sglang_s_form(front: FrontProcess) -> None:
    front.script("g-plain", "ok", num_cached_tokens=2)
    answer = generate(
        front, text="g-plain", rid="mine", sampling_params={"temperature": 0, "max_new_tokens": 9}
    )
    info = answer["meta_info"]
    assert answer["text"] == "ok" and front.decode(answer["output_ids"]).startswith("ok")
    assert info["id"] == "mine" and info["finish_reason"]["type"] == "stop"
    assert info["completion_tokens"] == len(answer["output_ids"])
    assert info["prompt_tokens"] == len(front.asked("g-plain").prompt_ids) and info["cached_tokens"] == 2
    assert info["e2e_latency"] > 0 and "cached_tokens_details" not in info


def test_cached_tokens_are_reported_by_tier(front: FrontProcess) -> None:
    front.script("g-tiers", "ok", num_cached_tokens=5, num_host_tokens=4)
    info = generate(front, text="g-tiers")["meta_info"]
    assert (info["cached_tokens"], info["cached_tokens_details"]) == (5, {"device": 1, "host": 4, "disk": 0})


def test_sampling_params_reach_the_rank(front: FrontProcess) -> None:
    params = {
        "temperature": 0.3,
        "top_p": 0.8,
        "top_k": 3,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "presence_penalty": -1.5,
        "frequency_penalty": 1.25,
        "max_new_tokens": 5,
        "min_new_tokens": 2,
        "sampling_seed": 7,
        "stop_token_ids": [77],
        "spaces_between_special_tokens": True,
        "regex": None,
    }
    generate(front, text="g-params", sampling_params=params)
    asked = front.asked("g-params").params
    assert (asked.temperature, asked.top_p, asked.top_k, asked.min_p) == (0.3, 0.8, 3, 0.05)
    assert (asked.presence_penalty, asked.frequency_penalty, asked.repetition_penalty) == (-1.5, 1.25, 1.1)
    assert (asked.max_tokens, asked.min_tokens, asked.seed) == (5, 2, 7)
    assert asked.stop_token_ids == (1, 77)
    generate(front, text="g-default")
    asked = front.asked("g-default").params
    assert (asked.max_tokens, asked.top_k) == (128, 7), "SGLang's default, and the checkpoint's"


def test_a_form_of_the_answer_reaches_the_rank(front: FrontProcess) -> None:
    schema = json.dumps({"type": "object"})
    for word, params in (("g-schema", {"json_schema": schema}), ("g-regex", {"regex": "[a-z]+"})):
        generate(front, text=word, sampling_params=params)
        structure = front.asked(word).params.structure
        assert (
            structure is not None and structure.kind == {"g-schema": "json_schema", "g-regex": "regex"}[word]
        )


def test_ids_lists_and_several_choices_are_lists(front: FrontProcess) -> None:
    ids = [40, 41, 42]
    one = generate(front, input_ids=ids, sampling_params={"max_new_tokens": 2})
    assert one["meta_info"]["prompt_tokens"] == len(ids)
    assert one["meta_info"]["finish_reason"] == {"type": "length", "length": 2}
    many = generate(front, text=["g-a", "g-b"], rid="r", sampling_params={"max_new_tokens": 2, "n": 2})
    assert [each["meta_info"]["id"] for each in many] == ["r_0", "r_1", "r_2", "r_3"]
    assert len(generate(front, text=["g-a"], sampling_params={"max_new_tokens": 1})) == 1
    assert len(generate(front, input_ids=[ids, ids], sampling_params={"max_new_tokens": 1})) == 2


def test_a_stream_s_events_have_all_so_far(front: FrontProcess) -> None:
    more = threading.Event()
    front.script("g-stream", "one two three", gates={4: more})
    body = {"text": "g-stream", "stream": True, "return_logprob": True}
    lines = []
    with httpx.stream("POST", front.url + "/generate", json=body, headers=front.headers) as answer:
        for line in filter(None, answer.iter_lines()):
            more.set()  # the rest comes after the first event
            lines.append(line)
    assert lines.pop() == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    texts = [event["text"] for event in events]
    assert texts[-1] == "one two three" and len(texts) > 1
    assert all(later.startswith(former) for former, later in pairwise(texts))
    assert all(event["meta_info"]["finish_reason"] is None for event in events[:-1])
    last = events[-1]["meta_info"]
    assert last["finish_reason"]["type"] == "stop"
    assert len(last["output_token_logprobs"]) == last["completion_tokens"] == len(events[-1]["output_ids"])


def test_a_long_stream_with_logprobs_does_not_repeat_them_with_every_token(front: FrontProcess) -> None:
    """SGLang's format repeats them in full. An event comes after a growth of a sixteenth, so that bytes grow linearly."""
    num_tokens = 400
    front.script("g-long", [5] * num_tokens, finish=FinishReason.LENGTH)
    ask = {"text": "g-long", "return_logprob": True, "top_logprobs_num": 20}
    params = {"max_new_tokens": num_tokens, "n": 2}
    whole = generate(front, **ask, sampling_params=params)
    answer = front.post("/generate", json={**ask, "sampling_params": params, "stream": True})
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    for each in whole:
        mine = [event for event in events if event["meta_info"]["id"].endswith(each["meta_info"]["id"][-2:])]
        assert len(mine) < num_tokens / 2
        sizes = [len(json.dumps(event)) for event in mine]
        assert all(later > 1.04 * former for former, later in pairwise(sizes[:-1]) if former > 2 * LONG_EVENT)
        assert sum(sizes) < 20 * sizes[-1] + 2 * LONG_EVENT * num_tokens / 10
        last = mine[-1]["meta_info"]
        for name in ("output_token_logprobs", "output_top_logprobs"):
            assert last[name] == each["meta_info"][name]
        assert last["output_top_logprobs"][7] == [
            [-0.5 - 0.693 * place, 5 + place, None] for place in range(20)
        ]


def test_of_many_choices_only_the_first_asks_for_the_prompt_s_logprobs(front: FrontProcess) -> None:
    front.script("g-choices", "ok")
    ask = {"text": "g-choices", "return_logprob": True, "logprob_start_len": 0}
    answers = generate(front, **ask, sampling_params={"n": 3})
    assert len({str(each["meta_info"]["input_token_logprobs"]) for each in answers}) == 1
    asked = [
        request
        for rank in front.ranks
        for request in rank.requests
        if "g-choices" in front.decode(request.prompt_ids)
    ]
    wanted = [request.params.num_prompt_logprobs for request in asked]
    assert sorted(map(str, wanted)) == ["0", "None", "None"]


def test_logprobs_are_pairs_of_value_and_token(front: FrontProcess) -> None:
    front.script("g-logprobs", "ab")
    ask = {"text": "g-logprobs", "return_logprob": True, "top_logprobs_num": 2}
    info = generate(front, **ask)["meta_info"]
    assert [entry[2] for entry in info["output_token_logprobs"]] == [None] * info["completion_tokens"]
    assert all(len(top) == 2 for top in info["output_top_logprobs"])
    assert "input_token_logprobs" not in info
    whole = generate(front, **ask, logprob_start_len=0, return_text_in_logprobs=True)["meta_info"]
    tokens = whole["input_token_logprobs"]
    assert len(tokens) == whole["prompt_tokens"] and tokens[0][0] is None and tokens[1][0] < 0
    assert "".join(entry[2] for entry in tokens).endswith("g-logprobs")
    later = generate(front, **ask, logprob_start_len=2)["meta_info"]["input_token_logprobs"]
    assert [entry[:2] for entry in later] == [entry[:2] for entry in tokens[2:]]


def test_a_prompt_that_fills_the_context_is_scored(front: FrontProcess) -> None:
    body = {"input_ids": [40] * MAX_LEN, "sampling_params": {"max_new_tokens": 0}}
    info = generate(front, **body, return_logprob=True, logprob_start_len=0)["meta_info"]
    assert len(info["input_token_logprobs"]) == info["prompt_tokens"] == MAX_LEN
    assert info["output_token_logprobs"] == []
    whole = generate(front, **body)
    events = front.post("/generate", json=body | {"stream": True}).text.split("\n\n")
    for content in (whole, json.loads(events[-3].removeprefix("data: "))):
        info = content["meta_info"]
        assert (content["text"], content["output_ids"], info["completion_tokens"]) == ("", [], 0)
        assert info["finish_reason"] == {"type": "length", "length": 0}


def test_a_stop_string_is_the_match_and_may_be_kept(front: FrontProcess) -> None:
    front.script("g-stop", "one END two", finish=FinishReason.LENGTH)
    for keeps, text in ((False, "one "), (True, "one END")):
        answer = generate(front, text="g-stop", sampling_params={"stop": "END", "no_stop_trim": keeps})
        assert answer["text"] == text
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "END"}


def test_a_regex_ends_an_answer_and_its_match_stays(front: FrontProcess) -> None:
    front.script("g-matched", "one 27 two 345 six", finish=FinishReason.LENGTH)
    for regex in ("[0-9]{3}", ["END", "[0-9]{3}"]):
        answer = generate(front, text="g-matched", sampling_params={"stop_regex": regex})
        assert answer["text"] == "one 27 two 345"
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "[0-9]{3}"}
    later = generate(front, text="g-matched", sampling_params={"stop_regex": "[0-9]+", "min_new_tokens": 8})
    assert later["text"] == "one 27 two 3"
    both = generate(front, text="g-matched", sampling_params={"stop_regex": "[0-9]{3}", "stop": "two"})
    assert both["text"] == "one 27 "


def test_stop_token_ids_beyond_the_vocabulary_are_never_seen(front: FrontProcess) -> None:
    generate(front, text="g-beyond", sampling_params={"stop_token_ids": [77, 320, 10**9]})
    assert front.asked("g-beyond").params.stop_token_ids == (1, 77)


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({}, "text", "Set either text or input_ids"),
        ({"text": "a", "input_ids": [5]}, "text", "Set either text or input_ids"),
        ({"text": "a", "video_data": "x"}, "video_data", "not supported by this server; leave it out"),
        ({"text": "a", "lora_path": "x"}, "lora_path", "not a loaded adapter"),
        ({"text": "a", "sampling_params": {"stop_regex": "a*"}}, "stop_regex", "matches the empty text"),
        ({"text": "a", "sampling_params": {"stop_regex": ["^a"]}}, "stop_regex", "'^a' cannot be used"),
        (
            {"text": "a", "sampling_params": {"stop_regex": 5}},
            "stop_regex",
            "must be a non-empty string or a list",
        ),
        ({"text": "a", "sampling_params": {"stop_regex": ["a"] * 9}}, "stop_regex", "up to 8"),
        ({"text": "a", "sampling_params": {"top_q": 1}}, "sampling_params.top_q", "not supported"),
        ({"text": "a", "sampling_params": {"top_p": 7}}, "sampling_params.top_p", "got 7"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 10**6}}, None, "maximum context length"),
        ({"text": "a", "sampling_params": [{}]}, "sampling_params", "got [{}]"),
        ({"text": "a", "sampling_params": {"json_schema": "{"}}, None, ""),
        ({"text": "a", "top_logprobs_num": -1}, "top_logprobs_num", "got -1"),
        ({"input_ids": [10**9]}, "prompt", "out of vocabulary"),
    ],
)
def test_what_is_wrong_or_not_served_is_named(
    front: FrontProcess, body: dict[str, Any], param: str | None, said: str
) -> None:
    error = generate(front, 400, **body)["error"]
    assert said in error["message"] and (param is None or error["param"] == param), error
