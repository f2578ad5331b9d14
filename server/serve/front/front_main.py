"""Start the front process: one event loop with the HTTP server, the gRPC server for ranks, and the journal between them.

It binds and announces both sockets before any slow work, so that ranks and, at the start, clients can connect while the tokenizer
loads. It does not import torch: it only tokenizes, and torch would cost 180 MB. `front` runs afterwards.

A front that replaces a killed one takes over its ports and its token. The ranks reconnect with the state it needs and form a
new group. Answers in progress ended with the old front. The standby's front (`--standby`) is such a replacement on another node.
"""

import asyncio
import contextlib
import errno
import gc
import importlib
import json
import logging
import os
import secrets
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from server.front.journal import Journal
from server.front.members.nodes import JoinedPools
from server.front.members.resize_operation import ResizeRecord
from server.front.several.front_map import FrontMap
from server.front.several.seat import Seat
from server.http.observability.logs import logging_to
from server.http.observability.metrics import Metrics
from server.http.observability.throughput import LatencyTargets
from server.link.ranks import Ranks
from server.machine.parent_death import die_with_parent
from server.options.flag import OptionsError
from server.options.reading import options_from_json
from server.options.table import Options
from server.serve.child_messages import FrontAddresses, encode, http_url, ranks_addresses
from server.serve.children import (
    FRONT_VARIABLE,
    KEPT_VARIABLE,
    LISTENER_VARIABLE,
    READY_VARIABLE,
    raise_descriptor_limit,
)
from server.serve.front.front import Ending, Front
from server.serve.preflight.unix_socket import listening_at
from server.serve.spare import FRONT, leave_spare
from server.serve.standby.first_front import FirstFront
from server.serve.standby.leading import KeptFiles, ranks_near
from server.serve.standby.waiting import copies_in, wait_for_leading, wait_until_lost
from server.serve.store.rendezvous import NODE_VARIABLE

_LOG = logging.getLogger("wideep.front")
LOCAL_HOST = "127.0.0.1"
# The interval after which a planning thread yields to the event loop. CPython's default, 5 ms, is worth many tokens.
SWITCH_S = 0.5e-3
_BACKLOG = 2048
_LOOK_S = 0.05  # between two looks for the map of all fronts


def run_front(
    options: Options,
    num_ranks: int,
    ranks_host: str = LOCAL_HOST,
    number: int = 0,
    is_standby: bool = False,
    has_other_nodes: bool = False,
    *,
    environment: Mapping[str, str] = os.environ,
) -> int:
    """Serve until a signal arrives or the service fails; return the exit status.

    Args:
        options: The options. `model` is a directory; the caller has resolved other names.
        number: The front's number among several of this node.
        is_standby: Whether another front leads until its node is lost.
        has_other_nodes: Whether other nodes have fronts, too. The engine next to this front writes where.
        environment: If it has WIDEEP_READY_FD, the addresses are written to that descriptor, which is closed afterwards.
    """
    # Returns an order in the spare when it takes over.
    while (order := leave_spare(environment, FRONT, _import_http_service)) is not None:
        options, environment = options_from_json(order.options, order.environment), order.environment
    die_with_parent()
    raise_descriptor_limit()
    sys.setswitchinterval(SWITCH_S)
    with logging_to(options.log):
        try:
            # Announced by the front that this one replaces, or by the leading one.
            before = json.loads(environment.get(FRONT_VARIABLE, "null"))
            with _kept_in(environment) as kept:
                place = _Place(number, before, ranks_host, Path(kept), is_standby, has_other_nodes)
                with _listener(options, place, environment) as listener:
                    return asyncio.run(_run(options, num_ranks, listener, place, environment))
        except OptionsError as error:
            return _complain(str(error))


class _Place(NamedTuple):
    """What distinguishes this front from others."""

    number: int  # among several fronts of this node
    announced: dict[str, str] | None  # addresses of the fronts, as in WIDEEP_FRONT
    ranks_host: str
    kept: Path  # folder that outlives this front
    is_standby: bool = False
    has_other_nodes: bool = False
    has_taken_over: bool = False

    @property
    def ranks_port(self) -> int:
        """The port for ranks of the front that this one replaces; 0 if there was none."""
        addresses = ranks_addresses(self.announced) if self.announced else []
        return _port_of(addresses[self.number]) if self.number < len(addresses) else 0

    @property
    def is_again(self) -> bool:
        """Whether this front replaces one."""
        return self.has_taken_over or self.ranks_port > 0


