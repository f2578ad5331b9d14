"""The block pool: which sequences hold which KV blocks, and which free blocks still cache a prefix.

A block is held (its reference count is the number of holders), cached (count zero, findable by its prefix, evictable)
or free (count zero, not findable). A pinned block is not evicted while it is copied elsewhere, whether it is held or not. Cached blocks count as free: `acquire` takes uncached blocks first, then evicts the
least recently released prefix. Every operation costs O(blocks touched).

Sharing is safe because only full, published blocks are shared, and a published block is never written again. So a block
that a sequence writes has exactly one holder.

Leaves are evicted before their parents without a tree: a holder of a block also holds a copy of each block before it,
and `release` queues a table back to front, so a parent never enters the eviction queue ahead of its child.

Knows ids, not memory; the KV tensors are elsewhere. Uses no torch and no clock: recency is the order of calls.
Idea: PagedAttention's block manager (vLLM).
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from kvcache.prefix import ROOT_KEY, PrefixIndex


class OutOfBlocks(RuntimeError):  # noqa: N818 - it is a state to react to, not a mistake
    """More blocks were requested than are free."""

    def __init__(self, wanted: int, free: int, total: int) -> None:
        super().__init__(f"{wanted} KV blocks wanted, {free} of {total} free; preempt a sequence or wait")
        self.wanted = wanted
        self.free = free


class BlockPool:
    """Reference-counted blocks 0 to num_blocks - 1, with prefix reuse."""

    def __init__(self, num_blocks: int, block_tokens: int = 16, *, secret: bytes | None = None) -> None:
        """Create a pool of free blocks.

        Raises:
            ValueError: A size is below 1.
        """
        if num_blocks < 1 or block_tokens < 1:
            raise ValueError(
                f"the pool has {num_blocks} blocks of {block_tokens} tokens; both must be at least 1"
            )
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._num_holders = array("i", bytes(array("i").itemsize * num_blocks))
        self._first_unused = 0  # this block and all after it were never held
        self._free: list[int] = []  # other free ones; last in, first out: their memory is still warm
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self._pinned: set[int] = set()
        self._prefixes = PrefixIndex(block_tokens, secret)

    @property
    def num_free(self) -> int:
        """Number of blocks that `acquire` can return, evictable ones included."""
        return self.num_blocks - self._first_unused + len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Number of free blocks that still cache a prefix."""
        return len(self._cached)

    def num_holders(self, block_id: int) -> int:
        """Return the number of sequences that hold the block."""
        return self._num_holders[block_id]

    def is_published(self, block_id: int) -> bool:
        """Whether the block is full and findable. It is then not written again until it is evicted."""
        return block_id in self._prefixes

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks for `num_tokens` tokens."""
        return -(-num_tokens // self.block_tokens)

    def acquire(self, num_blocks: int) -> list[int]:
        """Take blocks to write, each with one holder. Takes all or none.

        Raises:
            OutOfBlocks: Fewer blocks are free.
        """
        if num_blocks > self.num_free:
            raise OutOfBlocks(num_blocks, self.num_free, self.num_blocks)
        block_ids = []
        for _ in range(num_blocks):
            block_id = self._free.pop() if self._free else self._unused_or_evicted()
            self._num_holders[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def share(self, block_ids: Sequence[int]) -> None:
        """Add a holder to published blocks, such as those from `match`."""
        for block_id in block_ids:
            assert block_id in self._prefixes, f"block {block_id} is shared but was never published"
            self._cached.pop(block_id, None)
            self._num_holders[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Release one hold on each block of a table, given in table order. Published blocks stay findable."""
        for block_id in reversed(block_ids):
            assert self._num_holders[block_id] > 0, f"block {block_id} is released but has no holder"
            self._num_holders[block_id] -= 1
            if self._num_holders[block_id] == 0 and block_id not in self._pinned:
                self._retire(block_id)

    def pin(self, block_id: int) -> bool:
        """Keep a block as it is until `unpin`: a published one, or one that its holder no longer writes. Returns False if it
        is pinned already.

        A pin is not a hold: a holder of a block also holds those before it.
        """
        assert block_id in self._prefixes or self._num_holders[block_id], (
            f"block {block_id} is pinned but free"
        )
        if block_id in self._pinned:
            return False
        self._cached.pop(block_id, None)
        self._pinned.add(block_id)
        return True

    def unpin(self, block_id: int) -> None:
        """End a pin."""
        self._pinned.remove(block_id)
        if self._num_holders[block_id] == 0:
            self._retire(block_id)

    def match(self, token_ids: Sequence[int], root: bytes = ROOT_KEY) -> list[int]:
        """Return the blocks of the longest cached prefix of whole blocks. `share` them before any other call."""
        return self._prefixes.match(token_ids, root)

    def key_of(self, block_id: int) -> bytes:
        """Return the key of a published block, which identifies the whole prefix up to its end."""
        return self._prefixes.key_of_block(block_id)

    def keys_of(
        self, token_ids: Sequence[int], root: bytes = ROOT_KEY, *, with_tail: bool = False
    ) -> list[bytes]:
        """Return the keys of all whole blocks of a prefix, cached or not. `with_tail`: also that of the tokens after them."""
        return self._prefixes.keys_of(token_ids, root, with_tail=with_tail)

    def key_of_tail(self, parent_key: bytes, token_ids: Sequence[int]) -> bytes:
        """Return the key of the first tokens of a block that is not full. `parent_key`: of the block before it, or a root."""
        return self._prefixes.key_of_tail(parent_key, token_ids)

    def count_held(
        self, token_ids: Sequence[int], num_tokens: int, keys: list[bytes], root: bytes = ROOT_KEY
    ) -> int:
        """Count the leading whole blocks of a prefix that have holders and cost nothing to share.

        A holder of a block also holds a copy of each block before it, so these blocks come first. Only their end is
        examined: one hash, plus one for each block that became held since the last call.

        Args:
            token_ids: Tokens; the first `num_tokens` are the prefix.
            keys: Empty at the first call for a prefix. Pass the same list, which is updated, to later calls.
        """
        size = self.block_tokens
        del keys[num_tokens // size :]
        while keys and not self._is_held(keys[-1]):
            keys.pop()
        while (len(keys) + 1) * size <= num_tokens:
            start = len(keys) * size
            parent_key = keys[-1] if keys else root
            key = self._prefixes.key_of(parent_key, token_ids[start : start + size])
            if not self._is_held(key):
                break
            keys.append(key)
        return len(keys)

    def publish(
        self, block_id: int, token_ids: Sequence[int], parent_id: int | None, root: bytes = ROOT_KEY
    ) -> None:
        """Make a held block findable after all its tokens are computed.

        Args:
            block_id: A held, full, unpublished block. It must not be written afterwards.
            token_ids: Tokens of the block.
            parent_id: The published block before it in the same table; None for the first.
            root: The key before the first block. Blocks with different roots never match.
        """
        assert self._num_holders[block_id] > 0, f"block {block_id} is published but has no holder"
        self._prefixes.insert(block_id, token_ids, parent_id, root)
        for copy_id in self._prefixes.copies(block_id):
            if copy_id in self._cached:  # it has no holder, and it is older than this one's children will be
                del self._cached[copy_id]
                self._retire(copy_id)

    def forget_prefixes(self, secret: bytes | None = None) -> None:
        """Hide all cached prefixes from `match`. Holders keep their blocks and publish later ones.

        `secret`: the key of the hash of later prefixes (16 to 64 bytes), if other processes must compute the same keys.
        """
        self.free_cached()
        self._prefixes.renew(secret)

    def free_cached(self) -> None:
        """Free all cached blocks. The same prefixes keep their keys."""
        for block_id in self._cached:
            self._prefixes.remove(block_id)
            self._free.append(block_id)
        self._cached.clear()

    def _is_held(self, key: bytes) -> bool:
        block_id = self._prefixes.block_of(key)
        return block_id is not None and self._num_holders[block_id] > 0

    def _unused_or_evicted(self) -> int:
        if self._first_unused < self.num_blocks:
            self._first_unused += 1
            return self._first_unused - 1
        block_id, _ = self._cached.popitem(last=False)
        self._prefixes.remove(block_id)
        return block_id

    def _retire(self, block_id: int) -> None:
        """Cache or free a block without holders. It is freed if another block holds the same prefix."""
        if block_id in self._prefixes:
            if not self._prefixes.copies(block_id):
                self._cached[block_id] = None
                return
            self._prefixes.remove(block_id)
        self._free.append(block_id)
