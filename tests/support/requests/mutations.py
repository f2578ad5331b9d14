"""Turn valid requests into hostile ones. Mutations are seeded, so that the number of a failure reproduces it.

A mutation changes the body's tree (drop, rename, double, swap, wrap, swell), its bytes (cut, flipped, in another
encoding) or the head (content type, huge or broken headers, method). Python's values cannot express some JSON (duplicate
keys, numbers of 5,000 digits, 100,000 brackets); for these, a placeholder in the written text is replaced.
"""

import copy
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from tests.support.requests.hostile_values import (
    CONTENT_TYPES,
    EXTRAS,
    MARK,
    METHODS,
    NUMBERS,
    OTHERS,
    RAW,
    STRINGS,
)

Step = str | int


@dataclass(frozen=True, kw_only=True)
class RawRequest:
    """One HTTP request as bytes and names. Content-Length is added if `headers` lacks it."""

    path: str
    body: bytes
    method: str = "POST"
    headers: tuple[tuple[str, str], ...] = (("Content-Type", "application/json"),)
    what: str = "as it is"  # the mutation
    is_http: bool = True  # False: the server may hang up instead of answering

    def bytes(self) -> bytes:
        """Return the request as sent."""
        head = [f"{self.method} {self.path} HTTP/1.1", "Host: localhost"]
        head += [f"{name}: {value}" for name, value in self.headers]
        if not any(name.lower() in ("content-length", "transfer-encoding") for name, _ in self.headers):
            head.append(f"Content-Length: {len(self.body)}")
        return "\r\n".join(head).encode("utf-8", "surrogatepass") + b"\r\n\r\n" + self.body


