"""The result of a check, and its output: one line each or one JSON object, and an exit status.

A check is ok, a warning (the service runs, but slower or less safely), a failure (it cannot run, or its answers could
differ), or not here (skipped, because it does not apply to this machine). Every problem comes with a remedy.
"""

import dataclasses
import enum
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from server.machine.lines import say

_COLOURS = {"ok": "32", "warning": "33", "FAILURE": "31"}  # green, yellow, red
_NAME_WIDTH = 15  # width of the longest name of a check


class CheckStatus(enum.StrEnum):
    """The outcome of a check, in order of severity. The report's status is the most severe one of its checks."""

    NOT_HERE = "not here"
    OK = "ok"
    WARNING = "warning"
    FAILURE = "FAILURE"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check's result."""

    name: str
    status: CheckStatus
    text: str
    remedy: str = ""  # what to do about a problem
    figures: Mapping[str, float] = field(default_factory=dict)  # measurements, with units in the names

    @property
    def is_wrong(self) -> bool:
        """Whether the check found a problem."""
        return self.status in (CheckStatus.WARNING, CheckStatus.FAILURE)

    @property
    def sentence(self) -> str:
        """The finding and its remedy."""
        return f"{self.text}: {self.remedy}" if self.remedy else self.text


def ok(name: str, text: str, **figures: float) -> Check:
    """Return a passed check."""
    return Check(name=name, status=CheckStatus.OK, text=text, figures=figures)


def warning(name: str, text: str, remedy: str, **figures: float) -> Check:
    """Return a check with a problem that costs speed or safety."""
    return Check(name=name, status=CheckStatus.WARNING, text=text, remedy=remedy, figures=figures)


def failure(name: str, text: str, remedy: str = "") -> Check:
    """Return a check with a problem that prevents the service from running, or from giving equal answers."""
    return Check(name=name, status=CheckStatus.FAILURE, text=text, remedy=remedy)


def not_here(name: str, text: str) -> Check:
    """Return a check that does not apply to this machine."""
    return Check(name=name, status=CheckStatus.NOT_HERE, text=text)


class CheckReport:
    """Collects checks. Prints a line for each immediately, or one JSON object at the end."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._checks: list[tuple[str, Check]] = []  # with the node

    def add(self, checks: Iterable[Check], *, node: str = "") -> None:
        """Add checks and print them.

        Args:
            node: Name of their node, if it is not this one.
        """
        for check in checks:
            self._checks.append((node, check))
            if not self._as_json:
                say(_coloured(line_of(check, node), check.status))

    def end(self, seconds: float) -> int:
        """Print the summary and return the exit status: 1 with a failure, otherwise 0."""
        counts = Counter(check.status for _, check in self._checks)
        worst = [status for status in CheckStatus if counts[status]][-1]
        if self._as_json:
            say(json.dumps(self._object(worst, seconds), indent=1))
        else:
            told = [f"{counts[CheckStatus.OK]} ok", count(counts[CheckStatus.WARNING], "warning")]
            told += [
                count(counts[CheckStatus.FAILURE], "failure"),
                f"{counts[CheckStatus.NOT_HERE]} not here",
            ]
            say(f"\n{', '.join(told)} ({seconds:.1f} s)")
        return int(worst is CheckStatus.FAILURE)

    def _object(self, worst: CheckStatus, seconds: float) -> dict[str, object]:
        checks = [
            {"check": check.name, "node": node, **dataclasses.asdict(check), "status": check.status.lower()}
            for node, check in self._checks
        ]
        for each in checks:
            del each["name"]
        return {"status": worst.lower(), "seconds": round(seconds, 2), "checks": checks}


def _coloured(line: str, status: CheckStatus) -> str:
    """Colour a line's status if stdout is a terminal with colours (https://no-color.org)."""
    colour = _COLOURS.get(status)
    if (
        colour is None
        or not sys.stdout.isatty()
        or os.environ.get("NO_COLOR")
        or os.environ.get("TERM") == "dumb"
    ):
        return line
    return line.replace(status, f"\x1b[{colour}m{status}\x1b[0m", 1)


def line_of(check: Check, node: str = "") -> str:
    """Return a check's line."""
    whose = f"{node}: " if node else ""
    return f"{check.status:8}  {check.name:{_NAME_WIDTH}}  {whose}{check.sentence}"


def as_json(checks: Iterable[Check]) -> list[dict[str, object]]:
    """Return checks as JSON values for another node."""
    return [dataclasses.asdict(check) for check in checks]


def from_json(values: Iterable[Mapping[str, object]]) -> list[Check]:
    """Parse the output of `as_json`."""
    return [Check(**{**each, "status": CheckStatus(str(each["status"]))}) for each in values]  # type: ignore[arg-type]


def count(number: int | None, noun: str) -> str:
    """Return a number with its noun, such as "2 nodes"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
