import subprocess
import sys
from pathlib import Path

import pytest

from server.cli import main
from server.roots import WIDEEP_COMMAND


def run(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*WIDEEP_COMMAND, *words], capture_output=True, text=True, timeout=30, cwd=cwd)


def test_help_names_the_users_commands_and_hides_ours(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0
    for word in ("serve", "worker", "chat", "--version", "examples:"):
        assert word in text
    for word in ("engine", "front", "launcher", "SUPPRESS"):
        assert word not in text


@pytest.mark.parametrize("command", ["serve", "worker"])
def test_help_of_a_command_groups_its_flags_and_has_an_example(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = capsys.readouterr().out
    assert text.startswith(f"usage: wideep {command} [MODEL] [FLAGS]\n")
    for group in ("HTTP endpoint:", "ranks:", "limits:", "memory:", "example", "%"):
        assert group in text


def test_no_command_prints_the_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: wideep" in capsys.readouterr().out


def test_abbreviated_flags_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--max-model", "3"])
    assert caught.value.code == 2
    assert "--max-model" in capsys.readouterr().err


def test_a_bad_value_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "70000"]) == 2
    assert capsys.readouterr().err == "wideep serve: --port is 70000; it must be 0 to 65535\n"


def test_version_is_shown() -> None:
    assert run("--version").stdout.startswith("wideep ")


def test_a_folder_called_server_in_the_users_directory_is_not_run(tmp_path: Path) -> None:
    for package in ("server", "moe"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise SystemExit('ran the user's folder')")
    answer = run("--version", cwd=tmp_path)
    assert (answer.returncode, answer.stderr) == (0, "")


def test_help_and_the_supervisor_load_no_heavy_package() -> None:
    code = (
        "import sys, server.cli, server.process.serve, server.process.worker\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'grpc', 'numpy', 'huggingface_hub', 'httpx'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert answer.returncode == 0, answer.stderr
