"""HTTP/1.1 for clients that may take their time, but not for ever: a request's head has HEAD_S to arrive.

uvicorn closes connections that are idle between requests, but its timer stops at the first byte: a client that sends a
header's letter every few seconds ("slowloris") holds a connection for as long as it likes. Here a timer runs from a
connection's beginning, or from a later request's first byte, until the head is whole; more bytes do not reset it. The
same timer runs while a client goes on sending a body whose answer is already out. Bodies that are read have limits of
their own (`request_body`), TLS handshakes asyncio's. Rejected: a count of bytes per second, which says no more here.
"""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 30.0
_TOO_LATE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class PunctualProtocol(H11Protocol):
    """uvicorn's protocol, with an end to waiting."""

    head_s = HEAD_S
    _late: asyncio.TimerHandle | None = None  # uvicorn calls __init__ with what it likes

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Expect a head."""
        super().connection_made(transport)
        self._expect()

    def data_received(self, data: bytes) -> None:
        """Take bytes; the timer goes on unless they made the head whole."""
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        """Note that the answer is out: what still comes of its request has a limit as well."""
        super().on_response_complete()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timer."""
        self._rest()
        super().connection_lost(exc)

    def _look(self) -> None:
        state, is_answered = self.conn.their_state, self.cycle is not None and self.cycle.response_complete
        has_part_of_head = state is h11.IDLE and bool(self.conn.trailing_data[0])
        if has_part_of_head or (state is h11.SEND_BODY and is_answered):
            self._expect()
        else:
            self._rest()  # a request is being answered, or uvicorn's own timer runs

    def _expect(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(self.head_s, self._give_up)

    def _rest(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _give_up(self) -> None:
        if self.transport.is_closing():
            return
        if self.conn.their_state is h11.IDLE:
            self.transport.write(_TOO_LATE)
        self.transport.close()
