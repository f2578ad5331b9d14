"""Images of a prompt: keys of prefixes, positions on three axes, and rows of any part of the prompt."""

import os
from collections.abc import Iterator

import numpy as np
import pytest

from kvcache.images import (
    Image,
    ImageRowsError,
    axes_of,
    keyed,
    read_rows,
    rows_in,
    whole_chunk,
    write_rows,
)

FIRST = Image("ab" * 32, 3, 6, height=2, width=3)
SECOND = Image("cd" * 32, 12, 4, height=2, width=2)


@pytest.fixture
def path() -> Iterator[str]:
    """Return a path to an empty file in memory."""
    descriptor = os.memfd_create("rows")
    yield f"/proc/{os.getpid()}/fd/{descriptor}"
    os.close(descriptor)


def test_keys_replace_the_tokens_of_images_only() -> None:
    ids = tuple(range(20))
    keys = keyed(ids, [FIRST, SECOND])
    changed = [place for place in range(20) if keys[place] != ids[place]]
    assert changed == [*range(3, 9), *range(12, 16)]
    assert all(1 << 31 <= keys[place] < 1 << 32 for place in changed)
    assert keyed(ids, []) is ids


def test_keys_differ_between_images_and_between_rows() -> None:
    ids = [7] * 20
    keys = [*keyed(ids, [FIRST])[3:9], *keyed(ids, [FIRST._replace(digest="cd" * 32)])[3:9]]
    assert len(set(keys)) == 12
    assert keyed(ids, [FIRST._replace(start=5)])[5:11] == keys[:6], "keys do not depend on the place"


def test_a_later_range_of_an_image_has_the_keys_of_its_rows() -> None:
    ids = [7] * 20
    whole = keyed(ids, [FIRST])[3:9]
    parts = keyed(ids, [FIRST._replace(length=2), FIRST._replace(start=10, length=4, first=2)])
    assert [*parts[3:5], *parts[10:14]] == whole


def test_positions_follow_the_grid_and_the_text_continues_after_its_larger_side() -> None:
    axes = axes_of([FIRST, SECOND], 0, 18)
    assert axes is not None
    assert axes[0].tolist() == [0, 1, 2, 3, 3, 3, 3, 3, 3, 6, 7, 8, 9, 9, 9, 9, 11, 12]
    assert axes[1].tolist() == [0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7, 8, 9, 9, 10, 10, 11, 12]
    assert axes[2].tolist() == [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8, 9, 10, 9, 10, 11, 12]


def test_positions_of_a_part_are_those_of_the_whole() -> None:
    whole = axes_of([FIRST, SECOND], 0, 30)
    assert whole is not None
    for start in range(20):
        for length in (1, 3, 10):
            part = axes_of([FIRST, SECOND], start, length)
            assert np.array_equal(part, whole[:, start : start + length])


def test_images_on_one_axis_have_plain_positions() -> None:
    assert axes_of([FIRST._replace(height=0, width=0)], 0, 9) is None
    assert axes_of([], 0, 9) is None


def test_rows_of_a_part_are_those_of_its_tokens() -> None:
    rows = np.arange(2 * 6 * 4, dtype=np.float32).reshape(2, 6, 4)
    image = FIRST._replace(rows=rows)
    [placed] = rows_in([image], 5, 20)
    assert placed.place == 0 and np.array_equal(placed.rows, rows[:, 2:])
    [placed] = rows_in([image], 0, 5)
    assert placed.place == 3 and np.array_equal(placed.rows, rows[:, :2])
    assert rows_in([image], 9, 5) == rows_in([image], 0, 3) == []


def test_rows_come_back_from_their_file(path: str) -> None:
    rows = np.random.default_rng(0).standard_normal((2, 6, 4)).astype(np.float32)
    write_rows(path, FIRST.digest, rows)
    [read] = read_rows([FIRST._replace(path=path)], 4)
    assert read.rows is not None and np.array_equal(read.rows, rows)
    assert read.rows.flags.writeable, "torch accepts no read-only memory"


@pytest.mark.parametrize(
    ("change", "hidden_dim", "reason"),
    [
        ({"digest": "cd" * 32}, 4, "belongs to another image"),
        ({"length": 7}, 4, "expected 7 rows or more of 4"),
        ({}, 5, "expected 6 rows or more of 5"),
        ({"path": "/nowhere"}, 4, "cannot be read"),
    ],
)
def test_rows_that_do_not_fit_are_refused(
    change: dict[str, str | int], hidden_dim: int, reason: str, path: str
) -> None:
    write_rows(path, FIRST.digest, np.zeros((2, 6, 4), np.float32))
    image = Image(**{**FIRST._asdict(), "path": path, **change})
    with pytest.raises(ImageRowsError, match=reason):
        read_rows([image], hidden_dim)


def test_a_file_that_ends_early_is_refused(path: str) -> None:
    write_rows(path, FIRST.digest, np.zeros((2, 6, 4), np.float32))
    os.truncate(path, 100)
    with pytest.raises(ImageRowsError, match="cannot be read"):
        read_rows([FIRST._replace(path=path)], 4)


@pytest.mark.parametrize(
    ("start", "wanted", "most", "found"),
    [
        (0, 2, 20, 2),  # FIRST has tokens 3 to 8, SECOND 12 to 15
        (0, 3, 20, 3),
        (0, 4, 20, 3),
        (0, 9, 20, 9),
        (0, 13, 20, 12),
        (3, 2, 20, 6),
        (3, 2, 6, 6),
        (3, 2, 5, 0),
        (3, 6, 6, 6),
        (3, 0, 6, 0),
        (5, 1, 20, 4),
        (5, 1, 3, 0),
        (12, 3, 20, 4),
        (16, 5, 5, 5),
    ],
)
def test_a_chunk_ends_outside_images(start: int, wanted: int, most: int, found: int) -> None:
    assert whole_chunk([FIRST, SECOND], start, wanted, most) == found
    assert whole_chunk([], start, wanted, most) == wanted
