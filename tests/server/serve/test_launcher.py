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


_RANK = """
import json, os, socket, sys, time
from pathlib import Path

folder, rank, size = Path(sys.argv[1]), int(os.environ["RANK"]), os.environ["WORLD_SIZE"]
error_file = Path(os.environ["TORCHELASTIC_ERROR_FILE"])

def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.01)

def send(line, **message):
    line.send(json.dumps(message).encode() + b"\\n")

(folder / f"{rank} of {size} begins {os.environ.get('WIDEEP_RESTARTS', '0')}").touch()
if rank == 0:
    line = socket.socket(fileno=int(os.environ["WIDEEP_LAUNCHER_FD"]))
    send(line, start_ranks=3)
    wait_for("2 of 3 begins 1")
    send(line, keep_ranks=3)
    send(line, keep_ranks=2)
    while error_file.parent.with_name("rank_2").exists():
        time.sleep(0.01)
    (folder / "fails").touch()
    send(line, start_ranks=3)
    (folder / "got").write_bytes(line.recv(1000))
    send(line, keep_ranks=2)
    (folder / "end").touch()
elif rank == 1:
    wait_for("end")
elif (folder / "fails").exists():
    error_file.write_text(json.dumps({"message": {"message": "rank 2 has no memory"}, "time_ns": 1}))
    sys.exit(1)
else:
    time.sleep(60)
"""


def test_ranks_start_and_stop_while_the_others_run(tmp_path: Path) -> None:
    """A rank that fails before it has joined does not end the service."""
    seen = tmp_path / "seen"
    seen.mkdir()
    command = [sys.executable, "-c", _RANK, str(seen)]
    flags = ["--workers=2", f"--directory={tmp_path}", "--max-restarts=0"]
    launcher = subprocess.run(
        [sys.executable, "-c", _LAUNCHER, *flags, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert launcher.returncode == 0, launcher.stderr
    begun = {each.name for each in seen.glob("* begins *")}
    assert begun == {"0 of 2 begins 0", "1 of 2 begins 0", "2 of 3 begins 1"}
    assert (seen / "got").read_text() == '{"ended_rank": 2, "reason": "rank 2 has no memory"}\n'
    assert "rank 2 could not join the service: rank 2 has no memory" in launcher.stderr
    assert sorted(each.name for each in tmp_path.glob("rank_*")) == ["rank_0", "rank_1"]
