"""Copies layer by layer: a block arrives as it would after its step, or it is copied after the step.

Steps end early, blocks change hands and bytes change on their way.
"""

import random
from collections.abc import Iterator, Sequence

import pytest
import torch

from kvcache.paged_cache import LayerShape, PagedCache, StateShape
from kvcache.tiers.early import EarlyLoads, EarlySaves, WrittenLayers
from kvcache.tiers.jobs import EarlySave, LoadJob, SaveJob
from kvcache.tiers.opening import Kinds, open_host
from kvcache.tiers.records import RecordLayout, RecordStore
from kvcache.unit import CacheUnit, block_parts, parts_after
from tests.kvcache.tiers.test_tiers import FakeStore, Rank, key_of

SHAPES = [
    LayerShape(num_kv_heads=2, key_dim=8, value_dim=16),
    LayerShape(state=StateShape(tail=(3, 4), recurrent=(2, 8))),  # nothing per token
    LayerShape(num_kv_heads=1, key_dim=40, latent=True, index_dim=4),
    LayerShape(num_kv_heads=1, key_dim=4, value_dim=4, codes=torch.int8),
]
NUM_BLOCKS = 6


def random_cache(seed: int) -> PagedCache:
    cache = PagedCache(SHAPES, NUM_BLOCKS, 1)
    generator = torch.Generator().manual_seed(seed)
    for part in block_parts(cache):
        if part.numel():
            flat = part.view(-1).view(torch.uint8)
            flat.copy_(torch.randint(256, flat.shape, generator=generator, dtype=torch.uint8))
    return cache


