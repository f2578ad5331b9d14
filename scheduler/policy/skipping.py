"""A scheduler for simulated time that skips plain decodes: the same outcome, in time that depends on sequences, not steps.

Simulations ignore sampled values, so a sequence repeats its newest token. Steps that only give every running sequence a
token are taken at once, and other steps need no plan for plain decodes. The policy's own state decides whether a step
may do more. Steps that cannot be predicted (drafts, structures, states, deadlines, batches in flight) are never skipped.
Services do not use this. Rejected: a second, simpler policy for simulations, which would differ from the real one.
"""

from scheduler.policy.batch import StepBatch
from scheduler.policy.request import RequestOutput
from scheduler.policy.scheduler import Scheduler
from scheduler.policy.sequence import Sequence


class SkippingScheduler(Scheduler):
    """A `Scheduler` that has nothing in flight between calls."""

    def schedule_rest(
        self, *, prefill_budget: int | None = None, most_tokens: int | None = None, now_s: float = 0.0
    ) -> tuple[StepBatch, list[Sequence]]:
        """As `schedule` with nothing in flight, except that decodes that do not end take their newest token again at once.

        The outcome is the same as if they had sampled it, except for block numbers.

        Returns: The batch of the other sequences, to be committed, and the sequences that have their token.
        """
        most = min(self._limits.max_num_batched_tokens, most_tokens or self._limits.max_num_batched_tokens)
        self.collect(now_s)
        decodes = [sequence for sequence in self._roster.running if not sequence.is_prefilling]
        if not (self._may_skip and self._tables.num_plannable_steps(decodes, 1)):
            return self.schedule(prefill_budget=prefill_budget, most_tokens=most_tokens, now_s=now_s), []
        items, taken = [], []
        for sequence in decodes:
            if sequence.ends_within(1, self._limits.max_model_len):
                items.append(self._plans.plan(sequence, 1))
            else:
                sequence.token_ids.append(sequence.token_ids[-1])
                self._tables.take_token(sequence)
                taken.append(sequence)
        batch = self._plans.plan_prompts(items, len(decodes), most, prefill_budget, now_s)
        if batch.items:
            self._in_flight.append(batch)
        for sequence in taken:  # after the plan, as in a commit
            self._roster.charge(sequence, num_output_tokens=1)
        return batch, taken

    @property
    def _may_skip(self) -> bool:
        """Whether the next steps are predictable and only run what is running."""
        may_do_more = (
            self._in_flight
            or self._refused
            or self._deadlines
            or self._tables.leaving
            or self._roster.loading
        )
        knows_steps = (
            self._drafter is None and self._limits.rotary_limit is None and not self._tables.has_states
        )
        return knows_steps and not may_do_more and all(each.matcher is None for each in self._roster.running)

    @property
    def num_plain_steps(self) -> int:
        """Number of coming steps that only give every running sequence a token, unless a request is added or aborted or
        a stop token comes. The last of them may end sequences. 0 if the next step may do more.

        Waiting requests keep waiting in them, for a seat or for blocks. For `skip`.
        """
        running, waiting = self._roster.running, self._roster.waiting
        if not running or not self._may_skip or any(sequence.is_prefilling for sequence in running):
            return 0
        if waiting and len(running) < self._limits.max_num_seqs:
            is_head_stuck = waiting.is_order_fixed and self._tables.lacks_blocks(waiting.head, len(running))
            if not is_head_stuck:
                return 0
        return self._tables.num_plannable_steps(running, self.num_steps_to_end)

    @property
    def num_steps_to_end(self) -> int:
        """Number of tokens per sequence until the first running one ends. At least one must run."""
        return min(sequence.num_left(self._limits.max_model_len) for sequence in self._roster.running)

    def skip(self, num_steps: int) -> list[RequestOutput]:
        """Do the work of `num_steps` calls of `schedule` and `commit` that repeat every sequence's newest token.

        The outcome is the same, except for block numbers. The time depends on the sequences, not on the steps.

        Args:
            num_steps: At most `num_plain_steps`.

        Returns: All gained tokens of the sequences that ended.
        """
        running = list(self._roster.running)
        for sequence in running:
            sequence.token_ids += [sequence.token_ids[-1]] * num_steps
            self._tables.plan(sequence, num_steps)
        outputs = []
        for sequence in running:
            sequence.num_in_flight -= 1
            self._tables.advance(sequence, sequence.num_computed, sequence.num_planned)
            self._roster.charge(sequence, num_output_tokens=num_steps)
            reason = sequence.finish_reason(self._limits.max_model_len)
            if reason is not None:
                outputs.append(self._deliver(sequence, sequence.token_ids[-num_steps:], [], reason, 0))
        return outputs
