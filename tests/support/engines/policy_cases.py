"""Requests and ranks for tests of the local scheduler."""

from kvcache.blocks import BlockPool
from scheduler.policy.batch import StepBatch
from scheduler.policy.request import Request, SamplingParams
from scheduler.policy.scheduler import Scheduler
from tests.support.models.fake_model import VOCABULARY, PlannedRank

BLOCK_TOKENS = 4


def request_of(
    request_id: str,
    prompt: int | tuple[int, ...],
    max_tokens: int = 8,
    *,
    replayed_ids: tuple[int, ...] = (),
    deadline_s: float | None = None,
    stop_token_ids: tuple[int, ...] = (),
    min_tokens: int = 0,
    priority: int = 0,
    key_id: str = "",
) -> Request:
    """Return a request. An int is a prompt of that many tokens, different for each id."""
    if isinstance(prompt, int):
        prompt = tuple((ord(request_id[0]) + index) % VOCABULARY for index in range(prompt))
    params = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=stop_token_ids)
    return Request(
        request_id=request_id,
        prompt_ids=prompt,
        params=params,
        arrival_s=0.0,
        deadline_s=deadline_s,
        replayed_ids=replayed_ids,
        priority=priority,
        key_id=key_id,
    )


def rank_of(
    num_blocks: int = 64,
    *,
    seqs: int = 8,
    batched: int = 16,
    length: int = 64,
    caching: bool = True,
) -> PlannedRank:
    pool = BlockPool(num_blocks, BLOCK_TOKENS)
    scheduler = Scheduler(
        pool,
        max_num_seqs=seqs,
        max_num_batched_tokens=batched,
        max_model_len=length,
        enable_prefix_caching=caching,
    )
    return PlannedRank(pool, scheduler, batched)


def step(rank: PlannedRank, prefill_budget: int | None = None) -> list[tuple[str, int, int, bool]]:
    """Plan and finish one step. Return its items as (request, start, tokens, samples)."""
    batch = rank.plan(prefill_budget)
    if batch.items:
        rank.finish()
    return shape_of(batch)


def shape_of(batch: StepBatch) -> list[tuple[str, int, int, bool]]:
    return [(i.sequence.request.request_id, i.start, i.num_tokens, i.samples) for i in batch.items]
