"""Completions of the Tab key, tested in bash itself."""

import shutil
import subprocess

import pytest

from server.cli import main

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


@pytest.fixture(scope="module")
def script() -> str:
    """The script that `wideep completion bash` writes."""
    with pytest.MonkeyPatch.context() as patched:
        written: list[str] = []
        patched.setattr("builtins.print", lambda text, **_how: written.append(text))
        assert main(["completion", "bash"]) == 0
    return "".join(written)


def offered(script: str, *words: str) -> set[str]:
    """Return bash's completions for these words of a command line. The last word is incomplete."""
    line = " ".join(f"'{word}'" for word in ("wideep", *words))
    asked = (
        f'{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words)}; _wideep; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    answer = subprocess.run(["bash", "-eu", "-c", asked], capture_output=True, text=True, timeout=30)
    assert answer.stderr == ""
    return set(answer.stdout.split())


@pytest.mark.crossed("words", every=2)
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ("",),
            {
                "serve",
                "worker",
                "doctor",
                "size",
                "simulate",
                "chat",
                "models",
                "run-batch",
                "bench",
                "experts",
                "status",
                "drain",
                "scale",
                "autoscale",
                "pools",
                "lora",
                "completion",
            },
        ),
        (("s",), {"scale", "serve", "simulate", "size", "status"}),
        (("serve", "--enable-ep"), {"--enable-eplb"}),
        (("serve", "model", "--dtype", ""), {"auto", "float32", "bfloat16"}),
        (("serve", "--dtype", "=", "b"), {"bfloat16"}),
        (("serve", "--log-format", "="), {"text", "json"}),
        (("serve", "--enable-log"), {"--enable-log-requests"}),
        (("serve", "./"), set()),
        (("completion", "b"), {"bash"}),
        (("serve", "--generation-config", ""), {"auto", "vllm"}),
        (("chat", "--he"), {"--help"}),
        (("experts", "si"), {"simulate"}),
        (("experts", "simulate", "--slo"), {"--slots"}),
        (("run-batch", "--inp"), {"--input-file"}),
    ],
)
def test_bash_offers_what_may_follow(script: str, words: tuple[str, ...], expected: set[str]) -> None:
    assert offered(script, *words) == expected


def test_zsh_runs_the_same_script_through_its_bash_mode(
    capsys: pytest.CaptureFixture[str], script: str
) -> None:
    assert main(["completion", "zsh"]) == 0
    written = capsys.readouterr().out
    assert written.endswith(script) and "bashcompinit" in written.removesuffix(script)
