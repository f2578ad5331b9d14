"""Fixtures of the benchmarks' tests."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import pytest

from benchmarks.serving import service
from tests.support.service.forked import WIDEEP, Forked, Kind, can_fork_services


@pytest.fixture
def forked_services(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let benchmarks fork `wideep serve`, if the kernel allows it: a start costs no seconds of a core.

    Such a service follows no orders of a campaign of faults.
    """
    if can_fork_services():
        monkeypatch.setattr(service, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": _fork}))


def _fork(
    command: Sequence[str], *, cwd: Path, env: Mapping[str, str], stdout: IO[bytes], **_: object
) -> Forked:
    """Start a service as `Server` does."""
    assert list(command[1:4]) == ["-m", "server", "serve"]
    output = stdout.fileno()
    return Forked(
        Kind.SERVICE, [*WIDEEP, *command[3:]], stdout_fd=output, stderr_fd=output, cwd=cwd, environment=env
    )
