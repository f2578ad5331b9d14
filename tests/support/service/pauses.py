"""Measure pauses of streams: eight streams are read, and the longest time between two pieces of each is kept."""

import json
import selectors
import socket
import threading
import time
from typing import Self

NUM_STREAMS = 8
_TOKENS = 3900
_TIMEOUT_S = 60.0


class Pauses:
    """A context in which a thread reads streams. Afterwards, `longest_s` is their longest pause."""

    def __init__(self, address: tuple[str, int], *, num_streams: int = NUM_STREAMS) -> None:
        self._address, self._num_streams = address, num_streams
        self._ended = threading.Event()
        self._all_begun = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self.longest_s = 0.0
        self.num_bytes = 0

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._all_begun.wait(_TIMEOUT_S), "the streams did not start"
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(_TIMEOUT_S)
        assert not self._thread.is_alive(), "the streams did not end"

    def _begin(self, number: int) -> socket.socket:
        stream = socket.create_connection(self._address, _TIMEOUT_S)
        fields = {"prompt": f"stream {number}", "stream": True, "max_tokens": _TOKENS, "ignore_eos": True}
        body = json.dumps(fields).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        stream.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        return stream

    def _read(self) -> None:
        with selectors.DefaultSelector() as selector:
            last_s: dict[socket.socket, float] = {}
            for number in range(self._num_streams):
                selector.register(self._begin(number), selectors.EVENT_READ)
            while not self._ended.is_set():
                for key, _ in selector.select(0.05):
                    stream = key.fileobj
                    assert isinstance(stream, socket.socket), "only sockets were registered"
                    piece = stream.recv(1 << 16)
                    assert piece, "a stream ended early"
                    self.num_bytes += len(piece)
                    now_s = time.monotonic()
                    if self._all_begun.is_set():
                        self.longest_s = max(self.longest_s, now_s - last_s[stream])
                    last_s[stream] = now_s
                if len(last_s) == self._num_streams and not self._all_begun.is_set():
                    self._all_begun.set()
            now_s = time.monotonic()
            self.longest_s = max(self.longest_s, *(now_s - each for each in last_s.values()))
            for key in list(selector.get_map().values()):
                assert isinstance(key.fileobj, socket.socket), "only sockets were registered"
                key.fileobj.close()
