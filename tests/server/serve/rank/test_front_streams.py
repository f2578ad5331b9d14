"""A rank's connections to several fronts: a front gets the outputs of the requests that it submitted."""

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from scheduler.policy.config import EngineConfig
from scheduler.policy.request import FinishReason, RequestOutput
from server.link.rank_link import LinkError
from server.options.pools import single_pool
from server.serve.rank import front_stream, front_streams
from server.serve.rank.front_stream import FrontStream, StandbyFront
from server.serve.rank.front_streams import STATS_S, SeveralFronts
from server.serve.rank.front_streams import front_stream as connect
from tests.server.serve.rank.test_front_stream import BROKEN, HOME, EndedError, submit
from tests.support.clock import Clock

FRONT = {"ranks_address": "127.0.0.1:1", "token": "t", "others": "127.0.0.1:2 127.0.0.1:3"}
WORKS, IDLES = Mock(num_step_tokens=3), Mock(num_step_tokens=0)


class Link:
    """A fake link that opens."""

    def __init__(self, address: str, _token: str, facts: Any, _receive: Any, **_: Any) -> None:
        self.address, self.facts, self.send, self.close = address, facts, Mock(), Mock()
        self.is_open = False

    def open(self, _timeout_s: float) -> None:
        self.is_open = True

    def outputs(self) -> list[list[str]]:
        """Return the requests of each message so far, and forget them."""
        told = [[output.request_id for output in call.args[0].outputs] for call in self.send.call_args_list]
        self.send.reset_mock()
        return told


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(front_streams, "time", SimpleNamespace(monotonic=clock))
    return clock


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> list[Any]:
    """The connections to three attached fronts, the leading one's first."""
    monkeypatch.setattr(front_stream, "RankLink", Link)
    monkeypatch.setattr(front_stream, "read_slot", lambda *_: SimpleNamespace(num_bytes=5))
    stream = connect(built(), config(), FRONT, {}, pool=single_pool(3)[0], num_ranks=3)
    assert isinstance(stream, SeveralFronts)
    stream.attach(1.0)
    return [stream, *stream._others]


def built() -> Any:
    found: Any = Mock(
        max_model_len=64, num_blocks=8, runner=SimpleNamespace(step=SimpleNamespace(block_tokens=16))
    )
    found.relocation.placement, found.model.layers = HOME, [None]
    return found


def config() -> EngineConfig:
    return EngineConfig(directory=Path(), kv_cache_bytes=1, rank=2, world_size=3)


def output(name: str, *, ends: bool = False) -> RequestOutput:
    return RequestOutput(request_id=name, token_ids=[1], finish_reason=FinishReason.STOP if ends else None)


def test_a_rank_of_a_service_with_one_front_has_the_plain_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_stream, "RankLink", Link)
    monkeypatch.setattr(front_stream, "read_slot", lambda *_: SimpleNamespace(num_bytes=5))
    alone = {"ranks_address": "127.0.0.1:1", "token": "t"}
    assert type(connect(built(), config(), alone, {}, pool=single_pool(3)[0], num_ranks=3)) is FrontStream


def test_it_attaches_to_every_front_with_the_same_facts(streams: list[Any]) -> None:
    assert [each.link.address for each in streams] == [f"127.0.0.1:{port}" for port in (1, 2, 3)]
    assert all(each.link.is_open and each.link.facts == streams[0].link.facts for each in streams)


def test_outputs_go_to_the_front_that_submitted_the_request(streams: list[Any]) -> None:
    leading, second, third = streams
    for stream, name in ((leading, "a"), (second, "b"), (third, "c"), (second, "d")):
        stream.receive(submit(name))
    leading.send([output(name) for name in "abcd"], WORKS)
    assert [each.link.outputs() for each in streams] == [[["a"]], [["b", "d"]], [["c"]]]
    leading.send([output("b", ends=True)], WORKS)
    leading.send([output("c", ends=True), output("d", ends=True)], WORKS)
    assert [each.link.outputs() for each in streams] == [[], [["b"], ["d"]], [["c"]]]
    assert not leading._owners


