"""A whole service with drafts against one without: streams, whole answers, usage, stop strings and kills on real engines."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import httpx
import pytest

from benchmarks.models.foreseeing import foresee
from tests.support.models.mtp import write_mtp_checkpoint
from tests.support.requests.timed_streams import stream_all
from tests.support.service.real_service import START_S, RealService, write_tiny_model
from tests.support.service.service_processes import wait_until

pytestmark = pytest.mark.slow

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
MTP = {"method": "mtp", "num_speculative_tokens": 3}
SHARE = 0.02  # kept share of the layers' outputs; about half of the drafts are right
NUM_RANKS = 2
PIECES = 10  # received by every stream before a rank is killed
REPEATING = {"logit_bias": {str(token): 12.0 for token in range(100, 106)}}  # makes texts repeat themselves
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0, "logprobs": 2, **REPEATING},
    {"temperature": 1.0, "seed": 7, "n": 3, "presence_penalty": 0.7, "top_p": 0.9},
    {"temperature": 0.9, "seed": 8, "n": 2, "stop": ["a", "e t", "the"], **REPEATING},
    {
        "temperature": 1.0,
        "seed": 9,
        "n": 2,
        "stop": ["e"],
        "include_stop_str_in_output": True,
        "min_tokens": 7,
    },
    {"temperature": 1.0, "seed": 10, "structured_outputs": {"regex": "[a-d ]{20,50}"}},
    {"temperature": 0, "structured_outputs": {"choice": ["the cat sat", "the cat is", "on the mat"]}},
    {"temperature": 1.0, "seed": 11, "stop_token_ids": list(range(20, 90)), "min_tokens": 4},
    {"temperature": 0, "max_tokens": 1},
    {"temperature": 0, "max_tokens": 2, "logprobs": 1},
    {"temperature": 0.7, "seed": 12, "repetition_penalty": 1.3, "frequency_penalty": 0.3, **REPEATING},
)
BODIES: list[dict[str, Any]] = [
    {
        "model": "tiny",
        "prompt": f"the cat sat on the mat, the cat {copy} " * 2,
        "max_tokens": 70,
        "ignore_eos": True,
    }
    | options
    for copy in range(2)
    for options in KINDS
]


class Pair(NamedTuple):
    """A service without drafts and one with drafts."""

    plain: RealService
    drafting: RealService


@pytest.fixture(scope="module", params=["ngram", "mtp"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp(request.param)
    model = write_tiny_model(directory / "tiny")
    config = NGRAM
    if request.param == "mtp":
        config = MTP
        write_mtp_checkpoint("deepseek_v3", model, change=partial(foresee, share=SHARE), vocab_size=320)
    with ExitStack() as stack:
        made = [
            stack.enter_context(
                RealService.serve(
                    model, directory / f"{at}.txt", f"-dp={NUM_RANKS}", "--max-model-len=256", *flags
                )
            )
            for at, flags in enumerate(((), ("--speculative-config", json.dumps(config))))
        ]
        yield Pair(*(each.wait_ready() for each in made))


@pytest.fixture(scope="module")
def expected(pair: Pair) -> list[tuple[object, ...]]:
    """The answers to all requests without drafts."""
    return [each.said for each in stream_all(pair.plain.url, BODIES)]


def whole(service: RealService, body: dict[str, Any], path: str = "completions") -> dict[str, Any]:
    """Return an answer that is not streamed, without the fields that differ between answers."""
    answer = service.post(f"/v1/{path}", json=body, timeout_s=120)
    assert answer.status_code == 200, answer.text
    said = answer.json()
    usage = {key: said["usage"][key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return {"choices": said["choices"], "usage": usage}


def counted(service: RealService, name: str) -> float:
    """Return a metric, summed over ranks."""
    lines = service.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))


def test_streams_are_those_of_a_service_without_drafts(
    pair: Pair, expected: list[tuple[object, ...]]
) -> None:
    found = [each.said for each in stream_all(pair.drafting.url, BODIES)]
    for body, said, wanted in zip(BODIES, found, expected, strict=True):
        assert said == wanted, body


def test_whole_answers_are_those_of_a_service_without_drafts(pair: Pair) -> None:
    for body in BODIES:
        assert whole(pair.drafting, body) == whole(pair.plain, body), body


def test_scored_prompts_and_the_context_s_end_are_those_of_a_service_without_drafts(pair: Pair) -> None:
    prompt = "on the mat the cat sat " * 4
    for options in (
        {"prompt_logprobs": 2, "max_tokens": 20},
        {"echo": True, "logprobs": 2, "max_tokens": 20},
        {"echo": True, "logprobs": 1, "max_tokens": 0},
        {"max_tokens": None, "ignore_eos": True},
    ):
        body = {"model": "tiny", "prompt": prompt, "temperature": 0, **options}
        body = {key: value for key, value in body.items() if value is not None}
        assert whole(pair.drafting, body) == whole(pair.plain, body), options
    chat = {
        "model": "tiny", "messages": [{"role": "user", "content": prompt}], "max_tokens": 500, "temperature": 0,
        "logprobs": True, "top_logprobs": 2, "ignore_eos": True,
    }  # fmt: skip
    chat["max_tokens"] = 100
    assert whole(pair.drafting, chat, "chat/completions") == whole(pair.plain, chat, "chat/completions")


def test_a_client_that_leaves_amid_drafts_frees_its_blocks(pair: Pair) -> None:
    body = {
        "model": "tiny",
        "prompt": "the cat the cat",
        "max_tokens": 200,
        "ignore_eos": True,
        "stream": True,
    }
    for _ in range(6):
        with httpx.stream("POST", f"{pair.drafting.url}/v1/completions", json=body, timeout=60) as answer:
            next(answer.iter_lines())
    wait_until(
        lambda: counted(pair.drafting, "vllm:num_requests_running") == 0,
        lambda: f"a request still runs; {pair.drafting.output()}",
    )
    assert whole(pair.drafting, BODIES[0]) == whole(pair.plain, BODIES[0])


def test_vllm_s_metrics_count_drafts(pair: Pair) -> None:
    stream_all(pair.drafting.url, BODIES)
    drafts, tokens, accepted = (
        counted(pair.drafting, f"vllm:spec_decode_num_{name}_total")
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    assert 0 < drafts <= tokens and 0 < accepted <= tokens
    by_place = counted(pair.drafting, "vllm:spec_decode_num_accepted_tokens_per_pos_total")
    assert by_place == accepted
    assert "vllm:spec_decode" not in pair.plain.get("/metrics").text


def test_a_killed_engine_changes_no_stream_and_comes_back(
    pair: Pair, expected: list[tuple[object, ...]]
) -> None:
    service = pair.drafting

    def kill() -> None:
        os.kill(service.engines()[1], signal.SIGKILL)

    def is_whole() -> bool:
        status = service.status()
        return (status["phase"], status["members"]) == ("serving", [*range(NUM_RANKS)])

    streams = stream_all(service.url, BODIES, pieces=PIECES, then=kill)
    for body, said, wanted in zip(BODIES, (each.said for each in streams), expected, strict=True):
        assert said == wanted, body
    wait_until(lambda: "rank 1 serves again" in service.output(), service.output, within_s=START_S)
    wait_until(is_whole, service.output, within_s=START_S)
    assert [each.said for each in stream_all(service.url, BODIES)] == expected
