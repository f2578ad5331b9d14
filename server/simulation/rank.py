"""One simulated rank: the real scheduler over a real block pool, driven by a clock that is only counted.

While all that a rank does is give every running request a token per step, nothing is computed: the rank *coasts*, its rows
are known ahead, and `catch_up` takes the steps in one go (`SkippingScheduler.skip`). It is woken by a request that arrives, or
when the last plain step is over. What comes of it is the same as if every step had been planned; a test compares both.
"""

from collections.abc import Callable
from typing import NamedTuple

from kvcache.blocks import BlockPool
from scheduler.policy.batch import StepBatch
from scheduler.policy.request import RequestOutput
from scheduler.policy.sequence import Sequence
from scheduler.policy.skipping import SkippingScheduler
from scheduler.step.lockstep import Agreement
from scheduler.step.prefill_pace import PrefillPace

NEVER = 1 << 62  # a step that does not come


class RankLimits(NamedTuple):
    """What a rank may run and hold; named as the service's options."""

    num_blocks: int
    block_tokens: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 131_072
    enable_prefix_caching: bool = True
    target_itl_s: float | None = None
    is_paced: bool = True  # prompts are cut to what streams can wait for; see `scheduler.step.prefill_pace`


class Rows(NamedTuple):
    """A rank's rows of one step, as `RankRows` has them."""

    prefill: int
    decode: int
    attended: int
    prefill_attended: int


NO_ROWS = Rows(0, 0, 0, 0)


class SimulatedRank:
    """A rank between steps; steps are numbered from 1 by whoever drives it."""

    def __init__(self, limits: RankLimits) -> None:
        """Set up an empty rank.

        Raises:
            SchedulerLimitsError: the limits contradict each other.
        """
        self.pool = BlockPool(limits.num_blocks, limits.block_tokens, secret=bytes(16))
        self.scheduler = SkippingScheduler(
            self.pool,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
            enable_prefix_caching=limits.enable_prefix_caching,
        )
        self.pace = PrefillPace(limits.target_itl_s, is_limited=limits.is_paced)
        self.done_step = 0  # the last one whose outcome the scheduler has
        self.taken: list[Sequence] = []  # of the planned step, what has its token already
        self._batch: StepBatch | None = None

    @property
    def kv_usage(self) -> float:
        """Share of the blocks that requests hold."""
        return 1 - self.pool.num_free / self.pool.num_blocks

    def plan(self, agreement: Agreement, now_s: float, *, is_stepwise: bool) -> Rows:
        """Plan a step as the engine does, and say what is in it.

        `is_stepwise`: by nothing but `Scheduler.schedule`.
        """
        limits = {"prefill_budget": agreement.prefill_budget, "most_tokens": agreement.agreed_tokens or None}
        if is_stepwise:
            batch = self.scheduler.schedule(**limits, now_s=now_s)
        else:
            batch, self.taken = self.scheduler.schedule_rest(**limits, now_s=now_s)
        self._batch = batch
        attended = sum([len(sequence.token_ids) - 1 for sequence in self.taken])
        of_prompts, num_decodes = 0, batch.num_tokens - batch.num_prefill_tokens
        for index, item in enumerate(batch.items):
            count = item.num_tokens
            reads = count * item.start + count * (count + 1) // 2
            attended += reads
            if index >= num_decodes:  # a decode is one token, and decodes come first
                of_prompts += reads
        return Rows(batch.num_prefill_tokens, num_decodes + len(self.taken), attended, of_prompts)

    def commit(self, step: int) -> list[RequestOutput]:
        """Take the planned step's tokens; every request samples its own number."""
        assert self._batch is not None, "a step is planned before it is committed"
        batch, self._batch = self._batch, None
        self.done_step = step
        tokens = [answer_token(item.sequence.request.request_id) for item in batch.items if item.samples]
        return [*self.scheduler.commit(batch, tokens, [None] * len(tokens)), *batch.begun]

    def catch_up(self, step: int, told: Callable[[str, int], None]) -> list[RequestOutput]:
        """Take the plain steps up to this one, this one included.

        Args:
            told: called with every request that ran in them and its tokens.

        Returns: of requests that ended in the last of them.
        """
        num_steps, self.done_step = step - self.done_step, step
        if not num_steps or not self.scheduler.running:
            return []
        for sequence in self.scheduler.running:
            told(sequence.request.request_id, num_steps)
        return self.scheduler.skip(num_steps)

    def coasting_rows(self) -> Rows:
        """The next step's rows, where it is a plain one."""
        running = self.scheduler.running
        return Rows(0, len(running), sum(len(sequence.token_ids) for sequence in running), 0)


def request_id_of(number: int) -> str:
    """Name the n-th request of a simulation."""
    return str(2 * number + 1)


def answer_token(request_id: str) -> int:
    """The token that a request's answer is made of: no other request's text has it."""
    return int(request_id)


def prompt_tokens(
    number: int, num_tokens: int, hash_ids: tuple[int, ...], hash_tokens: int
) -> tuple[int, ...]:
    """Make the n-th request's prompt: a token per hash id, its own where the trace does not say what it shares.

    Args:
        hash_ids: small and dense, one per `hash_tokens`.
    """
    if not hash_ids:
        return (answer_token(request_id_of(number)),) * num_tokens
    tokens: list[int] = []
    for each in hash_ids:
        tokens += [2 * each] * hash_tokens
    return tuple(tokens[:num_tokens])
