"""The text decoder of models that also process images is read and served, with any layout of experts."""

from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import modeling_utils

from moe.families import UnsupportedModelError, build_on_meta
from moe.load.checkpoint import Checkpoint, CheckpointError
from moe.model import Skeleton
from moe.rehearsal.rehearse import rehearse
from moe.text_part import left_out
from tests.support.engines.serving import build, teacher_forced
from tests.support.models.families import make_config, write_checkpoint
from tests.support.models.family_sweep import prompts

WEIGHTS = "model.safetensors"


def test_nothing_but_the_decoder_and_the_head_is_read(tmp_path: Path) -> None:
    write_checkpoint("glm4v_moe", tmp_path)
    gone = left_out(Skeleton(tmp_path).model)
    assert gone and all(".visual." in name for name in gone)
    checkpoint = Checkpoint(tmp_path)
    of_text = [name for name in checkpoint.names() if ".visual." not in name]
    assert len(of_text) < len(checkpoint.names())
    built = build(tmp_path, max_model_len=64)
    wanted = sum(4 * int(np.prod(checkpoint.shape(name))) for name in of_text)
    assert built.model.checkpoint.bytes_read == wanted


def test_nothing_is_said_of_parts_that_are_left_out(tmp_path: Path) -> None:
    write_checkpoint("mistral_large4", tmp_path)
    with mock.patch.object(modeling_utils.logger, "warning") as warned:
        build(tmp_path, max_model_len=64)
    assert not [call for call in warned.call_args_list if "vision_config" in str(call)]


def test_experts_may_lie_the_other_way_round(tmp_path: Path) -> None:
    """As in published checkpoints of Qwen3-VL: [experts, inputs, outputs]."""
    model, sequences = write_checkpoint("qwen3_vl_moe", tmp_path), prompts(9, 4)
    tensors = load_file(tmp_path / WEIGHTS)
    for name, tensor in tensors.items():
        if (
            name.endswith(("gate_up_proj", "down_proj"))
            and tensor.dim() == 3
            and tensor.shape[1] != tensor.shape[2]
        ):
            tensors[name] = tensor.transpose(1, 2).contiguous()
    save_file(tensors, tmp_path / WEIGHTS, metadata={"format": "pt"})
    found = teacher_forced(build(tmp_path, max_model_len=64), sequences)
    with torch.inference_mode():
        for ours, sequence in zip(found, sequences, strict=True):
            assert np.abs(ours - model(torch.tensor([sequence])).logits[0].numpy()).max() < 1e-4


def test_a_tensor_of_no_part_is_unexpected_still(tmp_path: Path) -> None:
    write_checkpoint("aria", tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    save_file({**tensors, "model.ears.weight": torch.zeros(2)}, tmp_path / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"unexpected: model\.ears\.weight"):
        build(tmp_path, max_model_len=64)


def test_experts_for_images_are_read_from_the_list_of_all_experts(tmp_path: Path) -> None:
    """As published: experts for text and for images in one list, those for text first."""
    write_checkpoint("ernie4_5_vl_moe", tmp_path)
    checkpoint = Checkpoint(tmp_path)
    last = "model.layers.2.mlp.experts.15.up_proj.weight"
    assert checkpoint.shape(last) == (16, 64) and last.replace(".15.", ".16.") not in checkpoint.names()
    built = build(tmp_path, max_model_len=64)
    assert built.model.skeleton.num_experts == 8 and len(built.model.skeleton.experts) == 4
    per_expert = 3 * (32 + 16) * 64 * 4  # one for text and one for images
    assert built.model.expert_bytes == 2 * 8 * per_expert


def test_experts_that_no_text_reaches_are_left_out_by_the_rehearsal() -> None:
    """As on GPUs, which take no images."""
    model = build_on_meta(make_config("ernie4_5_vl_moe"))
    rehearse(model)
    assert [name for name, _ in model.named_modules() if name.endswith(".experts")] == [
        f"model.language_model.layers.{layer}.mlp.text_moe.experts" for layer in (1, 2)
    ]


@pytest.mark.parametrize(
    ("gone", "problem"),
    [
        (".experts.3.up_proj", "missing: .* of expert 3"),
        (".experts.7.down_proj", "missing: .* of expert 7"),
        (".experts.9.down_proj", "missing: .*vision_moe.* of expert 1"),
    ],
)
def test_an_expert_that_is_not_there_is_missing(gone: str, problem: str, tmp_path: Path) -> None:
    write_checkpoint("ernie4_5_vl_moe", tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    kept = {name: tensor for name, tensor in tensors.items() if gone not in name}
    save_file(kept, tmp_path / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=problem):
        build(tmp_path, max_model_len=64)


def test_experts_behind_those_for_images_are_unexpected(tmp_path: Path) -> None:
    write_checkpoint("ernie4_5_vl_moe", tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    name = "model.layers.2.mlp.experts.16.up_proj.weight"
    save_file({**tensors, name: torch.zeros(16, 64)}, tmp_path / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"unexpected: .*experts\.16\.up_proj"):
        build(tmp_path, max_model_len=64)


def test_layers_that_share_keys_and_values_read_those_of_the_layer_that_caches_them(tmp_path: Path) -> None:
    oracle, sequences = write_checkpoint("gemma4", tmp_path), prompts(40)
    built = build(tmp_path, max_model_len=64)
    shapes = built.model.skeleton.cache_shapes
    assert [(shape.source, shape.window) for shape in shapes[3:]] == [(2, 8), (1, 0)]
    assert [shape.token_bytes > 0 for shape in shapes] == [True, True, True, False, False]
    with torch.inference_mode():
        wanted = oracle(torch.tensor(sequences)).logits[0].numpy()
    assert np.abs(teacher_forced(built, sequences)[0] - wanted).max() < 1e-4
    shapes[3] = replace(shapes[3], source=0)
    assert np.abs(teacher_forced(built, sequences)[0] - wanted).max() > 1e-2, "the control did not fail"


def test_a_wrapper_without_experts_is_none_of_ours(tmp_path: Path) -> None:
    config = make_config("gemma4", enable_moe_block=False)
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="it is not a Mixture-of-Experts model"):
        Skeleton(tmp_path)
