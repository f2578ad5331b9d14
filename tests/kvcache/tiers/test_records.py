"""A store of records: a read returns what was written or misses it, also when processes share the file and are killed."""

import hashlib
import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcache.tiers.records import ReadResult, RecordLayout, RecordStore, StoreError, file_bytes

SIZE = 256
LAYOUT = RecordLayout(b"m" * 32, b"s" * 32, SIZE)


def key_of(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=16).digest()


def content_of(number: int) -> bytes:
    return random.Random(number).randbytes(SIZE)


def sum_bytes(buffer: bytes | bytearray) -> int:
    return int.from_bytes(buffer[-8:], "little") ^ sum(buffer)


def open_store(path: Path, *, num_records: int = 64, layout: RecordLayout = LAYOUT) -> RecordStore:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    return RecordStore(fd, layout, file_bytes(num_records, layout.record_bytes) + 8192, name=str(path))


def put(store: RecordStore, number: int) -> bool:
    content = content_of(number)
    parts = [memoryview(content[:100]), memoryview(content[100:])]
    return store.write(key_of(number), parts, sum_bytes(content))


def get(store: RecordStore, number: int) -> tuple[ReadResult, bytes]:
    buffer = bytearray(SIZE)
    view = memoryview(buffer)
    outcome = store.read(key_of(number), [view[:7], view[7:]], lambda: sum_bytes(buffer))
    return outcome, bytes(buffer)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RecordStore]:
    opened = open_store(tmp_path / "blocks.kv")
    yield opened
    opened.close()


def test_records_are_found_again_also_by_another_process_and_after_reopening(tmp_path: Path) -> None:
    path = tmp_path / "blocks.kv"
    first = open_store(path)
    assert put(first, 1) and not put(first, 1), "a record is written once"
    second = open_store(path)
    assert second.secret == first.secret and second.num_records == first.num_records >= 64
    for store in (first, second):
        assert store.has(key_of(1)) and not store.has(key_of(2))
        assert get(store, 1) == (ReadResult.WHOLE, content_of(1))
        assert get(store, 2)[0] is ReadResult.MISS
    assert second.count() == 1


def test_records_that_nobody_read_are_replaced_first_in_the_order_in_which_they_were_written(
    store: RecordStore,
) -> None:
    count = store.num_records
    assert all(put(store, number) for number in range(count))
    for number in (0, 1, 5):
        assert get(store, number)[0] is ReadResult.WHOLE
    store.touch(key_of(7))
    assert all(put(store, number) for number in range(count, count + 4))
    assert [number for number in range(count) if not store.has(key_of(number))] == [2, 3, 4, 6]
    assert store.count() == count


def test_a_store_in_which_everything_was_read_still_takes_records(store: RecordStore) -> None:
    for number in range(3 * store.num_records):
        assert put(store, number) and get(store, number)[0] is ReadResult.WHOLE
    assert store.count() == store.num_records


def test_the_index_finds_nearly_all_records_of_a_full_store(tmp_path: Path) -> None:
    store = open_store(tmp_path / "large.kv", num_records=2000)
    for number in range(5000):
        put(store, number * 7919)
    latest = range(5000 - store.num_records, 5000)
    assert sum(store.has(key_of(number * 7919)) for number in latest) > 0.99 * store.num_records


@pytest.mark.parametrize("at", [0, 99, 255])
def test_a_flipped_byte_is_found_erased_and_never_served(tmp_path: Path, at: int) -> None:
    path = tmp_path / "blocks.kv"
    store = open_store(path)
    for number in range(8):
        put(store, number)
    data = bytearray(path.read_bytes())
    place = bytes(data).index(content_of(3))
    data[place + at] ^= 0x10
    path.write_bytes(data)
    assert get(store, 3)[0] is ReadResult.DAMAGED
    assert get(store, 3)[0] is ReadResult.MISS, "it was erased"
    assert all(
        get(store, number) == (ReadResult.WHOLE, content_of(number)) for number in (0, 1, 2, 4, 5, 6, 7)
    )
    assert put(store, 3) and get(store, 3) == (ReadResult.WHOLE, content_of(3))


def test_a_flipped_byte_of_an_entry_is_a_miss_or_a_fault(tmp_path: Path) -> None:
    path = tmp_path / "blocks.kv"
    store = open_store(path)
    put(store, 5)
    whole = path.read_bytes()
    start = whole.index(key_of(5))
    for at in range(24):
        data = bytearray(whole)
        data[start + at] ^= 0x40
        path.write_bytes(data)
        assert get(store, 5)[0] in (ReadResult.MISS, ReadResult.DAMAGED)
        path.write_bytes(whole)


