"""The host memory through which simulated pools hand requests over: which blocks it has, and how long loads take.

It replaces `kvcache.tiers.tiers.Tiers` below the real scheduler, so the tokens that the next rank computes again are not a
model but the outcome. All pools share one memory. A save takes no time: it overlaps with the prompt, as in the service.
"""

from collections import OrderedDict
from collections.abc import Callable

from kvcache.tiers.figures import TierFigures
from kvcache.tiers.jobs import FetchJob, LoadJob, SaveJob

SECRET = bytes(16)


class HostMemory:
    """The keys of the blocks in memory, least recently used first."""

    def __init__(self, most_blocks: int) -> None:
        self._most_blocks = most_blocks
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def use(self, key: bytes) -> None:
        """Add a block, or note its use."""
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > self._most_blocks:
            self._keys.popitem(last=False)


class HostTier:
    """One rank's use of the memory: a `scheduler.policy.tier_tables.KeepsTiers`."""

    def __init__(self, memory: HostMemory, clock: Callable[[], float], block_s: float) -> None:
        """`block_s`: seconds in which a block is loaded."""
        self.figures, self.secret = TierFigures(), SECRET
        self.has_peers = False  # all ranks are on one node
        self.prompt_token_s = 0.0  # not used: the blocks of a load count as loaded from its beginning
        self._memory, self._clock, self._block_s = memory, clock, block_s
        self._saved: list[SaveJob | LoadJob | FetchJob] = []
        self._loads: list[tuple[float, LoadJob]] = []  # with the times of their ends
        self._free_s = 0.0  # when the rank's loads so far have ended

    def has(self, key: bytes, *, is_state: bool = False) -> bool:
        return key in self._memory

    def save(self, save: SaveJob) -> None:
        self._memory.use(save.key)
        self._saved.append(save)

    def load(self, load: LoadJob) -> None:
        for key in load.keys:
            if key not in self._memory:
                break
            self._memory.use(key)
            load.num_loaded += 1
        load.sources = ["host"] * load.num_loaded
        self._free_s = max(self._free_s, self._clock()) + load.num_loaded * self._block_s
        self._loads.append((self._free_s, load))

    def stop(self, load: LoadJob) -> None:
        load.should_stop = True

    def fetch(self, fetch: FetchJob) -> None:
        raise AssertionError("no rank has a peer")

    def finished(self) -> list[SaveJob | LoadJob | FetchJob]:
        done, self._saved = self._saved, []
        while self._loads and self._loads[0][0] <= self._clock():
            done.append(self._loads.pop(0)[1])
        return done

    def forget(self, generation: int) -> None:
        """Do nothing: nothing is forgotten in a simulation."""

    def note(self, **counts: float) -> None:
        """Do nothing: the scheduler counts cached tokens itself."""
