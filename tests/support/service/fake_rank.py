"""The only fake rank of the tests: a paced rank (benchmarks/serving/paced_rank.py) that answers from scripts.

A test registers a `Script` under a word, and prompts that hold the word get its answer. A prompt without a script is answered
with its own end or, if the test chooses so, with itself repeatedly. A script may wait for a gate, so that a test decides when
a token comes. `requests`, `aborted` and `orders` record the calls, and tests wait on them. A request that another rank has
begun continues in its script at that point; `wrong_replays` are requests whose replayed tokens differ from the script. An
order is answered at once, unless a test sets another answer.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from benchmarks.serving.paced_rank import OpenRequest, PacedRank, logprobs_of, prompt_logprobs_of
from expert_placement.placement import Placement
from scheduler.epochs.orders import Order
from scheduler.moves.reports import ExpertMap, MoveState, PlacementReport
from scheduler.policy.request import (
    AdapterOrder,
    AdapterReport,
    FinishReason,
    ForgetPrefixes,
    MemoryOrder,
    RankStats,
    Request,
    RequestOutput,
)
from scheduler.weights.versions import WeightAction, WeightDigests, WeightOrder, WeightReport, WeightState
from server.link.messages import Abort, PlacementUpdate, Regrouped, Stop, Submit, ToRank
from server.link.rank_link import FrontLost

TIMEOUT_S = 60.0
EXPERT_BYTES = 1000


@dataclass
class Script:
    """How to answer the prompts that hold a word."""

    token_ids: Sequence[int]
    finish: FinishReason = FinishReason.STOP
    error: str = ""
    gates: dict[int, threading.Event] = field(default_factory=dict)  # token number -> event to wait for
    num_cached_tokens: int = 0
    num_host_tokens: int = 0  # of the cached ones
    num_disk_tokens: int = 0
    num_peer_tokens: int = 0
    tokens_per_step: int = 1


def experts_of(placement: Placement) -> ExpertMap:
    """Return the message with the experts of a placement."""
    layers = tuple(range(placement.num_layers))
    return ExpertMap(
        placement.version,
        placement.num_experts,
        placement.num_ranks,
        layers,
        len(layers),
        placement.slot_expert,
    )


class FakeRank(PacedRank):
    """One rank of a service that answers from scripts."""

    def __init__(
        self, *place: Any, decode: Callable[[Sequence[int]], str], repeats: bool = False, **how: Any
    ) -> None:
        """Create a `PacedRank`. `repeats`: prompts without a script are answered as by `PacedRank`."""
        self.scripts: dict[str, Script] = {}
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.orders: list[Order] = []
        self.memory_orders: list[MemoryOrder] = []
        self.adapter_orders: list[AdapterOrder] = []
        self.delays_adapters = False  # never reports that it has followed an order about adapters
        self.weight_orders: list[WeightOrder] = []
        self.refuses_weights = ""  # reason to refuse new weights
        self.delays_weights = False  # follows no order about them before `follow_weights`
        self.weights = 0  # number of the version that it serves
        self.forgotten: list[int] = []  # number of earlier requests, for each order to forget prefixes
        self.generations: list[int] = []  # of these orders
        self.wrong_replays: list[Request] = []
        self.on_order: Callable[[Order], None] = lambda order: self.link.send(Regrouped(order.epoch))
        self.stopped = threading.Event()
        self.losses: list[str] = []
        self._decode, self._repeats = decode, repeats
        self._followed: dict[str, Script | None] = {}  # by request id
        super().__init__(*place, **how)

    def begin(self, placement: Placement) -> None:
        """Report the first placement, as rank 0 does."""
        self.link.send(experts_of(placement))
        report = PlacementReport(rank=self.rank, version=placement.version, state=MoveState.SERVING)
        self.link.send(PlacementUpdate(report, placement, expert_bytes=EXPERT_BYTES))

    def kill(self) -> None:
        """End like a killed engine: at once and without a message."""
        self._end()
        self.link._end_expected = True
        self.link._shut()

    def wait_for(self, condition: Callable[["FakeRank"], bool]) -> None:
        """Wait until `condition` holds for the received calls."""
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self), TIMEOUT_S), "the expected call never came"

    def forget(self) -> None:
        """Drop the scripts and recorded calls. Call it while no answer is in progress."""
        with self._changed:
            self.scripts.clear()
            self.requests.clear()
            self.aborted.clear()

    def _note(self, told: list[Any], what: object) -> None:
        with self._changed:
            told.append(what)
            self._changed.notify_all()

    def receive(self, message: ToRank | FrontLost) -> None:
        match message:
            case Submit():
                self._note(self.requests, message.request_at(time.monotonic()))
            case Abort(request_id):
                self._note(self.aborted, request_id)
            case Order():
                self._note(self.orders, message)
                if message.weights:
                    self._report_weights(message.weights, WeightState.SERVING)
                self.on_order(message)
            case AdapterOrder(number, place, digest):
                if not self.delays_adapters:
                    self.link.send(AdapterReport(number, place, digest))
                self._note(self.adapter_orders, message)
            case WeightOrder():
                if not self.delays_weights:
                    self.follow_weights(message)
                self._note(self.weight_orders, message)
            case ForgetPrefixes(generation):
                self.generations.append(generation)
                self._note(self.forgotten, len(self.requests))
            case MemoryOrder():
                self._note(self.memory_orders, message)
            case Stop():
                self.stopped.set()
            case FrontLost(reason):
                self._note(self.losses, reason)
                return
        super().receive(message)

    def follow_weights(self, order: WeightOrder) -> None:
        """Follow an order about weights at once."""
        number, action = order.version.number, order.action
        if action is WeightAction.STAGE and self.refuses_weights:
            self._report_weights(number, WeightState.REFUSED)
        elif action is WeightAction.CHECK:
            self._report_weights(number, WeightState.CHECKED)
        elif action is WeightAction.STAGE or (action is WeightAction.SERVE and not self.weight_orders):
            self._report_weights(number, WeightState.STAGED)
        elif action is WeightAction.SERVE:
            self._report_weights(number, WeightState.SERVING)

    def _report_weights(self, number: int, state: WeightState) -> None:
        self.weights = number if state is WeightState.SERVING else self.weights
        self.link.send(
            WeightReport(
                rank=self.rank, number=number, state=state, reason=self.refuses_weights,
                digests=WeightDigests("plain", np.ones((1, 1), np.uint64)),
            )
        )  # fmt: skip

    def _script_for(self, request: Request) -> Script | None:
        text = self._decode(request.prompt_ids)
        for word, script in self.scripts.items():
            if word in text:
                return script
        if self._repeats:
            return None
        return Script(request.prompt_ids[-request.params.max_tokens :], FinishReason.LENGTH)

    def _advance(self, each: OpenRequest) -> RequestOutput | None:
        request, params = each.request, each.request.params
        if request.request_id not in self._followed:
            self._followed[request.request_id] = self._script_for(request)
        script = self._followed[request.request_id]
        if script is None:
            return super()._advance(each)
        token_ids, at = list(script.token_ids)[: params.max_tokens], each.num_done
        if at == (begun := len(request.replayed_ids)) and tuple(token_ids[:at]) != request.replayed_ids:
            self.wrong_replays.append(request)
        if at in script.gates and not script.gates[at].is_set():
            return None
        step = token_ids[at : at + script.tokens_per_step]
        each.num_done += len(step)
        # As in engines, the last token carries the end, unless the test has a gate for it.
        ends = each.num_done == len(token_ids) and not (step and each.num_done in script.gates)
        is_whole = len(token_ids) == len(script.token_ids)
        return RequestOutput(
            request_id=request.request_id,
            token_ids=step,
            logprobs=[]
            if params.num_logprobs is None
            else [logprobs_of(token, params.num_logprobs) for token in step],
            prompt_logprobs=prompt_logprobs_of(request) if at == begun == 0 else [],
            num_cached_tokens=script.num_cached_tokens,
            num_host_tokens=script.num_host_tokens,
            num_disk_tokens=script.num_disk_tokens,
            num_peer_tokens=script.num_peer_tokens,
            finish_reason=(script.finish if is_whole else FinishReason.LENGTH) if ends else None,
            error=script.error if ends else "",
            weights=self.weights if ends else 0,
        )

    def _stats(self, num_step_tokens: int) -> RankStats:
        """Report every tenth prompt token as a prefix hit."""
        known = {"prefix_query_tokens": 10 * self.num_steps, "prefix_hit_tokens": self.num_steps}
        return replace(super()._stats(num_step_tokens), **known)
