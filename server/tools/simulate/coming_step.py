"""What is known of the coming step before ranks plan it: the rows of ranks that coast, and all ranks' announcements."""

from collections.abc import Iterable, Sequence

import numpy as np

from server.tools.simulate.rank import NEVER, NO_ROWS, Rows, SimulatedRank


class Coasting:
    """The rows of all ranks in the coming or running step; those of coasting ranks are known in advance.

    Attributes:
        rows: [fields of `Rows`, ranks].
        decodes: Rows of coasting ranks, 0 for others: [ranks].
        untold: Tokens of coasting ranks that the router does not know yet: [ranks].
    """

    def __init__(self, num_ranks: int) -> None:
        self.rows = np.zeros((len(Rows._fields), num_ranks), dtype=np.int64)
        self.decodes = np.zeros(num_ranks, dtype=np.int64)
        self.untold = self.decodes.copy()
        self._charged = self.decodes.copy()  # the part of `decodes` for which the router still expects tokens
        self._until = np.full(num_ranks, NEVER, dtype=np.int64)  # the last plain step
        # Coasting ranks with waiting requests -> the step in which a running one ends.
        self._freed: dict[int, int] = {}

    def begin(self, number: int, rows: Rows, *, charged: int, until: int, freed: int | None) -> None:
        """Let a rank coast up to the step `until`. `freed`: the step after which a waiting request can begin, if any."""
        self.rows[:, number] = rows
        self.decodes[number], self._charged[number], self._until[number] = rows.decode, charged, until
        if freed is not None:
            self._freed[number] = freed

    def stop(self, number: int) -> None:
        """Let a rank stop coasting. It has no rows until it plans some."""
        self.rows[:, number] = NO_ROWS
        self.decodes[number] = self._charged[number] = 0
        self._until[number] = NEVER
        self._freed.pop(number, None)

    def frees(self, step: int) -> bool:
        """Return whether a request ends in a step, so that a waiting one can begin in the next."""
        return step in self._freed.values()

    def end_step(self, step: int) -> list[int]:
        """Count a step's tokens; `rows` is then for the next one. Return the ranks that coast no further."""
        self.untold += self._charged
        self.rows[2] += self.decodes
        ended: list[int] = np.flatnonzero(self._until == step).tolist()
        return ended


class Announcements:
    """What ranks announced of the coming step before the running one, and the prefill budgets that follow from it.

    Attributes:
        decodes: [ranks] int64.
        open: Sequences that would run if all waiting requests had begun: [ranks] int64.
    """

    def __init__(self, ranks: Sequence[SimulatedRank], *, is_paced: bool) -> None:
        self._ranks, self._is_paced = ranks, is_paced
        self.decodes = np.zeros(len(ranks), dtype=np.int64)
        self.open = self.decodes.copy()
        self._budgets = self.decodes.copy()  # valid unless stale
        self._is_stale = np.ones(len(ranks), dtype=bool)
        # The last step, from which paces have not learned yet: seconds, rows, and whether prompts were agreed.
        self._unnoted: tuple[float, np.ndarray, bool] | None = None

    def announce(self, numbers: Iterable[int]) -> bool:
        """Take these ranks' announcements. Return whether one of them has a prompt to run."""
        has_prefill = False
        for number in numbers:
            scheduler = self._ranks[number].scheduler
            coming = scheduler.next_step
            has_prefill = has_prefill or coming.has_prefill
            said = coming.num_decodes, scheduler.num_open
            if said != (self.decodes[number], self.open[number]):
                self.decodes[number], self.open[number] = said
                self._is_stale[number] = True
        return has_prefill

    def least_budget(self) -> int:
        """Return the smallest prefill budget of all ranks; 0 if no rank has a limit."""
        if not self._is_paced:
            return 0
        for number in np.flatnonzero(self._is_stale).tolist():
            pace = self._ranks[number].pace
            self._budgets[number] = pace.budget(int(self.decodes[number]), int(self.open[number]))
        self._is_stale[:] = False
        known = self._budgets[self._budgets > 0]
        return int(known.min()) if known.size else 0

    def keep(self, seconds: float, rows: np.ndarray, *, has_prefill: bool) -> None:
        """Keep a step for `learn`. `rows` is copied."""
        self._unnoted = seconds, rows.copy(), has_prefill

    def learn(self) -> None:
        """Let ranks learn from the kept step: after their announcement before it, and before the next one."""
        if self._unnoted is None:
            return
        seconds, (prefill, decodes, *_), has_prefill = self._unnoted
        self._unnoted = None
        if not self._is_paced:
            return
        learns = prefill > 0 if has_prefill else (prefill > 0) | (decodes > 0)
        most_prefill = prefill.max()
        for number in np.flatnonzero(learns).tolist():
            self._ranks[number].pace.note(
                seconds,
                num_decodes=int(decodes[number]),
                num_prefill=int(prefill[number]),
                is_behind=bool(prefill[number] < most_prefill),
            )
        self._is_stale |= learns
