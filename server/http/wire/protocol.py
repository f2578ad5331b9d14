"""HTTP/1.1 with time limits: a request's head has HEAD_S and MAX_HEAD_BYTES.

uvicorn closes connections that are idle between requests, but its timer stops at the first byte: a client that sends one
character of a header every few seconds ("slowloris") can hold a connection forever. Here a timer runs from the start of a
connection, or from a later request's first byte, until the head is whole; more bytes do not reset it. The same timer
runs while a client keeps sending a body after its answer is out. `bodies` limits the reading of bodies, and asyncio
limits TLS handshakes. Rejected: a minimum rate in bytes per second, which detects no more here; h11 instead of httptools,
which takes 120 us of CPU per request and 3 us per piece of a stream, against 2 and 0.2 here (it limits the length of a
head itself).

A client that does not read keeps its answer in memory. When the transport's buffer is full, or a complete answer has not
been sent entirely, LEAST_READ bytes must leave within WRITE_S. Otherwise the connection is cut.

The parser declines every offer of another protocol, as RFC 9110 (7.8) allows. httptools treats a request with
`Connection: upgrade` as the last of its connection and skips its body. Java's own client offers h2c with every
request, so its bodies would be lost. Here, after such a head, the parser gets a second head that only describes the body,
and continues.
"""

import asyncio
import weakref
from array import array

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from server.front.errors import ApiError, bad_request
from server.http.json_writer import json_bytes
from server.http.wire.connections import ConnectionBound

HEAD_S = 30.0
MAX_HEAD_BYTES = 1 << 16  # the limit of h11 with uvicorn
WRITE_S = 60.0  # for a client to read LEAST_READ
LEAST_READ = 32 << 10  # bytes, or all that is left
_LAST_WORD_S = 0.1  # for a request that is arriving when the service ends
_REFUSAL = b"HTTP/1.1 %s\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_TOO_LATE = _REFUSAL % b"408 Request Timeout"
_TOO_LONG = _REFUSAL % b"431 Request Header Fields Too Large"
_ERROR = (
    b"HTTP/1.1 %b\r\ncontent-type: application/json\r\nconnection: close\r\n%bcontent-length: %d\r\n\r\n%b"
)
_FULL = json_bytes(
    ApiError(503, "All connections of this server are in use (--max-connections). Try again soon.").body()
)
_NO_PLACE = _ERROR % (b"503 Service Unavailable", b"retry-after: 1\r\n", len(_FULL), _FULL)
_NO_HTTP = json_bytes(
    bad_request(
        "This is not a valid HTTP/1.1 request: the method is unknown, or the head or body is malformed."
    ).body()
)
_UNREADABLE = _ERROR % (b"400 Bad Request", b"", len(_NO_HTTP), _NO_HTTP)


_FRAMING = (b"content-length", b"transfer-encoding")


class DecliningParser(httptools.HttpRequestParser):
    """A parser that declines offers of another protocol."""

    def __init__(self, protocol: HttpToolsProtocol) -> None:
        self._callbacks = _Callbacks(protocol)
        # For the connection's last request, after an offer.
        self._last: httptools.HttpRequestParser | None = None
        super().__init__(self._callbacks)
        # uvicorn's setting: answer the first of several pipelined requests even if it has `Connection: close`.
        self.set_dangerous_leniencies(lenient_data_after_close=True)

    def feed_data(self, data: "bytes | bytearray | memoryview | array[int]") -> None:
        """Parse bytes.

        Raises:
            httptools.HttpParserError: They are not HTTP.
        """
        rest = memoryview(data).cast("B")
        while True:
            try:
                self._feed(rest)
                return
            except httptools.HttpParserUpgrade as offer:
                rest = rest[offer.args[0] :]
            if not self._callbacks.is_kept_alive:  # llhttp skips everything after such a head
                self._last = httptools.HttpRequestParser(self._callbacks)
                self._last.set_dangerous_leniencies(lenient_data_after_close=True)
            self._callbacks.is_head_known = True
            self._feed(self._callbacks.framing_head())
            self._callbacks.is_head_known = False

    def should_upgrade(self) -> bool:
        """Return whether the current request makes an offer and its body has not been parsed yet."""
        return self._last is None and bool(super().should_upgrade())

    def _feed(self, data: bytes | memoryview) -> None:
        if self._last is None:
            super().feed_data(data)
        else:
            self._last.feed_data(data)


