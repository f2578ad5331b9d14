"""The content of each step: which tokens of which sequences run in it.

Every step runs decodes first. Prompts take the remaining room, in chunks, in the roster's order. If blocks run out, the
least urgent running sequence is preempted. A step may try several tokens of a request (drafts), or compute several generated
tokens of it again (`Sequence.num_prefillable`). Plans are made while earlier steps are in flight, so they use counts of tokens and
not the tokens. `scheduler.policy.scheduler` applies the results.
"""

from collections.abc import Sequence as Series
from typing import NamedTuple, Protocol

from kvcache.images import rest_of_image, whole_chunk
from scheduler.policy.batch import Scheduled, StepBatch
from scheduler.policy.limits import SchedulerLimits
from scheduler.policy.roster import Roster
from scheduler.policy.sequence import Sequence, SequenceStatus
from scheduler.policy.tables import BlockTables


class NextStep(NamedTuple):
    """The expected content of the step after the batches planned so far."""

    num_decodes: int  # most decode tokens, drafts included
    # A prompt continues, a waiting one finds a seat and blocks, or a request that moves here comes soon or loads its prefix.
    has_prefill: bool
    num_prefill: int  # tokens of such prompts, cached ones included; at most a step's capacity


class DraftsTokens(Protocol):
    """A source of drafts; implemented by `scheduler.drafts.drafter.Drafter`."""

    @property
    def num_drafts(self) -> int:
        """Most drafts per sequence and step."""

    @property
    def num_ahead(self) -> int:
        """Number of positions after a step's tokens that drafting writes."""

    def limits(self, sequences: Series[Sequence]) -> list[int]:
        """Return, for each running sequence, how many drafts it may try in the next step."""

    def propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        """Draft at most `most` tokens, none of which the sequence's structure forbids."""

    def note(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Learn the result of a step's drafts: the first `num_accepted` were right."""

    def forget(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""


class StepPlans:
    """Plans steps. It moves sequences of the roster between running and waiting, and takes and frees their blocks."""

    def __init__(
        self, roster: Roster, tables: BlockTables, limits: SchedulerLimits, drafter: DraftsTokens | None
    ) -> None:
        self._roster, self._tables, self._limits, self._drafter = roster, tables, limits, drafter
        # Most rows of decodes in a step. Each of them, and each prompt, is a sequence of a GPU's step.
        num_drafts = drafter.num_drafts if drafter else 0
        self._most_rows = min(limits.max_num_seqs * (1 + num_drafts), limits.max_num_batched_tokens)

    def plan_decodes(self, most: int) -> list[Scheduled]:
        """Plan a token of every sequence that can continue, and more of some: known ones that are computed again, or drafts.

        `most`: most tokens together.
        """
        items: list[Scheduled] = []
        self._send_back_grown()
        running = self._roster.by_urgency()  # preemption takes from the end, never what this step has planned
        most -= self._image_room(most)
        room = min(most, self._most_rows) - len(running)
        for sequence, limit in zip(running, self._draft_limits(running), strict=True):
            if (
                sequence.status is SequenceStatus.RUNNING
                and not sequence.is_prefilling
                and not (
                    sequence.request.hands_over and sequence.num_pending
                )  # its only token here is coming
                and not sequence.has_drafts_in_flight
                and sequence.num_left(self._limits.max_model_len) > sequence.num_pending
                and self._tables.is_ready(sequence)
                and not self._has_grown(sequence)
                and len(items) < most
                and self._make_room(sequence)
            ):
                drafts = self._draft(sequence, min(limit, room)) if limit else ()
                num_tokens = 1 + len(drafts) + self._num_again(sequence, room)
                room -= num_tokens - 1
                items.append(self.plan(sequence, num_tokens, drafts))
        return items

    def _num_again(self, sequence: Sequence, room: int) -> int:
        """Return how many known tokens after the next one a sequence computes again in this step."""
        if sequence.num_unplanned <= 1:
            return 0
        # As for drafts, one block per running sequence stays free.
        fitting = self._tables.num_plannable(sequence, num_spare_blocks=len(self._roster.running))
        return max(0, min(sequence.num_unplanned - 1, room, fitting - 1))

    def _draft_limits(self, running: list[Sequence]) -> list[int]:
        return [0] * len(running) if self._drafter is None else self._drafter.limits(running)

    def _draft(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        """Draft tokens after a sequence's newest one. Returns nothing while that one is unknown or others run before it."""
        if self._drafter is None or most <= 0 or sequence.num_pending or sequence.num_in_flight:
            return ()
        if sequence.num_unplanned > 1 or sequence.request.hands_over:  # which gets one token here
            return ()
        most = min(
            most,
            sequence.num_left(self._limits.max_model_len) - 1,
            # One block per running sequence stays free, so drafts never cause a preemption.
            self._tables.num_plannable(sequence, num_spare_blocks=len(self._roster.running)) - 1,
            self._tables.num_ready(sequence) - 1,
        )
        if self._limits.rotary_limit is not None and not sequence.is_long:
            most = min(most, self._limits.rotary_limit - sequence.num_planned - 1)
        return self._drafter.propose(sequence, most) if most > 0 else ()

    def _send_back_grown(self) -> None:
        if self._limits.rotary_limit is None:
            return
        for sequence in [each for each in self._roster.running if self._has_grown(each)]:
            if not sequence.num_in_flight:
                self._roster.send_back(sequence)
                self._tables.vacate(sequence)

    def _has_grown(self, sequence: Sequence) -> bool:
        """Whether the next token exceeds the length for which the sequence was computed so far."""
        return not sequence.is_long and self._limits.is_long(sequence.num_planned + 1)

    def _make_room(self, sequence: Sequence) -> bool:
        """Preempt the least urgent until a decode has its block. Returns False if the decode must wait."""
        while self._tables.num_plannable(sequence) == 0:
            self._tables.give_way()
            if self._tables.num_plannable(sequence) > 0:
                break
            if self._tables.leaving:  # the next commit frees blocks
                return False
            latest = self._roster.preempt()
            self._tables.vacate(latest)
            if latest is sequence:
                return False
        return True

    def plan_prompts(
        self,
        items: list[Scheduled],
        num_decode_tokens: int,
        most: int,
        prefill_budget: int | None,
        now_s: float,
    ) -> StepBatch:
        """Fill the room of a step that its decodes leave, and return the whole step.

        Args:
            items: The planned decodes.
            num_decode_tokens: Their tokens, with those that run elsewhere.
            most: Most tokens of the step.
            prefill_budget: Most prompt tokens; None sets no limit.
            now_s: As in `Scheduler.schedule`.
        """
        room = budget = most - num_decode_tokens
        if prefill_budget is not None:
            budget = min(budget, prefill_budget)
        prefills = self._plan_prefills(budget, room)
        if not self._stops_at_image:
            num_planned = sum(item.num_tokens for item in prefills)
            seats = self._most_rows - num_decode_tokens - len(prefills)
            prefills += self._admit(budget - num_planned, room - num_planned, seats, now_s)
        num_prefill_tokens = sum(item.num_tokens for item in prefills)
        num_tokens = sum([item.num_tokens for item in items]) + num_prefill_tokens
        return StepBatch(items + prefills, num_tokens, num_prefill_tokens)

    def _plan_prefills(self, budget: int, room: int) -> list[Scheduled]:
        """Plan the next chunk of a half-done prompt. Its sequence began last and takes no blocks from others: those
        before it are decodes, which continue and end.

        Args:
            budget: Most prompt tokens. An image that must stay whole may exceed it.
            room: Most tokens.
        """
        return [
            self.plan(sequence, num_tokens)
            for sequence in self._roster.running[-1:]
            if sequence.is_prefilling
            and self._tables.is_ready(sequence)
            and (num_tokens := self._chunk_tokens(sequence, budget, room)) > 0
        ]

    def _admit(self, budget: int, room: int, seats: int, now_s: float) -> list[Scheduled]:
        """Start waiting requests in order until the budget, the seats or the blocks are used up.

        At most `seats` start: decodes that compute tokens again may leave fewer than the limit.

        The head of the queue must find blocks for all its tokens, not only for its next chunk, and leave one block free
        per running sequence. So nothing starts while a running prompt is short of blocks (none are free), and what this
        step preempted does not return at once (not all its blocks are still free). Simulated with 300 requests, up to 64
        at once, against requiring blocks for the chunk only: preemptions fall from 585 to 101 and tokens run by 26 % with
        short prompts and long outputs; from 151 to 0 and by 29 % with long prompts. Two spare blocks per sequence gave
        3 % fewer tokens and 2 % more steps. vLLM's watermark (1 % of the pool) was worse with short prompts.
        """
        items: list[Scheduled] = []
        running, waiting = self._roster.running, self._roster.waiting
        last = min(self._limits.max_num_seqs, len(running) + seats)
        while waiting and budget > 0 and len(running) < last:
            sequence = waiting.head
            if sequence.num_in_flight:
                break
            if self._waits_for_tier(sequence, now_s):
                continue
            if not self._tables.seat(sequence, len(running)):
                self._tables.give_way()
                break
            self._roster.admit(sequence)
            if sequence.num_admissions == 1:
                sequence.queued_s = max(0.0, now_s - sequence.request.arrival_s)
                num_to_run = len(sequence.token_ids) - sequence.num_computed
                self._roster.charge(sequence, num_prompt_tokens=num_to_run)
            num_tokens = self._chunk_tokens(sequence, budget, room)
            if num_tokens:
                items.append(self.plan(sequence, num_tokens))
                budget, room = budget - num_tokens, room - num_tokens
            if self._stops_at_image:
                break
        if waiting and len(running) >= self._limits.max_num_seqs and not waiting.head.num_in_flight:
            self._waits_for_tier(waiting.head, now_s)
        self.load_resumed(now_s)
        return items

    def load_resumed(self, now_s: float) -> None:
        """Begin to load the prefixes of all requests that move here at once, although a step may begin only some of them."""
        for sequence in self._roster.waiting.resumed:
            if not sequence.num_in_flight:
                self._waits_for_tier(sequence, now_s)

    def _waits_for_tier(self, sequence: Sequence, now_s: float) -> bool:
        """Whether a waiting sequence was set aside because its prefix is on the way from a tier."""
        sequence.is_long = self._limits.is_long(len(sequence.token_ids))
        if not self._tables.begin_load(sequence, len(self._roster.running), now_s):
            return False
        self._roster.set_aside(sequence)
        return True

    def _chunk_tokens(self, sequence: Sequence, budget: int, room: int) -> int:
        """Return the number of tokens of a prompt's next chunk, 0 if it must wait for room or blocks."""
        most = min(sequence.num_prefill_tokens - sequence.num_planned, self._tables.num_plannable(sequence))
        if not self._limits.keeps_images_whole:
            return min(budget, most)
        return whole_chunk(sequence.request.images, sequence.num_planned, min(budget, most), min(room, most))

    @property
    def _stops_at_image(self) -> bool:
        """Whether the newest prompt may have left room because of an image. No other one begins before its end."""
        running = self._roster.running
        return self._limits.keeps_images_whole and bool(running) and running[-1].is_prefilling

    def _image_room(self, most: int) -> int:
        """Return the room that decodes leave for an image of a half-done prompt: enough for the whole image, if a step has it."""
        if not self._stops_at_image:
            return 0
        latest = self._roster.running[-1]
        num_tokens = rest_of_image(latest.request.images, latest.num_planned)
        return num_tokens if num_tokens <= most else 0

    def plan(self, sequence: Sequence, num_tokens: int, drafts: tuple[int, ...] = ()) -> Scheduled:
        """Plan the next tokens of a running sequence, the last of which may be drafts. The missing blocks must be free."""
        start = sequence.num_planned
        pieces = self._tables.plan(sequence, num_tokens, num_drafts=len(drafts))
        if self._drafter is not None and self._drafter.num_ahead:
            num_ahead = min(self._drafter.num_ahead, self._limits.max_model_len - sequence.num_planned)
            self._tables.reserve(sequence, num_ahead, len(self._roster.running))
        samples = sequence.num_planned == len(sequence.token_ids) + sequence.num_pending + len(drafts)
        if samples and sequence.matcher is not None:
            sequence.matcher.begin_step()
        sequence.num_pending += samples
        sequence.has_drafts_in_flight = bool(drafts)
        return Scheduled(sequence, start, num_tokens, samples, pieces, drafts)

    def predict(self) -> NextStep:
        """Predict the next step: see `Scheduler.next_step`."""
        running, begins = self._roster.running, self._head_begins
        is_mid_prompt = bool(running) and running[-1].is_prefilling
        most = self._limits.max_num_batched_tokens
        num_prefill = self._roster.num_prefill(most, with_waiting=begins)
        # A request that moved here is to continue in the first step after its load, also between decodes.
        resuming = self._roster.resuming if len(running) < self._limits.max_num_seqs else []
        num_prefill = min(most, num_prefill + sum(map(self._tables.num_after_load, resuming)))
        num_decodes = sum(map(_num_rows, running)) + sum(self._draft_limits(running))
        has_prefill = begins or is_mid_prompt or bool(resuming)
        return NextStep(min(num_decodes, self._most_rows), has_prefill, num_prefill)

    @property
    def _head_begins(self) -> bool:
        """Whether the next step can probably begin a waiting request."""
        running, waiting = self._roster.running, self._roster.waiting
        if not waiting:
            return False
        if any(
            sequence.ends_within(sequence.num_pending, self._limits.max_model_len) for sequence in running
        ):
            return True
        if len(running) >= self._limits.max_num_seqs:
            return False
        return self._tables.has_states or not self._tables.lacks_blocks(waiting.head, len(running))

    @property
    def draft_depth(self) -> int:
        """Most drafts that are made for a sequence after the next step. A prediction, like `predict`."""
        if self._drafter is None:
            return 0
        if self._roster.waiting:
            return self._drafter.num_drafts
        return max(self._draft_limits(self._roster.running), default=0)


def _num_rows(sequence: Sequence) -> int:
    """Return the most rows that a running sequence has among the next step's decodes, without drafts."""
    if sequence.request.hands_over and (sequence.is_prefilling or sequence.num_pending):
        return 0
    return 1 if sequence.is_prefilling else max(1, sequence.num_unplanned)
