"""`wideep chat` against a real front."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator

import pytest

from server.clients.chat import ChatClient, run_chat
from server.clients.connection import ServiceError
from tests.support.service.front_process import ROOT, TIMEOUT_S, FrontProcess


def type_in(monkeypatch: pytest.MonkeyPatch, lines: Iterable[str | type[BaseException]]) -> None:
    """Let input() return these, or raise them, then Ctrl-D."""
    left: Iterator[str | type[BaseException]] = iter([*lines, EOFError])

    def fake_input(_prompt: str = "") -> str:
        line = next(left)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", fake_input)


def test_a_conversation_streams_and_is_remembered_until_reset(
    front: FrontProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    front.script("third", "three")
    front.script("second", "two 😀")
    front.script("first", "one")
    type_in(
        monkeypatch, ["first", "second", "", "/reset", "third", "/what", KeyboardInterrupt, "/quit", "never"]
    )
    assert run_chat(front.url) == 0
    said = capsys.readouterr().out
    assert "Talking to tiny" in said and "one\n" in said and "two 😀\n" in said and "three\n" in said
    assert "/what is no command" in said
    prompts = [front.decode(r.prompt_ids) for rank in front.ranks for r in rank.requests]
    [second] = [prompt for prompt in prompts if "second" in prompt]
    assert "first<|end|>" in second and "assistant\none<|end|>" in second
    [third] = [prompt for prompt in prompts if "third" in prompt]
    assert "first" not in third


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1:1", "no service answers at http://127.0.0.1:1. Start one with: wideep serve"),
        ("ftp://x", "is not a URL"),
    ],
)
def test_no_service_is_a_sentence(url: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_chat(url) == 1
    assert words in capsys.readouterr().err


def test_a_refusal_is_shown_in_the_service_s_words(front: FrontProcess) -> None:
    client = ChatClient(front.url.removeprefix("http://") + "/v1/")
    client.open()
    with pytest.raises(ServiceError, match="maximum context length"):
        list(client.ask("x " * 5000))
    assert client.messages == [], "a question without an answer is not remembered"
    client.close()


def test_ctrl_c_stops_the_answer_at_the_rank_and_the_talk_goes_on(front: FrontProcess) -> None:
    never = threading.Event()
    front.script("t-after", "still here")
    front.script("t-endless", "begun and more", gates={6: never})
    chat = subprocess.Popen(
        [sys.executable, "-u", "-P", str(ROOT / "server" / "__main__.py"), "chat", front.url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONIOENCODING": "utf-8"},
    )
    assert chat.stdin is not None and chat.stdout is not None
    try:
        chat.stdin.write("t-endless\n")
        chat.stdin.flush()
        seen = ""
        while "begun" not in seen:
            seen += chat.stdout.read(1)
        chat.send_signal(signal.SIGINT)
        rank = front.served("t-endless")
        rank.wait_for(lambda told: rank.requests[-1].request_id in told.aborted)
        never.set()
        chat.stdin.write("t-after\n")
        chat.stdin.close()  # Ctrl-D
        rest = chat.stdout.read()
        assert chat.wait(TIMEOUT_S) == 0
        assert "(stopped)" in rest and "still here" in rest
    finally:
        chat.kill()
        chat.wait()
        chat.stdout.close()
