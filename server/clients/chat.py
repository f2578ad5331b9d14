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
from urllib.parse import urlsplit

import httpx

CONNECT_TIMEOUT_S = 5.0
_HELP = "Ctrl-C stops an answer, /reset starts over, /quit or Ctrl-D leaves."


class ChatError(RuntimeError):
    """The service could not be reached or refused; the message says which and what to do."""


class ChatClient:
    """One conversation with one service."""

    def __init__(self, url: str, api_key: str | None = None, *, http: httpx.Client | None = None) -> None:
        """Args: url is the service's, with or without /v1; http replaces the connection, for tests."""
        self.url = url.rstrip("/").removesuffix("/v1")
        if "://" not in self.url:
            self.url = f"http://{self.url}"
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # Reading has no time-out: an answer may wait in the service's queue.
        self._http = http or httpx.Client(
            headers=headers, timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
        )
        self.messages: list[dict[str, str]] = []
        self.model = ""

    def open(self) -> None:
        """Find the served model's name.

        Raises:
            ChatError: no service there, or it refuses.
        """
        with self._explaining():
            response = self._http.get(f"{self.url}/v1/models")
            _check(response)
            try:
                self.model = response.json()["data"][0]["id"]
            except (ValueError, LookupError, TypeError) as error:
                raise ChatError(f"{self.url} is not an OpenAI-compatible service") from error

    def close(self) -> None:
        """Disconnect."""
        self._http.close()

    def reset(self) -> None:
        """Forget the conversation."""
        self.messages.clear()

    def ask(self, question: str) -> Generator[str, None, None]:
        """Yield the answer's text as it comes, and remember both.

        What came before an interruption is remembered too; a question without any answer is not.

        Raises:
            ChatError: the service refused or was lost.
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
        with (
            self._explaining(),
            self._http.stream("POST", f"{self.url}/v1/chat/completions", json=body) as response,
        ):
            if response.is_error:
                response.read()
            _check(response)
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield from _texts(json.loads(line.removeprefix("data: ")))

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Turn a broken connection into words."""
        try:
            yield
        except httpx.ConnectError as error:
            raise ChatError(f"no service answers at {self.url}. Start one with: wideep serve") from error
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise ChatError(
                f"{self.url} is not a URL of a service ({error}); try http://127.0.0.1:8000"
            ) from error
        except httpx.HTTPError as error:
            raise ChatError(f"lost the connection to {self.url}: {error}") from error


def run_chat(url: str) -> int:
    """Hold a conversation on this terminal; returns the exit status."""
    client = ChatClient(url, os.environ.get("WIDEEP_API_KEY") or os.environ.get("OPENAI_API_KEY"))
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # history and editing for input(), where Python has it
    try:
        client.open()
        print(f"Talking to {client.model} at {client.url}. {_HELP}")
        _converse(client)
    except ChatError as error:
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
    except ChatError as error:
        print(f"\nwideep chat: {error}", file=sys.stderr)
    finally:
        answer.close()


def _is_local(url: str) -> bool:
    return urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")


def _texts(chunk: dict[str, Any]) -> Iterator[str]:
    """Yield a chunk's text."""
    if "error" in chunk:
        raise ChatError(chunk["error"].get("message", "the answer failed"))
    for choice in chunk.get("choices", ()):
        text = choice.get("delta", {}).get("content")
        if text:
            yield text


def _check(response: httpx.Response) -> None:
    """Raise the service's own words for a refusal."""
    if not response.is_error:
        return
    try:
        message = response.json()["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = response.text[:200] or response.reason_phrase
    if response.status_code == 401:
        message += " Set WIDEEP_API_KEY."
    raise ChatError(f"the service refused ({response.status_code}): {message}")
