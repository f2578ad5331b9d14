"""The lines that processes write for people, or for a collector: plain text, or with --log-format json one object each.

Every process of a service says what it does through `say`; the front's loggers use the same `JsonFormatter`
(`http.observability.logs`). Which form it is travels in an environment variable, so that what has no options of its own (the
launcher, a copy of an engine that waits) says it in the same form. What only this module writes: nothing else prints.
"""

import json
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Mapping
from types import TracebackType
from typing import TextIO

FORMAT_VARIABLE = "WIDEEP_LOG_FORMAT"  # "json", else text; set by the process that has read the options
TIMES_VARIABLE = (
    "WIDEEP_LOG_TIMES"  # set in processes of a service: their lines begin with the time and the level
)
SCREEN_VARIABLE = "WIDEEP_SCREEN"  # set where `wideep serve` draws bars: a folder, see `process.loading`
_ERASED = "\r\x1b[K"  # takes a bar off the terminal's last line, so that a line may stand there; it comes back below
FIELDS = "fields"  # the attribute with what a record carries besides its message
# Libraries that write lines of their own, which no handler of Python's reaches; what matters of it we say ourselves.
_SILENT = {
    "TORCH_CPP_LOG_LEVEL": "FATAL",
    "GLOG_minloglevel": "3",
    "GRPC_VERBOSITY": "NONE",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
# What a terminal would act on: C0 but tab and line feed, DEL, C1. ECMA-48's escapes begin with one of them.
_CONTROLS = {
    code: f"\\x{code:02x}" for code in (*range(0x20), 0x7F, *range(0x80, 0xA0)) if code not in (0x09, 0x0A)
}


def printable(text: str) -> str:
    """Return a text of a model, a server or a file so that a terminal only shows it."""
    return text.translate(_CONTROLS)


class JsonFormatter(logging.Formatter):
    """One JSON object per record: time, level, logger, message, request_id, and the record's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        content = {
            "time": utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **id_of(record),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            content["traceback"] = self.formatException(record.exc_info)
        return json.dumps(content)


def utc(created: float) -> str:
    """Return seconds since 1970 as a time of day, with milliseconds."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(created))
    return f"{whole}.{int(created % 1 * 1000):03d}Z"


def id_of(record: logging.LogRecord) -> dict[str, str]:
    """Return the exchange that a record belongs to, as a field; nothing where there is none."""
    request_id = getattr(record, "request_id", None)
    return {} if request_id is None else {"request_id": request_id}


def is_json(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether lines are objects."""
    return environment.get(FORMAT_VARIABLE) == "json"


def say(text: str, *, error: bool = False, level: str = "") -> None:
    """Print a line that may find nobody: a closed terminal must not keep us from stopping our children.

    Args:
        text: may be several lines, which are one object's message.
        error: to standard error, as what went wrong.
        level: of the object; "" is what `error` says.
    """
    stream = sys.stderr if error else sys.stdout
    level = level or ("error" if error else "info")
    line = _as_json(text.strip(), level) if is_json() else text
    if TIMES_VARIABLE in os.environ and not is_json():
        line = f"{stamp(time.time(), level)} {text}"
    if SCREEN_VARIABLE in os.environ and stream.isatty():
        line = _ERASED + line
    try:
        stream.write(f"{line}\n")  # in one write: lines of several processes do not run together
        stream.flush()
    except OSError:
        return


def write_times() -> None:
    """Begin the lines of this process, and of those that it starts, with the time and the level."""
    os.environ[TIMES_VARIABLE] = "1"


def stamp(created: float, level: str) -> str:
    """Return what a line of text begins with.

    Args:
        created: seconds since 1970.
    """
    return f"{utc(created)} {level.upper():7}"


def write_lines_as(form: str) -> None:
    """Let this process and those that it starts write lines in a form, "text" or "json".

    As JSON, that includes what Python itself writes: errors that nobody caught, warnings, and loggers without a handler.
    """
    os.environ[FORMAT_VARIABLE] = form
    if form != "json":
        return
    for name, value in _SILENT.items():
        os.environ.setdefault(name, value)
    sys.excepthook = _say_uncaught
    threading.excepthook = lambda args: _say_uncaught(args.exc_type, args.exc_value, args.exc_traceback)
    warnings.showwarning = _say_warning
    last = logging.StreamHandler()
    last.setLevel(logging.WARNING)
    last.setFormatter(JsonFormatter())
    logging.lastResort = last


def _as_json(text: str, level: str) -> str:
    record = logging.makeLogRecord({"name": "wideep", "levelname": level, "msg": text})
    return JsonFormatter().format(record)


def _say_uncaught(
    kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
) -> None:
    """Say what ends a process or a thread of it, as Python would, but for Ctrl-C."""
    if issubclass(kind, KeyboardInterrupt):
        return
    record = logging.makeLogRecord(
        {"name": "wideep", "levelname": "critical", "msg": f"{kind.__name__}: {error}"}
    )
    record.exc_info = (kind, error or kind(), trace)
    print(JsonFormatter().format(record), file=sys.stderr, flush=True)


def _say_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Stand in for `warnings.showwarning`."""
    print(
        _as_json(f"{category.__name__}: {message} ({filename}:{lineno})", "warning"), file=file or sys.stderr
    )
