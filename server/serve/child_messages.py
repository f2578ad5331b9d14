"""The messages between a supervisor and its children, and the state that a supervisor leaves to its replacement.

A child reports on the pipe of WIDEEP_READY_FD, one message per line, as a JSON object with the message's fields. The front writes
`FrontAddresses`. An engine writes `ServiceUrl`; `CacheBytes`; `Ready` when it serves; then `Beat` several times a second until `Leaving`.
If the beats stop earlier, the engine hangs (`watchdog`): it is killed and restarted.

In the other direction a child gets its command line and variables: WIDEEP_FRONT has the front's addresses, for an engine and for
a replacement front. WIDEEP_KEPT names a folder that outlives a front (answers kept for retries, files). A restarted engine gets
WIDEEP_RESTARTS, the number of restarts, and WIDEEP_RESTARTABLE_IN_S, the time until the next one is allowed.

To add a message: define its class here and list it in `FromChild`; send it with `SupervisorPipe.send`; and add its `case` to
`Supervisor._on_message`. mypy reports a missing `case`. A message is recognised by the names of its fields, so no two have the same ones.
"""

import json
import os
import select
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self, TypeVar, get_args

from server.machine.whole_files import replace_text
from server.options.table import Options
from server.serve.children import READY_VARIABLE


class FrontAddresses(NamedTuple):
    """The front has bound its sockets."""

    http: str  # URL
    ranks_address: str  # host:port
    token: str  # ranks attach with it


def http_url(options: Options, port: int) -> str:
    """Return the URL of fronts that listen on a port, or on the socket of --uds."""
    if options.uds is not None:
        return f"unix:{options.uds}"
    shown = f"[{options.host}]" if ":" in options.host else options.host
    return f"{options.http.scheme}://{shown}:{port}"


# In WIDEEP_FRONT, next to the fields of the leading front: the ranks' addresses of the other fronts, and the number of fronts of each
# node, if other nodes have some.
_OTHERS, _NUM_PER_NODE = "others", "num_per_node"


def announcement(fronts: Sequence[FrontAddresses]) -> str:
    """Return the value of WIDEEP_FRONT for the fronts of a service, the leading one first."""
    leading, *others = fronts
    more = {_OTHERS: " ".join(each.ranks_address for each in others)} if others else {}
    return json.dumps(leading._asdict() | more)


def ranks_addresses(announced: Mapping[str, str]) -> list[str]:
    """Return each front's address for ranks, the leading one's first."""
    return [announced["ranks_address"], *announced.get(_OTHERS, "").split()]


def joined_announcement(nodes: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the announcement of the fronts of several nodes, those of the leading node first. All use its token."""
    addresses = [ranks_addresses(each) for each in nodes]
    _, *others = [address for node in addresses for address in node]
    return {**nodes[0], _OTHERS: " ".join(others), _NUM_PER_NODE: str(len(addresses[0]))}


def num_per_node(announced: Mapping[str, str]) -> int | None:
    """Return the number of fronts of each node. Returns None if one node has all fronts."""
    return int(announced[_NUM_PER_NODE]) if _NUM_PER_NODE in announced else None


class ServiceUrl(NamedTuple):
    """The service's URL as seen from the engine's node."""

    http: str


class CacheBytes(NamedTuple):
    """The size of the engine's KV cache. Its successors get the same size, although less memory may be free."""

    kv_cache_bytes: int


class Ready(NamedTuple):
    """The engine serves."""

    ready: bool = True


class Beat(NamedTuple):
    """The engine lives."""

    beat: int  # the number of its step


class Leaving(NamedTuple):
    """The engine ends and sends no more beats."""

    leaving: bool = True


FromChild = FrontAddresses | ServiceUrl | CacheBytes | Ready | Beat | Leaving
MessageT = TypeVar("MessageT")
_CLASSES: dict[tuple[str, ...], type[FromChild]] = {each._fields: each for each in get_args(FromChild)}


def encode(message: NamedTuple) -> str:
    """Return a message as JSON."""
    return json.dumps(message._asdict())


def decode(text: bytes | str) -> FromChild:
    """Return the message in a JSON text.

    Raises:
        ValueError: The text is not a message.
    """
    return decode_as(_CLASSES, text)


def decode_as(kinds: Mapping[tuple[str, ...], type[MessageT]], text: bytes | str) -> MessageT:
    """Return the message in a JSON text. `kinds` has the possible ones by the names of their fields.

    Raises:
        ValueError: The text is not a message.
    """
    fields = json.loads(text)
    kind = kinds.get(tuple(fields)) if isinstance(fields, dict) else None
    if kind is None or any(type(fields[name]) is not of for name, of in kind.__annotations__.items()):
        raise ValueError(f"not a message: {text!r}")
    return kind(**fields)


class SupervisorState(NamedTuple):
    """The state of a supervisor that has served. A replacement reads it from the file WIDEEP_SUPERVISOR_STATE."""

    port: int
    kv_cache_bytes: int | None
    announced: str  # the front's addresses, as in WIDEEP_FRONT; empty on a node without the front
    num_restarts: int

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the state of the previous supervisor."""
        return cls(**json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        """Write the state."""
        replace_text(path, json.dumps(self._asdict()))


class MessagePipe:
    """The reading end of a pipe on which a child reports one message per line."""

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

    def read(self) -> list[FromChild]:
        """Return the complete messages that have arrived.

        Raises:
            ValueError: A line is not a message.
        """
        try:
            received = os.read(self.fd, 65536)
        except BlockingIOError:
            return []
        self.at_end = not received
        *lines, self._partial = (self._partial + received).split(b"\n")
        return [decode(line) for line in lines]


class SupervisorPipe:
    """The pipe on which this process reports its progress to the supervisor."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._fd = int(environment[READY_VARIABLE]) if READY_VARIABLE in environment else None

    def send(self, message: FromChild) -> None:
        """Write one message."""
        if self._fd is not None:
            os.write(self._fd, (encode(message) + "\n").encode())

    def send_if_read(self, message: FromChild) -> None:
        """Write one message, or drop it if the pipe is full because the supervisor has not read for minutes."""
        if self._fd is not None and select.select([], [self._fd], [], 0)[1]:
            self.send(message)
