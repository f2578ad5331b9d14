"""A step's batch against a plain description of it."""

import random
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch

from kvcache.images import PlacedRows
from kvcache.step import ROW_MULTIPLE, Drawn, Span, Step


def make_step() -> Step:
    """Return a step with room for 100 tokens of 6 sequences with 8 blocks each."""
    return Step(max_tokens=100, max_sequences=6, max_blocks=8, block_tokens=16)


def assert_describes(step: Step, spans: list[Span]) -> None:
    """Check every row, one at a time."""
    rows = [
        (position, span.block_ids[position // 16] * 16 + position % 16)
        for span in spans
        for position in range(span.start, span.start + span.length)
    ]
    assert (step.num_sequences, step.num_tokens) == (len(spans), len(rows))
    assert step.num_padded % ROW_MULTIPLE == 0 and step.num_padded - len(rows) < max(
        ROW_MULTIPLE, len(rows) or 99
    )
    assert step.num_padded >= ROW_MULTIPLE, "no model family accepts zero rows"
    assert step.positions.tolist() == [position for position, _ in rows] + [0] * (step.num_padded - len(rows))
    assert step.cache_slot_T[: len(rows)].tolist() == [slot for _, slot in rows]
    assert step.context_S[: len(spans)].tolist() == [span.start + span.length for span in spans]
    starts = step.query_start_S[: len(spans) + 1].tolist()
    assert [end - start for start, end in pairwise(starts)] == [span.length for span in spans]
    for index, span in enumerate(spans):
        assert step.block_table_SM[index, : len(span.block_ids)].tolist() == list(span.block_ids)


def test_an_empty_step_is_all_padding() -> None:
    step = make_step()
    step.fill([Span(0, 20, [3, 1])])
    step.fill([])
    assert_describes(step, [])
    assert step.tiles(4).shape == (0, 3)


def test_a_step_is_refilled_in_place_and_forgets_the_last() -> None:
    step, generator = make_step(), random.Random(0)
    addresses = {
        name: value.data_ptr() for name, value in vars(step).items() if isinstance(value, torch.Tensor)
    }
    for _ in range(50):
        spans = []
        for _ in range(generator.randrange(7)):
            start = generator.randrange(100)
            length = generator.randint(1, min(16, 128 - start))
            spans.append(Span(start, length, generator.sample(range(40), -(-(start + length) // 16))))
        step.fill(spans)
        assert_describes(step, spans)
    assert addresses == {
        name: value.data_ptr() for name, value in vars(step).items() if isinstance(value, torch.Tensor)
    }


class CountingStep(Step):
    """Counts the blocks that are written."""

    num_written = 0

    def _write_blocks(self, row: int, begin: int, block_ids: Sequence[int]) -> None:
        self.num_written += len(block_ids)
        super()._write_blocks(row, begin, block_ids)


def test_only_what_changed_of_the_tables_is_written() -> None:
    step = CountingStep(max_tokens=100, max_sequences=6, max_blocks=8, block_tokens=16)
    tables = [[3, 1], [0, 2, 5], [7, 4, 6]]
    counts = []
    for position in range(30, 36):
        if position == 32:
            tables[0].append(9)
        if position == 34:
            tables[1:] = [tables[2]]  # the second sequence has ended
        if position == 35:
            tables[1] = [8, 8, 8]  # the third was preempted and resumed on other blocks
        spans = [Span(position, 1, table) for table in tables]
        step.fill(spans)
        for row, table in enumerate(tables):
            assert step.block_table_SM[row, : len(table)].tolist() == table
        counts.append(step.num_written)
        step.num_written = 0
    assert counts == [8, 0, 1, 0, 3, 3]


@pytest.mark.parametrize("tile_tokens", [1, 4, 7, 64])
def test_tiles_cover_every_query_token_once_and_never_mix_sequences(tile_tokens: int) -> None:
    step = make_step()
    lengths = [20, 1, 7, 8]
    step.fill([Span(0, length, range(2)) for length in lengths])
    covered: list[list[int]] = [[] for _ in lengths]
    for sequence, first, count in step.tiles(tile_tokens).tolist():
        assert 1 <= count <= tile_tokens
        covered[sequence] += range(first, first + count)
    assert covered == [list(range(length)) for length in lengths]
    assert step.tiles(tile_tokens) is step.tiles(tile_tokens), "tiles must be kept until the next fill"
    step.fill([Span(0, 2, [0])])
    assert step.tiles(tile_tokens)[:, 2].sum() == 2


def test_pytorch_loops_over_padded_rows_have_no_tail_that_rounds_otherwise() -> None:
    """The purpose of padding. One column is the hardest case, as it has the fewest elements."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    column = torch.randn(64 * ROW_MULTIPLE, 1, generator=torch.Generator().manual_seed(0)) * 3
    for function in (
        torch.sigmoid,
        torch.nn.functional.silu,
        torch.nn.functional.softplus,
        torch.exp,
        torch.tanh,
    ):
        whole = function(column)
        for rows in (ROW_MULTIPLE, 3 * ROW_MULTIPLE):
            parts = torch.cat([function(part) for part in column[: 63 * ROW_MULTIPLE].split(rows)])
            assert torch.equal(parts, whole[: 63 * ROW_MULTIPLE])
    torch.set_num_threads(threads)


def test_tokens_of_an_earlier_step_take_the_places_of_unknown_ones() -> None:
    step = Step(max_tokens=8, max_sequences=4, max_blocks=2, block_tokens=16)
    step.fill([Span(3, 1, [0]), Span(5, 1, [1]), Span(0, 2, [2])], 2)
    inputs = step.inputs([0, 7, 8, 9], [0, 1, 3], Drawn(torch.tensor([70, 71]), [0], [1]))
    assert inputs.token_T[:5].tolist() == [71, 7, 8, 9, 0]


def test_rows_of_images_and_positions_on_axes_are_placed_and_forgotten() -> None:
    step = make_step()
    rows = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)
    axes = np.array([[7, 7, 8], [7, 8, 8], [7, 9, 8]])
    seeing = Span(2, 3, [0], axes=axes, images=[PlacedRows(1, rows[:, :2])])
    step.fill([Span(5, 2, [1]), seeing])
    [placed] = step.images
    assert placed.place == 3 and placed.rows is not rows and placed.rows.shape == (2, 2, 4)
    assert step.model_positions.shape == (4, 1, step.num_padded)
    assert step.model_positions[:, 0, :5].tolist() == [
        [5, 6, 2, 3, 4],
        [5, 6, 7, 7, 8],
        [5, 6, 7, 8, 8],
        [5, 6, 7, 9, 8],
    ]
    assert not step.model_positions[:, 0, 5:].any()
    step.fill([Span(5, 2, [1])])
    assert step.images == [] and step.model_positions.tolist() == [step.positions.tolist()]


def test_rows_of_images_have_the_end_of_their_image() -> None:
    step, rows = make_step(), np.zeros((1, 4, 2), np.float32)
    seeing = Span(20, 9, [5, 6], images=[PlacedRows(0, rows[:, :2]), PlacedRows(4, rows)])
    step.fill([Span(7, 1, [1]), seeing])
    assert step.image_end_T[:11].tolist() == [0, 22, 22, 0, 0, 28, 28, 28, 28, 0, 0]
    step.fill([Span(7, 3, [1])])
    assert not step.image_end_T.any()
