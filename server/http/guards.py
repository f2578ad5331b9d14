"""Who may ask: those who have a key, and, where none is needed, no page of somebody else's in somebody's browser.

Keys from the command line and the environment stay; those of a file are read again when the file changes, so that a
key can be given out or withdrawn while serving. Rejected: reading it again on SIGHUP, which torchrun and we take for
the wish to stop, and which would have to find the one process that needs it.

A browser lets any page send a POST without a body anywhere; CORS only keeps the answer from the page. But it says in
`Origin` whose page it was. So what changes something and has an origin must come from an allowed one or from our own
pages. Ours are those whose origin is the `Host` that was asked, where that is an address or a name of this machine: a
name of somebody else's may have been pointed here (DNS rebinding). Clients that are no browsers send no origin.
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

from server.errors import ApiError, shorten
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
_MOST_ORIGIN_CHARS = 100
_KEY_ID_CHARS = 16  # 64 bits of a digest: enough to tell keys apart, and no way back to one
_LOOK_EVERY_S = 1.0  # at the file
_LOG = logging.getLogger("wideep")


class ApiKeys:
    """The keys that open the service."""

    def __init__(
        self,
        keys: Sequence[str] = (),
        file: Path | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args: file holds further keys, in the form of `read_keys`."""
        self._fixed = [key.encode() for key in keys]
        self._file, self._clock = file, clock
        self._from_file: list[bytes] = []
        self._version: object = None  # of the file that `_from_file` is from
        self._look_again_s = -1.0

    @property
    def are_needed(self) -> bool:
        """Whether requests must have one. A file without keys opens nothing to anybody."""
        return bool(self._fixed) or self._file is not None

    def opens(self, key: bytes) -> bool:
        """Say whether this is one of the keys."""
        self._refresh()
        # Every key is compared, in constant time: the time taken says nothing about which was near.
        known = [hmac.compare_digest(key, each) for each in (*self._fixed, *self._from_file)]
        return any(known)

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
            self._from_file = [key.encode() for key in read_keys(self._file)]
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
                exchange.key_id = hashlib.sha256(key).hexdigest()[:_KEY_ID_CHARS]
            await self._app(scope, receive, send)
            return
        failure = ApiError(
            401,
            "This server wants an API key: send the header 'Authorization: Bearer KEY' with one it knows.",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await ErrorResponse(failure)(scope, receive, send)


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
    """Lets requests that change something through unless a page of a foreign origin sent them."""

    def __init__(self, app: ASGIApp, *, allowed: Collection[str], own_names: Collection[str]) -> None:
        """Args: allowed are origins as browsers write them, own_names what this machine is called."""
        self._app = app
        self._allowed = {origin.encode() for origin in allowed}
        self._own_names = frozenset(name.lower() for name in (*own_names, "localhost"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer 403."""
        origin = _header(scope, b"origin") if _changes(scope) else None
        if origin is None or origin in self._allowed or self._is_own(origin, _header(scope, b"host")):
            await self._app(scope, receive, send)
            return
        shown = shorten(origin.decode("latin-1"), _MOST_ORIGIN_CHARS)
        failure = ApiError(
            403,
            f"A page from {shown!r} may not use this service. If it may, name its origin in --allowed-origins.",
        )
        await ErrorResponse(failure)(scope, receive, send)

    def _is_own(self, origin: bytes, host: bytes | None) -> bool:
        """Whether a page is from where it sends its request to, and that is this machine."""
        scheme, _, asked = origin.decode("latin-1").lower().partition("://")
        if scheme not in ("http", "https") or host is None or asked != host.decode("latin-1").lower():
            return False
        try:
            name = urlsplit(f"//{asked}").hostname or ""
            return name in self._own_names or name.endswith(".localhost") or bool(ip_address(name))
        except ValueError:
            return False
