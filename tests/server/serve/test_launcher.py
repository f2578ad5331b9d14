"""The launcher alone; with a service under it, it is tested by test_serve."""

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
    """Its import beside a fork let the fork release locks that it had not taken: "Exception ignored", a trace."""
    flags = ["--workers=3", f"--directory={tmp_path}", "--max-restarts=0"]
    with subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER, *flags, "cat"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == b"3\n"
        launcher.communicate(timeout=40)  # closes what the workers read
    assert launcher.returncode == 0
