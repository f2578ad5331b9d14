"""The block tables of sequences: how a sequence acquires, fills, publishes and releases its KV blocks.

A table only grows while its sequence runs. Its first blocks may be shared: they are full, published and never written
again. The others are acquired for this sequence alone. Tokens are only written after the shared blocks, so no two
sequences ever write the same block.

Does not know budgets or order; `scheduler.policy.scheduler` decides which sequences run.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection
from collections.abc import Sequence as Series

from kvcache.blocks import BlockPool
from kvcache.states import StatePiece, StatePool
from scheduler.policy.sequence import Sequence
from scheduler.policy.state_tables import StateTables
from scheduler.policy.tier_tables import KeepsTiers, TierTables


class BlockTables:
    """Keep `Sequence.block_ids` and its counts consistent with the pool."""

    def __init__(
        self,
        pool: BlockPool,
        enable_prefix_caching: bool,
        states: StatePool | None = None,
        *,
        keeps_snapshots: bool = True,
        num_drafts: int = 0,
        overlaps: bool = False,
    ) -> None:
        """`num_drafts`: most drafts in a step of a sequence. `overlaps`: see `StateTables`."""
        self._pool = pool
        self._state_pool = states
        self.tiers: TierTables | None = None
        self._states = None
        if states is not None:
            self._states = StateTables(
                states, pool, keeps_snapshots=keeps_snapshots, num_drafts=num_drafts, overlaps=overlaps
            )
        self._enable_prefix_caching = enable_prefix_caching
        # Called when blocks or states are short: another user of the pools gives its own back.
        self.on_short: Callable[[], None] = lambda: None
        # Sequences that no longer run, but in-flight batches may still write their blocks.
        self.leaving: set[Sequence] = set()
        self.prefix_query_tokens = 0  # counter: prompt tokens looked up at a first admission
        self.prefix_hit_tokens = 0  # counter: those found

    def use_tiers(self, tiers: KeepsTiers, slots_in_flight: Callable[[], Collection[int]]) -> None:
        """Save blocks to tiers, and load prefixes from them. Call it before the first request. `slots_in_flight`: see `TierTables`."""
        self.tiers = TierTables(tiers, self._pool, self._state_pool, slots_in_flight)
        self._pool.forget_prefixes(tiers.secret)
        if self._states is not None:
            self._states.on_snapshot = self.tiers.offer_state

    def begin_load(self, sequence: Sequence, num_spare_blocks: int, now_s: float) -> bool:
        """Begin to load what a waiting sequence's cached prefix lacks. Returns whether it must wait for that."""
        if self.tiers is None:
            return False
        return self.tiers.look(sequence, _num_shareable(sequence), num_spare_blocks, now_s)

    def num_after_load(self, sequence: Sequence) -> int:
        """Return how many tokens a loading sequence has to run when its whole prefix is loaded."""
        size = self._pool.block_tokens
        return sequence.num_prefillable - _num_shareable(sequence) // size * size

    def begin_fetch(self, sequence: Sequence, now_s: float) -> None:
        """Begin to fetch a new sequence's prefix from the node that its request names."""
        if self.tiers is not None:
            self.tiers.fetch(sequence, _num_shareable(sequence), now_s)

    def expect(self, sequence: Sequence, now_s: float) -> None:
        """Begin to load the blocks of a request that another rank will hand over."""
        if self.tiers is not None and self._enable_prefix_caching:
            self.tiers.expect(sequence, now_s)

    def give_way(self) -> None:
        """Give back the blocks that are not held for running requests of this rank."""
        self.on_short()
        if self.tiers is not None:
            self.tiers.give_way()

    def forget_prefixes(self, generation: int) -> None:
        """Hide all cached prefixes. Those in tiers are hidden if their generation is older than this one."""
        self._pool.forget_prefixes(None if self.tiers is None else self.tiers.forget(generation))

    def free_cached(self) -> None:
        """Free all cached blocks and snapshots. Tiers keep theirs, under the same keys."""
        self._pool.free_cached()
        if self._state_pool is not None:
            self._state_pool.free_cached()

    def seat(self, sequence: Sequence, num_spare_blocks: int) -> bool:
        """Give a waiting sequence its cached prefix, if enough blocks for its other tokens are free.

        Args:
            num_spare_blocks: Number of blocks that must stay free beyond those.
        """
        num_shareable = _num_shareable(sequence) if self._enable_prefix_caching else 0
        num_wanted = self._pool.blocks_for(len(sequence.token_ids)) + num_spare_blocks
        if self.tiers is not None:
            num_wanted -= self.tiers.tails.end_of(sequence) > 0
        matched = self._find_prefix(sequence, num_shareable, num_wanted)
        if matched is None:
            return False
        self._pool.share(matched)
        sequence.held_keys.clear()
        sequence.block_ids = matched
        # A hand-over needs all blocks in the tiers. Those of a cached prefix may have been replaced there.
        sequence.num_offered = 0 if sequence.request.hands_over or sequence.offers_all else len(matched)
        sequence.num_computed = len(matched) * self._pool.block_tokens
        if self.tiers is not None:
            sequence.num_computed += self.tiers.tails.take(sequence, num_shareable)
        sequence.num_planned = sequence.num_computed
        sequence.num_prefill_tokens = sequence.num_prefillable
        sequence.num_admissions += 1
        looks_up = self._enable_prefix_caching and not sequence.wants_prompt_logprobs
        if looks_up and sequence.num_admissions == 1:
            sequence.num_cached_tokens = min(sequence.num_computed, sequence.num_prompt_tokens)
            self.prefix_query_tokens += sequence.num_prompt_tokens
            self.prefix_hit_tokens += sequence.num_cached_tokens
        return True

    def _find_prefix(self, sequence: Sequence, num_shareable: int, num_wanted: int) -> list[int] | None:
        """Return the cached blocks that a sequence starts with, and take its state slots. None if memory is short."""
        pool, token_ids, root = self._pool, sequence.key_ids, sequence.root_key
        if self._states is None:
            is_short = self._is_short(sequence, num_shareable, num_wanted)
            return None if is_short else pool.match(token_ids[:num_shareable], root)
        matched = pool.match(token_ids[:num_shareable], root)
        beginning = self._states.find(matched)
        num_held = sum(pool.num_holders(block_id) > 0 for block_id in matched[: beginning.num_blocks])
        if num_wanted > pool.num_free + num_held:
            return None
        # Later sequences may share what this one must run again for the logprobs of its prompt.
        num_later = _num_cacheable(sequence) if self._enable_prefix_caching else 0
        is_seated = self._states.seat(sequence, beginning, num_matched=len(matched), num_shareable=num_later)
        return matched[: beginning.num_blocks] if is_seated else None

    def _is_short(self, sequence: Sequence, num_shareable: int, num_wanted: int) -> bool:
        """Whether too few blocks are free for what the cached prefix does not cover.

        Unheld cached blocks count as free, whether shared or taken, and looking for them takes time proportional to the
        prompt. Only cached blocks that others hold help a sequence to start, and those are remembered.
        """
        pool = self._pool
        num_held = pool.count_held(sequence.key_ids, num_shareable, sequence.held_keys, sequence.root_key)
        return num_wanted > pool.num_free + num_held

    @property
    def has_states(self) -> bool:
        """Whether the model keeps states."""
        return self._states is not None

    def lacks_blocks(self, sequence: Sequence, num_spare_blocks: int) -> bool:
        """Whether `seat` would refuse a waiting sequence. Only for models without states."""
        assert self._states is None, "a lookup of states takes slots"
        num_shareable = _num_shareable(sequence) if self._enable_prefix_caching else 0
        num_wanted = self._pool.blocks_for(len(sequence.token_ids)) + num_spare_blocks
        return self._is_short(sequence, num_shareable, num_wanted)

    def num_plannable_steps(self, sequences: Series[Sequence], most: int) -> int:
        """Return the number of steps, up to `most`, with one token per sequence, for which there are blocks."""
        num_free = self._pool.num_free

        def fits(num_steps: int) -> bool:
            ends = ((sequence, sequence.num_planned + num_steps) for sequence in sequences)
            missing = (self._pool.blocks_for(end) - len(sequence.block_ids) for sequence, end in ends)
            return sum(max(0, count) for count in missing) <= num_free

        if fits(most):
            return most
        return bisect_left(range(most), True, key=lambda num_steps: not fits(num_steps)) - 1

    def is_ready(self, sequence: Sequence) -> bool:
        """Whether another step of the sequence may be planned. False while steps in flight hold all its states."""
        return self._states is None or self._states.can_plan(sequence)

    def num_ready(self, sequence: Sequence) -> int:
        """Return the most tokens of the next step if the state after each must be kept."""
        return (
            self._pool.num_blocks * self._pool.block_tokens
            if self._states is None
            else sequence.states.num_promised
        )

    def num_plannable(self, sequence: Sequence, num_spare_blocks: int = 0) -> int:
        """Return how many more tokens fit in the sequence's and the free blocks if `num_spare_blocks` stay free."""
        num_blocks, num_free = len(sequence.block_ids), self._pool.num_free - num_spare_blocks
        if num_free > 0:
            num_blocks += num_free
        return num_blocks * self._pool.block_tokens - sequence.num_planned

    def plan(self, sequence: Sequence, num_tokens: int, *, num_drafts: int = 0) -> list[StatePiece]:
        """Acquire blocks for the sequence's next tokens. The missing blocks must be free.

        `num_drafts`: number of drafts at the end, which may turn out wrong.

        Returns:
            The recurrent states between the tokens, if the model keeps any.
        """
        start = sequence.num_planned
        sequence.num_planned += num_tokens
        num_missing = self._pool.blocks_for(sequence.num_planned) - len(sequence.block_ids)
        if num_missing > 0:
            sequence.block_ids += self._pool.acquire(num_missing)
        pieces: list[StatePiece] = []
        if self._states is not None:
            pieces = self._states.plan(sequence, start, sequence.num_planned, num_drafts=num_drafts)
        sequence.num_in_flight += 1
        return pieces

    def take_token(self, sequence: Sequence) -> None:
        """Plan and advance by one known token with nothing in flight. Only for models without states."""
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
        """Acquire blocks for `num_tokens` after the planned ones if `num_spare_blocks` then stay free."""
        num_missing = self._pool.blocks_for(sequence.num_planned + num_tokens) - len(sequence.block_ids)
        if 0 < num_missing <= self._pool.num_free - num_spare_blocks:
            sequence.block_ids += self._pool.acquire(num_missing)

    def advance(self, sequence: Sequence, start: int, end: int, *, num_drafts: int = 0) -> None:
        """Note that tokens [start, end) are computed, and publish the blocks that they filled, if these may be shared.

        `num_drafts`: as planned. States of drafts outside these tokens are dropped.
        """
        assert start == sequence.num_computed, f"token {start} was run, {sequence.num_computed} was next"
        size = self._pool.block_tokens
        first, last = start // size, min(end, sequence.num_prefillable) // size
        if self._enable_prefix_caching and first < last:
            for index in range(first, last):
                parent_id = sequence.block_ids[index - 1] if index else None
                token_ids = sequence.key_ids[index * size : (index + 1) * size]
                self._pool.publish(sequence.block_ids[index], token_ids, parent_id, sequence.root_key)
            if self.tiers is not None:
                self.tiers.offer_blocks(sequence, last)
        if self._states is not None and num_drafts:
            self._states.advance_drafted(sequence, start, end)
        elif self._states is not None:
            self._states.advance(sequence, start, end)
        sequence.num_computed = end

    def coming_blocks(self, sequence: Sequence, start: int, end: int) -> list[tuple[int, bytes]]:
        """Return the blocks that tokens [start, end) fill and that will be saved, and their keys."""
        pool, size = self._pool, self._pool.block_tokens
        first, last = start // size, min(end, sequence.num_prefillable) // size
        parent = sequence.root_key
        if first:
            if not pool.is_published(sequence.block_ids[first - 1]):
                return []
            parent = pool.key_of(sequence.block_ids[first - 1])
        has_tail = end == len(sequence.token_ids) == sequence.num_prefillable and self._states is None
        end = end if has_tail else last * size
        keys = pool.keys_of(sequence.key_ids[first * size : end], parent, with_tail=has_tail)
        return list(zip(sequence.block_ids[first : pool.blocks_for(end)], keys, strict=True))

    def hand_over(self, sequence: Sequence) -> int:
        """Release a sequence that another rank continues. Its last step must be committed.

        Returns:
            The number of its first tokens that are, or will be, in the tiers together with the state after them.
        """
        tiers, size = self.tiers, self._pool.block_tokens
        num_full = min(sequence.num_computed, sequence.num_prefillable) // size
        if tiers is None or not self._enable_prefix_caching or not sequence.num_computed:
            self.vacate(sequence)
            return 0
        # The newest state at the end of a block is that of the last full block, or of the one before.
        ends = [end for end in (num_full, num_full - 1) if end > 0]
        keys = [self._pool.key_of(sequence.block_ids[end - 1]) for end in ends]
        # Without a bound: it held them until now, and its next rank waits.
        tiers.offer_blocks(sequence, num_full, is_bounded=False)
        num_saved, num_computed = sequence.num_offered * size, sequence.num_computed
        has_tail = sequence.num_offered == num_full and tiers.offer_tail(sequence)
        self.vacate(sequence)
        if self._states is None:
            return num_computed if has_tail else num_saved
        for end, key in zip(ends, keys, strict=True):
            if end <= sequence.num_offered and tiers.keeps_state(key):
                return end * size
        return 0

    def vacate(self, sequence: Sequence) -> None:
        """Release the blocks of a sequence that no longer runs, or leave that to the commit of its last batch."""
        if sequence.num_in_flight:
            self.leaving.add(sequence)
            return
        self.leaving.discard(sequence)
        if self.tiers is not None:
            self.tiers.tails.drop(sequence.request.request_id)
            if self._enable_prefix_caching:
                self.tiers.offer_last_blocks(sequence)
        self._pool.release(sequence.block_ids)
        sequence.block_ids = []
        if self._states is not None:
            self._states.vacate(sequence)
        sequence.num_computed = sequence.num_planned = 0


def _num_shareable(sequence: Sequence) -> int:
    """Return how many of the first tokens need not be computed if their KV is cached.

    The last token is always computed: the sampler needs its logits. If prompt logprobs are requested, so is every token
    without a score yet.
    """
    if sequence.wants_prompt_logprobs:
        return min(len(sequence.prompt_logprobs), len(sequence.token_ids) - 1)
    return _num_cacheable(sequence)


def _num_cacheable(sequence: Sequence) -> int:
    """As `_num_shareable`, without regard to prompt logprobs."""
    return min(sequence.num_prefillable, len(sequence.token_ids) - 1)
