"""The job's store, with what ranks write there signed by the cluster key.

torch's store takes from and gives to whoever reaches its port. Signed values cannot be made or changed by others: neither
where the front listens, nor the addresses at which gloo's groups connect, which are values like any other. A value is signed with
its name, and names hold the run and the epoch. What is not signed: counters, and that a name is there, or is taken away.
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
    """A store over another one. torch's C++ calls the methods by these names."""

    # A PrefixStore holds the C++ half only, which is of no use once the Python half is gone: they live as long as the process.
    _made: ClassVar[list["SignedStore"]] = []

    def __init__(self, store: Store, key: bytes) -> None:
        """`key`: the cluster's."""
        super().__init__()
        self._store, self._key = store, key
        self._made.append(self)

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self._store.set(key, self._signed(key, value))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Wait for a value.

        Raises:
            UnsignedError: somebody else has written it.
        """
        return self._content(key, self._store.get(key))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Write a value where there is none; returns what is there then.

        Raises:
            UnsignedError: somebody else has written it.
        """
        assert not expected, "a signed value is never replaced by comparison"
        signed = self._store.compare_set(key, "", self._signed(key, value))  # type: ignore[arg-type]
        return self._content(key, signed)

    def add(self, key: str, value: int) -> int:
        """Count; not signed."""
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        """Whether names are there."""
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for names."""
        if timeout is None:
            self._store.wait(keys)
        else:
            self._store.wait(keys, timeout)

    def delete_key(self, key: str) -> bool:
        """Take a name away."""
        return self._store.delete_key(key)

    deleteKey = delete_key

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long `get` waits."""
        self._store.set_timeout(timeout)

    def _signed(self, key: str, value: str | bytes) -> bytes:
        content = value.encode() if isinstance(value, str) else bytes(value)
        return mac(self._key, b"store", key.encode(), content) + content

    def _content(self, key: str, signed: bytes) -> bytes:
        content = signed[MAC_BYTES:]
        if not hmac.compare_digest(signed[:MAC_BYTES], mac(self._key, b"store", key.encode(), content)):
            raise UnsignedError(f"{key!r} in the job's store is not signed with this cluster key; {SAME_KEY}")
        return content
