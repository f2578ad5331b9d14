"""The states of sequences: which slot each step reads and writes, and which states are kept as snapshots.

A sequence is promised two slots, and one more per draft of a step. A step reads the state that the last step wrote and
writes the other slot. The slot it read is released at commit, so a step may be run again until then. A step with drafts
writes the state after each of its tokens; the states after wrong drafts are released.

If steps overlap, the next step of a sequence is planned while one is in flight. It writes the slot that the earlier one
reads, or leaves it to another sequence: the device runs them in order. Loads from a tier do not keep that order, so they leave
such slots out (`scheduler.policy.tier_tables`). Then a step cannot be run again, so only a rank that serves alone overlaps such steps.

Snapshots are taken at the ends of blocks: at the end of a prompt's shareable part, where a prompt departs from what is
cached (others will depart there too), and every `STRIDE` tokens in between. During generation the newest block end is a
snapshot, for the conversation's next turn. Snapshots use unpromised slots; the least recently used are dropped first.
"""

from collections.abc import Callable
from collections.abc import Sequence as Series

from kvcache.blocks import BlockPool
from kvcache.states import NO_STATE, Beginning, StatePiece, StatePool
from scheduler.policy.limits import SchedulerLimitsError
from scheduler.policy.sequence import Sequence, SequenceStates

STATES_OF_ONE = 2  # slots of a running sequence: the state that a step reads, and the one that it writes
STRIDE = 512  # tokens between snapshots within a prompt


def fewest_states(*, num_drafts: int, keeps_snapshots: bool) -> int:
    """Return the fewest slots with which any single sequence runs: its own, and the snapshot that it may start from."""
    return STATES_OF_ONE + num_drafts + keeps_snapshots


