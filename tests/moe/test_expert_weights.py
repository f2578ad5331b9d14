"""Slots that change their memory: nothing is copied, nothing lost, and every byte counts in the check sum."""

import pytest
import torch

from moe.expert_weights import (
    SpareSlots,
    digest,
    exchange_slot,
    manifest,
    read_slot,
    sample,
    spare_slot,
    try_out,
)
from tests.moe.cpu.test_experts import FORMS, Form, experts_module, layer_of, routed, run

FORM = FORMS["biases"]


def test_an_exchanged_slot_serves_the_new_expert_and_the_others_stay() -> None:
    module = experts_module(FORM)
    layer, wanted = layer_of(module, FORM, [0, 1, 2, 3, 4]), layer_of(module, FORM, [0, 1, 2, 3, 4])
    spare = spare_slot(layer)
    for name, tensor in read_slot(layer, 3).tensors().items():
        spare.tensors()[name].copy_(tensor)
    address = spare.up.address_S[0]
    old = exchange_slot(layer, 3, spare)
    assert layer.up.address_S[3] == address == read_slot(layer, 3).tensors()["up"].data_ptr()
    for tensor in old.tensors().values():
        tensor.fill_(7.0)  # what is spare may be written to
    rows = routed(19)
    assert torch.equal(run(layer, module, *rows), run(wanted, module, *rows))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_an_expert_answers_alone_as_in_its_slot(form: Form) -> None:
    module = experts_module(form)
    layer = layer_of(module, form, [0, 1, 2, 3, 4])
    x = sample(layer)
    offsets = torch.tensor([0, 0, 0, len(x), len(x), len(x)])
    with torch.inference_mode():
        in_slot = layer.compute(module, x, offsets, parallel=False)
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
