"""Traces of requests: arrival times, lengths of prompts and answers, and shared prefixes.

Two published formats are supported; the first line shows which. Azure's (AzureLLMInferenceTrace, 2023 and 2024; Patel et al.,
Splitwise, ISCA 2024) is CSV with `TIMESTAMP,ContextTokens,GeneratedTokens`, without prefixes. Mooncake's (Qin et al.,
FAST 2025) has one JSON object per line, with milliseconds and one hash id per 512 tokens of the prompt: equal ids at the
beginning mean equal tokens. Neither contains texts: a replay generates them, with equal texts for equal ids.

A higher rate is simulated by moving arrivals closer together, which preserves bursts. A trace that is shorter than the
requested time is repeated with new hash ids, because the prompts of a later hour are different. Rejected: overlaying
several copies of a trace, which makes every trace as smooth as a Poisson process.
"""

import csv
import json
import math
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TextIO

PREFIX_TOKENS = 512  # tokens of a prompt per hash id (Mooncake)
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MOONCAKE_KEYS = ("timestamp", "input_length", "output_length")
_MOST_TOKENS = 100_000_000  # of a prompt or an answer; real ones are shorter
_MOST_MS = 1e18  # of a timestamp; excludes infinity
_SEEN_CHARS = 40  # quoted characters of a wrong value


class TraceError(ValueError):
    """A trace cannot be read; the message names the file and the line."""


class TracedRequest(NamedTuple):
    """A request of a trace."""

    arrival_s: float  # seconds after the first request of the trace
    input_tokens: int  # 1 to 10^8
    output_tokens: int  # 1 to 10^8
    # One id per PREFIX_TOKENS of the prompt, the last may cover fewer tokens; empty if the trace has no ids.
    hash_ids: tuple[int, ...]


def read_trace(
    path: Path, *, rate_scale: float = 1.0, duration_s: float | None = None
) -> Iterator[TracedRequest]:
    """Yield a trace's requests in order of arrival, reading the file lazily.

    Args:
        path: File in Azure's or Mooncake's format.
        rate_scale: Factor for the request rate.
        duration_s: Duration of arrivals in seconds, after scaling; a shorter trace is repeated. None reads the trace once.

    Raises:
        TraceError: The file cannot be read, a line is invalid, or an argument is out of range.
    """
    if not 0 < rate_scale < math.inf:
        raise TraceError(f"the rate scale is {rate_scale:g}; it must be above 0")
    if duration_s is not None and not 0 < duration_s < math.inf:
        raise TraceError(f"the duration is {duration_s:g} s; it must be above 0")
    begin_s = last_s = gap_s = 0.0
    first_id = next_id = 0
    for lap in count():
        num_requests = 0
        for request in _parse(path):
            num_requests += 1
            arrival_s = begin_s + request.arrival_s / rate_scale
            if duration_s is not None and arrival_s >= duration_s:
                return
            hash_ids = tuple(first_id + each for each in request.hash_ids)
            next_id = max(next_id, 1 + max(hash_ids, default=-1))
            last_s = arrival_s
            yield request._replace(arrival_s=arrival_s, hash_ids=hash_ids)
        if duration_s is None:
            return
        if lap == 0:
            # A lap includes one mean gap after the last request, so that the rate does not change.
            gap_s = last_s / (num_requests - 1) if num_requests > 1 else 1.0 / rate_scale
        if not last_s - begin_s + gap_s > 0:
            raise TraceError(f"{path}: all requests arrive at the same time, so the trace cannot be repeated")
        begin_s, first_id = last_s + gap_s, next_id


