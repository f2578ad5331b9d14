"""Continuous batching over one rank's blocks: the life of its requests, from `add` to their ends.

`schedule` plans a step: `scheduler.policy.step_plans` selects its tokens. `commit` applies its results. A step may try
several tokens of a request (drafts) and keeps as many as plain decoding would have sampled. A batch may be planned while
others are in flight. Does not know torch or the model.
"""

import heapq
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Series
from typing import NamedTuple

from kvcache.blocks import BlockPool
from kvcache.states import StatePool
from kvcache.tiers.figures import TierFigures
from scheduler.policy.batch import Scheduled, StepBatch
from scheduler.policy.limits import SchedulerLimits, check_limits, why_unservable
from scheduler.policy.request import Expected, FinishReason, Logprobs, Request, RequestOutput
from scheduler.policy.roster import Roster
from scheduler.policy.sequence import Sequence, SequenceStatus, StructureMatcher
from scheduler.policy.step_plans import DraftsTokens, NextStep, StepPlans
from scheduler.policy.tables import BlockTables
from scheduler.policy.tier_tables import KeepsTiers


class DuplicateRequestError(ValueError):
    """The id of a request that is already being served."""


MOST_COMING_S = 3.0  # for a request that another rank is releasing
MOST_HOLD_S = 0.05  # for which a step waits for such requests
# Steps that wait while one of them loads, and if no step is agreed, as many before it comes.
MOST_HOLDS = 2


class SchedulerStats(NamedTuple):
    """The scheduler's fields of `RankStats`, under the same names."""

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    num_preemptions: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    tiers: TierFigures | None


