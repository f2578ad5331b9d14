"""Loading: bars and a summary on a terminal of 80 x 24, lines elsewhere. A start that fails ends with its error."""

import contextlib
import fcntl
import io
import json
import os
import re
import signal
import struct
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dispatch.ports import free_port
from server.serve.rank.loading import LoadingFile, LoadingLines, LoadingScreen, loading_of
from tests.support.clock import Clock
from tests.support.models.fake_checkpoint import write_checkpoint
from tests.support.service.service_processes import Service, wait_until

WIDTH, HEIGHT = 80, 24


def shown(written: str) -> list[str]:
    """Return a terminal's lines after this output. Supports returns, newlines, and erasing to the end of a line."""
    lines, column = [""], 0
    for piece in re.findall(r"\x1b\[K|\r|\n|[^\r\n\x1b]+|\x1b", written):
        if piece == "\n":
            lines.append("")
        elif piece == "\r":
            column = 0
        elif piece == "\x1b[K":
            lines[-1] = lines[-1][:column]
        else:
            assert piece != "\x1b", "an unexpected control sequence"
            lines[-1] = lines[-1].ljust(column)[:column] + piece + lines[-1][column + len(piece) :]
            column += len(piece)
    return [line.rstrip() for line in lines]


class Ended(NamedTuple):
    """A process that ran on a terminal."""

    status: int
    written: str
    has_same_modes: bool  # terminal modes are restored


