"""One rank: nothing travels, so there is nothing to do. Its rows are read where they are."""

from dispatch.transport import RankTable


class LocalTransport:
    """See `Transport`."""

    name = "local"
    rank = 0
    world_size = 1

    def __init__(self, *, epoch: int = 0, reason: str = "there is one rank") -> None:
        self.epoch, self.reason = epoch, reason
        self.send_addresses, self.recv_addresses = RankTable(1), RankTable(1)

    def open_windows(self, send_bytes: RankTable) -> None:
        """See `Transport`."""

    def exchange(self, send_bytes: RankTable, recv_bytes: RankTable | None) -> None:
        """See `Transport`."""

    def close(self) -> None:
        """See `Transport`."""