class StateTables:
    """Keep `Sequence.states` consistent with the pool."""

    def __init__(
        self,
        pool: StatePool,
        blocks: BlockPool,
        *,
        keeps_snapshots: bool,
        num_drafts: int = 0,
        overlaps: bool = False,
    ) -> None:
        """Take over a pool.

        Args:
            overlaps: Whether a sequence may have two steps in flight. Not with drafts.

        Raises:
            SchedulerLimitsError: The pool is too small for a sequence.
        """
        fewest = fewest_states(num_drafts=num_drafts, keeps_snapshots=keeps_snapshots)
        if pool.num_slots < fewest:
            raise SchedulerLimitsError(f"there are {pool.num_slots} state slots; one request needs {fewest}")
        assert not (overlaps and num_drafts), "steps with drafts do not overlap"
        self._pool, self._blocks, self._keeps_snapshots = pool, blocks, keeps_snapshots
        self._overlaps = overlaps
        # Called with a snapshot's slot and key when no sequence needs the slot to be free again.
        self.on_snapshot: Callable[[int, bytes], None] = lambda _slot, _key: None
        self._promised = STATES_OF_ONE + num_drafts

    def find(self, matched: Series[int]) -> Beginning:
        """Return the newest snapshot of a prefix with the cached blocks `matched`."""
        if not self._keeps_snapshots:
            return Beginning(0, NO_STATE)
        return self._pool.find([self._blocks.key_of(block_id) for block_id in matched])

    def seat(self, sequence: Sequence, beginning: Beginning, *, num_matched: int, num_shareable: int) -> bool:
        """Give a sequence its slots. Returns False, and gives none, if too few are free.

        Args:
            beginning: The snapshot that it starts from.
            num_matched: Number of blocks of its longest cached prefix.
            num_shareable: Number of tokens of its longest prefix that later sequences need not run.
        """
        if not self._pool.begin(beginning.slot, self._promised):
            return False
        own = sequence.states
        own.num_promised = self._promised
        own.is_first_shared = beginning.slot != NO_STATE
        if own.is_first_shared:
            own.slots.append(beginning.slot)
        size = self._blocks.block_tokens
        own.snapshot_ends = set()
        if self._keeps_snapshots:
            ends = {num_shareable // size * size, num_matched * size}
            ends.update(range(STRIDE, num_shareable, STRIDE))
            own.snapshot_ends = {end for end in ends if end > beginning.num_blocks * size}
        return True

    def can_plan(self, sequence: Sequence) -> bool:
        """Whether the sequence's next step has a slot to write. False while steps in flight hold all of them."""
        return sequence.states.num_promised > 0 or self._may_reuse(sequence)

    def plan(self, sequence: Sequence, start: int, end: int, *, num_drafts: int = 0) -> list[StatePiece]:
        """Choose slots for tokens [start, end), of which the last `num_drafts` are drafts. Call it before the step counts as
        in flight."""
        own, pieces = sequence.states, []
        if self._may_reuse(sequence):
            self._release_oldest(own)
            own.has_released = True
        read, begin = own.slots[-1] if own.slots else NO_STATE, start
        for position, slot in self._take_snapshots(own, start, end):
            own.snapshots.append((position, slot))
            pieces.append(StatePiece(read, slot, position - begin))
            read, begin = slot, position
        for position in range(end - num_drafts, end + 1):
            own.slots.append(self._pool.take())
            own.num_promised -= 1
            pieces.append(StatePiece(read, own.slots[-1], position - begin))
            read, begin = own.slots[-1], position
        return pieces

    def _take_snapshots(self, own: SequenceStates, start: int, end: int) -> list[tuple[int, int]]:
        """Take slots for snapshots between tokens. If few are left over, the last snapshots get them: they save most."""
        taken: list[tuple[int, int]] = []
        for position in sorted((each for each in own.snapshot_ends if start < each < end), reverse=True):
            slot = self._pool.take_left_over()
            if slot is None:
                break
            taken.append((position, slot))
        return taken[::-1]

    def advance(self, sequence: Sequence, start: int, end: int) -> None:
        """Note that tokens [start, end) are computed and their full blocks published. Keep the snapshots."""
        own = sequence.states
        while own.snapshots and own.snapshots[0][0] < end:
            position, slot = own.snapshots.pop(0)
            key = self._key(sequence, position)
            if self._pool.publish(slot, key):
                self.on_snapshot(slot, key)
            self._pool.give(slot)
        # The slots, in order: the one that the step read (none at a text's start), wrote, and those of later steps.
        if start > 0 and not own.has_released:
            self._release_oldest(own)
        own.has_released = False
        if not self._keeps_snapshots or end % self._blocks.block_tokens or end > sequence.num_prefillable:
            return
        is_generated = end >= sequence.num_prefill_tokens
        if is_generated or end in own.snapshot_ends:
            key = self._key(sequence, end)
            if self._pool.publish(own.slots[0], key) and is_generated:
                if own.newest_key is not None:
                    self._pool.forget(own.newest_key)
                own.newest_key = key

    def advance_drafted(self, sequence: Sequence, start: int, end: int) -> None:
        """Note that tokens [start, end) are computed and that any drafts after them were wrong."""
        own = sequence.states
        for position in range(start, end):
            self.advance(sequence, position, position + 1)
        while len(own.slots) > 1:
            self._pool.give(own.slots.pop(), is_promised=True)
            own.num_promised += 1

    def vacate(self, sequence: Sequence) -> None:
        """Release all slots and promises of a sequence."""
        own = sequence.states
        for slot in (*own.slots, *(slot for _, slot in own.snapshots)):
            self._pool.give(slot)
        self._pool.release_promises(own.num_promised)
        for slot in own.slots:
            if (published := self._pool.key_of(slot)) is not None:
                self.on_snapshot(slot, published)
        sequence.states = SequenceStates()

    def _may_reuse(self, sequence: Sequence) -> bool:
        """Whether the sequence has one step in flight, and may release the slot that it reads."""
        return self._overlaps and sequence.num_in_flight == 1 and len(sequence.states.slots) == STATES_OF_ONE

    def _release_oldest(self, own: SequenceStates) -> None:
        slot, is_own = own.slots.pop(0), not own.is_first_shared
        self._pool.give(slot, is_promised=is_own)
        own.num_promised += is_own
        own.is_first_shared = False
        key = self._pool.key_of(slot)
        # Offer the snapshots where chunks of a prompt ended. Those of generated tokens follow each other too fast.
        if is_own and key is not None and key != own.newest_key:
            self.on_snapshot(slot, key)

    def _key(self, sequence: Sequence, end: int) -> bytes:
        return self._blocks.key_of(sequence.block_ids[end // self._blocks.block_tokens - 1])
