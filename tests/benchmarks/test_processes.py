import os
import subprocess
import sys
import threading
import time

import pytest

from benchmarks.serving.processes import (
    ProcessWatch,
    command_of,
    cpu_s,
    exact_cpu_s,
    peak_rss_bytes,
    pss_bytes,
    tree,
)

_PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"])
child.wait()
"""


def test_a_tree_has_grandchildren_with_memory_and_commands() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None and parent.stdin is not None
        parent.stdout.readline()  # the grandchild runs
        pids = tree(parent.pid)
        assert len(pids) == 2
        assert all(0 < pss_bytes(pid) <= peak_rss_bytes(pid) for pid in pids)
        assert "print" in command_of(pids[1])[2]
        parent.stdin.close()


def test_what_has_ended_costs_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert (pss_bytes(process.pid), cpu_s(process.pid), command_of(process.pid)) == (0, 0.0, [])
    assert exact_cpu_s(process.pid) == 0.0


def test_exact_times_are_those_of_all_threads() -> None:
    def work() -> None:
        while time.thread_time() < 0.05:
            pass
        worked.set()
        ended.wait()

    worked, ended = threading.Event(), threading.Event()
    before_s = exact_cpu_s(os.getpid()), time.process_time()
    thread = threading.Thread(target=work)
    thread.start()
    assert worked.wait(60)
    after_s = exact_cpu_s(os.getpid()), time.process_time()
    ended.set()
    thread.join()
    assert after_s[0] - before_s[0] == pytest.approx(after_s[1] - before_s[1], abs=0.02)


def test_a_watch_counts_our_work_as_own() -> None:
    with ProcessWatch(os.getpid()) as watch:
        before = cpu_s(os.getpid())
        while cpu_s(os.getpid()) < before + 0.2:
            pass
    assert watch.usage.own_cores > 0
    assert watch.usage.peak_pss_bytes > 1 << 20
