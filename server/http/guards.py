"""Who may ask: those who have a key, and, if none is needed, no page of a foreign site in a browser.

Keys from the command line and the environment stay; those of a file are read again when the file changes, so that a
key can be given out or withdrawn while serving. Rejected: reading it again on SIGHUP, which torchrun and we take for
the wish to stop, and which would have to find the one process that needs it.

A browser lets any page send a POST without a body anywhere; CORS only keeps the answer from the page. But it says in
`Origin` whose page it was. So what changes something and has an origin must come from an allowed one or from our own
pages. Ours are those whose origin is the `Host` that was asked, where that is an address or a name of this machine: a
name of somebody else's may have been pointed here (DNS rebinding). Clients that are no browsers send no origin.

A page whose own name was pointed here reads without an `Origin`, because to its browser that is the same site. So what shows
contents must be asked for by an address, a name of this machine, or one of --allowed-hosts. What load balancers and Prometheus
ask (`_MONITORED`) may have any name: it has numbers only.

What acts on the whole service is the operators' if they have keys of their own (--operator-key-file), which open all else, too.
"""

import hashlib
import hmac
import logging
import time
from collections.abc import Callable, Collection, Sequence
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from server.front.errors import ApiError, shorten
from server.http.errors import ErrorResponse, route_path
from server.http.exchanges import current_exchange
from server.options.checks import read_keys
from server.options.flag import OptionsError

_GUARDED = (
    *("/v1", "/api/"),
    "/experts/record",  # up to 256 MB to write and to send
    "/experts/history",  # where every expert is, and was
    "/health_generate",  # makes a rank work
    *("/get_model_info", "/model_info"),  # where the model is on this machine
    "/tokenizer_info",  # the chat template, which may be private
)
_OPEN_POSTS = ("/ping",)
_OPEN_READS = (
    "/v1/fault_tolerance/status",
)  # as /health and /metrics, which say the same; the dashboard has no key
_MONITORED = ("/", "/health", "/ping", "/version", "/metrics", "/load", "/throughput", *_OPEN_READS)
OPERATOR_PATHS = (  # beside all below /experts/ that changes something
    "/experts/record",
    "/start_expert_distribution_record",
    "/stop_expert_distribution_record",
    "/dump_expert_distribution_record",
    "/reset_prefix_cache",
    "/flush_cache",
)
_EXPERTS = "/experts/"
_MOST_SHOWN_CHARS = 100
_LOOK_EVERY_S = 1.0  # at the file
_LOG = logging.getLogger("wideep")


