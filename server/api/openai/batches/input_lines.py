"""Read the lines of a batch in OpenAI's batch input format, one request per line, and separate bad lines from good ones.

A bad line never ends a batch: it becomes a `BadLine` with the reason. Every line has a key, by which an interrupted batch
recognizes answered lines. A good line's key depends on its custom_id, so lines may be moved and added between two runs. A bad
line's key depends on its position and text, so it is read again after a change.

A line of /v1/responses gets `store: false` unless it has a `store`. Its response is in the output file, and the stored responses of a
thousand lines would replace those that clients continue.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.http.json_text import decode_strictly

_RESPONSES = "/v1/responses"
URLS = ("/v1/chat/completions", "/v1/completions", _RESPONSES)
KEY_HEAD = "batch_req_"  # the beginning of OpenAI's ids for answered requests
_SEEN_CHARS = 60  # maximum length of a quoted value


class BatchFileError(ValueError):
    """A batch's file cannot be used at all; the message has the file, the reason and what to do."""


@dataclass(frozen=True, kw_only=True)
class BatchLine:
    """A request of a batch."""

    key: str
    number: int  # line number, from 1
    custom_id: str
    url: str  # one of URLS
    body: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class BadLine:
    """A line that is not a valid request."""

    key: str
    number: int
    custom_id: str | None  # None if the line has none
    reason: str
    code: str  # OpenAI's code for such an error
    param: str | None = None  # the wrong field


class _LineError(ValueError):
    """A line is invalid."""

    def __init__(self, message: str, param: str | None = None, *, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code or (f"invalid_{param.replace('.', '_')}" if param else "invalid_json_line")


def read_batch(
    path: Path, why_not: Callable[[bytes], str | None] = lambda _text: None
) -> Iterator[BatchLine | BadLine]:
    """Read a batch line by line, skipping blank lines.

    Args:
        why_not: Returns why a line must not be parsed, or None.

    Raises:
        BatchFileError: The file cannot be read.
    """
    lines_of: dict[str, int] = {}  # custom_id -> line number
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                text = raw.strip()
                if text:
                    yield _read_line(number, text, lines_of, why_not(text))
    except OSError as error:
        raise BatchFileError(f"cannot read the batch {path}: {error.strerror}") from error


def _read_line(
    number: int, text: bytes, lines_of: dict[str, int], why_not: str | None
) -> BatchLine | BadLine:
    custom_id = None
    try:
        if why_not is not None:
            raise _LineError(why_not)
        fields = _object(text)
        custom_id = fields.get("custom_id") if isinstance(fields.get("custom_id"), str) else None
        line = _request(number, fields)
        if line.custom_id in lines_of:
            raise _LineError(
                f"custom_id {_seen(custom_id)} is already used by line {lines_of[line.custom_id]}",
                "custom_id",
                code="duplicate_custom_id",
            )
    except _LineError as error:
        return BadLine(
            key=_key(f"line {number} ".encode() + text),
            number=number,
            custom_id=custom_id,
            reason=f"line {number}: {error}",
            code=error.code,
            param=error.param,
        )
    lines_of[line.custom_id] = number
    return line


def _object(text: bytes) -> dict[str, Any]:
    try:
        fields = decode_strictly(text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise _LineError(f"not UTF-8 ({error.reason} at byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise _LineError(f"not JSON ({error.msg} at character {error.pos})") from error
    except RecursionError as error:
        raise _LineError("not readable as JSON (nested too deeply)") from error
    except ValueError as error:  # ours, and Python's for a number with thousands of digits
        raise _LineError(f"not readable as JSON ({error})") from error
    if not isinstance(fields, dict):
        raise _LineError(f"not a JSON object but {_seen(fields)}")
    return fields


def _request(number: int, fields: dict[str, Any]) -> BatchLine:
    custom_id, method, url = fields.get("custom_id"), fields.get("method"), fields.get("url")
    body = fields.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise _LineError(
            f"custom_id is {_seen(custom_id)}; it must be a non-empty, unique string", "custom_id"
        )
    if method != "POST":
        raise _LineError(f"method is {_seen(method)}; it must be 'POST'", "method")
    if url not in URLS:
        raise _LineError(f"url is {_seen(url)}; it must be one of {', '.join(URLS)}", "url")
    if not isinstance(body, dict):
        raise _LineError(f"body is {_seen(body)}; it must be the request's JSON object", "body")
    if body.get("stream"):
        raise _LineError("body.stream is true; batches do not support streams, leave it out", "body.stream")
    if body.get("background"):
        raise _LineError(
            "body.background is true; batches do not support background runs, leave it out", "body.background"
        )
    if url == _RESPONSES and body.get("store") is None:
        body = {**body, "store": False}
    return BatchLine(
        key=_key(custom_id.encode(errors="surrogatepass")),
        number=number,
        custom_id=custom_id,
        url=url,
        body=body,
    )


def _seen(value: Any) -> str:
    if value is None:
        return "missing"
    text = repr(value)
    return text if len(text) <= _SEEN_CHARS else text[:_SEEN_CHARS] + "..."


def _key(content: bytes) -> str:
    return KEY_HEAD + hashlib.sha256(content).hexdigest()[:32]
