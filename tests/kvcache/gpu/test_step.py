"""A step arrives on the device as filled: padded rows choose nothing, and addresses depend only on the size."""

import random
from types import SimpleNamespace

import pytest
import torch

from kvcache.gpu.prompts import PromptShape, prompt_shapes
from kvcache.gpu.step import ROWS, DeviceStep, agreed_sizes, decode_sizes
from kvcache.states import NO_STATE, StatePiece
from kvcache.step import Drawn, Span

MAX_SEQUENCES, MAX_BLOCKS, BLOCK = 20, 4, 16


@pytest.fixture
def step() -> DeviceStep:
    """Return a step on the CPU, in place of a device."""
    return DeviceStep(
        max_tokens=64,
        max_sequences=MAX_SEQUENCES,
        max_blocks=MAX_BLOCKS,
        block_tokens=BLOCK,
        device=torch.device("cpu"),
    )


def decodes(*contexts: int) -> list[Span]:
    """Return one-token spans that result in contexts of these lengths."""
    return [
        Span(context - 1, 1, range(10 * row, 10 * row + MAX_BLOCKS)) for row, context in enumerate(contexts)
    ]


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(1, (1,)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (20, (1, 2, 4, 8, 16, 20)), (24, (1, 2, 4, 8, 16, 24))],
)
def test_decodes_are_padded_to_few_sizes_up_to_the_most(most: int, sizes: tuple[int, ...]) -> None:
    assert decode_sizes(most) == sizes


@pytest.mark.parametrize(("rows", "padded"), [(0, 1), (1, 1), (3, 4), (5, 8), (17, 20)])
def test_a_step_of_decodes_takes_the_next_size(step: DeviceStep, rows: int, padded: int) -> None:
    step.fill(decodes(*range(1, rows + 1)), rows)
    inputs = step.inputs(range(100, 100 + rows), range(rows))
    assert step.is_decode_only
    assert inputs.token_T.tolist() == [*range(100, 100 + rows), *[0] * (padded - rows)]
    assert len(inputs.row_R) == padded and inputs.row_R[:rows].tolist() == list(range(rows))
    assert step.on_device.context_S.tolist() == [*range(1, rows + 1), *[0] * (padded - rows)]
    assert step.on_device.table_SM.shape == (padded, MAX_BLOCKS)


@pytest.mark.parametrize(
    ("num_blocks", "lengths"),
    [(10, [64]), (4, [64]), (3, [48, 16]), (1, [16, 16, 16, 16])],  # the sequence's room, and the pool's
)
def test_the_largest_step_of_prompts_fits_the_blocks_and_takes_all_rows(
    step: DeviceStep, num_blocks: int, lengths: list[int]
) -> None:
    inputs = step.fill_with_prompts(num_blocks, vocabulary=30)
    placed = step.on_device
    assert placed.context_S.tolist() == lengths and not step.is_decode_only
    assert len(inputs.token_T) == step.num_tokens == 64 and placed.num_decodes_1.tolist() == [0]
    assert int(placed.cache_slot_P.min()) == 0 and int(placed.cache_slot_P.max()) < num_blocks * BLOCK
    assert inputs.token_T[29:32].tolist() == [29, 0, 1] and inputs.row_R.tolist() == [0]


def test_the_largest_step_of_prompts_has_no_more_sequences_than_there_may_be() -> None:
    step = DeviceStep(
        max_tokens=64, max_sequences=2, max_blocks=1, block_tokens=BLOCK, device=torch.device("cpu")
    )
    step.fill_with_prompts(5, vocabulary=30)
    assert step.on_device.context_S.tolist() == [16, 16]


def test_padded_rows_have_no_slot_and_position_zero(step: DeviceStep) -> None:
    step.fill(decodes(33, 5, 17), 3)
    step.inputs([7, 8, 9], [0, 1, 2])
    placed = step.on_device
    assert placed.position_P.tolist() == [32, 4, 16, 0]
    assert placed.cache_slot_P.tolist() == [2 * BLOCK, 10 * BLOCK + 4, 21 * BLOCK, -1]
    assert step.positions.data_ptr() == placed.position_P.data_ptr()
    assert placed.num_decodes_1.tolist() == [3]


