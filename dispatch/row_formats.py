"""Formats of dispatched rows on the wire: unchanged, or FP8 with a scale per block of 128 channels.

A format converts tokens to rows of bytes before the exchange is planned, and received rows to the tokens' type. A
rank's own rows are converted too, so that a row's bits do not depend on the placement of its expert. Answers never
travel in FP8: their sum would be rounded K times.
"""

from typing import Protocol

import torch
from torch import Tensor

from dispatch.buffers import GrowingBuffer, GrowingRows
from dispatch.compiled.native import compile_all
from dispatch.cpu_kernels import fp8 as kernels
from dispatch.fp8 import num_blocks

NAMES = ("auto", "fp8")
_CODES = {
    torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3,
    torch.float8_e4m3fn: 4, torch.float8_e5m2: 5, torch.uint8: 6,
}  # fmt: skip
_OTHER_DTYPE, _FP8 = 32, 64  # bits of a code


class RowFormat(Protocol):
    """Writes and reads the rows of one exchange and owns their memory.

    Attributes:
        name: Description of the format.
        copies: Whether `encode` copies the rows. Otherwise it returns the address of its argument.
    """

    name: str
    copies: bool

    def code(self, dtype: torch.dtype) -> int:
        """Return a number for this format and the tokens' type. It travels in messages: all ranks must have the same."""

    def row_bytes(self, hidden: int, dtype: torch.dtype) -> int:
        """Return the bytes of one row on the wire."""

    def encode(self, x_TH: Tensor, room: int) -> int:
        """Return the address of the rows in this format. They are contiguous and live until the next call.

        `room`: number of rows that a later call may have, T or more.
        """

    def room(self, hidden: int, dtype: torch.dtype) -> tuple[int, int]:
        """Return the address for received rows of this form, and the room in rows (-1: reserved for another form)."""

    def reserve(self, num_rows: int, hidden: int, dtype: torch.dtype) -> None:
        """Make room for received rows."""

    def decode(self, num_rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
        """Return the first rows of the room in the tokens' type: [num_rows, H], contiguous."""


class PlainRows:
    """Rows that travel unchanged."""

    name = "as they are"
    copies = False

    def __init__(self) -> None:
        self._rows = GrowingRows()

    def code(self, dtype: torch.dtype) -> int:
        return _CODES.get(dtype, _OTHER_DTYPE)

    def row_bytes(self, hidden: int, dtype: torch.dtype) -> int:
        return hidden * dtype.itemsize

    def encode(self, x_TH: Tensor, room: int) -> int:
        return x_TH.data_ptr()

    def room(self, hidden: int, dtype: torch.dtype) -> tuple[int, int]:
        return self._rows.address, self._rows.room(hidden, dtype)

    def reserve(self, num_rows: int, hidden: int, dtype: torch.dtype) -> None:
        self._rows.reserve(num_rows, hidden, dtype)

    def decode(self, num_rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
        return self._rows.view(num_rows)


class Fp8Rows:
    """Rows of e4m3 [H], padded to 4 bytes, then float32 scales [ceil(H / 128)]. See `fp8`.

    Attributes:
        round_scale: Whether scales are powers of two.
    """

    name = "in FP8, with a scale per 128 channels"
    copies = True

    def __init__(self) -> None:
        self._sent, self._received, self._restored = GrowingRows(), GrowingRows(), GrowingRows()
        self._scratch = GrowingBuffer(torch.uint8)
        self._scratch.reserve(kernels.SCRATCH_BYTES)
        self.round_scale = False
        compile_all(*kernels.KERNELS)

    def code(self, dtype: torch.dtype) -> int:
        return _FP8 + _CODES.get(dtype, _OTHER_DTYPE)

    def row_bytes(self, hidden: int, dtype: torch.dtype) -> int:
        return scales_at(hidden) + 4 * num_blocks(hidden)

    def encode(self, x_TH: Tensor, room: int) -> int:
        (T, H), width = x_TH.shape, self.row_bytes(x_TH.shape[1], x_TH.dtype)
        at = self._sent.reserve(room, width, torch.uint8)
        quantise = kernels.quantise_bfloat16 if x_TH.dtype == torch.bfloat16 else kernels.quantise_float32
        wide_TH = x_TH if x_TH.dtype == torch.bfloat16 else x_TH.float()
        quantise(
            wide_TH.data_ptr(), T, H, at, width, scales_at(H), int(self.round_scale), self._scratch.address
        )
        return at

    def room(self, hidden: int, dtype: torch.dtype) -> tuple[int, int]:
        return self._received.address, self._received.room(self.row_bytes(hidden, dtype), torch.uint8)

    def reserve(self, num_rows: int, hidden: int, dtype: torch.dtype) -> None:
        self._restored.reserve(num_rows, hidden, torch.float32)
        self._received.reserve(num_rows, self.row_bytes(hidden, dtype), torch.uint8)

    def decode(self, num_rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
        """Return a view for float32, and new memory for other types."""
        self._restored.reserve(num_rows, hidden, torch.float32)
        rows, restored = self._received.address, self._restored.address
        kernels.restore_rows(
            rows,
            num_rows,
            hidden,
            self.row_bytes(hidden, dtype),
            scales_at(hidden),
            self._scratch.address,
            restored,
        )
        return self._restored.view(num_rows).to(dtype)


def row_format(name: str) -> RowFormat:
    """Return a new format for one exchange. "auto" keeps the tokens' type.

    Raises:
        ValueError: The name is unknown.
    """
    return _kind(name)()


def describe_rows(name: str) -> str:
    """Return the description of a format.

    Raises:
        ValueError: The name is unknown.
    """
    return _kind(name).name


def scales_at(hidden: int) -> int:
    """Return the offset of the scales in a row in FP8."""
    return (hidden + 3) // 4 * 4


def _kind(name: str) -> type[PlainRows] | type[Fp8Rows]:
    if name not in NAMES:
        raise ValueError(f"dispatch dtype is {name!r}; it must be one of {', '.join(NAMES)}")
    return Fp8Rows if name == "fp8" else PlainRows
