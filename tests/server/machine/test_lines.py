"""Output for people: text, or one JSON object per line."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from server.machine.lines import FORMAT_VARIABLE, TIMES_VARIABLE, printable, say

ROOT = Path(__file__).resolve().parents[3]


def test_what_a_terminal_would_act_on_is_shown_and_all_else_stays() -> None:
    controls = [chr(code) for code in (*range(0x20), *range(0x7F, 0xA0))]
    acted_on = [each for each in controls if printable(each) == each]
    assert acted_on == ["\t", "\n"]
    text = "a\u00e9\u4f60\U0001f600 ~\u00a0"
    assert printable(text + "\x1b[31m") == text + "\\x1b[31m"


def test_a_closed_terminal_does_not_break_the_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w", buffering=1) as nobody:
        monkeypatch.setattr(sys, "stdout", nobody)
        say("are you there?")
        monkeypatch.undo()
        with pytest.raises(BrokenPipeError):
            nobody.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), writing)


def test_text_is_written_as_it_is_and_json_as_one_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(FORMAT_VARIABLE, raising=False)
    say("\ntwo\nlines")
    assert capsys.readouterr().out == "\ntwo\nlines\n"
    monkeypatch.setenv(FORMAT_VARIABLE, "json")
    say("\ntwo\nlines")
    say("trouble", error=True)
    said = capsys.readouterr()
    [line] = said.out.splitlines()
    found = json.loads(line)
    assert (found["level"], found["logger"], found["message"]) == ("info", "wideep", "two\nlines")
    assert json.loads(said.err)["level"] == "error"


def test_lines_of_a_service_s_processes_begin_with_the_time_and_the_level(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(FORMAT_VARIABLE, raising=False)
    monkeypatch.setenv(TIMES_VARIABLE, "1")
    say("rank 0 serves again", error=True, level="info")
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO    rank 0 serves again\n", capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("code", "level", "message"),
    [
        ("raise ValueError('uncaught')", "critical", "ValueError: uncaught"),
        (
            "import threading; t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join()",
            "critical",
            "ZeroDivisionError: division by zero",
        ),
        ("import warnings; warnings.warn('old')", "warning", "UserWarning: old"),
        ("import logging; logging.getLogger('x').warning('loose')", "warning", "loose"),
    ],
)
def test_what_python_itself_writes_is_an_object_too(code: str, level: str, message: str) -> None:
    script = f"from server.machine.lines import write_lines_as; write_lines_as('json'); {code}"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    [found] = [json.loads(line) for line in done.stderr.splitlines()]
    assert found["level"] == level and found["message"].startswith(message)
    assert ("traceback" in found) == (level == "critical")
