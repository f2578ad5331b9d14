"""Experts that a coming order gives this rank, read from the checkpoint while steps run.

A resize gives some ranks more experts. If a rank read them while it follows the order, all requests would wait for its disk. So
the front sends the placement beforehand. The mover's thread reads the missing experts into spare memory, at the pace of moves,
and reports. `epochs.follower` takes them when an order comes, any order, and frees those that the order does not need.

Rejected: a transfer from other ranks, which needs a channel to ranks that have not joined.
"""

import threading
import traceback
from collections.abc import Callable
from functools import partial

from safetensors import SafetensorError

from expert_placement.placement import EMPTY, Placement
from moe.expert_weights import Ready
from moe.load.checkpoint import CheckpointError
from moe.model import Model
from scheduler.moves.relocation import Relocation

MOST_OF_AVAILABLE = 0.9  # share of free memory that experts may take


class ReadAhead:
    """Reads experts ahead of an order. Any thread may call `begin` and `drop`, which return at once; the step loop's calls `take`.

    Experts that are not wanted any more are freed by the next one to hold the lock, which may be the mover after a slow read.
    """

    def __init__(
        self, model: Model, relocation: Relocation, available: Callable[[], int], *, num_local_ranks: int
    ) -> None:
        """Args: available returns the free memory in bytes, which `num_local_ranks` ranks of this host share."""
        self.on_read: Callable[[int, str], None] = lambda _version, _problem: None
        self._model, self._relocation, self._available = model, relocation, available
        self._num_local_ranks = num_local_ranks
        self._lock = threading.Lock()  # held while an expert is read
        self._version: int | None = None  # of the placement that is wanted
        self._ready: Ready = {}
        self._ready_version: int | None = None  # of the placement that they were read for

    def begin(self, target: Placement, place: int) -> None:
        """Read the experts that this rank lacks of a placement. `on_read` gets its version, and the problem or "".

        Args:
            place: This rank's place in the placement.
        """
        self.drop()
        self._version = target.version
        self._relocation.later(partial(self._read, target, place))

    def drop(self, version: int | None = None) -> None:
        """Free what was read, or what was read for one version."""
        if version is None or version == self._version:
            self._version = None
            self._free_unless_reading()

    def take(self) -> Ready:
        """Return what was read so far, and read no more."""
        with self._lock:
            self._free_unwanted()
            self._version = None
            ready, self._ready = self._ready, {}
            return ready

    def _free_unless_reading(self) -> None:
        if self._lock.acquire(blocking=False):
            try:
                self._free_unwanted()
            finally:
                self._lock.release()

    def _free_unwanted(self) -> None:
        """Free what was read for another placement than the wanted one. The lock is held."""
        if self._ready_version == self._version:
            return
        for weights in self._ready.values():
            self._relocation.spare.give_back(weights, self._model.placement.slots_per_rank)
        self._ready.clear()

    def _read(self, target: Placement, place: int) -> None:
        with self._lock:
            self._free_unwanted()
            self._ready_version = target.version
        try:
            problem = self._read_all(target, place)
        except (CheckpointError, SafetensorError, OSError, MemoryError) as error:
            problem = f"an expert could not be read: {error}"
        except Exception as error:  # noqa: BLE001 - without a report the front would wait until its deadline
            traceback.print_exc()
            problem = f"{type(error).__name__}: {error} (a bug; see the rank's log)"
        with self._lock:
            is_wanted = self._version == target.version
            if is_wanted and problem:
                self._version = None
            self._free_unwanted()
        self._free_unless_reading()  # `drop` may have come while the lock was held
        if is_wanted:
            self.on_read(target.version, problem)

    def _read_all(self, target: Placement, place: int) -> str:
        """Return the problem, or "" if all experts are there or none is wanted any more."""
        relocation, model = self._relocation, self._model
        held, wanted = relocation.placement.local(relocation.place), target.local(place)
        missing = [
            (layer, expert)
            for layer, (has, gets) in enumerate(zip(held.tolist(), wanted.tolist(), strict=True))
            for expert in sorted(set(gets) - set(has) - {EMPTY})
        ]
        needed = sum(model.slot_bytes(layer) for layer, _ in missing) * self._num_local_ranks
        if needed > MOST_OF_AVAILABLE * (available := self._available()):
            return (
                f"it would read {len(missing)} experts; with the other ranks of its host that takes "
                f"{needed / 2**20:.1f} MiB, but only {MOST_OF_AVAILABLE:.0%} of the free memory may be taken, and "
                f"{available / 2**20:.1f} MiB are available"
            )
        for layer, expert in missing:
            relocation.pace.take(0)
            with self._lock:
                if self._version != target.version:
                    return ""
                weights = relocation.spare.take(model.layers[layer])
                try:
                    model.read_expert(layer, expert, weights)
                except BaseException:
                    relocation.spare.give_back(weights, model.placement.slots_per_rank)
                    raise
                self._ready[layer, expert] = weights
        model.checkpoint.release_memory()
        return ""
