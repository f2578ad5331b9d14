"""How long exchanges take, and how much of that wires take.

A rank cannot tell waiting for a late peer from waiting for a wire. But of many exchanges in a row it is last itself in
some, and those last as long as the wires need: so BLOCK times the shortest of BLOCK is no more than the wires took in
them. A rank that is always waited for finds it exactly; one that is never last finds too much, so the least of all
ranks' figures is the one to believe. Rejected: time stamps in messages, which need equal clocks on all hosts.
"""

BLOCK = 64  # exchanges, a few steps of most models
_NEVER = 1 << 62


class ExchangeClock:
    """Counters of one kind of exchange, in nanoseconds.

    Attributes:
        total_ns: in exchanges.
        wire_ns: of it, at least so much for wires; whole blocks only.
    """

    __slots__ = ("_left", "_shortest_ns", "total_ns", "wire_ns")

    def __init__(self) -> None:
        self.total_ns = self.wire_ns = 0
        self._shortest_ns, self._left = _NEVER, BLOCK

    def add(self, taken_ns: int) -> None:
        """Count one exchange."""
        self.total_ns += taken_ns
        if taken_ns < self._shortest_ns:
            self._shortest_ns = taken_ns
        self._left -= 1
        if not self._left:
            self.wire_ns += BLOCK * self._shortest_ns
            self._shortest_ns, self._left = _NEVER, BLOCK
