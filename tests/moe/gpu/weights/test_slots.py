"""Slots point into a store: each expert is in one place, an exchange moves no weights. Also the tile that a launch uses."""

import pytest
import torch
from torch import Tensor

from moe.gpu.products import tiles
from moe.gpu.products.tiles import check_steps, choose_tile, range_of, tile_of_launch
from moe.gpu.weights.formats import PLAIN, DeviceFormat, PlacedWeights
from moe.gpu.weights.slots import DeviceSlots, NoSpareSlotError, SlotStore


def parts(value: float, *, has_bias: bool = True) -> dict[str, Tensor]:
    """Return an expert's tensors, all with one value."""
    weight = {"": torch.full((4, 3), value)}
    return {**weight, "bias": torch.full((4,), value)} if has_bias else weight


def make_store(places: int = 5, *, has_bias: bool = True) -> SlotStore:
    return SlotStore(places, parts(0.0, has_bias=has_bias), device=torch.device("cpu"))


def test_layers_of_one_store_do_not_overlap() -> None:
    store = make_store()
    first, second = (DeviceSlots(store, [store.take() for _ in range(2)]) for _ in range(2))
    for number, (slots, slot) in enumerate([(first, 0), (first, 1), (second, 0), (second, 1)]):
        slots.put(slot, parts(float(number)))
    assert [int(first.at(slot).tensors()[""][0, 0]) for slot in (0, 1)] == [0, 1]
    assert [int(second.at(slot).tensors()["bias"][0]) for slot in (0, 1)] == [2, 3]
    assert sorted([*first.places_S.tolist(), *second.places_S.tolist()]) == [0, 1, 2, 3]


def test_an_exchange_switches_by_one_number_and_gives_the_old_place_back() -> None:
    store = make_store()
    slots = DeviceSlots(store, [store.take() for _ in range(3)])
    old = slots.at(1).tensors()[""].fill_(7.0)
    address = slots.places_S.data_ptr()
    spare = slots.spare()
    spare.tensors()[""].fill_(9.0)
    given_back = slots.exchange(1, spare)
    assert slots.at(1).tensors()[""].unique().tolist() == [9.0]
    assert given_back.tensors()[""].data_ptr() == old.data_ptr() and old.unique().tolist() == [7.0]
    assert slots.places_S.data_ptr() == address and slots.places_S.tolist() == [0, 3, 2]


def test_slots_change_places_at_the_same_address_and_their_number_stays() -> None:
    store = make_store()
    slots = DeviceSlots(store, [store.take() for _ in range(3)])
    address = slots.places_S.data_ptr()
    slots.rearrange([slots.at(2), slots.spare(), slots.at(0)])
    assert slots.places_S.data_ptr() == address and slots.places_S.tolist() == [2, 3, 0]
    assert slots.tensors()[""].data_ptr() == store.weights.codes[2].data_ptr()
    with pytest.raises(
        NoSpareSlotError, match="a layer would have 2 slots on this GPU; their number was fixed to 3"
    ):
        slots.rearrange([slots.at(0), slots.at(1)])


def test_more_moves_than_places_are_refused_by_name() -> None:
    store = make_store(2, has_bias=False)
    slots = DeviceSlots(store, [store.take() for _ in range(2)])
    with pytest.raises(NoSpareSlotError, match="all 2 places for experts of this kind are in use"):
        slots.spare()


def test_a_place_that_is_given_back_is_taken_again() -> None:
    store = make_store(3)
    slots = DeviceSlots(store, [store.take() for _ in range(2)])
    spare = slots.spare()
    with pytest.raises(NoSpareSlotError):
        slots.spare()
    spare.release()
    assert slots.spare().places_S.tolist() == spare.places_S.tolist()


def test_bytes_count_weights_and_biases() -> None:
    store = make_store()
    slots = DeviceSlots(store, [store.take() for _ in range(3)])
    assert slots.slot_bytes == (4 * 3 + 4) * 4 and slots.num_bytes == 3 * slots.slot_bytes
    assert DeviceSlots(make_store(has_bias=False), [0]).slot_bytes == 4 * 3 * 4
    assert slots.in_dim == 3


@pytest.mark.parametrize(
    ("rows_per_slot", "rows", "kernel"),
    [(0, 16, "grouped_few"), (0.4, 16, "grouped_few"), (0.5, 16, "grouped_decode"), (11, 16, "grouped_decode"),
     (12, 32, "grouped_32"), (27, 32, "grouped_32"),
     (28, 64, "grouped_64"), (63, 64, "grouped_64"), (64, 128, "grouped_prefill"), (4096, 128, "grouped_prefill")],
)  # fmt: skip
def test_a_tile_has_more_rows_than_an_expert_has_on_average(
    rows_per_slot: float, rows: int, kernel: str
) -> None:
    assert range_of(int(rows_per_slot * 128), 128).kernel == kernel
    assert choose_tile(int(rows_per_slot * 128), 128).rows == rows


def test_eight_ranks_of_32_tokens_take_the_tile_for_few_rows() -> None:
    """256 experts, 8 choices: 32 slots get 256 pairs, 8 each, with even loads. There is room for 2,048, 64 each."""
    assert choose_tile(32 * 8, 32) == tiles.DECODE_TILE
    assert choose_tile(8 * 32 * 8, 32) == tiles.PREFILL_TILE


def test_many_rows_without_a_gate_leave_room_for_a_second_program() -> None:
    assert choose_tile(8192, 128, has_gate=False) == tiles.SINGLE_PREFILL_TILE
    assert choose_tile(8, 128, has_gate=False) == tiles.DECODE_TILE
    assert choose_tile(8192, 128, is_quantised=True, has_gate=False) == tiles.QUANTISED_PREFILL_TILE


