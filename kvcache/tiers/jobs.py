"""Jobs of the tiers' threads. Uses no torch: the scheduler makes them."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(eq=False)
class SaveJob:
    """Copy a block or a state slot to the tiers."""

    index: int  # of the block or the slot
    key: bytes
    is_state: bool = False


@dataclass(eq=False)
class LoadJob:
    """Fill blocks that continue a prefix, and the state slot after them if the model keeps states."""

    keys: Sequence[bytes]  # of the blocks, in order
    block_ids: Sequence[int] = ()  # to fill
    state_key: bytes | None = None  # of the state; without it the blocks are of no use
    slot: int = -1  # to fill
    num_loaded: int = 0  # result: the first blocks that are whole, in order
    has_state: bool = False  # result
    sources: list[str] = field(default_factory=list)  # result: the tier of each loaded block
