"""How many prompt tokens a step may run while other requests wait for their next token.

All requests in a step wait for the whole step. With a full chunk of a prompt, a decode takes many times longer than
alone. So a step's prompt tokens are limited to what fits a target for the time between two tokens (ITL), estimated from
earlier steps. Every rank posts its own limit, and all use the smallest, because ranks wait for each other in every
layer. If no rank decodes there is no limit. Cutting prompts differently does not change any bit of a row.

Prompts always advance, by at least the tokens that take four times as long as a chunk's fixed cost (overheads, and
reading experts for few tokens). Smaller chunks would add a quarter or more to the work of prompts.

Idea: the token budget of Sarathi-Serve (Agrawal et al., 2024), which is fixed in advance there.
"""

LEAST_TOKENS = 16  # of prompts per step
ENOUGH_TOKENS = 64  # upper bound of the guaranteed minimum, which grows with a chunk's fixed cost
DECODE_STEPS = 2.2  # the default target, in decode steps
_WEIGHT = 0.1  # of the newest step in sums
_LINE_WEIGHT = 0.02  # of the newest step in a line, which must remember other numbers of sequences or tokens


class PrefillPace:
    """One rank's estimate. Times are in seconds."""

    def __init__(self, target_s: float | None, *, is_limited: bool = True) -> None:
        """`target_s`: time between two tokens; None allows DECODE_STEPS measured steps. `is_limited`: False disables limits."""
        self._target_s, self._is_limited = target_s, is_limited
        self._decode_steps = _Line()  # seconds of steps without prompts, by number of sequences
        self._chunks = _Line()  # seconds that prompt tokens add, by number of tokens
        # Sums of the same. The ends of prompts, chunks of a few tokens, hardly count in them.
        self._added_s = self._added_tokens = 0.0

    @property
    def token_s(self) -> float:
        """Time that a prompt's token adds to a step; 0 until it is measured."""
        return self._added_s / self._added_tokens if self._added_tokens else 0.0

    def note(self, seconds: float, *, num_decodes: int, num_prefill: int, is_behind: bool = False) -> None:
        """Learn from a step's duration and this rank's tokens in it. Steps without tokens are ignored.

        `is_behind`: another rank had more prompt tokens, so the duration does not reflect this rank's.
        """
        if num_prefill and not is_behind:
            added_s = max(0.0, seconds - self._decode_steps.at(num_decodes))
            self._chunks.add(num_prefill, added_s)
            kept = 1 - _WEIGHT
            self._added_s = kept * self._added_s + added_s
            self._added_tokens = kept * self._added_tokens + num_prefill
        elif num_decodes and not num_prefill:
            self._decode_steps.add(num_decodes, seconds)

    def budget(self, num_decodes: int, num_open: int) -> int:
        """Return how many prompt tokens this rank could run in addition to decodes, or 0 if there is no limit.

        Args:
            num_decodes: Sequences that will decode in the step.
            num_open: Sequences that would decode if all waiting ones had begun.
        """
        if not self._is_limited or not self._added_tokens:
            return 0
        if self._target_s is None and not self._decode_steps.is_known:
            return 0  # with a target, decodes count as free until a step without prompts was measured
        target_s = self._target_s or DECODE_STEPS * self._decode_steps.at(max(num_open, num_decodes))
        room_s = max(0.0, target_s - self._decode_steps.at(num_decodes))
        return max(self._least(), int(room_s / max(self.token_s, 1e-9)))

    def _least(self) -> int:
        token_s, chunk_s = self._chunks.slope, self._chunks.at(0)
        enough = 4 * chunk_s / token_s if token_s > 0 else ENOUGH_TOKENS
        return int(min(ENOUGH_TOKENS, max(LEAST_TOKENS, enough)))


class _Line:
    """A straight line fitted to measurements. Older ones have less weight."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def is_known(self) -> bool:
        """Whether there is any measurement."""
        return self._weight > 0

    def add(self, x: float, y: float) -> None:
        """Add a measurement."""
        kept = 1 - _LINE_WEIGHT
        self._weight = kept * self._weight + 1.0
        self._x = kept * self._x + x
        self._y = kept * self._y + y
        self._xx = kept * self._xx + x * x
        self._xy = kept * self._xy + x * y

    @property
    def slope(self) -> float:
        """Increase per unit of x, at least 0. It is 0 if only one x was measured."""
        spread = self._weight * self._xx - self._x**2
        if spread <= 1e-6 * self._weight**2:
            return 0.0
        return max(0.0, (self._weight * self._xy - self._x * self._y) / spread)

    def at(self, x: float) -> float:
        """Return the value at x, at least 0. It is 0 without measurements."""
        if not self._weight:
            return 0.0
        return max(0.0, self._y + self.slope * (self._weight * x - self._x)) / self._weight


def agree_on_prefill(budgets: list[int], *, has_decodes: bool) -> int | None:
    """Derive from all ranks' budgets how many prompt tokens each may run. None means no limit."""
    limits = [budget for budget in budgets if budget]
    return min(limits) if limits and has_decodes else None
