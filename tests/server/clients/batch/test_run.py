"""`wideep run-batch` against a front with scripted ranks: answers, bad lines, resuming, and being stopped."""

import json
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from server.cli import main
from server.machine.roots import WIDEEP_COMMAND
from tests.support.service.front_process import TIMEOUT_S, FrontProcess
from tests.support.service.service_processes import HEARS_CTRL_C, wait_until


def request(custom_id: str, prompt: str, **body: Any) -> dict[str, Any]:
    """A line of a batch."""
    body = {"model": "tiny", "prompt": prompt, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def write(directory: Path, *lines: dict[str, Any] | str) -> None:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (directory / "in.jsonl").write_text("".join(text + "\n" for text in texts))


def entries(directory: Path) -> list[dict[str, Any]]:
    """Return all answers."""
    found = [json.loads(line) for line in (directory / "out.jsonl").read_text().splitlines()]
    assert len({entry["id"] for entry in found}) == len(found), "each line is answered once"
    return found


def responses(directory: Path) -> dict[str, dict[str, Any]]:
    """Return the service's answers by custom_id."""
    return {entry["custom_id"]: entry["response"] for entry in entries(directory) if entry["response"]}


def text_of(response: dict[str, Any]) -> str:
    """Return a completion's text."""
    return str(response["body"]["choices"][0]["text"])


def flags(front: FrontProcess, directory: Path) -> list[str]:
    """Return the command line for the batch in `directory`."""
    files = ["-i", str(directory / "in.jsonl"), "-o", str(directory / "out.jsonl")]
    return ["run-batch", *files, "--url", front.url]


def num_asked(front: FrontProcess, word: str) -> int:
    """Return the number of prompts with a word that the ranks received."""
    asked = [request for rank in front.ranks for request in rank.requests]
    return sum(word in front.decode(request.prompt_ids) for request in asked)


def test_every_line_gets_an_answer_and_bad_lines_end_nothing(
    front: FrontProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    front.script("b-text", "one é😀")
    front.script("b-chat", "two")
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "b-chat"}]}
    write(
        tmp_path,
        request("text", "b-text"),
        request("chat", "") | {"url": "/v1/chat/completions", "body": chat},
        "{not json",
        request("model", "x", model="nobody"),
        request("field", "x", temperature=-1),
        request("text", "again"),
        request("get", "x") | {"method": "GET"},
    )
    assert main(flags(front, tmp_path)) == 1
    got = responses(tmp_path)
    assert text_of(got["text"]) == "one é😀"
    assert got["chat"]["body"]["choices"][0]["message"]["content"] == "two"
    assert got["chat"]["request_id"] and got["chat"]["status_code"] == 200
    assert got["model"]["status_code"] == 404
    assert got["field"]["status_code"] == 400
    assert got["field"]["body"]["error"]["param"] == "temperature"
    errors = {entry["error"]["message"] for entry in entries(tmp_path) if entry["error"]}
    assert {error.partition(":")[0] for error in errors} == {"line 3", "line 6", "line 7"}
    assert (
        "wideep run-batch: 2 of 7 lines have successful responses; the output has the errors"
        in capsys.readouterr().err
    )


def test_all_good_is_status_0_and_the_same_command_again_asks_nothing(
    front: FrontProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    front.script("b-again", "yes")
    write(tmp_path, *(request(str(number), f"b-again {number}") for number in range(20)))
    assert main(flags(front, tmp_path)) == 0
    before = (tmp_path / "out.jsonl").read_bytes()
    assert main(flags(front, tmp_path)) == 0
    assert (tmp_path / "out.jsonl").read_bytes() == before
    assert num_asked(front, "b-again") == 20
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "wideep run-batch: 20 of 20 lines have successful responses",
        "wideep run-batch: 20 lines are already answered, 0 remain",
        "wideep run-batch: 20 of 20 lines have successful responses",
    ]


