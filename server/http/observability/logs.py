"""The front's logs: one line per record, as text or JSON, with the exchange's id. Prompts are logged only on request.

The access log goes to standard output, everything else to standard error, as in uvicorn. A thread writes the lines: a
terminal that is not read (`wideep serve | less`) must not stop the event loop. So a line that finds the queue full is
dropped, and the next line that fits states how many were. uvicorn's own records take the same path.
"""

import contextlib
import logging
import queue
import sys
import threading
from collections.abc import Iterator, Sequence
from logging.handlers import QueueHandler, QueueListener
from typing import Any, TextIO

from scheduler.policy.request import SamplingParams
from server.front.detokenizer import Decoder
from server.front.generations import Ask
from server.http.exchanges import HttpExchange, current_exchange
from server.machine.lines import FIELDS, JsonFormatter, id_of, stamp
from server.options.table import LogOptions

ACCESS = "wideep.access"
REQUESTS = "wideep.requests"
FRONT = "wideep.front"  # its lines begin with "wideep front:", like those of other processes
_QUEUE_LINES = 10_000
# Control characters (C0, DEL, C1) and Unicode's line ends, as escapes.
_CONTROLS = {
    **{code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))},
    0x0A: "\\n",
    0x0D: "\\r",
    0x09: "\\t",
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}
_END_S = 0.5  # to write the queued lines at the end; the supervisor does not wait much longer


class TextFormatter(logging.Formatter):
    """Formats time, level, message, and the exchange's id if any. The front's own lines begin with "wideep front: "."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line. A traceback follows on separate lines."""
        request_id = "".join(f" [{value}]" for value in id_of(record).values())
        # A client must not be able to write lines or terminal control codes.
        message = record.getMessage().translate(_CONTROLS)
        name = "wideep front: " if record.name == FRONT else ""
        line = f"{stamp(record.created, record.levelname)} {name}{message}{request_id}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _Queue(QueueHandler):
    """Passes records to the writing thread, with the id of the task's exchange."""

    queue: "queue.SimpleQueue[Any]"
    _num_dropped = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Add the exchange's id here, because the writing thread has no exchange."""
        exchange = current_exchange()
        if exchange is not None:
            record.request_id = exchange.request_id
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        """Queue the record, or drop and count it."""
        if self.queue.qsize() >= _QUEUE_LINES:
            self._num_dropped += 1
            return
        if self._num_dropped:
            record.msg, record.args = f"({self._num_dropped} lines dropped) {record.getMessage()}", ()
        self.queue.put(record)
        self._num_dropped = 0


class _Stream(logging.StreamHandler[TextIO]):
    """Writes lines. A line for a closed stream is lost silently."""

    def __init__(self, stream: TextIO, formatter: logging.Formatter, *, takes_requests: bool) -> None:
        super().__init__(stream)
        self.setFormatter(formatter)
        self.addFilter(lambda record: (record.name in (ACCESS, REQUESTS)) is takes_requests)

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore errors of a closed stream."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


@contextlib.contextmanager
def logging_to(
    options: LogOptions, *, out: TextIO | None = None, error: TextIO | None = None
) -> Iterator[None]:
    """Set up the loggers for the duration of the block, and write the queued lines at its end.

    Args:
        out: Stream for the access log, or None for standard output.
        error: Stream for other lines, or None for standard error.
    """
    formatter = JsonFormatter() if options.format == "json" else TextFormatter()
    lines: queue.SimpleQueue[Any] = queue.SimpleQueue()  # in C
    handler = _Queue(lines)
    listener = QueueListener(
        lines,
        _Stream(sys.stdout if out is None else out, formatter, takes_requests=True),
        _Stream(sys.stderr if error is None else error, formatter, takes_requests=False),
    )
    level = logging.getLevelName(options.level.upper())
    least = max(level, logging.WARNING)
    loggers = {"wideep": level, "uvicorn": least, "asyncio": least, "opentelemetry": least}
    for name, lowest in loggers.items():
        logger = logging.getLogger(name)
        logger.setLevel(lowest)
        logger.propagate = False
        logger.addHandler(handler)
    listener.start()
    try:
        yield
    finally:
        for name in loggers:
            logging.getLogger(name).removeHandler(handler)
        ending = threading.Thread(target=listener.stop, name="logs", daemon=True)
        ending.start()
        ending.join(_END_S)  # if the streams are not read, queued lines are lost


class AccessLog:
    """Writes one line per exchange: client, request, status, duration and tokens."""

    def __init__(self, quiet_paths: Sequence[str]) -> None:
        self._quiet = frozenset(quiet_paths)
        self._log = logging.getLogger(ACCESS)

    def note(self, exchange: HttpExchange) -> None:
        """Log a finished exchange."""
        if exchange.path in self._quiet or exchange.handler in self._quiet:
            return
        tokens, fields = "", {}
        if exchange.answers:
            fields = {"tokens_in": exchange.num_prompt_tokens, "tokens_out": exchange.num_output_tokens}
            tokens = f", {fields['tokens_in']} tokens in, {fields['tokens_out']} out"
        failure = exchange.failure
        self._log.info(
            '%s "%s %s" %d, %.3f s%s%s',
            *(exchange.client, exchange.method, exchange.path, exchange.status, exchange.duration_s, tokens),
            f", failed: {failure}" if failure else "",
            extra={
                FIELDS: {
                    "client": exchange.client,
                    "method": exchange.method,
                    "path": exchange.path,
                    "status": exchange.status,
                    "duration_s": round(exchange.duration_s, 6),
                    **fields,
                    **({"error": failure} if failure else {}),
                }
            },
        )


class RequestLog:
    """Logs requests to ranks including their prompts, with --log-requests only."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._log = logging.getLogger(REQUESTS)

    def note(self, ask: Ask) -> None:
        """Log one choice of a request."""
        request = ask.request
        prompt = self._decoder.decode(list(request.prompt_ids), skip_special_tokens=False)
        params = _said(request.params)
        self._log.info(
            "request %s with %s: %r",
            *(request.request_id, params, prompt),
            extra={FIELDS: {"id": request.request_id, "prompt": prompt, "params": params}},
        )


def _said(params: SamplingParams) -> dict[str, object]:
    """Return the parameters that differ from their defaults."""
    plain = SamplingParams(max_tokens=params.max_tokens)
    shown = {name: value for name, value in vars(params).items() if value != getattr(plain, name)}
    return {"max_tokens": params.max_tokens, **{name: _plain(value) for name, value in shown.items()}}


def _plain(value: object) -> object:
    return value if isinstance(value, (int, float, str, bool)) else repr(value)
