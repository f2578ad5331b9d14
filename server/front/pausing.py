"""A pause of the service: requests are accepted and kept, and no rank computes until it ends.

For clients that change weights, or measure, between two batches of requests. Open requests end as aborted, end in their own
time, or are taken from their ranks and continue afterwards with the same tokens. Unlike sleep mode it frees no memory and refuses
no request. The modes are vLLM's.
"""

import time
from collections.abc import Callable
from typing import Protocol

from server.front.errors import ApiError
from server.front.ordering import wait_until
from server.front.sleep_mode import SleepWay

_BY = "pause"


class PausedRequests(Protocol):
    """The open requests, implemented by `server.front.requests.Requests`, which explains the methods."""

    @property
    def num_at_ranks(self) -> int: ...

    def abort_all(self, *, why: str) -> None: ...

    def pause(self, *, by: str, withdraws: bool) -> None: ...

    def resume(self, *, by: str) -> None: ...


class Pausing:
    """Whether the service is paused. Runs in the front's event loop."""

    def __init__(
        self,
        requests: PausedRequests,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin unpaused."""
        self._requests, self._clock = requests, clock
        self.is_paused = False
        self._num_resumes = 0  # calls

    async def pause(self, way: SleepWay, timeout_s: float) -> None:
        """Pause, and return when no rank has a request.

        Args:
            way: What becomes of open requests.
            timeout_s: Time limit. If ranks still have requests then, the service goes on.

        Raises:
            ApiError: The time was up, or the service was resumed meanwhile.
        """
        num_resumes, until_s = self._num_resumes, self._clock() + timeout_s
        self.is_paused = True
        self._requests.pause(by=_BY, withdraws=way is SleepWay.KEEP)
        if way is SleepWay.ABORT:
            self._requests.abort_all(why="it is paused")
        if not await wait_until(
            lambda: not self._requests.num_at_ranks or self._num_resumes != num_resumes, until_s, self._clock
        ):
            count = self._requests.num_at_ranks
            self.resume()
            raise ApiError(
                504,
                f"Ranks still have requests after {timeout_s:g} s ({count}), so the service is not paused.",
            )
        if self._num_resumes != num_resumes:
            raise ApiError(409, "The service was resumed meanwhile, by POST /resume.")

    def resume(self) -> None:
        """Continue. Does nothing if the service is not paused."""
        self._num_resumes += 1
        self.is_paused = False
        self._requests.resume(by=_BY)
