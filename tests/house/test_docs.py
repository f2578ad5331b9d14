"""Check that targets in README and docs/ exist: files, headings, our flags, and the messages quoted in troubleshooting."""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from server.cli import build_parser
from server.options.reading import known_words

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RECIPES = sorted(
    path for path in (ROOT / "docs" / "recipes").rglob("*") if path.is_file() and path.suffix != ".pyc"
)
SOURCES = ("server", "scheduler", "moe", "dispatch", "attention", "kvcache", "expert_placement")

# Flags in our pages that belong to other programs, by program. Add new ones here.
OTHERS = {
    "torchrun": "--nnodes --nproc-per-node --rdzv-backend --rdzv-endpoint --rdzv-conf --local-addr --no-python --shutdown-timeout",
    "pip": "--editable --no-deps --quiet",
    "docker": "--build --build-arg --device --gpus --interval --name --network --retries --shm-size --start-period --stop-timeout --timeout --ulimit --volumes",
    "Dockerfiles, and the programs of an image": "--create-home --from --no-install-recommends --uid --user-group",
    "Slurm": (
        "--exclusive --gpus-per-node --job-name --kill-on-bad-exit --label --no-kill --nodes --ntasks-per-node --output --signal"
    ),
    "kubectl": "--from-literal",
    "systemctl and useradd": "--home-dir --now --system",
    "hf": "--local-dir",
    "curl": "--unix-socket",
    "aiperf": (
        "--artifact-dir --custom-dataset-type --endpoint-type --extra-inputs --fixed-schedule --fixed-schedule-auto-offset "
        "--input-file --isl --osl --request-count --streaming --ui --use-server-token-count"
    ),
    "guidellm": "--backend --constraint --data --data-loader --disable-console-interactive --output --profile",
    "benchmarks.adapters": "--dense-only",
    "benchmarks.faults": "--fronts --kinds --nodes --open --random --resizes --tiers --tokens",
    "benchmarks.front": "--against --step-s --streams",
    "benchmarks.kv.drain": "--tier",
    "benchmarks.kv.pools": "--every --prompt-tokens --ranks --seconds --streams",
    "benchmarks.kv.transfer": "--blocks --step-ms",
    "benchmarks.weights.quantisation": "--forms",
    "benchmarks.weights.updates": "--gigabytes",
    "gpu_day.sh": "--minutes --parts --resume --tiny --units",
    "other benchmarks": "--batch --experts --repeats --rounds --runs --save --table --tasks",
    "the shim for DeepEP": "--print-path",
    "tests of DeepEP": "--hidden --num-experts --num-processes --num-tokens --num-topk --deterministic --do-cpu-sync --precise-unbalanced-ratio --use-logfmt",
    "nobody, NAME stands for a switch": "--disable-NAME --enable-NAME --no-NAME --no-enable-NAME",
}


def _slug(heading: str) -> str:
    """Return the anchor that a forge gives a heading."""
    words = re.sub(r"[^\w\- ]", "", heading.strip().lower().replace("`", ""))
    return words.replace(" ", "-")


def _anchors(page: Path) -> set[str]:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return {_slug(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


def _flags_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from _flags_of(child)


def test_every_relative_link_leads_somewhere() -> None:
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if "://" in target:
                continue
            name, _, anchor = target.partition("#")
            file = page.parent / name if name else page
            is_there = file.exists() and (not anchor or anchor in _anchors(file))
            broken += [] if is_there else [(page.name, target)]
    assert not broken


def test_every_flag_is_ours_or_said_to_be_another_programs() -> None:
    allowed = {*_flags_of(build_parser()), *known_words(), *" ".join(OTHERS.values()).split()}
    named = {
        page: set(re.findall(r"(?<![-\w])--[a-zA-Z][\w-]*", page.read_text())) for page in (*PAGES, *RECIPES)
    }
    unknown = {page.name: sorted(flags - allowed) for page, flags in named.items() if flags - allowed}
    assert not unknown, "no command accepts these flags"


def test_every_page_is_in_the_index() -> None:
    listed = set(re.findall(r"\]\((\w+\.md)\)", (ROOT / "docs" / "README.md").read_text()))
    assert {page.name for page in PAGES} - {"README.md"} == listed


def test_every_endpoint_is_in_the_list() -> None:
    sources = "\n".join(path.read_text() for path in sorted((ROOT / "server").rglob("*.py")))
    paths = set(re.findall(r"(?:router\.\w+|add_api_route)\(\s*\"(/[^\"]*)\"", sources))
    assert len(paths) > 80, "the pattern does not find the routes"
    listed = (ROOT / "docs" / "endpoints.md").read_text()
    missing = [path for path in sorted(paths) if re.sub(r"{.*?}", "{id}", path) + "`" not in listed]
    assert not missing


def test_the_messages_that_troubleshooting_quotes_are_in_the_code() -> None:
    sources = "\n".join(path.read_text() for name in SOURCES for path in sorted((ROOT / name).rglob("*.py")))
    joined = re.sub(r"\"\s*\n\s*f?\"", "", sources)  # join a message that spans several lines
    rows = re.findall(r"^\| (.*?) \|", (ROOT / "docs" / "troubleshoot.md").read_text(), re.MULTILINE)
    quoted = [text for row in rows for text in re.findall(r"`([^`]* [^`]*)`", row)]
    pieces = [piece.strip() for text in quoted for piece in text.split("...") if len(piece.strip()) > 2]
    assert len(pieces) > 30
    missing = [piece for piece in pieces if piece not in joined]
    assert not missing
