"""`wideep chat`: chat with a served model in the terminal; answers are shown while they are generated.

This is an ordinary client of the HTTP endpoint, over httpx, independent of the server's code. Ctrl-C stops an answer (which
cancels the request), Ctrl-D or /quit leaves, /reset clears the conversation. Reasoning is shown dimmed and is not added
to the conversation, as in chat templates. For several lines, end a line with a backslash, or put three quotes before and
after the text. Control characters in an answer are escaped, not sent to the terminal.
"""

import argparse
import contextlib
import importlib
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, NamedTuple

import httpx

from server.http.client import ServiceClient, ServiceError, api_key_of, complaint_of
from server.machine.lines import printable

_HELP = (
    'Ctrl-C stops an answer, /reset starts over, /quit or Ctrl-D leaves. For several lines, end a line with \\ or put """ '
    "around them."
)
_QUOTES = '"""'
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"  # ECMA-48: faint, and reset


class ChatPiece(NamedTuple):
    """A part of an answer."""

    text: str
    is_reasoning: bool = False


class AnswerSpeed(NamedTuple):
    """The speed of an answer."""

    num_tokens: int
    first_s: float  # time to the first token
    rest_s: float  # time from the first to the last token

    def in_words(self) -> str:
        """Return the line below an answer."""
        tokens = f"{self.num_tokens} token{'' if self.num_tokens == 1 else 's'}"
        rate = (
            f", {(self.num_tokens - 1) / self.rest_s:.1f} tokens/s"
            if self.num_tokens > 1 and self.rest_s
            else ""
        )
        return f"({tokens}{rate}, first token after {self.first_s:.2f} s)"


class ChatClient:
    """A conversation with a service."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        model: str | None = None,
        system: str | None = None,
        temperature: float | None = None,
        http: httpx.Client | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare without a request; `open` contacts the service.

        Args:
            url: URL of the service, with or without /v1.
            model: Name of the model. None means the first served one.
            system: System prompt of the conversation.
            temperature: Sampling temperature. None means the service's default.
            http: Replacement for the connection, for tests.
        """
        self._service = ServiceClient(url, api_key, answer_timeout_s=None, http=http)
        self._clock = clock
        self.url = self._service.url
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._extra = {} if temperature is None else {"temperature": temperature}
        self.messages: list[dict[str, str]] = [*self._opening]
        self.model = model or ""
        self.speed: AnswerSpeed | None = None  # of the last complete answer

    def open(self) -> None:
        """Find the name of the served model, or check that the requested one is served.

        Raises:
            ServiceError: No service answers, it refuses the request, or it does not serve the model.
        """
        self.model = self._service.served_model(self.model)

    def close(self) -> None:
        """Close the connection."""
        self._service.close()

    def reset(self) -> None:
        """Clear the conversation, except for the system prompt."""
        self.messages = [*self._opening]

    def ask(self, question: str) -> Generator[ChatPiece, None, None]:
        """Yield the answer as it arrives, and add question and answer to the conversation; `speed` is set at the end.

        A partial answer before an interruption is also added; a question without any answer is not.

        Raises:
            ServiceError: The service refused the request or was lost.
        """
        self.messages.append({"role": "user", "content": question})
        answer: list[str] = []
        self.speed = None
        try:
            with contextlib.closing(self._stream()) as pieces:
                for piece in pieces:
                    if not piece.is_reasoning:
                        answer.append(piece.text)
                    yield piece
        finally:
            if answer:
                self.messages.append({"role": "assistant", "content": "".join(answer)})
            else:
                self.messages.pop()

    def _stream(self) -> Generator[ChatPiece, None, None]:
        wanted = {"stream": True, "stream_options": {"include_usage": True}}
        body = {"model": self.model, "messages": self.messages, **wanted, **self._extra}
        begun_s, first_s = self._clock(), None
        with contextlib.closing(self._service.events("/v1/chat/completions", body)) as chunks:
            for chunk in chunks:
                for piece in _pieces(chunk):
                    first_s = first_s or self._clock()
                    yield piece
                if first_s is not None and (usage := chunk.get("usage")):
                    self.speed = AnswerSpeed(
                        usage["completion_tokens"], first_s - begun_s, self._clock() - first_s
                    )


def run_chat(args: argparse.Namespace, *, environment: Mapping[str, str] = os.environ) -> int:
    """Hold a conversation on this terminal and return the exit status."""
    try:
        client = ChatClient(
            args.url,
            api_key_of(environment, [args.api_key] if args.api_key else []),
            model=args.model,
            system=args.system,
            temperature=args.temperature,
        )
    except ServiceError as error:
        print(f"wideep chat: {error}", file=sys.stderr)
        return 1
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # history and editing for input(), if Python has it
    try:
        client.open()
        print(f"Chatting with {printable(client.model)} at {client.url}. {_HELP}")
        _converse(client)
    except ServiceError as error:
        print(f"wideep chat: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print()
    finally:
        client.close()
    return 0


def _converse(client: ChatClient) -> None:
    while True:
        try:
            question = _read_question().strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print(f"\n{_HELP}", end="")
            continue
        except UnicodeDecodeError as error:
            print(f"(cannot read the input as text: {error.reason}; try again)")
            continue
        if question in ("/quit", "/exit"):
            return
        if question == "/help":
            print(_HELP)
        elif question == "/reset":
            client.reset()
            print("(a new conversation)")
        elif question.startswith("/") and "\n" not in question:
            print(f"{question} is not a command. {_HELP}")
        elif question:
            _show_answer(client, question)


def _read_question() -> str:
    """Read one line, or several: while lines end with a backslash, or up to the closing quotes."""
    line = input("\n> ")
    if line.lstrip().startswith(_QUOTES):
        return _read_quoted(line.lstrip().removeprefix(_QUOTES))
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1].removesuffix("\\")
        lines.append(input("... "))
    return "\n".join(lines)


def _read_quoted(line: str) -> str:
    lines = [line]
    while not lines[-1].rstrip().endswith(_QUOTES):
        lines.append(input("... "))
    lines[-1] = lines[-1].rstrip().removesuffix(_QUOTES)
    return "\n".join(lines)


def _show_answer(client: ChatClient, question: str) -> None:
    """Print an answer as it arrives; Ctrl-C closes its connection, which cancels the request."""
    answer = client.ask(question)
    was_reasoning = False
    try:
        for piece in answer:
            if was_reasoning and not piece.is_reasoning:
                print("\n")
            was_reasoning = piece.is_reasoning
            text = printable(piece.text)
            print(_dim(text) if piece.is_reasoning else text, end="", flush=True)
        print()
        if client.speed is not None:
            print(_dim(client.speed.in_words()))
    except KeyboardInterrupt:
        print("\n(stopped)")
    except ServiceError as error:
        print(f"\nwideep chat: {error}", file=sys.stderr)
    finally:
        answer.close()


def _dim(text: str) -> str:
    """Make text faint if stdout is a terminal."""
    return f"{_DIM}{text}{_PLAIN}" if sys.stdout.isatty() else text


def _pieces(chunk: dict[str, Any]) -> Iterator[ChatPiece]:
    """Yield a chunk's text, reasoning first."""
    if "error" in chunk:
        raise ServiceError(complaint_of(chunk))
    for choice in chunk.get("choices", ()):
        delta = choice.get("delta", {})
        if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
            yield ChatPiece(reasoning, is_reasoning=True)
        if text := delta.get("content"):
            yield ChatPiece(text)