class Scheduler:
    """Continuous batching over one rank's block pool."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        enable_prefix_caching: bool = True,
        states: StatePool | None = None,
        keeps_snapshots: bool = True,
        rotary_limit: int | None = None,
        keeps_images_whole: bool = False,
        repeats_decodes: bool = False,
        drafter: DraftsTokens | None = None,
        overlaps: bool = False,
    ) -> None:
        """Take over the pools; nothing else may use them. `states` is None for models without recurrent states.

        `rotary_limit`, `keeps_images_whole`, `repeats_decodes`: see `SchedulerLimits`. `drafter`: source of drafts; None disables
            them. `overlaps`: whether a sequence with states may have two steps in flight, see `StateTables`.

        Raises:
            SchedulerLimitsError: The limits contradict each other or the pool.
        """
        limits = SchedulerLimits(
            max_num_seqs,
            max_num_batched_tokens,
            max_model_len,
            rotary_limit,
            keeps_images_whole,
            repeats_decodes,
        )
        check_limits(pool, limits)
        self._pool, self._states, self._limits, self._drafter = pool, states, limits, drafter
        self._enable_prefix_caching, self._keeps_snapshots = enable_prefix_caching, keeps_snapshots
        self._tables = BlockTables(
            pool,
            enable_prefix_caching,
            states,
            keeps_snapshots=keeps_snapshots,
            num_drafts=drafter.num_drafts if drafter else 0,
            overlaps=overlaps,
        )
        self._roster = Roster()
        self._plans = StepPlans(self._roster, self._tables, limits, drafter)
        self._in_flight: deque[StepBatch] = deque()
        self._deadlines: list[tuple[float, str]] = []  # a heap; ended requests are skipped when due
        self._refused: list[RequestOutput] = []  # ends found by `add`; `expire` or `commit` delivers them
        self._remote: deque[Sequence] = deque()  # new ones with prefixes that another node may have
        self._weights, self._weights_number = "", 0

    def twin(self) -> "Scheduler":
        """Return a scheduler without requests over the same pools, for the same thread. It has no tiers and no drafts."""
        return Scheduler(
            self._pool,
            **self._limits._asdict(),
            enable_prefix_caching=self._enable_prefix_caching,
            states=self._states,
            keeps_snapshots=self._keeps_snapshots,
        )

    def when_short(self, give_way: Callable[[], None]) -> None:
        """Call `give_way` whenever a request lacks blocks or states, before another one is preempted."""
        self._tables.on_short = give_way

    @property
    def has_work(self) -> bool:
        """Whether a request waits, runs or is in flight, or an output is undelivered."""
        return bool(self._roster or self._in_flight or self._refused)

    @property
    def next_step(self) -> NextStep:
        """Predict the next step. Requests that are added, end or are preempted later may change prefill, but can only
        lower the number of decodes. A request that begins unpredictably takes only the room that the step has left."""
        return self._plans.predict()

    @property
    def num_context(self) -> int:
        """Number of planned tokens of all running sequences."""
        return sum(sequence.num_planned for sequence in self._roster.running)

    @property
    def draft_depth(self) -> int:
        """Most drafts that are made for a sequence after the next step. A prediction, like `next_step`."""
        return self._plans.draft_depth

    @property
    def running(self) -> Series[Sequence]:
        """The running sequences, in the order in which they began. Read only."""
        return self._roster.running

    @property
    def begun(self) -> list[Sequence]:
        """The sequences that run, or that have generated tokens. Read only."""
        running = SequenceStatus.RUNNING
        return [each for each in self._roster if each.status is running or each.num_output_tokens]

    def find(self, request_id: str) -> Sequence | None:
        """Return the sequence of a request, or None if it is unknown or has ended. Read only."""
        return self._roster.find(request_id)

    @property
    def pool(self) -> BlockPool:
        """The block pool. Read only."""
        return self._pool

    def uses_adapter(self, place: int) -> bool:
        """Return whether any request uses the adapter at a place."""
        return self._roster.uses_adapter(place)

    @property
    def num_open(self) -> int:
        """Number of sequences that would run together if all waiting ones began, within the limit."""
        return min(self._limits.max_num_seqs, len(self._roster.running) + len(self._roster.waiting))

    @property
    def stats(self) -> SchedulerStats:
        """Present counts. Counters run from construction."""
        return SchedulerStats(
            num_running=len(self._roster.running),
            num_waiting=len(self._roster.waiting) + len(self._roster.parked) + len(self._roster.loading),
            num_free_blocks=self._pool.num_free,
            num_blocks=self._pool.num_blocks,
            num_preemptions=self._roster.num_preemptions,
            prefix_query_tokens=self._tables.prefix_query_tokens,
            prefix_hit_tokens=self._tables.prefix_hit_tokens,
            tiers=None if self._tables.tiers is None else self._tables.tiers.figures,
        )

    def use_tiers(self, tiers: KeepsTiers) -> None:
        """Keep blocks in tiers below the pool. Call it before the first request."""
        self._tables.use_tiers(tiers, self._slots_in_flight)

    def collect(self, now_s: float) -> None:
        """Take back what the tiers have saved or loaded. `schedule` does it too."""
        self._roster.forget_coming(now_s - MOST_COMING_S)
        if self._tables.tiers is not None:
            self._tables.tiers.collect(now_s)
            self._roster.bring_back()

    @property
    def holds_blocks(self) -> bool:
        """Whether the content of some block or state slot may still be read or written: by a request, or by a tier."""
        tiers = self._tables.tiers
        return self.has_work or (tiers is not None and tiers.has_jobs)

    def free_cached(self) -> None:
        """Free all cached prefixes on the device before its memory loses its content. Tiers keep theirs."""
        assert not self.holds_blocks, "a request or a tier uses a block"
        self._tables.free_cached()

    def forget_prefixes(self, generation: int) -> None:
        """Hide the present prefix cache from requests that have not begun and from later ones.

        `generation`: see `scheduler.policy.request.ForgetPrefixes`.
        """
        self._tables.forget_prefixes(generation)
        for sequence in self._roster.waiting:
            sequence.held_keys.clear()  # of prefixes that it may no longer use

    def use_weights(self, digest: str, number: int) -> None:
        """Compute with other weights from now on. All sequences start again from their prompts, with the tokens that they have.

        Prefixes that were computed with other weights are not found any more. Batches in flight are dropped: the caller commits
        none of them.

        Args:
            digest: Digest of the weights.
            number: Number of their version. Outputs that end requests carry it.
        """
        self._weights, self._weights_number = digest, number
        self._drop_in_flight()
        running = list(self._roster.running)
        for sequence in running:
            self._roster.send_back(sequence)
        for sequence in [*running, *self._tables.leaving]:
            self._tables.vacate(sequence)
        for sequence in self._roster:
            sequence.weights, sequence.num_looked, sequence.offers_all = digest, 0, True
            sequence.held_keys.clear()
            sequence.prompt_logprobs.clear()

    def clear(self) -> None:
        """Forget all requests, without outputs. Batches in flight are dropped: the caller commits none of them."""
        self._drop_in_flight()
        for sequence in list(self._roster):
            self._end(sequence)
        for sequence in list(self._tables.leaving):
            self._tables.vacate(sequence)
        self._refused.clear()
        self._roster.coming.clear()

    def _slots_in_flight(self) -> set[int]:
        """Return the state slots that steps in flight read. If steps overlap, they may be free already."""
        return {piece.read for batch in self._in_flight for item in batch.items for piece in item.pieces}

    def _drop_in_flight(self) -> None:
        for batch in self._in_flight:
            for item in batch.items:
                item.sequence.num_in_flight -= 1
                item.sequence.num_pending -= item.samples
                item.sequence.has_drafts_in_flight = False
        self._in_flight.clear()

    def add(self, request: Request, matcher: StructureMatcher | None = None) -> None:
        """Queue a request. If it cannot be served, or its replayed tokens already end it, the next `expire` or
        `commit` delivers its end.

        Args:
            matcher: Matcher of the request's structure, if any, advanced over the replayed tokens.

        Raises:
            DuplicateRequestError: The id is being served.
        """
        if self._roster.find(request.request_id) is not None:
            raise DuplicateRequestError(
                f"request id {request.request_id!r} is already being served; ids must be unique"
            )
        sequence = self._sequence_of(request, matcher)
        if request.request_id in self._roster.coming:
            sequence.num_holds_left = MOST_HOLDS
        error = why_unservable(request, self._limits) or (matcher.failure if matcher else None)
        reason = FinishReason.ERROR if error else sequence.finish_reason(self._limits.max_model_len)
        if reason is not None:
            self._refused.append(_end_of(request.request_id, reason, error or ""))
            self.expect_no_more(request.request_id)
            return
        self._roster.enqueue(sequence)
        if self._tables.tiers is not None:
            self._tables.tiers.note_arrival(request.request_id)
        if request.prefix_at:
            self._remote.append(sequence)
        if request.deadline_s is not None:
            heapq.heappush(self._deadlines, (request.deadline_s, request.request_id))

    def expect(self, expected: Expected, now_s: float) -> None:
        """Begin to load the blocks of a request that another rank will hand over or release, or give them back."""
        if expected.request is not None:
            sequence = self._sequence_of(expected.request)
            sequence.is_long = self._limits.is_long(len(sequence.token_ids))
            self._tables.expect(sequence, now_s)
            if sequence.has_begun:
                sequence.num_holds_left = 0 if expected.in_step else MOST_HOLDS
                self._roster.coming[expected.request_id] = (sequence, now_s)
            return
        self.expect_no_more(expected.request_id)

    def expect_no_more(self, request_id: str) -> None:
        """Give back the blocks of a request that is not handed over to this rank, or that ended before `add`."""
        self._roster.coming.pop(request_id, None)
        if self._tables.tiers is not None:
            self._tables.tiers.expect_no_more(request_id)

    def expect_none(self) -> None:
        """Give back the blocks of all expected requests. No request is open, and the rank's memory is to be released."""
        if self._tables.tiers is not None:
            self._tables.tiers.give_way()

    def receive_moved(self, now_s: float, begun_s: float, *, is_releasing: bool) -> float:
        """Begin and end loads of requests that move here. Returns how long the next step should still wait for them, in seconds.

        Such a request comes within milliseconds after the other rank released it. Its stream would pause for a whole step if
        the next one began without it.

        Args:
            begun_s: When the step began to wait, on the clock of `now_s`. It does not wait for requests that were announced later.
            is_releasing: Whether another rank releases requests at the beginning of this step.
        """
        roster, until_s = self._roster, begun_s + MOST_HOLD_S
        may_move = roster.coming or roster.loading or roster.waiting
        if not may_move or len(roster.running) >= self._limits.max_num_seqs:
            return 0.0
        self.collect(now_s)
        self._plans.load_resumed(now_s)
        is_due = is_releasing and any(since_s <= begun_s for _, since_s in roster.coming.values())
        is_held = is_due or any(each.num_holds_left for each in roster.resuming)
        return max(0.0, until_s - now_s) if is_held else 0.0

    def _sequence_of(self, request: Request, matcher: StructureMatcher | None = None) -> Sequence:
        sequence = Sequence.from_request(request, matcher)
        sequence.weights, sequence.repeats_decodes = self._weights, self._limits.repeats_decodes
        return sequence

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request, even if a batch holds it. Returns None if it is unknown or has ended."""
        sequence = self._roster.find(request_id)
        if sequence is None:
            return None
        self._end(sequence)
        return _end_of(request_id, FinishReason.ABORT)

    def is_running(self, request_id: str) -> bool:
        """Whether a request has begun here and not ended, and is not preempted."""
        sequence = self._roster.find(request_id)
        return sequence is not None and sequence.status is SequenceStatus.RUNNING

    def withdraw(self, request_id: str, *, even_if_begun: bool = False) -> RequestOutput | None:
        """Release a request for another rank. The output reports the result; None if the request is unknown.

        Args:
            even_if_begun: Release it even if it has begun. Tokens that batches in flight will sample for it are dropped.
        """
        sequence = self._roster.find(request_id)
        if sequence is None:
            return None
        if sequence.num_admissions and not even_if_begun:
            return RequestOutput(request_id=request_id, token_ids=[])
        num_saved = 0
        if sequence.num_in_flight:
            self._end(sequence)
        else:
            num_saved = self._hand_over(sequence)
        return RequestOutput(
            request_id=request_id, token_ids=[], is_returned=True, num_saved_tokens=num_saved
        )

    def expire(self, now_s: float) -> list[RequestOutput]:
        """End requests with a deadline at `now_s` or before, earliest first."""
        outputs = self._take_refused()
        while self._deadlines and self._deadlines[0][0] <= now_s:
            deadline_s, request_id = heapq.heappop(self._deadlines)
            sequence = self._roster.find(request_id)
            if sequence is not None and sequence.request.deadline_s == deadline_s:
                self._end(sequence)
                outputs.append(_end_of(request_id, FinishReason.DEADLINE))
        return outputs

    def schedule(
        self, *, prefill_budget: int | None = None, most_tokens: int | None = None, now_s: float = 0.0
    ) -> StepBatch:
        """Plan the next step. Batches with items must be committed in order; an empty one may be dropped.

        Args:
            prefill_budget: Most prefill tokens in this step. None sets no limit; 0 plans decodes only.
            most_tokens: Most tokens of all kinds; at least the number of running sequences. None: the configured limit.
            now_s: Time on the clock of `Request.arrival_s`, to compute how long starting requests have waited.
        """
        most = min(self._limits.max_num_batched_tokens, most_tokens or self._limits.max_num_batched_tokens)
        self._roster.unpark()
        self._begin_fetches(now_s)
        self.collect(now_s)
        items = self._plans.plan_decodes(most)
        num_decode_tokens = sum([item.num_tokens for item in items])
        batch = self._plans.plan_prompts(items, num_decode_tokens, most, prefill_budget, now_s)
        for sequence in self._roster.resuming:
            sequence.num_holds_left = max(0, sequence.num_holds_left - 1)
        if batch.items:
            self._in_flight.append(batch)
        return batch

    def _begin_fetches(self, now_s: float) -> None:
        while self._remote:
            sequence = self._remote.popleft()
            if sequence.status is SequenceStatus.WAITING:
                sequence.is_long = self._limits.is_long(len(sequence.token_ids))
                self._tables.begin_fetch(sequence, now_s)

    def coming_blocks(self, batch: StepBatch) -> list[tuple[int, bytes]]:
        """Return the blocks, and their keys, that a planned step fills of requests that other ranks will continue."""
        return [
            block
            for item in batch.items
            if item.sequence.request.hands_over and item.sequence.status is SequenceStatus.RUNNING
            for block in self._tables.coming_blocks(item.sequence, item.start, item.end)
        ]

    def commit(
        self,
        batch: StepBatch,
        token_ids: list[int],
        logprobs: list[Logprobs | None],
        prompt_logprobs: dict[str, list[Logprobs]] | None = None,
    ) -> list[RequestOutput]:
        """Apply a step's results: the tokens of the items that sample, in order. Ended sequences are skipped.

        An item with drafts samples one token after each of them. Sampled tokens count up to and including the first that
        differs from its draft. Later steps overwrite the KV after that.

        Args:
            batch: The oldest planned batch.
            token_ids: Sampled tokens.
            logprobs: Log-probabilities of these tokens.
            prompt_logprobs: Log-probabilities of the items' prompt tokens, by request id, if requested.

        Returns: Outputs in batch order. Stop tokens are included.
        """
        num_samples = sum([item.num_samples for item in batch.items])
        assert len(token_ids) == len(logprobs) == num_samples, (
            f"{len(token_ids)} tokens and {len(logprobs)} logprobs for {num_samples} sampling items"
        )
        if batch.items:
            oldest = self._in_flight.popleft()
            assert oldest is batch, "batches commit once, in the order planned"
        outputs, end = self._take_refused(), 0
        for item in batch.items:
            sequence, begin = item.sequence, end
            if item.samples:
                end += 1 + len(item.drafts)
            sequence.num_in_flight -= 1
            sequence.num_pending -= item.samples
            if item.drafts:
                sequence.has_drafts_in_flight = False
            if sequence.status is not SequenceStatus.ENDED:
                if prompt_logprobs:
                    sequence.prompt_logprobs += prompt_logprobs.get(sequence.request.request_id, ())
                output = self._take(item, token_ids[begin:end], logprobs[begin:end])
                if output is not None:
                    outputs.append(output)
            if sequence.status is not SequenceStatus.RUNNING:
                self._tables.vacate(sequence)
        return outputs

    def _take(
        self, item: Scheduled, drawn: list[int], logprobs: list[Logprobs | None]
    ) -> RequestOutput | None:
        """Append an item's sampled tokens that count to its sequence. Returns the output to deliver, if any."""
        sequence, start, num_tokens, samples, _, drafts = item
        matcher, end, taken, reason = sequence.matcher, start + num_tokens, 0, None
        if samples and matcher is not None and matcher.is_late:
            self._sit_out(item)
            return None
        for token_id in drawn:
            sequence.token_ids.append(token_id)
            if matcher is not None:
                matcher.advance(token_id)
            reason = self._why_ended(sequence)
            taken += 1
            if reason is not None or taken > len(drafts) or token_id != drafts[taken - 1]:
                break
        if drafts:
            end = start + taken
            sequence.num_planned = end
        if taken:
            self._roster.charge(sequence, num_output_tokens=taken)
            if self._drafter is not None:
                self._drafter.note(sequence, len(drafts), taken - 1)
        self._tables.advance(sequence, start, end, num_drafts=len(drafts))
        if not taken:
            return None
        return self._deliver(sequence, drawn[:taken], logprobs[:taken], reason, len(drafts))

    def _sit_out(self, item: Scheduled) -> None:
        """Drop what an item sampled before its structure's mask was known. Another step computes the same logits."""
        sequence, end = item.sequence, item.end - len(item.drafts)
        sequence.num_planned = end
        self._tables.advance(sequence, item.start, end, num_drafts=len(item.drafts))
        if sequence.status is SequenceStatus.RUNNING:
            self._roster.park(sequence)

    def _why_ended(self, sequence: Sequence) -> FinishReason | None:
        if sequence.matcher is not None and sequence.matcher.failure:
            return FinishReason.ERROR  # an internal or library fault, which ends only this request
        return sequence.finish_reason(self._limits.max_model_len)

    def _deliver(
        self,
        sequence: Sequence,
        token_ids: list[int],
        logprobs: list[Logprobs | None],
        reason: FinishReason | None,
        num_drafts: int,
    ) -> RequestOutput:
        """Build the output for a sequence's new tokens. End the sequence if `reason` is given, or hand it over."""
        error = ""
        if reason is FinishReason.ERROR:
            assert sequence.matcher is not None, "only a structure fails"
            error, token_ids, logprobs = sequence.matcher.failure or "", token_ids[:-1], logprobs[:-1]
        is_handed_over, num_saved_tokens = reason is None and sequence.request.hands_over, 0
        if is_handed_over:
            num_saved_tokens = self._hand_over(sequence)
        elif reason is not None:
            self._end(sequence)
        of_prompt, sequence.prompt_logprobs = sequence.prompt_logprobs, []
        num_before = sequence.num_prompt_tokens + len(sequence.request.replayed_ids)
        is_first = len(sequence.token_ids) == num_before + len(token_ids)
        return RequestOutput(
            request_id=sequence.request.request_id,
            token_ids=token_ids,
            logprobs=[each for each in logprobs if each is not None],
            prompt_logprobs=of_prompt,
            num_cached_tokens=sequence.num_cached_tokens if is_first else 0,
            num_host_tokens=sequence.num_host_tokens if is_first else 0,
            num_disk_tokens=sequence.num_disk_tokens if is_first else 0,
            num_peer_tokens=sequence.num_peer_tokens if is_first else 0,
            queued_s=sequence.queued_s if is_first else 0.0,
            finish_reason=reason,
            error=error,
            num_draft_tokens=num_drafts,
            is_returned=is_handed_over,
            num_saved_tokens=num_saved_tokens,
            weights=0 if reason is None else self._weights_number,
        )

    def _hand_over(self, sequence: Sequence) -> int:
        """Release a sequence that another rank continues. Returns how many of its first tokens that rank can load."""
        self._retire(sequence)
        return self._tables.hand_over(sequence)

    def _end(self, sequence: Sequence) -> None:
        self._retire(sequence)
        self._tables.vacate(sequence)

    def _retire(self, sequence: Sequence) -> None:
        self._roster.retire(sequence)
        if self._tables.tiers is not None:
            self._tables.tiers.note_end(sequence)
        if self._drafter is not None:
            self._drafter.forget(sequence)

    def _take_refused(self) -> list[RequestOutput]:
        refused, self._refused = self._refused, []
        return refused


def _end_of(request_id: str, reason: FinishReason, error: str = "") -> RequestOutput:
    return RequestOutput(request_id=request_id, token_ids=[], finish_reason=reason, error=error)
