"""The lines that processes write for users or log collectors: plain text, or JSON objects with --log-format json.

Every process of a service writes its lines through `say`; the front's loggers use the same `JsonFormatter`
(`http.observability.logs`). An environment variable carries the format, so that processes without options (the launcher,
a spare copy of an engine) use it too.
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

FORMAT_VARIABLE = "WIDEEP_LOG_FORMAT"  # "json" or text; set by the process that reads the options
# Set in processes of a service: their lines begin with the time and the level.
TIMES_VARIABLE = "WIDEEP_LOG_TIMES"
SCREEN_VARIABLE = "WIDEEP_SCREEN"  # set while `wideep serve` draws bars: a folder, see `serve.loading`
_ERASED = "\r\x1b[K"  # erases a bar from the terminal's last line to make room; the bar is redrawn below
FIELDS = "fields"  # the attribute of a record for additional fields
# Libraries that write lines outside Python's logging. WideEP reports the relevant ones itself.
_SILENT = {
    "TORCH_CPP_LOG_LEVEL": "FATAL",
    "GLOG_minloglevel": "3",
    "GRPC_VERBOSITY": "NONE",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
# Characters that control a terminal: C0 except tab and line feed, DEL, C1. All escape sequences of ECMA-48 begin with one.
_CONTROLS = {
    code: f"\\x{code:02x}" for code in (*range(0x20), 0x7F, *range(0x80, 0xA0)) if code not in (0x09, 0x0A)
}


def printable(text: str) -> str:
    """Return a text from a model, server or file with its control characters escaped, safe for a terminal."""
    return text.translate(_CONTROLS)


class JsonFormatter(logging.Formatter):
    """One JSON object per record: time, level, logger, message, request_id and additional fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as a line."""
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
    """Return seconds since 1970 as a UTC time with milliseconds."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(created))
    return f"{whole}.{int(created % 1 * 1000):03d}Z"


def id_of(record: logging.LogRecord) -> dict[str, str]:
    """Return the request id of a record as a field. Returns no field if the record has none."""
    request_id = getattr(record, "request_id", None)
    return {} if request_id is None else {"request_id": request_id}


def is_json(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether lines are JSON objects."""
    return environment.get(FORMAT_VARIABLE) == "json"


def say(text: str, *, error: bool = False, level: str = "") -> None:
    """Print a line, and ignore a closed output: a closed terminal must not keep a process from stopping its children.

    Args:
        text: One or more lines; as JSON, they are the message of one object.
        error: Write to standard error instead of standard output.
        level: Level of the line; by default "error" or "info", depending on `error`.
    """
    stream = sys.stderr if error else sys.stdout
    level = level or ("error" if error else "info")
    line = _as_json(text.strip(), level) if is_json() else text
    if TIMES_VARIABLE in os.environ and not is_json():
        line = f"{stamp(time.time(), level)} {text}"
    if SCREEN_VARIABLE in os.environ and stream.isatty():
        line = _ERASED + line
    try:
        stream.write(f"{line}\n")  # in one write, so that lines of several processes do not mix
        stream.flush()
    except OSError:
        return


def write_times() -> None:
    """Prefix the lines of this process and its children with the time and the level."""
    os.environ[TIMES_VARIABLE] = "1"


def stamp(created: float, level: str) -> str:
    """Return the prefix of a text line.

    Args:
        created: Time in seconds since 1970.
    """
    return f"{utc(created)} {level.upper():7}"


def write_lines_as(form: str) -> None:
    """Let this process and its children write lines in a format, "text" or "json".

    JSON also applies to Python's own output: uncaught exceptions, warnings, and loggers without a handler.
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
    """Report an uncaught exception of a process or thread as Python does; Ctrl-C is not reported."""
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
    """Replace `warnings.showwarning`."""
    print(
        _as_json(f"{category.__name__}: {message} ({filename}:{lineno})", "warning"), file=file or sys.stderr
    )
