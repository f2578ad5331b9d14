"""The block tables of sequences: how a sequence comes to its KV blocks, fills, publishes and leaves them.

A table only grows while its sequence runs. Its first blocks may be shared: full, published, never written again.
All others were acquired for this sequence alone, and tokens are written behind the shared ones only, so no two
sequences ever write one block.

Knows nothing of budgets and order; `scheduler.policy.scheduler` decides who runs.
"""

from bisect import bisect_left
from collections.abc import Sequence as Series

from kvcache.blocks import BlockPool
from kvcache.states import StatePiece, StatePool
from scheduler.policy.sequence import Sequence
from scheduler.policy.state_tables import StateTables


class BlockTables:
    """Keep `Sequence.block_ids` and the counts beside it in step with the pool."""

    def __init__(
        self,
        pool: BlockPool,
        enable_prefix_caching: bool,
        states: StatePool | None = None,
        *,
        keeps_snapshots: bool = True,
        num_drafts: int = 0,
    ) -> None:
        """`num_drafts`: that a step of a sequence may try, at most."""
        self._pool = pool
        self._states = None
        if states is not None:
            self._states = StateTables(states, pool, keeps_snapshots=keeps_snapshots, num_drafts=num_drafts)
        self._enable_prefix_caching = enable_prefix_caching
        self.leaving: set[Sequence] = (
            set()
        )  # no longer running, but in-flight batches may still write their blocks
        self.prefix_query_tokens = 0  # counter: prompt tokens looked up at a first admission
        self.prefix_hit_tokens = 0  # counter: of those, found

    def seat(self, sequence: Sequence, num_spare_blocks: int) -> bool:
        """Give a waiting sequence its cached prefix, if the blocks for all its other tokens are free as well.

        Args:
            num_spare_blocks: blocks that must stay free beyond those.
        """
        num_shareable = _num_shareable(sequence) if self._enable_prefix_caching else 0
        num_wanted = self._pool.blocks_for(len(sequence.token_ids)) + num_spare_blocks
        matched = self._find_prefix(sequence, num_shareable, num_wanted)
        if matched is None:
            return False
        self._pool.share(matched)
        sequence.held_keys.clear()
        sequence.block_ids = matched
        sequence.num_computed = sequence.num_planned = len(matched) * self._pool.block_tokens
        sequence.num_prefill_tokens = len(sequence.token_ids)
        sequence.num_admissions += 1
        looks_up = self._enable_prefix_caching and not sequence.wants_prompt_logprobs
        if looks_up and sequence.num_admissions == 1:
            sequence.num_cached_tokens = min(sequence.num_computed, sequence.num_prompt_tokens)
            self.prefix_query_tokens += sequence.num_prompt_tokens
            self.prefix_hit_tokens += sequence.num_cached_tokens
        return True

    def _find_prefix(self, sequence: Sequence, num_shareable: int, num_wanted: int) -> list[int] | None:
        """The cached blocks that a sequence begins with, and its state slots; None: what it wants besides is not free."""
        pool, token_ids, root = self._pool, sequence.token_ids, sequence.root_key
        if self._states is None:
            is_short = self._is_short(sequence, num_shareable, num_wanted)
            return None if is_short else pool.match(token_ids[:num_shareable], root)
        matched = pool.match(token_ids[:num_shareable], root)
        beginning = self._states.find(matched)
        num_held = sum(pool.num_holders(block_id) > 0 for block_id in matched[: beginning.num_blocks])
        if num_wanted > pool.num_free + num_held:
            return None
        is_seated = self._states.seat(
            sequence, beginning, num_matched=len(matched), num_shareable=num_shareable
        )
        return matched[: beginning.num_blocks] if is_seated else None

    def _is_short(self, sequence: Sequence, num_shareable: int, num_wanted: int) -> bool:
        """Whether too few blocks are free, beside cached ones that a sequence begins with.

        Cached blocks that nobody holds are free ones, whether they are shared or taken, and looking for them costs time by
        the prompt's length: only those that others hold help a sequence in, and these are remembered.
        """
        pool = self._pool
        num_held = pool.count_held(sequence.token_ids, num_shareable, sequence.held_keys, sequence.root_key)
        return num_wanted > pool.num_free + num_held

    @property
    def has_states(self) -> bool:
        """Whether the model keeps states."""
        return self._states is not None

    def lacks_blocks(self, sequence: Sequence, num_spare_blocks: int) -> bool:
        """Whether `seat` would refuse a waiting sequence; of models that keep no states."""
        assert self._states is None, "looking for states takes them"
        num_shareable = _num_shareable(sequence) if self._enable_prefix_caching else 0
        num_wanted = self._pool.blocks_for(len(sequence.token_ids)) + num_spare_blocks
        return self._is_short(sequence, num_shareable, num_wanted)

    def num_plannable_steps(self, sequences: Series[Sequence], most: int) -> int:
        """How many steps of one token of each there are blocks for, up to `most`."""
        num_free = self._pool.num_free

        def fits(num_steps: int) -> bool:
            ends = ((sequence, sequence.num_planned + num_steps) for sequence in sequences)
            missing = (self._pool.blocks_for(end) - len(sequence.block_ids) for sequence, end in ends)
            return sum(max(0, count) for count in missing) <= num_free

        if fits(most):
            return most
        return bisect_left(range(most), True, key=lambda num_steps: not fits(num_steps)) - 1

    def is_ready(self, sequence: Sequence) -> bool:
        """Whether another step of the sequence may be planned: not while steps in flight have all its states."""
        return self._states is None or self._states.can_plan(sequence)

    def num_ready(self, sequence: Sequence) -> int:
        """How many tokens its next step may have, if the state behind each of them is to be kept."""
        return (
            self._pool.num_blocks * self._pool.block_tokens
            if self._states is None
            else sequence.states.num_promised
        )

    def num_plannable(self, sequence: Sequence, num_spare_blocks: int = 0) -> int:
        """How many more tokens the sequence's blocks and the free ones hold, if so many of these stay free."""
        num_blocks = len(sequence.block_ids) + max(0, self._pool.num_free - num_spare_blocks)
        return num_blocks * self._pool.block_tokens - sequence.num_planned

    def plan(self, sequence: Sequence, num_tokens: int, *, num_drafts: int = 0) -> list[StatePiece]:
        """Hold blocks for the sequence's next tokens; as many must be free as are missing.

        `num_drafts`: of the tokens, the last, which may turn out not to be the sequence's.

        Returns:
            The states between them, where the model keeps any.
        """
        start = sequence.num_planned
        sequence.num_planned += num_tokens
        num_missing = self._pool.blocks_for(sequence.num_planned) - len(sequence.block_ids)
        if num_missing > 0:
            sequence.block_ids += self._pool.acquire(num_missing)
        sequence.num_in_flight += 1
        if self._states is None:
            return []
        return self._states.plan(sequence, start, sequence.num_planned, num_drafts=num_drafts)

    def take_token(self, sequence: Sequence) -> None:
        """Plan and advance by a token that is known, where nothing is in flight; of models that keep no states."""
        pool, start = self._pool, sequence.num_planned
        end = start + 1
        if end > len(sequence.block_ids) * pool.block_tokens:
            sequence.block_ids += pool.acquire(1)
        sequence.num_planned = end
        if self._enable_prefix_caching and end % pool.block_tokens == 0:
            self.advance(sequence, start, end)
        else:
            sequence.num_computed = end

    def reserve(self, sequence: Sequence, num_tokens: int, num_spare_blocks: int) -> None:
        """Hold blocks for so many tokens behind those planned, where they are free and leave others so many."""
        num_missing = self._pool.blocks_for(sequence.num_planned + num_tokens) - len(sequence.block_ids)
        if 0 < num_missing <= self._pool.num_free - num_spare_blocks:
            sequence.block_ids += self._pool.acquire(num_missing)

    def advance(self, sequence: Sequence, start: int, end: int, *, num_drafts: int = 0) -> None:
        """Note that tokens [start, end) are computed, and publish the blocks that they filled.

        `num_drafts`: as they were planned; of those that are not among the tokens nothing is kept.
        """
        assert start == sequence.num_computed, f"token {start} was run, {sequence.num_computed} was next"
        size = self._pool.block_tokens
        if self._enable_prefix_caching:
            for index in range(start // size, end // size):
                parent_id = sequence.block_ids[index - 1] if index else None
                token_ids = sequence.token_ids[index * size : (index + 1) * size]
                self._pool.publish(sequence.block_ids[index], token_ids, parent_id, sequence.root_key)
        if self._states is not None and num_drafts:
            self._states.advance_drafted(sequence, start, end)
        elif self._states is not None:
            self._states.advance(sequence, start, end)
        sequence.num_computed = end

    def vacate(self, sequence: Sequence) -> None:
        """Release the blocks of a sequence that no longer runs, or note that its last batch's commit must."""
        if sequence.num_in_flight:
            self.leaving.add(sequence)
            return
        self.leaving.discard(sequence)
        self._pool.release(sequence.block_ids)
        sequence.block_ids = []
        if self._states is not None:
            self._states.vacate(sequence)
        sequence.num_computed = sequence.num_planned = 0


def _num_shareable(sequence: Sequence) -> int:
    """How many of the first tokens need not be computed if their KV is cached.

    The last token always is: its logits are what the sampler needs. Where the prompt's logprobs are wanted, so is
    every token whose logits were not seen yet.
    """
    if sequence.wants_prompt_logprobs:
        return min(len(sequence.prompt_logprobs), len(sequence.token_ids) - 1)
    return len(sequence.token_ids) - 1
