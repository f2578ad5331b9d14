"""Fetch prefixes from the host memory of other nodes into that of this one.

A request may name a rank of another node that probably has its prefix. A thread per such rank connects to its server, receives
the records that this node lacks, verifies their checksums, and writes them to host memory. With NIXL, it reads them in the other
node's memory. Then the request finds them as it finds what a rank of this node has computed. So the rest of a rank knows no peers,
and a fetch that fails only costs the time until its limit: the request computes its prompt.

Rejected: a transfer from GPU to GPU, past the host memory, which needs memory on both devices to be held until both sides release it.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from kvcache.tiers.jobs import FetchJob, PeerAddress
from kvcache.tiers.peer_link import PeerLink, PeerSide
from kvcache.tiers.peer_server import PeerServer
from kvcache.tiers.records import RecordLayout
from kvcache.tiers.remote_memory import NixlAgent, RegisteredStores
from kvcache.tiers.tier import Tier
from kvcache.tiers.tiers import Tiers

MOST_LINKS = 64  # connections to peers; the one that was used the longest time ago is closed


class PeerNetwork(NamedTuple):
    """How the ranks of a service reach each other."""

    host: str  # address of this node that other nodes reach
    secret: bytes  # known to processes of this service only
    has_nixl: bool = False  # records are read with NIXL, where both ends have it


class Peers:
    """This rank's server for other nodes, and its connections to their servers."""

    def __init__(
        self,
        tiers: Tiers,
        host: Tier,
        network: PeerNetwork,
        *,
        memory: str,
        blocks: RecordLayout,
        states: RecordLayout | None,
        block_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the server.

        Args:
            host: The tier in host memory, which other nodes fetch from.
            memory: Identifies that memory in the service.

        Raises:
            OSError: The network's address cannot be used.
            RemoteMemoryError: NIXL is wanted and missing, or cannot use the host memory.
        """
        agent = NixlAgent() if network.has_nixl else None
        stores = [each for each in (host.blocks, host.states) if each is not None]
        self._side = PeerSide(tiers, network.secret, blocks, states, block_tokens, clock, agent)
        self._server = PeerServer(
            network.host,
            host,
            meaning=self._side.meaning,
            secret=network.secret,
            block_tokens=block_tokens,
            key_secret=self._side.key_secret,
            on_sent=self._side.note_sent,
            memory=None if agent is None else RegisteredStores(agent, stores),
        )
        self.address = PeerAddress(self._server.address, memory)
        self._links: OrderedDict[str, PeerLink] = OrderedDict()  # by address, the latest one last

    def fetch(self, fetch: FetchJob) -> None:
        """Do a job in the thread of its peer, and pass it to `Tiers.end_fetch`. For one thread."""
        link = self._links.get(fetch.address)
        if link is None:
            link = self._links[fetch.address] = PeerLink(self._side, fetch.address)
            if len(self._links) > MOST_LINKS:
                _, unused = self._links.popitem(last=False)
                unused.close()
        self._links.move_to_end(fetch.address)
        link.add(fetch)

    def close(self) -> None:
        """End the server and all fetches."""
        self._server.close()
        links = list(self._links.values())
        for link in links:
            link.close()
        for link in links:
            link.join()
        if self._side.agent is not None:
            self._side.agent.close()
