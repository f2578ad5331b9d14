"""A scripted rank: RankLink and a thread, deterministic tokens, no model.

What it answers is looked up by the prompt's text: the test registers a `Script` under a word that the prompt holds.
A script may wait for a gate, so that a test decides when a token comes. Everything it is told lands in `requests`,
`aborted` and `orders`, which tests wait on. A request that another rank has begun goes on in its script where that rank
left off; `wrong_replays` are those whose beginning is not the script's. An order is answered at once, unless a test says
what with.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from expert_placement.placement import Placement
from scheduler.epochs.orders import Order
from scheduler.moves.reports import ExpertMap, MoveState, PlacementReport
from scheduler.policy.request import FinishReason, Logprobs, RankStats, Request, RequestOutput
from server.link.messages import RankFacts
from server.link.rank_link import RankLink

TIMEOUT_S = 60.0
NUM_BLOCKS = 64
BLOCK_TOKENS = 16


@dataclass
class Script:
    """How to answer the prompts that hold a word."""

    token_ids: Sequence[int]
    finish: FinishReason = FinishReason.STOP
    error: str = ""
    gates: dict[int, threading.Event] = field(default_factory=dict)  # token number -> what it waits for
    num_cached_tokens: int = 0
    tokens_per_step: int = 1


class FakeRank:
    """One rank of a service that answers from scripts."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        address: str,
        token: str,
        *,
        decode: Callable[[Sequence[int]], str],
        max_model_len: int,
        num_restarts: int = 0,
    ) -> None:
        self.rank = rank
        self.scripts: dict[str, Script] = {}
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.orders: list[Order] = []
        self.wrong_replays: list[Request] = []
        self.on_order: Callable[[Order], None] = lambda order: self.link.send_regrouped(order.epoch)
        self.stopped = threading.Event()
        self.losses: list[str] = []
        self._decode = decode
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._step = 0
        self._ended = self._is_killed = False
        facts = RankFacts(
            rank=rank,
            world_size=world_size,
            host="localhost",
            pid=1000 + rank,
            max_model_len=max_model_len,
            num_blocks=NUM_BLOCKS,
            block_tokens=BLOCK_TOKENS,
            max_num_seqs=64,
            num_restarts=num_restarts,
        )
        self.link = RankLink(
            address,
            token,
            facts,
            self,
        )

    def open(self) -> "FakeRank":
        """Attach to the front."""
        self.link.open(TIMEOUT_S)
        return self

    def close(self, reason: str = "") -> None:
        """Leave, and end what is being answered."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        for script in self.scripts.values():
            for gate in script.gates.values():
                gate.set()
        self.link.close(reason)
        for thread in self._threads:
            thread.join(TIMEOUT_S)

    def begin(self, placement: Placement) -> None:
        """Say what serves at the start, as rank 0 does."""
        layers = tuple(range(placement.num_layers))
        self.link.send_experts(
            ExpertMap(
                placement.version,
                placement.num_experts,
                placement.num_ranks,
                layers,
                len(layers),
                placement.slot_expert,
            )
        )
        report = PlacementReport(rank=self.rank, version=placement.version, state=MoveState.SERVING)
        self.link.send_placement(report, placement, expert_bytes=1000)

    def kill(self) -> None:
        """End as an engine does that is killed: in the middle of everything, without a word."""
        with self._changed:
            self._is_killed = self._ended = True
            self._changed.notify_all()
        self.link._end_expected = True
        self.link._shut()

    def wait_for(self, condition: Callable[["FakeRank"], bool]) -> None:
        """Wait until the rank has been told what makes `condition` true."""
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self), TIMEOUT_S), "the rank was not told in time"

    def forget(self) -> None:
        """Drop the scripts and what the rank was told, while it answers nothing."""
        with self._changed:
            self.scripts.clear()
            self.requests.clear()
            self.aborted.clear()

    def submit(self, request: Request) -> None:
        with self._changed:
            self.requests.append(request)
            self._changed.notify_all()
        thread = threading.Thread(target=self._answer, args=(request,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def abort(self, request_id: str) -> None:
        with self._changed:
            self.aborted.append(request_id)
            self._changed.notify_all()

    def regroup(self, order: Order) -> None:
        with self._changed:
            self.orders.append(order)
            self._changed.notify_all()
        self.on_order(order)

    def prepare(self, placement: Placement) -> None:
        """Move nothing: it has no experts."""

    def drop(self, version: int) -> None:
        """Have nothing to give up."""

    def stop(self) -> None:
        self.stopped.set()
        self.link.close()  # on the link's own thread, which close allows

    def lost(self, reason: str, *, is_broken: bool) -> None:
        with self._changed:
            self.losses.append(reason)
            self._changed.notify_all()

    def _script_for(self, request: Request) -> Script:
        text = self._decode(request.prompt_ids)
        for word, script in self.scripts.items():
            if word in text:
                return script
        return Script(
            request.prompt_ids[-request.params.max_tokens :], FinishReason.LENGTH
        )  # the prompt's end

    def _answer(self, request: Request) -> None:
        script = self._script_for(request)
        params = request.params
        token_ids = list(script.token_ids)[: params.max_tokens]
        finish = script.finish if len(token_ids) == len(script.token_ids) else FinishReason.LENGTH
        at = begun = len(request.replayed_ids)
        if tuple(token_ids[:at]) != request.replayed_ids:
            self.wrong_replays.append(request)
        while at < len(token_ids):
            if not self._may_go_on(request, script, at):
                return
            step = token_ids[at : at + script.tokens_per_step]
            at += len(step)
            # As engines do, the last token brings the end along, unless the test wants to decide when it comes.
            ends = at == len(token_ids) and at not in script.gates
            self._send(
                RequestOutput(
                    request_id=request.request_id,
                    token_ids=step,
                    logprobs=[]
                    if params.num_logprobs is None
                    else [_logprobs(t, params.num_logprobs) for t in step],
                    prompt_logprobs=_of_prompt(request) if at == len(step) and not begun else [],
                    num_cached_tokens=script.num_cached_tokens,
                    finish_reason=finish if ends else None,
                    error=script.error if ends else "",
                )
            )
            if ends:
                return
        if self._may_go_on(request, script, len(token_ids)):
            self._send(
                RequestOutput(
                    request_id=request.request_id, token_ids=[], finish_reason=finish, error=script.error
                )
            )

    def _may_go_on(self, request: Request, script: Script, at: int) -> bool:
        """Wait at a gate; answer an abort."""
        gate = script.gates.get(at)
        if gate is not None:
            gate.wait(TIMEOUT_S)
        if self._ended or request.request_id in self.aborted:
            self._send(
                RequestOutput(request_id=request.request_id, token_ids=[], finish_reason=FinishReason.ABORT)
            )
            return False
        return True

    def _send(self, output: RequestOutput) -> None:
        with self._changed:
            if self._is_killed:
                return
            self._step += 1
            stats = RankStats(
                rank=self.rank,
                step=self._step,
                num_running=1,
                num_waiting=0,
                num_free_blocks=NUM_BLOCKS // 4,
                num_blocks=NUM_BLOCKS,
                num_step_tokens=1,
                num_preemptions=0,
                prefix_query_tokens=10 * self._step,
                prefix_hit_tokens=self._step,
            )
            self.link.send([output], stats)


def _of_prompt(request: Request) -> list[Logprobs]:
    """Where wanted, of prompt tokens 1 and on: as of generated ones, and of rank 1."""
    num_top = request.params.num_prompt_logprobs
    return [] if num_top is None else [_logprobs(t, num_top)._replace(rank=1) for t in request.prompt_ids[1:]]


def _logprobs(token_id: int, num_top: int) -> Logprobs:
    """The chosen token is the likeliest, then the ids after it, half as likely each."""
    tops = [token_id + place for place in range(num_top)]
    return Logprobs(token_id, -0.5, tops, [-0.5 - 0.693 * place for place in range(num_top)])
