"""The roster: the sequences that a rank serves, who of them runs, and in which order the others wait.

Lower priorities begin first, as vLLM's do. Of equal ones, those that were preempted go before those that have never run:
their clients are in the middle of an answer. Then who came first. The highest priority that runs is preempted first, of equal
ones the latest arrival. Who waits takes no place from who runs, whatever their priorities: preemption is for want of
blocks only.

Of one priority nobody starves: the head gets the next place, and nobody passes it while its place is not free. Of several,
the higher ones wait for as long as lower ones come. Knows nothing of blocks, budgets and batches.
"""

from bisect import insort
from collections.abc import Iterator

from scheduler.policy.sequence import Sequence, SequenceStatus


class WaitingQueue:
    """Sequences that wait, in the order in which they are to begin."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def head(self) -> Sequence:
        """The one that is next; somebody must wait."""
        return self._sequences[0]

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait in its place."""
        insort(self._sequences, sequence, key=_place)

    def remove(self, sequence: Sequence) -> None:
        """Let one wait no more."""
        self._sequences.remove(sequence)


def _place(sequence: Sequence) -> tuple[int, bool, int]:
    """Smaller ones begin first. It stays the same while a sequence waits."""
    return sequence.request.priority, sequence.num_admissions == 0, sequence.number


class Roster:
    """The sequences that a rank serves. It alone changes `Sequence.status`."""

    def __init__(self) -> None:
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []  # in the order in which they began
        self.num_preemptions = 0  # counter
        self._num_enqueued = 0
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

    def admit(self) -> Sequence:
        """Let the next one run."""
        sequence = self.waiting.head
        self.waiting.remove(sequence)
        sequence.status = SequenceStatus.RUNNING
        self.running.append(sequence)
        return sequence

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

    def retire(self, sequence: Sequence) -> None:
        """End a sequence, wherever it is."""
        del self._by_id[sequence.request.request_id]
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.status = SequenceStatus.ENDED