def test_other_models_and_other_files_are_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "blocks.kv"
    put(open_store(path), 1)
    before = path.read_bytes()
    with pytest.raises(StoreError, match="holds the KV blocks of another model"):
        open_store(path, layout=LAYOUT._replace(model=b"x" * 32))
    assert path.read_bytes() == before
    text = tmp_path / "notes.txt"
    text.write_text("shopping list")
    with pytest.raises(StoreError, match="is not a store of KV blocks"):
        open_store(text)
    assert text.read_text() == "shopping list"
    with pytest.raises(StoreError, match="is too small: the fewest records need"):
        RecordStore(os.open(tmp_path / "tiny.kv", os.O_RDWR | os.O_CREAT), LAYOUT, 8192, name="tiny.kv")


def test_another_size_or_version_begins_anew_but_not_under_a_running_service(tmp_path: Path) -> None:
    path = tmp_path / "blocks.kv"
    running = open_store(path)
    put(running, 1)
    others: list[Callable[[], RecordStore]] = [
        lambda: open_store(path, num_records=128),
        lambda: open_store(path, layout=LAYOUT._replace(software=b"2" * 32)),
    ]
    for other in others:
        with pytest.raises(StoreError, match="is in use by a service of another version or size"):
            other()
    assert get(running, 1)[0] is ReadResult.WHOLE
    running.close()
    for other in others:
        store = other()
        assert store.count() == 0
        store.close()


def test_a_file_of_an_earlier_version_begins_anew_because_its_layout_has_other_facts(tmp_path: Path) -> None:
    path = tmp_path / "blocks.kv"
    before = open_store(path)
    put(before, 1)
    before.close()
    data = bytearray(path.read_bytes())
    data[8] -= 1
    path.write_bytes(data)
    store = open_store(path, layout=LAYOUT._replace(model=b"x" * 32))
    assert store.count() == 0 and put(store, 1)


