"""The launcher alone. test_serve tests it with a service."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
_LAUNCHER = """
import os, sys
from server.serve.children import children_of
from server.serve.launcher import run_launcher

def host_store(_listener):
    print(len(children_of(os.getpid())), flush=True)

sys.exit(run_launcher(sys.argv[1:], host_store=host_store))
"""


def test_the_store_is_hosted_when_all_workers_are_started(tmp_path: Path) -> None:
    """An import during a fork once let the child release locks that it did not hold ("Exception ignored" and a traceback)."""
    flags = ["--workers=3", f"--directory={tmp_path}", "--max-restarts=0"]
    with subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER, *flags, "cat"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == b"3\n"
        launcher.communicate(timeout=40)  # closes the workers' input
    assert launcher.returncode == 0
