"""When a silent process counts as hung: both observers must agree, and time is the test's."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from server.serve.watchdog import PATIENCE, Account, Watchdog, account_of
from tests.support.service.service_processes import wait_until


class Case:
    """A watchdog over a child that a test describes."""

    def __init__(self, timeout_s: float = 2.0) -> None:
        self.now_s, self.account = 100.0, Account("S", 50)
        self.watchdog = Watchdog(7, timeout_s, clock=lambda: self.now_s, account=lambda _pid: self.account)

    def pass_time(self, until_s: float) -> str | None:
        """Let time pass as in an idle supervisor, and return why the child is hung, or None."""
        while (left_s := self.watchdog.left_s()) is not None and self.now_s + left_s <= until_s:
            self.now_s += left_s
            if (why := self.watchdog.why_hung()) is not None:
                return why
        self.now_s = until_s
        return self.watchdog.why_hung()


def test_a_child_is_watched_from_its_first_beat_on() -> None:
    case = Case()
    assert case.pass_time(1000.0) is None
    case.watchdog.beat()
    assert case.pass_time(1001.9) is None
    assert case.pass_time(1002.0) == "it uses no CPU time and sent no heartbeat for 2.0 s"


def test_a_beat_begins_the_time_anew() -> None:
    case = Case()
    for beat in range(5):
        case.watchdog.beat()
        assert case.pass_time(100.0 + 1.9 * (beat + 1)) is None


@pytest.mark.parametrize("state", ["T", "t"])
def test_a_stopped_child_is_hung_whatever_it_had_used(state: str) -> None:
    case = Case()
    case.watchdog.beat()
    case.account = Account(state, 51)
    assert case.pass_time(102.0) == "it is stopped and sent no heartbeat for 2.0 s"


def test_one_that_computes_without_a_word_has_more_time() -> None:
    case = Case()
    case.watchdog.beat()
    for second in range(1, int(2 * PATIENCE)):
        case.account = Account("S", 50 + second)
        assert case.pass_time(100.0 + second) is None
    assert "sent no heartbeat for 30" in str(case.pass_time(100.0 + 2 * PATIENCE + 1))


@pytest.mark.parametrize("state", ["R", "D"])
def test_one_that_waits_for_a_processor_or_a_disk_has_more_time(state: str) -> None:
    case = Case()
    case.watchdog.beat()
    case.account = Account(state, 50)
    assert case.pass_time(110.0) is None


def test_a_supervisor_that_was_away_itself_looks_twice() -> None:
    case = Case()
    case.watchdog.beat()
    case.now_s += 60.0
    assert case.watchdog.why_hung() is None, "there is no earlier account to compare with"


def test_no_timeout_watches_nobody() -> None:
    case = Case(timeout_s=0.0)
    case.watchdog.beat()
    assert case.watchdog.left_s() is None and case.pass_time(1e6) is None


def test_the_kernel_tells_a_stopped_process_and_one_that_computes() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        try:
            wait_until(lambda: account_of(child.pid).ticks > 0, lambda: "it does not compute")
            os.kill(child.pid, signal.SIGSTOP)
            wait_until(lambda: account_of(child.pid).state == "T", lambda: "it does not stop")
        finally:
            child.kill()


def test_a_process_is_as_busy_as_the_busiest_of_its_threads() -> None:
    """The first thread waits for another rank while the thread with the heartbeat waits for a processor."""
    spins = "import threading; threading.Thread(target=lambda: exec('while True: pass')).start()"
    with subprocess.Popen([sys.executable, "-c", spins]) as child:
        try:
            first = Path(f"/proc/{child.pid}/task/{child.pid}/stat")
            wait_until(lambda: account_of(child.pid).ticks > 20, lambda: "it does not compute")
            wait_until(lambda: ") S " in first.read_text(), lambda: "its first thread does not wait")
            assert account_of(child.pid).state == "R"
        finally:
            child.kill()
