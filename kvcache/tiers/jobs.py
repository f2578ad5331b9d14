"""Jobs of the tiers' threads. Uses no torch: the scheduler makes them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

MOST_LOAD_S = 2.5  # for a load or a fetch. A load goes on if computing is predicted to take longer


@dataclass(eq=False)
class SaveJob:
    """Copy a block or a state slot to the tiers."""

    index: int  # of the block or the slot
    key: bytes
    is_state: bool = False
    # The block is not full: only the rank that continues its request needs it, and soon.
    is_tail: bool = False


@dataclass(eq=False)
class EarlySave:
    """Copy a block's layers to host memory while a step fills them. A `SaveJob` for the block ends it, if one comes."""

    index: int  # of the block
    key: bytes
    run: int  # of `kvcache.progress.Progress`: the step that fills the block


class WriteGeneration(NamedTuple):
    """Write the present generation to a tier's file, also if the thread has nothing else to do."""


@dataclass(eq=False)
class LoadJob:
    """Fill blocks that continue a prefix, and the state slot after them if the model keeps states."""

    keys: Sequence[bytes]  # of the blocks, in order
    block_ids: Sequence[int] = ()  # to fill
    state_key: bytes | None = None  # of the state; without it the blocks are of no use
    slot: int = -1  # to fill
    # time.monotonic() until which it waits for blocks that another rank is saving. 0 means that it does not wait. It may change at
    # any time.
    until_s: float = 0.0
    num_unwanted: int = 0  # the last blocks that are not needed. It may change at any time
    should_stop: bool = False  # after the present block. It may change at any time
    num_loaded: int = 0  # result: the first blocks that are whole, in order
    has_state: bool = False  # result
    sources: list[str] = field(default_factory=list)  # result: the tier of each loaded block

    @property
    def is_open(self) -> bool:
        """Whether blocks are missing."""
        return not self.should_stop and self.num_loaded < len(self.keys) - self.num_unwanted


@dataclass(eq=False)
class FetchJob:
    """Copy what this node lacks of a prefix from another node's host memory to this one's."""

    address: str  # HOST:PORT of a rank of the other node
    token_ids: Sequence[int]  # of whole blocks
    root: bytes  # the key before the first block
    num_cached: int = 0  # the first blocks that the device has
    newest_state: int = 0  # number of blocks before the newest state that the device has
    num_awaited: int = 0  # the first blocks that the other node has or is saving now
    generation: int = 0  # records of older generations must not be fetched; set by the tiers
    secret: bytes = b""  # of the keys; set by the tiers
    is_unwanted: bool = False  # the request has ended or waits no longer; set at any time
    # Result: those of the blocks that were copied, also before the end.
    keys: set[bytes] = field(default_factory=set)


class PeerAddress(NamedTuple):
    """Where other nodes fetch from a rank."""

    address: str  # HOST:PORT
    memory: str  # identifies the host memory: ranks with the same one share it
