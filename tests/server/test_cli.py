import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from server.cli import _parse, build_parser, main
from server.machine.roots import WIDEEP_COMMAND
from server.options.flag import OptionsError
from server.options.help import group_words


def run(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*WIDEEP_COMMAND, *words], capture_output=True, text=True, timeout=30, cwd=cwd)


def test_help_names_the_users_commands_and_hides_ours(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0
    for word in (
        "COMMAND",
        "serve a model:",
        "use a service:",
        "plan and check:",
        "  worker  ",
        "--version",
        "examples:",
    ):
        assert word in text
    for word in ("engine", "front", "launcher", "dispatch-trial", "SUPPRESS"):
        assert word not in text


@pytest.mark.parametrize("command", ["serve", "worker"])
def test_help_of_a_command_groups_its_flags_and_has_an_example(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = capsys.readouterr().out
    assert text.startswith(f"usage: wideep {command} [MODEL] [FLAGS]\n")
    for part in ("common flags:", "--data-parallel-size", f"wideep {command} --help=limits", "example"):
        assert part in text
    assert text.count("\n") < 92, "only the common flags"
    with pytest.raises(SystemExit):
        main([command, "--help=all"])
    text = capsys.readouterr().out
    for group in ("HTTP endpoint:", "ranks:", "limits:", "memory:", "example", "%"):
        assert group in text


@pytest.mark.crossed("topic", every=3)
@pytest.mark.parametrize("topic", [*group_words(), "max_num_seqs", "eplb"])
def test_help_shows_a_group_or_the_flags_whose_names_contain_a_word(
    topic: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", f"--help={topic}"])
    text = capsys.readouterr().out
    assert caught.value.code == 0 and "common flags" not in text
    if topic == "eplb":
        assert "--enable-eplb" in text and "--eplb-config" in text and "--port" not in text


def test_help_on_an_unknown_topic_names_the_groups(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--help", "nothing"])
    assert caught.value.code == 2
    assert "the groups are model, http, images, tools" in capsys.readouterr().err


def test_no_command_prints_the_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: wideep" in capsys.readouterr().out


def test_abbreviated_flags_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--max-model", "3"]) == 2
    assert capsys.readouterr().err == (
        "wideep serve: --max-model is not a flag of `wideep serve` (did you mean --max-model-len?); `wideep serve --help=all` "
        "lists them\n"
    )


def test_a_command_that_there_is_not_is_answered_with_those_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["srve"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        "wideep: 'srve' is not a command (did you mean serve?); the commands are serve, worker, chat, run-batch, experts, bench, "
    )
    assert not {"engine", "front", "claim"} & set(said.replace(",", " ").split()), (
        "internal commands are not listed"
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["chat", "--ulr"], "wideep chat: --ulr is not a flag of `wideep chat`"),
        (["--verion"], "wideep: --verion is not a flag of `wideep` (did you mean --version?)"),
        (["serve", "a", "b"], "wideep serve: unexpected argument 'b'"),
        (
            ["run-batch", "-i", "a", "-o", "b", "--enable-lora-bias"],
            "wideep run-batch: --enable-lora-bias: adapters",
        ),
    ],
)
def test_a_flag_that_there_is_not_is_one_line_and_status_2(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith(says) and said.count("\n") == 1


@pytest.mark.crossed("words", every=2)
@pytest.mark.parametrize(
    "words",
    [
        ["drain", "1", "http://a", "--undo"],
        ["drain", "1", "--undo", "http://a"],
        ["drain", "--undo", "1", "http://a"],
    ],
)
def test_a_url_may_follow_flags(words: list[str]) -> None:
    args = _parse(words)
    assert (args.rank, args.undo, args.url) == (1, True, "http://a")


def test_a_second_url_is_refused() -> None:
    with pytest.raises(OptionsError, match="unexpected argument 'http://b'"):
        _parse(["drain", "1", "http://a", "--undo", "http://b"])


def test_a_flag_without_its_value_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--port"])
    assert caught.value.code == 2
    assert capsys.readouterr().err == (
        "wideep serve: --port: expected one argument; `wideep serve --help` lists its flags\n"
    )


def test_a_refusal_takes_less_than_a_second_and_what_changes_nothing_is_said_first() -> None:
    for _ in range(3):  # a slow run may measure the machine
        begun_s = time.monotonic()
        answer = run("serve", "m", "--tensor_parallel_size=1", "--enable-lora-bias")
        if (seconds := time.monotonic() - begun_s) < 1:
            break
    assert seconds < 1
    assert answer.returncode == 2 and answer.stderr.startswith("wideep serve: --enable-lora-bias: adapters")
    answer = run("serve", "/no/such/model", "-tp", "1")
    first, second = answer.stderr.splitlines()
    assert first.startswith("wideep serve: --tensor-parallel-size 1 has no effect: ")
    assert second == "wideep serve: the model path /no/such/model does not exist"


def test_a_bad_value_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "70000"]) == 2
    assert capsys.readouterr().err == "wideep serve: --port is 70000; it must be 0 to 65535\n"


@pytest.mark.slow
def test_ctrl_c_while_a_command_works_ends_it_without_a_traceback() -> None:
    command = [*WIDEEP_COMMAND, "models"]  # loads torch and transformers, then prints every type
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as models:
        assert models.stdout is not None and models.stdout.readline(), "it prints a line before it loads"
        models.send_signal(signal.SIGINT)
        _, said = models.communicate(timeout=30)
    assert (models.returncode, said) == (130, "\n")


def test_a_reader_that_closes_our_output_gets_no_traceback() -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    command = [*WIDEEP_COMMAND, "completion", "bash"]
    answer = subprocess.run(command, stdout=write_fd, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write_fd)
    assert (answer.returncode, answer.stderr) == (141, "")


@pytest.mark.parametrize("command", [("chat",), ("bench",), ("experts", "load"), ("experts", "history")])
def test_a_url_is_a_word_or_a_flag(command: tuple[str, ...]) -> None:
    parser = build_parser()
    assert parser.parse_args([*command, "http://a:1"]).url == "http://a:1"
    assert parser.parse_args([*command, "--url", "http://a:1"]).url == "http://a:1"
    assert parser.parse_args([*command]).url == "http://127.0.0.1:8000"


def test_version_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0 and capsys.readouterr().out.startswith("wideep ")


def test_a_folder_called_server_in_the_users_directory_is_not_run(tmp_path: Path) -> None:
    for package in ("server", "moe"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise SystemExit('ran the user's folder')")
    answer = run("--version", cwd=tmp_path)
    assert (answer.returncode, answer.stderr) == (0, "")


def test_help_and_the_supervisor_load_no_heavy_package() -> None:
    code = (
        "import sys, server.cli, server.tools.doctor.run, server.serve.serve, server.serve.worker\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'grpc', 'numpy', 'huggingface_hub', 'httpx'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert answer.returncode == 0, answer.stderr
