"""What can go wrong between ranks, by name. Except PeerRefused all are local: the rank that raises may be the only one
that does."""


class DispatchError(Exception):
    """Base of every error of this package that is not the caller's bad input (that is a ValueError)."""


class PeerLost(DispatchError):  # noqa: N818 - the name says what happened
    """A peer's process is gone, closed its wire, or lost its connection.

    Attributes:
        rank: the peer that is lost, as far as this rank knows; None where collectives do not say (above two ranks).
    """

    def __init__(self, rank: int | None, reason: str) -> None:
        who = "a peer" if rank is None else f"rank {rank}"
        super().__init__(f"{who} is lost: {reason}")
        self.rank = rank


class DispatchTimeout(DispatchError):  # noqa: N818
    """A peer is alive, or seems to be, and did not send in time.

    Attributes:
        rank: the first rank that was waited for; None where the wire does not say (gloo, above two ranks).
    """

    def __init__(self, rank: int | None, timeout_s: float, doing: str) -> None:
        who = "a peer" if rank is None else f"rank {rank}"
        super().__init__(f"{who} sent nothing for {timeout_s:g} s during {doing}; it is hung or far behind")
        self.rank = rank


class PeerRefused(DispatchError, ValueError):  # noqa: N818
    """A peer refused the call that this rank also made, because its own arguments were bad.

    Nothing of the call was delivered to anybody, and the next call works: unlike the other errors this one leaves
    the group in order.

    Attributes:
        rank: the lowest rank that refused.
        text: what was wrong there.
    """

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"rank {rank} refused the call: {text}")
        self.rank = rank
        self.text = text


class RanksDisagree(DispatchError):  # noqa: N818
    """Two ranks made a call with different sizes, or not the same call: the group is out of step."""


class WireUnavailable(DispatchError):  # noqa: N818
    """The wire that was asked for cannot work here; the message says why, on every rank alike."""
