"""Quantised experts in a GPU's store keep their values, in the kernels' order, and move with all their tensors."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs triton: pip install -r requirements-dev.txt")
from moe.expert_weights import ExpertWeights, digest, flat_bytes, manifest
from moe.gpu.weights.slots import DeviceExperts, DeviceSlots
from moe.load.quantised_weight import QuantisedWeight, QuantisedWeightError
from tests.moe.gpu.grouped_cases import FORMS, Case, make_weights

EXPERTS, HIDDEN, INNER = 3, 160, 192
CPU = torch.device("cpu")


def quantised(form: str, height: int, K: int) -> QuantisedWeight:
    """Return all experts of one projection as loaded, with scales for each row."""
    stored = make_weights(EXPERTS, height, Case([1], height, K, weights=form)).stored
    stored["scales"] = stored["scales"].repeat_interleave(FORMS[form].rows, 1)[:, :height].contiguous()
    return QuantisedWeight(kind=FORMS[form].kind, block=FORMS[form].block or K, **stored)


class Checkpoint:
    """Replaces the loader of `DeviceExperts`, with weights by leaf."""

    def __init__(self, weights: dict[str, QuantisedWeight]) -> None:
        self.weights = weights
        self.biases = {leaf: torch.randn(EXPERTS, each.shape[1]) for leaf, each in weights.items()}
        self.changed: dict[int, QuantisedWeight] = {}  # experts in another format

    def is_quantised(self, _target: str) -> bool:
        return True

    def stored(self, _name: str, weight: QuantisedWeight) -> QuantisedWeight:
        return weight

    def read_experts(
        self, _module: Any, target: str, local_S: np.ndarray
    ) -> Iterator[tuple[int, QuantisedWeight, Tensor]]:
        leaf = target.rpartition(".")[2]
        for slot, expert in enumerate(local_S.tolist()):
            yield slot, self.changed.get(expert, self.weights[leaf][expert]), self.biases[leaf][expert]


def apply_in_turn(both: Tensor) -> Tensor:
    """Apply gpt-oss' gate: gate and up values alternate."""
    gate, up = both[:, ::2].clamp(max=7.0), both[:, 1::2].clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(gate * 1.702)


MODULE: Any = SimpleNamespace(
    num_experts=EXPERTS, has_gate=True, has_bias=True, is_transposed=False, _apply_gate=apply_in_turn,
    gate_up_proj=torch.empty(EXPERTS, 2 * INNER, HIDDEN, device="meta"),
    down_proj=torch.empty(EXPERTS, HIDDEN, INNER, device="meta"),
    gate_up_proj_bias=torch.empty(EXPERTS, 2 * INNER, device="meta"),
    down_proj_bias=torch.empty(EXPERTS, HIDDEN, device="meta"),
)  # fmt: skip


def read(form: str) -> tuple[Checkpoint, DeviceExperts]:
    """Return a checkpoint in a form, and the stores of its one layer: two slots, two spare places."""
    torch.manual_seed(4)
    weights = {
        "gate_up_proj": quantised(form, 2 * INNER, HIDDEN),
        "down_proj": quantised(form, HIDDEN, INNER),
    }
    checkpoint: Any = Checkpoint(weights)
    return checkpoint, DeviceExperts(checkpoint, {"experts": MODULE}, 2, 2, dtype=torch.float32, device=CPU)


def held(slots: DeviceSlots, slot: int) -> Tensor:
    """Return the decoded weight of a slot."""
    return slots.store.weights.wide(int(slots.places_S[slot]))


@pytest.mark.parametrize("form", FORMS)
def test_experts_mean_what_they_mean_in_the_checkpoint_gate_before_up(form: str) -> None:
    checkpoint, experts = read(form)
    up, down = (experts.load("experts", leaf, np.array([2, 0])) for leaf in ("gate_up_proj", "down_proj"))
    for slot, expert in enumerate((2, 0)):
        both = checkpoint.weights["gate_up_proj"][expert].dequantised()
        assert torch.equal(held(up, slot), torch.cat((both[::2], both[1::2])))
        assert torch.equal(held(down, slot), checkpoint.weights["down_proj"][expert].dequantised())
        bias = checkpoint.biases["gate_up_proj"][expert]
        assert torch.equal(up.at(slot).tensors()["bias"], torch.cat((bias[::2], bias[1::2])))
    wanted = sum(part[0].nbytes for part in checkpoint.weights["down_proj"].tensors().values()) + HIDDEN * 4
    if FORMS[form].block not in (0, 128):  # scales and zeros of the last tile, of 64 inputs, are filled up
        wanted += sum(
            part[0].nbytes * 64 // INNER
            for name, part in checkpoint.weights["down_proj"].tensors().items()
            if name in ("scales", "zeros")
        )
    assert down.slot_bytes == wanted if FORMS[form].rows == 1 else down.slot_bytes < wanted


@pytest.mark.parametrize("form", FORMS)
def test_a_moved_expert_keeps_its_bits_and_a_flipped_one_is_seen(form: str) -> None:
    checkpoint, experts = read(form)
    leaves = ("gate_up_proj", "down_proj")
    up, down = (experts.load("experts", leaf, np.array([2, 0])) for leaf in leaves)
    source, spare = ExpertWeights(up.at(0), down.at(0)), ExpertWeights(up.spare(), down.spare())
    sent, received = source.tensors(), spare.tensors()
    assert manifest(sent) == manifest(received) and digest(sent) != digest(received)
    names = {f"up_{name}" for name in checkpoint.weights["down_proj"].tensors() if name != "codes"}
    assert set(sent) == {"up", "down", "up_bias", "down_bias", *names, *(f"down{each[2:]}" for each in names)}
    for name, tensor in sent.items():
        flat_bytes(received[name]).copy_(flat_bytes(tensor))
    assert digest(sent) == digest(received)
    up.exchange(1, spare.up)
    assert torch.equal(held(up, 1), held(up, 0))
    for tensor in received.values():
        flat_bytes(tensor)[-1] ^= 1
        assert digest(sent) != digest(received), "the control did not fail"
        flat_bytes(tensor)[-1] ^= 1
    experts.read("experts", "gate_up_proj", 2, spare.up)
    assert digest(sent) == digest(received)


@pytest.mark.parametrize(
    ("form", "change", "text"),
    [
        ("int4, 64, zeros", {"zeros": None}, "experts.down_proj: expert 1 has"),
        ("fp8, rows", {"scales": torch.float16}, "experts.down_proj: expert 1 has"),
        ("mxfp8", {"scales": torch.bfloat16}, "weights of one layer have two formats, e4m3 with float"),
        (
            "int4, 32",
            {"block": 64},
            "weights of one layer have two formats, int4 with float scales per 64",
        ),
    ],
)
def test_experts_of_one_layer_that_are_stored_otherwise_are_refused(
    form: str, change: dict[str, Any], text: str
) -> None:
    checkpoint, experts = read(form)
    first = checkpoint.weights["down_proj"][1]
    if isinstance(change.get("scales"), torch.dtype):
        change = {"scales": first.scales.to(change["scales"])}
    checkpoint.changed[1] = replace(first, **change)
    with pytest.raises(QuantisedWeightError, match=text):
        experts.load("experts", "down_proj", np.array([0, 1]))
