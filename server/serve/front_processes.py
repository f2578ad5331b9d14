"""The fronts that a supervisor runs on its node: one, or several on one port (`--api-server-count`).

Of several fronts, the first one leads. The others start when it has bound its port. They inherit the socket of `--uds` from the
supervisor, because its path can be bound only once. A front that replaces a killed one gets the announced addresses and binds
the same ports. It is the waiting copy that the killed one has left (`spare`). The fronts of a standby (`--standby`) start like those of
the leading node, and wait until that node is lost. If every node has fronts (`--fronts per-node`), they wait until the engine next to
them has written where those of the other nodes are.
"""

import contextlib
import socket
import tempfile
from collections.abc import Mapping
from enum import Enum, auto
from pathlib import Path
from typing import Protocol

from server.front.several.front_map import FrontMap
from server.options.table import Options
from server.serve.child_messages import FrontAddresses, MessagePipe, announcement, http_url
from server.serve.children import (
    FRONT_VARIABLE,
    KEPT_VARIABLE,
    LISTENER_VARIABLE,
    NODE_FRONTS_VARIABLE,
    STANDBY_VARIABLE,
    Child,
)
from server.serve.preflight.unix_socket import listening_at
from server.serve.rank_processes import LAUNCHER_VARIABLE
from server.serve.spare import Spare


class FrontKind(Enum):
    """Which fronts run on this node."""

    ONLY = auto()  # all of the service
    STANDBY = auto()
    LEADING = auto()  # the leading one; other nodes have some, too
    FURTHER = auto()  # some of the service, without the leading one

    @property
    def has_other_nodes(self) -> bool:
        """Whether other nodes have fronts that serve at the same time."""
        return self in (FrontKind.LEADING, FrontKind.FURTHER)


class StartFront(Protocol):
    """Starts a front as a child of the supervisor: see `Supervisor._start_or_wake`."""

    def __call__(
        self,
        name: str,
        extra: Mapping[str, str],
        ready_fd: int,
        before: Spare | None,
        *,
        flags: tuple[str, ...],
        kept_fds: tuple[int, ...],
    ) -> tuple[Child, Spare | None]:
        """Start it with further variables, flags and descriptors, or as the spare of the one before."""


class FrontProcesses:
    """The running fronts and their addresses."""

    def __init__(
        self,
        options: Options,
        *,
        num_ranks: int,
        environment: Mapping[str, str],
        start: StartFront,
        kept: Path | None,
    ) -> None:
        """Begin without fronts.

        Args:
            kept: The folder that outlives a front; None for a temporary one.
        """
        self._num_fronts, self._uds, self._num_ranks = options.api_server_count, options.uds, num_ranks
        self._url = http_url(options, options.port)
        self._launcher_fd, self._start_child = environment.get(LAUNCHER_VARIABLE), start
        self.running: dict[int, Child] = {}  # by number
        self.spares: dict[int, Spare] = {}  # of these, and of those that are to be replaced
        self._are_prepared = False  # the spares
        self.announced = ""  # the addresses of all fronts, as JSON
        self._addresses: dict[int, FrontAddresses] = {}  # until all are bound
        self._host, self._kind = "", FrontKind.ONLY
        self._listener: socket.socket | None = None  # of several fronts on a Unix socket
        self._kept = kept
        self._closing = contextlib.ExitStack()

    def begin(self, host: str, kind: FrontKind, returning: FrontMap | None = None) -> list[int]:
        """Prepare to start fronts, and return the numbers of those to start now.

        Args:
            host: How other nodes reach them.
            kind: Which ones they are.
            returning: The map of the fronts that this node had before it was lost.

        Raises:
            OptionsError: The socket of --uds cannot be bound.
        """
        self._host, self._kind = host, kind
        if self._uds is not None and self._num_fronts > 1:
            self._listener = self._closing.enter_context(listening_at(self._uds))
        if returning is not None:
            returning.write(Path(self._kept_folder()))
            addresses = (returning.addresses[number] for number in returning.near)
            self.announced = announcement(
                [FrontAddresses(self._url, each, returning.token) for each in addresses]
            )
        # Addresses were announced by the fronts of a supervisor that was killed with them.
        return list(range(self._num_fronts if self.announced else 1))

    def start(self, number: int) -> tuple[Child, MessagePipe]:
        """Start a front. Returns it and the pipe on which it reports."""
        pipe, name = MessagePipe(), "the front"
        extra = {KEPT_VARIABLE: self._kept_folder(), **self._announcement()}
        flags = ["--ranks", str(self._num_ranks), "--ranks-host", self._host]
        if self._num_fronts > 1:
            name = f"front {number}"
            flags += ["--front-number", str(number)]
        flags += ["--stands-by"] if self._kind is FrontKind.STANDBY else []
        flags += ["--has-other-nodes"] if self._kind.has_other_nodes else []
        fds = []
        if self._listener is not None:
            extra[LISTENER_VARIABLE] = str(self._listener.fileno())
            fds.append(self._listener.fileno())
        if self._launcher_fd is not None:
            fds.append(int(self._launcher_fd))
        front, spare = self._start_child(
            name, extra, pipe.child_fd, self.spares.pop(number, None), flags=tuple(flags), kept_fds=tuple(fds)
        )
        pipe.close_child_end()
        self.running[number] = front
        if spare is not None:
            self.spares[number] = spare
            if self._are_prepared:
                spare.prepare()
        return front, pipe

    def prepare_spares(self) -> None:
        """Let the fronts' spares import their modules, now that nothing waits for the cores."""
        self._are_prepared = True
        for spare in self.spares.values():
            spare.prepare()

    def note_bound(self, number: int, addresses: FrontAddresses) -> list[int]:
        """Take the addresses of a front that has bound its sockets, and return the numbers of those to start now.

        `announced` is set when all have.
        """
        self._addresses[number] = addresses
        if len(self._addresses) == self._num_fronts:
            self.announced = announcement([self._addresses[each] for each in range(self._num_fronts)])
        return list(range(1, self._num_fronts)) if number == 0 else []

    def for_engine(self) -> dict[str, str]:
        """Return the variables for the engine on this node.

        That of the standby publishes the addresses, and gives its front those of the leading one. If every node has fronts, each
        engine next to some publishes theirs, and gives them all.
        """
        match self._kind:
            case FrontKind.ONLY:
                return self._announcement()
            case FrontKind.LEADING:
                return {**self._announcement(), KEPT_VARIABLE: self._kept_folder()}
            case FrontKind.STANDBY:
                return {STANDBY_VARIABLE: self.announced, KEPT_VARIABLE: self._kept_folder()}
            case FrontKind.FURTHER:
                return {NODE_FRONTS_VARIABLE: self.announced, KEPT_VARIABLE: self._kept_folder()}

    def close(self) -> None:
        """End the spares, and remove the socket and the temporary folder, after all fronts have ended."""
        for spare in self.spares.values():
            spare.close()
        self._closing.close()

    def _announcement(self) -> dict[str, str]:
        announced = self.announced
        if not announced and 0 in self._addresses:  # for the other fronts
            announced = announcement([self._addresses[0]])
        return {FRONT_VARIABLE: announced} if announced else {}

    def _kept_folder(self) -> str:
        if self._kept is None:
            self._kept = Path(self._closing.enter_context(tempfile.TemporaryDirectory(prefix="wideep_")))
        self._kept.mkdir(exist_ok=True)
        return str(self._kept)
