"""Prepare open requests for new weights before the ranks switch, so that their streams pause less.

After the switch a request starts again from its prompt, because KV that other weights computed is of no use. So before it, when all
ranks have the new version and the order to serve it, each rank runs the tokens of its open requests through the new model, in chunks
between its normal steps. The blocks that this fills are published under the keys of the new weights. After the switch the requests
find them as they find any cached prefix, and compute only the rest: the tokens of the last steps. No bit depends on this, because
the KV of a token does not depend on the chunk that computes it.

A chunk is collective: ranks without requests run padded rows. Copies of the requests run in a separate scheduler over the same
pools (`Scheduler.twin`). A copy takes free blocks only, and gives all of them back if a request lacks blocks; the request's prefix is
then computed after the switch. A chunk changes no figure and no output.

Bounded: a rank posts that it is prepared after about twice the chunks that its open requests need at the beginning, even if longer
requests have come. Until the other ranks are prepared, it continues with tokens generated meanwhile.

Rejected: running old and new weights for each request until it ends, which needs both models and two steps for as long as the longest
answer takes.
"""

import time
from collections.abc import Callable
from itertools import count

from moe.model import Model
from scheduler.policy.batch import StepBatch
from scheduler.policy.request import Request, SamplingParams
from scheduler.policy.scheduler import Scheduler
from scheduler.policy.sequence import Sequence, SequenceStatus
from scheduler.step.runner import Runner
from scheduler.weights.updates import PostedVersion

CHUNK_S = 0.15  # target duration of a chunk, which all streams wait for
LEAST_CHUNK, MOST_CHUNK = 32, 128  # tokens
# A chunk has at least this many tokens per running request, each of which generates one meanwhile.
TOKENS_PER_REQUEST = 4
# A request with one unprepared block is prepared further, but only one with more of them delays the switch.
DELAYING_BLOCKS = 2
_FEWEST_STEPS = 8


