"""When to plan the step behind a running one: late, so that a request that arrives meanwhile waits for no second step.

If the next step is planned as soon as the running one begins, as in vLLM's asynchronous scheduling and SGLang's overlapped
loop, an arrival waits for the rest of the running step and for the whole next one. If it is planned shortly before the
running one ends, an arrival waits as long as without overlap, and the device is still never idle.

The end is predicted from the shortest of the last steps without prompts. Other steps are not predicted, and nothing waits
for them. Planning begins earlier than the end by the host's time from plan to launch, and by a margin for late wake-ups.
"""

import time
from collections import deque
from collections.abc import Callable

MARGIN_S = 1e-3  # a wake-up is late by some 0.1 ms; other threads may hold the interpreter for 0.5 ms
_NUM_STEPS = 8  # measured steps from which the next one is predicted
_HOST_TIMES = 1.25  # of the longest host time
_KEPT = 0.95  # of the longest host time, after each step


class PlanTime:
    """The time to wait before each plan. For the thread that runs steps."""

    def __init__(
        self, *, clock: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._steps: deque[tuple[int, float]] = deque(maxlen=_NUM_STEPS)  # decodes, seconds
        self._host_s = self._planned_s = self._begun_s = 0.0
        self._num_decodes = 0  # of the running step; 0 if its time is not predicted

    def wait(self) -> None:
        """Wait until it is time to plan the step behind the running one."""
        left_s = self._end_s() - self._clock() - _HOST_TIMES * self._host_s - MARGIN_S
        if left_s > 0:
            self._sleep(left_s)

    def begin_plan(self) -> None:
        """Note that the host begins to plan a step."""
        self._planned_s = self._clock()

    def end_launch(self, *, num_decodes: int, has_prefill: bool) -> None:
        """Note that a step was launched. It begins now, or with `end_step` of the step before.

        Args:
            num_decodes: Determines the step's time; of several ranks, the most that any of them may have.
            has_prefill: Some rank has prompts in the step.
        """
        self._begun_s = self._clock()
        self._num_decodes = 0 if has_prefill else num_decodes
        if not has_prefill:
            self._host_s = max(_KEPT * self._host_s, self._begun_s - self._planned_s)

    def end_step(self, seconds: float, *, num_decodes: int, has_prefill: bool) -> None:
        """Note that the tokens of a step were read, `seconds` after it began. Others are as in `end_launch`."""
        self._begun_s = self._clock()
        if num_decodes and not has_prefill:
            self._steps.append((num_decodes, seconds))

    def _end_s(self) -> float:
        """Predict the end of the running step, rather too early."""
        if not self._num_decodes or len(self._steps) < _NUM_STEPS:
            return 0.0
        # A step of fewer sequences takes less time, but not less than in proportion.
        shares = (seconds * min(1.0, self._num_decodes / count) for count, seconds in self._steps)
        return self._begun_s + min(shares)
