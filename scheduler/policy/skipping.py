"""A scheduler that can skip what only decodes: the same outcome in time by sequences, not by steps, for simulated time.

What a decode samples is of no matter there, so a sequence takes its newest token again. Steps that give every running sequence
a token and do nothing else are taken at once, and in other steps those that only decode need no plan. Whether a step
may do more is asked of the policy's own state; what cannot be known beforehand (drafts, structures, states, deadlines, batches in
flight) is never skipped. A service does not skip. Rejected: a second, simpler policy for simulations, which would be another one.
"""

from scheduler.policy.batch import StepBatch
from scheduler.policy.request import Logprobs, RequestOutput
from scheduler.policy.scheduler import Scheduler
from scheduler.policy.sequence import Sequence


class SkippingScheduler(Scheduler):
    """A `Scheduler` of which nothing is in flight between calls."""

    def schedule_rest(
        self, *, prefill_budget: int | None = None, most_tokens: int | None = None, now_s: float = 0.0
    ) -> tuple[StepBatch, list[Sequence]]:
        """As `schedule` with nothing in flight, but what only decodes and does not end takes its newest token again at once.

        What comes of it is the same as if those had sampled it, but for the numbers of blocks.

        Returns: the others' batch, to be committed, and those that have their token.
        """
        most = min(self._max_num_batched_tokens, most_tokens or self._max_num_batched_tokens)
        decodes = [sequence for sequence in self._roster.running if not sequence.is_prefilling]
        if not (self._may_skip and self._tables.num_plannable_steps(decodes, 1)):
            return self.schedule(prefill_budget=prefill_budget, most_tokens=most_tokens, now_s=now_s), []
        items, taken = [], []
        for sequence in decodes:
            if sequence.ends_within(1, self._max_model_len):
                items.append(self._plan(sequence, 1))
            else:
                sequence.token_ids.append(sequence.token_ids[-1])
                self._tables.take_token(sequence)
                taken.append(sequence)
        batch = self._plan_prompts(items, len(decodes), most, prefill_budget, now_s)
        for sequence in taken:  # behind the plan, as a commit does
            self._roster.charge(sequence, num_output_tokens=1)
        return batch, taken

    @property
    def _may_skip(self) -> bool:
        """Whether nothing is known that a step might do beside running what runs, and all of it is known beforehand."""
        may_do_more = self._in_flight or self._refused or self._deadlines or self._tables.leaving
        knows_steps = self._drafter is None and self._rotary_limit is None and not self._tables.has_states
        return knows_steps and not may_do_more and all(each.matcher is None for each in self._roster.running)

    @property
    def num_plain_steps(self) -> int:
        """How many steps from now on give every running sequence a token and do nothing else, unless a request is added
        or aborted or a stop token comes; the last of them may end sequences. 0: the next one may do more.

        Requests that wait go on waiting in them: no seat is free, or too few blocks. For `skip`.
        """
        running, waiting = self._roster.running, self._roster.waiting
        if not running or not self._may_skip or any(sequence.is_prefilling for sequence in running):
            return 0
        if waiting and len(running) < self._max_num_seqs:
            is_head_stuck = waiting.is_order_fixed and self._tables.lacks_blocks(waiting.head, len(running))
            if not is_head_stuck:
                return 0
        return self._tables.num_plannable_steps(running, self.num_steps_to_end)

    @property
    def num_steps_to_end(self) -> int:
        """After how many tokens of each the first of those that run ends; there is one."""
        return min(sequence.num_left(self._max_model_len) for sequence in self._roster.running)

    def skip(self, num_steps: int) -> list[RequestOutput]:
        """Do what `schedule` and `commit` do in so many steps, each of which samples every sequence's newest token again.

        What comes of it is the same but for the numbers of blocks. It takes time by the sequences and not by the steps.

        Args:
            num_steps: at most `num_plain_steps`.

        Returns: of the sequences that ended, all that they gained.
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
            reason = sequence.finish_reason(self._max_model_len)
            if reason is not None:
                gained: list[tuple[int, Logprobs | None]] = [
                    (token_id, None) for token_id in sequence.token_ids[-num_steps:]
                ]
                outputs.append(self._deliver(sequence, gained, reason, 0))
        return outputs
