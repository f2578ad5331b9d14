"""Two ranks of a host: requests are handed over, move and lose their rank at any time. Each gets its output as if alone, once."""

from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvcache.blocks import BlockPool
from kvcache.states import StatePool
from scheduler.policy.request import Expected, Request, RequestOutput, SamplingParams
from scheduler.policy.scheduler import Scheduler
from tests.scheduler.policy.test_any_history import check_outcome
from tests.support.engines.fake_tiers import FakeTiers
from tests.support.engines.guesses import Guesses
from tests.support.models.fake_model import VOCABULARY, PlannedRank

RANKS = st.integers(0, 1)  # of a host


class TwoRanksMachine(RuleBasedStateMachine):
    """Both ranks share the records of their host. Records vanish, and copies end late."""

    @initialize(
        num_blocks=st.integers(6, 14),
        block_tokens=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 4),
        extra_tokens=st.integers(0, 8),
        num_states=st.one_of(st.none(), st.integers(2, 12)),
        num_drafts=st.integers(0, 3),
        seed=st.integers(0, 1000),
        repeats_decodes=st.booleans(),
    )
    def start(self, **sizes: Any) -> None:
        self.sizes = sizes
        self.max_model_len = sizes["num_blocks"] * sizes["block_tokens"]
        self.generation = self.num_made = 0
        self.ranks: list[PlannedRank] = []
        for _ in range(2):
            self.ranks.append(self._new_rank(self.ranks[0].tiers if self.ranks else None))
        self.requests: dict[str, Request] = {}
        self.at: dict[str, int] = {}  # the rank of a request
        self.outputs: dict[str, list[RequestOutput]] = {}  # of both ranks, as they were delivered

    def _new_rank(self, shared: FakeTiers | None) -> PlannedRank:
        sizes, num_drafts = self.sizes, self.sizes["num_drafts"]
        batched = sizes["max_num_seqs"] + sizes["extra_tokens"]
        pool = BlockPool(sizes["num_blocks"], sizes["block_tokens"])
        states = StatePool(sizes["num_states"] + num_drafts + 1) if sizes["num_states"] else None
        self.num_made += 1
        scheduler = Scheduler(
            pool,
            max_num_seqs=sizes["max_num_seqs"],
            max_num_batched_tokens=batched,
            max_model_len=self.max_model_len,
            states=states,
            repeats_decodes=sizes["repeats_decodes"],
            drafter=Guesses(num_drafts, seed=self.num_made) if num_drafts else None,
        )
        rank = PlannedRank(pool, scheduler, batched, states)
        rank.tiers = FakeTiers(rank, sizes["seed"] + self.num_made, shared=shared)
        scheduler.use_tiers(rank.tiers)
        scheduler.forget_prefixes(self.generation)
        collect = rank.collect

        def note_and_collect(outputs: list[RequestOutput]) -> None:
            for output in outputs:
                self.outputs[output.request_id].append(output)
            collect(outputs)

        rank.collect = note_and_collect  # type: ignore[method-assign]
        rank.on_hand_over = self._continue_elsewhere
        return rank

    def _continue_elsewhere(self, released: RequestOutput) -> None:
        """Submit a released request to the other rank, with the tokens that were delivered."""
        name = released.request_id
        assert released.finish_reason is None
        self.at[name] = 1 - self.at[name]
        self._submit(name, num_awaited_tokens=released.num_saved_tokens)

    def _submit(self, name: str, **changes: Any) -> None:
        delivered = tuple(token for output in self.outputs[name] for token in output.token_ids)
        hands_over = self.requests[name].hands_over and (not delivered or name.endswith("1"))
        request = replace(self.requests[name], replayed_ids=delivered, hands_over=hands_over, **changes)
        self.ranks[self.at[name]].scheduler.add(request)
        if hands_over:
            self._expect(name, request)

    def _expect(self, name: str, request: Request | None) -> None:
        """Announce a request to the rank that does not have it, or let that rank give its blocks back."""
        self.ranks[1 - self.at[name]].scheduler.expect(Expected(name, request), 0.0)

    def _is_open(self, name: str) -> bool:
        return not any(output.finish_reason is not None for output in self.outputs[name])

    @rule(
        at=RANKS,
        family=st.integers(0, 1),
        num_shared=st.integers(0, 12),
        tail=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=4),
        max_tokens=st.integers(1, 10),
        stops=st.booleans(),
        hands_over=st.booleans(),
    )
    def add(
        self,
        at: int,
        family: int,
        num_shared: int,
        tail: list[int],
        max_tokens: int,
        stops: bool,
        hands_over: bool,
    ) -> None:
        name = f"r{len(self.requests)}"
        params = SamplingParams(max_tokens=max_tokens, stop_token_ids=(5,) if stops else ())
        prompt_ids = tuple([family] * num_shared + tail)
        self.requests[name] = Request(
            request_id=name, prompt_ids=prompt_ids, params=params, arrival_s=0.0, hands_over=hands_over
        )
        self.at[name], self.outputs[name] = at, []
        self._submit(name)

    @rule(at=RANKS)
    def plan(self, at: int) -> None:
        if len(self.ranks[at].launched) < 3:
            self.ranks[at].plan()

    @rule(at=RANKS, num_steps=st.integers(1, 8))
    def run_some_steps(self, at: int, num_steps: int) -> None:
        for _ in range(num_steps):
            self.ranks[at].plan()
            if self.ranks[at].launched:
                self.ranks[at].finish()

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 1000), even_if_begun=st.booleans(), num_steps=st.integers(0, 2))
    def move(self, which: int, even_if_begun: bool, num_steps: int) -> None:
        """Withdraw a request some steps after it was announced to the other rank."""
        name = f"r{which % len(self.requests)}"
        if even_if_begun and self._is_open(name):
            delivered = tuple(token for output in self.outputs[name] for token in output.token_ids)
            self._expect(name, replace(self.requests[name], replayed_ids=delivered))
            self.run_some_steps(self.at[name], num_steps)
        released = self.ranks[self.at[name]].scheduler.withdraw(name, even_if_begun=even_if_begun)
        if released is not None and released.is_returned:
            self._continue_elsewhere(released)

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 1000))
    def expect_no_more(self, which: int) -> None:
        """A rank may hear this at any time, also of requests that it does not expect."""
        self._expect(f"r{which % len(self.requests)}", None)

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 1000))
    def abort(self, which: int) -> None:
        name = f"r{which % len(self.requests)}"
        rank = self.ranks[self.at[name]]
        output = rank.scheduler.abort(name)
        rank.collect([output] if output else [])

    @rule(at=RANKS)
    def lose_a_rank(self, at: int) -> None:
        """Replace a rank by an empty one. Its requests continue on the other rank, and its unfinished copies are lost."""
        self.ranks[at] = self._new_rank(self.ranks[at].tiers)
        for name in [each for each, rank in self.at.items() if rank == at and self._is_open(each)]:
            self.at[name] = 1 - at
            self._submit(name)

    @rule()
    def forget_prefixes(self) -> None:
        self.generation += 1
        for rank in self.ranks:
            rank.scheduler.forget_prefixes(self.generation)

    def teardown(self) -> None:
        if not hasattr(self, "ranks"):
            return
        while any(rank.scheduler.has_work or rank.launched for rank in self.ranks):
            for rank in self.ranks:
                rank.drain()
        for name, request in self.requests.items():
            check_outcome(request, self.outputs[name], self.max_model_len)


TwoRanksMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
test_requests_that_move_between_two_ranks_get_what_they_get_alone = TwoRanksMachine.TestCase
