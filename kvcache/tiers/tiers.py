"""The tiers below a rank's pages: host memory, then a disk. Copies blocks and states to them and back.

A block is copied when it is full, long before it is evicted, so a step never waits for a copy, and a killed rank leaves what
it had computed. Blocks that another rank waits for are copied while their step still runs (`kvcache.tiers.early`). All copies
happen in threads: one loads, one saves, and one loads blocks as another rank saves them. The step loop gives them jobs and takes
them back when they are done (`scheduler.policy.tier_tables`); until then the job's blocks belong to the thread. A block is saved to
the fastest tier only, and copied from there to the disk (`kvcache.tiers.disk_copies`).

A tier can only save time. A record that its checksum does not confirm is computed again. If a tier's file fails (a full or
read-only disk), the tier is left out from then on, with one message, and the service goes on.
"""

import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, NamedTuple, Protocol

from kvcache.tiers.disk_copies import DiskCopies
from kvcache.tiers.early import EarlyLoads, EarlySaves, WrittenLayers
from kvcache.tiers.figures import TierFigures
from kvcache.tiers.jobs import EarlySave, FetchJob, LoadJob, PeerAddress, SaveJob, WriteGeneration
from kvcache.tiers.records import SECRET_BYTES, ReadResult
from kvcache.tiers.tier import GenerationFile, Tier
from kvcache.unit import CacheUnit, Unit

log = logging.getLogger(__name__)
COUNT_EVERY_S = 5.0  # how often the records of the tiers are counted
_CLOSE_S = 5.0  # for all threads to end: a disk may hang
_FOLLOW_S = 0.002  # between two looks for what another rank is saving, or for the layers of a running step

_Job = SaveJob | EarlySave | LoadJob | WriteGeneration | None  # None ends a thread


class Units(NamedTuple):
    """What one thread copies."""

    blocks: Unit
    states: Unit

    def unit(self, *, is_state: bool) -> Unit:
        """Return the unit of a kind of record."""
        return self.states if is_state else self.blocks


class FetchesPrefixes(Protocol):
    """Fetches from other nodes; implemented by `kvcache.tiers.peers.Peers`."""

    address: PeerAddress  # where other nodes fetch from this rank

    def fetch(self, fetch: FetchJob) -> None:
        """Do a job in a thread, and pass it to `Tiers.end_fetch`."""

    def close(self) -> None:
        """End all threads and connections."""


