"""The tails of requests that move between ranks: their last blocks, which are rarely full.

The rank that releases a request saves its last block under a key of the tokens in it. The next rank loads the block, and keeps it
for this request alone, because only full blocks can be shared. So it computes nothing again. It gives the block back if the
request does not come or has other tokens, and if another request lacks blocks.

Not for models that keep states: the state after the last token is not saved.
"""

from typing import NamedTuple

from kvcache.blocks import BlockPool
from scheduler.policy.sequence import Sequence


class Tail(NamedTuple):
    """A loaded block that is not full, of a request that waits or is expected."""

    block_id: int
    key: bytes
    end: int  # the request's first tokens up to here are in this block and those before it
    until_s: float  # time at which it is given back


class Tails:
    """The loaded tails of a rank, by request id."""

    def __init__(self, pool: BlockPool) -> None:
        """Hold no block yet."""
        self._pool = pool
        self._loaded: dict[str, Tail] = {}

    def __bool__(self) -> bool:
        """Whether a block is held."""
        return bool(self._loaded)

    def put(self, request_id: str, tail: Tail) -> None:
        """Take over the hold of a tail's block."""
        self.drop(request_id)
        self._loaded[request_id] = tail

    def end_of(self, sequence: Sequence) -> int:
        """Return the end of a sequence's tail, 0 if it has none."""
        tail = self._loaded.get(sequence.request.request_id)
        return 0 if tail is None else tail.end

    def take(self, sequence: Sequence, num_shareable: int) -> int:
        """Append a sequence's tail to its blocks, or give it back if it does not continue these. Returns the tail's number of tokens.

        Args:
            num_shareable: Number of tokens that need not be computed if they are cached.
        """
        tail = self._loaded.pop(sequence.request.request_id, None)
        if tail is None:
            return 0
        num_blocks = len(sequence.block_ids)
        token_ids = sequence.key_ids[num_blocks * self._pool.block_tokens : tail.end]
        if tail.end > num_shareable or self.key_of(sequence, num_blocks, tail.end) != tail.key:
            self._pool.release([tail.block_id])
            return 0
        sequence.block_ids.append(tail.block_id)
        return len(token_ids)

    def key_of(self, sequence: Sequence, num_blocks: int, end: int) -> bytes:
        """Return the key of a running sequence's tokens up to `end`, after its first blocks, which are published."""
        parent = self._pool.key_of(sequence.block_ids[num_blocks - 1]) if num_blocks else sequence.root_key
        return self._pool.key_of_tail(parent, sequence.key_ids[num_blocks * self._pool.block_tokens : end])

    def drop(self, request_id: str) -> None:
        """Give back a request's tail, if it has one."""
        if (tail := self._loaded.pop(request_id, None)) is not None:
            self._pool.release([tail.block_id])

    def drop_all(self) -> None:
        """Give back all tails."""
        for request_id in list(self._loaded):
            self.drop(request_id)

    def expire(self, now_s: float) -> None:
        """Give back the tails of requests that have not come in time."""
        for request_id in [each for each, tail in self._loaded.items() if now_s > tail.until_s]:
            self.drop(request_id)
