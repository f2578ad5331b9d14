"""The durations of the tests, kept in tests/durations.txt, and a ceiling for each test.

`make test-all ARGS=--record-durations` writes the file on two idle cores; a test checks that no recorded test is too long. With
`--ceilings`, as in CI, a test that takes longer than its ceiling fails the session. The ceiling only finds tests that hang: a
test may wait a minute while others compile kernels for the first time on a slow machine.
"""

from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "tests" / "durations.txt"
LEAST_S = 2.0  # shorter tests are not listed
# Most that a recorded test of `make test`, or one marked slow, may take. A file's first test may start a service.
FAST_S, SLOW_S = 25.0, 180.0
MARGIN = 3.0  # a ceiling per recorded second
UNLISTED_S = 60.0  # seconds that count for a test without a record, or with a short one
LONG_FILE_S = 20.0  # least recorded seconds of a file that starts before others


class Duration(NamedTuple):
    """Seconds of one test with its fixtures: the first test of a file pays for those of the module."""

    seconds: float
    is_slow: bool
    name: str  # pytest's node id


def read_durations(file: Path = FILE) -> dict[str, Duration]:
    """Return the recorded durations by name."""
    text = file.read_text() if file.exists() else ""
    rows = [line.split(maxsplit=2) for line in text.splitlines()]
    found = [Duration(float(seconds), suite == "slow", name) for seconds, suite, name in rows]
    return {each.name: each for each in found}


def merged(recorded: dict[str, Duration], taken: dict[str, Duration]) -> str:
    """Return the file's new text, longest first. Rows of functions that ran are replaced, and those of missing functions go."""
    ran = set(map(_function_of, taken))
    kept = {name: each for name, each in recorded.items() if _function_of(name) not in ran and _exists(name)}
    rows = [each for each in {**kept, **taken}.values() if each.seconds >= LEAST_S]
    rows.sort(key=lambda each: (-each.seconds, each.name))
    return "".join(f"{each.seconds:8.1f} {'slow' if each.is_slow else 'fast'} {each.name}\n" for each in rows)


def put_long_files_first(items: list[pytest.Item], recorded: dict[str, Duration]) -> None:
    """Sort the tests by the recorded seconds of their files, longest first. Short files keep their order."""
    seconds: dict[str, float] = defaultdict(float)
    for item in items:
        if item.nodeid in recorded:
            seconds[_file_of(item)] += recorded[item.nodeid].seconds
    long = {file: each for file, each in seconds.items() if each >= LONG_FILE_S}
    items.sort(key=lambda item: -long.get(_file_of(item), 0.0))


def _function_of(name: str) -> str:
    return name.partition("[")[0]


def _exists(name: str) -> bool:
    file, test = _function_of(name).split("::")[:2]
    return (ROOT / file).exists() and test in (ROOT / file).read_text()


def _file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def above_ceiling(recorded: dict[str, Duration], taken: dict[str, Duration]) -> list[str]:
    """Return a line for each test that took longer than its ceiling."""
    lines = []
    for name, each in taken.items():
        known_s = recorded[name].seconds if name in recorded else 0.0
        ceiling_s = MARGIN * max(known_s, UNLISTED_S)
        if each.seconds > ceiling_s:
            lines.append(f"{name} took {each.seconds:.1f} s; its ceiling is {ceiling_s:.0f} s")
    return lines


class Durations:
    """The pytest plugin of one session."""

    def __init__(self, *, records: bool, fails: bool) -> None:
        self._records, self._fails = records, fails
        self._seconds: dict[str, float] = defaultdict(float)
        self._slow: set[str] = set()
        self._lines: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the seconds of a phase."""
        self._seconds[report.nodeid] += report.duration
        if "slow" in report.keywords:
            self._slow.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the file, or compare with it."""
        recorded = read_durations()
        taken = {name: Duration(seconds, name in self._slow, name) for name, seconds in self._seconds.items()}
        if self._records:
            FILE.write_text(merged(recorded, taken))
            return
        self._lines = above_ceiling(recorded, taken)
        if self._lines and self._fails:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Name the tests above their ceilings."""
        if self._lines:
            terminalreporter.section("tests above their ceilings")
            for line in self._lines:
                terminalreporter.line(line)


def add_options(parser: pytest.Parser) -> None:
    """Add the plugin's flags."""
    group = parser.getgroup("durations")
    group.addoption("--record-durations", action="store_true", help="write tests/durations.txt")
    group.addoption("--ceilings", action="store_true", help="fail if a test takes longer than its ceiling")


def register(config: pytest.Config) -> None:
    """Register the plugin, in the process that gets the reports of all others."""
    if not hasattr(config, "workerinput"):
        plugin = Durations(records=config.getoption("record_durations"), fails=config.getoption("ceilings"))
        config.pluginmanager.register(plugin, "wideep durations")
