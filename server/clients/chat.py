"""`wideep chat`: talk to a served model in the terminal, the answer appearing as it is generated.

An ordinary client of the HTTP endpoint, over httpx; it knows nothing of the server's inside. Ctrl-C stops an answer
(the server hears of it and frees its place), Ctrl-D or /quit leaves, /reset forgets the conversation.
"""

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Generator, Iterator
from typing import Any

import httpx

from server.clients.connection import Connection, ServiceError

_HELP = "Ctrl-C stops an answer, /reset starts over, /quit or Ctrl-D leaves."


class ChatClient:
    """One conversation with one service."""

    def __init__(self, url: str, api_key: str | None = None, *, http: httpx.Client | None = None) -> None:
        """Args: url is the service's, with or without /v1; http replaces the connection, for tests."""
        self._service = Connection(url, api_key, answer_timeout_s=None, http=http)
        self.url = self._service.url
        self.messages: list[dict[str, str]] = []
        self.model = ""

    def open(self) -> None:
        """Find the served model's name.

        Raises:
            ServiceError: no service there, or it refuses.
        """
        try:
            self.model = self._service.get_json("/v1/models")["data"][0]["id"]
        except (LookupError, TypeError) as error:
            raise ServiceError(f"{self.url} is not an OpenAI-compatible service") from error

    def close(self) -> None:
        """Disconnect."""
        self._service.close()

    def reset(self) -> None:
        """Forget the conversation."""
        self.messages.clear()

    def ask(self, question: str) -> Generator[str, None, None]:
        """Yield the answer's text as it comes, and remember both.

        What came before an interruption is remembered too; a question without any answer is not.

        Raises:
            ServiceError: the service refused or was lost.
        """
        self.messages.append({"role": "user", "content": question})
        answer: list[str] = []
        try:
            with contextlib.closing(self._stream()) as texts:
                for text in texts:
                    answer.append(text)
                    yield text
        finally:
            if answer:
                self.messages.append({"role": "assistant", "content": "".join(answer)})
            else:
                self.messages.pop()

    def _stream(self) -> Generator[str, None, None]:
        body = {"model": self.model, "messages": self.messages, "stream": True}
        with self._service.stream("/v1/chat/completions", body) as response:
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield from _texts(json.loads(line.removeprefix("data: ")))


def run_chat(url: str) -> int:
    """Hold a conversation on this terminal; returns the exit status."""
    client = ChatClient(url, os.environ.get("WIDEEP_API_KEY") or os.environ.get("OPENAI_API_KEY"))
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # history and editing for input(), where Python has it
    try:
        client.open()
        print(f"Talking to {client.model} at {client.url}. {_HELP}")
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
            question = input("\n> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print(f"\n{_HELP}", end="")
            continue
        if question in ("/quit", "/exit"):
            return
        if question == "/reset":
            client.reset()
            print("(a new conversation)")
        elif question.startswith("/"):
            print(f"{question} is no command. {_HELP}")
        elif question:
            _show_answer(client, question)


def _show_answer(client: ChatClient, question: str) -> None:
    """Print an answer as it comes; Ctrl-C ends it and hangs up, which frees its place in the service."""
    answer = client.ask(question)
    try:
        for text in answer:
            print(text, end="", flush=True)
        print()
    except KeyboardInterrupt:
        print("\n(stopped)")
    except ServiceError as error:
        print(f"\nwideep chat: {error}", file=sys.stderr)
    finally:
        answer.close()


def _texts(chunk: dict[str, Any]) -> Iterator[str]:
    """Yield a chunk's text."""
    if "error" in chunk:
        raise ServiceError(chunk["error"].get("message", "the answer failed"))
    for choice in chunk.get("choices", ()):
        text = choice.get("delta", {}).get("content")
        if text:
            yield text
