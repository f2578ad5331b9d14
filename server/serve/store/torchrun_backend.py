"""torchrun's rendezvous backend `wideep`: c10d's own handler over a state into which no stranger can inject code.

torchrun starts workers once all nodes have joined. Until then, none of our processes runs, and `--rdzv-backend c10d` waits
silently for ten minutes, or fails after one minute if the endpoint's node is missing. This backend uses c10d's handler and
store. Before the handler starts, a node waits for the endpoint for the full join timeout and reports connection problems.
While the handler runs, a thread reads from its state in the store which nodes have joined. torchrun finds the backend by the entry point
`torchrun.handlers` of our distribution (torch.distributed.elastic.rendezvous.registry), through `wideep`.

It differs from c10d's own backend in three more points:

- The state in the store is a pickle, and everyone who can reach the store's port can write to it: what c10d unpickles runs
  as torchrun's user. Here the handler only gets verified bytes. With a cluster key, the state carries an
  HMAC. In any case, it must be a pickle of the state's own classes only. Anything else is ignored and replaced by
  the next write. If the foreign writes continue, the start fails with an error that names the cause.
- With `--standby`, the standby's node hosts a second store. If the first one is lost while workers run, the state continues there:
  an agent that lost its rendezvous would end its workers.
- c10d compares the endpoint with the host name to find the node that hosts the store. This fails if the host name
  resolves to loopback (Debian's default). Here, the node that can bind the endpoint's address hosts it (as in the doctor).

Rejected: an encoding other than pickle (the handler itself pickles, and its classes are private).
"""

import atexit
import contextlib
import copy
import hmac
import io
import pickle
import sys
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousParameters,
    RendezvousStateError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token, create_handler

from scheduler.epochs.connections import LEAST_TIMEOUT_S, break_silent
from scheduler.epochs.heartbeat import LOOK_EVERY_S
from server.link.seal import MAC_BYTES, SAME_KEY, mac
from server.machine.interfaces import has_endpoint
from server.machine.lines import say
from server.options.checks import read_cluster_key
from server.options.flag import OptionsError
from server.options.reading import said_in_file
from server.options.table import standby_address
from server.serve.store.meeting import SAY_AFTER_S, Endpoint, MeetingError, connect, who_is_here
from server.serve.store.moving_store import connect as connect_to_store
from server.serve.store.rendezvous import endpoint_of, option_value

JOIN_S = 600  # c10d's default join_timeout
# Number of foreign values, instead of states, that are tolerated; nodes with different keys write one per second.
MOST_FOREIGN = 20
_LOOK_S = 0.5
_END_S = 2.0  # for a look at the store
_NOTHING = b"Y2FuaW1hZGFt"  # c10d's value for a missing state
# The handler's own classes and those of their fields. Containers and numbers need no class.
_STATE = ("torch.distributed.elastic.rendezvous.dynamic_rendezvous", "_RendezvousState")
_MAY_NAME = (
    _STATE,
    (_STATE[0], "_NodeDesc"),
    *(("datetime", name) for name in ("datetime", "timedelta", "timezone")),
)


class ForeignStateError(ValueError):
    """Bytes that are not a state of the handler, or that were written without the cluster key."""


