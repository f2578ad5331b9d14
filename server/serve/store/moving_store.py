"""A connection to a store that may move to another node (`job_store`). A connection that breaks is opened again.

The interrupted operation is then repeated. That is safe: every entry is written once, or always with the same value.
"""

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import ClassVar, TypeVar

import torch.distributed as dist
from torch.distributed import Store, TCPStore

from server.serve.store.meeting import Endpoint

JOIN_TIMEOUT_S = 600.0  # other ranks may still be reading their weights
_REACH_S = 1.0  # for one attempt to connect
_RETRY_S = 0.1
_T = TypeVar("_T")


class StoreAddress:
    """The present address of the job's store. Any thread may read or change it."""

    def __init__(self, endpoint: Endpoint) -> None:
        """Start at an address."""
        self.present = endpoint

    def move(self, endpoint: Endpoint) -> None:
        """Use the store at another address from now on."""
        self.present = endpoint


class MovingStore(Store):
    """One connection to the store at its present address. torch's C++ code calls these methods by name."""

    # A PrefixStore holds the C++ half only, which is useless without the Python half: keep all instances alive.
    _made: ClassVar[list["MovingStore"]] = []

    def __init__(
        self,
        address: StoreAddress,
        *,
        recovery_s: float,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """Connect when the first operation comes.

        Args:
            recovery_s: How long an operation may look for a store.
        """
        super().__init__()
        self._address, self._recovery_s, self._clock, self._pause = address, recovery_s, clock, pause
        self._store: Store | None = None
        self._endpoint = address.present  # of the connection
        self._made.append(self)

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value, and wait until the store has it: a write to a broken connection raises no error."""

        def write(store: Store) -> None:
            store.set(key, value)  # type: ignore[arg-type]
            store.check([key])

        self._run(write)

    def get(self, key: str) -> bytes:
        """Wait for a value and return it."""
        return self._run(lambda store: store.get(key))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Write a value if the name has the expected one, or none if that is "". Returns the current value."""
        return self._run(lambda store: store.compare_set(key, expected, value))

    def add(self, key: str, value: int) -> int:
        """Add to a counter."""
        return self._run(lambda store: store.add(key, value))

    def check(self, keys: list[str]) -> bool:
        """Return whether all names exist."""
        return self._run(lambda store: store.check(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all names exist."""
        self._run(lambda store: store.wait(keys) if timeout is None else store.wait(keys, timeout))

    def delete_key(self, key: str) -> bool:
        """Delete a name."""
        return self._run(lambda store: store.delete_key(key))

    deleteKey = delete_key

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of `get`."""
        self._run(lambda store: store.set_timeout(timeout))

    def _run(self, operation: Callable[[Store], _T]) -> _T:
        """Run an operation, again after every broken connection.

        Raises:
            dist.DistNetworkError: No store was there in time.
        """
        until_s: float | None = None
        while True:
            try:
                return operation(self._connected())
            except dist.DistNetworkError:
                self._store = None
                until_s = self._clock() + self._recovery_s if until_s is None else until_s
                if self._clock() >= until_s:
                    raise
            self._pause(_RETRY_S)

    def _connected(self) -> Store:
        present = self._address.present
        if self._store is None or self._endpoint != present:
            self._store, self._endpoint = connect(present), present
        return self._store


def connect(endpoint: Endpoint) -> Store:
    """Connect to a store that should be there now.

    Raises:
        dist.DistNetworkError: It cannot be reached.
    """
    try:  # a TCPStore would retry and log for a long time
        socket.create_connection(endpoint, timeout=_REACH_S).close()
    except OSError as error:
        raise dist.DistNetworkError(f"no store answers at {endpoint}: {error}") from error
    return open_store(endpoint)


def open_store(endpoint: Endpoint) -> Store:
    """Connect to a store, which may still be starting."""
    return TCPStore(
        endpoint.host,
        endpoint.port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=JOIN_TIMEOUT_S),
    )
