"""Rows of images for a rank of another host, which cannot map the front's memory: they travel in parts before their request.

A part takes milliseconds to write and to read, so that neither end pauses its other requests, and no message comes near gRPC's limit.
The stream keeps the order, so the receiver needs no word about the last part. Other messages to the rank wait behind the parts
of a request, so a request has a limit.
Rejected: rows inside of the request's message. Writing 160 MiB of them took the front's event loop seconds.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from kvcache.images import ImageRowsError, read_rows, without_copies
from scheduler.policy.request import Request
from server.link.messages import RowsPart, Submit

MOST_ROW_BYTES = 512 << 20  # of the images of one request
_PART_BYTES = 256 << 10


def row_parts(request: Request) -> Iterator[RowsPart]:
    """Yield the rows of a request's images, those of equal images once. They are mapped from their files before the first part.

    Raises:
        ImageRowsError: A file cannot be read, or the rows have more than `MOST_ROW_BYTES` bytes.
    """
    images = without_copies(read_rows(request.images))
    rows = {image.digest: image.rows for image in images if image.rows is not None}
    num_bytes = sum(each.nbytes for each in rows.values())
    if num_bytes > MOST_ROW_BYTES:
        raise ImageRowsError(
            f"the rows of the images have {num_bytes} bytes, and a rank of another host takes at most {MOST_ROW_BYTES}"
        )
    for digest, each in rows.items():
        content = each.reshape(-1).view(np.uint8)
        for start in range(0, len(content), _PART_BYTES):
            yield RowsPart(digest, list(each.shape), start, content[start : start + _PART_BYTES])


class ArrivingRows:
    """Rows of images that arrive before their request. A stream has one."""

    def __init__(self) -> None:
        self._rows: dict[str, np.ndarray] = {}  # by digest: [L, N, D] float32

    def add(self, part: RowsPart) -> None:
        """Keep a part."""
        if part.digest not in self._rows:
            self._rows[part.digest] = np.empty(part.shape, np.float32)
        content = self._rows[part.digest].reshape(-1).view(np.uint8)
        content[part.start : part.start + len(part.content)] = part.content

    def placed(self, submit: Submit) -> Submit:
        """Return a request with the rows that arrived before it."""
        if not self._rows:
            return submit
        arrived, self._rows = self._rows, {}
        images = tuple(image._replace(rows=arrived.get(image.digest)) for image in submit.request.images)
        return submit._replace(request=dataclasses.replace(submit.request, images=images))
