"""The requests that the front has accepted: routed, journaled, submitted, fed, and ended exactly once.

Everything here runs in the front's event loop. `routing.submissions` has the way of a choice to a rank, `waiting` the choices
that are at no rank, and `timing` the measurement of tokens.

The requests of a lost rank move to other ranks. The prompt, the parameters with their seed and the delivered tokens let
another rank generate the same rest of the answer. Without a rank they wait, and their deadlines keep running.

Requests move between ranks (`moves`): one that waits while another rank has room, and one that runs if its rank is short of
blocks or draining. The front withdraws it and submits it again with its delivered tokens, so the other rank generates the same
rest of the answer. Until its rank has released it, it counts as being there, also if its client leaves or that rank is lost.
A prefill rank releases a request by itself, with its first token, and another rank generates the rest of the answer.
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from kvcache.images import ImageRowsError
from scheduler.policy.request import FinishReason, RankStats, RequestOutput, Withdraw
from scheduler.structure.compiler import CLIENTS_FAULT, StructureError
from server.front import errors, waiting
from server.front.adapters.places import RequestAdapters
from server.front.admission import Admission, SharedCounts
from server.front.detokenizer import Decoder
from server.front.errors import ApiError
from server.front.generations import MAX_UNREAD_TOKENS, NOBODY, UNREAD_S, Answer, Ask, Asker, Generation
from server.front.journal import MAX_INCIDENTS, Journal
from server.front.routing.loads import MoveCause
from server.front.routing.moves import Moves
from server.front.routing.prefix_sources import PrefixSources
from server.front.routing.router import Router
from server.front.routing.submissions import NEW, Resubmission, Submissions
from server.front.timing import RequestCounts, TokenTimes
from server.link.messages import Abort, RankFacts
from server.link.ranks import Ranks

_LOG = logging.getLogger("wideep.front")
_NO_RANK_YET = 0  # any value, until the request is submitted
SLEEP = "sleep"  # who pauses, by default
RANK_GRACE_S = 1.0  # a rank ends a late request itself; if it does not, the front does after this time


class Requests:
    """The accepted requests that have no outcome yet."""

    def __init__(
        self,
        *,
        decoder: Decoder,
        ranks: Ranks,
        router: Router,
        journal: Journal,
        moves: Moves,
        metrics: RequestCounts,
        timeout_s: float,
        admission: Admission | None = None,
        on_ask: Callable[[Ask], None] = lambda _ask: None,
        on_answer: Callable[[Answer], None] = lambda _answer: None,
        why_not_ready: Callable[[], str | None] = lambda: None,
        who_asks: Callable[[], Asker] = lambda: NOBODY,
        label_of: Callable[[int | None], str] = lambda _number: "",
        adapters: RequestAdapters | None = None,
        shared: SharedCounts | None = None,
    ) -> None:
        """Args: timeout_s is the deadline of each request, 0 for none; admission limits open requests, None for no limit;
        adapters has the places of the requests' adapters, None if no request has one.

        on_ask is called for every accepted choice, on_answer for every accepted request. why_not_ready returns the reason to
        refuse requests now, or None; who_asks returns the client of an `open` call. label_of returns the label of a version of the
        weights, or of the serving one for None. shared has the counts of all fronts; None if this is the only one.
        """
        self._decoder = decoder
        self._ranks = ranks
        self._router = router
        self._journal = journal
        self._moves = moves
        moves.on_leaving = self._announce
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._admission = admission or Admission(None)
        self._open: dict[str, Generation] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._waiting = waiting.WaitingChoices(self._submit)
        # Ranks and requests that left them while they lived: such a rank may still send outputs of the request, up to its end.
        self._left: set[tuple[int, str]] = set()
        self._sources = PrefixSources()
        self._submissions = Submissions(ranks, router, journal, self._sources, adapters)
        self._times = TokenTimes(metrics)
        self._on_ask, self._on_answer = on_ask, on_answer
        self._why_not_ready = why_not_ready
        self._who_asks, self._label_of, self._shared = who_asks, label_of, shared
        self._adapters = adapters
        if adapters is not None:
            adapters.on_resident, adapters.on_failed = self._waiting.submit_parked, self._fail_adapter
        self._due: list[Answer] = []  # answers with pieces of the step being delivered
        self._closed: ApiError | None = None
        self._paused_by: dict[str, bool] = {}  # whether each pause keeps also requests that ranks had
        self._num_submitted = 0  # open choices that a rank has, or had
        self._num_answers = 0
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    @property
    def num_answers(self) -> int:
        """Number of client requests that are being answered, regardless of their choices; by all fronts."""
        return self._num_answers if self._shared is None else self._shared.num_answers

    @property
    def num_open(self) -> int:
        """Accepted choices without an outcome."""
        return len(self._open)

    @property
    def num_unbounded(self) -> int:
        """Accepted choices without an outcome, excluding answers that bound their choices at ranks."""
        return sum(generation.asker.most_choices is None for generation in self._open.values())

    @property
    def num_refused(self) -> int:
        """Choices refused at the limit since the start."""
        return self._admission.num_refused

    def open(self, request_id: str, asks: Sequence[Ask], *, is_probe: bool = False) -> Answer:
        """Accept a client's request: submit every choice to a rank.

        Args:
            is_probe: Whether it is a health probe, which is accepted regardless of the limit.

        Raises:
            ApiError: The service is ending, not ready or full, or the client's identity cannot be read.
        """
        asker = self._who_asks()
        if self._closed is not None:
            raise self._closed
        if (reason := self._why_not_ready()) is not None:
            raise errors.not_ready(reason)
        if self._admission.is_bounded and not is_probe:
            self._check_room(len(asks), asker.key_id)
        answer = Answer(request_id, self._close, self._due.append)
        self._on_answer(answer)
        followers: deque[Generation] = deque()
        try:
            num_tokens = 0
            for number, ask in enumerate(asks):
                if self._closed is not None:  # the service ended while a choice was submitted
                    raise self._closed
                is_held = asker.most_choices is not None and number >= asker.most_choices
                is_queued = num_tokens > waiting.TOKENS_AT_ONCE
                self._start(answer, ask, asker, followers, is_held=is_held, is_queued=is_queued)
                num_tokens += 0 if is_held else len(ask.request.prompt_ids)
        except BaseException:  # the choices before it will have no reader
            for generation in reversed(answer.generations):
                if generation.ask.request.request_id in self._open:
                    self._abort(generation, FinishReason.ABORT)
            raise
        self._count_answer(1)
        self._metrics.note_request(len(asks), max(ask.request.params.max_tokens for ask in asks))
        return answer

    def _count_answer(self, by: int) -> None:
        self._num_answers += by
        if self._shared is not None:
            self._shared.count_answer(by)

    def _check_room(self, num_more: int, key_id: str) -> None:
        opened, shared = self._open.values(), self._shared
        by_key = Counter(generation.asker.key_id for generation in opened) if shared is None else Counter()
        self._admission.check(
            num_more,
            num_open=len(opened) if shared is None else shared.num_open,
            num_own=by_key[key_id] if shared is None else shared.num_of_key(key_id),
            num_keys=len(by_key.keys() | {key_id}) if shared is None else shared.num_keys(key_id),
            num_waiting=sum(generation.first_token_s is None for generation in opened),
            now_s=time.monotonic(),
        )

    def deliver(self, rank: int, outputs: Sequence[RequestOutput]) -> None:
        """Feed a rank's outputs to their choices, except for requests that have ended here already."""
        now_s = time.monotonic()
        try:
            for output in outputs:
                generation = self._open.get(output.request_id)
                if (rank, output.request_id) in self._left:
                    if output.finish_reason is not None or output.is_returned:
                        self._left.remove((rank, output.request_id))
                    continue
                if generation is None or generation.rank != rank or output.request_id in self._waiting:
                    continue
                if output.token_ids or not output.is_returned:
                    self._router.begin(output.request_id)
                    self._feed_alone(generation, output, now_s)
                if output.is_returned and output.request_id in self._open:
                    self._take_back(generation, output, now_s)
        finally:
            self._end_step(rank)

    def _end_step(self, rank: int) -> None:
        """Hand out the pieces of a step, once per answer, and count its tokens."""
        for answer in self._due:
            answer.hand_out()
        self._due.clear()
        self._times.end_step(rank)

    def note_rank(self, facts: RankFacts) -> None:
        """Record the host and the capacity of a rank that is ready. It has no requests."""
        self._left = {each for each in self._left if each[0] != facts.rank}
        self._router.note_size(
            facts.rank,
            seats=facts.max_num_seqs,
            block_tokens=facts.block_tokens,
            step_tokens=facts.max_num_batched_tokens,
            host=facts.host,
        )
        self._sources.enter(facts.rank, facts.kv_peer)

    def note_lost(self, rank: int) -> None:
        """Record that a rank has ended, perhaps after its requests were moved. The next one with its number does not drain."""
        self._router.undrain(rank)
        self._sources.leave(rank)

    def note_stats(self, stats: RankStats) -> None:
        """Record a rank's state after a step, and let requests move."""
        self._router.note_stats(stats)
        self._moves.look()

    def _announce(self, request_id: str, target: int, in_step: bool) -> None:
        """Let the next rank of a request prepare while its present one releases it."""
        if (generation := self._open.get(request_id)) is not None:
            self._submissions.announce(generation, target, time.monotonic(), in_step=in_step)

    def _take_back(self, generation: Generation, output: RequestOutput, now_s: float) -> None:
        """Submit a request that its rank released, with its delivered tokens, to another rank."""
        request_id, rank = output.request_id, generation.rank
        request = self._journal.request_so_far(request_id)
        previous = rank if request.replayed_ids else None
        cause, target = self._router.take_back(
            request_id, [*request.key_ids, *request.replayed_ids], is_handed_over=bool(output.token_ids)
        )
        if target != rank:
            self._journal.take_back(request_id, cause)
            generation.num_moves += cause in (MoveCause.QUEUE, MoveCause.MEMORY)
            generation.is_resuming = bool(request.replayed_ids) and cause is not MoveCause.SLEEP
            generation.is_handed_over = cause is MoveCause.HAND_OVER
        again = Resubmission(
            is_moved=True, target=target, previous=previous, saved_tokens=output.num_saved_tokens
        )
        self._submit(generation, now_s, again)

    @property
    def num_parked(self) -> int:
        """Accepted choices that wait for a rank to return."""
        return self._waiting.num_parked

    @property
    def num_at_ranks(self) -> int:
        """Accepted choices that ranks have. If no pause withdraws, they include choices on their way to the next rank."""
        if self._router.is_paused:
            return len(self._open) - len(self._waiting)
        return self._num_submitted

    def abort_all(self, *, why: str = "it falls asleep") -> None:
        """End every open request as aborted: clients get what was generated so far. Lines of batches are retried later."""
        for generation in reversed(list(self._open.values())):  # held choices before those they follow
            is_line = generation.asker.most_choices is not None
            failure = errors.not_ready(why) if is_line else None
            self._abort(generation, FinishReason.ABORT, failure)

    def pause(self, *, by: str = SLEEP, withdraws: bool = True) -> None:
        """Take all requests back from their ranks, and keep them until `resume`. Their deadlines continue.

        Args:
            by: Who pauses. Requests continue when all have resumed.
            withdraws: With False, requests that ranks have, or had, end at these or other ranks. Only later ones are kept, and
                those that the same pause has already withdrawn.
        """
        self._paused_by[by] = withdraws or self._paused_by.get(by, False)
        self._router.is_paused = any(self._paused_by.values())
        for request_id, rank in self._router.plan_pause().items() if withdraws else ():
            self._ranks.post(rank, Withdraw(request_id, even_if_begun=True))

    def resume(self, *, by: str = SLEEP) -> None:
        """Submit the requests that `pause` kept. Their ranks may have lost all cached prefixes since."""
        self._paused_by.pop(by, None)
        self._router.is_paused = any(self._paused_by.values())
        if not self._router.is_paused:
            self._waiting.submit_parked()

    def forget_prefixes(self) -> None:
        """Route requests without regard to prefixes that ranks had cached so far."""
        self._router.forget_prefixes()

    def enter(self, rank: int) -> None:
        """Route requests to a rank, and submit those that wait for one."""
        self._router.enter(rank)
        self._waiting.submit_parked()

    def _fail_adapter(self, digest: str, failure: ApiError) -> None:
        """End the requests that use, or wait for, an adapter that a rank cannot load."""
        for generation in reversed(list(self._open.values())):  # held choices before those they follow
            if generation.ask.request.adapter == digest:
                self._abort(generation, FinishReason.ERROR, failure)

    def leave(self, ranks: Collection[int]) -> None:
        """Move the requests of ranks to other ranks. The ranks are lost, or cannot serve for now.

        The others still fetch prefixes from ranks that are alive, and those that drain continue to drain when they serve again.
        """
        for rank in ranks:
            is_alive = rank in self._ranks.attached
            self._router.leave(rank, is_alive=is_alive)
            if not is_alive:
                self._sources.leave(rank)
        now_s = time.monotonic()
        for request_id, generation in list(self._open.items()):
            is_there = request_id not in self._waiting and not generation.finished
            if not is_there or generation.rank not in ranks:
                continue
            if not self._journal.replay(request_id, now_s=now_s):
                failure = errors.failed(
                    f"its rank was lost {MAX_INCIDENTS + 1} times without a token in between; it is not retried again"
                )
                self._end(generation, FinishReason.ERROR, failure, failure.message)
                continue
            self._router.retire(request_id)
            generation.is_handed_over = False
            previous = generation.rank
            is_alive = previous in self._ranks.attached
            if is_alive:
                self._left.add((previous, request_id))
            self._submit(generation, now_s, Resubmission(previous=previous))
            if is_alive:
                self._ranks.post(previous, Abort(request_id))  # afterwards, because it may lose the rank

    def refuse(self, failure: ApiError) -> None:
        """Refuse new requests with `failure`; open ones continue."""
        self._closed = failure

    async def wait_until_empty(self) -> None:
        """Wait until no request is open."""
        await self._is_empty.wait()

    def fail_all(self, failure: ApiError) -> None:
        """End every open request with `failure`, and refuse new ones with it."""
        self.refuse(failure)
        self.fail_open(failure)

    def fail_open(self, failure: ApiError) -> None:
        """End every open request with `failure`."""
        for generation in reversed(list(self._open.values())):  # held choices before those they follow
            self._abort(generation, FinishReason.ERROR, failure)

    def _start(
        self,
        answer: Answer,
        ask: Ask,
        asker: Asker,
        followers: deque[Generation],
        *,
        is_held: bool,
        is_queued: bool,
    ) -> None:
        now_s = time.monotonic()
        deadline_s = now_s + self._timeout_s if self._timeout_s else None
        request = replace(ask.request, arrival_s=now_s, deadline_s=deadline_s, key_id=asker.key_id)
        if self._adapters is not None and request.adapter:
            self._adapters.accept(request.adapter, request.request_id)
        self._on_ask(ask)
        self._journal.accept(request, _NO_RANK_YET, now_s=now_s)
        generation = answer.add(replace(ask, request=request), _NO_RANK_YET, self._decoder)
        generation.asker = asker
        self._open[request.request_id] = generation
        if self._shared is not None:
            self._shared.count_choice(asker.key_id, 1)
        self._is_empty.clear()
        if deadline_s is not None:
            self._timers[request.request_id] = asyncio.get_running_loop().call_later(
                self._timeout_s + RANK_GRACE_S,
                self._abort,
                generation,
                FinishReason.DEADLINE,
                errors.timed_out(self._timeout_s),
            )
        if is_held:
            self._waiting.hold(generation, followers)
            return
        if asker.most_choices is not None:
            self._waiting.lead(generation, followers)
        if is_queued:
            self._waiting.queue(generation)
        else:
            self._submit(generation, now_s)

    def _submit(self, generation: Generation, now_s: float, again: Resubmission = NEW) -> None:
        """Submit a choice and its delivered tokens to a rank, or park it. Any pause keeps a choice that no rank has had."""
        is_first = not generation.was_submitted
        is_kept = is_first and bool(self._paused_by)
        try:
            is_submitted = not is_kept and self._submissions.submit(generation, now_s, again)
        except ImageRowsError as error:
            self._end(generation, FinishReason.ERROR, errors.failed(str(error)), str(error))
            return
        finally:
            if is_first and generation.was_submitted:  # perhaps it has ended already, and was subtracted
                self._count_submitted(1)
        if not is_submitted:
            self._waiting.park(generation)

    def _count_submitted(self, by: int) -> None:
        self._num_submitted += by
        if self._shared is not None:
            self._shared.count_submitted(by)

    def _feed_alone(self, generation: Generation, output: RequestOutput, now_s: float) -> None:
        """Feed one output. An internal error ends this answer only, not its rank and the rank's other requests."""
        try:
            self._feed(generation, output, now_s)
        except StructureError as error:
            self._abort(
                generation, FinishReason.ERROR, errors.bad_request(f"stop_regex: {error}.", "stop_regex")
            )
        except Exception as error:  # noqa: BLE001 - see the docstring
            _LOG.exception("request %s failed", output.request_id)
            if not generation.finished:
                failure = errors.failed(f"its answer failed: {type(error).__name__}: {error}")
                self._abort(generation, FinishReason.ERROR, failure)

    def _feed(self, generation: Generation, output: RequestOutput, now_s: float) -> None:
        num_tokens = len(output.token_ids)
        if num_tokens:
            self._journal.deliver(output.request_id, output.token_ids)
            self._router.progress(output.request_id, num_tokens)
            if generation.first_token_s is None:
                self._admission.note_begun(now_s)
            self._times.note_tokens(generation, output, now_s)
        reason = generation.push(output)
        if reason is not None:
            is_end = output.finish_reason is not None
            generation.weight_version = self._label_of(output.weights if is_end else None)
        if reason is None and generation.is_left_unread(now_s):
            self._abort(generation, FinishReason.ERROR, errors.left_unread(MAX_UNREAD_TOKENS, UNREAD_S))
        elif reason is None:
            generation.notify()
        elif output.finish_reason is None:
            self._abort(generation, reason)  # a stop string, which the rank does not know yet
        else:
            self._end(generation, reason, self._failure_of(output), output.error)

    def _failure_of(self, output: RequestOutput) -> ApiError | None:
        if output.finish_reason is FinishReason.ERROR and output.error.startswith(CLIENTS_FAULT):
            return ApiError(400, output.error[:1].upper() + output.error[1:])
        if output.finish_reason is FinishReason.ERROR:
            return errors.failed(output.error)
        if output.finish_reason is FinishReason.DEADLINE:
            return errors.timed_out(self._timeout_s)
        return None

    def _abort(self, generation: Generation, reason: FinishReason, failure: ApiError | None = None) -> None:
        """End a request, and abort it if it is at a rank."""
        request_id, rank = generation.ask.request.request_id, generation.rank
        is_at_rank = request_id not in self._waiting
        self._end(generation, reason, failure, failure.message if failure else "")
        if is_at_rank:
            # Afterwards: it may lose the rank, and open requests of the rank then move to other ranks.
            self._ranks.post(rank, Abort(request_id))

    def _end(
        self, generation: Generation, reason: FinishReason, failure: ApiError | None, error: str
    ) -> None:
        self._submissions.expect_no_more(generation)
        now_s = time.monotonic()
        request = generation.ask.request
        del self._open[request.request_id]
        self._waiting.remove(request.request_id)
        if self._shared is not None:
            self._shared.count_choice(generation.asker.key_id, -1)
        if generation.was_submitted:
            self._count_submitted(-1)
        if not self._open:
            self._is_empty.set()
        timer = self._timers.pop(request.request_id, None)
        if timer is not None:
            timer.cancel()
        self._journal.close(request.request_id, reason, now_s=now_s, error=error)
        self._router.retire(request.request_id)
        if self._adapters is not None and request.adapter:
            self._adapters.release(request.adapter, request.request_id)
        self._times.note_end(generation, reason, now_s)
        generation.end(reason, failure)
        self._waiting.submit_follower(request.request_id, now_s)

    def _close(self, answer: Answer) -> None:
        """Abort the unfinished choices of an answer."""
        self._count_answer(-1)
        for generation in reversed(answer.generations):  # held choices before those they follow
            if not generation.finished:
                self._abort(generation, FinishReason.ABORT)
        if all(generation.failure is None for generation in answer.generations):
            self._metrics.note_longest(max(generation.num_tokens for generation in answer.generations))
