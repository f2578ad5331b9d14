"""Any MoE model of transformers is served correctly, or rejected with a message before weights are read."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from attention.recurrences.cpu import RECURRENCES, delta_rule
from attention.recurrences.mixers import DeltaRule
from kvcache.paged_cache import LayerShape
from moe.families import UnsupportedModelError, build_on_meta, import_model
from moe.load.checkpoint import Checkpoint
from moe.model import Skeleton
from moe.rehearsal.notes import Notes, Sight
from moe.rehearsal.stand_ins import sight_of
from scheduler.policy.config import ConfigError
from tests.support.engines.serving import build, misroute, teacher_forced
from tests.support.models.families import RECURRENT_FAMILIES, make_model, write_checkpoint
from tests.support.models.family_sweep import prompts, tiny_config, write_tiny, write_tiny_wrapped

TOLERANCE = 1e-4
# Families in addition to those of the parity test, each with its special feature.
SERVED = {
    "afmoe": "gated attention, sliding windows, the mask given by keyword",
    "aria_text": "a shared expert and weights without a norm",
    "axk1": "MLA with another norm",
    "beam": "grouped routing, rotary embeddings in some layers only, capped logits",
    "cohere2_moe": "parallel blocks, scaled logits",
    "exaone_moe": "hybrid windows",
    "flex_olmo": "norms after sublayers",
    "flint": "sinks and windows",
    "glm4_moe_lite": "MLA",
    "granitemoe_swa": "sinks and windows with multipliers",
    "granitemoeshared": "a shared expert and multipliers",
    "hunyuan_v1_moe": "QK norm after rotary",
    "hy_v3": "router bias",
    "kolibri1": "windows",
    "laguna": "a gate per head",
    "llama4_text": "experts with scaled inputs, two for each row",
    "mellum": "windows",
    "mimo_v2_flash": "value heads of another size, sinks, windows",
    "phimoe": "sparsemixer routing, layer norms, a window that only the mask shows",
    "solar_open": "grouped routing",
}
# Slow tests: other fast tests have the same features (parity, drafts, or a family above).
SEEN_ELSEWHERE = {
    "axk1", "flint", "glm4_moe_lite", "granitemoe_swa", "granitemoeshared", "hy_v3", "kolibri1", "mellum", "solar_open",
}  # fmt: skip
FIELDS: dict[str, dict[str, Any]] = {"beam": {"mlp_layer_types": ["dense", "sparse", "sparse"]}}
# Wrapped decoders in addition to those of the parity test.
WRAPPED: dict[str, dict[str, Any]] = {
    "deepseek_ocr2": {
        "n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 32,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "nemo_speechlm": RECURRENT_FAMILIES["nemotron_h"],
}  # fmt: skip
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "inkling_text": ({}, "layer 0 keeps several states of one kind; only one is supported"),
    "qwen3_next": (
        {"layer_types": ["linear_attention"] * 3},
        "no layer whose attention caches keys and values",
    ),
    "deepseek_v4": (
        {},
        "needs 'layers' in its cache: it keeps more than keys and values per token and the states",
    ),
    "minimax_m3_vl_text": (
        {"layer_types": ["full_attention", "full_attention", "minimax_m3_sparse"]},
        "needs 'layers' in its cache: it keeps more than",
    ),
    "llama": ({}, "llama has no experts.*not a Mixture-of-Experts model"),
    "qwen3": ({}, "qwen3 has no experts"),
    "jetmoe": ({}, "jetmoe has no experts that can be served"),
    "gemma2": ({}, "gemma2 has no experts"),
    "t5": ({}, "t5 is an encoder-decoder"),
    "switch_transformers": ({}, "switch_transformers is an encoder-decoder"),
    "bert": ({"num_hidden_layers": 1}, "bert"),
    "vit": ({}, "vit has no causal language model in transformers"),
}
# Real fields with wrong or unsupported values, in a supported family.
MIXTRAL_CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown model type": ({"model_type": "nosuch"}, "transformers cannot use .*config.json: .*`nosuch`"),
    "no model type": ({"model_type": None}, "transformers cannot use .*config.json: "),
    "remote code": (
        {"model_type": "nosuch", "auto_map": {"AutoConfig": "config.X"}},
        "code that comes with a checkpoint is not run",
    ),
    "a field of the wrong type": ({"hidden_size": "big"}, "transformers cannot use .*hidden_size"),
    "unknown activation": (
        {"hidden_act": "nosuch"},
        "mixtral cannot be built from its config.json: KeyError",
    ),
    "a list without an entry for each layer": (
        {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 2},
        r"transformers cannot use .*config.json: .*`num_hidden_layers` \(3\) must be equal to the number of `layer_types` \(2\)",
    ),
    "no vocabulary": ({"vocab_size": 0}, "mixtral cannot be built from its config.json: "),
    "a padding token outside the vocabulary": (
        {"pad_token_id": 1000},
        "mixtral cannot be built from its config.json: AssertionError: Padding_idx",
    ),
    "a type of weights that is a list": ({"dtype": []}, "transformers cannot use .*config.json: IndexError"),
    "quantised": (
        {"quantization_config": {"quant_method": "gptq"}},
        r"mixtral: the checkpoint is quantised as gptq with bits = None",
    ),
}


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a tensor is read or a checkpoint is opened."""

    def opened(_self: Checkpoint, directory: Path) -> None:
        raise AssertionError(f"{directory} was opened")

    monkeypatch.setattr(Checkpoint, "__init__", opened)


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(name, marks=pytest.mark.slow if name in SEEN_ELSEWHERE else ()) for name in SERVED],
)
def test_further_families_give_transformers_logits(model_type: str, tmp_path: Path) -> None:
    check_logits(write_tiny(model_type, tmp_path, **FIELDS.get(model_type, {})), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", WRAPPED)
def test_further_decoders_inside_of_others_do_too(model_type: str, tmp_path: Path) -> None:
    check_logits(write_tiny_wrapped(model_type, tmp_path, **WRAPPED[model_type]), tmp_path)


def check_logits(oracle: Any, tmp_path: Path) -> None:
    sequences = prompts(21, 3, 40)
    built = build(tmp_path, max_model_len=64)
    with torch.inference_mode():
        theirs = [oracle(torch.tensor([sequence])).logits[0].numpy() for sequence in sequences]
    for ours, wanted in zip(teacher_forced(built, sequences), theirs, strict=True):
        assert np.std(wanted) > 500 * TOLERANCE, "logits are too similar to detect errors"
        assert np.abs(ours - wanted).max() < TOLERANCE
    misroute(built.model)
    wrong = teacher_forced(built, sequences)
    assert np.abs(wrong[0] - theirs[0]).max() > 10 * TOLERANCE, "the control did not fail"


def test_dynamic_rotary_embeddings_are_those_of_the_positions_that_are_served(tmp_path: Path) -> None:
    parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    oracle = make_model("mixtral", max_position_embeddings=64, rope_parameters=parameters)
    oracle.save_pretrained(tmp_path)
    sequences = prompts(64, 3, 40)
    with torch.inference_mode():
        theirs = [oracle(torch.tensor([sequence])).logits[0].numpy() for sequence in sequences]
    for ours, wanted in zip(teacher_forced(build(tmp_path), sequences), theirs, strict=True):
        assert np.abs(ours - wanted).max() < TOLERANCE
    with pytest.raises(ConfigError, match="max-model-len is 65; this model has 64 positions"):
        build(tmp_path, max_model_len=65)


@pytest.mark.parametrize("model_type", REFUSED)
@pytest.mark.usefixtures("unread")
def test_what_cannot_be_served_is_refused_by_a_sentence(model_type: str, tmp_path: Path) -> None:
    fields, sentence = REFUSED[model_type]
    tiny_config(model_type, **fields).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=sentence) as caught:
        build(tmp_path, max_model_len=64)
    assert "\n" not in str(caught.value) and str(caught.value).startswith(model_type)


