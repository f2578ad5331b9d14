"""An HTTP connection from the command line to a service, with errors as messages for users.

It uses only one endpoint itself, the list of models.
"""

import contextlib
import os
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import httpx

from server.machine.lines import printable

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 120.0
SOCKET = "unix:"  # prefix of a socket's path (--uds) in place of a URL


def api_key_of(environment: Mapping[str, str], given: Sequence[str] = ()) -> str | None:
    """Return the API key to send: a given one, the first of WIDEEP_API_KEY, or OPENAI_API_KEY, in this order."""
    own = environment.get("WIDEEP_API_KEY", "").split()
    return next(iter([*given, *own]), None) or environment.get("OPENAI_API_KEY") or None


class ServiceError(RuntimeError):
    """The service is unreachable or refused a request. The message is safe for a terminal and has the URL or the reason."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class ServiceClient:
    """A connection to one service. A context manager."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        answer_timeout_s: float | None = ANSWER_TIMEOUT_S,
        http: httpx.Client | None = None,
    ) -> None:
        """Prepare the connection, which opens with the first request.

        Args:
            url: URL of the service, with or without /v1, or unix:PATH for a service on a socket (--uds).
            answer_timeout_s: Timeout of an answer. None if an answer may wait in the service's queue.
            http: Replacement for the connection, for tests.

        Raises:
            ServiceError: The API key is invalid.
        """
        self.url = url if "://" in url or url.startswith(SOCKET) else f"http://{url}"
        self.url = self._root = self.url.rstrip("/").removesuffix("/v1")
        transport = None
        if url.startswith(SOCKET):
            path = os.path.expanduser(url.removeprefix(SOCKET))
            self.url, self._root, transport = url, "http://localhost", httpx.HTTPTransport(uds=path)
        if api_key and not api_key.isascii():
            raise ServiceError("the API key has characters that are not allowed in a header")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(answer_timeout_s, connect=CONNECT_TIMEOUT_S)
        self._http = http or httpx.Client(
            headers=headers, timeout=timeout, transport=transport, trust_env=not _is_this_machine(self._root)
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
        with self._explaining():
            response = self._http.request(method, self._root + path, json=body)
        _check(response)
        return response

    @contextlib.contextmanager
    def stream(self, path: str, body: Any) -> Iterator[httpx.Response]:
        """POST, and stream the response. Raises the errors of `get_json`, also while the response is read."""
        with self._explaining(), self._http.stream("POST", self._root + path, json=body) as response:
            if response.is_error:
                response.read()
            _check(response)
            yield response

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Convert connection errors to messages."""
        try:
            yield
        except httpx.ConnectError as error:
            raise ServiceError(
                f"no service answers at {self.url} ({error}). Start one with: wideep serve"
            ) from error
        except (httpx.InvalidURL, httpx.UnsupportedProtocol, UnicodeError) as error:
            text = f"{self.url} is not a URL of a service ({error}); try http://127.0.0.1:8000"
            raise ServiceError(text) from error
        except httpx.HTTPError as error:
            raise ServiceError(f"lost the connection to {self.url}: {error}") from error

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_this_machine(url: str) -> bool:
    """Return whether the URL is on this machine, so that a proxy from the environment must not be used."""
    try:
        host = urllib.parse.urlsplit(url).hostname or ""
    except ValueError:
        return False
    return host in ("localhost", "::1") or host.startswith("127.")


def _check(response: httpx.Response) -> None:
    """Raise the service's error message if it refused the request."""
    if not response.is_error:
        return
    try:
        message = response.json()["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = response.text[:200] or response.reason_phrase
    if response.status_code == 401:
        message += " Set WIDEEP_API_KEY or OPENAI_API_KEY."
    raise ServiceError(f"the service refused ({response.status_code}): {message}")
