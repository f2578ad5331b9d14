"""The roster: the sequences that a rank serves, and who of them waits and who runs.

Whoever runs has arrived before whoever waits: the head of the queue is admitted, and the latest arrival among those
that run is preempted, which puts it back at the head. Knows nothing of blocks, budgets and batches.
"""

from collections import deque

from scheduler.policy.sequence import Sequence, SequenceStatus


class Roster:
    """The sequences that a rank serves. It alone changes `Sequence.status`."""

    def __init__(self) -> None:
        self.waiting: deque[Sequence] = deque()  # in order of arrival
        self.running: list[Sequence] = []  # likewise
        self.num_preemptions = 0  # counter
        self._by_id: dict[str, Sequence] = {}  # both, by request id

    def __bool__(self) -> bool:
        """Whether anybody waits or runs."""
        return bool(self._by_id)

    def find(self, request_id: str) -> Sequence | None:
        """Return the sequence of a request; None where it is unknown or has ended."""
        return self._by_id.get(request_id)

    def num_prefill(self, most: int) -> int:
        """Count tokens of prompts that are yet to run, of the one that does first, until there are `most`."""
        last = self.running[-1] if self.running else None
        count = last.num_prefill_tokens - last.num_planned if last and last.is_prefilling else 0
        for sequence in self.waiting:
            if count >= most:
                break
            count += len(sequence.token_ids)
        return min(count, most)

    def enqueue(self, sequence: Sequence) -> None:
        """Let a new sequence wait behind all others."""
        self._by_id[sequence.request.request_id] = sequence
        self.waiting.append(sequence)

    def admit(self) -> Sequence:
        """Let the one that waits longest run."""
        sequence = self.waiting.popleft()
        sequence.status = SequenceStatus.RUNNING
        self.running.append(sequence)
        return sequence

    def preempt(self) -> Sequence:
        """Let the latest arrival among those that run wait again, before all others."""
        sequence = self.running.pop()
        sequence.status = SequenceStatus.WAITING
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1
        return sequence

    def send_back(self, sequence: Sequence) -> None:
        """Let one that runs wait again, before all others: it begins anew."""
        self.running.remove(sequence)
        sequence.status = SequenceStatus.WAITING
        self.waiting.appendleft(sequence)

    def retire(self, sequence: Sequence) -> None:
        """End a sequence, wherever it is."""
        del self._by_id[sequence.request.request_id]
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.status = SequenceStatus.ENDED
