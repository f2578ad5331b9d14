"""The tiers of a cache: what was saved comes back as it was, from the fastest tier that has it, and a tier may fail."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcache.paged_cache import LayerShape, PagedCache, StateShape
from kvcache.tiers import tiers
from kvcache.tiers.early import WrittenLayers
from kvcache.tiers.jobs import LoadJob, SaveJob
from kvcache.tiers.opening import Kinds, SharedStore, open_disk, open_host
from kvcache.tiers.records import RecordLayout, RecordStore, StoreError
from kvcache.tiers.tiers import Tiers, Units
from kvcache.unit import CacheUnit, block_parts, parts_after, state_parts

SHAPES = [
    LayerShape(num_kv_heads=2, key_dim=8, value_dim=16),
    LayerShape(state=StateShape(tail=(3, 4), recurrent=(2, 8))),
]
MEMORY = 1 << 20


class Rank:
    """A cache of random numbers, with tiers."""

    def __init__(
        self,
        *,
        host_bytes: int = MEMORY,
        disk: Path | None = None,
        store: SharedStore | None = None,
        shapes: list[LayerShape] = SHAPES,
        states_share: float = 0.3,
    ) -> None:
        self.cache = PagedCache(shapes, 8, 4)
        generator = torch.Generator().manual_seed(1)
        for part in self.parts():
            part.copy_(torch.rand(part.shape, generator=generator))
        self.units = self._units()
        size = self.units.states.num_bytes
        kinds = Kinds(
            RecordLayout(b"m" * 32, b"s" * 32, self.units.blocks.num_bytes),
            RecordLayout(b"m" * 32, b"s" * 32, size) if size else None,
            states_share if size else 0.0,
        )
        tiers = [open_disk(disk, kinds, MEMORY)] if disk else []
        if host_bytes:
            secret = tiers[0].blocks.secret if tiers else None
            tiers.insert(0, open_host(kinds, host_bytes, store=store, host="here", secret=secret))
        layers = WrittenLayers(self.cache.progress, parts_after(self.cache))
        self.tiers = Tiers(tiers, self._units, layers=layers)

    def parts(self) -> list[Tensor]:
        return [part for part in (*block_parts(self.cache), *state_parts(self.cache)) if part.numel()]

    def _units(self) -> Units:
        return Units(CacheUnit(block_parts(self.cache)), CacheUnit(state_parts(self.cache)))

    def record(self, index: int, *, is_state: bool = False) -> bytes:
        buffers, _ = self.units.unit(is_state=is_state).export(index)
        return b"".join(bytes(buffer) for buffer in buffers)

    def do(self, job: SaveJob | LoadJob) -> None:
        """Run a job to its end."""
        (self.tiers.save if isinstance(job, SaveJob) else self.tiers.load)(job)  # type: ignore[arg-type]
        self.until(lambda: job in self.tiers.finished())

    def until(self, holds: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 30
        while not holds():
            assert time.monotonic() < deadline_s, "the job does not end"
            time.sleep(0.001)


def key_of(number: int) -> bytes:
    return bytes([number + 1]) * 16


@pytest.fixture(params=["host", "disk"])
def rank(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rank]:
    made = Rank() if request.param == "host" else Rank(host_bytes=0, disk=tmp_path / "kv")
    yield made
    made.tiers.close()


def test_blocks_and_states_come_back_in_other_places(rank: Rank) -> None:
    before = rank.record(0), rank.record(1), rank.record(2, is_state=True)
    for job in (SaveJob(0, key_of(0)), SaveJob(1, key_of(1)), SaveJob(2, key_of(1), is_state=True)):
        rank.do(job)
    assert rank.tiers.has(key_of(1)) and rank.tiers.has(key_of(1), is_state=True)
    assert not rank.tiers.has(key_of(2)) and not rank.tiers.has(key_of(0), is_state=True)
    load = LoadJob([key_of(0), key_of(1)], [5, 4], state_key=key_of(1), slot=3)
    rank.do(load)
    assert (load.num_loaded, load.has_state) == (2, True)
    assert (rank.record(5), rank.record(4), rank.record(3, is_state=True)) == before


def test_a_load_ends_at_the_first_missing_block_and_needs_its_state(rank: Rank) -> None:
    for number in (0, 2):
        rank.do(SaveJob(number, key_of(number)))
    part = LoadJob([key_of(0), key_of(1), key_of(2)], [5, 6, 7])
    rank.do(part)
    assert part.num_loaded == 1
    without_state = LoadJob([key_of(0)], [5], state_key=key_of(0), slot=3)
    rank.do(without_state)
    assert (without_state.num_loaded, without_state.has_state) == (0, False)


def test_a_load_that_follows_another_rank_takes_blocks_as_they_are_saved(rank: Rank) -> None:
    before = rank.record(0), rank.record(1)
    load = LoadJob([key_of(0), key_of(1)], [5, 4], until_s=time.monotonic() + 30)
    rank.tiers.load(load)
    for number in (0, 1):
        assert load.num_loaded == number
        rank.tiers.save(SaveJob(number, key_of(number)))
        rank.until(lambda: load.num_loaded > number)  # noqa: B023
    rank.until(lambda: load in rank.tiers.finished())
    assert (rank.record(5), rank.record(4)) == before
    assert len(set(load.sources)) == 1 and load.num_loaded == 2


def test_a_load_that_follows_another_rank_ends_when_its_time_is_over(rank: Rank) -> None:
    rank.do(SaveJob(0, key_of(0)))
    load = LoadJob([key_of(0), key_of(1)], [5, 4], until_s=time.monotonic() + 3600)
    rank.tiers.load(load)
    rank.until(lambda: load.num_loaded == 1)
    load.until_s = 1e-9
    rank.until(lambda: load in rank.tiers.finished())
    assert load.num_loaded == 1


@pytest.mark.parametrize("follows", [False, True])
def test_a_load_that_should_stop_ends_with_the_blocks_that_it_has(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, follows: bool
) -> None:
    for number in (0, 1):
        rank.do(SaveJob(number, key_of(number)))
    load = LoadJob([key_of(0), key_of(1)], [5, 4], until_s=time.monotonic() + 3600 if follows else 0.0)
    read = rank.tiers._read

    def read_and_stop(*arguments: Any, **how: Any) -> str | None:
        source = read(*arguments, **how)
        load.should_stop = True
        return source

    monkeypatch.setattr(rank.tiers, "_read", read_and_stop)
    rank.do(load)
    assert load.num_loaded == 1 and rank.record(5) == rank.record(0)
    monkeypatch.undo()
    rank.do(SaveJob(2, key_of(0), is_state=True))
    early = LoadJob([key_of(0)], [5], state_key=key_of(0), slot=3, should_stop=True)
    rank.do(early)
    assert (early.num_loaded, early.has_state) == (0, False)


def test_a_load_that_should_stop_does_not_wait_for_the_one_before_it(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.do(SaveJob(0, key_of(0)))
    has_begun, may_end, read = Event(), Event(), rank.tiers._read

    def read_late(*arguments: Any, **how: Any) -> str | None:
        has_begun.set()
        assert may_end.wait(30)
        return read(*arguments, **how)

    monkeypatch.setattr(rank.tiers, "_read", read_late)
    before, behind = (LoadJob([key_of(0)], [index]) for index in (5, 4))
    is_idle = Event()
    rank.tiers.on_idle = is_idle.set
    rank.tiers.load(before)
    rank.tiers.load(behind)
    assert has_begun.wait(30)
    for load in (behind, before):
        rank.tiers.stop(load)
    assert rank.tiers.finished() == [behind]
    may_end.set()
    assert is_idle.wait(30), "the last job of the queue was taken back"
    rank.until(lambda: before in rank.tiers.finished())
    last = LoadJob([key_of(0)], [4])
    rank.tiers.load(last)
    rank.until(lambda: rank.tiers.has_finished)
    assert rank.tiers.finished() == [last] and (before.num_loaded, behind.num_loaded) == (1, 0)


def test_host_memory_is_used_first_and_the_disk_keeps_everything(tmp_path: Path) -> None:
    rank = Rank(disk=tmp_path / "kv")
    for number in range(3):
        rank.do(SaveJob(number, key_of(number)))
    load = LoadJob([key_of(0), key_of(1)], [5, 6])
    rank.do(load)
    assert load.sources == ["host", "host"]
    size = rank.units.blocks.num_bytes
    rank.until(lambda: rank.tiers.figures.disk_store_bytes == 3 * size)
    figures = rank.tiers.figures
    assert (figures.host_store_bytes, figures.host_load_bytes) == (3 * size, 2 * size)
    secret = rank.tiers.secret
    rank.tiers.close()
    again = Rank(disk=tmp_path / "kv")
    assert again.tiers.secret == secret, "keys are the same after a restart"
    load = LoadJob([key_of(0), key_of(1)], [5, 6])
    again.do(load)
    assert load.sources == ["disk", "disk"] and again.record(6) == rank.record(1)
    again.do(SaveJob(5, key_of(0)))  # as the scheduler does with every block that it publishes
    load = LoadJob([key_of(0)], [7])
    again.do(load)
    assert load.sources == ["host"]
    again.tiers.close()


def test_a_damaged_record_is_counted_and_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rank = Rank(host_bytes=0, disk=tmp_path / "kv")
    rank.do(SaveJob(0, key_of(0)))
    path = tmp_path / "kv" / "blocks.kv"
    data = path.read_bytes()
    at = data.index(rank.record(0))
    path.write_bytes(data[: at + 40] + bytes([data[at + 40] ^ 1]) + data[at + 41 :])
    load = LoadJob([key_of(0)], [5])
    rank.do(load)
    assert load.num_loaded == 0 and rank.tiers.figures.num_faults == 1
    assert "was damaged" in caplog.text and str(path) in caplog.text
    rank.do(SaveJob(0, key_of(0)))
    rank.do(load := LoadJob([key_of(0)], [5]))
    assert load.num_loaded == 1 and rank.record(5) == rank.record(0)
    rank.tiers.close()


def test_a_disk_that_fails_is_left_out_and_host_memory_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rank = Rank(disk=tmp_path / "kv")
    disk = rank.tiers._tiers[1].blocks

    def full(*_arguments: object, **_options: object) -> bool:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "write", full)
    rank.do(SaveJob(0, key_of(0)))
    rank.until(lambda: rank.tiers.figures.is_disk_off)
    assert "No space left on device" in caplog.text
    rank.do(SaveJob(1, key_of(1)))
    rank.do(load := LoadJob([key_of(0), key_of(1)], [5, 6]))
    assert load.sources == ["host", "host"]
    assert caplog.text.count("is disabled until the next start") == 1
    rank.tiers.close()


def test_forgotten_records_stay_forgotten_after_a_restart(tmp_path: Path) -> None:
    rank = Rank(disk=tmp_path / "kv")
    first = rank.tiers.secret
    rank.tiers.forget(7)
    second = rank.tiers.secret
    assert first != second
    rank.tiers.close()
    again = Rank(disk=tmp_path / "kv")
    assert again.tiers.secret == second
    again.tiers.forget(6)
    assert again.tiers.secret == second, "an order that arrives twice changes nothing"
    again.tiers.close()


class SlowFile:
    """Stops writes to a tier's file until they may go on."""

    def __init__(self, store: RecordStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_begun, self.may_end, self._transfer = Event(), Event(), store._transfer
        monkeypatch.setattr(store, "_transfer", self)

    def __call__(self, *arguments: Any) -> None:
        self.has_begun.set()
        assert self.may_end.wait(30)
        self._transfer(*arguments)


def test_blocks_are_in_host_memory_and_free_again_while_the_disk_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(disk=tmp_path / "kv")
    host, disk = rank.tiers._tiers
    slow = SlowFile(disk.blocks, monkeypatch)
    for number in range(3):
        rank.do(SaveJob(number, key_of(number)))
        assert host.blocks.has(key_of(number))
    assert slow.has_begun.wait(30) and not disk.blocks.has(key_of(0))
    rank.do(SaveJob(2, key_of(2), is_state=True))
    expected, kept = [rank.record(number) for number in range(3)], rank.record(2, is_state=True)
    for number in range(3):  # the blocks belong to other requests by now
        for part in rank.parts():
            part[number].zero_()
    slow.may_end.set()
    rank.until(lambda: disk.states is not None and disk.states.has(key_of(2)))
    rank.tiers.close()
    alone = Rank(host_bytes=0, disk=tmp_path / "kv")
    alone.do(load := LoadJob([key_of(number) for number in range(3)], [5, 6, 7], state_key=key_of(2), slot=3))
    assert load.sources == ["disk"] * 3 and load.has_state
    assert [alone.record(index) for index in (5, 6, 7)] == expected
    assert alone.record(3, is_state=True) == kept
    alone.tiers.close()


def test_copies_to_the_disk_that_cannot_follow_are_counted_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(disk=tmp_path / "kv")
    slow = SlowFile(rank.tiers._tiers[1].blocks, monkeypatch)
    rank.do(SaveJob(0, key_of(0)))
    assert slow.has_begun.wait(30) and rank.tiers._disk_copies is not None
    rank.tiers._disk_copies._most_jobs = 1
    for number in (1, 2):
        rank.do(SaveJob(number, key_of(number)))
    assert rank.tiers.figures.num_dropped == 1
    slow.may_end.set()
    rank.until(lambda: rank.tiers.figures.disk_store_bytes == 2 * rank.units.blocks.num_bytes)
    assert not rank.tiers._tiers[1].blocks.has(key_of(2))
    rank.tiers.close()


def test_a_flush_is_on_the_disk_before_the_copies_that_wait_and_ends_those_of_older_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(disk=tmp_path / "kv")
    disk, seen = rank.tiers._tiers[1].blocks, []
    slow, write = SlowFile(disk, monkeypatch), disk.write

    def write_and_note(key: bytes, *arguments: Any) -> bool:
        seen.append((key, disk.generation))
        return write(key, *arguments)

    monkeypatch.setattr(disk, "write", write_and_note)
    for number in (0, 1):
        rank.do(SaveJob(number, key_of(number)))
    assert slow.has_begun.wait(30)
    rank.tiers.forget(5)
    rank.do(SaveJob(2, key_of(2)))
    slow.may_end.set()
    rank.until(lambda: disk.has(key_of(2)))
    assert seen == [(key_of(0), 0), (key_of(2), 5)]
    rank.tiers.close()


def test_a_sleeping_step_loop_learns_of_a_save_that_ends_before_a_flush(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, is_idle = SlowFile(rank.tiers._tiers[0].blocks, monkeypatch), Event()
    rank.tiers.on_idle = is_idle.set
    rank.tiers.save(save := SaveJob(0, key_of(0)))
    assert slow.has_begun.wait(30)
    rank.tiers.forget(5)
    slow.may_end.set()
    assert is_idle.wait(10) and rank.tiers.finished() == [save]


def test_the_last_saves_are_on_the_disk_when_the_tiers_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(disk=tmp_path / "kv")
    host, disk = (tier.blocks for tier in rank.tiers._tiers)
    slow = SlowFile(host, monkeypatch)
    rank.tiers.save(SaveJob(0, key_of(0)))
    assert slow.has_begun.wait(30)
    closing = Thread(target=rank.tiers.close)
    closing.start()
    rank.until(lambda: rank.tiers._jobs[0].empty() and not rank.tiers._threads[0].is_alive())
    slow.may_end.set()
    closing.join(30)
    assert disk.has(key_of(0))


def test_a_sleeping_step_loop_learns_of_saves_while_a_flush_cannot_be_written(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_idle, blocks = Event(), rank.tiers._tiers[0].blocks
    rank.tiers.on_idle = is_idle.set
    monkeypatch.setattr(blocks, "advance_to", lambda _generation: False)
    rank.tiers.forget(5)
    rank.tiers.save(SaveJob(0, key_of(0)))
    rank.until(lambda: rank.tiers.has_finished)
    is_idle.clear()
    assert is_idle.wait(10)


def test_a_block_that_host_memory_replaced_before_its_copy_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(disk=tmp_path / "kv", shapes=SHAPES[:1])
    host, disk = (tier.blocks for tier in rank.tiers._tiers)
    slow = SlowFile(disk, monkeypatch)
    for number in (0, 1, 2):
        rank.do(SaveJob(number, key_of(number)))
    assert slow.has_begun.wait(30)
    place, _ = host._find(key_of(1)) or (-1, 0)
    host._write_entry(place, host._entry(place)._replace(key=key_of(7)))
    slow.may_end.set()
    rank.until(lambda: disk.has(key_of(2)))
    assert rank.tiers.figures.num_dropped == 1 and not disk.has(key_of(1))
    rank.tiers.close()


def test_the_time_of_copies_to_the_disk_counts_as_stores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(disk=tmp_path / "kv")
    slow = SlowFile(rank.tiers._tiers[1].blocks, monkeypatch)
    rank.do(SaveJob(0, key_of(0)))
    assert slow.has_begun.wait(30)
    time.sleep(0.1)
    slow.may_end.set()
    rank.until(lambda: rank.tiers.figures.store_s >= 0.1)
    assert rank.tiers.figures.disk_store_s >= 0.1
    rank.tiers.close()


def test_closing_does_not_wait_for_a_disk_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "_CLOSE_S", 0.1)
    rank = Rank(host_bytes=0, disk=tmp_path / "kv")
    slow = SlowFile(rank.tiers._tiers[0].blocks, monkeypatch)
    rank.tiers.save(SaveJob(0, key_of(0)))
    assert slow.has_begun.wait(30)
    begun_s = time.monotonic()
    rank.tiers.close()
    assert time.monotonic() - begun_s < 4
    slow.may_end.set()


def test_a_tier_that_is_too_small_names_the_size_to_give(tmp_path: Path) -> None:
    """The states are the larger part here, so their share decides."""
    shapes = [SHAPES[0], LayerShape(state=StateShape(tail=(3, 4), recurrent=(200, 64)))]
    with pytest.raises(StoreError, match=r"--kv-offloading-size: 0\.5 MiB are too few .* at least 3 MiB"):
        Rank(host_bytes=1 << 19, shapes=shapes)
    Rank(host_bytes=3 << 20, shapes=shapes).tiers.close()
    with pytest.raises(StoreError, match=r"--kv-offloading-disk-size: 1\.0 MiB are too few"):
        Rank(disk=tmp_path / "kv", shapes=shapes)
    assert not (tmp_path / "kv").exists()


def test_a_flush_does_not_wait_for_a_file_that_is_written(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, before = rank.tiers._tiers[0].blocks, rank.tiers.secret
    slow = SlowFile(store, monkeypatch)
    rank.tiers.save(SaveJob(0, key_of(0)))
    assert slow.has_begun.wait(30)
    flush = Thread(target=rank.tiers.forget, args=(5,))
    flush.start()
    flush.join(timeout=10)
    assert not flush.is_alive() and rank.tiers.secret != before
    slow.may_end.set()
    rank.until(lambda: store.generation == 5)


def test_a_flush_is_written_when_another_process_no_longer_holds_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(disk=tmp_path / "kv")
    blocks, is_held = rank.tiers._tiers[1].blocks, Event()
    lock = blocks._lock

    def refuse(*_arguments: object, **_options: object) -> bool:
        is_held.set()
        return False

    monkeypatch.setattr(blocks, "_lock", refuse)
    rank.tiers.forget(5)
    assert is_held.wait(30) and blocks.generation == 0
    monkeypatch.setattr(blocks, "_lock", lock)
    rank.until(lambda: blocks.generation == 5)
    rank.tiers.close()


def test_a_disk_that_is_full_still_forgets_at_a_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(disk=tmp_path / "kv")

    def full(*_arguments: object, **_options: object) -> bool:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rank.tiers._tiers[1].blocks, "write", full)
    rank.do(SaveJob(0, key_of(0)))
    rank.until(lambda: rank.tiers.figures.is_disk_off)
    rank.tiers.forget(9)
    rank.tiers.close()
    again = Rank(disk=tmp_path / "kv")
    assert again.tiers.generation == 9
    again.tiers.close()


def test_threads_that_fail_together_disable_a_tier_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The one that is second finds the tier in the list, and gone when it removes it."""
    rank = Rank(disk=tmp_path / "kv")
    tier = rank.tiers._tiers[1]

    class Slow(list[Any]):
        def remove(self, value: object) -> None:
            has_looked.set()
            may_remove.wait(0.2)
            super().remove(value)

    has_looked, may_remove = Event(), Event()
    rank.tiers._tiers = Slow(rank.tiers._tiers)
    problems: list[BaseException] = []

    def fail() -> None:
        try:
            with rank.tiers.without_failures_of(tier):
                raise OSError(5, "Input/output error")
        except ValueError as error:
            problems.append(error)

    threads = [Thread(target=fail) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems and has_looked.is_set()
    assert caplog.text.count("is disabled until the next start") == 1
    rank.tiers.close()


@pytest.mark.parametrize("follows", [False, True])
def test_without_memory_for_copies_all_jobs_come_back_undone(follows: bool) -> None:
    made = Rank()

    def make_units() -> Units:
        raise RuntimeError("out of memory")

    tiers = Tiers(made.tiers._tiers, make_units, layers=made.tiers._layers)
    save, load = SaveJob(0, key_of(0)), LoadJob([key_of(0)], [5])
    load.until_s = time.monotonic() + 3600 if follows else 0.0
    tiers.save(save)
    tiers.load(load)
    done: list[object] = []
    made.until(lambda: done.extend(tiers.finished()) or len(done) == 2)  # type: ignore[func-returns-value]
    assert set(done) == {save, load} and load.num_loaded == 0
    for each in (tiers, made.tiers):
        each.close()


def test_the_directory_is_private_and_a_useless_one_is_named(tmp_path: Path) -> None:
    Rank(host_bytes=0, disk=tmp_path / "kv").tiers.close()
    assert (tmp_path / "kv").stat().st_mode & 0o077 == 0
    assert (tmp_path / "kv" / "blocks.kv").stat().st_mode & 0o077 == 0
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"--kv-offloading-dir .*file cannot be used: File exists"):
        Rank(host_bytes=0, disk=tmp_path / "file")


class FakeStore:
    """The part of torch's store that ranks meet with."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if self.values.get(key, "") == expected:
            self.values[key] = desired
        return self.values[key].encode()


def test_ranks_of_a_host_share_its_memory_and_it_outlives_the_rank_that_made_it() -> None:
    store = FakeStore()
    first, second = Rank(store=store), Rank(store=store)
    assert first.tiers.secret == second.tiers.secret
    first.do(SaveJob(0, key_of(0)))
    first.tiers.close()
    for tier in first.tiers._tiers:
        tier.blocks.close()
    third = Rank(store=store)
    for rank in (second, third):
        rank.do(load := LoadJob([key_of(0)], [5]))
        assert load.num_loaded == 1 and rank.record(5) == first.record(0)
        rank.tiers.close()


def test_a_rank_that_would_divide_the_memory_otherwise_shares_that_of_the_first() -> None:
    store = FakeStore()
    first, second = (Rank(store=store, states_share=share) for share in (0.3, 0.31))
    (one,), (other,) = first.tiers._tiers, second.tiers._tiers
    for is_state in (False, True):
        assert one.store(is_state=is_state).num_records == other.store(is_state=is_state).num_records
    first.do(SaveJob(0, key_of(0)))
    second.do(load := LoadJob([key_of(0)], [5]))
    assert load.num_loaded == 1 and second.record(5) == first.record(0)
    for rank in (first, second):
        rank.tiers.close()
