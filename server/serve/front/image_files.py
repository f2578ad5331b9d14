"""Uploaded images that requests name by `file_id`. Of several fronts, the leading one has the files."""

import json
from collections.abc import Awaitable, Callable
from urllib.parse import quote

import httpx

from server.api.openai.batches.file_store import FileStore
from server.front.errors import ApiError, bad_request
from server.front.images.input import ReadFile
from server.http.exchanges import current_exchange, owner_of_exchange

AskFront = Callable[[httpx.Request], Awaitable[httpx.Response]]
_KEY_HEADERS = (b"authorization", b"x-api-key")


def stored_images(files: FileStore, most_bytes: int) -> ReadFile:
    """Return a function that reads the files of this front. It raises ApiError if a file is missing or too long."""

    async def read(file_id: str, where: str) -> bytes:
        found = files.find(file_id, owner_of_exchange(), where)
        _check_length(found.num_bytes, most_bytes, where)
        return await files.content_of(found, where)

    return read


def fetched_images(ask: AskFront, most_bytes: int) -> ReadFile:
    """Return a function that reads files of the leading front, with the key of the running request. It raises the same errors."""

    async def fetch(path: str, where: str) -> bytes:
        exchange = current_exchange()
        headers = {} if exchange is None else exchange.headers
        request = httpx.Request(
            "GET",
            f"http://localhost/v1/files/{path}",
            headers=[(name, headers[name]) for name in _KEY_HEADERS if name in headers],
        )
        try:
            response = await ask(request)
            content = await response.aread()
        except httpx.HTTPError as error:
            raise ApiError(
                503, f"{where}: the front with the files does not answer ({type(error).__name__}). Try again.",
                headers={"Retry-After": "1"},
            ) from None  # fmt: skip
        if response.is_success:
            return content
        raise ApiError(response.status_code, json.loads(content)["error"]["message"], param=where)

    async def read(file_id: str, where: str) -> bytes:
        path = quote(file_id, safe="")
        about = json.loads(await fetch(path, where))
        _check_length(about["bytes"], most_bytes, where)
        return await fetch(f"{path}/content", where)

    return read


def _check_length(num_bytes: int, most_bytes: int, where: str) -> None:
    if num_bytes > most_bytes:
        raise bad_request(f"{where}: the file has more than {most_bytes} bytes (--max-image-bytes).", where)
