"""Errors between ranks. All except PeerRefused are local: they may be raised on one rank only."""


class DispatchError(Exception):
    """Base of every error of this package, except ValueError for the caller's bad input."""


class PeerLost(DispatchError):  # noqa: N818 - named after the event
    """A peer's process is gone, closed its wire, or lost its connection.

    Attributes:
        rank: The lost peer, if this rank knows it; None if a collective does not report it (above two ranks).
    """

    def __init__(self, rank: int | None, reason: str) -> None:
        who = "a peer" if rank is None else f"rank {rank}"
        super().__init__(f"{who} is lost: {reason}")
        self.rank = rank


class DispatchTimeout(DispatchError):  # noqa: N818
    """A peer seems to be alive but did not send in time.

    Attributes:
        rank: The first rank that was waited for; None if the wire does not report it (gloo, above two ranks).
    """

    def __init__(self, rank: int | None, timeout_s: float, doing: str) -> None:
        who = "a peer" if rank is None else f"rank {rank}"
        super().__init__(f"{who} sent nothing for {timeout_s:g} s during {doing}; it is hung or far behind")
        self.rank = rank


class PeerRefused(DispatchError, ValueError):  # noqa: N818
    """A peer refused a call that this rank also made, because the peer's arguments were bad.

    No rank received anything of the call, and the next call works: unlike other errors, this one leaves the group intact.

    Attributes:
        rank: The lowest rank that refused.
        text: What was wrong there.
    """

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"rank {rank} refused the call: {text}")
        self.rank = rank
        self.text = text


class RanksDisagree(DispatchError):  # noqa: N818
    """Two ranks made different calls, or one call with different sizes: the group is out of step."""


class WireUnavailable(DispatchError):  # noqa: N818
    """The requested wire cannot work here. The message gives the reason and is the same on every rank."""