class _Callbacks:
    """The protocol's callbacks, except for the additional head that only the parser needs."""

    is_head_known = False
    is_kept_alive = True  # the connection, after the last request with a whole head

    def __init__(self, protocol: HttpToolsProtocol) -> None:
        self._protocol = protocol
        self._framing = b""
        self.on_body = protocol.on_body

    def framing_head(self) -> bytes:
        """Return a head that describes the body of the current request."""
        end = b"" if self.is_kept_alive else b"connection: close\r\n"
        return b"POST / HTTP/1.1\r\n%b%b\r\n" % (self._framing, end)

    def on_message_begin(self) -> None:
        if not self.is_head_known:
            self._framing = b""
            self._protocol.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self.is_head_known:
            self._protocol.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.is_head_known:
            return
        if name.lower() in _FRAMING:
            self._framing += b"%b: %b\r\n" % (name, value)
        self._protocol.on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self.is_head_known:
            self.is_kept_alive = self._protocol.parser.should_keep_alive()
            self._protocol.on_headers_complete()

    def on_message_complete(self) -> None:
        """Pass on the end of the request, unless its body is still to be parsed."""
        if not self._protocol.parser.should_upgrade():
            self._protocol.on_message_complete()


DIRECT_BODY = "wideep.direct_body"  # name of this server's extension of ASGI, in the scope of each request


class DirectBody:
    """Writes the parts of a streamed response's body at once, without a task.

    The response begins and ends with ASGI's `send`, which also writes whenever this is not free. A layer that replaces `send` to
    change or keep bodies must remove the extension from the scope.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = weakref.ref(cycle)  # which holds the scope, and thus this
        self._flow, self._transport = cycle.flow, cycle.transport

    def is_free(self) -> bool:
        """Return whether a part may be written now: the response has begun, and the client is there and reads fast enough."""
        cycle = self._cycle()
        if cycle is None or self._flow.write_paused or cycle.disconnected:
            return False
        return cycle.chunked_encoding is True and not cycle.response_complete

    def write(self, part: bytes) -> None:
        """Write a part, which is not empty, as one chunk."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(part), part))


