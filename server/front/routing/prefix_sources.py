"""Find a rank of another node that has probably computed a request's prefix, so that it can be fetched from there.

Ranks of one node share their KV tier in host memory, so a prefix of one is a prefix of all, also after its rank is lost. A
request that another rank had begun names that rank's node. Other requests name the node that has seen the most of their prefix, if
the rank's own node has seen clearly less. This is a hint: the rank compares the transfer with computing, and the node may have
replaced what it had. A pure state machine without IO or clock.
"""

from collections.abc import Mapping

from kvcache.tiers.jobs import PeerAddress

LEAST_GAIN_TOKENS = 128  # that the other node has seen in addition


class PrefixSources:
    """The host memories of the serving ranks."""

    def __init__(self) -> None:
        self._peers: dict[int, PeerAddress] = {}  # by serving rank
        self._memory_of: dict[int, str] = {}  # by rank, also of lost ones
        # Whether serving ranks have different host memories. Otherwise `address_for` always returns "".
        self.has_several = False

    def enter(self, rank: int, peer: PeerAddress | None) -> None:
        """Record a serving rank, and where others fetch from it. None if they cannot."""
        self.leave(rank)
        self._memory_of.pop(rank, None)
        if peer is not None:
            self._peers[rank], self._memory_of[rank] = peer, peer.memory
        self._count()

    def leave(self, rank: int) -> None:
        """Record the loss of a rank. The others of its node still serve what it had computed."""
        self._peers.pop(rank, None)
        self._count()

    def _count(self) -> None:
        self.has_several = len({peer.memory for peer in self._peers.values()}) > 1

    def address_for(self, rank: int, held: Mapping[int, int], previous: int | None = None) -> str:
        """Return where `rank` may fetch a request's prefix, or "" if it has nothing to gain.

        Args:
            held: Number of prefix tokens that each rank has seen.
            previous: The rank that had the request before, if it had begun there.
        """
        own = self._memory_of.get(rank)
        if own is None:
            return ""
        before = None if previous is None else self._memory_of.get(previous)
        if before == own:
            return ""
        if before is not None and (address := self._address_for(rank, before)):
            return address
        seen: dict[str, int] = {}  # by memory
        for each, num_tokens in held.items():
            if (memory := self._memory_of.get(each)) is not None:
                seen[memory] = max(seen.get(memory, 0), num_tokens)
        best = max(seen, key=lambda memory: seen[memory], default=own)
        if best == own or seen[best] < seen.get(own, 0) + LEAST_GAIN_TOKENS:
            return ""
        return self._address_for(rank, best)

    def _address_for(self, rank: int, memory: str) -> str:
        """Return the address of a serving rank with this memory, or "". Different ranks get different ones."""
        found = [peer.address for _, peer in sorted(self._peers.items()) if peer.memory == memory]
        return found[rank % len(found)] if found else ""
