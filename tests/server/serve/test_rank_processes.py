"""The line between a front and its launcher: messages both ways, successive fronts, and damaged lines."""

import asyncio
import os
from collections.abc import Callable

from server.serve.rank_processes import (
    LAUNCHER_VARIABLE,
    FrontLine,
    KeepRanks,
    LauncherLine,
    Message,
    RankEnded,
    StartRanks,
    read_line,
    write_line,
)
from tests.support.service.service_processes import wait_until


def test_messages_keep_their_values() -> None:
    messages: list[Message] = [StartRanks(4), KeepRanks(2), RankEnded(3, "too little memory\nat all")]
    assert [read_line(write_line(each)) for each in messages] == messages
    for line in (b"", b"{", b"[]", b'{"start_ranks": 4, "more": 1}', b'{"keep_ranks": "2"}', b"7"):
        assert read_line(line) is None


def test_a_front_and_its_replacement_use_the_same_line() -> None:
    line, ended = FrontLine(), list[tuple[int, str]]()

    async def front(*sizes: int) -> None:
        own = LauncherLine.of({LAUNCHER_VARIABLE: str(line.fronts_fd)}, lambda *what: ended.append(what))
        assert own is not None
        own.start(sizes[0])
        own.keep(sizes[1])

    asyncio.run(front(3, 2))
    os.write(line.fronts_fd, b'{"keep_ra')  # it died within a line
    asyncio.run(front(4, 4))
    assert line.read() == [StartRanks(3), KeepRanks(2), StartRanks(4), KeepRanks(4)]
    assert line.read() == []
    line.close()


def test_a_front_hears_of_ranks_that_ended() -> None:
    line, ended = FrontLine(), list[tuple[int, str]]()

    async def until(is_true: Callable[[], bool]) -> None:
        while not is_true():
            await asyncio.sleep(0.002)

    async def front() -> None:
        own = LauncherLine.of({LAUNCHER_VARIABLE: str(line.fronts_fd)}, lambda *what: ended.append(what))
        assert own is not None
        line.send(RankEnded(2, "no memory"))
        line.send(RankEnded(3, "killed"))
        await asyncio.wait_for(until(lambda: len(ended) == 2), 20)

    asyncio.run(front())
    assert ended == [(2, "no memory"), (3, "killed")]
    line.close()


def test_without_a_launcher_there_is_no_line() -> None:
    assert LauncherLine.of({}, lambda _rank, _reason: None) is None


def test_a_front_that_does_not_read_does_not_stop_the_launcher() -> None:
    line = FrontLine()
    for rank in range(10_000):
        line.send(RankEnded(rank, "killed" * 100))
    wait_until(lambda: line.read() == [], lambda: "there is something to read")
    line.close()
