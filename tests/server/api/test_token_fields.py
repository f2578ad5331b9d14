"""A request's fields as ranks receive them. Every invalid one is a 400 that names it."""

import dataclasses
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scheduler.policy.request import Request, SamplingParams, TokenBias
from server.api.sampling import asks_for
from server.api.schemas import (
    _UNSERVED,
    ChatRequest,
    CompletionRequest,
    Message,
    SamplingFields,
    refuse_unserved,
)
from server.api.served import ServedModel
from server.api.structure import _PEERS_FIELDS
from server.front.errors import ApiError
from server.front.structure.structure_checks import StructureChecks
from server.front.tokenizer import Tokenizer
from server.http.exchanges import seeds_from

MAX_LEN = 64
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def model(model_dir: Path) -> ServedModel:
    """A model with the tiny tokenizer and 320 tokens."""
    tokenizer = Tokenizer(str(model_dir))
    return ServedModel(
        names=("tiny",),
        tokenizer=tokenizer,
        sampling_defaults={},
        max_len=lambda: MAX_LEN,
        created=0,
        structures=StructureChecks(tokenizer.vocabulary),
    )


def asked(
    model: ServedModel, *prompts: list[int], max_tokens: int | None = 8, **fields: Any
) -> list[Request]:
    """Return the requests that ranks receive. Without max_tokens it is a chat: completions have a default."""
    body: ChatRequest | CompletionRequest
    if max_tokens is None:
        body = ChatRequest(messages=[Message(role="user")], **fields)
    else:
        body = CompletionRequest(max_tokens=max_tokens, **fields)
    refuse_unserved(body)
    asks = asks_for(body, model, prompts or ([5, 6, 7],), request_id="r", structure=None)
    return [ask.request for ask in asks]


def test_what_a_request_leaves_open_the_checkpoint_decides(model: ServedModel) -> None:
    advice = {
        "temperature": 0.2,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "max_new_tokens": 5,
    }
    advised = replace(model, sampling_defaults=advice)
    [params] = [request.params for request in asked(advised, max_tokens=None)]
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.2, 0.9, 7, 0.05)
    assert (params.repetition_penalty, params.max_tokens) == (1.1, 5)
    [params] = [request.params for request in asked(advised, temperature=0.7, repetition_penalty=1.0)]
    assert (params.temperature, params.repetition_penalty, params.max_tokens) == (0.7, 1.0, 8)


@pytest.mark.parametrize(("advised", "expected"), [(None, MAX_LEN - 3), (5, 5), (10_000, MAX_LEN - 3)])
def test_an_advised_length_is_cut_to_what_fits(
    model: ServedModel, advised: int | None, expected: int
) -> None:
    advice = {} if advised is None else {"max_new_tokens": advised}
    [request] = asked(replace(model, sampling_defaults=advice), max_tokens=None)
    assert request.params.max_tokens == expected


def test_biases_words_and_ids_reach_the_rank(model: ServedModel) -> None:
    [request] = asked(
        model,
        logit_bias={"5": -100, "319": 2.5},
        allowed_token_ids=[9, 8, 9],
        logprobs=1,
        logprob_token_ids=[3, 4],
        prompt_logprobs=2,
    )
    params = request.params
    assert params.logit_bias == (TokenBias(5, -100.0), TokenBias(319, 2.5))
    assert params.allowed_token_ids == (9, 8) and params.logprob_token_ids == (3, 4)
    assert (params.num_logprobs, params.num_prompt_logprobs) == (1, 2)


def test_bad_words_are_tokenized_with_and_without_a_blank_before_them(model: ServedModel) -> None:
    def tokens(text: str) -> tuple[int, ...]:
        return tuple(model.tokenizer.encode(text, add_special_tokens=False))

    [request] = asked(model, bad_words=["cat", " mat", "cat"])
    assert tokens(" cat") != tokens("cat"), "the tiny tokenizer knows words after blanks"
    assert set(request.params.bad_words) == {tokens("cat"), tokens(" cat"), tokens("mat"), tokens(" mat")}


def test_what_asks_for_nothing_is_accepted(model: ServedModel) -> None:
    [request] = asked(
        model,
        logit_bias={},
        bad_words=[],
        best_of=1,
        length_penalty=1.0,
        use_beam_search=False,
        priority=0,
        spaces_between_special_tokens=True,
        thinking_token_budget=-1,
        stream_options={},
        vllm_xargs={},
    )
    assert request.params.logit_bias == request.params.bad_words == ()
    assert len(asked(model, n=3, best_of=3)) == 3


