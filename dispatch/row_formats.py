"""How dispatched rows travel: as they are, or in FP8 with a scale per block of 128 channels.

A format turns the tokens into rows of bytes before anything is planned, and received rows into the tokens' type. A
rank's own rows take the same way, so that a row's bits do not depend on where its expert lives. Answers never travel
in FP8: their sum would be rounded K times.
"""

from typing import Protocol

import torch
from torch import Tensor

from dispatch.buffers import GrowingBuffer, GrowingRows
from dispatch.cpu_kernels import fp8 as kernels
from dispatch.fp8 import num_blocks
from dispatch.native import compile_all

NAMES = ("auto", "fp8")
_CODES = {
    torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3,
    torch.float8_e4m3fn: 4, torch.float8_e5m2: 5, torch.uint8: 6,
}  # fmt: skip
_OTHER_DTYPE, _FP8 = 32, 64  # places in a code


class RowFormat(Protocol):
    """One exchange's way to write and read rows; it keeps their memory.

    Attributes:
        name: how rows travel, in words.
        copies: whether `encode` writes rows somewhere, or returns where they are.
    """

    name: str
    copies: bool

    def code(self, dtype: torch.dtype) -> int:
        """A number for this format and the tokens' type; messages carry it, as it must be equal on all ranks."""
        ...

    def row_bytes(self, hidden: int, dtype: torch.dtype) -> int:
        """Bytes of one row on its way."""
        ...

    def encode(self, x_TH: Tensor, room: int) -> int:
        """Return the address of the rows as they travel; contiguous, and kept until the next call.

        `room`: rows that a later call may have, T or more.
        """
        ...

    def room(self, hidden: int, dtype: torch.dtype) -> tuple[int, int]:
        """Return where received rows of this form go, and how many there is room for (-1: another form)."""
        ...

    def reserve(self, num_rows: int, hidden: int, dtype: torch.dtype) -> None:
        """Make room for received rows."""
        ...

    def decode(self, num_rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
        """Return the first rows of the room in the tokens' type: [num_rows, H], contiguous."""
        ...


class PlainRows:
    """Rows as they are. See `RowFormat`."""

    name = "as they are"
    copies = False

    def __init__(self) -> None:
        self._rows = GrowingRows()

    def code(self, dtype: torch.dtype) -> int:
        """See `RowFormat`."""
        return _CODES.get(dtype, _OTHER_DTYPE)

    def row_bytes(self, hidden: int, dtype: torch.dtype) -> int:
        """See `RowFormat`."""
        return hidden * dtype.itemsize

    def encode(self, x_TH: Tensor, room: int) -> int:
        """See `RowFormat`. Nothing is copied."""
        return x_TH.data_ptr()

    def room(self, hidden: int, dtype: torch.dtype) -> tuple[int, int]:
        """See `RowFormat`."""
        return self._rows.address, self._rows.room(hidden, dtype)

    def reserve(self, num_rows: int, hidden: int, dtype: torch.dtype) -> None:
        """See `RowFormat`."""
        self._rows.reserve(num_rows, hidden, dtype)

    def decode(self, num_rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
        """See `RowFormat`. A view."""
        return self._rows.view(num_rows)


class Fp8Rows:
    """A row is e4m3 [H], padded to 4 bytes, then float32 scales [ceil(H / 128)]. See `RowFormat` and `fp8`.

    Attributes:
        round_scale: whether scales are powers of two.
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
        """See `RowFormat`."""
        return _FP8 + _CODES.get(dtype, _OTHER_DTYPE)

    def row_bytes(self, hidden: int, dtype: torch.dtype) -> int:
        """See `RowFormat`."""
        return scales_at(hidden) + 4 * num_blocks(hidden)

    def encode(self, x_TH: Tensor, room: int) -> int:
        """See `RowFormat`."""
        (T, H), width = x_TH.shape, self.row_bytes(x_TH.shape[1], x_TH.dtype)
        at = self._sent.reserve(room, width, torch.uint8)
        quantise = kernels.quantise_bfloat16 if x_TH.dtype == torch.bfloat16 else kernels.quantise_float32
        wide_TH = x_TH if x_TH.dtype == torch.bfloat16 else x_TH.float()
        quantise(
            wide_TH.data_ptr(), T, H, at, width, scales_at(H), int(self.round_scale), self._scratch.address
        )
        return at

    def room(self, hidden: int, dtype: torch.dtype) -> tuple[int, int]:
        """See `RowFormat`."""
        return self._received.address, self._received.room(self.row_bytes(hidden, dtype), torch.uint8)

    def reserve(self, num_rows: int, hidden: int, dtype: torch.dtype) -> None:
        """See `RowFormat`."""
        self._restored.reserve(num_rows, hidden, torch.float32)
        self._received.reserve(num_rows, self.row_bytes(hidden, dtype), torch.uint8)

    def decode(self, num_rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
        """See `RowFormat`. A view for float32, else new memory."""
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
    """Return a format of its own for one exchange: auto is the tokens' own type.

    Raises:
        ValueError: unknown name.
    """
    return _kind(name)()


def describe_rows(name: str) -> str:
    """Say how rows of a format travel.

    Raises:
        ValueError: unknown name.
    """
    return _kind(name).name


def scales_at(hidden: int) -> int:
    """Return where the scales of a row in FP8 begin."""
    return (hidden + 3) // 4 * 4


def _kind(name: str) -> type[PlainRows] | type[Fp8Rows]:
    if name not in NAMES:
        raise ValueError(f"dispatch dtype is {name!r}; it must be one of {', '.join(NAMES)}")
    return Fp8Rows if name == "fp8" else PlainRows
