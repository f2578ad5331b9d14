"""The prefix index: which full blocks hold the KV of which token prefixes.

A full block's key is a hash of its parent's key and its own token ids, so a key identifies the whole prefix up to the
block's end. The hash is a keyed 128-bit BLAKE2b with a secret per index, so collisions cannot be constructed. A hit also
compares the stored token ids, which cost 64 bytes per block.

Two sequences may compute the same prefix at the same time. Their blocks are then copies of one entry: a block table
never changes while its sequence runs, and a holder of a block's child holds a copy of the block. The pool relies on this
to evict leaves before their parents without a tree.

Does not know reference counts or owners. Idea: hashed block chains, as in vLLM. Rejected: a radix tree over tokens
(SGLang), which finds the same full blocks but has more pointers to maintain.
"""

import hashlib
import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

KEY_BYTES = 16
ROOT_KEY = bytes(KEY_BYTES)
LONG_ROOT_KEY = bytes([1] * KEY_BYTES)  # of long sequences, if a model computes these differently


def salted(root: bytes, salt: str) -> bytes:
    """Return the root of prefixes that only sequences with the same salt may share."""
    return hashlib.blake2b(root + salt.encode(errors="surrogatepass"), digest_size=KEY_BYTES).digest()


def with_weights(root: bytes, weights: str, salt: str) -> bytes:
    """Return the root of prefixes that were computed with these weights, of sequences with the same salt.

    It is salted twice, also without a salt, so that no client's salt gives another version's root.
    """
    return salted(salted(root, weights), salt)


def adapted(root: bytes, digest: str) -> bytes:
    """Return the root of prefixes that were computed with an adapter of this digest. No salt gives the same root."""
    return hashlib.blake2b(root + digest.encode(), digest_size=KEY_BYTES, person=b"adapter").digest()


@dataclass(slots=True)
class CachedBlock:
    """A cached full block: its key, its token ids (uint32, packed) and the blocks that hold it."""

    key: bytes
    packed_ids: bytes
    block_ids: list[int]  # never empty; several while sequences that computed the same prefix run


class PrefixIndex:
    """Finds blocks by the tokens of the prefix that they end."""

    def __init__(self, block_tokens: int, secret: bytes | None = None) -> None:
        """Create an empty index. `secret` (16 to 64 bytes) keys the hash; None draws one."""
        self._block_tokens = block_tokens
        self._secret = os.urandom(KEY_BYTES) if secret is None else secret
        self._entries: dict[bytes, CachedBlock] = {}
        self._entry_of: dict[int, CachedBlock] = {}

    def __contains__(self, block_id: int) -> bool:
        """Whether the block, or a copy of it, is findable."""
        return block_id in self._entry_of

    def __len__(self) -> int:
        """Number of distinct cached prefixes."""
        return len(self._entries)

    def match(self, token_ids: Sequence[int], root: bytes = ROOT_KEY) -> list[int]:
        """Return the blocks of the longest cached prefix of whole blocks, in order."""
        block_ids: list[int] = []
        key, size = root, self._block_tokens
        for start in range(0, len(token_ids) - size + 1, size):
            packed_ids = array("I", token_ids[start : start + size]).tobytes()
            key = self._key(key, packed_ids)
            entry = self._entries.get(key)
            if entry is None or entry.packed_ids != packed_ids:
                break
            block_ids.append(entry.block_ids[0])
        return block_ids

    def keys_of(
        self, token_ids: Sequence[int], root: bytes = ROOT_KEY, *, with_tail: bool = False
    ) -> list[bytes]:
        """Return the keys of all whole blocks of a prefix, in order, whether cached or not.

        `with_tail`: also that of the tokens after them, if there are any.
        """
        keys: list[bytes] = []
        size = self._block_tokens
        for start in range(0, len(token_ids) - size + 1, size):
            root = self.key_of(root, token_ids[start : start + size])
            keys.append(root)
        if with_tail and len(token_ids) % size:
            keys.append(self.key_of_tail(root, token_ids[len(keys) * size :]))
        return keys

    def insert(
        self, block_id: int, token_ids: Sequence[int], parent_id: int | None, root: bytes = ROOT_KEY
    ) -> None:
        """Make a full block findable under its parent's prefix. The parent is None for a sequence's first block."""
        assert len(token_ids) == self._block_tokens, (
            f"block {block_id} has {len(token_ids)} tokens and is not full"
        )
        assert block_id not in self._entry_of, f"block {block_id} is already published"
        parent_key = root if parent_id is None else self._entry_of[parent_id].key
        packed_ids = array("I", token_ids).tobytes()
        key = self._key(parent_key, packed_ids)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = CachedBlock(key, packed_ids, [])
        entry.block_ids.append(block_id)
        self._entry_of[block_id] = entry

    def key_of(self, parent_key: bytes, token_ids: Sequence[int]) -> bytes:
        """Return the key of a full block after the prefix of `parent_key`, which is a root key for the first block."""
        return self._key(parent_key, array("I", token_ids).tobytes())

    def key_of_tail(self, parent_key: bytes, token_ids: Sequence[int]) -> bytes:
        """Return the key of a block's first tokens after the prefix of `parent_key`. No full block has it."""
        packed_ids = array("I", token_ids).tobytes()
        return hashlib.blake2b(
            parent_key + packed_ids, digest_size=KEY_BYTES, key=self._secret, person=b"tail"
        ).digest()

    def key_of_block(self, block_id: int) -> bytes:
        """Return the key of a findable block."""
        return self._entry_of[block_id].key

    def block_of(self, key: bytes) -> int | None:
        """Return a block that holds the prefix of a key, or None if it is not cached."""
        entry = self._entries.get(key)
        return None if entry is None else entry.block_ids[0]

    def renew(self, secret: bytes | None = None) -> None:
        """Hide all present prefixes from lookups. Their blocks stay valid for holders. `secret`: the next one."""
        renewed = hashlib.blake2b(b"renewed", digest_size=KEY_BYTES, key=self._secret).digest()
        self._secret = secret or renewed

    def copies(self, block_id: int) -> list[int]:
        """Return the other blocks that hold the same prefix."""
        block_ids = self._entry_of[block_id].block_ids
        return [] if len(block_ids) == 1 else [copy_id for copy_id in block_ids if copy_id != block_id]

    def remove(self, block_id: int) -> None:
        """Forget a block. Its prefix stays findable while a copy is left."""
        entry = self._entry_of.pop(block_id)
        entry.block_ids.remove(block_id)
        if not entry.block_ids:
            del self._entries[entry.key]

    def _key(self, parent_key: bytes, packed_ids: bytes) -> bytes:
        return hashlib.blake2b(parent_key + packed_ids, digest_size=KEY_BYTES, key=self._secret).digest()
