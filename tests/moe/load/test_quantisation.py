"""What a quantization_config may say: real ones are read, all others are refused by name."""

from typing import Any

import pytest

from moe.load.quantisation import Quantisation, UnservedQuantisationError, read_quantisation
from tests.support.quantise import MXFP4_CONFIG, fp8_config

DEEPSEEK_V3 = {
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
}  # fmt: skip
DEEPSEEK_V31 = {**DEEPSEEK_V3, "scale_fmt": "ue8m0"}
MINIMAX_M2 = {
    **DEEPSEEK_V3, "fmt": "float8_e4m3fn", "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
}  # fmt: skip
FINE_GRAINED = {  # as transformers' FineGrainedFP8Config writes itself
    "activation_scheme": "dynamic", "dequantize": False, "expert_dtype": "fp8", "modules_to_convert": None,
    "modules_to_not_convert": None, "quant_method": "fp8", "scale_fmt": "float", "weight_block_size": (128, 128),
}  # fmt: skip


@pytest.mark.parametrize("config", [DEEPSEEK_V3, DEEPSEEK_V31, MINIMAX_M2, FINE_GRAINED, fp8_config()])
def test_the_fp8_configurations_of_real_checkpoints_are_read(config: dict[str, Any]) -> None:
    found = read_quantisation(config)
    assert found is not None
    assert (found.method, found.block_rows, found.block) == ("fp8", 128, 128)
    assert found.plain_modules == tuple(config.get("modules_to_not_convert") or ())


def test_the_configuration_of_gpt_oss_is_read() -> None:
    patterns = tuple(MXFP4_CONFIG["modules_to_not_convert"])
    assert read_quantisation(MXFP4_CONFIG) == Quantisation(
        method="mxfp4", block_rows=1, block=32, plain_modules=patterns
    )


def test_no_configuration_is_no_quantisation() -> None:
    assert read_quantisation(None) is None
    assert read_quantisation({}) is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "awq", "bits": 4}, r"quantised with AWQ \(awq\); served are fp8 .*mxfp4"),
        ({"quant_method": "gptq"}, "GPTQ"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({"quant_method": "brand-new"}, "'brand-new'"),
        ({"bits": 4}, "'unknown'"),
        ({"quant_method": "fp8"}, r"one scale per tensor \(no weight_block_size\); served is"),
        ({**DEEPSEEK_V3, "weight_block_size": None}, "one scale per tensor"),
        ({**DEEPSEEK_V3, "activation_scheme": "static"}, "activation_scheme = 'static'; served is 'dynamic'"),
        ({**DEEPSEEK_V3, "fmt": "e5m2"}, "fmt = 'e5m2'; served is 'e4m3'"),
        ({**DEEPSEEK_V3, "expert_dtype": "fp4"}, "expert_dtype = 'fp4'"),
        ({**DEEPSEEK_V3, "modules_to_convert": ["embed_tokens"]}, "modules_to_convert"),
        ({**DEEPSEEK_V3, "weight_block_size": [1, 32]}, r"weight_block_size = \[1, 32\]"),
        ({**DEEPSEEK_V3, "weight_block_size": [128, 256]}, r"weight_block_size = \[128, 256\]"),
        ({**DEEPSEEK_V3, "weight_block_size": 128}, "weight_block_size = 128"),
    ],
    ids=str,
)
def test_what_is_not_served_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnservedQuantisationError, match=message):
        read_quantisation(config)