def test_every_front_gets_statistics_at_intervals_and_when_the_rank_idles(
    streams: list[Any], clock: Clock
) -> None:
    leading, second, _ = streams
    second.receive(submit("b"))
    leading.send([output("b")], WORKS)
    assert [each.link.outputs() for each in streams] == [[[]], [["b"]], [[]]]
    for _ in range(3):
        clock.now_s += STATS_S / 4
        leading.send([output("b")], WORKS)
    assert [each.link.outputs() for each in streams] == [[], [["b"]] * 3, []]
    clock.now_s += STATS_S / 2
    leading.send([output("b")], WORKS)
    assert [each.link.outputs() for each in streams] == [[[]], [["b"]], [[]]]
    leading.send([], IDLES)
    assert [each.link.outputs() for each in streams] == [[[]], [[]], [[]]]


def test_a_killed_front_ends_its_own_requests_only(streams: list[Any]) -> None:
    leading, second, _ = streams
    for stream, name in ((leading, "a"), (second, "b"), (second, "c")):
        stream.receive(submit(name))
    second.receive(BROKEN)
    engine: Any = leading._built.engine
    assert sorted(call.args[0] for call in engine.abort.call_args_list) == ["b", "c"]
    assert second.link.is_open and second.link.facts.served is not None, "it is attached to the replacement"
    leading.send([output("a"), output("b", ends=True), output("c", ends=True)], WORKS)
    assert second.link.outputs() == [[]] and leading.link.outputs() == [["a"]]
    assert not leading._owners and not second._cut_off


def test_only_the_loss_of_the_leading_front_drops_weights_that_are_being_loaded(streams: list[Any]) -> None:
    leading, second, third = streams
    weights: Any = leading._built.engine.weights
    for other in (second, third):
        other.receive(BROKEN)
    weights.forget_staged.assert_not_called()
    leading.receive(BROKEN)
    weights.forget_staged.assert_called_once_with()


def test_a_rank_attaches_to_every_front_of_the_standby_and_the_leading_one_moves_its_store(
    monkeypatch: pytest.MonkeyPatch, streams: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []
    there = {"ranks_address": "b:1", "token": "t", "others": "b:2 b:3"}
    standby = StandbyFront(there, lambda: calls.append("moved"))
    stream = connect(built(), config(), FRONT, {}, pool=single_pool(3)[0], num_ranks=3, standby=standby)
    assert isinstance(stream, SeveralFronts)
    stream.attach(1.0)

    def reach(address: str, _timeout_s: float) -> None:
        if not address.startswith("b:"):
            raise LinkError(address)

    monkeypatch.setattr(front_stream, "reach", reach)
    for each in [stream, *stream._others]:
        each.receive(BROKEN)
        each.link.on_welcome()
    assert [each.link.address for each in [stream, *stream._others]] == ["b:1", "b:2", "b:3"]
    assert calls == ["moved"]
    assert capsys.readouterr().err.count("the standby has taken over") == 1


def test_only_the_leading_front_learns_of_memory_orders_and_reports(streams: list[Any]) -> None:
    leading, second, third = streams
    leading._built.engine.memory.on_switched(4)
    leading.send_memory(1000)
    assert leading.link.send.call_count == 2
    assert not second.link.send.called and not third.link.send.called


def test_the_end_of_the_rank_reaches_every_front(streams: list[Any]) -> None:
    streams[0].close("out of memory")
    for each in streams:
        each.link.close.assert_called_once_with("out of memory")


def test_a_restarted_engine_does_not_wait_for_fronts_that_are_restarting(
    monkeypatch: pytest.MonkeyPatch, streams: list[Any]
) -> None:
    leading, second, third = streams
    begun: list[Any] = []
    monkeypatch.setattr(front_streams, "time", time)
    monkeypatch.setattr(front_streams, "threading", SimpleNamespace(Thread=lambda target, daemon: Mock(start=lambda: begun.append(target))))  # fmt: skip
    for each in streams:
        each.link.is_open = False
    leading.attach(1.0, is_restart=True)
    assert leading.link.is_open and not second.link.is_open
    begun[1]()
    assert third.link.is_open


def test_a_front_that_never_comes_back_ends_the_rank(
    monkeypatch: pytest.MonkeyPatch, streams: list[Any]
) -> None:
    monkeypatch.setattr(streams[1], "_come_back", lambda _until_s: 3)

    def end(status: int) -> None:
        raise EndedError(status)

    monkeypatch.setattr(os, "_exit", end)
    with pytest.raises(EndedError, match="3"):
        streams[1]._attach_later()
