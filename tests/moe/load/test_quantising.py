"""`--quantization` serves the model with the weights that the codes encode. Nothing else is quantised."""

import gc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from moe.cpu.weights.packed_weight import PackedWeight
from moe.load.quantised_weight import QUANTISE, int8_weight
from tests.moe.loaded import SEQUENCES
from tests.support.engines.serving import build, teacher_forced

FAMILIES = ["qwen3_moe", "glm4_moe", "deepseek_v3", "gpt_oss"]  # gpt-oss' experts are stored transposed
# A sum in another order may occasionally round a row's value to the next of its 255 codes.
MEDIAN_TOLERANCE = 1e-4


class QuantisedRows(TorchFunctionMode):
    """Quantises the rows multiplied with some weights, as the kernels do: 32 inputs per scale."""

    PRODUCTS = (nn.functional.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__)

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()
        self._storages = {weight.untyped_storage().data_ptr() for weight in weights}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in self.PRODUCTS and args[1].untyped_storage().data_ptr() in self._storages:
            blocks = args[0].unflatten(-1, (-1, 32))
            highest = blocks.abs().amax(-1, keepdim=True)
            codes = (blocks * (127 / highest)).round().nan_to_num()
            args = ((codes * (highest / 127)).flatten(-2), *args[1:])
        return function(*args, **(kwargs or {}))


def quantised_oracle(directory: Path, form: str) -> tuple[Any, QuantisedRows]:
    """Return `transformers`' own model with the decoded weights, and the mode that quantises the rows they multiply."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.set_experts_implementation("eager")
    made: list[Tensor] = []
    with torch.no_grad():
        for name, module in model.named_modules():
            is_linear = isinstance(module, nn.Linear) and not name.endswith(("gate", "kv_b_proj"))
            if is_linear and module.in_features % 32 == 0:
                quantise = int8_weight if name == "lm_head" else QUANTISE[form]
                module.weight = nn.Parameter(quantise(module.weight).dequantised())
                made.append(module.weight)
            for parameter in module.parameters(recurse=False) if name.endswith(".experts") else ():
                if parameter.dim() != 3:
                    continue
                weight = parameter.transpose(1, 2) if module.is_transposed else parameter
                meant = QUANTISE[form](weight).dequantised()
                parameter.copy_(meant.transpose(1, 2) if module.is_transposed else meant)
                made.append(parameter)
    return model, QuantisedRows(made)


@pytest.mark.crossed("family", "form", every=2)
@pytest.mark.parametrize("form", QUANTISE)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_quantised_weights_and_rows(
    family: str, form: str, checkpoint: Callable[[str], Path]
) -> None:
    directory = checkpoint(family)
    oracle, quantised_rows = quantised_oracle(directory, form)
    built = build(directory, max_model_len=128, quantization=form)
    with torch.inference_mode(), quantised_rows:
        wanted = [oracle(torch.tensor([sequence])).logits[0].numpy() for sequence in SEQUENCES]
    plain = teacher_forced(build(directory, max_model_len=128), SEQUENCES)
    for found, theirs, exact in zip(teacher_forced(built, SEQUENCES), wanted, plain, strict=True):
        apart, quantised = (np.abs(found - other) for other in (theirs, exact))
        print(
            family, form, np.median(apart), apart.mean(), apart.max(), np.median(quantised), quantised.max()
        )
        assert np.median(apart) < MEDIAN_TOLERANCE < np.median(quantised) / 10, "nothing was quantised"
        assert apart.mean() < quantised.mean() / 4


def test_what_chooses_and_what_embeds_is_left_alone(checkpoint: Callable[[str], Path]) -> None:
    built = build(checkpoint("glm4_moe"), max_model_len=128, quantization="int8")
    weights = {
        name: module.weight
        for name, module in built.model.net.named_modules()
        if isinstance(getattr(module, "weight", None), PackedWeight)
    }
    plain = {name for name, weight in weights.items() if weight.scales is None}
    assert {name.rpartition(".")[2] for name in plain} == {"embed_tokens", "gate"}
    assert any(name.endswith("q_proj") for name in weights.keys() - plain)
    up = built.model.layers[0].up
    assert up.quantised is not None and up.quantised.block == 32 and set(up.tensors()) == {"", "scales"}
    gc.collect()


def test_experts_take_the_bytes_of_codes_and_scales(checkpoint: Callable[[str], Path]) -> None:
    plain, int8, int4 = (
        build(checkpoint("qwen3_moe"), max_model_len=128, quantization=form).model.expert_bytes
        for form in (None, "int8", "int4")
    )
    assert (int8 / plain, int4 / plain) == pytest.approx((8.5 / 32, 4.5 / 32))