class _StateReader(pickle.Unpickler):
    """Reads a state, and rejects every class that does not belong to it."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _MAY_NAME:
            raise ForeignStateError(f"it names {module}.{name}")
        return super().find_class(module, name)


def read_state(pickled: bytes) -> Any:
    """Return the handler's state.

    Raises:
        ForeignStateError: The bytes are something else. No class named in them was imported.
    """
    try:
        state = _StateReader(io.BytesIO(pickled)).load()
    except ForeignStateError:
        raise
    except Exception as error:  # foreign bytes may raise any error
        raise ForeignStateError(f"it is not a pickled state ({type(error).__name__})") from error
    if type(state).__name__ != _STATE[1]:
        raise ForeignStateError(f"it is a {type(state).__name__}")
    return state


class StateBackend(RendezvousBackend):
    """c10d's state in the store, restricted to verified states.

    If a foreign value replaces the state, the handler sees the newest verified state, and its next write replaces the
    value. Names and encoding are c10d's, so without a key, nodes with `--rdzv-backend c10d` can join the others.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        key: bytes | None,
        *,
        tells: bool = True,
        open_standby: Callable[[], Store] | None = None,
    ) -> None:
        """Sign states with the cluster key `key`, unless it is None.

        Args:
            tells: Whether to log ignored values.
            open_standby: Connects to the standby's store, if there is one.
        """
        self._open_standby = open_standby
        self._store, self._name, self._key, self._tells = store, f"torch.rendezvous.{run_id}", key, tells
        self._verified: bytes | None = None  # the newest verified state
        self._foreign = _NOTHING  # the foreign value in place of the state
        self._num_foreign = 0
        self._is_complete = False  # whether all nodes had joined, according to the newest verified state
        self._call("compare_set", self._name, b"", _NOTHING)

    @property
    def name(self) -> str:
        return "wideep"

    def get_state(self) -> tuple[bytes, Token] | None:
        return self._verified_of(self._call("get", self._name))

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        written = b64encode(self._signature(state) + state)
        found = self._call("compare_set", self._name, token or self._foreign, written)
        known = self._verified_of(found)
        return known and (*known, found == written)

    def _verified_of(self, found: bytes) -> tuple[bytes, Token] | None:
        """Return a value's state (or the newest verified one) and the value itself, or None if there is no state yet."""
        if found == _NOTHING:
            self._foreign = found
            return None
        try:
            self._verified = self._open(found)
        except ForeignStateError as error:
            self._ignore(found, error)
            if self._verified is None:
                return None
        return self._verified, found

    def _open(self, found: bytes) -> bytes:
        try:
            content = b64decode(found, validate=True)
        except ValueError as error:
            raise ForeignStateError("it is not base64") from error
        if self._key is not None:
            signature, content = content[:MAC_BYTES], content[MAC_BYTES:]
            if not hmac.compare_digest(signature, self._signature(content)):
                raise ForeignStateError("it is not signed with this cluster key")
        self._is_complete = read_state(content).complete
        return content

    def _signature(self, state: bytes) -> bytes:
        return b"" if self._key is None else mac(self._key, b"rendezvous", self._name.encode(), state)

    def _ignore(self, found: bytes, why: ForeignStateError) -> None:
        if found == self._foreign:
            return
        self._foreign = found
        self._num_foreign += 1
        text = (
            f"the rendezvous state in the store is not valid ({why}): a node has another cluster key or none, or a stranger "
            f"writes to the endpoint's port; {SAME_KEY}, and keep strangers out of this network"
        )
        if self._num_foreign >= MOST_FOREIGN and not self._is_complete:  # a running service continues
            raise RendezvousStateError(text) from why
        if self._tells and self._num_foreign == 1:
            _say(f"{text}. It is ignored")

    def _call(self, operation: str, *words: str | bytes) -> bytes:
        try:
            found: bytes = getattr(self._store, operation)(*words)
        except (ValueError, RuntimeError, TimeoutError) as error:
            if self._move():
                return self._call(operation, *words)
            raise RendezvousConnectionError(f"the endpoint's store does not answer: {error}") from error
        return found

    def _move(self) -> bool:
        """Continue in the standby's store, if all nodes have met. Returns whether that works."""
        state = self._verified
        if self._open_standby is None or state is None or not self._is_complete:
            return False
        try:
            store = self._open_standby()
            store.compare_set(self._name, "", b64encode(self._signature(state) + state).decode())
        except (ValueError, RuntimeError, TimeoutError) as error:
            _say(f"the endpoint's store is lost, and the standby's does not answer: {error}")
            return False
        self._store, self._open_standby = store, None
        return True


def create(params: RendezvousParameters) -> RendezvousHandler:
    """Return c10d's handler once the endpoint can be reached.

    Raises:
        RendezvousConnectionError: The endpoint was unreachable for --rdzv-conf's join_timeout.
        RendezvousError: The cluster key cannot be read.
    """
    key = cluster_key_of(params, sys.argv)
    has_others = params.min_nodes > 1
    is_host = _is_host(params)
    standby = _standby_of(params, sys.argv, is_host=is_host) if has_others else None
    if has_others and not is_host:
        _await_endpoint(params)
    store = _open_store(params, is_host=is_host)
    if has_others:
        own = store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        watched = StateBackend(own, params.run_id, key, tells=False)
        naming = NodeNaming(watched, params.min_nodes)
        naming.start()
        atexit.register(naming.end)
    open_standby = None
    if standby is not None:
        hosted = _host_standby(standby) if has_endpoint(standby.host) else None
        open_standby = lambda: hosted or connect_to_store(standby)  # noqa: E731
        threading.Thread(target=_break_silent, daemon=True).start()
    return create_handler(store, StateBackend(store, params.run_id, key, open_standby=open_standby), params)


def _standby_of(params: RendezvousParameters, command: Sequence[str], *, is_host: bool) -> Endpoint | None:
    """Return the address of the workers' --standby.

    Raises:
        RendezvousError: It is the endpoint's node, or cannot be read.
    """
    text = _of_worker(command, "standby")
    if text is None:
        return None
    try:
        standby = Endpoint.parse(standby_address("--standby", text))
    except OptionsError as error:
        raise RendezvousError(str(error)) from error
    if is_host and has_endpoint(standby.host):
        raise RendezvousError(
            f"--standby is {text}, which is an address of the node of --rdzv-endpoint; name another node of the service"
        )
    return standby


