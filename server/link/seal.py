"""The cluster key: messages between front and ranks are sealed with it, so that only who has it can be either of them.

Both ends give a number that was never used before (a nonce) as the stream begins. Key and numbers make the stream's own key;
each message carries an HMAC of it over its direction, its place in the stream and its content. So a message cannot be made,
changed, left out or sent again by others; it can be read. Without a cluster key messages travel as they are.
Rejected: TLS, which also hides what is said, and wants certificates that somebody makes, spreads and renews.
"""

import hmac
import secrets

NONCE_KEY = "wideep-nonce"  # metadata of a stream, both ways
MAC_BYTES = 32
SAME_KEY = "give all nodes the same --cluster-key-file"


class SealError(ConnectionError):
    """What came was not said by somebody who has the cluster key."""


def make_nonce() -> str:
    """Return a number that was never used before."""
    return secrets.token_hex(32)


def mac(key: bytes, *parts: bytes) -> bytes:
    """Return the HMAC of parts, none of which can pass for another one's end."""
    return hmac.digest(key, b"".join(len(part).to_bytes(8, "big") + part for part in parts), "sha256")


class Seal:
    """One end of one stream: seals what goes, opens what comes, in order."""

    def __init__(
        self, key: bytes | None, *, is_front: bool, rank_nonce: str = "", front_nonce: str = ""
    ) -> None:
        """`key`: of the cluster; None: nothing is sealed."""
        self._key = key and mac(key, b"wideep stream", rank_nonce.encode(), front_nonce.encode())
        self._own, self._other = (b"front", b"rank") if is_front else (b"rank", b"front")
        self._num_sealed = self._num_opened = 0

    def seal(self, content: bytes) -> bytes:
        """Return what is sent instead of a message."""
        if self._key is None:
            return content
        self._num_sealed += 1
        return mac(self._key, self._own, self._num_sealed.to_bytes(8, "big"), content) + content

    def open(self, sealed: bytes) -> bytes:
        """Return the message.

        Raises:
            SealError: it is not the other end's next one.
        """
        if self._key is None:
            return sealed
        self._num_opened += 1
        seal, content = sealed[:MAC_BYTES], sealed[MAC_BYTES:]
        expected = mac(self._key, self._other, self._num_opened.to_bytes(8, "big"), content)
        if not hmac.compare_digest(seal, expected):
            raise SealError(f"the cluster key is another one; {SAME_KEY}")
        return content
