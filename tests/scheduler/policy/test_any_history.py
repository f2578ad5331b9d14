"""Under any events, a request gets its output as if alone, exactly once, and every block is returned."""

import random
from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvcache.blocks import BlockPool
from kvcache.states import StatePool
from scheduler.policy.request import FinishReason, Request, RequestOutput, SamplingParams
from scheduler.policy.scheduler import Scheduler
from tests.support.engines.fake_tiers import FakeTiers
from tests.support.engines.guesses import Guesses
from tests.support.models.fake_model import VOCABULARY, PlannedRank, prompt_logprobs_of, serve_alone

CUT_SHORT = {FinishReason.ABORT, FinishReason.DEADLINE}


def check_outcome(request: Request, outputs: list[RequestOutput], max_model_len: int) -> None:
    """Check for exactly one end, and for the tokens of a request served alone, or a prefix of them if it was cut short."""
    assert [one.finish_reason is not None for one in outputs].count(True) == 1
    tokens = [token for one in outputs for token in one.token_ids]
    of_prompt = [one.prompt_logprobs for one in outputs if one.token_ids]
    if of_prompt:
        wanted = request.params.num_prompt_logprobs is not None and not request.replayed_ids
        assert of_prompt[0] == (prompt_logprobs_of(request) if wanted else []), "due with the first token"
        assert not any(of_prompt[1:])
    if len(request.prompt_ids) > max_model_len:
        assert (tokens, outputs[-1].finish_reason) == ([], FinishReason.ERROR)
        return
    expected, reason = serve_alone(request, max_model_len)
    if outputs[-1].finish_reason in CUT_SHORT:
        assert tokens == expected[: len(tokens)]
    else:
        assert (tokens, outputs[-1].finish_reason) == (expected, reason)


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, aborts, deadlines and steps planned up to two ahead, in any order."""

    @initialize(
        num_blocks=st.integers(6, 14),
        block_tokens=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 5),
        extra_tokens=st.integers(0, 8),
        caching=st.booleans(),
        num_states=st.one_of(st.none(), st.integers(2, 16)),
        rotary_limit=st.one_of(st.none(), st.integers(1, 20)),
        num_drafts=st.integers(0, 4),
        overlaps=st.booleans(),
        tiers_seed=st.one_of(st.none(), st.integers(0, 1000)),
        repeats_decodes=st.booleans(),
    )
    def start(
        self,
        num_blocks: int,
        block_tokens: int,
        max_num_seqs: int,
        extra_tokens: int,
        caching: bool,
        num_states: int | None,
        rotary_limit: int | None,
        num_drafts: int,
        overlaps: bool,
        tiers_seed: int | None,
        repeats_decodes: bool,
    ) -> None:
        self.max_model_len = num_blocks * block_tokens
        batched = max_num_seqs + extra_tokens
        pool = BlockPool(num_blocks, block_tokens)
        states = None if num_states is None else StatePool(num_states + num_drafts + caching)
        self.guesses = Guesses(num_drafts, seed=num_blocks) if num_drafts else None
        scheduler = Scheduler(
            pool,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=batched,
            max_model_len=self.max_model_len,
            enable_prefix_caching=caching,
            states=states,
            keeps_snapshots=caching,
            rotary_limit=rotary_limit,
            repeats_decodes=repeats_decodes,
            drafter=self.guesses,
            overlaps=overlaps and not num_drafts,
        )
        self.rank = PlannedRank(pool, scheduler, batched, states, rotary_limit)
        self.rank.on_hand_over = self._submit_handed_over
        if tiers_seed is not None and caching:
            self.rank.tiers = FakeTiers(self.rank, tiers_seed)
            scheduler.use_tiers(self.rank.tiers)
        self.requests: list[Request] = []
        self.replayed: dict[str, tuple[int, ...]] = {}  # of requests that were withdrawn
        self.now_s = 0.0

    def _submit_handed_over(self, output: RequestOutput) -> None:
        """Continue a request that the rank handed over, on the same rank."""
        name = output.request_id
        assert output.finish_reason is None and len(output.token_ids) == 1
        request = next(each for each in self.requests if each.request_id == name)
        delivered = (*request.replayed_ids, *self.rank.tokens_of(name))
        assert output.num_saved_tokens < len(request.prompt_ids) + len(delivered)
        self.replayed[name] = delivered
        self.rank.scheduler.add(
            replace(
                request,
                replayed_ids=delivered,
                hands_over=name.endswith("1"),  # such a request is handed over after every token
                num_awaited_tokens=output.num_saved_tokens,
            )
        )

    @rule(
        family=st.integers(0, 1),
        num_shared=st.integers(0, 12),
        tail=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=4),
        max_tokens=st.integers(1, 10),
        min_tokens=st.integers(0, 3),
        num_replayed=st.integers(0, 3),
        patience_s=st.one_of(st.none(), st.integers(1, 20)),
        stops=st.booleans(),
        num_prompt_logprobs=st.sampled_from([None, None, 0]),
        priority=st.sampled_from([0, 0, 1, -1]),
        key_id=st.sampled_from("abc"),
        prefix_at=st.sampled_from(["", "peer:1"]),
        hands_over=st.booleans(),
    )
    def add(
        self,
        family: int,
        num_shared: int,
        tail: list[int],
        max_tokens: int,
        min_tokens: int,
        num_replayed: int,
        patience_s: int | None,
        stops: bool,
        num_prompt_logprobs: int | None,
        priority: int,
        key_id: str,
        prefix_at: str,
        hands_over: bool,
    ) -> None:
        prompt_ids = tuple([family] * num_shared + tail)
        request = Request(
            request_id=f"r{len(self.requests)}",
            prompt_ids=prompt_ids,
            params=SamplingParams(
                max_tokens=max_tokens,
                min_tokens=min_tokens,
                stop_token_ids=(5,) if stops else (),
                num_prompt_logprobs=num_prompt_logprobs,
            ),
            arrival_s=self.now_s,
            deadline_s=None if patience_s is None else self.now_s + patience_s,
            priority=priority,
            key_id=key_id,
            prefix_at=prefix_at,
            hands_over=hands_over,
        )
        if len(prompt_ids) <= self.max_model_len:
            tokens, _ = serve_alone(request, self.max_model_len)
            replayed_ids = tuple(tokens[: min(num_replayed, len(tokens) - 1)])
            request = Request(**{**vars(request), "replayed_ids": replayed_ids})
        self.requests.append(request)
        self.rank.scheduler.add(request)

    @precondition(lambda self: len(self.rank.launched) < 3)
    @rule(prefill_budget=st.one_of(st.none(), st.integers(0, 6)))
    def plan(self, prefill_budget: int | None) -> None:
        self.rank.plan(prefill_budget, self.now_s)

    @precondition(lambda self: self.rank.launched)
    @rule()
    def finish(self) -> None:
        self.rank.finish()

    @rule(num_steps=st.integers(1, 8))
    def run_some_steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.rank.plan()
            if self.rank.launched:
                self.rank.finish()

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 1000))
    def abort(self, which: int) -> None:
        output = self.rank.scheduler.abort(self.requests[which % len(self.requests)].request_id)
        self.rank.collect([output] if output else [])

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 1000), even_if_begun=st.booleans())
    def withdraw_and_submit_again(self, which: int, even_if_begun: bool) -> None:
        """A request continues from the delivered tokens. Those of batches in flight are dropped."""
        request = self.requests[which % len(self.requests)]
        output = self.rank.scheduler.withdraw(request.request_id, even_if_begun=even_if_begun)
        if output is None:
            return
        assert output.is_returned or not even_if_begun
        if output.is_returned:
            delivered = (*request.replayed_ids, *self.rank.tokens_of(request.request_id))
            given = self.replayed.get(request.request_id, request.replayed_ids)
            assert even_if_begun or delivered == given, "a request that had begun was returned"
            self.replayed[request.request_id] = delivered
            self.rank.scheduler.add(Request(**{**vars(request), "replayed_ids": delivered}))

    @rule(generation=st.integers(1, 3))
    def forget_prefixes(self, generation: int) -> None:
        self.rank.scheduler.forget_prefixes(generation)

    @precondition(lambda self: not self.rank.scheduler.holds_blocks)
    @rule()
    def release_memory(self) -> None:
        self.rank.scheduler.free_cached()
        self.rank.lose_memory()

    @rule(passed_s=st.integers(1, 6))
    def expire(self, passed_s: int) -> None:
        self.now_s += passed_s
        self.rank.collect(self.rank.scheduler.expire(self.now_s))

    def teardown(self) -> None:
        if not hasattr(self, "rank"):
            return
        self.rank.drain()
        assert self.guesses is None or not self.guesses.known, "ended requests were not forgotten"
        for request in self.requests:
            check_outcome(request, self.rank.outputs[request.request_id], self.max_model_len)


SchedulerMachine.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
test_any_history_gives_each_request_what_it_gets_alone = SchedulerMachine.TestCase


def test_long_runs_under_pressure_preempt_share_and_evict_and_still_give_the_same_tokens() -> None:
    num_preemptions = num_hits = num_loads = num_fetches = 0
    for seed in range(12):
        rng = random.Random(seed)
        depth = 1 + seed % 3
        pool = BlockPool(16, 4)
        scheduler = Scheduler(
            pool, max_num_seqs=8, max_num_batched_tokens=24, max_model_len=60, repeats_decodes=seed % 4 > 1
        )
        rank = PlannedRank(pool, scheduler, 24)
        if seed % 2:
            rank.tiers = FakeTiers(rank, seed)
            scheduler.use_tiers(rank.tiers)
        requests: list[Request] = []
        while len(requests) < 60 or scheduler.has_work:
            if len(requests) < 60 and rng.random() < 0.4:
                shared = [rng.randrange(2)] * rng.choice([0, 8, 16])
                prompt_ids = (*shared, *(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 12))))
                params = SamplingParams(
                    max_tokens=rng.randint(1, 40),
                    stop_token_ids=(6,) if rng.random() < 0.3 else (),
                    num_prompt_logprobs=0 if rng.random() < 0.2 else None,
                )
                requests.append(
                    Request(
                        request_id=str(len(requests)),
                        prompt_ids=prompt_ids,
                        params=params,
                        arrival_s=0.0,
                        prefix_at=rng.choice(["", "peer:1"]),
                    )
                )
                scheduler.add(requests[-1])
            if requests and rng.random() < 0.02:
                output = scheduler.abort(rng.choice(requests).request_id)
                rank.collect([output] if output else [])
            planned = rank.plan(rng.choice([None, None, 0, 5]))
            if rank.launched and (len(rank.launched) >= depth or not planned.items):
                rank.finish()
        rank.drain()
        for request in requests:
            check_outcome(request, rank.outputs[request.request_id], 60)
        num_preemptions += scheduler.stats.num_preemptions
        num_hits += scheduler.stats.prefix_hit_tokens
        num_loads += rank.tiers.num_loads if rank.tiers else 0
        num_fetches += rank.tiers.num_fetches if rank.tiers else 0
    assert num_preemptions > 20 and num_hits > 1000, "the runs had too few preemptions or cache hits"
    assert num_loads > 20, "the runs loaded too few prefixes from tiers"
    assert num_fetches > 20, "the runs fetched too few prefixes from other nodes"
