import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest

from expert_placement.placement import linear_placement
from scheduler.epochs.orders import Order
from scheduler.moves.reports import ExpertMap, MoveState, PlacementReport
from scheduler.policy.config import EngineConfig
from scheduler.policy.request import (
    FinishReason,
    ForgetPrefixes,
    MemoryOrder,
    Request,
    RequestOutput,
    SamplingParams,
)
from scheduler.weights.versions import WeightAction, WeightOrder, WeightReport, WeightState, WeightVersion
from server.link.messages import MemorySwitched, MemoryUse, RankFacts, Regrouped, Submit, ToRank
from server.link.rank_link import FrontLost, LinkError, RefusedError
from server.options.pools import single_pool
from server.serve.children import FRONT_IS_GONE
from server.serve.rank import front_stream
from server.serve.rank.front_stream import FrontStream, StandbyFront

FRONT = {"ranks_address": "127.0.0.1:1", "token": "t"}
HOME = linear_placement(2, 6, 3).with_version(7)
BROKEN = FrontLost("the connection broke", is_broken=True)


class EndedError(Exception):
    """Raised in place of the process's end."""


class Link:
    """A fake link. `errors` prescribes how opened links end."""

    errors: ClassVar[list[LinkError | None]] = []
    facts: ClassVar[list[RankFacts]] = []
    addresses: ClassVar[list[str]] = []
    order: ClassVar[Order | None] = None  # arrives with the front's welcome

    def __init__(
        self,
        _address: str,
        _token: str,
        facts: RankFacts,
        receive: Callable[[ToRank | FrontLost], None],
        *,
        pool: range,
        cluster_key: bytes | None,
    ) -> None:
        self.facts.append(facts)
        self.addresses.append(_address)
        self.send, self._receive = Mock(), receive
        self.on_welcome: Callable[[], None] = lambda: None

    def open(self, _timeout_s: float) -> None:
        error = self.errors.pop(0)
        if error is not None:
            raise error
        self.on_welcome()
        if self.order is not None:
            self._receive(self.order)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> FrontStream:
    """A stream. Ending the process raises EndedError instead."""

    def end(status: int) -> None:
        raise EndedError(status)

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(front_stream, "RankLink", Link)
    monkeypatch.setattr(front_stream, "read_slot", lambda *_: SimpleNamespace(num_bytes=5))
    Link.errors, Link.facts, Link.addresses, Link.order = [], [], [], None
    built: Any = Mock(
        max_model_len=64, num_blocks=8, runner=SimpleNamespace(step=SimpleNamespace(block_tokens=16))
    )
    built.relocation.placement, built.model.layers = HOME, [None]
    environment = {"WIDEEP_RESTARTS": "1", "WIDEEP_RESTARTABLE_IN_S": "4.5"}
    config = EngineConfig(directory=Path(), kv_cache_bytes=1, rank=2, world_size=3)
    return FrontStream(built, config, FRONT, environment, pool=single_pool(3)[0], num_ranks=3, newest_epoch=4)


def submit(name: str) -> Submit:
    request = Request(request_id=name, prompt_ids=(1,), params=SamplingParams(max_tokens=1), arrival_s=0.0)
    return Submit.of(request, now_s=0.0)


def test_a_request_reaches_the_engine_with_the_time_that_is_left(stream: FrontStream) -> None:
    stream.receive(submit("a")._replace(timeout_s=30.0))
    engine: Any = stream._built.engine
    [taken] = engine.submit.call_args.args
    assert taken.prompt_ids == (1,) and 29 < taken.deadline_s - time.monotonic() <= 30