@pytest.mark.parametrize("cut", ["header", "index", "entries", "records"])
def test_a_file_that_was_cut_short_is_used_for_what_is_left(tmp_path: Path, cut: str) -> None:
    path = tmp_path / "blocks.kv"
    before = open_store(path)
    numbers = range(before.num_records)
    assert all(put(before, number) for number in numbers)
    ends = {
        "header": 4096,
        "index": (4096 + before._entries_at) // 2,
        "entries": before._entry_at(before.num_records // 2) + 7,
        "records": before._record_at(before.num_records // 2) + 7,
    }
    before.close()
    os.truncate(path, ends[cut])
    after = open_store(path)
    kept = [number for number in numbers if get(after, number) == (ReadResult.WHOLE, content_of(number))]
    assert len(kept) == (before.num_records // 2 if cut == "records" else 0)
    assert after.count() <= before.num_records
    new = [number for number in range(1000, 1064) if put(after, number)]
    assert len(new) == 64, "a write ends, and takes a place"
    assert get(after, 1063) == (ReadResult.WHOLE, content_of(1063))
    after.close()


def test_generations_only_grow(tmp_path: Path) -> None:
    store, other = open_store(tmp_path / "blocks.kv"), open_store(tmp_path / "blocks.kv")
    store.advance_to(2)
    other.advance_to(1)
    assert store.generation == other.generation == 2


def test_a_full_disk_is_an_error_and_leaves_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path / "blocks.kv")

    def full(_fd: int, _buffers: object, _at: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OSError, match="No space left"):
        put(store, 1)
    monkeypatch.undo()
    assert not store.has(key_of(1)) and put(store, 1)


def test_a_record_that_is_written_in_parts_is_found_when_it_is_whole(tmp_path: Path) -> None:
    store, other = open_store(tmp_path / "blocks.kv"), open_store(tmp_path / "blocks.kv")
    content = memoryview(content_of(1))
    place = store.begin(key_of(1))
    assert place is not None and other.part_of(key_of(1)) == (place, 0)
    store.write_part(place, 0, [content[:60], content[60:100]])
    store.note_part(place, key_of(1), 100)
    assert other.part_of(key_of(1)) == (place, 100) and other.part_of(key_of(2)) is None
    buffer = bytearray(SIZE)
    other.read_part(place, 10, [memoryview(buffer)[10:100]])
    assert buffer[10:100] == content[10:100]
    assert not other.has(key_of(1)) and other.checksum_of(place, key_of(1)) is None
    assert get(other, 1)[0] is ReadResult.MISS and other.count() == 0
    store.write_part(place, 100, [content[100:]])
    store.complete(place, key_of(1), sum_bytes(content_of(1)))
    assert other.part_of(key_of(1)) is None
    assert other.checksum_of(place, key_of(1)) == sum_bytes(content_of(1))
    assert get(other, 1) == (ReadResult.WHOLE, content_of(1))
    assert store.begin(key_of(1)) is None, "it is there"


def test_a_place_that_is_written_in_parts_is_not_taken_until_it_is_dropped(tmp_path: Path) -> None:
    store, other = open_store(tmp_path / "blocks.kv"), open_store(tmp_path / "blocks.kv")
    place = store.begin(key_of(0))
    assert place is not None
    for number in range(1, 2 * store.num_records):
        assert put(store if number % 2 else other, number)
    assert store.part_of(key_of(0)) == (place, 0), "the place is still taken"
    store.cancel(place)
    assert store.part_of(key_of(0)) is None and not store.has(key_of(0))
    assert all(put(other, number) for number in range(1000, 1000 + store.num_records))
    assert other.count() == other.num_records


def _begin_and_wait(path: Path, begun: Any) -> None:
    store = open_store(path)
    place = store.begin(key_of(1))
    assert place is not None
    store.note_part(place, key_of(1), 50)
    begun.set()
    signal.pause()


def test_a_part_that_a_killed_writer_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "blocks.kv"
    store = open_store(path)
    context = multiprocessing.get_context("forkserver")
    begun = context.Event()
    writer = context.Process(target=_begin_and_wait, args=(path, begun), daemon=True)
    writer.start()
    assert begun.wait(60) and writer.pid is not None
    os.kill(writer.pid, signal.SIGKILL)
    writer.join(timeout=30)
    assert not store.has(key_of(1)) and put(store, 1)
    assert all(put(store, number) for number in range(1000, 1000 + store.num_records))
    assert store.part_of(key_of(1)) is None


def _storm(path: Path, seed: int, count: int) -> int:
    """Write and read records of a small store as fast as possible. Return how many reads were whole; -1 after a fault."""
    store, rng, whole = open_store(path, num_records=32), random.Random(seed), 0
    for _ in range(count):
        number = rng.randrange(60)
        if rng.random() < 0.5:
            put(store, number)
            continue
        outcome, content = get(store, number)
        if outcome is ReadResult.DAMAGED or (outcome is ReadResult.WHOLE and content != content_of(number)):
            return -1
        whole += outcome is ReadResult.WHOLE
    return whole


def test_processes_that_share_a_file_never_read_what_another_half_wrote(tmp_path: Path) -> None:
    open_store(tmp_path / "blocks.kv", num_records=32)
    context = multiprocessing.get_context("forkserver")
    with context.Pool(3) as pool:
        arguments = [(tmp_path / "blocks.kv", seed, 3000) for seed in range(3)]
        results = pool.starmap_async(_storm, arguments).get(timeout=60)
    assert min(results) > 100


def _write_forever(path: Path) -> None:
    store, number = open_store(path, num_records=32), 0
    while True:
        number += 1
        put(store, number % 200)


def test_a_writer_may_be_killed_at_any_moment(tmp_path: Path) -> None:
    path = tmp_path / "blocks.kv"
    store = open_store(path, num_records=32)
    context = multiprocessing.get_context("forkserver")
    for round_ in range(3):
        writer = context.Process(target=_write_forever, args=(path,), daemon=True)
        writer.start()
        while store.count() < 16 + round_:
            assert writer.is_alive()
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join(timeout=30)
        for number in range(200):
            outcome, content = get(store, number)
            assert outcome is ReadResult.MISS or (
                outcome is ReadResult.WHOLE and content == content_of(number)
            )
    assert all(put(store, number) for number in range(1000, 1016)), "a dead writer keeps no lock"


def test_a_thread_waits_for_another_one_s_write(store: RecordStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The locks of fcntl(2) exclude other processes only: one thread's unlocking would end another one's lock."""
    writes, may_go_on = threading.Event(), threading.Event()
    transfer = store._transfer

    def transfer_late(*arguments: Any) -> None:
        writes.set()
        assert may_go_on.wait(30)
        transfer(*arguments)

    monkeypatch.setattr(store, "_transfer", transfer_late)
    first = threading.Thread(target=put, args=(store, 1))
    first.start()
    assert writes.wait(30)
    second = threading.Thread(target=put, args=(store, 2))
    second.start()
    second.join(0.2)
    assert all(not place for place, _ in store._bucket(key_of(2))), "the second one has taken a place"
    may_go_on.set()
    for thread in (first, second):
        thread.join(30)
    assert get(store, 1)[0] is get(store, 2)[0] is ReadResult.WHOLE