class ApiKeys:
    """The keys that open the service."""

    def __init__(
        self,
        keys: Sequence[str] = (),
        file: Path | None = None,
        *,
        flag: str = "--api-key-file",
        operators: "ApiKeys | None" = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args: file holds further keys, in the form of `read_keys`, and `flag` named it; operators are the keys of those
        who may act on the whole service, None: every key may.
        """
        self._fixed = [key.encode() for key in keys]
        self._file, self._flag, self._clock = file, flag, clock
        self.operators = operators
        self._from_file: list[bytes] = []
        self._version: object = None  # of the file that `_from_file` is from
        self._look_again_s = -1.0

    @property
    def are_needed(self) -> bool:
        """Whether requests must have one. A file without keys opens nothing to anybody."""
        return bool(self._fixed) or self._file is not None

    @property
    def are_several(self) -> bool:
        """Whether there are several keys, but for operators', between which what is bounded is shared."""
        self._refresh()
        return len({*self._fixed, *self._from_file}) > 1

    def opens(self, key: bytes) -> bool:
        """Say whether this is one of the keys, or an operator's."""
        # Every key is compared, in constant time: the time taken says nothing about which was near.
        known = [hmac.compare_digest(key, each) for each in self._known()]
        return any(known)

    def _known(self) -> set[bytes]:
        self._refresh()
        return {*self._fixed, *self._from_file, *(self.operators._known() if self.operators else ())}

    def _refresh(self) -> None:
        """Read the file again if it has changed. One that cannot be read keeps the keys as they were."""
        if self._file is None or self._clock() < self._look_again_s:
            return
        self._look_again_s = self._clock() + _LOOK_EVERY_S
        try:
            found = self._file.stat()
        except OSError as error:
            version: object = str(error)
        else:
            version = (found.st_mtime_ns, found.st_size, found.st_ino)
        if version == self._version:
            return
        self._version = version
        try:
            self._from_file = [key.encode() for key in read_keys(self._file, self._flag)]
        except OptionsError as error:
            _LOG.error("%s; the keys read before stay valid", error)


class KeyGuard:
    """Lets requests to /v1 and /api, for records, and whatever changes something, through if they carry a known key."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer 401."""
        if not _is_guarded(scope):
            await self._app(scope, receive, send)
            return
        key = key_of(scope)
        if self._keys.opens(key):
            exchange = current_exchange()
            if exchange is not None:
                exchange.owner = hashlib.sha256(key).hexdigest()
            await self._app(scope, receive, send)
            return
        await ErrorResponse(_no_key("This server wants an API key"))(scope, receive, send)


class OperatorGuard:
    """Lets requests that act on the whole service through if they carry an operator's key."""

    def __init__(self, app: ASGIApp, operators: ApiKeys) -> None:
        self._app, self._operators = app, operators

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer 401 or 403."""
        if not _is_operators(scope) or self._operators.opens(key := key_of(scope)):
            await self._app(scope, receive, send)
            return
        failure = ApiError(
            403, f"{route_path(scope)} is for operators: send a key of --operator-key-file, not another one."
        )
        await ErrorResponse(failure if key else _no_key("This server wants an operator's key"))(
            scope, receive, send
        )


def _no_key(wanted: str) -> ApiError:
    return ApiError(
        401,
        f"{wanted}: send the header 'Authorization: Bearer KEY' with one it knows.",
        headers={"WWW-Authenticate": "Bearer"},
    )


def _is_operators(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] == "OPTIONS":
        return False
    path = route_path(scope)
    return path in OPERATOR_PATHS or (path.startswith(_EXPERTS) and _changes(scope))


def _is_guarded(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] == "OPTIONS":
        return False
    path = route_path(scope)
    return _changes(scope) or (path.startswith(_GUARDED) and path not in _OPEN_READS)


def _changes(scope: Scope) -> bool:
    """Whether a request may change something."""
    if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
        return False
    return route_path(scope) not in _OPEN_POSTS


def _header(scope: Scope, wanted: bytes) -> bytes | None:
    return next((value for name, value in scope["headers"] if name == wanted), None)


def key_of(scope: Scope) -> bytes:
    """Return the key a request carries: OpenAI's clients send a bearer, Anthropic's x-api-key."""
    headers: dict[bytes, bytes] = dict(scope["headers"])
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")


class OriginGuard:
    """Lets requests through unless a page of a foreign site sent them."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        allowed: Collection[str],
        own_names: Collection[str],
        allowed_hosts: Collection[str] = (),
    ) -> None:
        """Args: allowed are origins as browsers write them, own_names what this machine is called, allowed_hosts what else
        users may call it: names, `*.` and a name for all below it, or `*`.
        """
        self._app = app
        self._allowed = {origin.encode() for origin in allowed}
        self._names = frozenset(name.lower() for name in (*own_names, *allowed_hosts, "localhost"))
        self._names |= {_host_name(origin.partition("://")[2]) for origin in allowed}
        self._endings = (".localhost", *(name[1:] for name in self._names if name.startswith("*.")))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer 403."""
        failure = self._failure(scope)
        await (self._app if failure is None else ErrorResponse(failure))(scope, receive, send)

    def _failure(self, scope: Scope) -> ApiError | None:
        if scope["type"] != "http":
            return None
        host = _header(scope, b"host")
        if _changes(scope):
            origin = _header(scope, b"origin")
            if origin is None or origin in self._allowed or self._is_own(origin, host):
                return None
            return ApiError(
                403,
                f"A page from {_shown(origin)} may not use this service. If it may, name its origin in --allowed-origins.",
            )
        if host is None or not _shows_contents(scope) or self._is_known(host.decode("latin-1")):
            return None
        return ApiError(
            403,
            f"This service is not known as {_shown(host)}. Ask it by an address, or name the host in --allowed-hosts.",
        )

    def _is_own(self, origin: bytes, host: bytes | None) -> bool:
        """Whether a page is from where it sends its request to, and that is this machine."""
        scheme, _, asked = origin.decode("latin-1").lower().partition("://")
        if scheme not in ("http", "https") or host is None or asked != host.decode("latin-1").lower():
            return False
        return self._is_known(asked)

    def _is_known(self, host: str) -> bool:
        """Whether nobody else can have pointed this name here."""
        name = _host_name(host)
        if name in self._names or "*" in self._names or name.endswith(self._endings):
            return bool(name)
        try:
            return bool(ip_address(name))
        except ValueError:
            return False


def _shows_contents(scope: Scope) -> bool:
    return scope["method"] in ("GET", "HEAD") and route_path(scope) not in _MONITORED


def _host_name(host: str) -> str:
    """Return a host without its port; empty if it is none."""
    try:
        return (urlsplit(f"//{host}").hostname or "").removesuffix(".")
    except ValueError:
        return ""


def _shown(value: bytes) -> str:
    return repr(shorten(value.decode("latin-1"), _MOST_SHOWN_CHARS))