def test_a_rank_that_the_front_gave_up_ends(stream: FrontStream, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(EndedError, match="1"):
        stream.receive(FrontLost("the front closed the stream", is_broken=False))
    assert capsys.readouterr().err == "rank 2: the front closed the stream\n"


def test_a_rank_comes_back_to_a_front_that_was_killed_with_what_it_has_to_know(stream: FrontStream) -> None:
    built: Any = stream._built
    for name in ("open", "ended"):
        stream.receive(submit(name))
    stream.send([RequestOutput(request_id="ended", token_ids=[], finish_reason=FinishReason.STOP)], Mock())
    stream.receive(Order(4, (0, 2), linear_placement(2, 6, 2)))
    stream.receive(Order(5, (0, 1, 2), HOME))
    stream.receive(Order(6, (0, 2), linear_placement(2, 6, 2)))
    Link.errors = [LinkError("no answer"), None]
    stream.receive(BROKEN)
    assert [call.args for call in built.engine.abort.call_args_list] == [("open",)]
    served = Link.facts[-1].served
    assert served is not None and (served.epoch, served.version, served.home) == (6, 7, HOME)
    assert Link.facts[0].served is None
    assert Link.facts[0].loaded is not None and Link.facts[0].loaded.epoch == 4, "of earlier engines"


def test_what_ends_of_a_broken_link_is_not_taken_for_the_same_requests_that_the_front_gave_anew(
    stream: FrontStream,
) -> None:
    """The front may already have replayed them to this rank before the engine processes the aborts."""
    for name in ("aborted", "given back", "ended"):
        stream.receive(submit(name))
    Link.errors = [None]
    stream.receive(BROKEN)
    for name in ("aborted", "given back"):
        stream.receive(submit(name))
    before = [
        RequestOutput(request_id="aborted", token_ids=[1]),
        RequestOutput(request_id="aborted", token_ids=[], finish_reason=FinishReason.ABORT),
        RequestOutput(request_id="given back", token_ids=[], is_returned=True),
        RequestOutput(request_id="ended", token_ids=[1], finish_reason=FinishReason.STOP),
    ]
    after = [
        RequestOutput(request_id="aborted", token_ids=[2]),
        RequestOutput(request_id="given back", token_ids=[], is_returned=True),
    ]
    stream.send([*before, *after], Mock())
    link: Any = stream.link
    assert link.send.call_args.args[0].outputs == after
    assert stream._open_ids == {"aborted"} and not stream._cut_off


def test_what_answers_an_order_that_comes_with_the_welcome_reaches_the_new_front(stream: FrontStream) -> None:
    """The reader of the new link processes the order before `open` returns: the step loop may be faster."""
    engine: Any = stream._built.engine
    engine.regroup = lambda order: stream.link.send(Regrouped(order.epoch))
    before: Any = stream.link
    Link.errors, Link.order = [None], Order(5, (0, 1, 2), HOME)
    stream.receive(BROKEN)
    now: Any = stream.link
    assert now is not before and not before.send.called
    now.send.assert_called_once_with(Regrouped(5))


def test_after_a_resize_the_experts_slots_belong_to_the_present_number_of_ranks(stream: FrontStream) -> None:
    before = linear_placement(2, 6, 2)
    built: Any = stream._built
    built.experts = ExpertMap(0, 6, 2, (0, 1), 2, before.slot_expert)
    stream.report(PlacementReport(rank=0, version=7, state=MoveState.SERVING, digest=HOME.digest()))
    link: Any = stream.link
    [experts] = [call.args[0] for call in link.send.call_args_list if isinstance(call.args[0], ExpertMap)]
    assert (experts.version, experts.num_ranks) == (7, 3)
    assert experts.slot_expert.shape == HOME.slot_expert.shape


def test_memory_is_sent_when_it_has_changed_and_again_to_a_new_front(stream: FrontStream) -> None:
    before: Any = stream.link
    for resident_bytes in (1000, 1005, 995, 1011):
        stream.send_memory(resident_bytes)
    assert [call.args for call in before.send.call_args_list] == [(MemoryUse(1000),), (MemoryUse(1011),)]
    Link.errors = [None]
    stream.receive(BROKEN)
    stream.send_memory(1011)
    after: Any = stream.link
    after.send.assert_called_once_with(MemoryUse(1011))


def test_a_memory_order_reaches_the_engine_and_a_new_front_learns_of_it(stream: FrontStream) -> None:
    memory: Any = stream._built.engine.memory
    order = MemoryOrder(3, has_cache=False)
    stream.receive(order)
    memory.order.assert_called_once_with(order)
    memory.ordered, Link.errors = order, [None]
    stream.receive(BROKEN)
    assert (Link.facts[0].memory, Link.facts[-1].memory) == (None, order)
    memory.on_switched(3)
    link: Any = stream.link
    link.send.assert_called_once_with(MemorySwitched(3))


def test_an_order_about_weights_reaches_the_engine_and_a_new_front_learns_of_it(stream: FrontStream) -> None:
    weights: Any = stream._built.engine.weights
    order = WeightOrder(action=WeightAction.SERVE, version=WeightVersion(3))
    stream.receive(order)
    weights.order.assert_called_once_with(order)
    weights.newest, Link.errors = order, [None]
    stream.receive(BROKEN)
    assert (Link.facts[0].weights, Link.facts[-1].weights) == (None, order)
    weights.forget_staged.assert_called_once_with()
    report = WeightReport(rank=2, number=3, state=WeightState.SERVING)
    weights.on_report(report)
    link: Any = stream.link
    link.send.assert_called_once_with(report)


def test_a_new_front_learns_the_generations_of_cached_prefixes(stream: FrontStream) -> None:
    engine: Any = stream._built.engine
    stream.receive(ForgetPrefixes(7))
    engine.forget_prefixes.assert_called_once_with(7)
    engine.forgotten, engine.kv_generation, Link.errors = 7, 9, [None]
    stream.receive(BROKEN)
    assert (Link.facts[-1].forgotten, Link.facts[-1].kv_generation) == (7, 9)


def test_a_rank_that_the_new_front_refuses_ends_to_be_started_again(stream: FrontStream) -> None:
    Link.errors = [RefusedError("rank 2 is already attached")]
    with pytest.raises(EndedError, match="1"):
        stream.receive(BROKEN)


def test_a_rank_to_which_no_front_comes_back_ends_with_its_service(stream: FrontStream) -> None:
    stream._config = replace(stream._config, front_recovery_timeout_s=0.0)
    with pytest.raises(EndedError, match=str(FRONT_IS_GONE)):
        stream.receive(BROKEN)


def test_the_front_is_told_how_often_an_engine_was_started_again(stream: FrontStream) -> None:
    [facts] = Link.facts
    assert (facts.rank, facts.world_size, facts.num_restarts, facts.restartable_in_s) == (2, 3, 1, 4.5)


STANDBY = {"ranks_address": "127.0.0.1:2", "token": "t"}


def with_standby(
    stream: FrontStream, monkeypatch: pytest.MonkeyPatch, reachable: Sequence[set[str]]
) -> list[str]:
    """Give a stream a standby. `reachable`: the addresses that accept connections at each attempt. Returns the calls."""
    calls: list[str] = []
    stream.standby = StandbyFront(STANDBY, lambda: calls.append("taken over"))
    attempts = iter(reachable)
    at: list[set[str]] = []

    def reach(address: str, _timeout_s: float) -> None:
        if address == FRONT["ranks_address"]:
            at[:] = [next(attempts)]
        if address not in at[0]:
            raise LinkError(address)

    monkeypatch.setattr(front_stream, "reach", reach)
    monkeypatch.setattr(front_stream, "RETRY_S", 0.0)
    Link.addresses.clear()
    return calls


def test_a_rank_attaches_to_the_standby_that_has_taken_over_and_then_knows_no_other_front(
    stream: FrontStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = FRONT["ranks_address"], STANDBY["ranks_address"]
    calls = with_standby(stream, monkeypatch, [set(), {second}, {second}, {second}])
    built: Any = stream._built
    built.engine.regroup.side_effect = lambda _order: calls.append("order")
    Link.order = Order(4, (0, 2), linear_placement(2, 6, 2))
    Link.errors = [LinkError("it has not taken over yet"), LinkError("nor now"), None]
    stream.receive(BROKEN)
    assert Link.addresses == [second] * 3
    assert calls == ["taken over", "order"], "the store has moved before the order comes"
    Link.errors, Link.order = [None], None
    stream.receive(BROKEN)  # a front that replaces that one
    assert Link.addresses[3:] == [second] and first not in Link.addresses


def test_a_rank_returns_to_a_killed_front_that_is_back_before_the_standby_leads(
    stream: FrontStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = FRONT["ranks_address"], STANDBY["ranks_address"]
    calls = with_standby(stream, monkeypatch, [{second}, {first, second}])
    Link.errors = [LinkError("it does not lead yet"), None]
    stream.receive(BROKEN)
    assert Link.addresses == [second, first] and calls == []
    assert stream.standby is not None
