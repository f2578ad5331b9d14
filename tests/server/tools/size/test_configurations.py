"""The table of published configurations: both layouts of a folder, and the result for each."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from server.front.images.seeing import IMAGE_TYPES
from server.tools.size.configurations import judge, judge_all, main
from server.tools.size.published import MODELS
from tests.support.models.families import make_config

_OSS = {**MODELS["gpt-oss-120b"], "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
_QWEN = {**MODELS["qwen3-235b"], "num_hidden_layers": 2}
_PLAIN_ATTENTION = {
    "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["*self_attn*"]}
}
_FILES: dict[str, dict[str, Any]] = {
    "openai/gpt-oss/config.json": _OSS,
    "openai/gpt-oss/generation_config.json": {"eos_token_id": 1},
    "openai/gpt-oss/tokenizer_config.json": {},
    "nvidia--Qwen3-NVFP4_config.json": _QWEN,
    "nvidia--Qwen3-NVFP4_hf_quant_config.json": _PLAIN_ATTENTION,
    "some/dense/config.json": {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2},
    "some/bnb/config.json": {**_QWEN, "quantization_config": {"quant_method": "bitsandbytes"}},
    "some/wide/config.json": {**_QWEN, "head_dim": 1024, "num_attention_heads": 2, "num_key_value_heads": 1},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configurations in both layouts."""
    root = tmp_path_factory.mktemp("configurations")
    for name, content in _FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(json.dumps(content))
    return root


def test_every_configuration_is_judged_for_both_kinds_of_devices(folder: Path) -> None:
    found, num_dense = judge_all(folder, "h200")
    by_name = {each.name: each for each in found}
    assert num_dense == 1
    assert [*by_name] == ["nvidia/Qwen3-NVFP4", "openai/gpt-oss", "some/bnb", "some/wide"]
    assert by_name["openai/gpt-oss"][1:5] == ("gpt_oss", "mxfp4", "yes", "yes")
    nvfp4, wide, bnb = (by_name[name] for name in ("nvidia/Qwen3-NVFP4", "some/wide", "some/bnb"))
    assert nvfp4.quantisation == "modelopt: nvfp4" and nvfp4.ranks == 1 and nvfp4.reason == ""
    # Embedding and head in bfloat16, and attention of two layers, which hf_quant_config.json excludes.
    attention = 4096 * (64 + 2 * 4) * 128 + 64 * 128 * 4096
    assert nvfp4.shared_gb == pytest.approx((2 * 151936 * 4096 * 2 + 2 * attention * 2) / 1e9, rel=0.01)
    assert (wide.on_cpu, wide.on_gpu, wide.ranks) == ("yes", "no", None)
    assert "heads of 1024 values; the GPU kernels support 16 to 512" in wide.reason
    assert (bnb.on_cpu, bnb.on_gpu) == ("no", "no") and bnb.reason.endswith("or outliers are separate)")


@pytest.mark.parametrize(("model_type", "served"), [("qwen3_vl_moe", "images"), ("aria", "text")])
def test_models_that_take_images_differ_from_text_decoders(
    model_type: str, served: str, tmp_path: Path
) -> None:
    make_config(model_type).save_pretrained(tmp_path)
    assert judge(model_type, tmp_path, "h200").on_cpu == served


def test_the_page_of_published_models_lists_images_for_the_types_that_take_them() -> None:
    page = (Path(__file__).parents[4] / "docs" / "published.md").read_text()
    rows = re.findall(r"^\| \S+/\S+ \| `(\S+)` \| .*?\| (yes|images|text) \|", page, re.MULTILINE)
    assert len(rows) > 90
    for model_type, served in rows:
        assert (served == "images") == (model_type in IMAGE_TYPES), model_type


def test_the_table_is_markdown_with_a_sum(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder)]) == 0
    head, _, *rows, empty, total = capsys.readouterr().out.splitlines()
    assert head.startswith("| model | type | quantisation | CPU | GPU | ") and "fewest ranks of h200" in head
    assert len(rows) == 4 and empty == "" and {row.count(" | ") for row in rows} == {8}
    assert total.startswith(
        "4 configurations of Mixture-of-Experts models: 3 are accepted on CPUs, 2 on GPUs"
    )
    assert not any("/tmp/" in row for row in rows)


def test_a_folder_without_configurations_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert "has no config.json of a Mixture-of-Experts model" in capsys.readouterr().err
