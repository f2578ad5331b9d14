"""Log-probabilities in the local scheduler: of generated tokens and of prompts, each delivered once."""

from dataclasses import replace

from scheduler.policy.request import Logprobs, Request
from tests.support.fake_model import prompt_logprobs_of, serve_alone
from tests.support.policy_cases import rank_of, request_of, step


def test_logprobs_are_delivered_with_their_tokens() -> None:
    rank = rank_of()
    for request_id in "ab":
        rank.scheduler.add(request_of(request_id, 3, max_tokens=1))
    batch = rank.scheduler.schedule()
    logprobs = Logprobs(5, -0.5, [5], [-0.5])
    outputs = rank.scheduler.commit(batch, [4, 5], [None, logprobs])
    assert [(o.request_id, o.token_ids, o.logprobs) for o in outputs] == [
        ("a", [4], []),
        ("b", [5], [logprobs]),
    ]


def scoring(request: Request) -> Request:
    """The same, with its prompt's logprobs wanted."""
    return replace(request, params=replace(request.params, num_prompt_logprobs=0))


def test_a_prompt_s_logprobs_come_whole_with_the_first_token_however_it_is_cut() -> None:
    rank = rank_of(batched=8)
    request = scoring(request_of("a", 19, max_tokens=3))
    rank.scheduler.add(request)
    rank.drain()
    assert [len(output.prompt_logprobs) for output in rank.outputs["a"]] == [18, 0, 0]
    assert rank.outputs["a"][0].prompt_logprobs == prompt_logprobs_of(request)


def test_a_prompt_whose_logprobs_are_wanted_is_computed_although_it_is_cached() -> None:
    rank = rank_of()
    rank.scheduler.add(request_of("a", 13, max_tokens=1))
    rank.drain()
    queried = rank.scheduler.stats.prefix_query_tokens
    again = replace(scoring(request_of("a", 13, max_tokens=1)), request_id="b")
    rank.scheduler.add(again)
    rank.drain()
    assert rank.outputs["b"][0].prompt_logprobs == prompt_logprobs_of(again)
    assert rank.outputs["b"][0].num_cached_tokens == 0
    assert rank.scheduler.stats.prefix_query_tokens == queried, "what is not looked up is no miss"
    rank.scheduler.add(replace(request_of("a", 13, max_tokens=1), request_id="c"))
    rank.drain()
    assert rank.outputs["c"][0].num_cached_tokens == 12, "others find it as before"


def test_a_prompt_of_one_token_has_no_logprobs_to_tell() -> None:
    rank = rank_of()
    rank.scheduler.add(scoring(request_of("a", 1, max_tokens=2)))
    rank.drain()
    assert [output.prompt_logprobs for output in rank.outputs["a"]] == [[], []]


def test_what_was_scored_before_a_preemption_is_not_scored_again() -> None:
    rank = rank_of(num_blocks=7, batched=8, length=28)
    rank.scheduler.add(request_of("a", 3, max_tokens=22))
    step(rank)
    second = scoring(request_of("b", 14, max_tokens=2))
    rank.scheduler.add(second)
    while not rank.scheduler.stats.num_preemptions:  # a token of it at a time, while the other grows
        step(rank, prefill_budget=1)
        assert "b" not in rank.outputs, "it was to be preempted in the middle of its prompt"
    assert rank.num_scored > 4
    rank.drain()
    assert rank.outputs["b"][0].prompt_logprobs == prompt_logprobs_of(second)
    assert rank.num_scored == 13, "each once"


def test_a_replay_delivers_no_prompt_logprobs_because_the_first_token_brought_them() -> None:
    rank = rank_of()
    tokens, _ = serve_alone(request_of("a", 6), 64)
    rank.scheduler.add(scoring(request_of("a", 6, replayed_ids=tuple(tokens[:2]))))
    rank.drain()
    assert not any(output.prompt_logprobs for output in rank.outputs["a"])
    assert rank.num_scored == 0
