"""Environment card and result of a benchmark: the card is printed at the top, one JSON object as the last line.

A figure is meaningless without its machine, versions and commit, so every benchmark prints the card first and includes it in
its result. This module knows nothing about the measurements. A card contains no path of the machine.
"""

import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")
PACKAGES = ("torch", "transformers", "numba", "numpy", "grpcio", "uvicorn")


def environment_card() -> dict[str, Any]:
    """Return the machine, the versions, the commit and the time, as JSON values."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "load_average": round(os.getloadavg()[0], 2),
    }


def print_card(card: dict[str, Any]) -> None:
    """Print a card, one fact per line."""
    for name, value in card.items():
        print(f"{name:>14}  {value}")
    print(flush=True)


def print_tail(result: dict[str, Any]) -> None:
    """Print the result as one JSON object on the last line."""
    print(json.dumps(result, separators=(",", ":")), flush=True)


def save_result(name: str, result: dict[str, Any]) -> Path:
    """Write a result with a card under "environment" to `benchmarks/results/<name>-<date>-<cpu>.json`."""
    card = result["environment"]
    path = RESULTS / f"{name}-{card['date'][:10]}-{slug(card['cpu'])}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def slug(text: str) -> str:
    """Return text for use in a file name: "AMD EPYC 7B13 @ 2.4GHz" becomes amd-epyc-7b13-2-4ghz."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _cpu_name() -> str:
    """Return the processor's name from /proc/cpuinfo, or its architecture."""
    text = Path("/proc/cpuinfo").read_text()
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.machine()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """Return the checkout's commit, marked if tracked files differ from it."""
    commit = _git("rev-parse", "--short=12", "HEAD")
    return commit + (" with changes" if _git("status", "--porcelain", "--untracked-files=no") else "")


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(RESULTS.parent), *arguments], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"
