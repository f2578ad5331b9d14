"""How many prompt tokens a step may take on while streams wait for their next token.

A step is as long as what is in it, and everybody waits for it: beside a whole chunk of a prompt a decode takes many times
its own time. So a step's prompt tokens are limited to what fits a target for the time between two tokens (ITL), by what
steps took so far. Every rank says what it could take on, and all keep to the least (D6): ranks wait for each other in
every layer. Where no rank decodes there is no limit. What a row's bits are does not depend on how prompts are cut (I2).

Prompts get on in any case, by as many tokens as take four times as long as what every chunk takes for itself (its
overheads, and experts' weights that hardly any tokens share): fewer would make prompts a quarter more work, and more.

Idea: the token budget of Sarathi-Serve (Agrawal et al., 2024), there fixed beforehand.
"""

LEAST_TOKENS = 16  # of prompts per step
ENOUGH_TOKENS = 64  # and as many where every chunk takes so long for itself
DECODE_STEPS = 2.2  # the target where none is given, in decode steps
_WEIGHT = 0.1  # of the newest step in sums
_LINE_WEIGHT = 0.02  # likewise in a line, which has to remember other numbers of sequences or tokens


class PrefillPace:
    """One rank's estimate; times in seconds."""

    def __init__(self, target_s: float | None, *, is_limited: bool = True) -> None:
        """`target_s`: between two tokens; None: DECODE_STEPS, as measured. Not `is_limited`: no limit is ever asked for."""
        self._target_s, self._is_limited = target_s, is_limited
        self._decode_steps = _Line()  # seconds of steps without prompts, by their sequences
        self._chunks = _Line()  # seconds that tokens of prompts add, by how many they are
        # Likewise in all, and how many: the ends of prompts, each a chunk of a few tokens, hardly count.
        self._added_s = self._added_tokens = 0.0

    def note(self, seconds: float, *, num_decodes: int, num_prefill: int, is_behind: bool = False) -> None:
        """Learn from a step that took so long, with these tokens on this rank; those without any say nothing.

        `is_behind`: another rank had more tokens of prompts, so that the time tells nothing of this one's.
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
        """Prompt tokens that this rank could take on beside decodes; 0: it knows of no limit.

        Args:
            num_decodes: sequences that will decode in the step.
            num_open: those that would if all who wait had begun.
        """
        if not self._is_limited or not self._added_tokens:
            return 0
        if self._target_s is None and not self._decode_steps.is_known:
            return 0  # with a target, steps count as their prompts' alone until one without any has been seen
        target_s = self._target_s or DECODE_STEPS * self._decode_steps.at(max(num_open, num_decodes))
        room_s = max(0.0, target_s - self._decode_steps.at(num_decodes))
        token_s = self._added_s / self._added_tokens
        return max(self._least(), int(room_s / max(token_s, 1e-9)))

    def _least(self) -> int:
        token_s, chunk_s = self._chunks.slope, self._chunks.at(0)
        enough = 4 * chunk_s / token_s if token_s > 0 else ENOUGH_TOKENS
        return int(min(ENOUGH_TOKENS, max(LEAST_TOKENS, enough)))


class _Line:
    """A straight line through what was measured, the older the less it counts."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return self._weight > 0

    def add(self, x: float, y: float) -> None:
        """Take a measurement in."""
        kept = 1 - _LINE_WEIGHT
        self._weight = kept * self._weight + 1.0
        self._x = kept * self._x + x
        self._y = kept * self._y + y
        self._xx = kept * self._xx + x * x
        self._xy = kept * self._xy + x * y

    @property
    def slope(self) -> float:
        """How much it rises for each x, 0 at least; 0 where only one x is known."""
        spread = self._weight * self._xx - self._x**2
        if spread <= 1e-6 * self._weight**2:
            return 0.0
        return max(0.0, (self._weight * self._xy - self._x * self._y) / spread)

    def at(self, x: float) -> float:
        """Its value, 0 at least; 0 where nothing is known."""
        if not self._weight:
            return 0.0
        return max(0.0, self._y + self.slope * (self._weight * x - self._x)) / self._weight


def agree_on_prefill(budgets: list[int], *, has_decodes: bool) -> int | None:
    """Derive from all ranks' budgets how many prompt tokens each may take on; None: any number."""
    limits = [budget for budget in budgets if budget]
    return min(limits) if limits and has_decodes else None