class Tiers:
    """A rank's tiers. The step loop calls `has`, `save`, `load`, `stop`, `fetch`, `finished` and `forget`."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        make_units: Callable[[], Units],
        *,
        enter_thread: Callable[[], None] = lambda: None,
        on_idle: Callable[[], None] = lambda: None,
        layers: WrittenLayers | None = None,
    ) -> None:
        """Start the threads.

        Args:
            tiers: The fastest first; at least one.
            make_units: Called once per thread.
            enter_thread: Called first in each thread, to select its device.
            on_idle: Called in a thread when it has done all its jobs, so that a sleeping step loop takes them back.
            layers: The progress of steps. None: `save_early` does nothing.
        """
        self._tiers = list(tiers)
        self._host = next((tier for tier in tiers if tier.name == "host"), None)
        self._layers = layers
        self.on_idle = on_idle
        oldest = tiers[-1].blocks  # the slowest tier outlives the others
        self._secret, self._generation = oldest.secret, oldest.generation
        self._ordered_generation = 0  # the newest one that began while this process runs
        self._saved_generation = GenerationFile(
            tiers[0], lambda: self._generation
        )  # of the thread that saves
        self.peers: FetchesPrefixes | None = None
        self.prompt_token_s = 0.0  # time that a prompt's token adds to a step; 0 until it is measured
        self._done: deque[SaveJob | LoadJob | FetchJob] = deque()
        self._lock = Lock()  # of the figures, of `_unbegun` and of changes of `_tiers`
        self._figures = TierFigures()
        self._counted_s: dict[str, float] = {}  # by tier
        self._jobs: list[SimpleQueue[_Job]] = [SimpleQueue(), SimpleQueue()]
        self._threads = [
            Thread(target=self._work, args=(jobs, make_units, enter_thread), name=name, daemon=True)
            for jobs, name in zip(self._jobs, ("kv-load", "kv-save"), strict=True)
        ]
        self._unbegun: set[LoadJob] = set()  # loads in the queue of the thread that loads
        self._held_back: list[SaveJob] | None = None
        self._following: SimpleQueue[LoadJob | None] = SimpleQueue()
        self._follower = Thread(  # only ranks that expect requests need it
            target=self._follow, args=(make_units, enter_thread), name="kv-follow", daemon=True
        )
        self._disk_copies: DiskCopies | None = None
        if len(tiers) > 1:
            self._disk_copies = DiskCopies(tiers[0], tiers[1], self)
            self._threads.append(self._disk_copies.thread)
        for thread in self._threads:
            thread.start()

    @property
    def secret(self) -> bytes:
        """The key of the hash of prefixes, of this generation: 32 bytes. Equal in all processes that share the tiers."""
        return self.secret_of(self._generation)

    @property
    def generation(self) -> int:
        """The present generation of the records."""
        return self._generation

    def is_on(self, tier: Tier) -> bool:
        """Whether a tier has not failed."""
        return tier in self._tiers

    def secret_of(self, generation: int) -> bytes:
        """Return the key of the hash of prefixes of a generation."""
        number = generation.to_bytes(8, "little")
        return hashlib.blake2b(number, digest_size=SECRET_BYTES, key=self._secret).digest()

    def has(self, key: bytes, *, is_state: bool = False) -> bool:
        """Whether some tier has a record. It may be gone when it is read."""
        for tier in list(self._tiers):
            with self.without_failures_of(tier):
                if tier.store(is_state=is_state).has(key):
                    return True
        return False

    def save(self, save: SaveJob) -> None:
        """Copy a block or a state, which must not change until `finished` returns the job."""
        if self._held_back is None:
            self._jobs[1].put(save)
        else:
            self._held_back.append(save)

    @contextmanager
    def saving_later(self) -> Iterator[None]:
        """Begin saves that are given inside at the end: something still writes to their blocks. For the step loop."""
        held_back: list[SaveJob] = []
        self._held_back = held_back
        try:
            yield
        finally:
            self._held_back = None
            for save in held_back:
                self._jobs[1].put(save)

    def save_early(self, blocks: Iterable[tuple[int, bytes]]) -> None:
        """Begin to copy blocks, with their keys, which the next step fills. Call it just before that step."""
        if self._layers is not None:
            run = self._layers.progress.run + 1
            for index, key in blocks:
                self._jobs[1].put(EarlySave(index, key, run))

    def load(self, load: LoadJob) -> None:
        """Fill blocks and a state slot, which nothing else may read or write until `finished` returns the job."""
        if load.until_s:
            if self._follower not in self._threads:
                self._threads.append(self._follower)
                self._follower.start()
            self._following.put(load)
        else:
            self._unbegun.add(load)
            self._jobs[0].put(load)

    def stop(self, load: LoadJob) -> None:
        """End a load after its present block. If no thread has begun it, `finished` returns it without waiting for others."""
        load.should_stop = True
        if self._begin(load):
            self._done.append(load)

    def _begin(self, load: LoadJob) -> bool:
        """Take a load, unless another thread took it before."""
        with self._lock:
            is_unbegun = load in self._unbegun
            self._unbegun.discard(load)
        return is_unbegun

    @property
    def has_peers(self) -> bool:
        """Whether `fetch` can copy prefixes from other nodes."""
        return self.peers is not None

    def fetch(self, fetch: FetchJob) -> None:
        """Copy a prefix from another node to the host memory of this one. `finished` returns the job."""
        assert self.peers is not None, "a prefix is fetched without peers"
        # Only orders of this service count: the generations in files on disks differ between nodes.
        fetch.generation, fetch.secret = self._ordered_generation, self.secret
        self.peers.fetch(fetch)

    def end_fetch(self, fetch: FetchJob) -> None:
        """Let `finished` return a fetch. Called by its thread."""
        self._done.append(fetch)
        self.on_idle()

    def keep(self, key: bytes, record: memoryview, checksum: int, *, is_state: bool = False) -> bool:
        """Write a fetched record with a right checksum to host memory. Returns False if that tier has failed."""
        for tier in [each for each in self._tiers if each.name == "host"]:
            with self.without_failures_of(tier):
                tier.store(is_state=is_state).write(key, [record], checksum)
                return True
        return False

    @property
    def has_finished(self) -> bool:
        """Whether `finished` would return a job."""
        return bool(self._done)

    def finished(self) -> list[SaveJob | LoadJob | FetchJob]:
        """Return the jobs that ended since the last call."""
        return [self._done.popleft() for _ in range(len(self._done))]

    def forget(self, generation: int) -> None:
        """Begin a generation, unless it has begun: no record of an older one is found again, here or after a restart.

        All ranks of a node must agree on the generation, because they find each other's records by its secret. So it depends on
        nothing that differs between them: each begins with the generation in the file that they share, gets the same orders, and
        takes the newest. A rank that missed orders gets the last one, which is the newest: the front numbers orders above all
        generations that ranks report when they attach (`server.link.ranks`), also if its clock is behind. Rejected: counting up here
        if an order is not newer. A rank that starts later could not see whether the file has been counted up for that order already.
        """
        self._generation = max(self._generation, generation)
        self._ordered_generation = max(self._ordered_generation, generation)
        # In threads, because a file may be slow. A tier that has failed forgets, too: the next start uses its file again.
        self._jobs[1].put(WriteGeneration())
        if self._disk_copies is not None:
            self._disk_copies.write_generation()

    def note(self, **counts: float) -> None:
        """Add to counters of `TierFigures`."""
        with self._lock:
            present = self._figures._asdict()
            self._figures = self._figures._replace(
                **{name: present[name] + count for name, count in counts.items()}
            )

    @property
    def figures(self) -> TierFigures:
        """The present figures."""
        return self._figures

    def close(self) -> None:
        """End the threads after their present jobs."""
        if self.peers is not None:
            self.peers.close()
        for jobs in self._jobs:
            jobs.put(None)
        self._following.put(None)
        until_s = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            if self._disk_copies is not None and thread is self._disk_copies.thread:
                self._disk_copies.close()  # behind the copies of the last saves: the thread that saves has ended
            thread.join(timeout=max(0.0, until_s - time.monotonic()))

    def _work(
        self,
        jobs: "SimpleQueue[_Job]",
        make_units: Callable[[], Units],
        enter_thread: Callable[[], None],
    ) -> None:
        units = _units(make_units, enter_thread)
        saves = jobs is self._jobs[1]
        early = self._early_saves(units) if saves else None
        while (job := self._next_job(jobs, early)) is not None:
            is_written = not saves or self._saved_generation.write()
            if isinstance(job, WriteGeneration):
                if not is_written:
                    jobs.put(job)
            elif isinstance(job, SaveJob) or self._begin(job):
                self._do(job, units, early)
            if jobs.empty() or not is_written:  # then the job in the queue is this one
                for tier in self._tiers[:1] if saves else list(self._tiers):
                    self.count_records(tier)
                self.on_idle()
        if early is not None:
            self._do_early(early.close)

    def _do(self, job: SaveJob | LoadJob, units: Units | None, early: EarlySaves | None) -> None:
        begun_s = time.perf_counter()
        try:
            if units is None:
                pass
            elif isinstance(job, LoadJob):
                self._load(job, units)
            else:
                self._save(job, units, early)
        except Exception:  # the thread goes on: a job that never ended would keep its blocks
            log.exception("A KV block was not copied. It is computed again when it is needed")
        seconds = time.perf_counter() - begun_s
        self.note(**{"load_s" if isinstance(job, LoadJob) else "store_s": seconds})
        self._done.append(job)

    def _early_saves(self, units: Units | None) -> EarlySaves | None:
        if self._layers is None or self._host is None:
            return None
        if units is None or not isinstance(units.blocks, CacheUnit):
            return None
        return EarlySaves(units.blocks, self._layers, self._host.blocks)

    def _next_job(
        self, jobs: "SimpleQueue[_Job]", early: EarlySaves | None
    ) -> SaveJob | LoadJob | WriteGeneration | None:
        """Return the next job. Until there is one, copy the layers that a running step has written."""
        while True:
            if early is not None:
                begun_s = time.perf_counter()
                if self._do_early(early.advance):
                    self.note(store_s=time.perf_counter() - begun_s)
                self._do_early(partial(early.drop_left, jobs.empty))
            try:
                job = jobs.get(timeout=_FOLLOW_S if early is not None and early.is_waiting else None)
            except Empty:
                continue
            if not isinstance(job, EarlySave):
                return job
            if early is not None:
                self._do_early(partial(early.begin, job))

    def _do_early(self, copy: Callable[[], bool | None]) -> bool:
        """Call a method of `EarlySaves`, and return its result. False after an error: then the blocks are saved after their step."""
        assert self._host is not None, "blocks are copied early to host memory only"
        try:
            with self.without_failures_of(self._host):
                return bool(copy())
        except Exception:  # the thread goes on, as in `_work`
            log.exception("A KV block was not copied while it was computed. It is copied later")
        return False

    def _follow(self, make_units: Callable[[], Units], enter_thread: Callable[[], None]) -> None:
        """Load blocks as other ranks save them."""
        units = _units(make_units, enter_thread)
        early = None
        if self._host is not None and units is not None and isinstance(units.blocks, CacheUnit):
            early = EarlyLoads(units.blocks, self._host.blocks)
        open_jobs: list[LoadJob] = []
        while True:
            while not open_jobs or not self._following.empty():
                if (job := self._following.get()) is None:
                    return
                open_jobs.append(job)
            is_still = True
            for job in list(open_jobs):
                begun_s, num_before = time.perf_counter(), job.num_loaded
                is_open, has_copied = (
                    self._load_next(job, units, early) if units is not None else (False, False)
                )
                if job.num_loaded > num_before or has_copied:
                    is_still = False
                    self.note(load_s=time.perf_counter() - begun_s)
                if not is_open:
                    open_jobs.remove(job)
                    if early is not None:
                        early.forget(job)
                    self._done.append(job)
                    self.on_idle()
            if is_still:
                time.sleep(_FOLLOW_S)

    def _load_next(self, load: LoadJob, units: Units, early: EarlyLoads | None) -> tuple[bool, bool]:
        """Fill the blocks that are there by now. Returns whether the job goes on, and whether parts of blocks were copied."""
        has_copied = False
        try:
            while load.is_open:
                at, is_whole = load.num_loaded, False
                if early is not None and self._host is not None:
                    with self.without_failures_of(self._host):
                        is_whole = early.finish(load)
                if is_whole:
                    source: str | None = "host"
                    self.note(host_load_bytes=units.blocks.num_bytes)
                elif self.has(load.keys[at]):
                    source = self._read(load.keys[at], load.block_ids[at], units, is_state=False)
                else:
                    break
                if source is None:  # damaged, or gone
                    return False, has_copied
                load.sources.append(source)
                load.num_loaded += 1
            if early is not None and self._host is not None and load.is_open:
                with self.without_failures_of(self._host):
                    has_copied = early.advance(load)
        except Exception:  # the thread goes on, as in `_work`
            log.exception("A KV block was not copied. It is computed again when it is needed")
            return False, has_copied
        return load.is_open and time.monotonic() < load.until_s, has_copied

    def _load(self, load: LoadJob, units: Units) -> None:
        """Fill blocks until one is missing. Blocks without the state that belongs to them are of no use."""
        if load.should_stop:
            return
        if load.state_key is not None:
            load.has_state = bool(self._read(load.state_key, load.slot, units, is_state=True))
            if not load.has_state:
                return
        for key, block_id in zip(load.keys, load.block_ids, strict=True):
            source = None if load.should_stop else self._read(key, block_id, units, is_state=False)
            if source is None:
                return
            load.sources.append(source)
            load.num_loaded += 1

    def _read(self, key: bytes, index: int, units: Units, *, is_state: bool) -> str | None:
        """Read a record from the first tier that has it. Returns the tier's name."""
        unit = units.unit(is_state=is_state)
        for tier in list(self._tiers):
            store = tier.store(is_state=is_state)
            with self.without_failures_of(tier):
                begun_s = time.perf_counter()
                outcome = store.read(key, unit.buffers(index), lambda: unit.take(index))
                self.note(**{f"{tier.name}_load_s": time.perf_counter() - begun_s})
                if outcome is ReadResult.WHOLE:
                    self.note(**{f"{tier.name}_load_bytes": store.record_bytes})
                    return tier.name
                if outcome is ReadResult.DAMAGED:
                    log.warning("A KV block of %s was damaged. It is computed again", store.name)
                    self.note(num_faults=1)
        return None

    def _save(self, save: SaveJob, units: Units, early: EarlySaves | None) -> None:
        """Copy a block or state to the first tier that has not failed. From host memory it is copied to the disk later."""
        if not self._tiers:
            return
        tier, is_state = self._tiers[0], save.is_state
        if early is not None and self._do_early(partial(early.finish, save)):
            self.note(host_store_bytes=units.blocks.num_bytes)
        else:
            with self.without_failures_of(tier):
                if tier.store(is_state=is_state).has(save.key):
                    tier.store(is_state=is_state).touch(save.key)
                else:
                    self._write(save, units, tier)
        if self._disk_copies is not None and tier is self._host and not save.is_tail:
            is_waiting = self._disk_copies.copy(save.key, is_state=is_state)
            self.note(num_dropped=0 if is_waiting or is_state else 1)

    def _write(self, save: SaveJob, units: Units, tier: Tier) -> None:
        buffers, checksum = units.unit(is_state=save.is_state).export(save.index)
        store, begun_s = tier.store(is_state=save.is_state), time.perf_counter()
        is_new = store.write(save.key, buffers, checksum)
        self.note(**{f"{tier.name}_store_s": time.perf_counter() - begun_s})
        if is_new:
            self.note(**{f"{tier.name}_store_bytes": store.record_bytes})

    @contextmanager
    def without_failures_of(self, tier: Tier) -> Iterator[None]:
        """If the tier's file fails inside, serve without the tier from now on."""
        try:
            yield
        except OSError as error:
            with self._lock:
                if tier not in self._tiers:  # another thread was faster
                    return
                self._tiers.remove(tier)
            log.warning("The KV tier on %s is disabled until the next start: %s", tier.blocks.name, error)
            if tier.name == "disk":
                with self._lock:
                    self._figures = self._figures._replace(is_disk_off=True)

    def count_records(self, tier: Tier) -> None:
        """Count the records of a tier for its figures, unless they were counted a moment ago."""
        now_s = time.monotonic()
        if tier not in self._tiers or now_s - self._counted_s.get(tier.name, float("-inf")) < COUNT_EVERY_S:
            return
        self._counted_s[tier.name] = now_s
        with self.without_failures_of(tier):
            used = sum(store.count() * store.record_bytes for store in tier.stores)
            room = sum(store.num_records * store.record_bytes for store in tier.stores)
            sizes: dict[str, Any] = {f"{tier.name}_bytes": used, f"{tier.name}_capacity_bytes": room}
            with self._lock:
                self._figures = self._figures._replace(**sizes)


def _units(make_units: Callable[[], Units], enter_thread: Callable[[], None]) -> Units | None:
    """Begin a thread that copies. None after an error: the thread then hands all jobs back undone, so that no block is kept."""
    try:
        enter_thread()
        return make_units()
    except Exception:
        log.exception("KV blocks cannot be copied to or from the tiers until the next start")
        return None
