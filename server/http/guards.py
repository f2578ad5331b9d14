"""Check API keys. Without keys, reject requests from foreign pages in a browser.

Keys from the command line and the environment are fixed. A key file is read again when it changes, so that keys can be
added or revoked while serving. Rejected: reading it on SIGHUP, which torchrun and WideEP treat as a request to stop, and
which would have to reach the one process that needs it.

A browser lets any page send a POST without a body to any server; CORS only hides the answer from the page. But its
`Origin` header names the page's site. So a request that changes something and has an origin must come from an allowed
origin or from one of our pages. A page is ours if its origin equals the request's `Host`, and that is an address or a
name of this machine: another name may have been pointed here (DNS rebinding). Other clients send no origin.

If a foreign page's own name points here, the browser sends its reads without an `Origin`, because they are same-site. So
requests that return contents must use an address, a name of this machine, or one of --allowed-hosts. The paths of load
balancers and Prometheus (`_MONITORED`) may use any name, because they return numbers only.

With --operator-key-file, requests that act on the whole service need an operator's key, which also opens everything else.
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
    "/experts/history",  # the present and past placement of every expert
    "/health_generate",  # makes a rank work
    *("/get_model_info", "/model_info"),  # the model's path on this machine
    "/adapters",  # their paths on this machine
    "/tokenizer_info",  # the chat template, which may be private
    "/weight_info",  # folders of this machine
)
_OPEN_POSTS = ("/ping",)
# The same facts as /health and /metrics; the dashboard has no key.
_OPEN_READS = ("/v1/fault_tolerance/status",)
_MONITORED = ("/", "/health", "/ping", "/version", "/metrics", "/load", "/throughput", *_OPEN_READS)
OPERATOR_PATHS = (  # in addition to requests to `_CHANGED` that change something
    "/experts/record",
    "/start_expert_distribution_record",
    "/stop_expert_distribution_record",
    "/dump_expert_distribution_record",
    "/reset_prefix_cache",
    "/flush_cache",
    "/ranks/drain",
    *("/scale_elastic_ep", "/scale_elastic_ep/abort"),
    "/sleep",
    "/wake_up",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/pause",
    "/resume",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/abort_weight_update",
    "/update_weight_version",
    "/weight_checker",
    "/weights_checker",
    "/weight_info",  # folders of this machine
    "/update_weights_from_disk",
    "/update_weights_from_distributed",
    "/begin_weight_update",
    "/end_weight_update",
    "/init_weights_update_group",
    "/init_weight_transfer_engine",
    "/destroy_weights_update_group",
    "/pause_generation",
    "/continue_generation",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/load_lora_adapter",
    "/unload_lora_adapter",
    "/adapters",  # their folders on this machine, and names that only some keys may use
)
_CHANGED = ("/experts/", "/pools")
_MOST_SHOWN_CHARS = 100
_LOOK_EVERY_S = 1.0  # interval of checks for a changed file
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
        """Args: file has further keys, in the form of `read_keys`, and flag is the flag that named it. operators are the
        keys of operators, who may act on the whole service, or None if every key may.
        """
        self._fixed = [key.encode() for key in keys]
        self._file, self._flag, self._clock = file, flag, clock
        self.operators = operators
        self._from_file: list[bytes] = []
        self._version: object = None  # of the file that `_from_file` was read from
        self._look_again_s = -1.0

    @property
    def are_needed(self) -> bool:
        """Whether requests must have a key. A file without keys still requires one."""
        return bool(self._fixed) or self._file is not None

    @property
    def are_several(self) -> bool:
        """Whether there are several keys to share limits between, not counting operators' keys."""
        self._refresh()
        return len({*self._fixed, *self._from_file}) > 1

    def opens(self, key: bytes) -> bool:
        """Return whether this is one of the keys, or an operator's."""
        # Every key is compared, in constant time, so that the time reveals nothing about similar keys.
        known = [hmac.compare_digest(key, each) for each in self._known()]
        return any(known)

    def _known(self) -> set[bytes]:
        self._refresh()
        return {*self._fixed, *self._from_file, *(self.operators._known() if self.operators else ())}

    def _refresh(self) -> None:
        """Read the file again if it has changed. If it cannot be read, keep the present keys."""
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
            _LOG.error("%s; the keys read earlier stay valid", error)


