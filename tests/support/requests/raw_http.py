"""HTTP that sends bytes unchanged over kept connections with a timeout, unlike client libraries, which correct requests."""

import http.client
import socket
import threading
from typing import NamedTuple

from tests.support.requests.mutations import RawRequest

BUFFER = 1 << 16


class RawAnswer(NamedTuple):
    """An answer. Status 0 means that the server hung up without one."""

    status: int
    content_type: str
    body: bytes


class RawClient:
    """Holds one connection at a time to one server. Not thread-safe."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        host, _, port = url.removeprefix("http://").rpartition(":")
        self._address, self._timeout_s = (host, int(port)), timeout_s
        self._socket: socket.socket | None = None

    def send(self, request: RawRequest) -> RawAnswer:
        """Send a request and read its answer.

        Raises:
            TimeoutError: The server neither answered nor hung up.
        """
        kept = self._socket is not None
        answer = self._exchange(request)
        # The previous, broken exchange may have closed a kept connection. Retry on a new one.
        return self._exchange(request) if answer.status == 0 and kept else answer

    def _exchange(self, request: RawRequest) -> RawAnswer:
        if self._socket is None:
            self._socket = socket.create_connection(self._address, self._timeout_s)
        connection = self._socket
        try:
            # Write in a thread: a server may answer and stop reading before it has read everything.
            writer = threading.Thread(target=_write, args=(connection, request), daemon=True)
            if len(request.body) > BUFFER:
                writer.start()
            else:
                _write(connection, request)
            response = http.client.HTTPResponse(connection, method=request.method)
            response.begin()
            body = response.read()
            answer = RawAnswer(response.status, response.headers.get("content-type", ""), body)
            if response.will_close:
                self.close()
        except (http.client.HTTPException, ConnectionError):
            self.close()
            return RawAnswer(0, "", b"")
        return answer

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _write(connection: socket.socket, request: RawRequest) -> None:
    try:
        connection.sendall(request.bytes())
    except OSError:
        return  # the answer, or its absence, shows the reason
