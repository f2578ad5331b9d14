"""`wideep chat` against a real front."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import httpx
import pytest

from server.cli import build_parser
from server.clients.chat import AnswerSpeed, ChatClient, ChatPiece, run_chat
from server.http.client import ServiceClient, ServiceError
from tests.support.service.front_process import TIMEOUT_S, FrontProcess
from tests.support.service.real_service import REPOSITORY

CLIENT = httpx.Client  # stays available while a test replaces httpx.Client


def type_in(monkeypatch: pytest.MonkeyPatch, lines: Iterable[str | type[BaseException]]) -> None:
    """Let input() return these lines or raise these exceptions, and finally signal Ctrl-D."""
    left: Iterator[str | type[BaseException]] = iter([*lines, EOFError])

    def fake_input(_prompt: str = "") -> str:
        line = next(left)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", fake_input)


def chat(*words: str, environment: Mapping[str, str] | None = None) -> int:
    """Run `wideep chat` in this process and return its exit status."""
    return run_chat(build_parser().parse_args(["chat", *words]), environment=environment or {})


def test_a_conversation_streams_and_is_remembered_until_reset(
    front: FrontProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    front.script("third", "three")
    front.script("second", "two 😀")
    front.script("first", "one")
    type_in(
        monkeypatch, ["first", "second", "", "/reset", "third", "/what", KeyboardInterrupt, "/quit", "never"]
    )
    assert chat(front.url) == 0
    said = capsys.readouterr().out
    assert "Chatting with tiny" in said and "one\n" in said and "two 😀\n" in said and "three\n" in said
    assert "/what is not a command" in said
    prompts = [front.decode(r.prompt_ids) for rank in front.ranks for r in rank.requests]
    [second] = [prompt for prompt in prompts if "second" in prompt]
    assert "first<|end|>" in second and "assistant\none<|end|>" in second
    [third] = [prompt for prompt in prompts if "third" in prompt]
    assert "first" not in third


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (
            "http://127.0.0.1:1",
            "no service answers at http://127.0.0.1:1 ([Errno 111] Connection refused). Start one with: wideep serve",
        ),
        ("ftp://x", "is not a URL"),
    ],
)
def test_no_service_is_a_sentence(url: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat(url) == 1
    assert words in capsys.readouterr().err


def test_a_refusal_is_shown_in_the_service_s_words(front: FrontProcess) -> None:
    client = ChatClient(front.url.removeprefix("http://") + "/v1/")
    client.open()
    with pytest.raises(ServiceError, match="maximum context length"):
        list(client.ask("x " * 5000))
    assert client.messages == [], "a question without an answer is not remembered"
    client.close()


def test_flags_reach_the_service_and_questions_may_have_several_lines(
    front: FrontProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    front.script("t-lines", "fine")
    type_in(monkeypatch, ["t-lines \\", "and more", "/reset", '"""t-quoted', "", '/inside"""'])
    flags = ("--model", "org/tiny-alias", "--system", "You are t-system.", "--temperature", "0.25")
    assert chat(front.url, *flags) == 0
    said = capsys.readouterr().out
    assert "Chatting with org/tiny-alias" in said
    assert re.search(r"fine\n\(\d+ tokens?, .*first token after \d+\.\d\d s\)", said), "the speed is shown"
    first, second = front.asked("t-lines"), front.asked("t-quoted")
    assert first.params.temperature == second.params.temperature == 0.25
    for asked, question in ((first, "t-lines \nand more<|end|>"), (second, "t-quoted\n\n/inside<|end|>")):
        prompt = front.decode(asked.prompt_ids)
        assert "You are t-system.<|end|>" in prompt and question in prompt, prompt


def test_a_model_that_is_not_served_is_named_with_those_that_are(
    front: FrontProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(front.url, "--model", "gpt-7") == 1
    assert f"--model is 'gpt-7'; {front.url} serves tiny, org/tiny-alias" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["hot", "-1", "2.5", "nan"])
def test_a_temperature_that_makes_no_sense_is_refused(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["chat", f"--temperature={value}"])
    assert f"'{value}' must be a number from 0 to 2" in capsys.readouterr().err


def spoken(chunks: Iterable[dict[str, Any]]) -> httpx.Client:
    """Return a client of a service that answers every chat with these chunks."""
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        return httpx.Response(200, content=body)

    return CLIENT(transport=httpx.MockTransport(answer))


def delta(**fields: str) -> dict[str, Any]:
    return {"choices": [{"delta": fields}]}


def test_reasoning_is_told_from_the_answer_and_not_remembered() -> None:
    usage = {"choices": [], "usage": {"completion_tokens": 5}}
    chunks = [delta(role="assistant"), delta(reasoning_content="Hm."), delta(content="Yes."), usage]
    ticks = iter(range(100))
    client = ChatClient("http://x", http=spoken(chunks), clock=lambda: float(next(ticks)))
    client.open()
    assert list(client.ask("?")) == [ChatPiece("Hm.", is_reasoning=True), ChatPiece("Yes.")]
    assert client.messages[-1] == {"role": "assistant", "content": "Yes."}
    assert client.speed == AnswerSpeed(num_tokens=5, first_s=1.0, rest_s=1.0)
    assert client.speed.in_words() == "(5 tokens, 4.0 tokens/s, first token after 1.00 s)"


def test_reasoning_is_dimmed_on_a_terminal(
    front: FrontProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chunks = [delta(reasoning_content="Hm."), delta(content="Yes.")]
    monkeypatch.setattr("httpx.Client", lambda **_: spoken(chunks))
    for is_terminal, said in ((True, "\x1b[2mHm.\x1b[0m\n\nYes.\n"), (False, "Hm.\n\nYes.\n")):
        type_in(monkeypatch, ["?"])
        monkeypatch.setattr("sys.stdout.isatty", lambda shown=is_terminal: shown)
        assert chat("http://x") == 0
        assert said in capsys.readouterr().out


def test_what_a_server_says_does_not_act_on_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Covers a clipboard escape, a title, a cursor move and C1's CSI. All are shown escaped in answers, reasoning and errors."""
    hostile = "a\tb\n\x1b]52;c;ZXZpbA==\x07\x1b[2J\r\x9b31m\x7f\x00\u00e9"
    shown = "a\tb\n\\x1b]52;c;ZXZpbA==\\x07\\x1b[2J\\x0d\\x9b31m\\x7f\\x00\u00e9"
    for chunk, stream in (
        (delta(content=hostile), "out"),
        (delta(reasoning_content=hostile), "out"),
        ({"error": {"message": hostile}}, "err"),
    ):
        monkeypatch.setattr("httpx.Client", lambda chunk=chunk, **_: spoken([chunk]))
        type_in(monkeypatch, ["?"])
        assert chat("http://x") == 0
        said = capsys.readouterr()
        assert shown in getattr(said, stream)
        assert not set(said.out + said.err) & set("\x1b\x07\r\x9b\x7f\x00")