@pytest.mark.parametrize("change", MIXTRAL_CHANGES)
@pytest.mark.usefixtures("unread")
def test_configurations_that_do_not_work_are_refused_by_a_sentence(change: str, tmp_path: Path) -> None:
    fields, sentence = MIXTRAL_CHANGES[change]
    config = {**tiny_config("mixtral").to_dict(), **fields}
    config = {name: value for name, value in config.items() if name != "model_type" or value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=sentence):
        build(tmp_path, max_model_len=64)


@pytest.mark.parametrize(
    ("model_type", "fields", "sentence"),
    [
        (
            "glm_moe_dsa", {"indexer_types": ["full"]},  # as in nvidia/GLM-5.3-NVFP4, which had 74 for 78 layers
            r"glm_moe_dsa: indexer_types in config.json lists 1 of 3 layers",
        ),
        ("glm_moe_dsa", {"num_attention_heads": 0}, "glm_moe_dsa .*ZeroDivisionError"),
        ("nemotron_h", {"mamba_num_heads": 0}, "nemotron_h .*ZeroDivisionError"),
        ("glm_moe_dsa", {"indexer_types": []}, "glm_moe_dsa cannot be built from its config.json: IndexError"),
    ],
    ids=["a short list", "no heads", "no heads of a recurrence", "an empty list"],
)  # fmt: skip
@pytest.mark.usefixtures("unread")
def test_values_that_other_families_trip_over_are_refused_by_a_sentence(
    model_type: str, fields: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    config = {**make_model(model_type).config.to_dict(), **fields}
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    with pytest.raises(UnsupportedModelError, match=sentence) as caught:
        build(tmp_path, max_model_len=64)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("unread")
def test_a_directory_without_a_readable_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"is not a model directory: it has no config.json"):
        Skeleton(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnsupportedModelError, match=r"transformers cannot use .*not a valid JSON file"):
        Skeleton(tmp_path)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_latents_are_attended_to_however_many_rows_the_batch_has(family: str, tmp_path: Path) -> None:
    """There are as many cached latents as padded rows, with real ones past the last real row."""
    oracle = write_checkpoint(family, tmp_path)
    built = build(tmp_path, max_model_len=64)
    for lengths in ((15, 15), (31, 31, 15), (14, 14, 14), (1,) * 12):
        sequences = prompts(*lengths)
        with torch.inference_mode():
            theirs = [oracle(torch.tensor([sequence])).logits[0].numpy() for sequence in sequences]
        for ours, wanted in zip(teacher_forced(built, sequences), theirs, strict=True):
            assert np.abs(ours - wanted).max() < TOLERANCE, lengths