def _listener(
    options: Options, place: _Place, environment: Mapping[str, str]
) -> contextlib.AbstractContextManager[socket.socket]:
    """Bind the socket for HTTP. The first of several fronts also checks that no other program has the port.

    Connections wait in it until this front serves. A replacement among several fronts does not listen before, so that they go to
    the others.
    """
    listens = not place.is_standby
    if (bound := environment.get(LISTENER_VARIABLE)) is not None:
        return socket.socket(fileno=int(bound))
    if options.uds is not None:
        return listening_at(options.uds)
    if options.api_server_count == 1:
        return bind_http(options.host, options.port, listens=listens)
    if place.announced is None and options.port:
        bind_http(options.host, options.port, listens=listens).close()
    return bind_http(options.host, options.port, is_shared=True, listens=listens and not place.is_again)


def _kept_in(environment: Mapping[str, str]) -> contextlib.AbstractContextManager[str]:
    """Return the folder that outlives this front; without a supervisor, a temporary folder."""
    given = environment.get(KEPT_VARIABLE)
    return contextlib.nullcontext(given) if given else tempfile.TemporaryDirectory(prefix="wideep_")


async def _run(
    options: Options,
    num_ranks: int,
    listener: socket.socket,
    place: _Place,
    environment: Mapping[str, str],
) -> int:
    ending = Ending()
    record = ResizeRecord(place.kept / "resize.json")
    token = place.announced["token"] if place.announced else secrets.token_urlsafe(32)
    fronts = FrontMap.read(place.kept) if place.has_other_nodes else None  # None at the start
    is_early = place.is_standby or (place.has_other_nodes and fronts is None)
    seat = None if is_early else _take_seat(options, place, num_ranks, fronts)
    num_ranks = record.num_ranks or num_ranks
    try:
        ranks = Ranks(num_ranks, token, cluster_key=options.cluster_key)
        ranks_address = ranks.bind(place.ranks_host, place.ranks_port)
        if record.num_ranks:  # ranks may know an earlier number
            ranks.resize(num_ranks, num_ranks)
    except OptionsError as error:
        return _complain(str(error))
    except RuntimeError as error:
        return _complain(f"cannot listen for ranks on {place.ranks_host} (--ranks-host): {error}")
    if READY_VARIABLE in environment:
        announce(int(environment[READY_VARIABLE]), listener, options, ranks_address, token)
    slow = await asyncio.to_thread(_import_http_service)  # meanwhile connections wait in both sockets
    first: FirstFront | None = None  # the leading front on a lost node
    files: KeptFiles | None = None  # for the standby
    metrics = Metrics(
        options.served_model_names[0],
        num_ranks,
        options.engine.num_drafts,
        has_tiers=options.engine.has_kv_tiers or options.has_own_pool,  # other pools may have them
        targets=LatencyTargets(options.target_ttft_ms, options.engine.target_itl_ms),
    )
    try:
        tokenizer = await asyncio.to_thread(
            slow.Tokenizer, options.model, options.chat_template, options.tokenizer_mode
        )
        if place.is_standby:
            first = await _stand_by(options, place, ending)
            if first is None:
                return 0
            token, place = first.token, place._replace(kept=copies_in(place.kept), has_taken_over=True)
            seat = _take_seat(options, place, num_ranks)
            record = ResizeRecord(place.kept / "resize.json")
            if record.num_ranks:
                ranks.resize(record.num_ranks, record.num_ranks)
                metrics.grow(record.num_ranks)
            ranks.use_token(token)
            await slow.until_files_are_free(options.http, options.engine.front_recovery_timeout_s)
        elif place.has_other_nodes:
            fronts = await _find_fronts(place.kept, ending)
            if fronts is None:
                return 0
            token, seat = fronts.token, seat or _take_seat(options, place, num_ranks, fronts)
            ranks.use_token(token)
        elif options.standby is not None and place.number == 0:
            try:
                node = environment.get(NODE_VARIABLE, "")
                files = KeptFiles(place.kept, lambda kind, text: service.events.note(kind, text), node)
            except OSError as error:
                return _complain(f"--standby: {error}")
        service = slow.FrontService(
            options,
            tokenizer,
            ranks=ranks,
            journal=Journal(),
            metrics=metrics,
            kept=place.kept,
            record=record,
            seat=seat,
        )
        http = slow.HttpService(
            service, tokenizer, metrics=metrics, kept=place.kept, secret=token, files=files
        )
    except ValueError as error:  # TokenizerError: its class came with the slow import
        return _complain(str(error))
    gc.freeze()  # full collections stop all streams; exclude every object that exists now
    joined = JoinedPools(Path(place.kept) / "pools", is_again=place.is_again)
    front = Front(options, ranks, metrics, service, http, ending, joined, files)
    front.begin_resizes(environment)
    if first is not None and service.leads:
        front.take_over_from(first, ranks_near(place.kept))
    listener.listen(_BACKLOG)  # unless it does already
    fatal = await front.run(listener, is_again=place.is_again)
    return _complain(fatal) if fatal else 0


