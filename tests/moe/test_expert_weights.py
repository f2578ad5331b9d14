"""Experts in slots: identity of an expert, slots that change their memory, and slots that get other experts.

A change of memory copies and loses nothing, loaded experts are not read again, and a failed read breaks nothing.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from expert_placement.placement import EMPTY
from moe.cpu.weights.slots import PackedSlots
from moe.expert_weights import (
    ExpertWeights,
    SpareSlots,
    change_slots,
    digest,
    manifest,
    num_to_read,
    read_slot,
    sample,
    spare_slot,
    try_out,
)
from moe.load.checkpoint import CheckpointError
from tests.moe.cpu.test_experts import FORMS, Form, experts_module, layer_of, routed, run
from tests.support.engines.serving import build
from tests.support.models.families import write_checkpoint
from tests.support.models.quantise import write_quantised

FORM = FORMS["biases"]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_an_expert_answers_alone_as_in_its_slot(form: Form) -> None:
    module = experts_module(form)
    layer = layer_of(module, form, [0, 1, 2, 3, 4])
    x = sample(layer)
    offsets = torch.tensor([0, 0, 0, len(x), len(x), len(x)])
    with torch.inference_mode():
        in_slot = layer.compute(module, x, torch.arange(len(x)), offsets, None)
    assert torch.equal(try_out(layer, module, read_slot(layer, 2), x), in_slot)
    assert not torch.equal(try_out(layer, module, read_slot(layer, 1), x), in_slot)


def test_the_sample_is_made_of_rows_that_were_served() -> None:
    module = experts_module(FORM)
    layer = layer_of(module, FORM, [0, 1, 2, 3, 4])
    assert sample(layer).shape == (8, 24)
    x, ids, weights = routed(3)
    run(layer, module, x, ids, weights)
    assert torch.equal(sample(layer), x)


@pytest.mark.parametrize("name", ["up", "down", "up_bias", "down_bias"])
def test_one_bit_of_any_tensor_changes_the_check_sum(name: str) -> None:
    layer = layer_of(experts_module(FORM), FORM, [0, 1, 2, 3, 4])
    tensors = read_slot(layer, 1).tensors()
    before = digest(tensors)
    tensors[name].view(-1).view(torch.uint8)[5] ^= 1
    assert digest(tensors) != before


def test_layers_whose_experts_look_alike_share_spare_slots() -> None:
    module = experts_module(FORM)
    one, other = layer_of(module, FORM, [0, 1, 2, 3, 4]), layer_of(module, FORM, [4, 3, 2, 1, 0])
    narrow = layer_of(experts_module(Form()), Form(), [0, 1, 2, 3, 4])
    spare = SpareSlots()
    spare.reserve(one, 2)
    assert spare.num_free == 2
    taken = spare.take(other)
    assert spare.num_free == 1 and manifest(taken.tensors()) == manifest(read_slot(one, 0).tensors())
    assert "up_bias" not in spare.take(narrow).tensors() and spare.num_free == 1
    spare.give(taken)
    assert spare.num_free == 2


OUT, IN = 20, 3


def make_layer(held: list[int]) -> Any:
    """Return a layer in which every tensor encodes its expert."""
    sides = [PackedSlots.like(torch.zeros(OUT, IN), torch.zeros(OUT), len(held)) for _ in range(2)]
    layer = SimpleNamespace(up=sides[0], down=sides[1])
    for slot, expert in enumerate(held):
        write(expert, ExpertWeights(layer.up.at(slot), layer.down.at(slot)))
    return layer


def write(expert: int, into: ExpertWeights) -> None:
    for tensor in into.tensors().values():
        tensor.fill_(float(expert))


def found(layer: Any) -> list[set[float]]:
    """Return the experts encoded in each slot's tensors."""
    sides = (layer.up, layer.down)
    return [
        {value for side in sides for t in side.at(slot).tensors().values() for value in t.unique().tolist()}
        for slot in range(layer.up.num_slots)
    ]