@contextlib.contextmanager
def terminal() -> Iterator[tuple[int, int]]:
    """Open a pseudo-terminal of 80 x 24 and yield our end and the process's."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    try:
        yield ours, theirs
    finally:
        os.close(ours)
        os.close(theirs)


def run_on_terminal(directory: Path, arguments: list[str], stop_after: str = "", **environment: str) -> Ended:
    """Run a fake service on a terminal to its end. Send SIGINT once it has written `stop_after`."""
    environment = {"FAKE_LAUNCHER": "1", "TERM": "xterm", **environment}
    with terminal() as (ours, theirs):
        before = termios.tcgetattr(theirs)
        written = b""
        os.set_blocking(ours, False)
        has_stopped = False

        def read() -> bool:
            nonlocal written, has_stopped
            with contextlib.suppress(BlockingIOError):
                while True:
                    written += os.read(ours, 65536)
            if stop_after and not has_stopped and stop_after.encode() in written:
                has_stopped = True
                service.process.send_signal(signal.SIGINT)
            return service.process.poll() is not None

        with Service(directory, ["serve", *arguments], environment, terminal_fd=theirs) as service:
            wait_until(read, lambda: written.decode())
            read()
            return Ended(service.end()[0], written.decode(), termios.tcgetattr(theirs) == before)


def test_a_terminal_gets_bars_with_bytes_and_seconds_left_and_a_summary_of_one_screen(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "tiny")
    arguments = [str(model), f"--port={free_port()}", "-dp", "2", "--kv-cache-memory", "1G"]
    arguments += [
        "--kv-offloading-size=64M",
        f"--kv-offloading-dir={tmp_path}/kv",
        "--kv-offloading-disk-size=1M",
    ]
    ended = run_on_terminal(tmp_path, arguments, "Ctrl-C stops everything")
    lines = shown(ended.written)
    assert (ended.status, ended.has_same_modes) == (0, True), ended.written
    bars = [line for line in lines if line.startswith("Loading")]
    assert any(
        re.match(r"Loading weights: 100%\|█+\| 8.00M/8.00MB, 00:\d\d<00:00$", line) for line in lines
    ), lines
    assert any(re.match(r"Loading torch and transformers: \d\d:\d\d$", line) for line in lines)
    assert any(re.match(r"Loading kernels: 100%\|.*10/10", line) for line in lines)
    begin = next(at for at, line in enumerate(lines) if line.startswith("wideep: serving tiny on 2 ranks"))
    end = next(at for at, line in enumerate(lines) if line.startswith("Ctrl-C stops everything."))
    screen = lines[begin : end + 1]
    assert len(screen) < HEIGHT, "the cursor's line is one of them"
    assert all(len(line) <= WIDTH for line in (*bars, *screen)), "the terminal would wrap the line"
    found = {line.split()[0]: line for line in screen if line.startswith("  ")}
    assert "8 in each of 2 layers, 4 slots per rank, 0 redundant" in found["experts"] and found[
        "experts"
    ].endswith("default")
    assert found["ranks"].endswith("flag")
    assert re.match("  KV tiers +64 MiB of host memory, 1 MiB in /", found["KV"]) and found["KV"].endswith(
        "flag"
    )
    assert "shm, as all ranks are on one host" in found["dispatch"]
    assert {
        "model",
        "device",
        "rebalancing",
        "weights",
        "step",
        "drafts",
        "API",
        "dashboard",
        "docs",
        "metrics",
        "chat",
    } < {*found}
    assert lines[-2:] == ["wideep: stopping", ""]


def test_a_start_that_fails_amid_a_bar_ends_with_its_error_on_a_sane_terminal(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "tiny")
    ended = run_on_terminal(tmp_path, [str(model), f"--port={free_port()}"], FAKE_EXIT="engine-1:7")
    lines = shown(ended.written)
    assert (ended.status, ended.has_same_modes) == (1, True), ended.written
    assert lines[-2].startswith("wideep serve: rank 1's engine") and lines[-1] == ""
    assert all(line.startswith(("wideep", "Loading")) for line in lines[:-1]), lines


@pytest.mark.crossed("form", every=2)
@pytest.mark.parametrize("form", ["text", "json"])
def test_without_a_terminal_there_is_no_control_character(tmp_path: Path, form: str) -> None:
    model = write_checkpoint(tmp_path / "tiny")
    arguments = ["serve", str(model), f"--port={free_port()}", f"--log-format={form}"]
    with Service(tmp_path, arguments, {"FAKE_LAUNCHER": "1"}) as service:
        service.wait_for_output("Ctrl-C stops everything")
        service.process.send_signal(signal.SIGINT)
        assert service.end()[0] == 0
        assert not set(map(chr, range(32))) - {"\n"} & set(service.output())
        assert not list(tmp_path.glob("**/loading_*"))


def test_a_rank_writes_each_stage_s_begin_and_end_and_seldom_what_is_between(tmp_path: Path) -> None:
    clock = Clock()
    loading = LoadingFile(tmp_path, 3, in_bytes=("weights",), now_s=clock)

    def written() -> dict[str, Any]:
        content: dict[str, Any] = json.loads((tmp_path / "loading_3.json").read_text())["stages"]
        return content

    assert written() == {}
    loading("weights", 1, 100)
    loading("weights", 2, 100)
    assert written() == {"weights": [1, 100, True]}
    clock.now_s += 1
    loading("weights", 3, 100)
    assert written() == {"weights": [3, 100, True]}
    loading.note("Now for something else", stage="graphs")
    assert written() == {"weights": [100, 100, True], "graphs": [0, 1, False]}, (
        "a new stage ends the previous one"
    )


def test_a_bar_adds_up_the_ranks_and_waits_for_the_last(tmp_path: Path) -> None:
    stream = io.StringIO()
    screen = LoadingScreen(tmp_path, 2, stream)
    screen.update()
    first, second = (LoadingFile(tmp_path, rank, in_bytes=("weights",)) for rank in range(2))
    first("weights", 3 << 20, 3 << 20)
    first("kernels", 1, 4)
    screen.update()
    assert shown(stream.getvalue())[-1].startswith("Loading weights:  50%")
    assert "3.00M/6.00M" in shown(stream.getvalue())[-1], "the second rank is assumed to have as much"
    second("weights", 1 << 20, 1 << 20)
    second("kernels", 4, 4)
    screen.update()
    screen.close()
    imports, weights, kernels, end = shown(stream.getvalue())
    first("kernels", 4, 4)
    for rank in (first, second):
        rank.tell(layers=2)
    screen.update()
    screen.close()
    assert shown(stream.getvalue())[-2].startswith("Loading the service: ranks meet")
    assert imports.startswith("Loading torch and transformers: 00:0")
    assert "4.00M/4.00M" in weights and "5/8" in kernels and end == ""


def test_only_the_first_rank_writes_lines_and_none_that_is_started_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for rank, is_restart in ((0, True), (1, False), (0, False)):
        loading = loading_of(rank, is_restart=is_restart, in_bytes=(), environment={})
        assert isinstance(loading, LoadingLines)
        loading.note("Building")
        for done in (1, 2, 3, 3):
            loading("weights", done, 3)
    assert capsys.readouterr().err.splitlines() == ["Building", "Loading weights", "Loaded weights"]