class PunctualProtocol(HttpToolsProtocol):
    """uvicorn's protocol with time limits."""

    head_s, write_s = HEAD_S, WRITE_S
    bound: ConnectionBound | None = None  # for all connections
    _late: asyncio.TimerHandle | None = None  # class attributes, because uvicorn calls __init__
    _is_in_head = False  # a request has begun, but its head is not whole
    _is_in_body = False  # its head is whole, but the rest is not
    _head_bytes = 0  # of that head, in earlier reads
    _read_bytes = 0  # in this read
    _has_ended_one = False  # a request ended in this read, so a new head began within it
    _is_too_long = False  # a whole head, which stopped the parser
    _is_ending = False  # the service; the next answer is the last
    _unread: asyncio.TimerHandle | None = None  # set while the client should read
    _unread_bytes = 0  # at the start of that timer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Register the connection and wait for a head."""
        super().connection_made(transport)
        self.parser = DecliningParser(self)
        if self.bound is not None and not self.bound.enter(self, self.client[0] if self.client else None):
            self._refuse(_NO_PLACE)
            return
        self._expect()

    def data_received(self, data: bytes) -> None:
        """Parse bytes. The timer continues unless they complete the head."""
        self._read_bytes, self._has_ended_one = len(data), False
        super().data_received(data)
        if not self._is_in_head:
            self._head_bytes = 0
        else:
            self._head_bytes = self._measure_head() if self._has_ended_one else self._head_bytes + len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(_TOO_LONG)
        elif self._is_answered:
            self._expect()
        else:
            self._rest()

    def send_400_response(self, msg: str) -> None:
        """Answer input that the parser rejects in the shape of all other errors; uvicorn's answer is plain text."""
        self._refuse(_TOO_LONG if self._is_too_long else _UNREADABLE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True

    def on_headers_complete(self) -> None:
        may_be_too_long = self._head_bytes + self._read_bytes > MAX_HEAD_BYTES
        if may_be_too_long and self._measure_head() > MAX_HEAD_BYTES:
            self._is_too_long = True
            raise ValueError("the head is too long")  # which stops the parser
        super().on_headers_complete()  # raises for an invalid target, such as CONNECT's
        self.scope["extensions"] = {DIRECT_BODY: DirectBody(self.cycle)}  # type: ignore[dict-item]
        self._is_in_head, self._is_in_body = False, True
        if not self.flow.write_paused:  # the next writes would distort the measure of what was read
            self._stop_watching()
        if self.bound is not None:
            self.bound.work(self)
        if self._is_ending:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        self._is_in_body, self._has_ended_one = False, True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Record the end of the answer. The rest of its request, or the start of the next, has a time limit as well."""
        super().on_response_complete()
        if self._is_answered:
            self._watch_reading()
            if self.bound is not None:
                self.bound.rest(self)
        if self._is_answered and (self._is_in_head or self._is_in_body):
            self._expect()
        else:
            self._rest()  # a request is being answered, or uvicorn's own timer runs

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers and release the connection's place."""
        self._rest()
        self._stop_watching()
        if self.bound is not None:
            self.bound.leave(self)
        super().connection_lost(exc)

    def make_room(self) -> None:
        """Close an idle connection, because others need its place."""
        self._rest()
        if not self.transport.is_closing():
            self.transport.close()

    def shutdown(self) -> None:
        """End after the current answer. A request that is arriving still gets an answer, which states that the service ends."""
        self._is_ending = True
        if self._is_answered:
            self.loop.call_later(_LAST_WORD_S, self._end_if_idle)
        else:
            super().shutdown()

    def _end_if_idle(self) -> None:
        if self._is_answered and not self.transport.is_closing():
            self.transport.close()

    def pause_writing(self) -> None:
        """Note that the client reads more slowly than the answer is written."""
        super().pause_writing()
        self._watch_reading()

    def resume_writing(self) -> None:
        """Note that the client has caught up."""
        super().resume_writing()
        self._stop_watching()

    def _watch_reading(self) -> None:
        """Check later whether the client has read. Nothing is written until it has."""
        self._unread_bytes = self.transport.get_write_buffer_size()
        if self._unread is None and self._unread_bytes:
            self._unread = self.loop.call_later(self.write_s, self._look_at_reading)

    def _stop_watching(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _look_at_reading(self) -> None:
        self._unread = None
        num_read = self._unread_bytes - self.transport.get_write_buffer_size()
        if num_read < min(LEAST_READ, self._unread_bytes):
            self.transport.abort()
        else:
            self._watch_reading()

    @property
    def _is_answered(self) -> bool:
        """Whether no request is open: new bytes are a head, or the rest of a body that is not read."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def _is_first_word_ours(self) -> bool:
        """Whether the client reads our next bytes as the answer to the input that stopped the parser."""
        if self._is_in_body:  # its application runs, and may have answered
            return not (self.pipeline or self.cycle.response_started)
        return self._is_answered

    def _measure_head(self) -> int:
        """Return the number of bytes of the head that were parsed."""
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def _expect(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(self.head_s, self._give_up)

    def _rest(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _give_up(self) -> None:
        self._refuse(_TOO_LATE)

    def _refuse(self, answer: bytes) -> None:
        """Close the connection. Send `answer` first unless it would be taken as part of another answer."""
        if self.transport.is_closing():
            return
        if self._is_first_word_ours:
            self.transport.write(answer)
            if self.cycle is not None:
                self.cycle.disconnected = True  # so that its application writes nothing after this
        self.transport.close()
