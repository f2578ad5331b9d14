"""Numbers on their way from a device to the host, behind everything launched so far. The host waits only when it reads them."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class HostCopy:
    """A copy of tensors of one type. Later launches may overwrite them."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        """Launch the copy. On the CPU it is made at once."""
        packed = parts[0] if len(parts) == 1 else torch.cat([*parts])
        self._done: torch.cuda.Event | None = None
        if packed.device.type == "cuda":
            self._packed = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._packed.copy_(packed, non_blocking=True)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()
        else:
            self._packed = packed.clone()

    def read(self) -> np.ndarray:
        """Wait for the copy, not for later launches."""
        if self._done is not None:
            self._done.synchronize()
        found: np.ndarray = self._packed.numpy()
        return found