def test_a_smaller_batch_after_a_larger_one_leaves_nothing_of_it(step: DeviceStep) -> None:
    step.fill(decodes(*range(30, 38)), 8)
    step.inputs(range(8), range(8))
    step.fill(decodes(3, 4, 5, 6, 7), 5)
    step.inputs(range(5), range(5))
    assert step.on_device.context_S.tolist() == [3, 4, 5, 6, 7, 0, 0, 0]
    assert step.on_device.cache_slot_P.tolist()[5:] == [-1] * 3
    assert step.on_device.position_P.tolist()[5:] == [0] * 3


def test_every_step_of_a_size_lies_at_the_same_addresses(step: DeviceStep) -> None:
    step.fill(decodes(3, 4, 5), 3)
    step.inputs([1, 2, 3], [0, 1, 2])
    before = [tensor.data_ptr() for tensor in step.on_device]
    step.fill([Span(0, 30, [1, 2])])
    step.inputs(range(30), [29])
    step.idle(4)
    assert [tensor.data_ptr() for tensor in step.on_device] == before
    step.fill(decodes(1, 2, 3, 4), 4)
    step.inputs(range(4), range(4))
    assert [tensor.data_ptr() for tensor in step.on_device] == before


def test_every_part_of_a_step_begins_at_sixteen_bytes(step: DeviceStep) -> None:
    """Otherwise kernels would be compiled again during service, for pointers with another alignment."""
    first = step._device.data_ptr()
    for spans, rows in (([Span(0, 5, [1])], [4]), ([Span(0, 3, [1]), Span(0, 4, [2])], [2, 4, 6])):
        step.fill(spans)
        step.inputs(range(step.num_tokens), rows)
        assert not [part.data_ptr() for part in step.on_device[:-1] if (part.data_ptr() - first) % 16]


def test_an_idle_step_caches_nothing_and_sees_nothing(step: DeviceStep) -> None:
    step.fill(decodes(3, 4), 2)
    step.inputs([1, 2], [0, 1])
    inputs = step.idle(8)
    assert step.num_padded == 8 and step.num_tokens == 0 and step.is_decode_only
    assert step.on_device.cache_slot_P.tolist() == [-1] * 8
    assert step.on_device.context_S.tolist() == [0] * 8
    assert inputs.token_T.tolist() == inputs.row_R.tolist() == [0] * 8


def test_a_step_with_prompts_is_padded_to_whole_rows_and_tells_decodes_apart(step: DeviceStep) -> None:
    step.fill([*decodes(18), Span(16, 10, [4, 5])], 1)
    inputs = step.inputs(range(11), [0, 10])
    assert not step.is_decode_only
    assert step.num_padded == 2 * ROWS and inputs.row_R.tolist() == [0, 10]
    assert step.on_device.query_start_S.tolist() == [0, 1, 11]
    assert step.on_device.context_S.tolist() == [18, 26]
    assert step.tiles_on_device(4).tolist() == [[1, 0, 4], [1, 4, 4], [1, 8, 2]]


def test_a_prompts_last_token_alone_is_no_decode(step: DeviceStep) -> None:
    step.fill([Span(8, 1, [3])])
    step.inputs([5], [0])
    assert not step.is_decode_only and step.num_padded == ROWS
    assert step.tiles_on_device(4).tolist() == [[0, 0, 1]]


def test_blocks_of_prompts_lie_side_by_side_for_expansion_as_many_as_may_be(step: DeviceStep) -> None:
    step.fill([*decodes(40), Span(16, 10, [4, 5]), Span(0, 3, [9])], 1)
    step.inputs(range(14), [0])
    (both,) = step.expansions(3)
    assert both.sequences == range(1, 3) and both.block_X.tolist() == [4, 5, 9]
    assert both.table_SM[1, :2].tolist() == [0, 1] and both.table_SM[2, :1].tolist() == [2]
    for most in (1, 2):  # a single sequence may have more
        first, second = step.expansions(most)
        assert (first.block_X.tolist(), second.block_X.tolist()) == ([4, 5], [9])
        assert second.table_SM[2, 0] == 0 and (first.sequences, second.sequences) == (
            range(1, 2),
            range(2, 3),
        )
        assert step.tiles_on_device(8, second.sequences).tolist() == [[2, 0, 3]]
    step.fill([Span(0, 3, [7])])
    step.inputs(range(3), [2])
    assert step.expansions(3)[0].block_X.tolist() == [7]


