"""HTTP to a service: its address, its errors as messages for users, and a client for one request at a time.

`bulk_client` builds on it for many concurrent requests, and `wideep bench` for streams with measured times. The client itself
uses only one endpoint, the list of models.
"""

import contextlib
import json
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import httpx

from server.machine.lines import printable

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 120.0
_SOCKET = "unix:"  # prefix of a socket's path (--uds) in place of a URL
_QUOTED_CHARS = 200  # of an answer without an error message


class ServiceError(RuntimeError):
    """The service is unreachable or refused a request. The message is safe for a terminal and has the URL or the reason."""

    def __init__(self, message: str, status: int | None = None) -> None:
        """Args: status is that of the refusal; None if there was no response."""
        super().__init__(printable(message))
        self.status = status


class ServiceAddress(NamedTuple):
    """The address of a service."""

    shown: str  # in messages
    root: str  # of the URLs of requests
    socket: str | None = None  # path of a Unix domain socket
    is_here: bool = True  # on this machine, so that a proxy from the environment must not be used

    @classmethod
    def of(cls, url: str) -> "ServiceAddress":
        """Parse a URL, with or without http:// and /v1, or unix:PATH for a service on a socket (--uds).

        Raises:
            ServiceError: The URL is invalid.
        """
        if url.startswith(_SOCKET):
            return cls(url, "http://localhost", os.path.expanduser(url.removeprefix(_SOCKET)))
        root = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
        try:
            parsed = httpx.URL(root)
            is_service = parsed.scheme in ("http", "https") and bool(parsed.host.encode("idna"))
        except (httpx.InvalidURL, UnicodeError):
            is_service = False
        if not is_service:
            raise ServiceError(f"{url!r} is not a URL of a service; try http://127.0.0.1:8000")
        return cls(root, root, None, parsed.host in ("localhost", "::1") or parsed.host.startswith("127."))

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Convert connection errors to a `ServiceError`."""
        try:
            yield
        except httpx.ConnectError as error:
            text = f"no service answers at {self.shown} ({error}). Start one with: wideep serve"
            raise ServiceError(text) from error
        except httpx.HTTPError as error:
            text = str(error) or type(error).__name__
            raise ServiceError(f"lost the connection to {self.shown}: {text}") from error


def api_key_of(environment: Mapping[str, str], given: Sequence[str] = ()) -> str | None:
    """Return the API key to send: a given one, the first of WIDEEP_API_KEY, or OPENAI_API_KEY, in this order."""
    own = environment.get("WIDEEP_API_KEY", "").split()
    return next(iter([*given, *own]), None) or environment.get("OPENAI_API_KEY") or None


def headers_with(api_key: str | None) -> dict[str, str]:
    """Return the headers that carry an API key, or raise a ServiceError if it is invalid."""
    if api_key and not api_key.isascii():
        raise ServiceError("the API key has characters that are not allowed in a header")
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def complaint_of(body: Any) -> str:
    """Return the error message of a body, JSON or text, or its beginning if it has none."""
    if isinstance(body, dict):
        error = body.get("error", body)
        message = error.get("message") if isinstance(error, dict) else error
        if message:
            return str(message)
    return str(body)[:_QUOTED_CHARS]


class ServiceClient:
    """A connection to one service. A context manager."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        query: Mapping[str, str] | None = None,
        answer_timeout_s: float | None = ANSWER_TIMEOUT_S,
        http: httpx.Client | None = None,
    ) -> None:
        """Prepare the connection, which opens with the first request.

        Args:
            url: URL of the service, in a form that `ServiceAddress.of` parses.
            query: Query parameters of all requests except streams.
            answer_timeout_s: Timeout of an answer. None if an answer may wait in the service's queue.
            http: Replacement for the connection, for tests.

        Raises:
            ServiceError: The URL or the API key is invalid.
        """
        self._address, self._query = ServiceAddress.of(url), query
        self.url = self._address.shown
        path = self._address.socket
        self._http = http or httpx.Client(
            headers=headers_with(api_key),
            timeout=httpx.Timeout(answer_timeout_s, connect=CONNECT_TIMEOUT_S),
            transport=None if path is None else httpx.HTTPTransport(uds=path),
            trust_env=not self._address.is_here,
        )

    def get_json(self, path: str) -> dict[str, Any]:
        """GET a JSON object.

        Raises:
            ServiceError: No service answers, or it refuses the request.
        """
        response = self._ask("GET", path)
        try:
            answer = response.json()
        except ValueError as error:
            raise ServiceError(f"{self.url}{path} did not return JSON; is this a WideEP service?") from error
        if not isinstance(answer, dict):
            raise ServiceError(f"{self.url}{path} did not return an object; is this a WideEP service?")
        return answer

    def served_model(self, wanted: str | None = None) -> str:
        """Return the name of the requested model, or of the first served one.

        Raises:
            ServiceError: No service answers, it refuses the request, or it does not serve the model.
        """
        try:
            served = [str(card["id"]) for card in self.get_json("/v1/models")["data"]]
            first = served[0]
        except (LookupError, TypeError) as error:
            raise ServiceError(f"{self.url} is not an OpenAI-compatible service") from error
        if wanted and wanted not in served:
            raise ServiceError(f"--model is {wanted!r}; {self.url} serves {', '.join(served)}")
        return wanted or first

    def get_bytes(self, path: str) -> bytes:
        """GET a file. Raises the errors of `get_json`."""
        return self._ask("GET", path).content

    def post(self, path: str, body: Any = None) -> httpx.Response:
        """POST, optionally with a JSON body. Raises the errors of `get_json`."""
        return self._ask("POST", path, body)

    def _ask(self, method: str, path: str, body: Any = None) -> httpx.Response:
        with self._address.explaining():
            response = self._http.request(method, self._address.root + path, json=body, params=self._query)
        _check(response)
        return response

    def events(self, path: str, body: Any) -> Generator[dict[str, Any], None, None]:
        """POST, and yield the events of the stream. Closing it cancels the request. Raises the errors of `get_json`."""
        url = self._address.root + path
        with self._address.explaining(), self._http.stream("POST", url, json=body) as response:
            if response.is_error:
                response.read()
            _check(response)
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line.removeprefix("data: "))

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check(response: httpx.Response) -> None:
    """Raise the service's error message if it refused the request."""
    if not response.is_error:
        return
    try:
        message = complaint_of(response.json())
    except ValueError:
        message = complaint_of(response.text) or response.reason_phrase
    if response.status_code == 401:
        message += " Set WIDEEP_API_KEY or OPENAI_API_KEY."
    raise ServiceError(f"the service refused ({response.status_code}): {message}", response.status_code)
