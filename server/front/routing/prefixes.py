"""Which rank has seen which prefixes, in chunks of tokens, so that requests find their cached prefix.

Independent of loads and ranks' states. A rank may have evicted what it has seen: this is an estimate.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

PREFIX_CHUNK_TOKENS = 64  # granularity of the prefix memory; a few blocks
MAX_PREFIX_CHUNKS = 1 << 16  # remembered over all ranks: 4 Mi tokens, some 20 MB


class PrefixMemory:
    """The prefixes that ranks have seen."""

    def __init__(self) -> None:
        # Chain hash of a prefix -> ranks that have seen it -> number of requests that brought it there.
        self._holders: OrderedDict[int, dict[int, int]] = OrderedDict()

    def leave(self, rank: int) -> None:
        """Forget the prefixes of a lost rank."""
        for holders in self._holders.values():
            holders.pop(rank, None)

    def clear(self) -> None:
        """Forget all prefixes."""
        self._holders.clear()

    def held_tokens(self, prompt_ids: Sequence[int]) -> dict[int, int]:
        """Return the number of prefix tokens that each rank has seen, for ranks that have seen any."""
        held: dict[int, int] = {}
        still: set[int] | None = None
        num_tokens = 0
        for chunk in chain(prompt_ids):
            holders = self._holders.get(chunk, {}).keys()
            for rank in still - holders if still else ():
                held[rank] = num_tokens
            still = set(holders) if still is None else still & holders
            if not still:
                break
            num_tokens += PREFIX_CHUNK_TOKENS
        return held | dict.fromkeys(still or (), num_tokens)

    def forget(self, prompt_ids: Sequence[int], rank: int) -> None:
        """Undo `remember`."""
        for chunk in chain(prompt_ids):
            holders = self._holders.get(chunk, {})
            if holders.get(rank, 0) > 1:
                holders[rank] -= 1
            else:
                holders.pop(rank, None)

    def remember(self, prompt_ids: Sequence[int], rank: int) -> int:
        """Record that a rank will have seen a prompt. Returns how many of its first tokens the rank had seen before."""
        num_held, is_held = 0, True
        for chunk in chain(prompt_ids):
            holders = self._holders.setdefault(chunk, {})
            is_held = is_held and rank in holders
            num_held += PREFIX_CHUNK_TOKENS * is_held
            holders[rank] = holders.get(rank, 0) + 1
            self._holders.move_to_end(chunk)
        while len(self._holders) > MAX_PREFIX_CHUNKS:
            self._holders.popitem(last=False)
        return num_held


def chain(prompt_ids: Sequence[int]) -> Iterator[int]:
    """Yield one hash per whole chunk of the prompt. Each hash covers everything before it."""
    value = 0
    for start in range(0, len(prompt_ids) - PREFIX_CHUNK_TOKENS + 1, PREFIX_CHUNK_TOKENS):
        value = hash((value, tuple(prompt_ids[start : start + PREFIX_CHUNK_TOKENS])))
        yield value
