"""Resize a pool while it serves: add ranks, or let the last ones go, as one operation that completes or leaves all as it was.

*Preparing*: new ranks start, load their share of a placement that was planned for the new size, warm up and attach. Ranks that
stay read the experts that they will lack. Requests of leaving ranks move to others. Requests continue, and nothing that serves
changes, so any failure, an abort or the deadline only ends the preparations. *Committing*: all ranks part at one step and meet in
one epoch with the new number of ranks (`Leader.resize`). If they do not all meet, the former ranks do. Then leaving ranks end.

An operation has an id. A repeated id is the same operation, so a client may retry. A second operation is refused while one runs.
A file (`ResizeRecord`) outlives this front, so its replacement knows the number of ranks. It returns to the former one if ranks had
not all met.

vLLM's protocol is `POST /scale_elastic_ep`; the names of the phases are vLLM's. Unlike there, no request is refused meanwhile.
"""

import asyncio
import logging
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Protocol

from expert_placement.placement import Placement
from server.front.errors import ApiError, bad_request
from server.front.events import EventLog
from server.front.members.leader import Leader
from server.front.members.membership import Epochs
from server.front.members.readiness import why_no_change
from server.front.members.resize_operation import Operation, ResizePhase, ResizeRecord
from server.front.routing.moves import Moves
from server.link.messages import DropPlacement, ReadExperts, ToRank
from server.machine.tasks import start_task

_LOG = logging.getLogger("wideep.front")
POLL_S = 0.02  # while an operation waits
CAUSE_S = 2.0  # after ranks began to meet, for the end of the stream that explains it
LEAVE_S = 3.0  # for leaving ranks to end by themselves
DRAIN_S = 120.0  # vLLM's default
MOST_OPERATIONS = 16  # remembered


class ResizedPool(Protocol):
    """The pool, implemented by `server.serve.front.pool_front.PoolFront`."""

    epochs: Epochs
    leader: Leader

    @property
    def home(self) -> Placement | None:
        """The placement over all ranks."""

    @property
    def is_changing(self) -> bool:
        """Whether experts move."""

    async def plan(self, num_ranks: int) -> Placement:
        """Return a placement for another number of ranks."""


class RankStreams(Protocol):
    """The ranks' streams, implemented by `server.link.ranks.Ranks`."""

    @property
    def attached(self) -> Mapping[int, object]:
        """The streams, by rank."""

    def post(self, rank: int, message: ToRank) -> None:
        """Send a message to a rank, unless it is gone."""

    def resize(self, num_ranks: int, next_num: int) -> None:
        """Accept ranks of a service with this number of ranks, and of the one that a resize leads to."""

    def retire(self, ranks: Iterable[int]) -> None:
        """Ask some ranks once to end in an orderly way. Their ends are no losses."""

    def give_up(self, rank: int, reason: str) -> None:
        """Close a rank's stream, so that its engine ends at once."""


class RankProcesses(Protocol):
    """Starts and stops ranks, if this front's node can: `server.serve.rank_processes`."""

    def start(self, num_ranks: int) -> None:
        """Start the ranks that are missing up to this number. They are to attach."""

    def keep(self, num_ranks: int) -> None:
        """Stop all ranks beyond this number, and treat the others as ranks of the service."""


class NoProcesses:
    """Ranks that others start and stop: a user with torchrun and --join."""

    def start(self, num_ranks: int) -> None:
        """Do nothing."""

    def keep(self, num_ranks: int) -> None:
        """Do nothing."""


_NO_OPERATION = {
    "operation_id": None,
    "phase": ResizePhase.IDLE.value,
    "stage": "",
    "error": None,
    "seconds": 0.0,
}


class _ResizeError(Exception):
    """The operation fails; the message has the reason."""


