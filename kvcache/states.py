"""The state pool: the states of recurrent layers per sequence, in slots that are written once.

A slot holds the state of all recurrent layers after some number of a sequence's tokens. A step reads one slot and writes
another, so that a step that breaks off can be run again from the state before it. If a slot's tokens end with a full
block, the slot can be published under that block's prefix. It is then a snapshot, from which any sequence with that
prefix can continue.

A slot is held (with a count of holders), cached (a snapshot without holders, evictable) or free. Promised slots are
always available to their sequence, so a running sequence never waits for one: snapshots only take what is left.

Knows numbers and keys, not memory; the tensors are elsewhere. Uses no torch and no clock: recency is the order of calls.
Idea: state snapshots in a prefix cache, as in Marconi (Pan et al., 2024) and vLLM's hybrid cache."""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import NamedTuple

NO_STATE = -1  # no slot: read a state of zeros, write nothing


class StatePiece(NamedTuple):
    """Some tokens of a sequence between two of its states."""

    read: int  # slot of the state before them; NO_STATE if they begin the text
    write: int  # slot for the state after them; NO_STATE if it is not needed
    length: int


class Beginning(NamedTuple):
    """The point from which a sequence starts."""

    num_blocks: int  # blocks of its prefix that need not run
    slot: int  # the state after them; NO_STATE at the start of a text


class StatePool:
    """Reference-counted slots 0 to num_slots - 1, some of which are snapshots."""

    def __init__(self, num_slots: int) -> None:
        """Create a pool of free slots."""
        self.num_slots = num_slots
        self._num_holders = [0] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self._key_of: dict[int, bytes] = {}  # of snapshots
        self._slot_of: dict[bytes, int] = {}
        self._num_promised = 0  # promised and not taken yet

    @property
    def num_free(self) -> int:
        """Number of slots without holders, snapshots included."""
        return len(self._free) + len(self._cached)

    @property
    def num_left_over(self) -> int:
        """Number of free slots that are not promised."""
        return self.num_free - self._num_promised

    def find(self, keys: Sequence[bytes]) -> Beginning:
        """Return the snapshot of the longest prefix that has one.

        Args:
            keys: Keys of the prefix's blocks, in order.
        """
        for index in range(len(keys) - 1, -1, -1):
            slot = self._slot_of.get(keys[index])
            if slot is not None:
                return Beginning(index + 1, slot)
        return Beginning(0, NO_STATE)

    def begin(self, slot: int, num_promised: int) -> bool:
        """Hold a snapshot (or NO_STATE) and promise slots. Returns False, without effect, if too few are left."""
        if self.num_left_over - (slot in self._cached) < num_promised:
            return False
        if slot != NO_STATE:
            self._cached.pop(slot, None)
            self._num_holders[slot] += 1
        self._num_promised += num_promised
        return True

    def take(self) -> int:
        """Hold a promised slot."""
        assert self._num_promised > 0, "a state slot is taken without a promise"
        self._num_promised -= 1
        return self._take()

    def take_left_over(self, avoided: Collection[int] = ()) -> int | None:
        """Hold a slot that is not promised, if any. `avoided`: slots that are not taken."""
        if self.num_left_over <= 0:
            return None
        slot = next((each for each in (*reversed(self._free), *self._cached) if each not in avoided), None)
        if slot is not None:
            if slot in self._cached:
                self.forget(self._key_of[slot])
            self._free.remove(slot)
            self._num_holders[slot] = 1
        return slot

    def give(self, slot: int, *, is_promised: bool = False) -> None:
        """Release one hold. `is_promised`: the caller may take a slot again."""
        assert self._num_holders[slot] > 0, f"state slot {slot} is released but has no holder"
        self._num_holders[slot] -= 1
        if self._num_holders[slot] == 0:
            if slot in self._key_of:
                self._cached[slot] = None
            else:
                self._free.append(slot)
        self._num_promised += is_promised

    def release_promises(self, count: int) -> None:
        """Withdraw unused promises."""
        assert count <= self._num_promised, f"{count} promises are released, {self._num_promised} were made"
        self._num_promised -= count

    def publish(self, slot: int, key: bytes) -> bool:
        """Make a held slot findable under the key of the block that ends its tokens. It must not be written again.

        Returns:
            False if another slot has that key; the slot is then not findable.
        """
        assert self._num_holders[slot] > 0, f"state slot {slot} is published but has no holder"
        if key in self._slot_of:
            return False
        self._slot_of[key], self._key_of[slot] = slot, key
        return True

    def key_of(self, slot: int) -> bytes | None:
        """Return the key of a snapshot, or None if the slot is not one."""
        return self._key_of.get(slot)

    def forget(self, key: bytes) -> None:
        """Remove a snapshot from the lookup, if it exists."""
        slot = self._slot_of.pop(key, None)
        if slot is None:
            return
        del self._key_of[slot]
        if slot in self._cached:
            del self._cached[slot]
            self._free.append(slot)

    def free_cached(self) -> None:
        """Free all snapshots without holders."""
        for slot in self._cached:
            del self._slot_of[self._key_of.pop(slot)]
            self._free.append(slot)
        self._cached.clear()

    def _take(self) -> int:
        if self._free:
            slot = self._free.pop()
        else:
            slot, _ = self._cached.popitem(last=False)
            del self._slot_of[self._key_of.pop(slot)]
        self._num_holders[slot] = 1
        return slot
