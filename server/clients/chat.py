"""`wideep chat`: talk to a served model in the terminal, the answer appearing as it is generated.

An ordinary client of the HTTP endpoint, over httpx; it knows nothing of the server's inside. Ctrl-C stops an answer
(the server hears of it and frees its place), Ctrl-D or /quit leaves, /reset forgets the conversation. What a model reasons is
shown dimmed, and is no part of the conversation, as chat templates have it. Questions of several lines: a backslash at a line's
end, or three quotes before and after. Control characters of an answer are shown, not sent to the terminal.
"""

import argparse
import contextlib
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, NamedTuple

import httpx

from server.clients.connection import Connection, ServiceError, api_key_of
from server.lines import printable

_HELP = (
    'Ctrl-C stops an answer, /reset starts over, /quit or Ctrl-D leaves; \\ at a line\'s end or """ around lines: more '
    "than one."
)
_QUOTES = '"""'
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"  # ECMA-48: faint, and as before


class ChatPiece(NamedTuple):
    """Some of an answer."""

    text: str
    is_reasoning: bool = False


class Speed(NamedTuple):
    """How fast an answer came."""

    num_tokens: int
    first_s: float  # until its first token
    rest_s: float  # from there to its last

    def in_words(self) -> str:
        """Return the line below an answer."""
        tokens = f"{self.num_tokens} token{'' if self.num_tokens == 1 else 's'}"
        rate = (
            f", {(self.num_tokens - 1) / self.rest_s:.1f} tokens/s"
            if self.num_tokens > 1 and self.rest_s
            else ""
        )
        return f"({tokens}{rate}, the first after {self.first_s:.2f} s)"


class ChatClient:
    """One conversation with one service."""

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
        """Prepare; `open` asks the service.

        Args:
            url: the service's, with or without /v1.
            model: None: the first that is served.
            system: what the conversation begins with.
            temperature: None: the service's default.
            http: replaces the connection, for tests.
        """
        self._service = Connection(url, api_key, answer_timeout_s=None, http=http)
        self._clock = clock
        self.url = self._service.url
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._extra = {} if temperature is None else {"temperature": temperature}
        self.messages: list[dict[str, str]] = [*self._opening]
        self.model = model or ""
        self.speed: Speed | None = None  # of the last answer that came to its end

    def open(self) -> None:
        """Find the served model's name, or check that the wanted one is served.

        Raises:
            ServiceError: no service there, it refuses, or it serves no such model.
        """
        self.model = self._service.served_model(self.model)

    def close(self) -> None:
        """Disconnect."""
        self._service.close()

    def reset(self) -> None:
        """Forget the conversation, but for what the system is."""
        self.messages = [*self._opening]

    def ask(self, question: str) -> Generator[ChatPiece, None, None]:
        """Yield the answer as it comes, and remember question and answer; `speed` is set at its end.

        What came before an interruption is remembered too; a question without any answer is not.

        Raises:
            ServiceError: the service refused or was lost.
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
        with self._service.stream("/v1/chat/completions", body) as response:
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                for piece in _pieces(chunk):
                    first_s = first_s or self._clock()
                    yield piece
                if first_s is not None and (usage := chunk.get("usage")):
                    self.speed = Speed(usage["completion_tokens"], first_s - begun_s, self._clock() - first_s)


def run_chat(args: argparse.Namespace, *, environment: Mapping[str, str] = os.environ) -> int:
    """Hold a conversation on this terminal; returns the exit status."""
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
        importlib.import_module("readline")  # history and editing for input(), where Python has it
    try:
        client.open()
        print(f"Talking to {printable(client.model)} at {client.url}. {_HELP}")
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
            print(f"(that was no text: {error.reason}; say it again)")
            continue
        if question in ("/quit", "/exit"):
            return
        if question == "/help":
            print(_HELP)
        elif question == "/reset":
            client.reset()
            print("(a new conversation)")
        elif question.startswith("/") and "\n" not in question:
            print(f"{question} is no command. {_HELP}")
        elif question:
            _show_answer(client, question)


def _read_question() -> str:
    """Read a line, or several: while they end with a backslash, or up to the quotes that close."""
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
    """Print an answer as it comes; Ctrl-C ends it and hangs up, which frees its place in the service."""
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
    """Make text faint, where it is read on a terminal."""
    return f"{_DIM}{text}{_PLAIN}" if sys.stdout.isatty() else text


def _pieces(chunk: dict[str, Any]) -> Iterator[ChatPiece]:
    """Yield a chunk's text, reasoning first."""
    if "error" in chunk:
        raise ServiceError(chunk["error"].get("message", "the answer failed"))
    for choice in chunk.get("choices", ()):
        delta = choice.get("delta", {})
        if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
            yield ChatPiece(reasoning, is_reasoning=True)
        if text := delta.get("content"):
            yield ChatPiece(text)