class Pair:
    """A rank that saves blocks early, and one that follows it. Without threads."""

    def __init__(self) -> None:
        self.cache, self.other = random_cache(1), random_cache(2)
        self.unit, self.other_unit = (CacheUnit(block_parts(each)) for each in (self.cache, self.other))
        layout = RecordLayout(b"m" * 32, b"s" * 32, self.unit.num_bytes)
        tier = open_host(Kinds(layout, None), 1 << 20, store=None, host="", secret=None)
        self.store: RecordStore = tier.blocks
        self.progress = self.cache.progress
        self.saves = EarlySaves(self.unit, WrittenLayers(self.progress, parts_after(self.cache)), self.store)
        self.loads = EarlyLoads(self.other_unit, self.store)

    def begin(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            assert self.saves.begin(EarlySave(number, key_of(number), self.progress.run + 1))

    def finish(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            assert self.saves.finish(SaveJob(number, key_of(number)))

    def load(self, load: LoadJob) -> int:
        """Take all whole blocks. Return how many there are."""
        while load.num_loaded < len(load.keys) and self.loads.finish(load):
            load.num_loaded += 1
        return load.num_loaded

    def record(self, unit: CacheUnit, index: int) -> tuple[bytes, int]:
        buffers, checksum = unit.export(index)
        return b"".join(bytes(buffer) for buffer in buffers), checksum


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.store.close()


def load_of(numbers: Sequence[int]) -> LoadJob:
    """Load blocks into other places."""
    return LoadJob([key_of(number) for number in numbers], [NUM_BLOCKS - 1 - number for number in numbers])


def test_a_block_that_was_not_begun_when_the_one_before_was_copied_is_followed(pair: Pair) -> None:
    load = load_of(range(2))
    pair.begin([0, 1])
    second = pair.saves._begun.pop(key_of(1))
    pair.store.cancel(second.copied.place)
    with pair.progress.running():
        pair.progress.note(1)
        assert pair.saves.advance() and pair.loads.advance(load)
        assert pair.saves.begin(second.save)
        assert pair.saves.advance() and pair.loads.advance(load)
        part, copied = block_parts(pair.cache)[0], block_parts(pair.other)[0]
        assert torch.equal(copied[NUM_BLOCKS - 2].view(torch.uint8), part[1].view(torch.uint8))
    pair.saves.close()


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_copies_gives_the_records_and_blocks_of_plain_copies(pair: Pair, seed: int) -> None:
    rng, numbers = random.Random(seed), range(4)
    expected = [pair.record(pair.unit, number) for number in numbers]
    load = load_of(numbers)
    pair.begin(numbers)
    pair.loads.advance(load)
    with pair.progress.running():
        for num_layers in sorted(rng.choices(range(len(SHAPES) + 1), k=rng.randrange(6))):
            pair.progress.note(num_layers)
            for act in rng.choices((pair.saves.advance, lambda: pair.loads.advance(load)), k=3):
                act()
    for number in numbers:
        assert pair.load(load) == number
        pair.finish([number])
        if rng.random() < 0.5:
            pair.loads.advance(load)
    assert pair.load(load) == len(numbers)
    for number, (record, checksum) in zip(numbers, expected, strict=True):
        found = bytearray(len(record))
        place = pair.store._find(key_of(number))
        assert place is not None and place[1] == checksum
        pair.store.read_part(place[0], 0, [memoryview(found)])
        assert found == record
    assert [pair.record(pair.other_unit, index) for index in load.block_ids] == expected
    assert not pair.store._open and not pair.saves.is_waiting


def test_layers_arrive_while_the_step_runs(pair: Pair) -> None:
    load = load_of([0])
    pair.begin([0])
    assert not pair.saves.advance() and not pair.loads.advance(load), "the step has not begun"
    copied = []
    with pair.progress.running():
        for num_layers in range(len(SHAPES)):
            pair.progress.note(num_layers)
            pair.saves.advance()
            pair.loads.advance(load)
            copied.append(pair.loads._copied[load][0].num_parts)
        assert pair.saves.is_waiting
    assert copied == [0, 2, 2, 4], "parts of the first 0, 1, 2 and 3 layers"
    for part, ours, theirs in zip(range(4), pair.unit.buffers(0), pair.other_unit.buffers(5), strict=False):
        assert ours == theirs, f"part {part} is there before the step ends"
    assert not pair.saves.is_waiting and not pair.store.has(key_of(0))
    pair.finish([0])
    assert pair.load(load) == 1


def test_a_copy_that_outlasts_its_step_does_not_count(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step may write another request's rows to the block."""
    pair.begin([0])
    write_part = pair.store.write_part
    with pair.progress.running():
        pair.progress.note(3)

        def write_late(place: int, at: int, buffers: Sequence[memoryview]) -> None:
            write_part(place, at, buffers)
            pair.progress._next()
            pair.cache.keys[0].zero_()

        monkeypatch.setattr(pair.store, "write_part", write_late)
        assert not pair.saves.advance()
        monkeypatch.undo()
    part = pair.store.part_of(key_of(0))
    assert part is not None and part.num_bytes == 0
    expected = pair.record(pair.unit, 0)
    pair.finish([0])
    load = load_of([0])
    pair.loads.advance(load)
    assert not pair.loads.finish(load), "it was not followed"
    found = pair.store._find(key_of(0))
    assert found is not None and found[1] == expected[1]


def test_blocks_without_a_save_are_dropped_when_the_next_step_runs(pair: Pair) -> None:
    """Their request was aborted, or the step was broken off."""
    pair.begin([0, 1])
    with pair.progress.running():
        pair.progress.note(2)
        pair.saves.advance()
    pair.saves.drop_left(lambda: True)
    assert len(pair.store._open) == 2, "their saves may come after the step"
    pair.finish([0])
    with pair.progress.running():
        pair.saves.drop_left(lambda: False)
        assert len(pair.store._open) == 1, "a save may be among the jobs"
        pair.saves.drop_left(lambda: True)
        assert not pair.store._open
    assert pair.store.has(key_of(0)) and not pair.store.has(key_of(1))
    assert not pair.saves.finish(SaveJob(1, key_of(1)))


def test_a_save_of_the_same_tokens_in_another_block_does_not_end_the_early_one(pair: Pair) -> None:
    pair.begin([0])
    assert not pair.saves.finish(SaveJob(0, key_of(0), is_state=True))
    assert not pair.saves.finish(SaveJob(3, key_of(0)))
    assert not pair.store._open and not pair.store.has(key_of(0))


def test_what_is_there_or_over_is_not_begun(pair: Pair) -> None:
    pair.begin([0])
    assert not pair.saves.begin(EarlySave(1, key_of(0), pair.progress.run + 1)), "twice"
    pair.finish([0])
    assert not pair.saves.begin(EarlySave(0, key_of(0), pair.progress.run + 1)), "it is there"
    with pair.progress.running():
        late = EarlySave(1, key_of(1), pair.progress.run)
    assert not pair.saves.begin(late), "its step is over"


@pytest.mark.parametrize("at", [0, 5])
def test_a_byte_that_changes_on_its_way_is_found(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Then the record is read again, and its own checksum shows whether it is right."""
    load, read_part = load_of([0]), pair.store.read_part

    def misread(place: int, begin: int, buffers: Sequence[memoryview]) -> None:
        read_part(place, begin, buffers)
        buffers[0][at] ^= 1

    monkeypatch.setattr(pair.store, "read_part", misread)
    pair.begin([0])
    with pair.progress.running():
        pair.progress.note(1)
        pair.saves.advance()
        pair.loads.advance(load)
    monkeypatch.undo()
    pair.finish([0])
    assert not pair.loads.finish(load)


def test_a_rank_follows_the_layers_of_another_one_through_its_threads() -> None:
    store = FakeStore()
    first, second = Rank(store=store, shapes=SHAPES), Rank(store=store, shapes=SHAPES)
    for part in second.parts():
        part.zero_()
    load = LoadJob([key_of(0), key_of(1)], [4, 5], until_s=1e9)
    second.tiers.load(load)
    first.tiers.save_early([(0, key_of(0)), (1, key_of(1))])
    with first.cache.progress.running():
        first.cache.progress.note(1)
        second.until(lambda: torch.equal(second.cache.keys[0][5], first.cache.keys[0][1]))
        assert load.num_loaded == 0 and not second.cache.keys[2].any()
    for number in (0, 1):
        first.do(SaveJob(number, key_of(number)))
    second.until(lambda: load in second.tiers.finished())
    assert [second.record(4), second.record(5)] == [first.record(0), first.record(1)]
    size = first.units.blocks.num_bytes
    assert load.sources == ["host", "host"]
    assert first.tiers.figures.host_store_bytes == second.tiers.figures.host_load_bytes == 2 * size
    assert first.tiers.figures.num_faults == second.tiers.figures.num_faults == 0
    for rank in (first, second):
        rank.tiers.close()


def test_a_damaged_record_ends_a_load_that_follows_it_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeStore()
    first, second = Rank(store=store, shapes=SHAPES), Rank(store=store, shapes=SHAPES)
    blocks = first.tiers._tiers[0].blocks
    write_part = blocks.write_part

    def miswrite(place: int, at: int, buffers: Sequence[memoryview]) -> None:
        write_part(place, at, [memoryview(bytes(len(buffer))) for buffer in buffers])

    def has_part() -> bool:
        part = blocks.part_of(key_of(0))
        return part is not None and part.num_bytes > 0

    monkeypatch.setattr(blocks, "write_part", miswrite)
    load = LoadJob([key_of(0)], [4], until_s=1e9)
    second.tiers.load(load)
    first.tiers.save_early([(0, key_of(0))])
    with first.cache.progress.running():
        first.cache.progress.note(1)
        second.until(has_part)
    monkeypatch.setattr(blocks, "write_part", write_part)
    first.do(SaveJob(0, key_of(0)))
    second.until(lambda: load in second.tiers.finished())
    assert load.num_loaded == 0 and second.tiers.figures.num_faults == 1
    for rank in (first, second):
        rank.tiers.close()


def test_a_copy_that_fails_at_its_end_frees_the_place_of_its_record(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.begin([0])

    def fail(*_arguments: object) -> int:
        raise RuntimeError("an error of the copy")

    monkeypatch.setattr(pair.saves, "_copy", fail)
    with pytest.raises(RuntimeError, match="an error of the copy"):
        pair.saves.finish(SaveJob(0, key_of(0)))
    assert not pair.store._open and pair.store.part_of(key_of(0)) is None