def mixed(rng: random.Random, shape: PromptShape) -> tuple[list[Span], int]:
    """Return random decodes and prompts that fit a shape, and the number of decodes."""
    prompts = rng.randint(1, shape.prompts)
    decodes = rng.randint(0, min(shape.sequences, shape.rows) - prompts)
    lengths, left = [1] * (decodes + prompts), shape.rows - decodes - prompts
    for _ in range(rng.randint(0, left)):
        at = rng.randrange(decodes, decodes + prompts)
        lengths[at] += lengths[at] < MAX_BLOCKS * BLOCK
    spans = []
    for row, length in enumerate(lengths):
        start = rng.randint(0, MAX_BLOCKS * BLOCK - length)
        spans.append(Span(start, length, [100 + 10 * row + block for block in range(MAX_BLOCKS)]))
    return spans, decodes


def test_the_device_derives_the_tiles_and_blocks_that_the_host_makes(step: DeviceStep) -> None:
    rng = random.Random(2)
    for shape in (
        prompt_shapes((16, 32, 64), max_rows=64, max_sequences=MAX_SEQUENCES, block_tokens=BLOCK) * 20
    ):
        spans, decodes = mixed(rng, shape)
        tokens = sum(span.length for span in spans)
        step.fix_prompts(())
        step.fill(spans, decodes)
        step.inputs(range(tokens), [])
        tile_tokens = rng.choice([1, 3, 16, 128])
        tiles = step.tiles_on_device(tile_tokens).tolist()
        (expansion,) = step.expansions(10_000)
        step.fix_prompts([shape.rows])
        step.fill(spans, decodes)
        step.inputs(range(tokens), [])
        found = step.tiles_on_device(tile_tokens).tolist()
        assert found[: len(tiles)] == tiles
        assert {tuple(tile) for tile in found[len(tiles) :]} <= {(shape.sequences, 0, 0)}, (
            "empty, and of no sequence"
        )
        (derived,) = step.expansions(10_000)
        count = len(expansion.block_X)
        assert (
            derived.block_X[:count].tolist() == expansion.block_X.tolist()
            and len(derived.block_X) == shape.blocks
        )
        for row in expansion.sequences:
            used = -(-(spans[row].start + spans[row].length) // BLOCK)
            assert derived.table_SM[row, :used].tolist() == expansion.table_SM[row, :used].tolist()
        assert 0 <= int(derived.table_SM.min()) <= int(derived.table_SM.max()) < shape.blocks


def test_steps_of_a_prompt_size_have_the_same_parts_at_the_same_addresses(step: DeviceStep) -> None:
    step.has_states = step.tells_long = True
    step.fix_prompts((16, 32))
    rng, seen = random.Random(4), set()
    for _ in range(30):
        spans, decodes = mixed(rng, step.prompt_shapes[0])
        step.fill(spans, decodes)
        step.inputs(range(step.num_tokens), range(len(spans)))
        on = step.on_device
        seen.add(tuple((part.data_ptr(), part.shape, part.stride()) for part in on))
        n = len(spans)
        assert (step.num_padded, step.has_fixed_shape, step.is_decode_only) == (16, True, False)
        assert on.context_S.tolist() == [*(span.start + span.length for span in spans), *[0] * (17 - n)]
        assert on.decode_context_S.tolist() == [*on.context_S[:decodes].tolist(), *[0] * (17 - decodes)]
        assert on.query_start_S[n:].tolist() == [step.num_tokens] * (18 - n)
        assert on.cache_slot_P[step.num_tokens :].tolist() == [-1] * (16 - step.num_tokens)
        assert on.walk_start_W.tolist() == [*range(decodes + 1), *[decodes] * (16 - decodes)]
        assert on.chunk_start_C[: n - decodes + 1].tolist() == on.query_start_S[decodes : n + 1].tolist()
        assert set(on.chunk_start_C[n - decodes :].tolist()) == {step.num_tokens}
    inputs = step.idle_prompts(step.prompt_shapes[0])
    assert len(inputs.token_T) == len(inputs.row_R) == 16 and not step.is_decode_only
    seen.add(tuple((part.data_ptr(), part.shape, part.stride()) for part in step.on_device))
    assert len(seen) == 1


def test_a_step_takes_the_smallest_shape_with_room_for_its_tokens_prompts_and_sequences() -> None:
    step = DeviceStep(
        max_tokens=2000, max_sequences=40, max_blocks=100, block_tokens=BLOCK, device=torch.device("cpu")
    )
    step.fix_prompts(step.replayable_prompts)
    assert [shape.rows for shape in step.prompt_shapes] == [64, 128, 192, 256, 384, 512, 768, 1024]
    assert [shape.prompts for shape in step.prompt_shapes] == [8, 8, 12, 16, 24, 32, 40, 40]
    assert {shape.sequences for shape in step.prompt_shapes} == {40}
    for lengths, decodes, rows in [
        ([64], 0, 64), ([65], 0, 128), ([1] * 31 + [100], 31, 192), ([2] * 9, 0, 192), ([2] * 40, 0, 768),
        ([1] * 39 + [985], 39, 1024), ([1025], 0, 1032),
    ]:  # fmt: skip
        step.fill([Span(0, length, range(100)) for length in lengths], decodes)
        assert step.num_padded == rows
    step.fill([Span(1500, 20, range(100))])
    step.inputs(range(20), [19])
    assert step.num_padded == 64, "96 blocks are no concern of models that expand nothing"
    for shape in reversed(step.prompt_shapes):  # as at capture
        step.idle_prompts(shape)
        step.expansions(10_000)
    step.fill([Span(1500, 20, range(100))])
    assert step.num_padded == 768, "96 blocks are the room of 768 rows"
    step.fill([Span(800, 20, range(100)), Span(900, 600, range(100))])
    step.inputs(range(620), [])
    (one,) = step.expansions(10_000)
    assert step.prompt_shape is None and len(one.block_X) == 52 + 94


def test_every_row_of_a_prompt_is_a_sequence_for_absorbed_attention(step: DeviceStep) -> None:
    step.fix_prompts((16,))
    step.fill([*decodes(18), Span(16, 3, [4, 5]), Span(0, 2, [9])], 1)
    step.inputs(range(6), [0])
    context_P, table_PM = step.rows_as_sequences(1000)
    assert context_P.tolist() == [0, 17, 18, 19, 1, 2, *[0] * 10]
    assert table_PM[1:4, :2].tolist() == [[4, 5]] * 3 and table_PM[4:6, 0].tolist() == [9, 9]
    step.fill([*decodes(18), Span(15, 1, [4])], 1)
    step.inputs(range(2), [0])
    assert step.rows_as_sequences(1000)[0].tolist() == [0, 16, *[0] * 14], "derived again for the next step"


def test_a_step_whose_prompts_see_too_much_has_no_shape(step: DeviceStep) -> None:
    step.fix_prompts((16,))
    step.fill([*decodes(60), Span(10, 3, [1, 2]), Span(0, 2, [3])], 1)  # 11 + 12 + 13 and 1 + 2 pairs
    step.inputs(range(6), [0])
    for most_pairs, is_shaped in ((39, True), (38, False)):
        step.rows_as_sequences(most_pairs)
        step.fill([*decodes(60), Span(10, 3, [1, 2]), Span(0, 2, [3])], 1)
        assert (step.prompt_shape is not None) == is_shaped


def test_the_first_expansion_of_a_long_context_in_a_shape_holds_all_blocks() -> None:
    """A draft layer may be the first that expands latents. The shape of its step then does not consider blocks."""
    step = DeviceStep(
        max_tokens=64, max_sequences=2, max_blocks=100, block_tokens=BLOCK, device=torch.device("cpu")
    )
    step.fix_prompts((64,))
    step.fill([Span(1500, 20, range(100))])
    step.inputs(range(20), [19])
    assert step.num_padded == 64
    (one,) = step.expansions(10_000)
    assert one.block_X.tolist() == [*range(95)]


def test_several_ranks_have_no_sizes_for_prompts() -> None:
    step = DeviceStep(
        max_tokens=64,
        max_sequences=8,
        max_blocks=2,
        block_tokens=BLOCK,
        device=torch.device("cpu"),
        num_ranks=2,
    )
    assert step.replayable_prompts == ()
    step.fix_prompts(step.replayable_prompts)
    step.fill([Span(0, 5, [1])])
    assert step.prompt_shape is None and step.num_padded == ROWS


@pytest.mark.parametrize(("most", "sizes"), [(3, (3,)), (8, (8,)), (20, (8, 16, 20)), (32, (8, 16, 32))])
def test_where_ranks_agree_the_padded_size_follows_from_that(most: int, sizes: tuple[int, ...]) -> None:
    assert agreed_sizes(most) == sizes
    step = DeviceStep(
        max_tokens=32,
        max_sequences=most,
        max_blocks=2,
        block_tokens=16,
        device=torch.device("cpu"),
        num_ranks=2,
    )
    for size, agreed in zip(sizes, (8, 16, 32), strict=False):
        for num_decodes in (0, 1, min(3, size)):
            step.fill([Span(4, 1, [0])] * num_decodes, num_decodes, agreed_tokens=agreed)
            assert (step.num_padded, step.has_fixed_shape) == (size, True)
        step.idle(size)
        assert (step.num_padded, step.agreed_tokens) == (size, agreed)
    step.fill([Span(4, 1, [0])], 1)
    assert step.num_padded == min(1, most) and not step.has_fixed_shape, "another rank has a prompt"


@pytest.mark.parametrize("most_new", [0, 3, 1000], ids=["rows are copied", "either", "blocks are put"])
def test_the_tables_on_the_device_are_those_on_the_host_whatever_changes(
    step: DeviceStep, most_new: int
) -> None:
    step._most_new = min(most_new, step._most_new)
    rng, tables = random.Random(0), [[1], [2], [3]]
    for number in range(60):
        kind = rng.randrange(4)
        if kind == 0 and len(tables) > 1:
            del tables[rng.randrange(len(tables))]
        elif kind == 1 and len(tables) < MAX_SEQUENCES:
            tables.insert(rng.randrange(len(tables) + 1), [100 + number])
        table = rng.choice(tables)
        if len(table) < MAX_BLOCKS:
            table.append(200 + number)
        spans = [Span(BLOCK * len(own) - 1, 1, own) for own in tables]
        step.fill(spans, len(spans))
        if rng.random() < 0.2:  # a step that was filled and not run
            continue
        step.inputs(range(len(spans)), [])
        for row, own in enumerate(tables):
            assert step.on_device.table_SM[row, : len(own)].tolist() == own


def test_a_decode_s_drafts_are_sequences_of_one_row_on_the_same_blocks(step: DeviceStep) -> None:
    """Next to decodes without drafts, and a prompt that stays whole."""
    spans = [Span(30, 3, [4, 5, 6]), Span(7, 1, [9]), Span(15, 2, [2, 3]), Span(0, 5, [8])]
    step.fill(spans, 6)
    inputs = step.inputs(range(100, 111), [0, 1, 2, 3, 4, 5, 10])
    placed = step.on_device
    assert step.num_sequences == 7 and not step.is_decode_only
    assert inputs.token_T[:11].tolist() == [*range(100, 111)]
    assert placed.position_P[:11].tolist() == [30, 31, 32, 7, 15, 16, 0, 1, 2, 3, 4]
    assert placed.cache_slot_P[:11].tolist() == [
        *(5 * BLOCK + 14, 5 * BLOCK + 15, 6 * BLOCK), 9 * BLOCK + 7, 2 * BLOCK + 15, 3 * BLOCK,
        *range(8 * BLOCK, 8 * BLOCK + 5),
    ]  # fmt: skip
    assert placed.context_S[:7].tolist() == [31, 32, 33, 8, 16, 17, 5]
    assert placed.table_SM[:3, :3].tolist() == [[4, 5, 6]] * 3
    assert placed.table_SM[4:6, :2].tolist() == [[2, 3]] * 2


def test_other_counts_of_drafts_leave_every_row_its_own_table(step: DeviceStep) -> None:
    """Tables stay on the device between steps, and rows change owners as drafts come and go."""
    rng = random.Random(3)
    for _ in range(60):
        owners = rng.sample(range(6), rng.randint(1, 4))
        spans = [Span(rng.randint(0, 40), rng.randint(1, 4), range(10 * who, 10 * who + 3)) for who in owners]
        count = sum(span.length for span in spans)
        step.fill(spans, count)
        step.inputs(range(count), range(count))
        assert step.is_decode_only
        table = step.on_device.table_SM.tolist()
        row = 0
        for span in spans:
            for place in range(span.length):
                used = -(-(span.start + place + 1) // BLOCK)
                assert table[row][:used] == [*span.block_ids][:used]
                row += 1


def test_recurrences_get_the_rows_of_whole_sequences(step: DeviceStep) -> None:
    """A decode and its draft run together. A prompt next to them runs in chunks, unless bits must not depend on cuts."""
    step.has_states = True
    drafted = [
        Span(3, 2, [0], (StatePiece(0, 1, 1), StatePiece(1, 2, 1))),
        Span(9, 1, [1], (StatePiece(4, 5, 1),)),
    ]
    step.fill(drafted, 3)
    step.inputs(range(3), range(3))
    on = step.on_device
    assert step.num_padded == 4 and on.query_start_S.tolist() == [0, 1, 2, 3, 3]
    assert on.walk_start_W.tolist() == [0, 2, 3, 3, 3] and on.chunk_start_C.tolist() == [0]
    assert on.state_before_P.tolist() == [0, 0, 4, NO_STATE]
    assert on.state_after_P.tolist() == [1, 2, 5, NO_STATE]
    assert on.row_before_P.tolist()[:3] == [0, 1, 0]
    for is_invariant, walked, in_chunks in ((False, [0, 2, 3], [3, 7]), (True, [0, 2, 3, 7], [7])):
        step.is_invariant = is_invariant
        step.fill([*drafted, Span(0, 4, [2], (StatePiece(NO_STATE, 7, 4),))], 3)
        step.inputs(range(7), range(4))
        assert step.on_device.walk_start_W.tolist() == walked
        assert step.on_device.chunk_start_C.tolist() == in_chunks


def test_tokens_that_an_earlier_step_samples_are_gathered_on_the_device(step: DeviceStep) -> None:
    """They take the places of unknown ones. All other parts stay where graphs look for them."""
    step.fill(decodes(3, 4, 5), 3)
    step.inputs([1, 2, 3], [0, 1, 2])
    before = [tensor.data_ptr() for tensor in step.on_device]
    sampled = torch.tensor([70, 71, 72, 73])
    step.fill(decodes(4, 6, 9), 3)
    inputs = step.inputs([0, 8, 0], [0, 1, 2], Drawn(sampled, [0, 2], [3, 1]))
    assert inputs.token_T.tolist() == [73, 8, 71, 0]
    assert [tensor.data_ptr() for tensor in step.on_device] == before
    assert sampled.tolist() == [70, 71, 72, 73]


def test_the_buffer_on_the_host_holds_the_largest_step_whose_tokens_are_all_unknown() -> None:
    step = DeviceStep(
        max_tokens=20, max_sequences=20, max_blocks=2, block_tokens=BLOCK, device=torch.device("cpu")
    )
    step.has_states = step.tells_long = True
    spans = [
        Span(16 + row % 16, 1, [2 * row, 2 * row + 1], (StatePiece(0, 1, 1),), is_long=True)
        for row in range(20)
    ]
    step.fill(spans, 20)
    inputs = step.inputs([0] * 20, range(20), Drawn(torch.arange(50, 70), range(20), range(20)))
    assert inputs.token_T.tolist() == [*range(50, 70)]


def test_a_step_is_filled_when_the_last_copy_is_done(step: DeviceStep) -> None:
    """The copy is queued behind a running step, and reads what is filled."""
    log: list[tuple[str, int]] = []
    event = SimpleNamespace(
        record=lambda: log.append(("copied", step.num_tokens)),
        synchronize=lambda: log.append(("wait", step.num_tokens)),
    )
    step._copied = event  # type: ignore[assignment]
    for count in (2, 5):
        step.fill(decodes(*range(1, count + 1)), count)
        step.inputs(range(count), range(count))
    assert log == [("wait", 0), ("copied", 2), ("wait", 2), ("copied", 5)]


def test_a_step_runs_adapters_if_a_row_has_one_and_has_their_places_on_the_device() -> None:
    step = DeviceStep(
        max_tokens=16, max_sequences=4, max_blocks=2, block_tokens=16, device=torch.device("cpu")
    )
    step.num_adapters = 3
    spans = [Span(4, 1, range(1), adapter=2), Span(7, 1, range(1, 2)), Span(2, 1, range(2, 3), adapter=0)]
    step.fill(spans, 3)
    step.inputs([1, 2, 3], [0, 1, 2])
    assert step.runs_adapters and step.has_fixed_shape
    places = step.adapters_on_device()
    assert places.tolist() == [2, -1, 0, -1] and step.adapters_on_device() is places
    step.fill([span._replace(adapter=-1) for span in spans], 3)
    step.inputs([1, 2, 3], [0, 1, 2])
    assert not step.runs_adapters and step.adapters_on_device().tolist() == [-1] * 4


def test_a_step_of_several_ranks_runs_adapters_once_one_has_a_place() -> None:
    sizes = {"max_tokens": 16, "max_sequences": 4, "max_blocks": 2, "block_tokens": 16}
    for num_ranks in (1, 2):
        step = DeviceStep(device=torch.device("cpu"), num_ranks=num_ranks, **sizes)
        step.num_adapters = 3
        for step.has_placed in (False, True):
            step.fill([Span(4, 1, range(1))], 1, agreed_tokens=4)
            assert step.runs_adapters == (num_ranks == 2 and step.has_placed)
