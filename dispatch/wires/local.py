"""`Wire` of a single rank: nothing is sent, and its rows are read in place."""

import torch
from torch import Tensor

from dispatch.errors import DispatchError
from dispatch.wires.wire import RankTable


class LocalWire:
    """`Wire` of a single rank."""

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
        pass

    def send_window(self, rank: int) -> Tensor:
        return self._nothing

    def exchange(self, send_bytes: RankTable, recv_bytes: RankTable | None) -> None:
        pass

    def begin_exchange(self, send_bytes: RankTable, recv_bytes: RankTable | None) -> None:
        pass

    def finish_exchange(self) -> None:
        pass

    def received(self, rank: int) -> Tensor:
        return self._nothing

    def refuse(self, text: str) -> None:
        pass

    def interrupt(self, error: DispatchError) -> None:
        pass

    def close(self) -> None:
        pass
