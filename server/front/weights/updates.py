"""New base weights while serving: the front's part.

A client begins an update, names or sends tensors, and finishes it. Nothing reaches a rank before the last call. Then all ranks
load the new version next to the old one, while they serve, and report check sums. Copies of a weight on several ranks must have
equal ones. If a rank refuses or fails, all drop the new version: the old one was never touched. Otherwise the front orders
to serve it, which is final. Every rank switches at one step of its pool, or before it meets the others in an epoch.

Experts do not move from the order to load until the switch. If the ranks of a pool change meanwhile, they load again for the new
placement. A rank that attaches loads the serving version first and joins its pool afterwards.

`serving` is the version of the last order to serve. A restarted front learns it from the ranks.
"""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from scheduler.weights.versions import (
    CHECKPOINT,
    WeightAction,
    WeightDigests,
    WeightFolder,
    WeightOrder,
    WeightReport,
    WeightState,
    WeightVersion,
)
from server.front import errors
from server.front.errors import ApiError, bad_request
from server.front.events import EventLog
from server.front.ordering import RanksToOrder, wait_until
from server.front.weights.files import FoundWeights, WeightFilesError
from server.front.weights.sources import Sources, ended, remove_unused
from server.front.weights.sums import digest_of, merge
from server.link.messages import RankFacts
from server.machine.whole_files import replace_text

_LOG = logging.getLogger("wideep.front")
_LOADING = "new weights are being loaded"
_STATUS = {WeightState.REFUSED: 400, WeightState.NO_ROOM: 507, WeightState.FAILED: 500}


class RanksToUpdate(RanksToOrder, Protocol):
    """Messages to ranks, implemented by `server.link.ranks.Ranks`."""

    def give_up(self, rank: int, reason: str) -> None:
        """Close a rank's stream, so that the rank is lost."""


class Pools(Protocol):
    """The state of all pools, implemented by `server.serve.front.pool_front.PoolFronts`."""

    def members(self) -> Collection[int] | None:
        """Return the ranks that serve, or None while a pool regroups."""

    def epochs(self) -> tuple[int, ...]:
        """Return the number of each pool's epoch."""

    def is_moving(self) -> bool:
        """Return whether experts of some pool move."""


