"""Images of a prompt, as a rank sees them: rows that an encoder computed, and their places in the prompt.

A range of the prompt has one token per row of an image, all with the same id. The rows replace these tokens' embeddings
(`PlacedRows`). Ranges and rows travel with the request, so a replay or a move needs neither the image nor its URL.

The tokens of an image do not identify it, so they never enter a block's key. `keyed` replaces each by 31 bits of a hash of the
image's digest and the row, above all token ids. So everything that compares prefixes (blocks, tiers, other nodes, the
router) distinguishes images without knowing them. The idea is SGLang's pad values. Rejected: the digest as a further part of
each key, which every store of keys would have to carry.

Positions: models with multimodal rotary embeddings number an image's rows by height and width, and continue the text after the
larger of the two (Qwen2-VL, arXiv 2409.12191). `axes_of` computes this for any part of a prompt, so no rank stores it.

Files of rows begin with a header; see `write_rows`. Does not know encoders or models.

Legend: L layers that take rows, N rows, D hidden size.
"""

import hashlib
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

_HEADER = struct.Struct("<8s32sQQQ")  # magic, digest, L, N, D
_MAGIC = b"wideepI1"
_ABOVE_TOKENS = 1 << 31


class ImageRowsError(ValueError):
    """Rows of an image that a rank cannot use; the message gives the reason."""


class PlacedRows(NamedTuple):
    """Rows that take the places of embedded tokens."""

    place: int  # the first of these tokens, in a span or in a step
    # [L, N, D] float32: the first replace the embeddings, the others are added after the first layers.
    rows: np.ndarray


class Image(NamedTuple):
    """A range of a prompt that consecutive rows of one image fill."""

    digest: str  # 64 hex digits: of the image's content and of all that changes its rows
    start: int  # first token of the range in the prompt
    length: int  # tokens and rows
    first: int = 0  # first row, if the image has several ranges
    height: int = 0  # rows per column and per line; 0 if positions count like those of text
    width: int = 0
    path: str = ""  # file of the rows on the front's host
    rows: np.ndarray | None = (
        None  # [L, all rows of the image, D] float32. None means that they must be read first.
    )

    @property
    def end(self) -> int:
        """The token after the range."""
        return self.start + self.length


def keyed(token_ids: Sequence[int], images: Sequence[Image]) -> Sequence[int]:
    """Return a prompt's tokens for keys of its prefixes. Without images, returns the same object."""
    if not images:
        return token_ids
    ids = list(token_ids)
    for image in images:
        ids[image.start : image.end] = _row_keys(image)
    return ids


def _row_keys(image: Image) -> list[int]:
    end = image.first + image.length
    drawn = np.frombuffer(hashlib.shake_128(image.digest.encode()).digest(4 * end), np.uint32)
    keys: list[int] = (drawn[image.first :] | np.uint32(_ABOVE_TOKENS)).tolist()
    return keys


def axes_of(images: Sequence[Image], start: int, length: int) -> np.ndarray | None:
    """Return the positions of tokens [start, start + length) in time, height and width: [3, length] int64.

    Returns None if the positions count the tokens, on each axis.

    Args:
        images: All images of the prompt, in order.
    """
    if not any(image.height for image in images):
        return None
    index = np.arange(start, start + length)
    axes = np.tile(index, (3, 1))
    shift = 0
    for image in images:
        if not image.height:
            continue
        is_inside = (index >= image.start) & (index < image.end)
        place = index[is_inside] - image.start
        axes[0, is_inside] = image.start + shift
        axes[1, is_inside] = image.start + shift + place // image.width
        axes[2, is_inside] = image.start + shift + place % image.width
        shift += max(image.height, image.width) - image.length
        axes[:, index >= image.end] = index[index >= image.end] + shift
    return axes