def test_windows_are_what_masks_show() -> None:
    assert sight_of(causal_mask_function, 0) == Sight(0)
    for window in (1, 2, 8, 4096, 131072):
        assert sight_of(sliding_window_causal_mask_function(window), window) == Sight(window)
        assert sight_of(causal_mask_function, window) == Sight(0)
    none = torch.zeros(1, dtype=torch.int64)
    for chunk in (2, 8, 8192):
        assert sight_of(chunked_causal_mask_function(chunk, none), chunk) == Sight(0, chunk)
        assert sight_of(chunked_causal_mask_function(chunk, none.to("meta")), chunk) == Sight(0, chunk)
    unknown: list[tuple[Callable[..., Any], int]] = [
        (chunked_causal_mask_function(8, none + 1), 8),
        (chunked_causal_mask_function(8, none), 16),
        (sliding_window_bidirectional_mask_function(8), 8),
        (sliding_window_causal_mask_function(8), 9),
        (sliding_window_causal_mask_function(9), 8),
        (lambda _batch, _head, query, _key: query >= 0, 0),
        (lambda _batch, _head, query, key: (key <= query) & (key != 1), 0),
    ]
    for function, local_size in unknown:
        assert sight_of(function, local_size) == Sight(None)


EVERYTHING = Sight(0)


def attending(options: dict[str, Any], mask: Sight | None = EVERYTHING, layer: int = 0) -> Notes:
    """Return notes of one layer's cache and attention."""
    notes = Notes("some_moe")
    heads, kv_heads = torch.zeros(1, 4, 8, 16), torch.zeros(1, 2, 8, 16)
    notes.update(kv_heads, kv_heads, 0)
    module = torch.nn.Module()
    module.layer_idx = layer  # type: ignore[assignment]
    notes.attend(module, heads, kv_heads, kv_heads.clone(), mask, options)
    return notes


def test_options_without_effect_are_let_through() -> None:
    harmless = {"dropout": 0.0, "is_causal": None, "position_ids": torch.zeros(1, 8), "block_indices": None}
    shapes = attending({**harmless, "s_aux": torch.zeros(4), "sliding_window": 8}, Sight(8)).shapes(1)
    assert [(s.num_kv_heads, s.key_dim, s.value_dim, s.latent, s.window) for s in shapes] == [
        (2, 16, 16, False, 8)
    ]


