"""A client of a service's endpoints about experts, for the command line. Knows no table and no engine."""

import contextlib
from collections.abc import Iterator
from typing import Any, Self

import httpx

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 120.0


class ServiceError(RuntimeError):
    """The service could not be reached or refused; the message says which and what to do."""


class ExpertsClient:
    """One connection to one service. A context manager."""

    def __init__(self, url: str, api_key: str | None = None, *, http: httpx.Client | None = None) -> None:
        """Args: url is the service's, with or without /v1; http replaces the connection, for tests."""
        self.url = url.rstrip("/").removesuffix("/v1")
        if "://" not in self.url:
            self.url = f"http://{self.url}"
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        self._http = http or httpx.Client(headers=headers, timeout=timeout)

    def get_json(self, path: str) -> dict[str, Any]:
        """GET an object.

        Raises:
            ServiceError: no service there, or it refuses.
        """
        response = self._ask("GET", path)
        try:
            answer = response.json()
        except ValueError as error:
            raise ServiceError(
                f"{self.url}{path} did not answer in JSON; is this a WideEP service?"
            ) from error
        if not isinstance(answer, dict):
            raise ServiceError(f"{self.url}{path} did not answer with an object; is this a WideEP service?")
        return answer

    def get_bytes(self, path: str) -> bytes:
        """GET a file. Raises as `get_json`."""
        return self._ask("GET", path).content

    def post(self, path: str, body: Any = None) -> httpx.Response:
        """POST, with a JSON body if one is given. Raises as `get_json`."""
        return self._ask("POST", path, body)

    def _ask(self, method: str, path: str, body: Any = None) -> httpx.Response:
        with self._explaining():
            response = self._http.request(method, self.url + path, json=body)
        if response.is_error:
            raise ServiceError(_refusal(response))
        return response

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Turn a broken connection into words."""
        try:
            yield
        except httpx.ConnectError as error:
            raise ServiceError(f"no service answers at {self.url}. Start one with: wideep serve") from error
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            text = f"{self.url} is not a URL of a service ({error}); try http://127.0.0.1:8000"
            raise ServiceError(text) from error
        except httpx.HTTPError as error:
            raise ServiceError(f"lost the connection to {self.url}: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()


def _refusal(response: httpx.Response) -> str:
    """The service's own words."""
    try:
        message = response.json()["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = response.text[:200] or response.reason_phrase
    if response.status_code == 401:
        message += " Set WIDEEP_API_KEY."
    return f"the service refused ({response.status_code}): {message}"
