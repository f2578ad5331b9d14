"""One rank: nothing travels, so there is nothing to do. Its rows are read where they are."""

import torch
from torch import Tensor

from dispatch.errors import DispatchError
from dispatch.wires.wire import RankTable


class LocalWire:
    """See `Wire`."""

    name = "local"
    rank = 0
    world_size = 1
    device = torch.device("cpu")

    def __init__(self, *, epoch: int = 0, reason: str = "there is one rank") -> None:
        self.epoch, self.reason = epoch, reason
        self.send_addresses, self.recv_addresses = RankTable(1), RankTable(1)
        self.mask = RankTable(1)
        self._nothing = torch.empty(0, dtype=torch.uint8)

    def open_windows(self, send_bytes: RankTable) -> None:
        """See `Wire`."""

    def send_window(self, rank: int) -> Tensor:
        """See `Wire`."""
        return self._nothing

    def exchange(self, send_bytes: RankTable, recv_bytes: RankTable | None) -> None:
        """See `Wire`."""

    def begin_exchange(self, send_bytes: RankTable, recv_bytes: RankTable | None) -> None:
        """See `Wire`."""

    def finish_exchange(self) -> None:
        """See `Wire`."""

    def received(self, rank: int) -> Tensor:
        """See `Wire`."""
        return self._nothing

    def refuse(self, text: str) -> None:
        """See `Wire`. There is nobody to tell."""

    def interrupt(self, error: DispatchError) -> None:
        """See `Wire`. Nobody is waited for."""

    def close(self) -> None:
        """See `Wire`."""
