"""The life of the standby's front: it follows the leading front until that one's node is lost, and then leads.

Of several fronts of the standby, the first one follows and leads. The others wait until it leads.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from server.machine.tasks import logging_errors
from server.serve.standby.first_front import (
    RETRY_S,
    FileCopies,
    FirstFront,
    Following,
    end_first,
    find_first,
    has_taken_over,
    note_taken_over,
)

_COPIES = "copies"  # of the leading front's folder
_END_EVERY_S = 2.0
_LOG = logging.getLogger("wideep.front")


def copies_in(folder: Path) -> Path:
    """Return the copies of the leading front's folder, which the standby's front uses when it leads."""
    return folder / _COPIES


async def wait_until_lost(
    folder: Path,
    *,
    cluster_key: bytes | None,
    silence_s: float,
    begun: asyncio.Event,
    now: asyncio.Event,
) -> FirstFront | None:
    """Follow the leading front. Returns it when its node is lost, or None when this front must end.

    Args:
        folder: The folder that outlives this front.
        silence_s: As for `Following`.
        begun: Set if the service is to end: this front leads no more. `now`: Set when this front must end.
    """
    copies = FileCopies(copies_in(folder))
    while (first := find_first(folder)) is None:  # the engine next to this front writes it
        if now.is_set():
            return None
        await asyncio.sleep(RETRY_S)
    if has_taken_over(folder):
        return first
    following = Following(first, copies, cluster_key=cluster_key, silence_s=silence_s)
    lost = asyncio.create_task(asyncio.to_thread(following.follow, lambda text: _LOG.warning("%s", text)))
    ends = asyncio.create_task(now.wait())
    await asyncio.wait([lost, ends], return_when=asyncio.FIRST_COMPLETED)
    following.stop()
    why = await lost
    if why is None or begun.is_set():  # the supervisor ends this front with the engine
        await ends
        return None
    ends.cancel()
    copies.remove_partial()
    note_taken_over(folder)
    what = "" if following.has_copies else ", without all of its files"
    _LOG.warning("the node of the leading front is lost (%s): this front takes over%s", why, what)
    return first


async def wait_for_leading(folder: Path, *, now: asyncio.Event) -> FirstFront | None:
    """Wait until the standby's first front has taken over, as one of its others. The arguments and results are those of
    `wait_until_lost`."""
    while not has_taken_over(folder):
        if now.is_set():
            return None
        await asyncio.sleep(RETRY_S)
    return find_first(folder)


async def keep_ending(first: FirstFront, cluster_key: bytes | None, on_ended: Callable[[], None]) -> None:
    """End the former leading front as soon as it can be reached: only the link to its node was cut."""
    has_ended = False
    while not has_ended:
        with logging_errors("cannot end the former leading front; retrying"):
            has_ended = await asyncio.to_thread(end_first, first, cluster_key)
        if not has_ended:
            await asyncio.sleep(_END_EVERY_S)
    on_ended()