def test_a_conversation_goes_on_with_what_the_model_wrote() -> None:
    client = ChatClient("http://x", http=spoken([delta(content="\x1b[2J")]))
    client.open()
    list(client.ask("?"))
    assert client.messages[-1]["content"] == "\x1b[2J"


@pytest.mark.parametrize("status", [400, 401, 500])
def test_a_refusal_s_words_do_not_act_on_the_terminal(status: int) -> None:
    for body in (json.dumps({"error": {"message": "\x1b[2Jno"}}), "\x1b[2Jno"):
        transport = httpx.MockTransport(lambda _, body=body: httpx.Response(status, content=body))
        with pytest.raises(ServiceError, match=r"\\x1b\[2Jno"):
            ServiceClient("http://x", http=CLIENT(transport=transport)).get_json("/v1/models")


@pytest.mark.parametrize(
    ("environment", "words", "sent"),
    [
        ({"OPENAI_API_KEY": "theirs"}, (), "theirs"),
        ({"OPENAI_API_KEY": "theirs", "WIDEEP_API_KEY": "ours second"}, (), "ours"),
        ({"WIDEEP_API_KEY": "ours"}, ("--api-key", "given"), "given"),
    ],
)
def test_a_key_is_the_flag_s_or_the_environment_s(
    monkeypatch: pytest.MonkeyPatch, environment: Mapping[str, str], words: tuple[str, ...], sent: str
) -> None:
    seen: list[Any] = []

    def note(*, headers: Mapping[str, str], **_: object) -> httpx.Client:
        seen.append(headers)
        return spoken([])

    monkeypatch.setattr("httpx.Client", note)
    type_in(monkeypatch, [])
    assert chat("http://x", *words, environment=environment) == 0
    assert seen == [{"Authorization": f"Bearer {sent}"}]


def test_ctrl_c_stops_the_answer_at_the_rank_and_the_talk_goes_on(front: FrontProcess) -> None:
    never = threading.Event()
    front.script("t-after", "still here")
    front.script("t-endless", "begun and more", gates={6: never})
    chat = subprocess.Popen(
        [sys.executable, "-u", "-P", str(REPOSITORY / "server" / "__main__.py"), "chat", front.url],
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