class WeightUpdates:
    """The versions of the base weights of a service. Runs in the front's event loop."""

    def __init__(
        self,
        ranks: RanksToUpdate,
        pools: Pools,
        *,
        folder: Path,
        kept: Path | None = None,
        model_type: str = "",
        has_checkpoint: bool = True,
        check: Callable[[FoundWeights], None] | None = None,
        why_not_now: Callable[[], str | None] = lambda: None,
        all_know: Callable[[], bool] = lambda: True,
        on_served: Callable[[], None] = lambda: None,
        events: EventLog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with the checkpoint's weights.

        Args:
            folder: For tensors that clients send. It is made if needed; ranks of all nodes must be able to read it.
            kept: File for the names of uploads, so that a restarted front removes those of this one. None keeps none.
            model_type: Of the served model; "" if it is unknown.
            has_checkpoint: Whether the first weights are those of files. An update replaces random weights completely.
            check: Called in a thread with tensors of an update. It raises `WeightFilesError` if the service cannot take them.
            why_not_now: Returns why an update must not begin now, or None if it may.
            all_know: Returns whether all fronts know the present `labels`.
            on_served: Called when a new version is ordered to serve.
        """
        self._ranks, self._pools, self._folder, self._model_type = ranks, pools, folder, model_type
        self._kept = kept
        self._has_checkpoint = has_checkpoint
        self._check_found, self._why_not_now = check, why_not_now
        self._all_know = all_know
        self._on_served, self._events, self._clock = on_served, events or EventLog(), clock
        # Called with a rank that may join its pool now.
        self.on_ready: Callable[[int], None] = lambda _rank: None
        self._order = WeightOrder(action=WeightAction.SERVE, version=CHECKPOINT)  # the last one to serve
        # Tensors of the version's folders, as far as they are known.
        self._names: dict[WeightFolder, frozenset[str]] = {}
        self._labels = {0: ""}  # by number
        self._newest = 0  # number of the newest version that was ordered
        self._update: Sources | None = None
        self._num_updates = 0
        # Folders of the uploads of this service that may exist, also of an earlier front.
        self._uploads = self._read_kept()
        self._is_finishing = False  # ranks load or switch
        self._is_checking = False
        self._reports: dict[int, WeightReport] = {}  # by rank, on the newest version
        self._served: dict[int, int] = {}  # by rank: the version that it serves
        self._waiting: set[int] = set()  # attached ranks that load the serving version before they join
        self._last_s: tuple[float, float] | None = None  # seconds to load and to switch, of the last update

    @property
    def serving(self) -> WeightVersion:
        """The version that all ranks serve, or are about to."""
        return self._order.version

    @property
    def is_open(self) -> bool:
        """Whether a client has begun an update."""
        return self._update is not None

    def number(self) -> int:
        """Return the number of the serving version."""
        return self.serving.number

    def label_of(self, number: int | None = None) -> str:
        """Return the label of a version, by default of the serving one; "" if it has none."""
        return self._labels.get(self.serving.number if number is None else number, "")

    @property
    def labels(self) -> Mapping[int, str]:
        """The labels by number: of the serving version, of the one before, and of one that ranks load."""
        return self._labels

    def why_busy(self) -> str | None:
        """Return what all ranks do with weights now, or None if they do nothing."""
        if self._is_checking:
            return "the weights are being checked"
        return _LOADING if self._is_finishing else None

    def why_no_moves(self) -> str | None:
        """Return why experts must not move now, or None if they may."""
        return self.why_busy() or (None if self._are_served() else _LOADING)

    def begin(self, label: str = "", *, is_partial: bool = False) -> None:
        """Begin an update.

        Args:
            label: Name of the version. It may be given at the end instead.
            is_partial: Whether tensors that the update lacks keep their values. Otherwise it must have all tensors.

        Raises:
            ApiError: An update is open, the label goes backwards, or the service cannot change its weights now.
        """
        self._check()
        if self._update is not None:
            raise ApiError(
                409,
                "A weight update has begun already. Finish it with POST /finish_weight_update, or abort it with POST "
                "/abort_weight_update.",
            )
        self.check_label(label)
        if is_partial and not (self._has_checkpoint or self.serving.hides_checkpoint):
            raise bad_request(
                "The weights are random (--load-format dummy), so the first update must have all tensors: send it without `partial`, "
                "from a folder or as a file."
            )
        self._num_updates += 1
        uploads = self._folder / f"{time.time_ns()}-{self._num_updates}"
        self._uploads.append(uploads)
        self._keep()
        self._update = Sources(label, uploads, is_partial=is_partial)

    async def add_folder(self, path: str) -> FoundWeights:
        """Add the tensors of a folder to the update.

        Raises:
            ApiError: No update is open, or the folder cannot be used.
        """
        update = self._open()
        return await self._take(update, await update.folder(path, self._model_type))

    async def add_upload(self, content: bytes) -> FoundWeights:
        """Add the tensors of a safetensors file that the client sent.

        Raises:
            ApiError: No update is open, the file is damaged, or it cannot be stored.
        """
        update = self._open()
        return await self._take(update, await update.upload(content))

    async def add_received(self, receive: Callable[[Path], Awaitable[None]]) -> FoundWeights:
        """Add the tensors that `receive` writes to a new folder.

        Raises:
            ApiError: No update is open, or the tensors did not come.
        """
        update = self._open()
        return await self._take(update, await update.received(receive))

    async def finish(self, label: str = "", timeout_s: float = 600.0) -> WeightVersion:
        """Load the update on all ranks and switch to it. The update ends in any case.

        Args:
            label: Name of the version, if it was not given at the beginning.

        Raises:
            ApiError: Tensors do not fit, a rank failed, or the time is up. Then the old weights serve, unless the message
                names another outcome.
        """
        update = self._open()
        self._check()
        self.check_label(label)
        if not update.found:
            raise bad_request(
                "The update has no tensors: send POST /update_weights before POST /finish_weight_update."
            )
        if (reason := self.why_busy()) is not None:
            raise ApiError(409, f"The update cannot be finished now: {reason}.")
        until_s = self._clock() + timeout_s
        self._is_finishing, has_switched = True, False
        update.close()
        try:
            version = update.version(self.serving, self._names, label)
            begun_s = self._clock()
            version, merged = await self._stage(version, until_s, timeout_s)
            loaded_s = self._clock()
            version, has_switched = version._replace(digest=digest_of(merged)), True
            self._serve(version, merged, update.found)
            if not await wait_until(self._are_served, until_s, self._clock):
                raise self._too_slow(timeout_s)
            self._last_s = loaded_s - begun_s, self._clock() - loaded_s
            self._events.note(
                "weights", f"version {version.number} of the weights serves", seconds=self._clock() - begun_s
            )
            return self.serving
        finally:
            self._is_finishing, self._update = False, None
            if has_switched:
                await self._remove_unused()
            else:  # a restarted front may not know yet what serves
                await update.remove()

    async def abort(self) -> None:
        """Drop the open update, if there is one.

        Raises:
            ApiError: It is being finished.
        """
        if self._is_finishing:
            raise ApiError(409, "The update is being finished, so it can no longer be aborted.")
        update, self._update = self._update, None
        if update is not None:
            await update.remove()

    def relabel(self, label: str) -> None:
        """Give the serving version another label.

        Raises:
            ApiError: The label goes backwards.
        """
        self.check_label(label)
        self._labels[self.serving.number] = label
        version = self.serving._replace(label=label)
        self._order = replace(self._order, version=version)
        self._ranks.post_all(self._order)  # for a restarted front

    async def check(self, timeout_s: float = 600.0) -> dict[str, Any]:
        """Compute the check sums of all ranks' weights in memory again, and compare copies and, after an update, what was loaded.

        Raises:
            ApiError: The service cannot do it now, or the time is up.
        """
        self._check()
        if (reason := self.why_busy()) is not None:
            raise ApiError(409, f"The weights cannot be checked now: {reason}. Try again later.")
        until_s = self._clock() + timeout_s
        self._is_checking = True
        try:
            epochs, members = await self._calm(until_s, timeout_s)
            self._reports.clear()
            self._ranks.post_all(WeightOrder(action=WeightAction.CHECK, version=self.serving))
            await wait_until(
                partial(self._have_answered, self.number(), epochs, members), until_s, self._clock
            )
            if self._pools.epochs() != epochs:
                raise errors.not_ready("ranks were lost or came back during the check")
            if (failed := self._failure(self.number())) is not None:
                raise ApiError(500, f"Rank {failed.rank} could not check its weights: {failed.reason}.")
            if not self._have_reported(self.number(), members):
                raise self._silent(members, timeout_s)
            return self._compared(members)
        finally:
            self._is_checking = False

    def info(self) -> dict[str, Any]:
        """Return the serving version as JSON."""
        version = self.serving
        loading_s, switching_s = self._last_s or (None, None)
        state = None
        if self._update is not None:
            state = "finishing" if self._is_finishing else "open"
        return {
            "weight_version": self.label_of() or "default",
            "number": version.number,
            "digest": version.digest or None,
            "folders": [folder.path for folder in version.folders],
            "uses_checkpoint": not version.hides_checkpoint,
            "update": state,
            "load_seconds": loading_s,
            "switch_seconds": switching_s,
        }

    def may_join(self, facts: RankFacts) -> bool:
        """Return whether a rank that attaches may join its pool now. Otherwise `on_ready` follows when it may.

        It gets the newest order. A restarted front continues from the newest one that a rank knows.
        """
        rank, known = facts.rank, facts.weights
        self._served.pop(rank, None)
        if known is not None and _place(known.version) > _place(self.serving):
            self._order = known
            self._newest = max(self._newest, known.version.number)
            self._labels[known.version.number] = known.version.label
            self._ranks.post_all(known)
        elif self.serving.number:
            self._ranks.post(rank, self._order)
        has_order = known is not None and known.version.number == self.serving.number
        if not self.serving.number or has_order:
            return True
        self._waiting.add(rank)
        return False

    def lose(self, rank: int) -> bool:
        """Forget a rank that is gone. Returns whether it had not joined its pool."""
        was_waiting = rank in self._waiting
        self._waiting.discard(rank)
        self._served.pop(rank, None)
        self._reports.pop(rank, None)
        return was_waiting

    def take_report(self, report: WeightReport) -> None:
        """Record a rank's report. Reports on older versions are ignored."""
        if report.state is WeightState.SERVING:
            self._served[report.rank] = report.number
        else:
            self._reports[report.rank] = report
        if report.rank not in self._waiting or report.number != self.serving.number:
            return
        if report.state in (WeightState.STAGED, WeightState.SERVING):
            self._waiting.discard(report.rank)
            self.on_ready(report.rank)
        else:
            self._ranks.give_up(
                report.rank, f"it cannot serve version {report.number} of the weights: {report.reason}"
            )

    def check_label(self, label: str) -> None:
        """Check that a label does not go backwards: numbers grow.

        Raises:
            ApiError: It is a smaller number than the present one.
        """
        present = self.label_of()
        if label.isdecimal() and present.isdecimal() and int(label) < int(present):
            raise ApiError(
                409,
                f"weight_version is {label}, but version {present} is serving: versions that are numbers must not go backwards.",
                param="weight_version",
            )

    async def _remove_unused(self) -> None:
        """Remove the uploads of ended updates that the serving version does not need."""
        uploads, kept = [*self._uploads], [Path(folder.path) for folder in self.serving.folders]
        used = await asyncio.to_thread(remove_unused, uploads, kept)
        # Another update may have begun meanwhile.
        self._uploads = [each for each in self._uploads if each in used or each not in uploads]
        self._keep()

    def _keep(self) -> None:
        if self._kept is not None:
            try:
                replace_text(self._kept, json.dumps([str(each) for each in self._uploads]))
            except OSError as error:
                _LOG.error("the uploads of weights are not kept for a restart of the front: %s", error)

    def _read_kept(self) -> list[Path]:
        if self._kept is None or not self._kept.exists():
            return []
        try:
            return [Path(each) for each in json.loads(self._kept.read_text())]
        except (OSError, ValueError) as error:
            _LOG.error("the uploads of weights before the restart are not removed: %s", error)
            return []

    def _check(self) -> None:
        if (reason := self._why_not_now()) is not None:
            raise ApiError(409, f"The weights cannot change now: {reason}.")

    def _open(self) -> Sources:
        if self._update is None:
            raise ApiError(409, "No weight update has begun: send POST /start_weight_update first.")
        return self._update

    def _check_open(self, update: Sources) -> None:
        if self._update is not update or self._is_finishing:
            raise ended()

    async def _take(self, update: Sources, found: FoundWeights) -> FoundWeights:
        self._check_open(update)
        if self._check_found is not None:
            try:
                await asyncio.to_thread(self._check_found, found)
            except WeightFilesError as error:
                raise bad_request(f"{error}.") from error
            self._check_open(update)
        update.found.append(found)
        return found

    async def _stage(
        self, version: WeightVersion, until_s: float, timeout_s: float
    ) -> tuple[WeightVersion, WeightDigests]:
        """Let all ranks load a version. If ranks are lost or come back, they load again.

        Returns:
            The version with its number, and the check sums. The ranks of the serving epochs have it.
        """
        while True:
            epochs, members = await self._calm(until_s, timeout_s)
            self._newest += 1
            version = version._replace(number=self._newest)
            self._labels[version.number] = version.label
            self._reports.clear()
            self._ranks.post_all(WeightOrder(action=WeightAction.STAGE, version=version))
            is_there = await wait_until(
                partial(self._have_answered, version.number, epochs, members), until_s, self._clock
            )
            has_changed = self._pools.epochs() != epochs
            failure = self._failure(version.number)
            if is_there and not has_changed and failure is None:
                merged = merge(self._reports[rank] for rank in members)
                if isinstance(merged, WeightDigests):
                    return version, merged
                self._drop(version)
                raise ApiError(500, f"The new weights do not serve: {merged}.")
            self._drop(version)
            if failure is not None and not has_changed:
                raise ApiError(
                    _STATUS[failure.state],
                    f"Rank {failure.rank} cannot use the new weights: {failure.reason}.",
                )
            if not is_there:
                raise self._silent(members, timeout_s)

    def _drop(self, version: WeightVersion) -> None:
        self._labels.pop(version.number, None)
        self._ranks.post_all(WeightOrder(action=WeightAction.DROP, version=version))

    async def _calm(self, until_s: float, timeout_s: float) -> tuple[Sequence[int], Collection[int]]:
        """Wait until all members serve the present version and no expert moves. Returns the epochs and the members."""

        def is_calm() -> bool:
            return self._pools.members() is not None and not self._pools.is_moving() and self._are_served()

        if not await wait_until(is_calm, until_s, self._clock):
            raise ApiError(
                504,
                f"After {timeout_s:g} s the ranks do not serve together, or experts still move. The weights have not changed.",
            )
        members = self._pools.members()
        assert members is not None, "the ranks serve together"
        return self._pools.epochs(), members

    def _serve(self, version: WeightVersion, merged: WeightDigests, found: Iterable[FoundWeights]) -> None:
        """Order to serve a version. This is final: from now on every epoch serves it."""
        names = {**self._names, **{each.folder: each.names for each in found}}
        self._names = {folder: names[folder] for folder in version.folders if folder in names}
        self._labels = {
            number: label for number, label in self._labels.items() if number >= self.serving.number
        }
        self._order = WeightOrder(action=WeightAction.SERVE, version=version, digests=merged)
        self._ranks.post_all(self._order)
        self._on_served()

    def _are_served(self) -> bool:
        """Return whether all members serve the present version."""
        number, members = self.serving.number, self._pools.members()
        if not number:
            return True
        return members is not None and all(self._served.get(rank) == number for rank in members)

    def _have_answered(self, number: int, epochs: Sequence[int], members: Collection[int]) -> bool:
        """Return whether all members have loaded a version, or will not together, and all fronts know its label."""
        has_changed = self._pools.epochs() != epochs
        is_over = has_changed or self._failure(number) is not None or self._have_reported(number, members)
        return is_over and self._all_know()

    def _have_reported(self, number: int, members: Collection[int]) -> bool:
        return all(rank in self._reports and self._reports[rank].number == number for rank in members)

    def _failure(self, number: int) -> WeightReport | None:
        """Return a failed report on a version. Reasons that the client can change come first."""
        failed = [each for each in self._reports.values() if each.number == number and each.state in _STATUS]
        return min(failed, key=lambda each: (_STATUS[each.state], each.rank), default=None)

    def _compared(self, members: Collection[int]) -> dict[str, Any]:
        merged = merge(self._reports[rank] for rank in members)
        if not isinstance(merged, WeightDigests):
            return {"success": False, "message": merged, "digest": None}
        digest, version = digest_of(merged), self.serving
        if version.digest and digest != version.digest:
            message = "weights in memory differ from those that were loaded"
            return {"success": False, "message": message, "digest": digest}
        return {"success": True, "message": "all copies are equal", "digest": digest}

    def _silent(self, members: Collection[int], timeout_s: float) -> ApiError:
        missing = [str(rank) for rank in sorted(members) if rank not in self._reports]
        silent = f"ranks {', '.join(missing)}" if missing else "some fronts"
        return ApiError(
            504, f"After {timeout_s:g} s {silent} have not answered. The weights have not changed."
        )

    def _too_slow(self, timeout_s: float) -> ApiError:
        number = self.serving.number
        behind = [str(r) for r in sorted(self._pools.members() or ()) if self._served.get(r) != number]
        return ApiError(
            504,
            f"After {timeout_s:g} s ranks {', '.join(behind) or 'that meet'} have not switched to the new weights yet. They "
            f"continue: version {number} will serve.",
        )


def _place(version: WeightVersion) -> tuple[int, bool]:
    """Return a version's place among those that a restarted front learns; of equal ones, that with a label is newer."""
    return version.number, bool(version.label)