def _parse(path: Path) -> Iterator[TracedRequest]:
    """Yield the requests in the file's order, with the first one at 0 s."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from _of_lines(path, file)
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"cannot parse {path} as a trace: {error}") from error


def _of_lines(path: Path, file: TextIO) -> Iterator[TracedRequest]:
    parse: Callable[[str], TracedRequest] | None = None
    first_s, last_s, has_begun = 0.0, 0.0, False
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            if parse is None:
                parse = _of_json if line.lstrip().startswith("{") else _AzureColumns(line).read
                if parse is not _of_json:
                    continue
            request = parse(line)
            if not has_begun:
                first_s, has_begun = request.arrival_s, True
            elif request.arrival_s < last_s:
                raise ValueError(
                    f"the request arrived {last_s - request.arrival_s:.6g} s before the previous line; sort the trace by time"
                )
        except ValueError as error:
            raise TraceError(f"{path}, line {number}: {error}") from error
        last_s = request.arrival_s
        yield request._replace(arrival_s=last_s - first_s)
    if not has_begun:
        raise TraceError(f"{path} has no requests")


def _of_json(line: str) -> TracedRequest:
    """Read a line of a Mooncake trace.

    Raises:
        ValueError: The line is invalid; the message gives the reason.
    """
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from error
    except ValueError as error:  # a number with thousands of digits
        raise ValueError(f"cannot read the line ({error})") from error
    missing = (
        [key for key in _MOONCAKE_KEYS if key not in value] if isinstance(value, dict) else _MOONCAKE_KEYS
    )
    if missing:
        raise ValueError(f"{', '.join(missing)} is missing; each line of a Mooncake trace needs it")
    milliseconds = value["timestamp"]
    if (
        isinstance(milliseconds, bool)
        or not isinstance(milliseconds, int | float)
        or not 0 <= milliseconds <= _MOST_MS
    ):
        raise ValueError(f"timestamp is {_shown(milliseconds)}; it must be milliseconds, 0 or more")
    input_tokens = _whole("input_length", value["input_length"])
    ids = value.get("hash_ids", [])
    if not isinstance(ids, list) or not all(type(each) is int and each >= 0 for each in ids):
        raise ValueError(f"hash_ids is {_shown(ids)}; it must be a list of whole numbers, 0 or more")
    num_wanted = -(-input_tokens // PREFIX_TOKENS)
    if ids and len(ids) != num_wanted:
        raise ValueError(
            f"hash_ids has {len(ids)} ids for {input_tokens} tokens; one per {PREFIX_TOKENS} tokens would be {num_wanted}"
        )
    output_tokens = _whole("output_length", value["output_length"])
    return TracedRequest(milliseconds / 1000.0, input_tokens, output_tokens, tuple(ids))


class _AzureColumns:
    """Reader for lines of an Azure trace, with the columns in the header's order."""

    def __init__(self, header: str) -> None:
        names = [name.strip() for name in next(csv.reader([header]))]
        missing = [name for name in _AZURE_COLUMNS if name not in names]
        if missing:
            raise ValueError(
                f"the line is {_shown(header.strip())}; a trace begins with {','.join(_AZURE_COLUMNS)} (Azure's) or consists of "
                f"JSON objects (Mooncake's)"
            )
        self._names = names

    def read(self, line: str) -> TracedRequest:
        """Read a line below the header.

        Raises:
            ValueError: The line is invalid; the message gives the reason.
        """
        cells = next(csv.reader([line]))
        if len(cells) != len(self._names):
            raise ValueError(f"the line has {len(cells)} columns; the header has {len(self._names)}")
        row = dict(zip(self._names, cells, strict=True))
        try:
            time = datetime.fromisoformat(row["TIMESTAMP"].strip())
        except ValueError as error:
            seen = _shown(row["TIMESTAMP"])
            raise ValueError(
                f"TIMESTAMP is {seen}; it must be a time such as 2023-11-16 18:17:03.97"
            ) from error
        # A time without a zone is read as UTC, independent of this machine's time zone.
        arrival_s = (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
        input_tokens, output_tokens = (_whole(name, row[name].strip()) for name in _AZURE_COLUMNS[1:])
        return TracedRequest(arrival_s, input_tokens, output_tokens, ())


def _whole(name: str, value: Any) -> int:
    """Read a count of tokens."""
    text = str(value)
    is_short = text.isascii() and text.isdecimal() and len(text) <= len(str(_MOST_TOKENS))
    if isinstance(value, bool) or not is_short or not 1 <= int(text) <= _MOST_TOKENS:
        raise ValueError(f"{name} is {_shown(value)}; it must be a whole number from 1 to {_MOST_TOKENS}")
    return int(text)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SEEN_CHARS else text[:_SEEN_CHARS] + "..."