class KeyGuard:
    """Requires a known key for `_GUARDED` paths (/v1, /api, records, ...) and every request that changes something."""

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
        await ErrorResponse(_no_key("This server requires an API key"))(scope, receive, send)


class OperatorGuard:
    """Requires an operator's key for requests that act on the whole service."""

    def __init__(self, app: ASGIApp, operators: ApiKeys) -> None:
        self._app, self._operators = app, operators

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer 401 or 403."""
        if not _is_operators(scope) or self._operators.opens(key := key_of(scope)):
            await self._app(scope, receive, send)
            return
        failure = ApiError(
            403, f"{route_path(scope)} is for operators: send a key from --operator-key-file instead."
        )
        await ErrorResponse(failure if key else _no_key("This server requires an operator's key"))(
            scope, receive, send
        )


def _no_key(wanted: str) -> ApiError:
    return ApiError(
        401,
        f"{wanted}: send the header 'Authorization: Bearer KEY' with a valid key.",
        headers={"WWW-Authenticate": "Bearer"},
    )


def _is_operators(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] == "OPTIONS":
        return False
    path = route_path(scope)
    return path in OPERATOR_PATHS or (path.startswith(_CHANGED) and _changes(scope))


def _is_guarded(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] == "OPTIONS":
        return False
    path = route_path(scope)
    return _changes(scope) or (path.startswith(_GUARDED) and path not in _OPEN_READS)


def _changes(scope: Scope) -> bool:
    """Return whether a request may change something."""
    if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
        return False
    return route_path(scope) not in _OPEN_POSTS


def _header(scope: Scope, wanted: bytes) -> bytes | None:
    return next((value for name, value in scope["headers"] if name == wanted), None)


def key_of(scope: Scope) -> bytes:
    """Return the request's key: OpenAI's clients send a bearer token, Anthropic's send x-api-key."""
    headers: dict[bytes, bytes] = dict(scope["headers"])
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")


class OriginGuard:
    """Rejects requests that a page of a foreign site sent."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        allowed: Collection[str],
        own_names: Collection[str],
        allowed_hosts: Collection[str] = (),
    ) -> None:
        """Args: allowed has origins as browsers write them, own_names the names of this machine, and allowed_hosts other
        names for this service: a name, `*.` and a name for its subdomains, or `*` for all.
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
                f"A page from {_shown(origin)} may not use this service. To allow it, add its origin to --allowed-origins.",
            )
        if host is None or not _shows_contents(scope) or self._is_known(host.decode("latin-1")):
            return None
        return ApiError(
            403,
            f"This service is not known as {_shown(host)}. Use its address, or add the host to --allowed-hosts.",
        )

    def _is_own(self, origin: bytes, host: bytes | None) -> bool:
        """Return whether a page was served by the host that it sends to, and that host is this machine."""
        scheme, _, asked = origin.decode("latin-1").lower().partition("://")
        if scheme not in ("http", "https") or host is None or asked != host.decode("latin-1").lower():
            return False
        return self._is_known(asked)

    def _is_known(self, host: str) -> bool:
        """Return whether the host certainly belongs to this service, so that it is not a foreign name pointed here."""
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
    """Return a host without its port, or "" if it is invalid."""
    try:
        return (urlsplit(f"//{host}").hostname or "").removesuffix(".")
    except ValueError:
        return ""


def _shown(value: bytes) -> str:
    return repr(shorten(value.decode("latin-1"), _MOST_SHOWN_CHARS))
