"""Thousands of schedules of accepted and rejected drafts: each request gets its output as if alone, and nothing leaks."""

import random

import pytest

from kvcache.blocks import BlockPool
from kvcache.states import StatePool
from scheduler.policy.request import Request, SamplingParams
from scheduler.policy.scheduler import Scheduler
from tests.scheduler.policy.test_any_history import check_outcome
from tests.support.engines.guesses import Guesses
from tests.support.models.fake_model import VOCABULARY, PlannedRank


def run_schedule(seed: int) -> Guesses:
    """Serve a few requests under pressure with drafts. Every rule is checked at each step."""
    rng = random.Random(seed)
    block_tokens, num_blocks = rng.choice([1, 2, 4]), rng.randint(8, 20)
    most_seqs, num_drafts = rng.randint(1, 4), rng.randint(1, 6)
    length = num_blocks * block_tokens * rng.choice([2, 3]) // 3  # of a sequence
    pool = BlockPool(num_blocks, block_tokens)
    states = StatePool(rng.randint(3, 24) + num_drafts) if rng.random() < 0.5 else None
    limit = rng.choice([None, None, rng.randint(1, 20)])
    guesses = Guesses(num_drafts, seed)
    batched = most_seqs + rng.randint(0, 12)
    caching = rng.random() < 0.8
    scheduler = Scheduler(
        pool, max_num_seqs=most_seqs, max_num_batched_tokens=batched, max_model_len=length, states=states,
        enable_prefix_caching=caching, keeps_snapshots=caching, rotary_limit=limit, drafter=guesses,
        repeats_decodes=rng.random() < 0.5,
    )  # fmt: skip
    rank = PlannedRank(pool, scheduler, batched, states, limit)
    requests = []
    for number in range(rng.randint(1, 6)):
        tail = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 5))]
        prompt = ([rng.randrange(2)] * rng.choice([0, 4, 8]) + tail)[: max(1, length - 2)]
        params = SamplingParams(
            max_tokens=rng.randint(1, 16),
            stop_token_ids=(5,) if rng.random() < 0.4 else (),
            min_tokens=rng.randint(0, 2),
        )
        requests.append(
            Request(request_id=str(number), prompt_ids=tuple(prompt), params=params, arrival_s=0.0)
        )
        scheduler.add(requests[-1])
        for _ in range(rng.randint(0, 3)):
            rank.plan(rng.choice([None, None, 0, 3]))
            if rank.launched and rng.random() < 0.8:
                rank.finish()
        if rng.random() < 0.05:
            output = scheduler.abort(rng.choice(requests).request_id)
            rank.collect([output] if output else [])
    rank.drain()
    assert not guesses.known, "ended requests were not forgotten"
    for request in requests:
        check_outcome(request, rank.outputs[request.request_id], length)
    return guesses


@pytest.mark.parametrize(
    ("first", "count"), [(0, 300), *(pytest.param(n, 1000, marks=pytest.mark.slow) for n in range(1000, 5000, 1000))]
)  # fmt: skip
def test_any_schedule_of_drafts_gives_each_request_what_it_gets_alone(first: int, count: int) -> None:
    guesses = [run_schedule(seed) for seed in range(first, first + count)]
    tried, accepted = sum(each.num_tried for each in guesses), sum(each.num_accepted for each in guesses)
    assert 0.3 * tried < accepted < 0.9 * tried and tried > 5 * count, (
        "too few drafts were accepted or rejected"
    )


def test_a_token_too_many_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a scheduler keeps a draft that was not sampled."""
    take = Scheduler._take

    def keeps_drafts(self: Scheduler, item, drawn, logprobs):  # type: ignore[no-untyped-def]
        return take(self, item, [*item.drafts, *drawn[len(item.drafts) :]], logprobs)

    monkeypatch.setattr(Scheduler, "_take", keeps_drafts)
    with pytest.raises(AssertionError):
        for seed in range(50):
            run_schedule(seed)
