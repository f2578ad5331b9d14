"""What sleep mode, pauses, new weights and adapters share: they send orders to ranks, and wait until a condition holds."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from server.link.messages import ToRank

_POLL_S = 0.02


class RanksToOrder(Protocol):
    """Messages to ranks, implemented by `server.link.ranks.Ranks`."""

    def post(self, rank: int, message: ToRank) -> None:
        """Send a message to a rank, unless it is gone."""

    def post_all(self, message: ToRank) -> None:
        """Send a message to all ranks."""


async def wait_until(is_true: Callable[[], bool], until_s: float, clock: Callable[[], float]) -> bool:
    """Wait for a condition. Returns False if the clock reaches `until_s` first."""
    while not is_true():
        if clock() >= until_s:
            return False
        await asyncio.sleep(_POLL_S)
    return True
