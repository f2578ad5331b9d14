"""One rank's part in an update of the base weights: load them next to the serving ones, report, and switch with all ranks.

A thread loads the new version and computes its check sums. Steps go on with the old weights, which no failure touches. When the
front has compared the check sums of all ranks, it orders to serve the version. Then the rank posts the version's number, and
the step loop calls `switch` when all ranks have posted it. The switch only exchanges references, so a step pauses for
milliseconds. The old weights are freed afterwards, on a thread. On a GPU the switch copies the new weights over the old ones, on
the device (`scheduler.weights.loading`).

An order for an epoch names the version that all members serve (`Order.weights`). A rank that did not switch in time, because
another rank was lost, or that has just started, switches before it meets the others (`settle`). So the front's decision to serve a
version is final once it is made, and a lost rank cannot divide the others.

Rejected: reading new values over the old ones, which cannot be undone and stops all steps for as long as it takes.
"""

import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError

from moe.expert_weights import Held
from moe.load.checkpoint import CheckpointError
from moe.overwrite import Overwrite
from scheduler.weights.versions import (
    CHECKPOINT,
    WeightAction,
    WeightDigests,
    WeightOrder,
    WeightReport,
    WeightState,
    WeightVersion,
)

CLOSE_TIMEOUT_S = 5.0  # loading looks for the end after each parameter


class NoRoomError(MemoryError):
    """There is too little memory for the new weights next to the old ones."""


class OverError(Exception):
    """The version that is being loaded is not wanted any more."""


class Loaded(NamedTuple):
    """Weights next to the serving ones."""

    model: Any  # `moe.model.Model`
    held: Held  # experts of the slots
    digests: WeightDigests
    num_bytes: int  # read from files
    # Copies them over the serving ones. None: the models exchange what they refer to.
    overwrite: Overwrite | None = None


class PostedVersion(NamedTuple):
    """A loaded version that this rank has posted to the others."""

    loaded: Loaded
    version: WeightVersion


class WeightParts(NamedTuple):
    """What a rank's engine does for updates."""

    # Loads a version for the present placement, on the thread of updates. Calls its argument often; that raises `OverError`.
    load: Callable[[WeightVersion, Callable[[], None]], Loaded]
    # Lets the model run the loaded weights, while no step runs. Returns a function that frees the old ones.
    install: Callable[[Loaded, WeightDigests | None], Callable[[], None]]
    held: Callable[[], Held]  # returns the experts that this rank's slots hold under the serving placement
    check: Callable[[], WeightDigests]  # computes the check sums of the serving weights


