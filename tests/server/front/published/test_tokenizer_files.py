"""No call runs a checkpoint's code, or prompts on a terminal to run it."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
PACKAGES = (
    "attention",
    "dispatch",
    "expert_placement",
    "kvcache",
    "moe",
    "scheduler",
    "server",
    "benchmarks",
)
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def _calls(path: Path) -> list[ast.Call]:
    text = path.read_text(encoding="utf-8")
    if "from_pretrained" not in text:
        return []
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    return [
        call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "from_pretrained"
    ]


CALLS = {f"{path.relative_to(ROOT)}:{call.lineno}": call for path in FILES for call in _calls(path)}


@pytest.mark.parametrize("place", CALLS)
def test_every_call_that_reads_a_checkpoint_s_files_refuses_its_code(place: str) -> None:
    said = {word.arg: word.value for word in CALLS[place].keywords}
    trusts = said.get("trust_remote_code")
    assert isinstance(trusts, ast.Constant) and trusts.value is False, "transformers may prompt for it"


def test_such_calls_were_found() -> None:
    assert {"server/front/published/tokenizer_files.py", "moe/families.py"} <= {
        place.split(":")[0] for place in CALLS
    }
