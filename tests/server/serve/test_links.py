"""Pairs of nodes: each is tested once, with no node in two pairs at a time. Unreachable, slow and clock-skewed nodes are named."""

import concurrent.futures
import itertools
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from server.machine.interfaces import Taken
from server.machine.report import Check, CheckStatus
from server.serve.preflight.equal import Identity
from server.serve.store import links
from server.serve.store.links import LinkFigures, judge, listening, measure, reach, rounds_of_pairs

LO = Taken("lo", "127.0.0.1", "named by a test")
GOOD = LinkFigures(0.1, 0.2, 20.0, 22.0, 0.001)
TIMEOUT_S = 60.0


class Room:
    """Nodes as threads."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self._barrier = threading.Barrier(len(names), timeout=TIMEOUT_S)
        self._said: list[Any] = [None] * len(names)

    def gather(self, number: int, value: Any) -> list[Any]:
        self._said[number] = value
        self._barrier.wait()
        said = list(self._said)
        self._barrier.wait()
        return said


class Node:
    """One node of a room."""

    def __init__(self, room: Room, number: int) -> None:
        self._room, self.number = room, number

    @property
    def names(self) -> Sequence[str]:
        return self._room.names

    def gather(self, stage: str, value: Any, timeout_s: float) -> list[Any]:
        return self._room.gather(self.number, value)


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4, 7, 16])
def test_every_pair_meets_once_and_no_node_is_in_two_at_a_time(num_nodes: int) -> None:
    rounds = rounds_of_pairs(num_nodes)
    for pairs in rounds:
        nodes = [node for pair in pairs for node in pair]
        assert len(nodes) == len(set(nodes))
    met = [pair for pairs in rounds for pair in pairs]
    assert sorted(met) == list(itertools.combinations(range(num_nodes), 2))


def all_nodes(names: Sequence[str], check: Any) -> list[list[Check]]:
    room = Room(names)
    with concurrent.futures.ThreadPoolExecutor(len(names)) as threads:
        return list(threads.map(lambda number: check(Node(room, number)), range(len(names))))


def test_nodes_reach_and_measure_each_other_and_all_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_MOST_CHUNKS", 4)

    def check(node: Node) -> list[Check]:
        with listening(LO) as port:
            return [*reach(node, LO, port), *measure(node, LO, port)]

    found = all_nodes(["a", "b", "c"], check)
    assert found[0] == found[1] == found[2]
    assert found[0][0].status is CheckStatus.OK and "a on lo, b on lo, c on lo" in found[0][0].text
    measured = [check for check in found[0] if check.name == "link"]
    assert [check.text.partition(":")[0] for check in measured] == ["a and b", "a and c", "b and c"]
    assert all(check.figures["there_gbit"] > 0 and check.figures["latency_ms"] > 0 for check in measured)
    assert found[0][-1].name == "clocks" and found[0][-1].status is CheckStatus.OK


def test_a_closed_port_is_named_by_both_ends() -> None:
    def check(node: Node) -> list[Check]:
        with listening(LO) as port:
            return reach(node, LO, 1 if node.number == 1 else port)  # no server listens on port 1

    found = all_nodes(["a", "b"], check)
    assert found[0] == found[1]
    assert [(check.status, check.text) for check in found[0]] == [
        (CheckStatus.FAILURE, "a cannot reach b on lo: nothing listens at 127.0.0.1 port 1")
    ]


@pytest.mark.parametrize(
    ("taken", "sentence"),
    [
        (
            Taken("eth7", "", "GLOO_SOCKET_IFNAME names it", "there is none"),
            "on eth7: eth7 has no address there",
        ),
        (Taken("lo", "127.0.1.1", "the host name"), "on lo: 127.0.1.1 is a loopback address"),
    ],
)
def test_a_wrong_interface_is_named_by_both_ends(
    taken: Taken, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    which = threading.local()
    monkeypatch.setattr(links, "identity", lambda: which.identity)

    def check(node: Node) -> list[Check]:
        which.identity = Identity("host", f"network {node.number}")
        mine = taken if node.number == 1 else LO._replace(address="127.0.0.2")
        with listening(mine) as port:
            return reach(node, mine, port)

    found = all_nodes(["a", "b"], check)
    assert found[0] == found[1]
    assert any(f"a cannot reach b {sentence}" == check.text for check in found[0])


@pytest.mark.parametrize(
    ("figures", "status", "sentence"),
    [
        (GOOD, CheckStatus.OK, "a and b: 20.0 and 22.0 Gbit/s, round trip 0.10 ms (p99 0.20 ms)"),
        (GOOD._replace(back_gbit=0.4), CheckStatus.WARNING, "which is slow: see docs/nodes.md"),
        (GOOD._replace(latency_ms=3.0), CheckStatus.WARNING, "which is slow"),
        (
            GOOD._replace(there_gbit=8.0),
            CheckStatus.WARNING,
            "the median of all pairs is 20.0 Gbit/s: check the cable",
        ),
        (
            "TimeoutError: timed out",
            CheckStatus.FAILURE,
            "a and b: the measurement failed: TimeoutError: timed out",
        ),
    ],
)
def test_a_slow_or_a_broken_link_is_named(
    figures: LinkFigures | str, status: CheckStatus, sentence: str
) -> None:
    checks = judge(["a", "b", "c"], {(0, 1): figures, (0, 2): GOOD, (1, 2): GOOD})
    assert checks[0].status is status and sentence in checks[0].sentence, checks[0].sentence
    assert [check.status for check in checks[1:]] == [CheckStatus.OK] * 3


def test_a_clock_that_is_off_is_a_warning_with_its_node() -> None:
    checks = judge(["a", "b"], {(0, 1): GOOD._replace(skew_s=-7.25)})
    assert checks[1].status is CheckStatus.WARNING
    assert checks[1].sentence.startswith(
        "the clock of b is -7.2 s off that of a: synchronise both with a time server"
    )