class Resize:
    """The resizes of a service with one pool, one at a time. Runs in the front's event loop."""

    def __init__(
        self,
        pool: ResizedPool,
        moves: Moves,
        ranks: RankStreams,
        record: ResizeRecord,
        *,
        timeout_s: float,
        why_not: Callable[[int, int], str | None],
        why_not_now: Callable[[], str | None] = lambda: None,
        all_follow: Callable[[], bool] = lambda: True,
        impossible: ApiError | None = None,
        on_size: Callable[[int, int], None] = lambda _num_ranks, _most: None,
        events: EventLog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin without an operation.

        Args:
            timeout_s: Default deadline of the preparations.
            why_not: Returns why the service cannot change from one number of ranks to another, or None if it can.
            why_not_now: Returns why it cannot at present, or None if it can.
            all_follow: Returns whether the other fronts know the present number of ranks and which of them drain.
            impossible: Why this service can never be resized, or None if it can.
            on_size: Called with the number of ranks and with the largest number that may attach, when one of them changes.
        """
        self._pool, self._moves, self._ranks, self._record = pool, moves, ranks, record
        self._timeout_s, self._why_not, self._why_not_now = timeout_s, why_not, why_not_now
        self._all_follow, self._impossible, self._on_size = all_follow, impossible, on_size
        self._events, self._clock = events or EventLog(), clock
        # Waits until the standby has the record: ranks of another number could not attach to it.
        self.until_copied: Callable[[], Awaitable[None]] = _do_not_wait
        self.processes: RankProcesses = NoProcesses()
        self.num_ranks = pool.epochs.num_ranks  # effective: changes when all members of a resize have met
        self.num_ended = Counter[ResizePhase]()  # operations since the start
        self._operations: OrderedDict[str, Operation] = OrderedDict()
        self._running: Operation | None = None
        self._task: asyncio.Task[None] | None = None
        self._target: Placement | None = None  # of the running operation, once planned
        self._read: dict[int, str] = {}  # by rank that has read its experts: the problem or ""

    def recover(self) -> None:
        """Continue after a restart of the front: stop ranks that do not belong to the service."""
        said = self._record.operation
        if said is not None:
            is_done = said["phase"] == ResizePhase.COMPLETED.value
            operation = Operation(
                id=said["id"], former=self.num_ranks, wanted=said["wanted"], drain_timeout_s=0.0, timeout_s=0.0,
                begun_s=self._clock(), phase=ResizePhase.COMPLETED if is_done else ResizePhase.FAILED,
                error=None if is_done else said["error"] or "the front was restarted",
            )  # fmt: skip
            self._operations[operation.id] = operation
        if self._impossible is None:  # with several pools, there are more ranks than this one's
            self.processes.keep(self.num_ranks)

    def begin(
        self,
        num_ranks: int,
        *,
        drain_timeout_s: float = DRAIN_S,
        timeout_s: float | None = None,
        operation_id: str | None = None,
        checked_from: int | None = None,
    ) -> Operation:
        """Begin to resize the pool, or return the operation with this id.

        Args:
            drain_timeout_s: How long requests of leaving ranks may take to move. The rest is computed again elsewhere.
            timeout_s: Deadline of the preparations.
            checked_from: The service's number of ranks when `check` accepted the new one. None checks it here.

        Raises:
            ApiError: The size is impossible, another operation runs, or ranks are missing.
        """
        if (known := self.repeated(num_ranks, operation_id)) is not None:
            return known
        if checked_from == self.num_ranks:
            self._check_now(num_ranks)
        else:
            self.check(num_ranks)
        operation = Operation(
            id=operation_id or uuid.uuid4().hex[:12],
            former=self.num_ranks,
            wanted=num_ranks,
            drain_timeout_s=drain_timeout_s,
            timeout_s=self._timeout_s if timeout_s is None else timeout_s,
            begun_s=self._clock(),
        )
        self._operations[operation.id] = operation
        while len(self._operations) > MOST_OPERATIONS:
            self._operations.popitem(last=False)
        if num_ranks == self.num_ranks:
            operation.phase = ResizePhase.COMPLETED
            return operation
        self._running = operation
        self._task = start_task(self._run(operation), "resize")
        return operation

    def repeated(self, num_ranks: int, operation_id: str | None) -> Operation | None:
        """Return the operation with this id, or None if a new one may begin.

        Raises:
            ApiError: The operation has another size, or another operation runs.
        """
        known = self._operations.get(operation_id) if operation_id else None
        if known is not None and known.wanted != num_ranks:
            raise ApiError(
                409,
                f"Operation {known.id} resizes to {known.wanted} ranks, not to {num_ranks}. Use another id.",
            )
        if known is None and self._running is not None:
            raise ApiError(
                409,
                f"Operation {self._running.id} resizes the service to {self._running.wanted} ranks. Wait for its end, or abort it.",
            )
        return known

    def check(self, num_ranks: int) -> None:
        """Check that a resize to this number of ranks could begin, if no other one runs.

        It may read the headers of a large checkpoint, so the event loop should not wait for it.

        Raises:
            ApiError: The number is impossible (400), or ranks are missing (409).
        """
        self._check_now(num_ranks)
        if num_ranks == self.num_ranks:
            return
        if (reason := self._why_not(self.num_ranks, num_ranks)) is not None:
            raise bad_request(f"{num_ranks} ranks are impossible: {reason}.", "new_data_parallel_size")

    def _check_now(self, num_ranks: int) -> None:
        """Make the part of `check` that reads no files."""
        if num_ranks == self.num_ranks:
            return
        if self._impossible is not None:
            raise self._impossible
        if (reason := self._why_not_now() or why_no_change(self._pool.epochs)) is not None:
            raise ApiError(
                409, f"The service cannot be resized now: {reason}. Try again when all ranks serve."
            )
        if self._pool.home is None:
            raise ApiError(
                409, "The service cannot be resized now: the placement of the experts is not known yet."
            )

    async def wait(self, operation: Operation) -> None:
        """Wait until an operation has ended and another one may begin. Cancelling this does not cancel the operation."""
        while self._running is operation:
            await asyncio.sleep(POLL_S)

    def abort(self, operation_id: str | None = None) -> Operation:
        """End the running operation if it is still preparing, and return it. `operation_id` names the only one to abort.

        Raises:
            ApiError: No such operation runs, or it is committing.
        """
        running = self._running
        if running is None or operation_id not in (None, running.id):
            shown = (
                "No operation"
                if operation_id is None
                else f"Operation {operation_id} does not run, so nothing"
            )
            raise ApiError(409, f"{shown} can be aborted.")
        if running.phase is not ResizePhase.PREPARING:
            raise ApiError(
                409, f"Operation {running.id} is committing, which takes seconds. Resize again afterwards."
            )
        running.is_aborted = True
        return running

    def find(self, operation_id: str | None = None) -> Operation | None:
        """Return an operation by its id, or the newest one."""
        if operation_id is not None:
            return self._operations.get(operation_id)
        return next(reversed(self._operations.values()), None)

    @property
    def coming(self) -> range:
        """The ranks that a running operation adds, while it prepares."""
        running = self._running
        return running.coming() if running and running.phase is ResizePhase.PREPARING else range(0)

    def placement_for(self, rank: int) -> tuple[int, Placement | None] | None:
        """Return the number of ranks and the placement with which an engine of this rank starts.

        Returns None if the service does not want the rank.
        """
        if rank in self._pool.epochs.ranks:
            return self._pool.epochs.num_ranks, self._pool.home
        if rank in self.coming and self._running is not None and self._target is not None:
            return self._running.wanted, self._target
        return None

    def why_paused(self) -> str | None:
        """Return why placements cannot change now, or None if no operation runs."""
        return None if self._running is None else f"operation {self._running.id} resizes the service"

    def take_read(self, rank: int, version: int, problem: str) -> None:
        """Record that a rank has read the experts that it will need."""
        if self._running is not None and version == self._running.version:
            self._read[rank] = problem

    def take_end(self, rank: int, reason: str) -> None:
        """Record the end of a rank, or of its process."""
        if self._running is not None and self._running.problem is None:
            self._running.problem = f"rank {rank} is lost: {reason}"

    def to_json(self, operation: Operation | None = None) -> dict[str, Any]:
        """Return the state of an operation, by default of the newest one, with vLLM's fields."""
        operation = operation or self.find()
        shown = _NO_OPERATION if operation is None else operation.to_json(self._clock())
        return {
            "is_scaling_elastic_ep": self._running is not None,
            **shown,
            "epoch": self._pool.epochs.number,
            "requested_data_parallel_size": None if operation is None else operation.wanted,
            "effective_data_parallel_size": self.num_ranks,
        }

    async def _run(self, operation: Operation) -> None:
        text = f"operation {operation.id} resizes the service from {operation.former} to {operation.wanted} ranks"
        self._events.note("resizing", text)
        try:
            self._record.write(self.num_ranks, operation)
            await self._prepare(operation)
            await self._commit(operation)
            await self._let_go(operation.leaving())
        except (_ResizeError, ApiError, OSError, ValueError) as error:
            await self._fail(operation, str(error))
        except Exception:  # noqa: BLE001 - otherwise the service could not be resized any more
            _LOG.exception("operation %s failed", operation.id)
            await self._fail(operation, "an internal error; see the front's log")
        finally:
            self._running = self._target = None

    async def _prepare(self, operation: Operation) -> None:
        pool, coming, leaving = self._pool, operation.coming(), operation.leaving()
        await self._until(operation, "a change of the placement to end", lambda: not pool.is_changing)
        target = await pool.plan(operation.wanted)
        operation.version = target.version
        self._read.clear()
        if coming:
            self._on_size(operation.former, operation.wanted)
            self._ranks.resize(operation.former, operation.wanted)
            await self._until(operation, "other fronts to expect the new ranks", self._all_follow)
        self._target = target
        if coming:
            pool.epochs.expect(operation.wanted)
            self.processes.start(operation.wanted)
        staying = range(min(operation.former, operation.wanted))
        for rank in staying:
            self._ranks.post(rank, ReadExperts(target))
        for rank in leaving:
            self._moves.drain(rank)
        until_s = self._clock() + operation.drain_timeout_s
        await self._until(
            operation,
            "requests of leaving ranks to move",
            lambda: self._have_moved(leaving) or self._clock() >= until_s,
        )
        await self._until(operation, "ranks to read experts", lambda: self._read.keys() >= {*staying})
        await self._until(
            operation, "new ranks to load and to warm up", lambda: pool.epochs.came >= {*coming}
        )

    def _have_moved(self, leaving: range) -> bool:
        """Return whether no front has requests at leaving ranks, or may submit some."""
        return not leaving or (self._all_follow() and not any(map(self._moves.num_open, leaving)))

    async def _until(self, operation: Operation, stage: str, is_done: Callable[[], bool]) -> None:
        """Wait for a part of the preparations.

        Raises:
            _ResizeError: It fails, was aborted, or the deadline is over.
        """
        operation.stage = stage
        while True:
            if operation.is_aborted:
                raise _ResizeError("it was aborted")
            problems = (f"rank {rank}: {problem}" for rank, problem in self._read.items() if problem)
            if (problem := operation.problem or next(problems, None)) is not None:
                raise _ResizeError(problem)
            if (reason := self._why_not_now()) is not None:
                raise _ResizeError(reason)
            if (reason := why_no_change(self._pool.epochs)) is not None:
                raise _ResizeError(await self._cause(operation) or reason)
            if is_done():
                return
            if self._clock() - operation.begun_s >= operation.timeout_s:
                raise _ResizeError(f"it waited for {stage} until its deadline of {operation.timeout_s:g} s")
            await asyncio.sleep(POLL_S)

    async def _cause(self, operation: Operation) -> str | None:
        """Return which rank was lost, if this is noted soon. Others may report before that their steps failed."""
        until_s = self._clock() + CAUSE_S
        while operation.problem is None and self._clock() < until_s:
            await asyncio.sleep(POLL_S)
        return operation.problem

    async def _commit(self, operation: Operation) -> None:
        pool, target = self._pool, self._target
        assert target is not None, "it was planned"
        operation.phase = ResizePhase.COMMITTING
        self._record.write(self.num_ranks, operation, pool.home)
        await self.until_copied()
        # Ranks may have been lost meanwhile.
        await self._until(operation, "all ranks to meet", lambda: pool.epochs.came >= {*operation.coming()})
        self._ranks.resize(operation.former, operation.wanted)
        pool.leader.resize(target)
        while pool.epochs.is_resizing:
            await asyncio.sleep(POLL_S)
        if pool.epochs.num_ranks != operation.wanted:
            raise _ResizeError(operation.problem or "the ranks could not meet in one epoch")
        self.num_ranks = operation.wanted
        self._end(operation, ResizePhase.COMPLETED, None)
        text = f"operation {operation.id}: {operation.wanted} ranks serve after {operation.seconds:.1f} s"
        self._events.note("resized", text, seconds=operation.seconds)

    async def _fail(self, operation: Operation, reason: str) -> None:
        """Leave the service as it was before the operation, unless the new ranks serve already."""
        if operation.has_ended:
            _LOG.error(
                "operation %s has completed, but not all ranks that leave could be stopped: %s",
                operation.id,
                reason,
            )
            return
        if operation.phase is ResizePhase.COMMITTING:
            # New ranks may serve with the others at this moment. A rank that stops in an orderly way stops them too.
            for rank in operation.coming():
                self._ranks.give_up(rank, "the resize failed")
        self._pool.epochs.expect(0)
        for rank in operation.leaving():
            self._moves.undo(rank)
        for rank in range(operation.former):
            self._ranks.post(rank, DropPlacement(operation.version))
        self._end(operation, ResizePhase.FAILED, reason)
        text = f"operation {operation.id} failed, and {operation.former} ranks serve as before: {reason}"
        self._events.note("resize_failed", text, seconds=operation.seconds)
        await self._let_go(operation.coming())

    def _end(self, operation: Operation, phase: ResizePhase, reason: str | None) -> None:
        operation.phase, operation.stage, operation.error = phase, "", reason
        operation.seconds = self._clock() - operation.begun_s
        self.num_ended[phase] += 1
        try:
            self._record.write(self.num_ranks, operation)
        except OSError as error:  # a full disk must not stop the service
            _LOG.error("the number of ranks cannot be kept for a restart of the front: %s", error)

    async def _let_go(self, ranks: range) -> None:
        """End ranks that do not belong to the service any more."""
        self._ranks.retire(ranks)
        until_s = self._clock() + LEAVE_S
        while any(rank in self._ranks.attached for rank in ranks) and self._clock() < until_s:
            await asyncio.sleep(POLL_S)
        self._ranks.resize(self.num_ranks, self.num_ranks)
        self._on_size(self.num_ranks, self.num_ranks)
        self.processes.keep(self.num_ranks)


async def _do_not_wait() -> None:
    """Do nothing: no standby has copies."""