class RankWeights:
    """The base weights of one rank. Any thread may call `order`; the rest only the step loop's."""

    def __init__(
        self,
        rank: int = 0,
        parts: WeightParts | None = None,
        *,
        enter_thread: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with the checkpoint's weights. Without `parts` every order fails.

        `enter_thread`: called first on the loading thread.
        """
        self.serving: WeightVersion = CHECKPOINT
        self.newest: WeightOrder | None = None  # newest order to serve
        self.on_report: Callable[[WeightReport], None] = lambda _report: None
        self.on_news: Callable[[], None] = lambda: None
        self.on_installed: Callable[[WeightVersion], None] = lambda _version: None
        self._rank, self._parts, self._clock = rank, parts, clock
        self._enter_thread = enter_thread
        self._lock = threading.Lock()
        self._wanted: WeightOrder | None = None  # being loaded, or loaded
        self._loaded: Loaded | None = None
        # The version that was posted last. Steps may run its model, so it is not freed before another one is posted.
        self._kept: PostedVersion | None = None
        self._waste: list[Callable[[], None]] = []  # frees weights that do not serve any more
        self._checks: list[WeightOrder] = []
        self._worker: threading.Thread | None = None
        self._posted_number = 0
        self._is_closed = False

    def order(self, order: WeightOrder) -> None:
        """Follow an order. A newer version replaces one that is not served yet."""
        number = order.version.number
        with self._lock:
            if order.action is WeightAction.DROP:
                if self._wants(number) and not self._is_final():
                    self._drop()
            elif order.action is WeightAction.CHECK:
                self._checks.append(order)
            elif order.action is WeightAction.STAGE:
                if self._wanted is None or not self._is_final():
                    self._want(order)
            elif self.newest is None or number >= self.newest.version.number:
                self.newest = order
                if not self._wants(number):
                    self._want(order)
            self._work_if_needed()
            serves = order.action is WeightAction.SERVE and self.serving.number == number
        if serves:
            self._report(number, WeightState.SERVING)
        self.on_news()

    @property
    def has_news(self) -> bool:
        """Whether this rank has another number to post than it posted last."""
        with self._lock:
            return self._next() != self._posted_number

    def number_to_post(self) -> int:
        """Return the version that this rank can switch to, otherwise the serving one."""
        with self._lock:
            self._posted_number = self._next()
            self._keep_posted()
            return self._posted_number

    @property
    def posted(self) -> PostedVersion:
        """The version next to the serving one that this rank posted last. Its model stays until the next `number_to_post`."""
        assert self._kept is not None, "the serving version was posted"
        return self._kept

    def switch(self, number: int, step: int) -> None:
        """Serve the version that all ranks posted, from this step on."""
        assert number == self._posted_number, (
            f"version {number} of the weights was not posted, {self._posted_number} was"
        )
        assert self._loaded is not None and self._parts is not None, "what was posted is loaded"
        assert self._loaded.held == self._parts.held(), "experts moved after the weights were loaded"
        self._install(step)

    def settle(self, number: int) -> Held | None:
        """Serve a version before the ranks meet in an epoch; load it first if it is not there.

        Returns:
            The experts of this rank's slots, or None if it served the version already.

        Raises:
            CheckpointError: It cannot be loaded, or is unknown.
        """
        if number == self.serving.number:
            return None
        with self._lock:
            order = self.newest
            if order is None or order.version.number != number:
                raise CheckpointError(
                    f"the ranks serve version {number} of the weights, which this rank does not know"
                )
            if not self._wants(number):
                self._want(order)
                self._work_if_needed()
            worker = self._worker
        if worker is not None:
            worker.join()
        with self._lock:
            loaded = self._loaded
        if loaded is None:
            raise CheckpointError(
                f"version {number} of the weights could not be loaded; the reason was reported"
            )
        self._install(0)
        return loaded.held

    def forget_staged(self) -> None:
        """Drop a version that was only staged: the front that staged it is gone."""
        with self._lock:
            if self._wanted is not None and not self._is_final():
                self._drop()
            self._work_if_needed()

    def close(self) -> None:
        """End the loading thread. May be called twice."""
        with self._lock:
            self._is_closed = True
            self._wanted, worker = None, self._worker
        if worker is not None:
            worker.join(CLOSE_TIMEOUT_S)

    def _wants(self, number: int) -> bool:
        return self._wanted is not None and self._wanted.version.number == number

    def _is_final(self) -> bool:
        """Whether the wanted version was ordered to be served."""
        assert self._wanted is not None, "a version is wanted"
        return self.newest is not None and self.newest.version.number == self._wanted.version.number

    def _next(self) -> int:
        is_ready = self._wanted is not None and self._loaded is not None and self._is_final()
        return self._wanted.version.number if is_ready and self._wanted is not None else self.serving.number

    def _want(self, order: WeightOrder) -> None:
        if order.version.number > self.serving.number:
            self._drop()
            self._wanted = order

    def _drop(self) -> None:
        is_kept = self._kept is not None and self._kept.loaded is self._loaded
        if self._loaded is not None and not is_kept:
            self._waste.append(self._loaded.model.dismantle)
        self._wanted = self._loaded = None

    def _keep_posted(self) -> None:
        """Keep the version that is posted, if it is not the serving one. Free the one that was kept, if it was dropped."""
        kept = self._kept
        self._kept = None
        if self._posted_number != self.serving.number:
            assert self._loaded is not None and self.newest is not None, "what is posted is loaded"
            self._kept = PostedVersion(self._loaded, self.newest.version)
        if kept is not None and kept.loaded is not self._loaded:
            self._waste.append(kept.loaded.model.dismantle)
            self._work_if_needed()

    def _install(self, step: int) -> None:
        with self._lock:
            loaded, order = self._loaded, self.newest
            assert loaded is not None and order is not None and self._parts is not None, "nothing is loaded"
            kept, self._kept = self._kept, None
            if kept is not None and kept.loaded is not loaded:
                self._waste.append(kept.loaded.model.dismantle)
            self._loaded = self._wanted = None
            self._waste.append(self._parts.install(loaded, order.digests))
            self.serving = order.version
            self._work_if_needed()
        self.on_installed(order.version)
        self._report(order.version.number, WeightState.SERVING, step=step)

    def _work_if_needed(self) -> None:
        """Start the thread if there is something to do. Under the lock."""
        has_work = self._waste or self._checks or (self._wanted is not None and self._loaded is None)
        if has_work and self._worker is None and not self._is_closed:
            self._worker = threading.Thread(target=self._work, name="weight-loader", daemon=True)
            self._worker.start()

    def _work(self) -> None:
        torch.set_num_threads(1)  # OpenMP counts per thread; the default would take all cores from the steps
        self._enter_thread()
        while True:
            with self._lock:
                waste, self._waste = self._waste, []
                checks, self._checks = self._checks, []
                order = None if self._loaded is not None else self._wanted
                if self._is_closed or not (waste or checks or order):
                    self._worker = None
                    return
            for free in waste:
                free()
            waste.clear()
            for check in checks:
                self._check(check)
            if order is not None:
                self._load(order)

    def _load(self, order: WeightOrder) -> None:
        """Load a version, and report the outcome unless another order came meanwhile."""
        begun_s = self._clock()
        loaded, state, reason = self._attempt(order)
        with self._lock:
            is_over = self._wanted is not order
            if is_over and loaded is not None:
                self._waste.append(loaded.model.dismantle)
            elif not is_over and loaded is None:
                self._wanted = None
            elif not is_over:
                self._loaded = loaded
        if is_over:
            return
        self._report(
            order.version.number, state, reason=reason, digests=None if loaded is None else loaded.digests,
            num_bytes=0 if loaded is None else loaded.num_bytes, seconds=self._clock() - begun_s,
        )  # fmt: skip
        self.on_news()

    def _attempt(self, order: WeightOrder) -> tuple[Loaded | None, WeightState, str]:
        def look() -> None:
            if not self._wants(order.version.number):
                raise OverError

        if self._parts is None:
            return None, WeightState.FAILED, "this rank cannot change its weights"
        try:
            loaded = self._parts.load(order.version, look)
        except OverError:
            return None, WeightState.FAILED, "another order came"
        except (NoRoomError, torch.OutOfMemoryError) as error:
            return None, WeightState.NO_ROOM, str(error)
        except (CheckpointError, SafetensorError, OSError) as error:
            return None, WeightState.REFUSED, str(error)
        except Exception as error:  # noqa: BLE001 - without a report the front would wait forever
            traceback.print_exc()
            return None, WeightState.FAILED, f"{type(error).__name__}: {error} (a bug; see the rank's log)"
        if (problem := _difference(order.digests, loaded.digests)) is not None:
            loaded.model.dismantle()
            return None, WeightState.REFUSED, problem
        return loaded, WeightState.STAGED, ""

    def _check(self, order: WeightOrder) -> None:
        number, begun_s = order.version.number, self._clock()
        try:
            assert self._parts is not None, "the front checks only services that can change their weights"
            digests = self._parts.check()
        except Exception as error:  # noqa: BLE001 - without a report the front would wait forever
            traceback.print_exc()
            self._report(number, WeightState.FAILED, reason=f"{type(error).__name__}: {error}")
            return
        self._report(number, WeightState.CHECKED, digests=digests, seconds=self._clock() - begun_s)

    def _report(
        self,
        number: int,
        state: WeightState,
        *,
        reason: str = "",
        digests: WeightDigests | None = None,
        num_bytes: int = 0,
        seconds: float = 0.0,
        step: int = 0,
    ) -> None:
        self.on_report(
            WeightReport(
                rank=self._rank, number=number, state=state, reason=reason,
                digests=digests, num_bytes=num_bytes, seconds=seconds, step=step,
            )
        )  # fmt: skip


def _difference(served: WeightDigests | None, own: WeightDigests) -> str | None:
    """Return how loaded weights differ from those that other ranks serve, or None if they do not."""
    if served is None:
        return None
    differ = (own.experts_LE != 0) & (own.experts_LE != served.experts_LE)
    if own.plain == served.plain and not differ.any():
        return None
    what = "weights outside the experts" if not differ.any() else f"{int(differ.sum())} experts"
    return f"{what} differ from those that the other ranks serve: a file has changed since the update"
