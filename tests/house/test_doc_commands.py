"""Run every command and script of README and docs/ against one service of a tiny model, page by page and in order.

Commands after `# needs: ...` in a block are skipped (`tests.support.service.documented`). The pages use port 8000 and models of the
reader. Here they are replaced by this service's port and the tiny model. `wideep serve` parses its flags, finds the model and checks
that it can serve it, because each start would take minutes. `make` prints its commands.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.house.test_docs import PAGES, ROOT
from tests.support.service.documented import Documented, documented
from tests.support.service.real_service import RealService, write_tiny_model

TIME_OUT_S = 300.0  # of one command, including starts of services, on a busy machine
WITH_COMMANDS = [page for page in PAGES if any(not each.needs for each in documented(page))]
_WIDEEP = f"""#!{sys.executable} -P
import sys
sys.path.insert(0, {str(ROOT)!r})
from dataclasses import replace
from server import cli
from server.serve.serve import _prepare
from server.options.reading import options_from

words, url = sys.argv[1:], "URL"
if words[:1] == ["serve"]:
    _prepare(replace(options_from(cli._parse(words)), port=0))
elif words[:1] == ["run-batch"]:
    from tests.support.service.private_services import import_once

    import_once()
    sys.exit(cli.main(words))
elif words[:1] == ["doctor"]:
    sys.exit(cli.main([*words, "--port", "0"]))  # another program may have 8000
elif words[:1] in (["chat"], ["bench"], ["status"], ["drain"], ["scale"], ["autoscale"], ["pools"]) or words[:2] in (["experts", verb] for verb in ("load", "record", "apply", "rollback", "history")):
    sys.exit(cli.main([*words, *([] if any("://" in word for word in words) else [url])]))
else:
    sys.exit(cli.main(words))
"""
_IMPORT_ONCE = (
    "from tests.support.service.private_services import import_once\nimport_once()\n"  # for private services
)
_MAKE = f"""#!/bin/sh
exec /usr/bin/make --dry-run --directory {ROOT} "$@"
"""
_BATCH_LINE = (
    '{"custom_id": "1", "method": "POST", "url": "/v1/completions", '
    '"body": {"model": "demo", "prompt": "Once", "max_tokens": 4}}\n'
)


class Place(NamedTuple):
    """Environment in which commands run."""

    service: RealService
    model: Path
    programs: Path  # first in PATH

    def adapted(self, text: str) -> str:
        """Replace 8000 in a text by our port, and a reader's model by ours."""
        for theirs, ours in (
            ("127.0.0.1:8000", f"127.0.0.1:{self.service.port}"),
            ("HOST:8000", f"127.0.0.1:{self.service.port}"),
            (".venv/bin/wideep", "wideep"),
            ('LLM("demo"', f'LLM("{self.model}"'),
            ("TOKENIZER", str(self.model)),
            (" MODEL", f" {self.model}"),
        ):
            text = text.replace(theirs, ours)
        return text


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Start a service, and provide `wideep` and `make` as described above."""
    folder = tmp_path_factory.mktemp("documented")
    model = write_tiny_model(folder / "demo")  # the name that requests use for the model
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    programs = folder / "bin"
    programs.mkdir()
    flags = ("--served-model-name", "demo", "-dp", "2")
    with RealService.serve(model, folder / "service.log", *flags) as service:
        for name, text in (("wideep", _WIDEEP.replace('"URL"', repr(service.url))), ("make", _MAKE)):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        (programs / "python").symlink_to(sys.executable)
        yield Place(service.wait_ready(), model, programs)


def run(each: Documented, place: Place, folder: Path) -> str:
    """Run a command or a script like a reader, changed by `Place.adapted`. Return the problem, or an empty string."""
    path = os.pathsep.join([str(place.programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    text = place.adapted(each.text)
    if each.language == "python":
        (folder / "script.py").write_text(f"{_IMPORT_ONCE if 'LLM(' in text else ''}{text}")
        words = [sys.executable, "script.py"]
    else:
        words = [
            "bash",
            "-e",
            "-o",
            "pipefail",
            "-c",
            text.replace("curl ", "curl --fail-with-body --silent --show-error "),
        ]
    try:
        ended = subprocess.run(
            words, cwd=folder, env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=TIME_OUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"line {each.line}: no end after {TIME_OUT_S:g} s: {each.text}"
    if ended.returncode == 0:
        return ""
    output = "\n".join((ended.stdout + ended.stderr).strip().splitlines()[-8:])
    return f"line {each.line}: status {ended.returncode}: {each.text}\n{output}"


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.name)
def test_every_command_that_needs_nothing_special_works(page: Path, place: Place, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(_BATCH_LINE)
    load = {"model": "demo", "prompt": "the cat", "max_tokens": 64, "ignore_eos": True}
    place.service.post("/v1/completions", json=load).raise_for_status()  # a plan needs it
    wrong = [
        problem for each in documented(page) if not each.needs and (problem := run(each, place, tmp_path))
    ]
    assert not wrong, f"{page.name}:\n" + "\n\n".join(wrong)


def test_every_block_is_commands_or_a_script_or_shows_something() -> None:
    for page in PAGES:
        for each in documented(page):
            assert each.text.strip(), f"{page.name}:{each.line} has an empty command"


def test_a_block_s_commands_are_told_from_what_they_print(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```console\n$ one \\\n    more\nprinted\n$ two '{\n  }'\n# needs: a GPU\n$ three\n```\n"
        "```python\n# needs: a group\npass\n```\n```text\n$ shown\n```\n```bash\nfour\n\nfive\n```\n"
    )
    found = [(each.line, each.text, each.needs) for each in documented(page)]
    assert found == [
        (1, "one \\\n    more", ""),
        (1, "two '{\n  }'", ""),
        (1, "three", "a GPU"),
        (10, "# needs: a group\npass\n", "a group"),
        (17, "four", ""),
        (17, "five", ""),
    ]


def test_most_commands_need_nothing_special() -> None:
    """A marker is for commands that not every machine can run, not for commands that fail."""
    every = [each for page in PAGES for each in documented(page)]
    assert sum(not each.needs for each in every) > 50
