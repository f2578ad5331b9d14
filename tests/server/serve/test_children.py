"""Child processes: how they are started, described and stopped, and that they die with their parent."""

import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from server.serve.child_messages import MessagePipe
from server.serve.children import (
    Child,
    StopSignals,
    children_of,
    describe_end,
    kill_if_it_stays,
    kill_orphans,
    raise_descriptor_limit,
    start_child,
    stop_children,
)

TIME_OUT_S = 40.0
ROOT = Path(__file__).resolve().parents[3]
_DEAF = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"


def start(code: str) -> Child:
    return start_child("the child", [sys.executable, "-c", code], environment=os.environ)


def wait_for_end(child: Child) -> None:
    assert select.select([child.pidfd], [], [], 20)[0], "the child did not end"


@pytest.mark.parametrize(
    "code, ending",
    [
        ("raise SystemExit(0)", "exited with status 0"),
        ("raise SystemExit(3)", "exited with status 3; see its messages above"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGRTMIN + 1)", "was killed by signal 35"),
        (
            "import os, signal; os.kill(os.getpid(), 9)",
            "was killed by SIGKILL (perhaps by the kernel because memory ran out)",
        ),
    ],
)
def test_an_end_is_described_by_name_pid_and_cause(code: str, ending: str) -> None:
    child = start(code)
    wait_for_end(child)
    assert describe_end(child).startswith(f"the child (pid {child.process.pid}) {ending}")
    stop_children([child], grace_s=1)


def test_a_command_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(FileNotFoundError):
        start_child("the child", ["/no/such/program"], environment={})


def test_stopping_waits_for_the_willing_and_kills_the_deaf() -> None:
    reading, writing = os.pipe()
    deaf = start_child(
        "deaf", [sys.executable, "-c", _DEAF.replace("print(flush=True)", f"open({writing}, 'w').write('x')")],
        environment=os.environ, kept_fds=(writing,),
    )  # fmt: skip
    os.close(writing)
    assert os.read(reading, 1) == b"x"
    os.close(reading)
    willing = start("import signal; signal.pause()")
    started_s = time.monotonic()
    stop_children([deaf, willing], grace_s=0.3)
    assert 0.3 <= time.monotonic() - started_s < 3
    assert deaf.process.returncode == -signal.SIGKILL
    assert willing.process.returncode == -signal.SIGTERM


def test_stopping_the_willing_takes_no_grace() -> None:
    started_s = time.monotonic()
    stop_children([start("import signal; signal.pause()") for _ in range(3)], grace_s=20)
    assert time.monotonic() - started_s < 10


def test_stopping_nobody_or_the_ended_is_fine() -> None:
    stop_children([], grace_s=20)
    child = start("pass")
    wait_for_end(child)
    stop_children([child], grace_s=20)


def test_a_child_is_in_a_process_group_of_its_own() -> None:
    child = start("import signal; signal.pause()")
    assert os.getpgid(child.process.pid) == child.process.pid
    stop_children([child], grace_s=20)


def descriptors_around_everything() -> tuple[list[str], list[str]]:
    """Return the open descriptors before and after everything that opens some."""
    before = os.listdir("/proc/self/fd")
    pipe = MessagePipe()
    child = start("pass")
    pipe.close_child_end()
    pipe.close()
    stop_children([child], grace_s=20)
    with StopSignals():
        pass
    return before, os.listdir("/proc/self/fd")


def test_the_limit_of_open_files_is_raised_for_children_too() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, before[0]), before[1]))
        limit = raise_descriptor_limit()
        assert limit == resource.getrlimit(resource.RLIMIT_NOFILE)[0] == raise_descriptor_limit() > 512
        said = subprocess.run(
            ["sh", "-c", "ulimit -n"], capture_output=True, text=True, check=True, timeout=60
        )
        assert int(said.stdout) == limit
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_no_descriptor_leaks() -> None:
    # Runs in a separate process, because fronts and ranks of other tests open and close descriptors in this one.
    name = descriptors_around_everything.__name__
    code = f"from {__name__} import {name} as look; before, after = look(); print(before == after, before, after)"
    child = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert child.stdout.startswith("True "), child.stdout


def test_stop_signals_become_readable_and_are_given_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as stop_signals:
        assert not select.select([stop_signals.fd], [], [], 0)[0]
        os.kill(os.getpid(), signal.SIGTERM)
        assert select.select([stop_signals.fd], [], [], 5)[0]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_thread_that_ends_meanwhile_hides_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def wait() -> None:
        has_begun.set()
        may_end.wait(20)

    thread = threading.Thread(target=wait)
    thread.start()
    read, child = Path.read_text, subprocess.Popen(["sleep", "60"])

    def read_later(path: Path, *arguments: Any, **options: Any) -> str:
        if path.parent.name == str(thread.native_id):
            may_end.set()
            thread.join()
            while path.parent.exists():
                time.sleep(0.001)
        return read(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", read_later)
    assert has_begun.wait(20) and child.pid in children_of(os.getpid())
    child.kill()
    child.wait()


def test_orphans_that_do_not_end_are_killed_and_the_spared_are_not() -> None:
    spared, orphan = start("import signal; signal.pause()"), start(_DEAF)
    tasks = Path("/proc/self/task").glob("*/children")
    ours = frozenset(int(pid) for task in tasks for pid in task.read_text().split())
    kill_orphans(spared=ours - {orphan.process.pid}, grace_s=0.1)
    assert select.select([orphan.pidfd], [], [], 0)[0]
    assert spared.process.poll() is None
    stop_children([spared, orphan], grace_s=20)


@pytest.mark.parametrize("ends", [True, False])
def test_what_stays_behind_kills_a_process_that_does_not_end_and_leaves_no_other(ends: bool) -> None:
    code = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        pidfd = os.pidfd_open(process.pid)
        before = children_of(os.getpid())
        kill_if_it_stays(pidfd, grace_s=TIME_OUT_S if ends else 0.1)
        [watcher] = children_of(os.getpid()) - before
        if ends:
            process.stdin.close()
        assert process.wait(TIME_OUT_S) == (0 if ends else -signal.SIGKILL)
        assert os.waitpid(watcher, 0)[1] == 0
        os.close(pidfd)


ROOT = Path(__file__).resolve().parents[3]
CHILD = (
    "import os, sys, time; sys.path.insert(0, sys.argv[1]);"
    "from server.machine.parent_death import die_with_parent; die_with_parent();"
    "print(os.getpid(), flush=True); time.sleep(60)"
)
PARENT = (
    "import subprocess, sys, time;"
    "subprocess.Popen([sys.executable, '-c', sys.argv[2], sys.argv[1]]); time.sleep(60)"
)


def test_the_child_of_a_killed_parent_dies() -> None:
    read_fd, write_fd = os.pipe()
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(ROOT), CHILD], stdout=write_fd)
    os.close(write_fd)
    with os.fdopen(read_fd) as output:
        assert output.readline().strip().isdigit()
        parent.send_signal(signal.SIGKILL)
        parent.wait(10)
        assert output.read() == "", "the pipe ends with the child, its last writer"


def test_a_child_whose_parent_is_gone_already_does_not_start() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "from server.machine.parent_death import die_with_parent; die_with_parent(parent_pid=2**22); print('lives')"
    )
    done = subprocess.run([sys.executable, "-c", code, str(ROOT)], capture_output=True, text=True, timeout=30)
    assert done.returncode != 0 and "is gone" in done.stderr and not done.stdout
