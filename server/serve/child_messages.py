"""The pipe on which a child reports to its supervisor: one JSON object per line."""

import json
import os
import select
from collections.abc import Mapping
from typing import Any

from server.serve.children import READY_VARIABLE


class MessagePipe:
    """The reading end of a pipe on which a child reports one JSON object per line."""

    def __init__(self) -> None:
        self.fd, self.child_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.fd, False)
        self._partial = b""
        self.at_end = False

    def close_child_end(self) -> None:
        """Close our copy of the writing end, so that the pipe ends when the child does."""
        os.close(self.child_fd)

    def close(self) -> None:
        """Close the reading end."""
        os.close(self.fd)

    def read(self) -> list[dict[str, Any]]:
        """Return the complete messages that have arrived.

        Raises:
            ValueError: A line is not a JSON object.
        """
        try:
            received = os.read(self.fd, 65536)
        except BlockingIOError:
            return []
        self.at_end = not received
        *lines, self._partial = (self._partial + received).split(b"\n")
        messages = [json.loads(line) for line in lines]
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError(f"not JSON objects: {lines!r}")
        return messages


class SupervisorPipe:
    """The pipe on which this process reports its progress to the supervisor."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._fd = int(environment[READY_VARIABLE]) if READY_VARIABLE in environment else None

    def tell(self, **message: Any) -> None:
        """Write one JSON line."""
        if self._fd is not None:
            os.write(self._fd, (json.dumps(message) + "\n").encode())

    def tell_if_read(self, **message: Any) -> None:
        """Write one JSON line, or drop it if the pipe is full because the supervisor has not read for minutes."""
        if self._fd is not None and select.select([], [self._fd], [], 0)[1]:
            self.tell(**message)
