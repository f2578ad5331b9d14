"""The cluster key: it authenticates messages between front and ranks, so that only its owners can act as either of them.

Each end sends a nonce when the stream begins. The cluster key and both nonces yield the stream's key. Each message carries
an HMAC with that key over its direction, its position in the stream and its content. Others therefore cannot forge,
change, drop or replay a message, but they can read it. Without a cluster key, messages are sent unauthenticated.
Rejected: TLS, which also encrypts, but needs certificates that have to be issued, distributed and renewed.
"""

import hmac
import secrets

NONCE_KEY = "wideep-nonce"  # metadata of a stream, both ways
MAC_BYTES = 32
SAME_KEY = "give all nodes the same --cluster-key-file"


class SealError(ConnectionError):
    """A message was not written with the cluster key."""


def make_nonce() -> str:
    """Return a random number that is never reused."""
    return secrets.token_hex(32)


def mac(key: bytes, *parts: bytes) -> bytes:
    """Return the HMAC of all parts. Each is preceded by its length, so the boundaries are unambiguous."""
    return hmac.digest(key, b"".join(len(part).to_bytes(8, "big") + part for part in parts), "sha256")


class Seal:
    """One end of one stream: seals outgoing and opens incoming messages, in order."""

    def __init__(
        self, key: bytes | None, *, is_front: bool, rank_nonce: str = "", front_nonce: str = ""
    ) -> None:
        """Args: key is the cluster key; None disables sealing."""
        self._key = key and mac(key, b"wideep stream", rank_nonce.encode(), front_nonce.encode())
        self._own, self._other = (b"front", b"rank") if is_front else (b"rank", b"front")
        self._num_sealed = self._num_opened = 0

    def seal(self, content: bytes) -> bytes:
        """Return the message with its HMAC."""
        if self._key is None:
            return content
        self._num_sealed += 1
        return mac(self._key, self._own, self._num_sealed.to_bytes(8, "big"), content) + content

    def open(self, sealed: bytes) -> bytes:
        """Return the message without its HMAC.

        Raises:
            SealError: It is not the other end's next message.
        """
        if self._key is None:
            return sealed
        self._num_opened += 1
        seal, content = sealed[:MAC_BYTES], sealed[MAC_BYTES:]
        expected = mac(self._key, self._other, self._num_opened.to_bytes(8, "big"), content)
        if not hmac.compare_digest(seal, expected):
            raise SealError(f"the cluster keys differ; {SAME_KEY}")
        return content