@pytest.mark.parametrize(
    ("options", "mask", "layer", "sentence"),
    [
        ({"position_bias": torch.zeros(1), "softcap": 50.0}, EVERYTHING, 0, "needs position_bias, softcap"),
        ({"is_causal": False}, EVERYTHING, 0, "needs is_causal=False"),
        (
            {"indices": torch.zeros(1, 8, 2)},
            EVERYTHING,
            0,
            "picks tokens by an index that is not over the latents",
        ),
        ({"s_aux": torch.zeros(2)}, EVERYTHING, 0, r"sinks of shape \[2\], not one per head"),
        ({}, Sight(None), 0, "a mask that is neither causal, nor a sliding window"),
        ({}, None, 0, "builds its own mask"),
        ({}, EVERYTHING, 1, "reads keys and values that no layer caches"),
    ],
)
def test_what_would_change_results_is_refused_by_name(
    options: dict[str, Any], mask: Sight | None, layer: int, sentence: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=f"some_moe: the attention of layer {layer} .*{sentence}"):
        attending(options, mask, layer)


def test_layers_without_attention_are_refused_unless_they_are_experts_only() -> None:
    with pytest.raises(UnsupportedModelError, match=r"layers \[1, 2\] have no attention that caches"):
        attending({}).shapes(3)
    with pytest.raises(UnsupportedModelError, match=r"layers \[2\] have no attention that caches"):
        attending({}).shapes(3, row_by_row=[1])
    assert attending({}).shapes(2, row_by_row=[1])[1] == LayerShape()


def test_lightning_attention_of_another_kind_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint("minimax", tmp_path)
    monkeypatch.setitem(RECURRENCES, DeltaRule, lambda call, rule: delta_rule(call, rule) + 0.01)
    with pytest.raises(
        UnsupportedModelError, match="layer 0 computes an unknown form of lightning attention"
    ):
        build(tmp_path, max_model_len=64)


def test_a_state_that_is_computed_elsewhere_is_refused() -> None:
    state = torch.zeros(1, 4, 8, 8)
    for ask in (
        lambda notes: notes.get_recurrent_state(1),
        lambda notes: notes.update_recurrent_state(state, 1),
        lambda notes: notes.update_conv_state(state, 1),
    ):
        notes = attending({})
        with pytest.raises(
            UnsupportedModelError, match="layer 1 keeps a state that it computes with its own code"
        ):
            ask(notes)
            notes.shapes(2)
    with pytest.raises(
        UnsupportedModelError, match="layer 1 keeps a state that it convolves with its own code"
    ):
        attending({}).convolve(1, state[0], 4)
    with pytest.raises(UnsupportedModelError, match="keeps several states of one kind"):
        attending({}).get_conv_state(1, state_idx=1)


def test_what_a_family_keeps_in_float32_stays_so_whatever_it_computes_in() -> None:
    config = make_model("deepseek_v3").config
    model = build_on_meta(config, torch.bfloat16)
    wide = {name for name, tensor in model.state_dict().items() if tensor.dtype == torch.float32}
    kept = tuple(model._keep_in_fp32_modules_strict)  # since transformers 5.24 also the weights of routers
    assert wide and wide == {name for name in model.state_dict() if name.endswith(kept)}
    assert {tensor.dtype for name, tensor in model.named_parameters() if name not in wide} == {torch.bfloat16}


@pytest.mark.slow  # a process that has imported no model
def test_importing_a_model_leaves_nothing_to_import_for_its_build(tmp_path: Path) -> None:
    write_checkpoint("qwen3_moe", tmp_path)
    program = (
        "import sys; from pathlib import Path; from moe.families import build_on_meta, import_model, read_config; "
        f"path = Path({str(tmp_path)!r}); import_model(path); before = set(sys.modules); "
        "build_on_meta(read_config(path)); print(sorted(set(sys.modules) - before))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ended.stdout == "[]\n", ended.stderr


def test_a_folder_without_a_model_is_refused_by_its_import(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="has no config"):
        import_model(tmp_path)
