"""The roster: a rank's sequences, which of them run, and the order in which the others wait.

Lower priorities begin first, as in vLLM. Within a priority, sequences that were preempted, or that a lost rank had
begun, precede those that have never run: their clients are in the middle of an answer. Next comes the key with the
least service, then the earliest arrival. Preemption takes the running sequence with the highest priority value and,
within a priority, the one that began last. A waiting sequence never displaces a running one, whatever their
priorities: only a lack of blocks preempts.

A key's service is its virtual token counter, from "Fairness in Serving Large Language Models" (Sheng et al., 2024,
arXiv 2401.00588): prompt tokens when a prompt begins, except cached ones, and generated tokens at the paper's double
weight. A returning key has no credit for its absence. So of two keys that both have waiting requests, neither is ahead
by more than twice the full cost of the requests that run at once. Rejected: requests per minute, which leave the
service idle; counters over all ranks, which ranks would have to exchange.

Within a priority no request starves: the head gets the next free place, and only requests of keys with less service
can pass it. Higher values wait while requests with lower ones arrive. Does not know blocks, budgets or batches."""

from bisect import insort
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain

from scheduler.policy.request import Request
from scheduler.policy.sequence import Sequence, SequenceStatus

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1, 2  # weight of a token in a key's service


class WaitingQueue:
    """The waiting sequences, in order."""

    def __init__(self) -> None:
        self.served: defaultdict[str, int] = defaultdict(int)  # weighted tokens, by key
        self._resumed: list[Sequence] = []  # begun here or on a lost rank; by priority, then arrival
        self._fresh: dict[str, list[Sequence]] = {}  # by key; each list by priority, then arrival
        self._queue_of: dict[Sequence, list[Sequence]] = {}
        self._last_key = ""  # of the last sequence removed

    def __len__(self) -> int:
        return len(self._queue_of)

    def __iter__(self) -> Iterator[Sequence]:
        return chain(self._resumed, *self._fresh.values())

    @property
    def head(self) -> Sequence:
        """The next sequence. The queue must not be empty."""
        heads = [queue[0] for queue in (self._resumed, *self._fresh.values()) if queue]
        return min(heads, key=self._place)

    @property
    def resumed(self) -> list[Sequence]:
        """The waiting sequences that have begun before, in order."""
        return list(self._resumed)

    @property
    def is_order_fixed(self) -> bool:
        """Whether service of keys cannot change the head. False if several keys wait."""
        return len(self._fresh) <= 1

    def _place(self, sequence: Sequence) -> tuple[int, bool, int, int]:
        is_fresh = self._queue_of[sequence] is not self._resumed
        served = self.served[sequence.request.key_id] if is_fresh else 0
        return sequence.request.priority, is_fresh, served, sequence.number

    def add(self, sequence: Sequence) -> None:
        """Insert a sequence at its place."""
        queue = self._resumed if sequence.has_begun else self._queue_for(sequence.request)
        self._queue_of[sequence] = queue
        insort(queue, sequence, key=lambda each: (each.request.priority, each.number))

    def _queue_for(self, request: Request) -> list[Sequence]:
        """Return a key's queue. If nothing as urgent waits in it, the key loses its credit over keys that wait."""
        key_id = request.key_id

        def waits_for(queue: list[Sequence]) -> bool:
            return bool(queue) and queue[0].request.priority <= request.priority

        if not waits_for(self._fresh.get(key_id, [])):
            others = [self.served[each] for each, queue in self._fresh.items() if waits_for(queue)]
            least = min(others) if others else self.served[self._last_key]
            self.served[key_id] = max(self.served[key_id], least)
        return self._fresh.setdefault(key_id, [])

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that waits no longer."""
        self._queue_of.pop(sequence).remove(sequence)
        key_id = sequence.request.key_id
        if not self._fresh.get(key_id, True):
            del self._fresh[key_id]
        self._last_key = key_id


class Roster:
    """A rank's sequences. Only the roster changes `Sequence.status`."""

    def __init__(self) -> None:
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []  # in the order in which they began
        self.parked: list[Sequence] = []  # waiting for the masks of their structures
        self.loading: list[Sequence] = []  # waiting for their prefixes from a tier
        # Begun on another rank, which is releasing them: each with the time at which it was announced.
        self.coming: dict[str, tuple[Sequence, float]] = {}
        self.num_preemptions = 0  # counter
        self._num_enqueued = 0
        self._by_id: dict[str, Sequence] = {}  # all, by request id

    def __bool__(self) -> bool:
        """Whether any request waits, runs, is parked or loads."""
        return bool(self._by_id)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_id.values())

    def find(self, request_id: str) -> Sequence | None:
        """Return the sequence of a request, or None if it is unknown or has ended."""
        return self._by_id.get(request_id)

    def uses_adapter(self, place: int) -> bool:
        """Return whether any sequence uses the adapter at a place."""
        return any(sequence.request.adapter_place == place for sequence in self._by_id.values())

    def num_prefill(self, most: int, *, with_waiting: bool) -> int:
        """Count the prompt tokens still to run, up to `most`: of the sequence that prefills, and of waiting ones."""
        last = self.running[-1] if self.running else None
        count = last.num_prefill_tokens - last.num_planned if last and last.is_prefilling else 0
        for sequence in self.waiting if with_waiting else ():
            if count >= most:
                break
            count += sequence.num_prefillable
        return min(count, most)

    def by_urgency(self) -> list[Sequence]:
        """Return the running sequences, most urgent first; the last one is preempted first."""
        # The sort is stable: equal priorities keep their order.
        return sorted(self.running, key=lambda sequence: sequence.request.priority)

    def enqueue(self, sequence: Sequence) -> None:
        """Add a new sequence to the queue."""
        self._by_id[sequence.request.request_id] = sequence
        self.coming.pop(sequence.request.request_id, None)
        sequence.number = self._num_enqueued = self._num_enqueued + 1
        self.waiting.add(sequence)

    def admit(self, sequence: Sequence) -> None:
        """Move a waiting sequence to the running ones."""
        self.waiting.remove(sequence)
        sequence.status, sequence.num_holds_left = SequenceStatus.RUNNING, 0
        self.running.append(sequence)

    def charge(self, sequence: Sequence, *, num_prompt_tokens: int = 0, num_output_tokens: int = 0) -> None:
        """Add tokens to the service of a request's key."""
        tokens = PROMPT_WEIGHT * num_prompt_tokens + OUTPUT_WEIGHT * num_output_tokens
        self.waiting.served[sequence.request.key_id] += tokens

    def preempt(self) -> Sequence:
        """Move the least urgent running sequence back to the queue."""
        sequence = self.by_urgency()[-1]
        self.send_back(sequence)
        self.num_preemptions += 1
        return sequence

    def send_back(self, sequence: Sequence) -> None:
        """Move a running sequence back to the queue. It starts again from its prompt."""
        self.running.remove(sequence)
        sequence.status = SequenceStatus.WAITING
        self.waiting.add(sequence)

    def park(self, sequence: Sequence) -> None:
        """Take a running sequence aside until its mask is ready. Then it waits and starts again from its prompt."""
        self.running.remove(sequence)
        sequence.status = SequenceStatus.WAITING
        self.parked.append(sequence)

    def unpark(self) -> None:
        """Move parked sequences whose masks are ready back to the queue."""
        ready = [each for each in self.parked if each.matcher is None or each.matcher.is_ready]
        for sequence in ready:
            self.parked.remove(sequence)
            self.waiting.add(sequence)

    def set_aside(self, sequence: Sequence) -> None:
        """Take a waiting sequence aside while its prefix loads."""
        self.waiting.remove(sequence)
        self.loading.append(sequence)

    @property
    def resuming(self) -> list[Sequence]:
        """The sequences that have begun, and come or load their prefixes to continue."""
        return [each for each, _ in self.coming.values()] + [each for each in self.loading if each.has_begun]

    def forget_coming(self, before_s: float) -> None:
        """Forget the coming sequences that were announced before a time."""
        for request_id in [name for name, (_, since_s) in self.coming.items() if since_s < before_s]:
            del self.coming[request_id]

    def bring_back(self) -> None:
        """Move sequences that no longer load back to their places in the queue."""
        for sequence in [each for each in self.loading if not each.is_loading]:
            self.loading.remove(sequence)
            self.waiting.add(sequence)

    def retire(self, sequence: Sequence) -> None:
        """End a sequence, wherever it is."""
        del self._by_id[sequence.request.request_id]
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
        elif sequence in self.parked:
            self.parked.remove(sequence)
        elif sequence in self.loading:
            self.loading.remove(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.status = SequenceStatus.ENDED
