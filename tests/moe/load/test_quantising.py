"""`--quantization`: what is served is the model whose weights the codes stand for, and nothing else is quantised."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from moe.cpu.packed_weight import PackedWeight
from moe.load.quantised_weight import QUANTISE
from tests.moe.loaded import SEQUENCES
from tests.support.engines.serving import build, teacher_forced

FAMILIES = ["qwen3_moe", "glm4_moe", "deepseek_v3", "gpt_oss"]  # gpt-oss' experts are stored transposed
TOLERANCE = 1e-4


def quantised_oracle(directory: Path, form: str) -> Any:
    """`transformers`' own model with the weights that the codes stand for."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    quantise = QUANTISE[form]
    with torch.no_grad():
        for name, module in model.named_modules():
            is_inner = isinstance(module, nn.Linear) and not name.endswith(("lm_head", "gate", "kv_b_proj"))
            if is_inner and module.in_features % 32 == 0:
                module.weight.copy_(quantise(module.weight).dequantised())
            for parameter in module.parameters(recurse=False) if name.endswith(".experts") else ():
                if parameter.dim() != 3:
                    continue
                weight = parameter.transpose(1, 2) if module.is_transposed else parameter
                made = quantise(weight).dequantised()
                parameter.copy_(made.transpose(1, 2) if module.is_transposed else made)
    return model


@pytest.mark.parametrize("form", QUANTISE)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_weights_that_codes_stand_for(
    family: str, form: str, checkpoint: Callable[[str], Path]
) -> None:
    directory = checkpoint(family)
    oracle = quantised_oracle(directory, form)
    built = build(directory, max_model_len=128, quantization=form)
    with torch.inference_mode():
        wanted = [oracle(torch.tensor([sequence])).logits[0].numpy() for sequence in SEQUENCES]
    plain = teacher_forced(build(directory, max_model_len=128), SEQUENCES)
    for found, theirs, exact in zip(teacher_forced(built, SEQUENCES), wanted, plain, strict=True):
        assert np.abs(found - theirs).max() < TOLERANCE
        assert np.abs(found - exact).max() > 10 * TOLERANCE, "nothing was quantised"


def test_what_chooses_and_what_embeds_is_left_alone(checkpoint: Callable[[str], Path]) -> None:
    built = build(checkpoint("glm4_moe"), max_model_len=128, quantization="int8")
    weights = {
        name: module.weight
        for name, module in built.model.net.named_modules()
        if isinstance(getattr(module, "weight", None), PackedWeight)
    }
    plain = {name for name, weight in weights.items() if weight.scales is None}
    assert {name.rpartition(".")[2] for name in plain} == {"embed_tokens", "gate", "lm_head"}
    assert any(name.endswith("q_proj") for name in weights.keys() - plain)
    up = built.model.layers[0].up
    assert up.block == 32 and set(up.tensors()) == {"", "scales"}
    gc.collect()


def test_experts_take_the_bytes_of_codes_and_scales(checkpoint: Callable[[str], Path]) -> None:
    plain, int8, int4 = (
        build(checkpoint("qwen3_moe"), max_model_len=128, quantization=form).model.expert_bytes
        for form in (None, "int8", "int4")
    )
    assert (int8 / plain, int4 / plain) == pytest.approx((8.5 / 32, 4.5 / 32))