@dataclass
class Mutator:
    """Generates hostile requests one by one."""

    seed: int
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def request(self, path: str, body: Any) -> RawRequest:
        """Return the next mutation of a valid request."""
        kinds: tuple[Callable[[str, Any], RawRequest], ...] = (
            self._with_tree,
            self._with_bytes,
            self._with_head,
        )
        (make,) = self._random.choices(kinds, weights=(75, 15, 10))
        return make(path, body)

    def _with_tree(self, path: str, body: Any) -> RawRequest:
        done: list[str] = []
        raws: list[str] = []
        for _ in range(self._random.choice((1, 1, 1, 2, 4))):
            body = self._mutate(copy.deepcopy(body), done, raws)
        text = json.dumps(body)
        for number, raw in enumerate(raws):
            text = text.replace(json.dumps(MARK.format(number)), raw)
        return RawRequest(path=path, body=text.encode(), what="; ".join(done))

    def _mutate(self, body: Any, done: list[str], raws: list[str]) -> Any:
        places = list(_places(body))
        where = self._random.choice(places)
        parent, step = _parent(body, where)
        if parent is None:
            done.append("the body replaced")
            return self._evil(raws)
        how = self._random.choice(
            ("drop", "replace", "replace", "replace", "rename", "double", "wrap", "swell", "add")
        )
        done.append(f"{how} {'.'.join(map(str, where))}")
        value = parent[step]
        if how == "drop":
            del parent[step]
        elif how == "replace":
            parent[step] = self._evil(raws)
        elif how == "rename" and isinstance(parent, dict):
            parent[self._random.choice(STRINGS)] = parent.pop(step)
        elif how == "double" and isinstance(parent, list):
            parent[step:step] = [copy.deepcopy(value) for _ in range(self._random.choice((1, 2, 200)))]  # type: ignore[misc]
        elif how == "wrap":
            parent[step] = self._random.choice(([value], {"value": value}, [[value]], str(value)))
        elif how == "swell" and isinstance(value, str):
            parent[step] = value * self._random.choice((2, 100, 3000))
        elif isinstance(parent, dict):
            parent[self._random.choice(EXTRAS)] = self._evil(raws)
        return body

    def _evil(self, raws: list[str]) -> Any:
        kind = self._random.choice(("string", "number", "other", "raw"))
        if kind == "raw":
            raws.append(self._random.choice(RAW))
            return MARK.format(len(raws) - 1)
        pool: tuple[Any, ...] = {"string": STRINGS, "number": NUMBERS, "other": OTHERS}[kind]
        return copy.deepcopy(self._random.choice(pool))

    def _with_bytes(self, path: str, body: Any) -> RawRequest:
        text = json.dumps(body, ensure_ascii=False)
        clean = text.encode("utf-8", "surrogatepass")
        at = self._random.randrange(len(clean) + 1)
        flipped = bytearray(clean)
        if flipped:
            flipped[at % len(flipped)] ^= 1 << self._random.randrange(8)
        what, content = self._random.choice(
            (
                ("cut", clean[:at]),
                ("a bit flipped", bytes(flipped)),
                ("bytes that are no UTF-8", clean[:at] + b"\xff\xfe\x80" + clean[at:]),
                ("a surrogate in UTF-8", clean[:at] + b"\xed\xa0\x80" + clean[at:]),
                ("a zero byte", clean[:at] + b"\x00" + clean[at:]),
                ("a byte order mark", b"\xef\xbb\xbf" + clean),
                ("UTF-16", text.encode("utf-16", "surrogatepass")),
                ("UTF-32", text.encode("utf-32", "surrogatepass")),
                ("empty", b""),
                ("twice", clean + clean),
                ("a comma too many", clean[:-1] + b",}"),
                ("random bytes", self._random.randbytes(200)),
            )
        )
        return RawRequest(path=path, body=content, what=f"{what} at {at}")

    def _with_head(self, path: str, body: Any) -> RawRequest:
        request = RawRequest(path=path, body=json.dumps(body).encode())
        kind = ("Content-Type", self._random.choice(CONTENT_TYPES))
        json_type = ("Content-Type", "application/json")
        changed = self._random.choice(
            (
                replace(request, headers=(kind,), what=f"content type {kind[1][:40]!r}"),
                replace(request, headers=(), what="no content type"),
                replace(request, method=self._random.choice(METHODS), what="another method"),
                replace(request, headers=(json_type, ("X-Huge", "x" * 30_000)), what="a header of 30 kB"),
                replace(
                    request,
                    headers=(json_type, ("X-Huge", "x" * 300_000)),
                    is_http=False,
                    what="one of 300 kB",
                ),
                replace(
                    request, headers=(json_type, *((f"X-{n}", "x") for n in range(300))), what="300 headers"
                ),
                replace(
                    request, headers=(json_type, ("X-Request-Id", "\u00e9" * 200)), what="an odd request id"
                ),
                replace(
                    request,
                    headers=(json_type, ("Authorization", "Bearer \x7f")),
                    is_http=False,
                    what="odd key",
                ),
                replace(
                    request, headers=(json_type, ("Content-Length", "-5")), is_http=False, what="length -5"
                ),
                replace(
                    request,
                    headers=(json_type, ("Transfer-Encoding", "chunked")),
                    body=b"zz\r\n" + request.body,
                    is_http=False,
                    what="a broken chunk",
                ),
                replace(request, path=f"{path}?{'q=%ff&' * 200}", what="a long query"),
                replace(request, path=path + "/", what="a slash too many"),
                replace(request, path=path + "%00%ff", what="an odd path"),
                replace(request, headers=(json_type, ("Accept", "image/png")), what="another Accept"),
            )
        )
        return replace(changed, what=f"{changed.what} ({changed.method})")


def _places(value: Any, above: tuple[Step, ...] = ()) -> list[tuple[Step, ...]]:
    """Return the paths of all values in a tree, the root first."""
    found = [above]
    if isinstance(value, dict):
        for key, below in value.items():
            found += _places(below, (*above, key))
    elif isinstance(value, list):
        for number, below in enumerate(value[:20]):
            found += _places(below, (*above, number))
    return found


def _parent(body: Any, where: tuple[Step, ...]) -> tuple[Any, Any]:
    """Return the container of the value at a path, and its key there, or None for the root."""
    if not where:
        return None, None
    for step in where[:-1]:
        body = body[step]
    return body, where[-1]
