"""The requests that the front has accepted: routed, journaled, submitted, fed, and ended exactly once.

The one place where journal, router, ranks and metrics meet. Everything here runs in the front's event loop.

The requests of a lost rank move to other ranks. The prompt, the parameters with their seed and the delivered tokens let
another rank generate the same rest of the answer. Without a rank they wait, and their deadlines keep running.

Requests move between ranks (`moves`): one that waits while another rank has room, and one that runs if its rank is short of
blocks or draining. The front withdraws it and submits it again with its delivered tokens, so the other rank generates the same
rest of the answer. Until its rank has released it, it counts as being there, also if its client leaves or that rank is lost.
A prefill rank releases a request by itself, with its first token, and another rank generates the rest of the answer.

A client may limit the number of an answer's choices that are at ranks at once (lines of batches do). The others are held here
and follow one by one.
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from kvcache.images import ImageRowsError
from scheduler.policy.request import FinishReason, RankStats, RequestOutput, Withdraw
from scheduler.structure.compiler import CLIENTS_FAULT, StructureError
from server.front import errors
from server.front.adapters.places import AdapterPlaces
from server.front.admission import Admission
from server.front.detokenizer import Decoder
from server.front.errors import ApiError
from server.front.generations import NOBODY, Answer, Ask, Asker, Generation
from server.front.journal import MAX_INCIDENTS, Journal
from server.front.routing.loads import MoveCause
from server.front.routing.moves import Moves
from server.front.routing.prefix_sources import PrefixSources
from server.front.routing.router import Router
from server.front.timing import Timing, timing_of
from server.link.messages import Abort, Expect, RankFacts
from server.link.ranks import Ranks

_LOG = logging.getLogger("wideep.front")
_NO_RANK_YET = 0  # any value, until the request is submitted
# Prompt tokens submitted to ranks in one go: 128 choices of a prompt of 100,000 tokens would take 1.5 s.
TOKENS_AT_ONCE = 200_000
SLEEP = "sleep"  # who pauses, by default
RANK_GRACE_S = 1.0  # a rank ends a late request itself; if it does not, the front does after this time


class RequestCounts(Protocol):
    """Counts and times requests, implemented by `server.http.observability.metrics` for Prometheus."""

    def note_request(self, n: int, max_tokens: int) -> None:
        """Record a client's request with `n` choices in all."""

    def note_first_token(
        self,
        rank: int,
        ttft_s: float,
        *,
        num_prompt_tokens: int,
        num_cached_tokens: int,
        num_tier_tokens: int,
    ) -> None:
        """Record a choice's first token. `num_tier_tokens`: those of the cached tokens that were not on the device."""

    def note_tokens(self, rank: int, num_tokens: int, gaps_s: Mapping[float, int]) -> None:
        """Record the tokens of a step.

        Args:
            gaps_s: Times between a choice's tokens, and how many tokens came after each. First tokens have none. Of several
                tokens at once, each counts with its share of their time.
        """

    def note_pause(self, rank: int, seconds: float) -> None:
        """Record the time between the tokens before and after a move to `rank`."""

    def note_hand_over(self, rank: int, seconds: float, num_computed_tokens: int) -> None:
        """Record the time between the token of the rank that ran a prompt and the first one of `rank`, which computed some
        tokens of the prompt again."""

    def note_end(
        self,
        rank: int,
        reason: FinishReason,
        timing: Timing,
        *,
        num_prompt_tokens: int,
        num_cached_tokens: int,
        num_tokens: int,
    ) -> None:
        """Record a choice's end."""

    def note_longest(self, num_tokens: int) -> None:
        """Record the length of the longest choice of a client's request."""