def most_steps(num_tokens: int) -> int:
    """Return the most chunks for which a rank delays the switch, if its open requests lack this many tokens at first."""
    return _FEWEST_STEPS + 2 * -(-num_tokens // LEAST_CHUNK)


class Preparation:
    """One rank's part. For the thread that runs steps."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        model: Model,
        *,
        agreed_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing runs before `step`.

        Args:
            scheduler: Serves the open requests. Prefix caching is enabled.
            runner: Its cache has the blocks of the scheduler's pool.
            model: The serving model.
            agreed_tokens: Most tokens of a rank in low-latency mode, equal on all ranks; 0 dispatches in normal mode.
        """
        self._scheduler, self._runner, self._model = scheduler, runner, model
        self._agreed_tokens, self._clock = agreed_tokens, clock
        # Most tokens of the next chunk. An image that must stay whole may exceed it.
        self._chunk_tokens = LEAST_CHUNK
        self._twin = scheduler.twin()
        scheduler.when_short(self._give_way)
        self._block_tokens = scheduler.pool.block_tokens
        self._ids = count()
        self.num_tokens = 0  # counter: tokens of chunks
        self._posted: PostedVersion | None = None  # the version that is being prepared
        self._copies: dict[Sequence, Sequence] = {}  # by open request
        self._num_prepared: dict[Sequence, int] = {}  # tokens, by open request
        self._left_out: set[Sequence] = set()  # requests without enough blocks
        self._steps_left = 0
        self._is_short = False

    @property
    def is_complete(self) -> bool:
        """Whether the ranks may switch as far as this one is concerned."""
        has_begun = self._posted is not None
        if self._is_short or (has_begun and not self._steps_left):
            return True
        return not self._lacking(DELAYING_BLOCKS * self._block_tokens)

    def step(self, posted: PostedVersion) -> None:
        """Run a chunk with the version that all ranks posted. Collective; raises as `Runner.run`."""
        if self._posted is None or self._posted.loaded is not posted.loaded:
            self._begin(posted)
        batch, begun_s = self._plan(), self._clock()
        self._runner.fill_cache(posted.loaded.model, batch, self._agreed_tokens)
        self._pace(batch.num_tokens, self._clock() - begun_s)
        self._commit(batch)
        self._steps_left = max(0, self._steps_left - 1)

    def end(self) -> None:
        """Release all blocks of copies. What was published stays in the cache. May be called at any time between steps."""
        if self._posted is None:
            return
        self._twin.clear()
        self._posted, self._is_short, self._steps_left = None, False, 0
        self._copies.clear()
        self._num_prepared.clear()
        self._left_out.clear()

    def _begin(self, posted: PostedVersion) -> None:
        self.end()
        self._posted = posted
        posted.loaded.model.join(self._model)
        self._twin.use_weights(posted.version.digest, posted.version.number)
        num_tokens = sum(self._num_missing(each) for each in self._lacking(self._block_tokens))
        self._steps_left = most_steps(num_tokens)

    def _pace(self, num_tokens: int, seconds: float) -> None:
        """Choose the next chunk's tokens by the last one's duration. Other ranks' chunks count in it."""
        if num_tokens >= LEAST_CHUNK:
            fitting = int(num_tokens * CHUNK_S / max(seconds, 1e-9))
            least = max(LEAST_CHUNK, TOKENS_PER_REQUEST * len(self._scheduler.running))
            self._chunk_tokens = min(MOST_CHUNK, max(least, fitting))

    def _lacking(self, num_tokens: int) -> list[Sequence]:
        """Return the open requests that lack at least this many prepared tokens, most first."""
        lacking = [
            each
            for each in self._scheduler.begun
            if self._num_missing(each) >= num_tokens and each not in self._left_out and _can_prepare(each)
        ]
        return sorted(lacking, key=self._num_missing, reverse=True)

    def _num_missing(self, sequence: Sequence) -> int:
        return len(sequence.token_ids) - self._num_prepared.get(sequence, 0)

    def _plan(self) -> StepBatch:
        """Plan the next chunk. Empty if there is nothing to prepare, or if blocks are short."""
        for original, copy in list(self._copies.items()):
            if original.status is SequenceStatus.ENDED:
                self._twin.abort(copy.request.request_id)
                del self._copies[original]
        if not self._is_short:
            self._add_copies()
        if self._copies and self._num_free < self._scheduler.pool.blocks_for(self._chunk_tokens) + len(
            self._copies
        ):
            self._give_way()
        batch = self._twin.schedule(prefill_budget=self._chunk_tokens)
        if self._copies and not batch.items:  # state slots are short
            self._give_way()
        return batch

    @property
    def _num_free(self) -> int:
        """Number of blocks that open requests do not need in the next step."""
        return self._scheduler.pool.num_free - len(self._scheduler.running) - 1

    def _add_copies(self) -> None:
        """Add copies of requests until they have the tokens of a chunk."""
        pool = self._scheduler.pool
        num_tokens = sum(len(each.token_ids) - each.num_computed for each in self._copies.values())
        num_promised = sum(
            pool.blocks_for(len(each.token_ids)) - len(each.block_ids) for each in self._copies.values()
        )
        for original in self._lacking(self._block_tokens):
            if num_tokens >= self._chunk_tokens:
                return
            if original in self._copies:
                continue
            num_blocks = pool.blocks_for(len(original.token_ids))
            if num_blocks + num_promised > self._num_free:
                self._left_out.add(original)
                continue
            request = _copy_of(original, f"copy {next(self._ids)}")
            self._twin.add(request)
            copy = self._twin.find(request.request_id)
            assert copy is not None, "tokens that are being served can be served"
            self._copies[original] = copy
            num_tokens += self._num_missing(original)
            num_promised += num_blocks

    def _commit(self, batch: StepBatch) -> None:
        """Publish what a chunk has filled. Copies end when all their tokens have run."""
        num_samples = sum(item.num_samples for item in batch.items)
        self._twin.commit(batch, [0] * num_samples, [None] * num_samples)
        self.num_tokens += batch.num_tokens
        for original, copy in list(self._copies.items()):
            if copy.status is SequenceStatus.ENDED:
                self._num_prepared[original] = copy.num_prompt_tokens
                del self._copies[original]

    def _give_way(self) -> None:
        """Release all blocks, because an open request may need them. This version is not prepared further."""
        if self._posted is not None:
            self._twin.clear()
            self._copies.clear()
            self._is_short = True


def _can_prepare(sequence: Sequence) -> bool:
    """Whether a request starts from its cached prefix after the switch.

    The new model has no adapters before it serves. Logprobs of a prompt need all its rows. A request that is handed over ends with
    its prompt.
    """
    request = sequence.request
    return not (request.adapter or sequence.wants_prompt_logprobs or request.hands_over)


def _copy_of(sequence: Sequence, request_id: str) -> Request:
    """Return a request that has the sequence's tokens as its prompt, and ends when they have run."""
    request = sequence.request
    return Request(
        request_id=request_id,
        prompt_ids=tuple(sequence.token_ids),
        params=SamplingParams(max_tokens=1, temperature=0.0),
        arrival_s=0.0,
        cache_salt=request.cache_salt,
        images=request.images,
    )