def rows_in(images: Sequence[Image], start: int, length: int) -> list[PlacedRows]:
    """Return the rows of tokens [start, start + length). Their places count from `start`. The rows must have been read."""
    placed = []
    for image in images:
        begin, end = max(start, image.start), min(start + length, image.end)
        if begin < end:
            assert image.rows is not None, (
                "an engine reads the rows of a request before it queues the request"
            )
            first = image.first - image.start
            placed.append(PlacedRows(begin - start, image.rows[:, first + begin : first + end]))
    return placed


def whole_chunk(images: Sequence[Image], start: int, wanted: int, most: int) -> int:
    """Return the number of tokens of a prompt's next chunk, which must not end within an image.

    The chunk may exceed `wanted` to reach the end of an image that it begins with. Otherwise it ends before the image.

    Args:
        images: All images of the prompt, in order.
        start: The chunk's first token.
        wanted: Tokens that it may have without images.
        most: Tokens that it may have at most. If the image at `start` has more, the chunk is empty.
    """
    rest = rest_of_image(images, start)
    if 0 < wanted < rest:
        return rest if rest <= most else 0
    end = start + wanted
    return next((image.start - start for image in images if start < image.start < end < image.end), wanted)


def rest_of_image(images: Sequence[Image], start: int) -> int:
    """Return the number of tokens from `start` to the end of the image that has this token. 0 if no image has it."""
    return next((image.end - start for image in images if image.start <= start < image.end), 0)


def read_rows(images: Sequence[Image], hidden_dim: int | None = None) -> tuple[Image, ...]:
    """Return images with their rows, mapped from their files unless they have them already.

    Args:
        hidden_dim: Hidden size of the model. None does not check it.

    Raises:
        ImageRowsError: A file is missing or damaged, or its rows have another shape.
    """
    known = {image.digest: image.rows for image in images if image.rows is not None}
    for image in images:
        if image.digest not in known:
            known[image.digest] = _map_rows(image)
    return tuple(image._replace(rows=_fitting(known[image.digest], image, hidden_dim)) for image in images)


def without_copies(images: Sequence[Image]) -> tuple[Image, ...]:
    """Return images with the rows of each digest only once, as messages carry them. `read_rows` undoes this."""
    known: set[str] = set()
    kept = []
    for image in images:
        kept.append(image._replace(rows=None) if image.digest in known else image)
        known.add(image.digest)
    return tuple(kept)


def _fitting(rows: np.ndarray, image: Image, hidden_dim: int | None) -> np.ndarray:
    num_rows = image.first + image.length
    fits = rows.ndim == 3 and rows.shape[1] >= num_rows and hidden_dim in (None, rows.shape[2])
    if not fits:
        raise ImageRowsError(
            f"the rows of an image have the shape {list(rows.shape)}; expected {num_rows} rows or more of {hidden_dim} values"
        )
    return rows if rows.flags.writeable else rows.copy()  # torch accepts no read-only memory


def _map_rows(image: Image) -> np.ndarray:
    try:
        with Path(image.path).open("rb") as file:
            header = file.read(_HEADER.size)
        magic, digest, *shape = _HEADER.unpack(header)
        if magic != _MAGIC or digest.hex() != image.digest:
            raise ImageRowsError("the file of an image's rows belongs to another image")
        # "c", copy on write: torch accepts no read-only memory.
        return np.memmap(image.path, np.float32, "c", offset=_HEADER.size, shape=tuple(shape))
    except (OSError, ValueError, struct.error) as error:
        if isinstance(error, ImageRowsError):
            raise
        raise ImageRowsError(f"the rows of an image cannot be read: {error}") from error


def write_rows(path: str, digest: str, rows_LND: np.ndarray) -> None:
    """Write an image's rows to a file: a header with the digest and the shape, then float32 values."""
    rows = np.ascontiguousarray(rows_LND, np.float32)
    with Path(path).open("r+b") as file:
        file.write(_HEADER.pack(_MAGIC, bytes.fromhex(digest), *rows.shape))
        file.write(rows.data)