def test_it_goes_on_after_a_torn_line_and_with_lines_that_were_added(
    front: FrontProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    front.script("b-torn", "yes")
    lines = [request(str(number), f"b-torn {number}") for number in range(4)]
    write(tmp_path, *lines[:3])
    assert main(flags(front, tmp_path)) == 0
    out = tmp_path / "out.jsonl"
    out.write_bytes(out.read_bytes()[:-30])
    write(tmp_path, *reversed(lines))
    assert main(flags(front, tmp_path)) == 0
    assert set(responses(tmp_path)) == {"0", "1", "2", "3"}
    assert num_asked(front, "b-torn") == 5, "the torn one and the new one"
    assert "removed the incomplete last line of the output" in capsys.readouterr().err


def test_no_more_requests_are_under_way_than_allowed(front: FrontProcess, tmp_path: Path) -> None:
    gate = threading.Event()
    front.script("b-bounded", "yes", gates={0: gate})
    write(tmp_path, *(request(str(number), f"b-bounded {number}") for number in range(9)))
    command = [*WIDEEP_COMMAND, *flags(front, tmp_path), "--concurrency", "3"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as batch:
        wait_until(lambda: num_asked(front, "b-bounded") >= 3, lambda: "no line was sent")
        assert num_asked(front, "b-bounded") == 3
        gate.set()
        assert batch.wait(TIMEOUT_S) == 0
    assert num_asked(front, "b-bounded") == 9


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow, id="ctrl-c")]
)
def test_a_stop_keeps_what_is_answered_and_hangs_up_on_the_rest(
    front: FrontProcess, tmp_path: Path, number: signal.Signals
) -> None:
    word = f"b-stop-{number.name}"
    front.script(f"{word} held", "late", gates={1: threading.Event()})
    front.script(f"{word} quick", "soon")
    write(tmp_path, request("held", f"{word} held"), request("quick", f"{word} quick"))
    batch = subprocess.Popen(
        [*HEARS_CTRL_C, *WIDEEP_COMMAND, *flags(front, tmp_path), "--concurrency", "1"],
        stderr=subprocess.PIPE,
        text=True,
    )
    held = front.served(f"{word} held")
    asked = next(request for request in held.requests if word in front.decode(request.prompt_ids))
    batch.send_signal(number)
    _, said = batch.communicate(timeout=TIMEOUT_S)
    assert (batch.returncode, said) == (
        1,
        "wideep run-batch: stopped; run the same command again to continue\n",
    )
    held.wait_for(lambda rank: asked.request_id in rank.aborted)
    held.scripts[f"{word} held"].gates[1].set()
    assert entries(tmp_path) == []
    assert main(flags(front, tmp_path)) == 0
    assert {name: text_of(response) for name, response in responses(tmp_path).items()} == {
        "held": "late",
        "quick": "soon",
    }


@pytest.mark.parametrize(
    ("words", "status", "problem"),
    [
        (["--url", "http://127.0.0.1:1"], 1, "no service answers at http://127.0.0.1:1 ("),
        (["--url", "ftp://x"], 1, "'ftp://x' is not a URL of a service; try http://127.0.0.1:8000"),
        (["--url", "x", "--threads", "2"], 2, "--threads is for a service that run-batch starts; --url uses"),
        (["--url", "x", "other"], 2, "MODEL is for a service that run-batch starts"),
        (["one", "--model", "two"], 2, "the model is given twice, 'one' and --model 'two'"),
        (["--url", "x", "--concurrency", "0"], 2, "--concurrency is 0; it must be 1 to 4096"),
        (["--model", "./none"], 1, "the service did not start: the model path ./none does not exist"),
        (["--port", "70000"], 2, "--port is 70000; it must be 0 to 65535"),
    ],
)
def test_a_wrong_command_line_is_a_sentence(
    words: list[str], status: int, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, request("a", "x"))
    files = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    assert main(["run-batch", *files, *words]) == status
    assert f"wideep run-batch: {problem}" in capsys.readouterr().err


def test_wrong_files_are_a_sentence_and_status_2(
    front: FrontProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags(front, tmp_path)) == 2
    assert "cannot read the batch" in capsys.readouterr().err
    same = str(tmp_path / "in.jsonl")
    assert main(["run-batch", "-i", same, "-o", same]) == 2
    assert "-i and -o name the same file" in capsys.readouterr().err


def test_help_names_the_flags_and_the_format(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run-batch", "--help"])
    text = capsys.readouterr().out
    for word in ("--url", "--concurrency", "custom_id", "--data-parallel-size", "continue an interrupted"):
        assert word in text