def test_a_priority_goes_to_the_rank_where_the_service_has_them(model: ServedModel) -> None:
    assert [each.priority for each in asked(replace(model, has_priorities=True), n=2, priority=-3)] == [
        -3,
        -3,
    ]
    with pytest.raises(ApiError, match="--scheduling-policy priority") as caught:
        asked(model, priority=1)
    assert (caught.value.status, caught.value.param) == (400, "priority")


def test_a_cache_salt_goes_to_the_rank(model: ServedModel) -> None:
    assert [each.cache_salt for each in asked(model, n=2, cache_salt="tenant")] == ["tenant", "tenant"]
    assert asked(model)[0].cache_salt == ""


def test_n_choices_of_a_greedy_request_are_served(model: ServedModel) -> None:
    assert [request.params.temperature for request in asked(model, n=2, temperature=0)] == [0.0, 0.0]


def test_a_temperature_too_low_to_divide_by_is_greedy(model: ServedModel) -> None:
    assert asked(model, temperature=1e-40)[0].params.temperature == 0.0
    assert asked(model, temperature=1e-4)[0].params.temperature == 1e-4


@pytest.mark.parametrize(
    ("fields", "left"),
    [
        ({"truncate_prompt_tokens": 3}, [17, 18, 19]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, [17, 18, 19]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, [0, 1, 2]),
        ({"truncate_prompt_tokens": MAX_LEN}, list(range(20))),
    ],
)
def test_a_prompt_is_cut_on_the_side_asked_for(
    model: ServedModel, fields: dict[str, Any], left: list[int]
) -> None:
    assert list(asked(model, list(range(20)), **fields)[0].prompt_ids) == left


def test_minus_one_cuts_a_prompt_to_what_fits(model: ServedModel) -> None:
    [request] = asked(model, list(range(100)), truncate_prompt_tokens=-1)
    assert list(request.prompt_ids) == list(range(100 - (MAX_LEN - 8), 100)), "8 tokens are generated"


def test_every_field_is_in_the_documentation() -> None:
    text = (ROOT / "docs" / "sampling.md").read_text()
    elsewhere = "".join(
        (ROOT / "docs" / name).read_text() for name in ("structured_output.md", "tools.md", "endpoints.md")
    )
    fields = {*ChatRequest.model_fields, *CompletionRequest.model_fields, *_UNSERVED} - {"model"}
    assert not [name for name in sorted(fields) if f"`{name}" not in text + elsewhere]


def test_every_field_has_an_effect() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "server" / "api").rglob("*.py"))
    reaches_ranks = {field.name for kind in (Request, SamplingParams) for field in dataclasses.fields(kind)}
    structures = {
        *(name for name in SamplingFields.model_fields if name.startswith("guided_")),
        *_PEERS_FIELDS,
    }
    fields = {*ChatRequest.model_fields, *CompletionRequest.model_fields} - reaches_ranks - structures
    assert not fields - set(re.findall(r"(?<=body\.|self\.)\w+", sources))


@pytest.mark.parametrize(
    ("most", "count", "complaint"),
    [
        (None, 21, "logprobs is 21; this server returns at most 20 (--max-logprobs)."),
        (5, 6, "logprobs is 6; this server returns at most 5 (--max-logprobs)."),
        (
            5,
            -1,
            "logprobs is -1 (all log-probabilities); this server returns at most 5 (--max-logprobs).",
        ),
        (0, 1, "logprobs is 1; this server returns at most 0 (--max-logprobs)."),
    ],
)
def test_more_log_probabilities_than_the_service_gives_are_a_400(
    model: ServedModel, most: int | None, count: int, complaint: str
) -> None:
    with pytest.raises(ApiError) as caught:
        asked(replace(model, max_logprobs=most), logprobs=count)
    assert (caught.value.message, caught.value.param) == (complaint, "logprobs")


@pytest.mark.parametrize(
    ("most", "count", "gets"), [(40, 40, 40), (-1, 99, 99), (-1, 1000, 320), (-1, -1, 320)]
)
def test_a_service_may_give_more_log_probabilities(
    model: ServedModel, most: int, count: int, gets: int
) -> None:
    [request] = asked(replace(model, max_logprobs=most), logprobs=count)
    assert request.params.num_logprobs == gets


def test_a_service_with_a_seed_draws_the_same_ones_in_the_same_order(model: ServedModel) -> None:
    def drawn(seed: int | None) -> list[int]:
        served = replace(model, draw_seed=seeds_from(seed))
        return [asked(served)[0].params.seed for _ in range(3)]

    assert drawn(7) == drawn(7) != drawn(8)
    assert len({*drawn(7), *drawn(None), *drawn(None)}) == 9
    assert asked(replace(model, draw_seed=seeds_from(7)), seed=3)[0].params.seed == 3
