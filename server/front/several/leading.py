"""The front that orders epochs and decides for the whole service, as the other fronts see it.

It publishes its decisions (`service_state`), and counts the requests of all fronts before a decision that needs them gone. The
front with number 0 leads. If it is killed, its replacement leads after a few seconds; until then the other fronts serve
with the state that it published last. Rejected: electing another front at once. It would save these seconds for placements, drains
and epochs only, and each front would have to keep all reports of all ranks.

A replacement publishes nothing until its pools serve again, so that the others need not stop.
"""

from collections.abc import Callable
from pathlib import Path

from server.front.requests import SLEEP, Requests
from server.front.several.board import Board, Cell
from server.front.several.service_state import Pause, ServiceState

POLL_S = 0.02  # between two looks at changes


class LeadingFront:
    """Publishes the state of the service, and acts on the open requests of all fronts."""

    def __init__(
        self, requests: Requests, board: Board, folder: Path, decisions: Callable[[], ServiceState]
    ) -> None:
        """Args: requests are those of this front; decisions returns the present state, without pauses and counters."""
        self._requests, self._board, self._folder, self._decisions = requests, board, folder, decisions
        self.before = before = ServiceState.read(folder)  # as an earlier process of this front has left it
        self.is_resuming = before is not None  # until the service serves again
        self._published = before or ServiceState(sizes=(0, 0))
        # A sleeping service stays asleep. Other pauses end with the front, as if it were the only one.
        self._pauses = {each.by: each.withdraws for each in self._published.pauses if each.by == SLEEP}
        self._num_aborts, self._num_forgets = self._published.num_aborts, self._published.num_forgets
        self._gathered = self.is_resuming  # all fronts were ready once

    def why_not_ready(self) -> str | None:
        """Return which fronts the service waits for at its start, or None."""
        if not self._gathered:
            missing = [
                str(each) for each in self._board.others() if not self._board.read(Cell.IS_READY, each)
            ]
            if missing:
                return f"waiting for front{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
            self._gathered = True
        return None

    def publish(self) -> None:
        """Publish the state if it has changed."""
        state = self._decisions()
        state = state._replace(
            pauses=tuple(
                Pause(by, withdraws)
                for by, withdraws in sorted(self._pauses.items())
                # An earlier process of this front may have been killed between the pause and the sleep.
                if by != SLEEP or state.sleep_level > 0
            ),
            num_aborts=self._num_aborts,
            num_forgets=self._num_forgets,
        )
        if self.is_resuming and state.why_not_ready and not state.sleep_level:
            return
        self.is_resuming = False
        if state != self._published or not self._board.version:
            self._published = state
            state.publish(self._folder, self._board)

    @property
    def num_open(self) -> int:
        """Accepted choices of all fronts without an outcome. A front that still accepts some counts as one."""
        self.publish()
        return self._board.total(Cell.NUM_OPEN) + self._num_behind()

    @property
    def num_at_ranks(self) -> int:
        """Accepted choices of all fronts that ranks have, as `Requests.num_at_ranks` counts them. A front that may still submit
        some counts as one."""
        self.publish()
        num = self._board.num_at_ranks if any(self._pauses.values()) else self._board.num_submitted
        return num + self._num_behind()

    def abort_all(self, *, why: str = "it falls asleep") -> None:
        """End every open request of all fronts as aborted. `why` is for lines of batches, which this front runs."""
        self._num_aborts += 1
        self.publish()
        self._requests.abort_all(why=why)

    def pause(self, *, by: str = SLEEP, withdraws: bool = True) -> None:
        """Keep the requests of all fronts until `resume`. If it withdraws, take back also those that ranks have."""
        self._pauses[by] = withdraws or self._pauses.get(by, False)
        self.publish()
        self._requests.pause(by=by, withdraws=withdraws)

    def resume(self, *, by: str = SLEEP) -> None:
        """Submit the requests that `pause` kept."""
        self._pauses.pop(by, None)
        self._requests.resume(by=by)
        self.publish()

    def forget_prefixes(self) -> None:
        """Route the requests of all fronts without regard to prefixes that ranks had cached so far."""
        self._num_forgets += 1
        self._requests.forget_prefixes()
        self.publish()

    def all_follow(self) -> bool:
        """Return whether every running front has applied the present state."""
        self.publish()
        return not self.is_resuming and not self._num_behind()

    def others_are_done(self) -> bool:
        """Return whether no other front has an open request, or may accept one."""
        return not any(self._board.is_running(each) for each in self._board.others())

    def _num_behind(self) -> int:
        """Return the number of running fronts that have not applied the published state."""
        board = self._board
        return sum(
            board.is_running(each) and board.read(Cell.APPLIED, each) < board.version
            for each in board.others()
        )


def watch_fronts(board: Board, note: Callable[[str, str], None]) -> Callable[[], None]:
    """Return a function that notes front processes which were replaced since its last call, as events."""
    pids = {each: board.read(Cell.PID, each) for each in board.others()}
    cut_off = {each: board.read(Cell.NUM_CUT_OFF, each) for each in board.others()}

    def look() -> None:
        for each in board.others():
            pid = board.read(Cell.PID, each)
            if pid == pids[each] or not pid:
                continue
            if pids[each]:
                num = board.read(Cell.NUM_CUT_OFF, each) - cut_off[each]
                note("front_back", f"front {each} was killed with {num} open choices, and is back")
            pids[each], cut_off[each] = pid, board.read(Cell.NUM_CUT_OFF, each)

    return look
