"""The fronts of a node and the leading node: what keeps their requests, what ends them, and what a lost node leaves behind."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from server.front.several.board import _LEADER_HEARD, Board
from server.front.several.front_map import FENCE_S, LOST_S
from server.front.several.seat import Seat
from server.serve.front import other_nodes
from server.serve.front.other_nodes import OtherNodes
from server.serve.front.several_fronts import FrontOfSeveral
from tests.server.front.several.test_mirror import Nodes
from tests.server.link.test_front_peers import front

TIMEOUT_S = 30.0
# The leading front, and one of the second node that is not its first.
LEADING, SECOND = 0, 3


def hear_before(board: Board, seconds: float) -> None:
    """Let the node of a board have heard of the leading one some time ago."""
    board._head[_LEADER_HEARD] = time.monotonic_ns() - int(seconds * 1e9)


def joined(seat: Seat, address: str) -> OtherNodes:
    """Return a front's streams, with the address of the leading front."""
    assert seat.fronts is not None
    addresses = (address, *seat.fronts.addresses[1:])
    fronts = seat.fronts._replace(addresses=addresses, token="secret")
    return OtherNodes(seat._replace(fronts=fronts), fronts, None, is_again=True)


@asynccontextmanager
async def two_nodes(folder: Path) -> AsyncIterator[tuple[OtherNodes, OtherNodes, Board]]:
    """Return the leading front's streams, those of a front on a node without its first front, and the board of that node."""
    nodes = Nodes(folder, 2)
    async with front() as (ranks, address):
        leading, second = (joined(nodes.fronts[number], address) for number in (LEADING, SECOND))
        ranks.on_peer = leading.serve
        yield leading, second, nodes.fronts[SECOND].board


def test_requests_of_a_node_continue_while_its_first_front_is_away(tmp_path: Path) -> None:
    async def run() -> None:
        async with two_nodes(tmp_path) as (leading, second, board):
            hear_before(board, FENCE_S - 1)
            leading._heard_s[1] = before_s = time.monotonic() - LOST_S + 1
            await second.start()
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    while board.leader_silent_s > FENCE_S - 1:
                        await asyncio.sleep(0.001)
            finally:
                await second.close()
            heard_s = leading._heard_s[1]
            assert heard_s is not None and heard_s > before_s + 1, (
                "the leading front does not count it as lost"
            )

    asyncio.run(run())


def test_a_leading_front_that_takes_no_message_keeps_no_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like a stopped process: its port accepts connections. It may count this node as lost when it continues."""
    monkeypatch.setattr(other_nodes, "_CONNECT_S", 0.1)

    async def run() -> None:
        async with two_nodes(tmp_path) as (leading, second, board):
            monkeypatch.setattr(leading, "_serve", lambda _stream: asyncio.sleep(TIMEOUT_S))
            hear_before(board, 2.0)
            await second._report()
            assert board.leader_silent_s >= 2.0
            await leading.close()

    asyncio.run(run())


@pytest.mark.parametrize("silent_s", [FENCE_S - 1, FENCE_S + 1])
@pytest.mark.parametrize("how", ["a report", "a refused connection", "a new process"])
def test_only_a_message_of_the_leading_node_ends_a_time_without_it(
    tmp_path: Path, how: str, silent_s: float
) -> None:
    """The leading front may have decided meanwhile, and this node has the state from before."""

    async def run() -> None:
        async with two_nodes(tmp_path) as (_, second, board):
            hear_before(board, silent_s)
            if how == "a report":
                await second._report()
            elif how == "a refused connection":
                with pytest.raises(ConnectionRefusedError):
                    await second._reach(0, "127.0.0.1:1")
            else:
                joined(second._seat, "127.0.0.1:1")
            assert (board.leader_silent_s < 1.0) == (silent_s < FENCE_S)

    asyncio.run(run())


def test_the_needs_of_a_lost_nodes_fronts_are_forgotten() -> None:
    needs, events, take_over = Mock(), Mock(), Mock()
    nodes: Any = SimpleNamespace(fronts_of=lambda node: range(2 * node, 2 * node + 2))
    fronts: Any = SimpleNamespace(take_over=take_over)
    FrontOfSeveral._follow_nodes(fronts, nodes, needs, events)
    nodes.on_lost(1)
    needs.forget.assert_called_once_with(range(2, 4))
    take_over.assert_called_once_with(range(2, 4))
    events.note.assert_called_once_with("fronts_lost", "the node of fronts 2, 3 does not answer")
