"""The exported unit of a cache on a GPU: records are gathered, copied and summed on a separate stream.

A record passes through one buffer on the device and one in pinned host memory. The checksum is computed on the device
(`kvcache.gpu.sums`), of the bytes as they lie in the pages: those of a record that was taken are gathered again.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvcache.unit import filled, sum_of


class DeviceUnit:
    """A `kvcache.unit.Unit` in a device's memory. Threads need one each."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Refer to tensors [N, ...], contiguous, on one device, with the same N. Empty ones are left out.

        Raises:
            ValueError: A part is not a whole number of words.
        """
        self._parts = filled(tensors)
        self._sizes = [part[0].numel() * part.element_size() for part in self._parts]
        self.num_bytes = sum(self._sizes)
        device = self._parts[0].device if self._parts else torch.device("cpu")
        is_gpu = device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if is_gpu else None  # type: ignore[no-untyped-call]
        self._staged = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        self._host = torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=is_gpu)
        self._views = [self._host.numpy().data]
        self._sum = _summing_on(device)

    def export(self, index: int) -> tuple[list[memoryview], int]:
        with self._on_stream():
            torch.cat(self._bytes_of(index), out=self._staged)
            self._host.copy_(self._staged, non_blocking=True)
            checksum = self._sum(self._staged)
        return self._views, checksum

    def buffers(self, index: int) -> list[memoryview]:
        return self._views

    def take(self, index: int) -> int:
        with self._on_stream():
            self._staged.copy_(self._host, non_blocking=True)
            pieces = torch.split(self._staged, self._sizes)
            for place, staged in zip(self._bytes_of(index), pieces, strict=True):
                place.copy_(staged)
            torch.cat(self._bytes_of(index), out=self._staged)
            return self._sum(self._staged)

    def _bytes_of(self, index: int) -> list[Tensor]:
        return [part[index].view(-1).view(torch.uint8) for part in self._parts]

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Run on the unit's stream, and wait for its end."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()


def _summing_on(device: torch.device) -> Callable[[Tensor], int]:
    """Return the function that computes a record's checksum."""
    if device.type != "cuda":
        return lambda record: sum_of([record])
    from kvcache.gpu.sums import sum_record  # noqa: PLC0415 - needs triton, an optional package

    return sum_record
