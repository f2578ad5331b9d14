"""httptools' parser for a server that declines every offer of another protocol, as RFC 9110 (7.8) lets it.

httptools takes a request with `Connection: upgrade` for the last of its connection and passes over its body. Java's
own client offers h2c with every request, so its bodies would be lost. Here the parser is told, after such a head, what
that head says of the body and nothing else, and goes on.
"""

from array import array

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_FRAMING = (b"content-length", b"transfer-encoding")


class DecliningParser(httptools.HttpRequestParser):
    """Tells a protocol what has come, offers passed over."""

    def __init__(self, protocol: HttpToolsProtocol) -> None:
        self._callbacks = _Callbacks(protocol)
        super().__init__(self._callbacks)
        # uvicorn's setting: the first of several requests in one go is answered, even if it says that it is the last.
        self.set_dangerous_leniencies(lenient_data_after_close=True)

    def feed_data(self, data: "bytes | bytearray | memoryview | array[int]") -> None:
        """Take bytes.

        Raises:
            httptools.HttpParserError: they are no HTTP.
        """
        rest = memoryview(data).cast("B")
        while True:
            try:
                super().feed_data(rest)
                return
            except httptools.HttpParserUpgrade as offer:
                rest = rest[offer.args[0] :]
            self._callbacks.is_head_known = True
            super().feed_data(self._callbacks.framing_head())
            self._callbacks.is_head_known = False


class _Callbacks:
    """The protocol's, but for a head that only the parser has to be told."""

    is_head_known = False

    def __init__(self, protocol: HttpToolsProtocol) -> None:
        self._protocol = protocol
        self._framing = b""
        self.on_body = protocol.on_body

    def framing_head(self) -> bytes:
        """Return a head with the body of the request whose head has just come."""
        return b"POST / HTTP/1.1\r\n%b\r\n" % self._framing

    def on_message_begin(self) -> None:
        """A request begins."""
        if not self.is_head_known:
            self._framing = b""
            self._protocol.on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A part of its URL."""
        if not self.is_head_known:
            self._protocol.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header."""
        if self.is_head_known:
            return
        if name.lower() in _FRAMING:
            self._framing += b"%b: %b\r\n" % (name, value)
        self._protocol.on_header(name, value)

    def on_headers_complete(self) -> None:
        """Its head is whole."""
        if not self.is_head_known:
            self._protocol.on_headers_complete()

    def on_message_complete(self) -> None:
        """It is whole, unless its body is still to be asked for."""
        if not self._protocol.parser.should_upgrade():
            self._protocol.on_message_complete()
