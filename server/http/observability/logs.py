"""The front's logs: one line per record, as text or JSON, with the exchange's id; never a prompt unless asked for.

The access log goes to standard output, everything else to standard error, as uvicorn has it. Lines are written by a
thread: a terminal that is not read (`wideep serve | less`) must not stop the event loop, so lines that find the queue
full are dropped; the next line that does not says how many. uvicorn's own records take the same way.
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
FRONT = "wideep.front"  # why it ends: said as all processes of a service say it
_QUEUE_LINES = 10_000
# Control characters (C0, DEL, C1) and Unicode's ends of lines, as escapes.
_CONTROLS = {
    **{code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))},
    0x0A: "\\n",
    0x0D: "\\r",
    0x09: "\\t",
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}
_END_S = 0.5  # for what is queued when the block ends; the supervisor does not wait much longer


class TextFormatter(logging.Formatter):
    """Time, level, message, and the exchange's id where there is one; what a process says of itself by its name."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; a traceback follows on lines of its own."""
        request_id = "".join(f" [{value}]" for value in id_of(record).values())
        message = record.getMessage().translate(
            _CONTROLS
        )  # a client must not write lines, or to the terminal
        name = "wideep front: " if record.name == FRONT else ""
        line = f"{stamp(record.created, record.levelname)} {name}{message}{request_id}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _Queue(QueueHandler):
    """Hands records to the writing thread, with the id of the exchange that the task answers."""

    queue: "queue.SimpleQueue[Any]"
    _num_dropped = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Note the exchange here: the thread that writes answers none."""
        exchange = current_exchange()
        if exchange is not None:
            record.request_id = exchange.request_id
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        """Queue, or drop and count."""
        if self.queue.qsize() >= _QUEUE_LINES:
            self._num_dropped += 1
            return
        if self._num_dropped:
            record.msg, record.args = f"({self._num_dropped} lines dropped) {record.getMessage()}", ()
        self.queue.put(record)
        self._num_dropped = 0


class _Stream(logging.StreamHandler[TextIO]):
    """Writes lines; one that nobody takes (a closed terminal) is lost without a word."""

    def __init__(self, stream: TextIO, formatter: logging.Formatter, *, takes_requests: bool) -> None:
        super().__init__(stream)
        self.setFormatter(formatter)
        self.addFilter(lambda record: (record.name in (ACCESS, REQUESTS)) is takes_requests)

    def handleError(self, record: logging.LogRecord) -> None:
        """Say nothing of a stream that is gone."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


@contextlib.contextmanager
def logging_to(
    options: LogOptions, *, out: TextIO | None = None, error: TextIO | None = None
) -> Iterator[None]:
    """Set up the loggers for the time of the block; at its end, what is queued gets written.

    Args:
        out: takes the access log; None is standard output.
        error: takes the rest; None is standard error.
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
        ending.join(_END_S)  # where nobody reads, what is queued is lost


class AccessLog:
    """A line per answered exchange: what was asked by whom, how it ended, how long it took, how many tokens."""

    def __init__(self, quiet_paths: Sequence[str]) -> None:
        self._quiet = frozenset(quiet_paths)
        self._log = logging.getLogger(ACCESS)

    def note(self, exchange: HttpExchange) -> None:
        """Log an exchange that has ended."""
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
    """What ranks are asked, prompts included: only for those who say --log-requests."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._log = logging.getLogger(REQUESTS)

    def note(self, ask: Ask) -> None:
        """Log one choice of a request."""
        request = ask.request
        prompt = self._decoder.decode(list(request.prompt_ids), skip_special_tokens=False)
        params = _said(request.params)
        self._log.info(
            "%s asks with %s: %r",
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