def _host_standby(standby: Endpoint) -> Store:
    """Host the second store.

    Raises:
        RendezvousConnectionError: The port is in use.
    """
    try:
        return TCPStore("localhost", standby.port, is_master=True, wait_for_workers=False)
    except (ValueError, RuntimeError, TimeoutError) as error:
        raise RendezvousConnectionError(
            f"cannot host the standby's store at port {standby.port}: {error}; give another port in --standby"
        ) from error


def _break_silent() -> None:
    """Break connections to a store on a silent node, so that this agent does not wait for it forever."""
    while True:
        time.sleep(LOOK_EVERY_S)
        with contextlib.suppress(OSError):  # no descriptor is free for listing connections
            break_silent(LEAST_TIMEOUT_S)


def cluster_key_of(params: RendezvousParameters, command: Sequence[str]) -> bytes | None:
    """Return the cluster key of the workers that this torchrun starts, or None if they have none.

    In order of precedence: --rdzv-conf cluster_key_file=FILE; the worker's --cluster-key-file, which is part of
    torchrun's command line; the worker's --config.

    Raises:
        RendezvousError: The file cannot be used.
    """
    path = params.get("cluster_key_file") or _of_worker(command, "cluster-key-file")
    try:
        return read_cluster_key(Path(path)) if path else None
    except OptionsError as error:
        raise RendezvousError(str(error)) from error


def _of_worker(command: Sequence[str], option: str) -> str | None:
    """Return the value of an option of the workers, from torchrun's command line or the workers' --config.

    Raises:
        RendezvousError: The file cannot be used.
    """
    if found := option_value(command, option):
        return found
    worker = list(command[command.index("worker") :]) if "worker" in command else []
    config = option_value(worker, "config")
    try:
        said = said_in_file(Path(config)).get(option.replace("-", "_")) if config else None
    except OptionsError as error:
        raise RendezvousError(str(error)) from error
    return None if said is None else str(said)


def _is_host(params: RendezvousParameters) -> bool:
    """Return whether this node hosts the store."""
    said = params.get_as_bool("is_host")
    return has_endpoint(endpoint_of(params.endpoint).host) if said is None else said


def _open_store(params: RendezvousParameters, *, is_host: bool) -> Store:
    """Open c10d's store. Host it if this node has the endpoint and no other local torchrun hosts it already."""
    try:
        return create_backend(_with_host(params, is_host))[1]
    except RendezvousConnectionError:
        if not is_host or params.get_as_bool("is_host") is not None:
            raise
        return create_backend(_with_host(params, False))[1]


def _with_host(params: RendezvousParameters, is_host: bool) -> RendezvousParameters:
    changed = copy.copy(params)
    changed.config = {**params.config, "is_host": str(int(is_host))}
    return changed


def _await_endpoint(params: RendezvousParameters) -> None:
    timeout_s = params.get_as_int("join_timeout", JOIN_S) or JOIN_S
    try:
        connect(endpoint_of(params.endpoint), time.monotonic() + timeout_s, _say).close()
    except MeetingError as error:
        raise RendezvousConnectionError(str(error)) from error


class NodeNaming(threading.Thread):
    """Logs which nodes have joined, and every change, until all have."""

    def __init__(self, backend: StateBackend, num_nodes: int) -> None:
        super().__init__(name="node-naming", daemon=True)
        self._backend, self._num_nodes = backend, num_nodes
        self._is_over = threading.Event()

    def run(self) -> None:
        """Look at the rendezvous now and then."""
        begun_s, said = time.monotonic(), list[str]()
        while not self._is_over.is_set() and (here := _nodes_here(self._backend)) is not None:
            if here and here != said and time.monotonic() - begun_s > SAY_AFTER_S:
                _say(f"waiting for {who_is_here(here, self._num_nodes)}; run the same command there")
                said = here
            self._is_over.wait(_LOOK_S)

    def end(self) -> None:
        """End the thread. If it were in the store when the interpreter ends, it would abort the process."""
        self._is_over.set()
        self.join(_END_S)


def _nodes_here(backend: StateBackend) -> list[str] | None:
    """Return the addresses of the nodes that have joined, or None when the rendezvous is over."""
    try:
        found = backend.get_state()
    except RendezvousError:  # no store, or foreign writes; torchrun reports it
        return None
    if found is None:
        return []
    state = read_state(found[0])
    return None if state.complete or state.closed else sorted(node.addr for node in state.participants)


def _say(text: str) -> None:
    say(f"wideep: {text}", error=True)
