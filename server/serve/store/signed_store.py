"""The job's store with values that are signed with the cluster key.

torch's store serves everyone who can reach its port. Without the key, they cannot create or change signed values, such as
the front's address or the addresses that gloo groups connect to. The signature covers the value and its name, and names contain the run
and the epoch. Not signed: counters, and the existence or deletion of a name.
"""

import hmac
from datetime import timedelta
from typing import ClassVar

import torch.distributed as dist
from torch.distributed import Store

from server.link.seal import MAC_BYTES, SAME_KEY, mac


class UnsignedError(dist.DistError):
    """A value is not signed with this cluster key."""


class SignedStore(Store):
    """A signing store on top of another store. torch's C++ code calls these methods by name."""

    # A PrefixStore holds the C++ half only, which is useless without the Python half: keep all instances alive.
    _made: ClassVar[list["SignedStore"]] = []

    def __init__(self, store: Store, key: bytes) -> None:
        """Sign the values of `store` with the cluster key `key`."""
        super().__init__()
        self._store, self._key = store, key
        self._made.append(self)

    def set(self, key: str, value: str | bytes) -> None:
        """Write a signed value."""
        self._store.set(key, self._signed(key, value))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Wait for a value and return it.

        Raises:
            UnsignedError: The value is not signed with this key.
        """
        return self._content(key, self._store.get(key))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Write a value if the name has the expected one, or none if that is "". Returns the current value.

        Raises:
            UnsignedError: The value is not signed with this key.
        """
        present = self._signed(key, expected) if expected else ""
        signed = self._store.compare_set(key, present, self._signed(key, value))  # type: ignore[arg-type]
        return self._content(key, signed)

    def add(self, key: str, value: int) -> int:
        """Add to a counter. Counters are not signed."""
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        """Return whether all names exist."""
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all names exist."""
        if timeout is None:
            self._store.wait(keys)
        else:
            self._store.wait(keys, timeout)

    def delete_key(self, key: str) -> bool:
        """Delete a name."""
        return self._store.delete_key(key)

    deleteKey = delete_key

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of `get`."""
        self._store.set_timeout(timeout)

    def _signed(self, key: str, value: str | bytes) -> bytes:
        content = value.encode() if isinstance(value, str) else bytes(value)
        return mac(self._key, b"store", key.encode(), content) + content

    def _content(self, key: str, signed: bytes) -> bytes:
        content = signed[MAC_BYTES:]
        if not hmac.compare_digest(signed[:MAC_BYTES], mac(self._key, b"store", key.encode(), content)):
            raise UnsignedError(f"{key!r} in the job's store is not signed with this cluster key; {SAME_KEY}")
        return content
