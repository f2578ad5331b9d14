"""How sleeping ranks are woken: whoever gets work rings, everybody hears.

While nobody has anything, all ranks wait for one key of the job's store, named after the step that they will take
next; a rank that gets a request sets it. A key is never reused, so a late ring wakes nobody wrongly. Waiting and
ringing use a connection each, because a store connection serves one call at a time.
"""

from datetime import timedelta
from typing import Protocol

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

WAIT_S = 3600.0  # per call; a sleep may be longer


class Doorbell(Protocol):
    """Wakes all ranks of a job."""

    def ring(self, step: int) -> None:
        """Wake everybody who sleeps before `step`; any thread."""

    def wait(self, step: int) -> None:
        """Sleep until somebody rings for `step`."""


class StoreDoorbell:
    """A doorbell over two connections to the job's store."""

    def __init__(self, waiting: Store, ringing: Store) -> None:
        """Take two clones of the store that nobody else uses."""
        self._waiting, self._ringing = waiting, ringing
        self._heard: str | None = None

    def ring(self, step: int) -> None:
        """Wake everybody who sleeps before `step`; any thread, one at a time."""
        self._ringing.set(f"wake/{step}", "1")

    def wait(self, step: int) -> None:
        """Sleep until somebody rings for `step`.

        Raises:
            dist.DistNetworkError: the store's host is gone.
        """
        if self._heard is not None:  # everybody has taken a step since, so nobody waits for that key any more
            self._waiting.delete_key(self._heard)
        self._heard = f"wake/{step}"
        while True:
            try:
                self._waiting.wait([self._heard], timedelta(seconds=WAIT_S))
            except DistStoreError:
                continue
            return