class SharedCounts(Protocol):
    """The open requests of several fronts, implemented by `server.front.several.board.Board`."""

    @property
    def num_open(self) -> int:
        """Accepted choices without an outcome, of all fronts."""

    @property
    def num_answers(self) -> int:
        """Requests of clients that are being answered, by all fronts."""

    def count_choice(self, key_id: str, by: int) -> None:
        """Count an accepted choice of this front, or with -1 one that has its outcome."""

    def count_answer(self, by: int) -> None:
        """Count an answer of this front that begins, or with -1 one that ends."""

    def num_of_key(self, key_id: str) -> int:
        """Return the number of open choices of an API key."""

    def num_keys(self, key_id: str) -> int:
        """Return the number of API keys with open choices, including this one."""


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
        adapters: AdapterPlaces | None = None,
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
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._admission = admission or Admission(None)
        self._open: dict[str, Generation] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._parked: dict[str, Generation] = {}  # open choices that are at no rank
        # Parked choices that only wait for the event loop's next turn.
        self._queued: dict[str, None] = {}
        self._held: dict[str, Generation] = {}  # open choices that follow others
        # By a choice at a rank: the held choices of its answer that follow it.
        self._followers: dict[str, deque[Generation]] = {}
        # Ranks and requests that left them while they lived: such a rank may still send outputs of the request, up to its end.
        self._left: set[tuple[int, str]] = set()
        self._sources = PrefixSources()
        self._on_ask, self._on_answer = on_ask, on_answer
        self._why_not_ready = why_not_ready
        self._who_asks, self._label_of, self._shared = who_asks, label_of, shared
        self._adapters = adapters
        if adapters is not None:
            adapters.on_resident, adapters.on_failed = self._submit_parked, self._fail_adapter
        self._due: list[Answer] = []  # answers with pieces of the step being delivered
        self._num_tokens = 0  # of the step being delivered
        self._gaps_s: dict[float, int] = {}  # of the step being delivered, as in `RequestCounts.note_tokens`
        self._closed: ApiError | None = None
        self._paused_by: set[str] = set()
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
                is_queued = num_tokens > TOKENS_AT_ONCE
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
                if generation is None or generation.rank != rank or output.request_id in self._parked:
                    continue
                if output.token_ids or not output.is_returned:
                    self._router.begin(output.request_id)
                    self._feed_alone(generation, output, now_s)
                if output.is_returned and output.request_id in self._open:
                    self._take_back(generation, output, now_s)
        finally:
            self._end_step(rank)

    def _end_step(self, rank: int) -> None:
        """Hand out the pieces of a step, once per answer, and count its tokens, once for all choices."""
        for answer in self._due:
            answer.hand_out()
        self._due.clear()
        if self._num_tokens:
            self._metrics.note_tokens(rank, self._num_tokens, self._gaps_s)
            self._num_tokens, self._gaps_s = 0, {}

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

    def note_stats(self, stats: RankStats) -> None:
        """Record a rank's state after a step, and let requests move."""
        self._router.note_stats(stats)
        self._moves.look()

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
        saved_tokens = output.num_saved_tokens
        self._submit(
            generation, now_s, is_moved=True, target=target, previous=previous, saved_tokens=saved_tokens
        )

    @property
    def num_parked(self) -> int:
        """Accepted choices that wait for a rank to return."""
        return len(self._parked.keys() - self._queued.keys())

    @property
    def num_at_ranks(self) -> int:
        """Accepted choices that ranks have."""
        return len(self._open) - len(self._parked) - len(self._held)

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
            withdraws: With False, requests at ranks end there, and only later ones are kept.
        """
        self._paused_by.add(by)
        self._router.is_paused = True
        for request_id, rank in self._router.plan_pause().items() if withdraws else ():
            self._ranks.post(rank, Withdraw(request_id, even_if_begun=True))

    def resume(self, *, by: str = SLEEP) -> None:
        """Submit the requests that `pause` kept. Their ranks may have lost all cached prefixes since."""
        self._paused_by.discard(by)
        if not self._paused_by:
            self._router.is_paused = False
            self._submit_parked()

    def forget_prefixes(self) -> None:
        """Route requests without regard to prefixes that ranks had cached so far."""
        self._router.forget_prefixes()

    def enter(self, rank: int) -> None:
        """Route requests to a rank, and submit those that wait for one."""
        self._router.enter(rank)
        self._submit_parked()

    def _fail_adapter(self, digest: str, failure: ApiError) -> None:
        """End the requests that use, or wait for, an adapter that a rank cannot load."""
        for generation in reversed(list(self._open.values())):  # held choices before those they follow
            if generation.ask.request.adapter == digest:
                self._abort(generation, FinishReason.ERROR, failure)

    def _adapter_place(self, generation: Generation) -> int | None:
        """Return the place of a choice's adapter, -1 if it has none; None if it must wait for one."""
        request = generation.ask.request
        if not request.adapter:
            return -1
        assert self._adapters is not None, "the service has no adapters"
        return self._adapters.admit(request.adapter, request.request_id)

    def _submit_parked(self) -> None:
        for request_id in list(self._parked):  # a loss meanwhile may end them or park them again
            generation = self._parked.pop(request_id, None)
            if generation is not None:
                self._submit(generation, time.monotonic())

    def leave(self, ranks: Collection[int]) -> None:
        """Move the requests of ranks to other ranks. The ranks are lost, or cannot serve for now."""
        for rank in ranks:
            self._router.leave(rank)
            self._sources.leave(rank)
        now_s = time.monotonic()
        for request_id, generation in list(self._open.items()):
            is_there = self._is_at_rank(request_id) and not generation.finished
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
            self._submit(generation, now_s, previous=previous)
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
            followers.append(generation)
            self._held[request.request_id] = generation
            return
        if asker.most_choices is not None:
            self._followers[request.request_id] = followers
        if is_queued:
            self._queue(generation)
        else:
            self._submit(generation, now_s)

    def _queue(self, generation: Generation) -> None:
        """Submit a choice to a rank in a later turn of the event loop."""
        request_id = generation.ask.request.request_id
        self._parked[request_id] = generation
        if not self._queued:
            asyncio.get_running_loop().call_soon(self._submit_queued)
        self._queued[request_id] = None

    def _submit_queued(self) -> None:
        """Submit some queued choices, and leave the rest to a later turn. Choices may have ended meanwhile."""
        num_tokens = 0
        while self._queued and num_tokens <= TOKENS_AT_ONCE:
            request_id = next(iter(self._queued))
            del self._queued[request_id]
            generation = self._parked.pop(request_id, None)
            if generation is not None:
                num_tokens += len(generation.ask.request.prompt_ids)
                self._submit(generation, time.monotonic())
        if self._queued:
            asyncio.get_running_loop().call_soon(self._submit_queued)

    def _start_follower(self, request_id: str, now_s: float) -> None:
        """Submit the next held choice after one has ended."""
        followers = self._followers.pop(request_id, None)
        while followers:
            generation = followers.popleft()
            if self._held.pop(generation.ask.request.request_id, None) is not None:
                self._followers[generation.ask.request.request_id] = followers
                self._submit(generation, now_s)
                return

    def _is_at_rank(self, request_id: str) -> bool:
        return request_id not in self._parked and request_id not in self._held

    def _submit(
        self,
        generation: Generation,
        now_s: float,
        *,
        is_moved: bool = False,
        target: int | None = None,
        previous: int | None = None,
        saved_tokens: int = 0,
    ) -> None:
        """Submit a choice and its delivered tokens to the best rank, or park it if no rank is there or its adapter has no place.

        Args:
            is_moved: Whether to pick a rank regardless of the session, which then follows the request to that rank.
            target: The rank that reserved a place for it, or None to let the router pick one.
            previous: The rank that had begun it.
            saved_tokens: First tokens that its last rank is saving to the tiers of its host.
        """
        request_id, params = generation.ask.request.request_id, generation.ask.request.params
        place = self._adapter_place(generation) if self._router.has_ranks else None
        if place is None:
            self._expect_no_more(generation)
            self._parked[request_id] = generation
            return
        request = replace(self._journal.request_so_far(request_id), adapter_place=place)
        token_ids = [*request.key_ids, *request.replayed_ids]
        session = generation.asker.session
        num_more = max(0, params.max_tokens - len(request.replayed_ids))
        if target is not None and request.replayed_ids:  # it was running
            rank, next_rank = target, None
        else:
            rank, next_rank = self._router.assign(
                token_ids, "" if is_moved else session, most_tokens=num_more, rank=target
            )
        is_near = self._router.share_host(generation.rank, rank)
        if self._sources.has_several:
            held = self._router.held_tokens(token_ids)
            request = replace(request, prefix_at=self._sources.address_for(rank, held, previous))
        self._journal.move(request_id, rank)
        generation.move(rank, now_s)
        self._router.admit(
            request_id,
            rank,
            token_ids,
            num_more,
            session,
            priority=request.priority,
            key_id=request.key_id,
            num_moves=generation.num_moves,
            is_resumed=bool(request.replayed_ids),
            next_rank=next_rank,
        )
        if next_rank is not None or saved_tokens:
            request = replace(
                request,
                hands_over=next_rank is not None,
                num_awaited_tokens=saved_tokens if is_near or request.prefix_at else 0,
            )
        self._expect_no_more(generation, rank)
        try:
            self._ranks.submit(rank, request, now_s=now_s)
        except ImageRowsError as error:
            self._end(generation, FinishReason.ERROR, errors.failed(str(error)), str(error))
            return
        if next_rank is not None and self._router.share_host(rank, next_rank):
            generation.expected_at = next_rank
            self._ranks.expect(next_rank, request, now_s=now_s)

    def _expect_no_more(self, generation: Generation, rank: int | None = None) -> None:
        """Let the rank that expects a request give its blocks back, unless the request comes there: to `rank`."""
        expected_at, generation.expected_at = generation.expected_at, None
        if expected_at not in (None, rank):
            assert expected_at is not None
            self._ranks.post(expected_at, Expect(generation.ask.request.request_id, None))

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
            self._note_tokens(generation, output, now_s)
        reason = generation.push(output)
        if reason is not None:
            is_end = output.finish_reason is not None
            generation.weight_version = self._label_of(output.weights if is_end else None)
        if reason is None and generation.is_left_unread(now_s):
            self._abort(generation, FinishReason.ERROR, errors.left_unread())
        elif reason is None:
            generation.notify()
        elif output.finish_reason is None:
            self._abort(generation, reason)  # a stop string, which the rank does not know yet
        else:
            self._end(generation, reason, self._failure_of(output), output.error)

    def _note_tokens(self, generation: Generation, output: RequestOutput, now_s: float) -> None:
        is_first = generation.first_token_s is None
        gap_s, num_tokens = now_s - generation.last_token_s, len(output.token_ids)
        self._num_tokens += num_tokens
        if not is_first:
            share_s = gap_s / num_tokens
            self._gaps_s[share_s] = self._gaps_s.get(share_s, 0) + num_tokens
        if generation.is_resuming:
            generation.is_resuming = False
            self._metrics.note_pause(generation.rank, gap_s)
        if generation.is_handed_over:
            generation.is_handed_over = False
            num_computed = len(generation.ask.request.prompt_ids) - output.num_cached_tokens
            self._metrics.note_hand_over(generation.rank, gap_s, num_computed)
        if is_first:
            generation.first_token_s = now_s
            self._admission.note_begun(now_s)
            self._metrics.note_first_token(
                generation.rank,
                gap_s,
                num_prompt_tokens=len(generation.ask.request.prompt_ids),
                num_cached_tokens=output.num_cached_tokens,
                # Loaded blocks may be evicted before their request starts.
                num_tier_tokens=min(output.num_cached_tokens, output.num_tier_tokens),
            )
        generation.last_token_s = now_s

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
        is_at_rank = self._is_at_rank(request_id)
        self._end(generation, reason, failure, failure.message if failure else "")
        if is_at_rank:
            # Afterwards: it may lose the rank, and open requests of the rank then move to other ranks.
            self._ranks.post(rank, Abort(request_id))

    def _end(
        self, generation: Generation, reason: FinishReason, failure: ApiError | None, error: str
    ) -> None:
        self._expect_no_more(generation)
        now_s = time.monotonic()
        request = generation.ask.request
        del self._open[request.request_id]
        self._parked.pop(request.request_id, None)
        self._held.pop(request.request_id, None)
        if self._shared is not None:
            self._shared.count_choice(generation.asker.key_id, -1)
        if not self._open:
            self._is_empty.set()
        timer = self._timers.pop(request.request_id, None)
        if timer is not None:
            timer.cancel()
        self._journal.close(request.request_id, reason, now_s=now_s, error=error)
        self._router.retire(request.request_id)
        if self._adapters is not None and request.adapter:
            self._adapters.release(request.adapter, request.request_id)
        self._metrics.note_end(
            generation.rank,
            reason,
            timing_of(generation, now_s=now_s),
            num_prompt_tokens=len(request.prompt_ids),
            num_cached_tokens=generation.num_cached_tokens,
            num_tokens=generation.num_tokens,
        )
        generation.end(reason, failure)
        self._start_follower(request.request_id, now_s)

    def _close(self, answer: Answer) -> None:
        """Abort the unfinished choices of an answer."""
        self._count_answer(-1)
        for generation in reversed(answer.generations):  # held choices before those they follow
            if not generation.finished:
                self._abort(generation, FinishReason.ABORT)
        if all(generation.failure is None for generation in answer.generations):
            self._metrics.note_longest(max(generation.num_tokens for generation in answer.generations))
