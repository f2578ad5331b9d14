"""The roster: the sequences that a rank serves, who of them runs, and in which order the others wait.

Lower priorities begin first, as vLLM's do. Of equal ones, those that were preempted, or that a lost rank had begun, go before
those that have never run: their clients are in the middle of an answer. Then the key that was served least, and of one key who came first. The highest
priority that runs is preempted first, of equal ones the latest to begin. Who waits takes no place from who runs, whatever
their priorities: preemption is for want of blocks only.

What a key was served is its virtual token counter, of "Fairness in Serving Large Language Models" (Sheng et al., 2024,
arXiv 2401.00588): tokens of prompts as they begin, but for cached ones, and generated tokens at twice the weight, as there.
A key that comes back has no credit for the time it was away. So of two keys that both have requests waiting none is ahead by
more than twice what the requests that run at once take from beginning to end. Rejected: requests per minute, which leave the service idle; counters over all ranks,
which the ranks would have to exchange.

Of one priority nobody starves: the head gets the next place, and nobody passes it while its place is not free, but for keys
that were served less. Of several, the higher ones wait for as long as lower ones come. Knows nothing of blocks, budgets and
batches.
"""

from bisect import insort
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain

from scheduler.policy.request import Request
from scheduler.policy.sequence import Sequence, SequenceStatus

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1, 2  # of a token in what a key was served


class WaitingQueue:
    """Sequences that wait, and which of them is next."""

    def __init__(self) -> None:
        self.served: defaultdict[str, int] = defaultdict(int)  # weighted tokens, by key
        self._resumed: list[Sequence] = []  # have run before; by priority, then arrival
        self._fresh: dict[str, list[Sequence]] = {}  # by key that has any; likewise
        self._queue_of: dict[Sequence, list[Sequence]] = {}
        self._last_key = ""  # of which one waits no more

    def __len__(self) -> int:
        return len(self._queue_of)

    def __iter__(self) -> Iterator[Sequence]:
        return chain(self._resumed, *self._fresh.values())

    @property
    def head(self) -> Sequence:
        """The one that is next; somebody must wait."""
        heads = [queue[0] for queue in (self._resumed, *self._fresh.values()) if queue]
        return min(heads, key=self._place)

    @property
    def is_order_fixed(self) -> bool:
        """Whether the head stays next whatever keys are served: not where several keys wait."""
        return len(self._fresh) <= 1

    def _place(self, sequence: Sequence) -> tuple[int, bool, int, int]:
        is_fresh = self._queue_of[sequence] is not self._resumed
        served = self.served[sequence.request.key_id] if is_fresh else 0
        return sequence.request.priority, is_fresh, served, sequence.number

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait in its place."""
        has_begun = sequence.num_admissions or sequence.request.replayed_ids  # there: of a rank that was lost
        queue = self._resumed if has_begun else self._queue_for(sequence.request)
        self._queue_of[sequence] = queue
        insort(queue, sequence, key=lambda each: (each.request.priority, each.number))

    def _queue_for(self, request: Request) -> list[Sequence]:
        """Return a key's queue; where nothing as urgent waits in it, it has no credit from before over those that wait."""
        key_id = request.key_id

        def waits_for(queue: list[Sequence]) -> bool:
            return bool(queue) and queue[0].request.priority <= request.priority

        if not waits_for(self._fresh.get(key_id, [])):
            others = [self.served[each] for each, queue in self._fresh.items() if waits_for(queue)]
            least = min(others) if others else self.served[self._last_key]
            self.served[key_id] = max(self.served[key_id], least)
        return self._fresh.setdefault(key_id, [])

    def remove(self, sequence: Sequence) -> None:
        """Let one wait no more."""
        self._queue_of.pop(sequence).remove(sequence)
        key_id = sequence.request.key_id
        if not self._fresh.get(key_id, True):
            del self._fresh[key_id]
        self._last_key = key_id


class Roster:
    """The sequences that a rank serves. It alone changes `Sequence.status`."""

    def __init__(self) -> None:
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []  # in the order in which they began
        self.parked: list[Sequence] = []  # that wait until it is known what their structures allow
        self.num_preemptions = 0  # counter
        self._num_enqueued = 0
        self._by_id: dict[str, Sequence] = {}  # all, by request id

    def __bool__(self) -> bool:
        """Whether any request waits, runs or is parked."""
        return bool(self._by_id)

    def find(self, request_id: str) -> Sequence | None:
        """Return the sequence of a request; None where it is unknown or has ended."""
        return self._by_id.get(request_id)

    def num_prefill(self, most: int, *, with_waiting: bool) -> int:
        """Count tokens of prompts that are yet to run, of the one that does first, until there are `most`."""
        last = self.running[-1] if self.running else None
        count = last.num_prefill_tokens - last.num_planned if last and last.is_prefilling else 0
        for sequence in self.waiting if with_waiting else ():
            if count >= most:
                break
            count += len(sequence.token_ids)
        return min(count, most)

    def by_urgency(self) -> list[Sequence]:
        """Return those that run, the one that would be preempted first at the end."""
        return sorted(
            self.running, key=lambda sequence: sequence.request.priority
        )  # equal ones keep their order

    def enqueue(self, sequence: Sequence) -> None:
        """Let a new sequence wait."""
        self._by_id[sequence.request.request_id] = sequence
        sequence.number = self._num_enqueued = self._num_enqueued + 1
        self.waiting.add(sequence)

    def admit(self, sequence: Sequence) -> None:
        """Let one that waits run."""
        self.waiting.remove(sequence)
        sequence.status = SequenceStatus.RUNNING
        self.running.append(sequence)

    def charge(self, sequence: Sequence, *, num_prompt_tokens: int = 0, num_output_tokens: int = 0) -> None:
        """Note what a request's key was served."""
        tokens = PROMPT_WEIGHT * num_prompt_tokens + OUTPUT_WEIGHT * num_output_tokens
        self.waiting.served[sequence.request.key_id] += tokens

    def preempt(self) -> Sequence:
        """Let the least urgent of those that run wait again."""
        sequence = self.by_urgency()[-1]
        self.send_back(sequence)
        self.num_preemptions += 1
        return sequence

    def send_back(self, sequence: Sequence) -> None:
        """Let one that runs wait again: it begins anew."""
        self.running.remove(sequence)
        sequence.status = SequenceStatus.WAITING
        self.waiting.add(sequence)

    def park(self, sequence: Sequence) -> None:
        """Let one that runs sit out until its structure's mask is ready; then it waits, and begins anew."""
        self.running.remove(sequence)
        sequence.status = SequenceStatus.WAITING
        self.parked.append(sequence)

    def unpark(self) -> None:
        """Let those wait again whose masks are ready."""
        ready = [each for each in self.parked if each.matcher is None or each.matcher.is_ready]
        for sequence in ready:
            self.parked.remove(sequence)
            self.waiting.add(sequence)

    def retire(self, sequence: Sequence) -> None:
        """End a sequence, wherever it is."""
        del self._by_id[sequence.request.request_id]
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
        elif sequence in self.parked:
            self.parked.remove(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.status = SequenceStatus.ENDED