@st.composite
def rows(draw: st.DrawFn) -> list[int]:
    experts = draw(st.lists(st.integers(0, 7), min_size=0, max_size=5, unique=True))
    row = experts + [EMPTY] * draw(st.integers(0 if experts else 1, 2))
    return draw(st.permutations(row))


@given(st.lists(rows(), min_size=2, max_size=4), st.integers(0, 3))
@settings(max_examples=80, deadline=None)
def test_slots_hold_what_is_wanted_whatever_they_held_and_only_what_is_new_is_read(
    wishes: list[list[int]], most_spare: int
) -> None:
    held, spare = list(wishes[0]), SpareSlots()
    layer = make_layer(held)
    for wanted in wishes[1:]:
        read: list[int] = []
        num_new = num_to_read(held, wanted)

        def take(expert: int, into: ExpertWeights, read: list[int] = read) -> None:
            read.append(expert)
            write(expert, into)

        change_slots(layer, held, wanted, take, spare, most_spare)
        assert held == wanted and len(read) == num_new and set(read) <= set(wanted)
        for expert, values in zip(wanted, found(layer), strict=True):
            assert expert == EMPTY or values == {float(expert)}
        addresses = [*layer.up.address_S, *layer.down.address_S]
        sides = (layer.up, layer.down)
        rows = [side.at(slot).tensors()[""] for side in sides for slot in range(side.num_slots)]
        assert addresses == [row.data_ptr() for row in rows]
        free = [w.up.address_S[0] for kind in spare._free.values() for w in kind]
        assert len({*addresses, *free}) == 2 * len(wanted) + len(free), "memory must be in exactly one place"
        assert spare.num_free <= max(most_spare, 0)


def test_a_read_that_fails_leaves_what_serves_and_says_what_is_held() -> None:
    held, layer = [4, 5, 6], make_layer([4, 5, 6])

    def fail(expert: int, into: ExpertWeights) -> None:
        write(99, into)
        raise CheckpointError("the disk is gone")

    with pytest.raises(CheckpointError):
        change_slots(layer, held, [6, 7, 4], fail, SpareSlots(), 0)
    assert held == [4, EMPTY, 6] and found(layer) == [{4.0}, {99.0}, {6.0}]
    change_slots(layer, held, [6, 7, 4], write, SpareSlots(), 0)
    assert held == [6, 7, 4] and found(layer) == [{6.0}, {7.0}, {4.0}]


def test_spare_memory_is_used_before_new_and_kept_up_to_a_bound() -> None:
    held, layer, spare = [0, 1], make_layer([0, 1]), SpareSlots()
    waiting = spare_slot(layer)
    spare.give(waiting)
    change_slots(layer, held, [0, 1, 2], write, spare, 0)
    assert layer.up.address_S[2] == waiting.up.address_S[0] and spare.num_free == 0
    change_slots(layer, held, [2], write, spare, 1)
    assert spare.num_free == 1 and found(layer) == [{2.0}]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "plain bf16", "mxfp4", "fp8"])
def test_a_model_that_reads_experts_later_has_the_bytes_of_one_that_had_them_from_the_start(
    kind: str, tmp_path: Path
) -> None:
    if kind == "mxfp4":
        write_quantised("gpt_oss", tmp_path, block=None)
    elif kind == "fp8":
        write_quantised("qwen3_moe", tmp_path, block=(32, 32))
    else:
        write_checkpoint("gpt_oss", tmp_path)
    dtype = "bfloat16" if kind == "plain bf16" else "auto"
    built = build(tmp_path, max_model_len=160, dtype=dtype)
    start = built.relocation.placement.local(0).tolist()
    whole = [
        {expert: digest(read_slot(layer, slot).tensors()) for slot, expert in enumerate(row)}
        for layer, row in zip(built.model.layers, start, strict=True)
    ]
    held = [list(row) for row in start]
    for wanted in ([5, 1], [7, 1, EMPTY, 5, 0], list(range(8))):
        built.model.hold([wanted] * len(held), held, SpareSlots(), 0)
        for layer, digests in zip(built.model.layers, whole, strict=True):
            for slot, expert in enumerate(wanted):
                assert expert == EMPTY or digest(read_slot(layer, slot).tensors()) == digests[expert]