@pytest.mark.parametrize("is_quantised", [False, True])
def test_tiles_of_a_format_take_the_inner_dimension_in_the_same_steps(is_quantised: bool) -> None:
    made = [choose_tile(rows, 1, is_quantised=is_quantised) for rows in (1, 12, 28, 1 << 20)]
    assert len(set(made)) == 4
    assert len({tile.inner for tile in made}) == 1
    assert all(tile.columns % 64 == 0 for tile in made)  # the minimum of Hopper's instruction


def test_where_the_table_is_silent_the_launch_takes_the_fallback() -> None:
    weights = PlacedWeights(torch.empty(3, 64, 32))
    assert tile_of_launch(9, 3, weights) == tiles.DECODE_TILE
    for kind in ("e4m3", "int8", "e2m1", "int4"):
        quantised = weights._replace(format=DeviceFormat(kind, "float", 32))
        assert tile_of_launch(900, 3, quantised) == tiles.QUANTISED_PREFILL_TILE


def test_the_table_is_asked_by_device_step_and_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"rows": 32, "columns": 128}
    table = {"sm_90": {"grouped_decode": {"float32 N64 K32": entry, "int4 N64 K64": entry}}}
    monkeypatch.setattr(tiles, "device_names", lambda _device: ("NVIDIA H200", "sm_90"))
    monkeypatch.setattr("attention.gpu.tiles.read_table", lambda: table)
    wanted = tiles.DECODE_TILE._replace(rows=32, columns=128)
    weights = PlacedWeights(torch.empty(3, 64, 32))
    assert tile_of_launch(9, 3, weights) == wanted
    assert tile_of_launch(900, 3, weights) == tiles.PREFILL_TILE
    assert tile_of_launch(9, 3, PlacedWeights(torch.empty(3, 64, 16))) == tiles.DECODE_TILE
    int4 = PlacedWeights(torch.empty(3, 64, 32, dtype=torch.uint8), DeviceFormat("int4", "float", 32))
    assert tile_of_launch(9, 3, int4) == tiles.QUANTISED_DECODE_TILE._replace(rows=32, columns=128)


def test_plain_weights_with_many_rows_have_their_own_kernel_on_hopper(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = {"sm_90": {"grouped_flow": {"bfloat16 N96 K32": {"stages": 3}}}}
    monkeypatch.setattr("attention.gpu.tiles.read_table", lambda: table)
    wide, square, few_inputs = (
        PlacedWeights(torch.empty(3, *sides, dtype=torch.bfloat16))
        for sides in ((96, 32), (64, 32), (64, 12))
    )
    quantised = square._replace(format=DeviceFormat("e4m3", "float", 32))
    for name in ("sm_80", "sm_90"):
        monkeypatch.setattr(tiles, "device_names", lambda _device, name=name: (name,))
        flows = name == "sm_90"
        assert tile_of_launch(3 * 64, 3, square) == (tiles.FLOW_TILE if flows else tiles.PREFILL_TILE)
        single = tiles.SINGLE_FLOW_TILE if flows else tiles.SINGLE_PREFILL_TILE
        assert tile_of_launch(3 * 64, 3, square, has_gate=False) == single
        assert tile_of_launch(3 * 64, 3, wide).stages == (3 if flows else 4)
        assert tile_of_launch(3 * 63, 3, square) == choose_tile(3 * 63, 3)
        assert tile_of_launch(3 * 64, 3, few_inputs) == tiles.PREFILL_TILE
        assert tile_of_launch(3 * 64, 3, PlacedWeights(torch.empty(3, 64, 32))) == tiles.PREFILL_TILE
        assert tile_of_launch(3 * 64, 3, quantised) == tiles.QUANTISED_PREFILL_TILE


FP8_BLOCKS = DeviceFormat("e4m3", "float", 128, 128)


@pytest.mark.parametrize(
    ("form", "changed"), [(PLAIN, {"inner": 72}), (PLAIN, {"columns": 32}), (FP8_BLOCKS, {"inner": 128})]
)
def test_a_table_may_not_change_the_order_of_sums(form: DeviceFormat, changed: dict[str, int]) -> None:
    fallback = tiles.DECODE_TILE
    assert check_steps("float32 N64 K256", fallback._replace(rows=32), fallback, form, 256).rows == 32
    with pytest.raises(ValueError, match=r"tiles\.json: a grouped product of float32 N64 K256 has inner"):
        check_steps("float32 N64 K256", fallback._replace(**changed), fallback, form, 256)


def test_a_gate_halves_the_columns_of_the_smallest_tile_of_4_bits() -> None:
    """One product has the lines of the gate and of up, so 32 columns are the 64 lines of one instruction."""
    form, whole = DeviceFormat("e2m1", "e8m0", 32), tiles.QUANTISED_DECODE_TILE
    half = whole._replace(columns=32)
    assert check_steps("e2m1 N64 K256", half, whole, form, 256, has_gate=True) == half
    for wrong, other, has_gate in (
        (half, form, False),
        (half._replace(columns=16), form, True),
        (half, FP8_BLOCKS, True),
    ):
        with pytest.raises(ValueError, match="columns in multiples of"):
            check_steps("e2m1 N64 K256", wrong, whole, other, 256, has_gate=has_gate)


@pytest.mark.parametrize(
    "form", [PLAIN, DeviceFormat("e2m1", "e8m0", 32), DeviceFormat("int8", "float", 256)]
)
def test_a_table_may_change_the_inner_size_of_a_chain_of_products(form: DeviceFormat) -> None:
    wanted = tiles.DECODE_TILE._replace(inner=128)
    assert check_steps("float32 N64 K256", wanted, tiles.DECODE_TILE, form, 256) == wanted
