"""One simulated rank: the real scheduler over a real block pool, with a counted clock.

While a rank only gives every running request one token per step, nothing is computed: the rank *coasts*, its rows are known
in advance, and `catch_up` takes all steps at once (`SkippingScheduler.skip`). An arriving request wakes it, and so does the
end of its plain steps. The result is the same as if every step had been planned; a test compares both.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from kvcache.blocks import BlockPool
from scheduler.policy.batch import StepBatch
from scheduler.policy.request import RequestOutput
from scheduler.policy.sequence import Sequence
from scheduler.policy.skipping import SkippingScheduler
from scheduler.step.lockstep import Agreement
from scheduler.step.prefill_pace import PrefillPace

NEVER = 1 << 62  # a step that is never reached


class RankLimits(NamedTuple):
    """The limits of a rank, named as the service's options."""

    num_blocks: int
    block_tokens: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 131_072
    enable_prefix_caching: bool = True
    target_itl_s: float | None = None
    is_paced: bool = True  # prompts are cut to limit the wait of streams; see `scheduler.step.prefill_pace`


class Rows(NamedTuple):
    """A rank's rows in one step, with the fields of `RankRows`."""

    prefill: int
    decode: int
    attended: int
    prefill_attended: int


NO_ROWS = Rows(0, 0, 0, 0)


class SimulatedRank:
    """A rank between steps; its caller numbers the steps from 1."""

    def __init__(self, limits: RankLimits) -> None:
        """Create an empty rank.

        Raises:
            SchedulerLimitsError: The limits contradict each other.
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
        self.done_step = 0  # the last step with results in the scheduler
        self.taken: list[Sequence] = []  # sequences of the planned step that already have their token
        self._batch: StepBatch | None = None

    @property
    def kv_usage(self) -> float:
        """Return the share of blocks that requests hold."""
        return 1 - self.pool.num_free / self.pool.num_blocks

    def plan(self, agreement: Agreement, now_s: float, *, is_stepwise: bool) -> Rows:
        """Plan a step as the engine does, and return its rows.

        `is_stepwise` plans only with `Scheduler.schedule`.
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
        """Commit the planned step's tokens; every request samples its own number."""
        assert self._batch is not None, "a step is planned before it is committed"
        batch, self._batch = self._batch, None
        self.done_step = step
        tokens = [answer_token(item.sequence.request.request_id) for item in batch.items if item.samples]
        outputs = [*self.scheduler.commit(batch, tokens, [None] * len(tokens)), *batch.begun]
        self._end_saves()
        return outputs

    def _end_saves(self) -> None:
        """Release the blocks that are saved to host memory, which takes no time here. No load times out."""
        self.scheduler.collect(-math.inf)

    def catch_up(self, step: int, told: Callable[[str, int], None]) -> list[RequestOutput]:
        """Take the plain steps up to and including this one.

        Args:
            told: Called with every request that ran in them and its number of tokens.

        Returns: Outputs of the requests that ended in the last of them.
        """
        num_steps, self.done_step = step - self.done_step, step
        if not num_steps or not self.scheduler.running:
            return []
        for sequence in self.scheduler.running:
            told(sequence.request.request_id, num_steps)
        outputs = self.scheduler.skip(num_steps)
        self._end_saves()
        return outputs

    def coasting_rows(self) -> Rows:
        """Return the rows of the next step if it is a plain one."""
        running = self.scheduler.running
        return Rows(0, len(running), sum(len(sequence.token_ids) for sequence in running), 0)


def request_id_of(number: int) -> str:
    """Return the id of the n-th request of a simulation."""
    return str(2 * number + 1)


def answer_token(request_id: str) -> int:
    """Return the token that a request's answer consists of; no other request's text contains it."""
    return int(request_id)


def prompt_tokens(
    number: int, num_tokens: int, hash_ids: tuple[int, ...], hash_tokens: int
) -> tuple[int, ...]:
    """Return the n-th request's prompt: one token per hash id, or the request's own token without hash ids.

    Args:
        hash_ids: Small, dense numbers, one per `hash_tokens`.
    """
    if not hash_ids:
        return (answer_token(request_id_of(number)),) * num_tokens
    tokens: list[int] = []
    for each in hash_ids:
        tokens += [2 * each] * hash_tokens
    return tuple(tokens[:num_tokens])
