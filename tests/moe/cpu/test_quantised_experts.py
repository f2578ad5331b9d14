"""Slots of quantised experts: the layer answers as with the dequantised weights, and slots change memory completely."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from moe.cpu.experts import PackedExpertLayer
from moe.cpu.weights.slots import PackedSlots
from moe.expert_weights import SpareSlots, digest, exchange_slot, manifest, read_slot, spare_slot, try_out
from moe.load.quantised_weight import QuantisedWeight
from tests.moe.cpu.kernels.test_quantised_products import int4_zeros, int8_rows, nvfp4
from tests.moe.cpu.test_experts import FORMS, Form, experts_module, layer_of, routed, run
from tests.support.models.quantise import quantise_fp8, quantise_mxfp4

RANDOM: dict[str, Callable[..., QuantisedWeight]] = {
    "nvfp4": nvfp4,
    "int4 with zeros": partial(int4_zeros, block=32),
    "int8": int8_rows,
}
FORM = FORMS["biases"]  # 32 intermediate, with biases


def quantised(weight_NK: Tensor, name: str) -> QuantisedWeight:
    """Quantise like the loader."""
    if name in RANDOM:  # random codes, unrelated to the weight
        return RANDOM[name](*weight_NK.shape)
    if name == "fp8":
        made = quantise_fp8(weight_NK, (16, 16))
        scales = made.stored["_scale_inv"].repeat_interleave(16, dim=0)[: len(weight_NK)]
        return QuantisedWeight(codes=made.stored[""], kind="e4m3", scales=scales, block=16)
    made = quantise_mxfp4(weight_NK.T[None])
    return QuantisedWeight(
        codes=made.stored["_blocks"][0].flatten(-2), kind="e2m1", scales=made.stored["_scales"][0], block=32
    )


def layers_of(form: Form, name: str) -> tuple[PackedExpertLayer, PackedExpertLayer]:
    """Return a layer with quantised experts, and one with the dequantised weights."""
    module = experts_module(form)
    layer, meant = (layer_of(module, form, [0, 1, 2, 3, 4]) for _ in range(2))
    for side, weights in (("up", module.up_EUD), ("down", module.down_EDI)):
        small = [quantised(weight, name) for weight in weights]
        biases = [getattr(layer, side).at(slot).tensors()["bias"] for slot in range(len(small))]
        slots = PackedSlots.like(small[0], biases[0], len(small))
        for slot, (weight, bias) in enumerate(zip(small, biases, strict=True)):
            slots.put(slot, weight, bias)
            getattr(meant, side).put(slot, weight.dequantised(), bias)
        setattr(layer, side, slots)
    return layer, meant


@pytest.fixture(params=["fp8", "mxfp4", *RANDOM])
def layers(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[PackedExpertLayer, PackedExpertLayer]:
    """Return both layers in formats of every kind, most with inputs in blocks of 32."""
    if request.param != "fp8":
        monkeypatch.setattr("tests.moe.cpu.test_experts.HIDDEN", 32)
    return layers_of(FORM, request.param)


Layers = tuple[PackedExpertLayer, PackedExpertLayer]


def test_quantised_experts_answer_with_the_bits_of_what_they_stand_for(layers: Layers) -> None:
    layer, meant = layers
    module, rows = experts_module(FORM), routed(19)
    assert (layer.up.in_dim, layer.down.in_dim) == (rows[0].shape[1], 32)
    assert torch.equal(run(layer, module, *rows), run(meant, module, *rows))


def test_slots_take_the_bytes_of_codes_and_scales(layers: Layers) -> None:
    up = layers[0].up
    assert up.quantised is not None
    weights, block = 64 * up.in_dim, up.quantised.block
    codes, scales = {
        "e4m3": (weights, 4 * -(-up.in_dim // 16) * 4),
        "int8": (weights, 64 * 2),
        "int4": (weights // 2, 64 * 2 + 64 // 2),
        "e2m1": (weights // 2, 64 if block == 32 else 64 * 2 + 64 * 4),
    }[up.quantised.kind]
    assert up.slot_bytes == codes + scales + 64 * 4
    assert up.num_bytes == 5 * up.slot_bytes


def test_an_exchanged_slot_serves_the_new_codes_with_the_new_scales(layers: Layers) -> None:
    layer, module = layers[0], experts_module(FORM)
    x = torch.randn(7, layer.up.in_dim, generator=torch.Generator().manual_seed(0))
    wanted = [try_out(layer, module, read_slot(layer, slot), x) for slot in (1, 3)]
    spare = spare_slot(layer)
    for name, tensor in read_slot(layer, 3).tensors().items():
        spare.tensors()[name].copy_(tensor)
    old = exchange_slot(layer, 1, spare)
    for tensor in old.tensors().values():
        tensor.view(-1).view(torch.uint8).fill_(7)  # spare memory may be overwritten
    offsets = torch.tensor([0, 0, 7, 7, 7, 7])
    with torch.inference_mode():
        assert torch.equal(layer.compute(module, x, torch.arange(7), offsets, None), wanted[1])
    assert not torch.equal(wanted[0], wanted[1])


def test_scales_are_part_of_what_moves(layers: Layers) -> None:
    layer = layers[0]
    tensors = read_slot(layer, 1).tensors()
    assert [*tensors] == ["up", "up_scales", "up_bias", "down", "down_scales", "down_bias"]
    for name in ("up", "up_scales", "down_scales"):
        before = digest(tensors)
        tensors[name].view(-1).view(torch.uint8)[5] ^= 1
        assert digest(tensors) != before
    spares = SpareSlots()
    spares.reserve(layer, 1)
    assert manifest(spares.take(layer).tensors()) == manifest(tensors) and spares.num_free == 0
    assert manifest(spares.take(layers[1]).tensors()) != manifest(tensors)
