"""Two threads that take turns: one runs until it hands over, then the other, so that never both do.

The order of hand-overs is the programs' own, and the first leads: what it does before its n-th hand-over is done before
the second passes its n-th. Nothing depends on time, so ranks that run the same two programs make the same calls in the
same order.

A program that raises ends the other one too, with `AbandonedError` at its next turn; `run` raises what was raised first.
Idea: vLLM's ubatching (`UBatchContext`). Rejected: generators or coroutines, which cannot leave a model's forward from
inside; and two programs that really run side by side, whose kernels would compete for the same cores.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Semaphore
from typing import NamedTuple, TypeVar

T = TypeVar("T")
FIRST, SECOND = 0, 1


class AbandonedError(RuntimeError):
    """The other program ended with an error, so this one ends as well."""


class _Round(NamedTuple):
    """What two programs share while they run."""

    may_go: tuple[Semaphore, Semaphore]
    has_ended: list[bool]
    has_failed: list[bool]


class Turns:
    """Runs pairs of programs, the first on the caller's thread, the second on one that is kept.

    Attributes:
        current: whose turn it is; FIRST when nothing runs in turns.
        on_turn: called with FIRST or SECOND at the start of every turn, and with FIRST after the last.
    """

    def __init__(self, prepare: Callable[[], None] = lambda: None) -> None:
        """Start nothing yet. `prepare` is called once on the second thread, before anything else there."""
        self.on_turn: Callable[[int], None] = lambda _index: None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="second-half", initializer=prepare)
        self._round: _Round | None = None
        self.current = FIRST

    def run(self, first: Callable[[], T], second: Callable[[], T]) -> tuple[T, T]:
        """Run two programs to their ends, `first` until it hands over, and so on.

        Raises:
            what the program raised that failed first.
        """
        self._round = _Round((Semaphore(0), Semaphore(0)), [False, False], [False, False])
        coming = self._thread.submit(self._run_second, second)
        try:
            self._begin_turn(FIRST)
            mine = self._run(FIRST, first)
        except AbandonedError:
            coming.result()  # raises what the second one raised
            raise
        finally:
            self._finish(coming)
        return mine, coming.result()

    def hand_over(self) -> None:
        """Let the other program run until it hands over or ends; does nothing where none does.

        Raises:
            AbandonedError: the other one failed.
        """
        if self._round is None or self._round.has_ended[1 - self.current]:
            return
        own = self.current
        self._round.may_go[1 - own].release()
        self._wait(own)

    def close(self) -> None:
        """End the second thread."""
        self._thread.shutdown()

    def _run_second(self, program: Callable[[], T]) -> T:
        self._wait(SECOND)
        return self._run(SECOND, program)

    def _run(self, index: int, program: Callable[[], T]) -> T:
        """Run a program in its turn, and give the turn away for good."""
        shared = self._round
        assert shared is not None, "programs run in rounds"
        shared.has_failed[index] = True
        try:
            result = program()
            shared.has_failed[index] = False
            return result
        finally:
            shared.has_ended[index] = True
            shared.may_go[1 - index].release()

    def _wait(self, index: int) -> None:
        assert self._round is not None, "programs run in rounds"
        self._round.may_go[index].acquire()
        if self._round.has_failed[1 - index] and self._round.has_ended[1 - index]:
            raise AbandonedError("the step's other half failed")
        self._begin_turn(index)

    def _begin_turn(self, index: int) -> None:
        self.current = index
        self.on_turn(index)

    def _finish(self, coming: Future[T]) -> None:
        """Wait for the second one, whatever became of it."""
        coming.exception()
        self._round = None
        self._begin_turn(FIRST)