def _take_seat(
    options: Options, place: _Place, num_ranks: int, fronts: FrontMap | None = None
) -> Seat | None:
    """Take this front's place among several. Returns None if it is the only one."""
    if fronts is not None:
        number = fronts.near[place.number]
        return Seat.take(
            place.kept, number=number, num_fronts=fronts.num_fronts, num_ranks=num_ranks, fronts=fronts
        )
    num_fronts = options.api_server_count
    if num_fronts == 1:
        return None
    return Seat.take(place.kept, number=place.number, num_fronts=num_fronts, num_ranks=num_ranks)


async def _find_fronts(kept: Path, ending: Ending) -> FrontMap | None:
    """Wait until it is known where all fronts are. Returns None if this front must end before."""
    while (fronts := FrontMap.read(kept)) is None:
        if ending.begun.is_set():
            return None
        await asyncio.sleep(_LOOK_S)
    return fronts


async def _stand_by(options: Options, place: _Place, ending: Ending) -> FirstFront | None:
    if place.number:
        return await wait_for_leading(place.kept, now=ending.now)
    return await wait_until_lost(
        place.kept,
        cluster_key=options.cluster_key,
        silence_s=options.engine.heartbeat_timeout_s,
        begun=ending.begun,
        now=ending.now,
    )


def _import_http_service() -> ModuleType:
    """Import the slow half, with torch hidden: transformers would import it but does not need it for tokenizing."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # None makes the import raise ModuleNotFoundError
    return importlib.import_module("server.serve.front.http_service")


def _port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def _complain(message: str) -> int:
    """Log why the front ends and return its exit status."""
    _LOG.critical("%s", message)
    return 1


def bind_http(host: str, port: int, *, is_shared: bool = False, listens: bool = True) -> socket.socket:
    """Bind and listen.

    Args:
        listens: Whether to listen. Otherwise the kernel refuses connections until this process does.
        is_shared: Whether several fronts listen on the port. The kernel spreads connections over them.

    Raises:
        OptionsError: The port is in use, or the address does not belong to this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise OptionsError(f"invalid --host {host!r}: {error.strerror}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        if listens:
            listener.listen(_BACKLOG)  # immediately: bind alone does not reserve a port that allows reuse
        else:
            listener.setsockopt(
                socket.SOL_SOCKET, socket.SO_REUSEADDR, 0
            )  # reserves it until this process listens
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise OptionsError(f"port {port} on {host} is in use; choose another with --port") from error
        raise OptionsError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    return listener


def announce(
    ready_fd: int, listener: socket.socket, options: Options, ranks_address: str, token: str
) -> None:
    """Write the addresses to the supervisor as one JSON line."""
    url = http_url(options, 0 if options.uds is not None else listener.getsockname()[1])
    with os.fdopen(ready_fd, "w") as ready:
        ready.write(encode(FrontAddresses(url, ranks_address, token)) + "\n")
