"""Progress: a bar on a terminal, lines elsewhere, and nothing when it is disabled."""

import io

from server.clients.progress import LINE_EVERY_S, RequestProgress
from tests.support.clock import Clock


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_with_the_failures() -> None:
    stream = _Terminal()
    with RequestProgress(3, "batch", stream=stream) as progress:
        for failed in (False, True, False):
            progress.step(failed=failed)
    assert "batch: 100%" in stream.getvalue()
    assert "3/3" in stream.getvalue() and "failed=1" in stream.getvalue()


def test_a_file_gets_a_line_now_and_then() -> None:
    stream, clock = io.StringIO(), Clock()
    with RequestProgress(5, "batch", lines=True, stream=stream, now_s=clock) as progress:
        progress.step()
        clock.now_s += LINE_EVERY_S
        progress.step(failed=True)
        progress.step()
        clock.now_s += LINE_EVERY_S
        progress.step()
    assert stream.getvalue() == (
        "batch: 2 of 5 done (1 failed), 0.2 requests/s\nbatch: 4 of 5 done (1 failed), 0.2 requests/s\n"
    )


def test_nothing_is_written_where_nobody_asked() -> None:
    stream, clock = io.StringIO(), Clock()
    with RequestProgress(1, "batch", stream=stream, now_s=clock) as progress:
        clock.now_s += 10 * LINE_EVERY_S
        progress.step()
    assert stream.getvalue() == ""
    assert (progress.num_done, progress.num_failed) == (1, 0)
