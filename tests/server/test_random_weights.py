"""--load-format dummy: a service with random weights, from a folder with config.json and a tokenizer only."""

import contextlib
import io
import json
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import DeepseekV3Config

from server.options.reading import options_from_keywords
from server.serve.preflight import random_weights
from server.serve.preflight.checkpoint import with_checkpoint
from server.serve.preflight.checks import check_files
from server.serve.preflight.equal import file_digests
from server.serve.preflight.memory import rank_bytes
from server.serve.preflight.model import PreflightError, read_headers
from server.serve.preflight.random_weights import check_random_weights
from tests.support.models.families import write_checkpoint
from tests.support.models.tiny_tokenizer import write_tokenizer
from tests.support.service.real_service import RealService, write_tiny_model

TINY_DEEPSEEK = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 512, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_routed_experts": 4, "n_group": 2,
    "topk_group": 1, "moe_intermediate_size": 128, "intermediate_size": 64, "q_lora_rank": 24, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
DRAFTS = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
PROMPT = {
    "model": "tiny",
    "prompt": "the cat",
    "max_tokens": 12,
    "temperature": 0,
    "ignore_eos": True,
    "logprobs": 0,
}


def without_weights(model: Path) -> Path:
    """Remove the weights of a model."""
    for path in model.glob("*.safetensors"):
        path.unlink()
    return model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A separate cache for the folders of links."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """List the tensors in this process, which has imported torch and transformers. A child needs six seconds for these imports.
    The services of the slow test have real children."""

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        written = io.StringIO()
        with contextlib.redirect_stdout(written):
            random_weights.main(*command[-2:])
        return SimpleNamespace(stdout=written.getvalue())

    names = {"run": run, "SubprocessError": subprocess.SubprocessError}
    monkeypatch.setattr(random_weights, "subprocess", SimpleNamespace(**names))


@pytest.mark.slow
def test_two_starts_answer_alike_without_weight_files(tmp_path: Path) -> None:
    trained = write_tiny_model(tmp_path / "trained")
    model, answers = without_weights(shutil.copytree(trained, tmp_path / "tiny")), []
    for num_ranks in (1, 2):
        flags = ("--load-format", "dummy", "-dp", str(num_ranks), "--device", "cpu")
        with RealService.serve(model, tmp_path / f"log {num_ranks}", *flags) as service:
            service.wait_ready()
            assert [each["id"] for each in service.get("/v1/models").json()["data"]] == ["tiny"]
            [choice] = service.post("/v1/completions", json=PROMPT).json()["choices"]
            answers.append((choice["text"], choice["logprobs"]["token_logprobs"]))
            refused = service.post("/start_weight_update", json={"partial": True})
            assert refused.status_code == 400 and "weights are random" in refused.text
            for path, body in (("start", {}), ("update", {"path": str(trained)}), ("finish", {})):
                name = "/update_weights" if path == "update" else f"/{path}_weight_update"
                assert service.post(name, json=body).status_code == 200
            [choice] = service.post("/v1/completions", json=PROMPT).json()["choices"]
            assert choice["logprobs"]["token_logprobs"] != answers[-1][1], (
                "the update replaces all random weights"
            )
            assert service.output().count("the weights are random, so answers have no meaning") == 1
    assert answers[0] == answers[1] and len(answers[0][1]) == 12


@pytest.mark.usefixtures("here")
def test_the_tensors_are_those_that_ranks_draw_in_the_published_type(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    stored = sum(tensor.numel() for tensor in load_file(model / "model.safetensors").values())
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    options = options_from_keywords(str(model), {"load_format": "dummy", "device": "cpu"}, {})
    made = with_checkpoint(options)
    assert with_checkpoint(made) == made, "ranks resolve the same folder again"
    assert not list(Path(made.model).glob("*.safetensors")), "weights of the folder are not used"
    assert {tensor["dtype"] for tensor in read_headers(Path(made.model)).values()} == {"BF16"}
    assert rank_bytes(made, 1) == 2 * stored


@pytest.mark.usefixtures("here")
def test_drafts_and_quantised_weights_are_counted(tmp_path: Path) -> None:
    model = write_tokenizer(tmp_path / "tiny")
    DeepseekV3Config(num_nextn_predict_layers=1, **TINY_DEEPSEEK).save_pretrained(model)
    config = json.loads((model / "config.json").read_text())
    plain = with_checkpoint(options_from_keywords(str(model), {"load_format": "dummy"}, {}))
    drafting = with_checkpoint(options_from_keywords(str(model), {"load_format": "dummy", **DRAFTS}, {}))
    (model / "config.json").write_text(json.dumps({**config, "quantization_config": FP8}))
    quantised = with_checkpoint(options_from_keywords(str(model), {"load_format": "dummy"}, {}))
    sizes = [check_files(each, [1]) for each in (plain, drafting, quantised)]
    assert [each.expert_layers for each in sizes] == [1, 2, 1]
    assert sizes[1].experts == 2 * sizes[0].experts and sizes[2].experts < sizes[0].experts / 3.9
    assert "random_tensors.json" in file_digests(Path(plain.model)), (
        "KV tiers differ from those of a checkpoint"
    )


@pytest.mark.usefixtures("here")
def test_drafts_need_layers_in_the_configuration(tmp_path: Path) -> None:
    model = without_weights(write_tiny_model(tmp_path / "tiny"))
    with pytest.raises(
        PreflightError, match=r"--load-format dummy: .*tiny has no layers for multi-token prediction"
    ):
        with_checkpoint(options_from_keywords(str(model), {"load_format": "dummy", **DRAFTS}, {}))


@pytest.mark.usefixtures("here")
def test_formats_that_are_not_drawn_are_refused(tmp_path: Path) -> None:
    model = without_weights(write_tiny_model(tmp_path / "tiny"))
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(PreflightError, match="--load-format dummy: random weights can be mxfp4 or fp8"):
        with_checkpoint(options_from_keywords(str(model), {"load_format": "dummy"}, {}))


def test_image_towers_are_refused_with_the_remedy(tmp_path: Path) -> None:
    model = tmp_path / "seeing"
    write_checkpoint("qwen3_vl_moe", model)
    (model / "preprocessor_config.json").write_text("{}")
    options = options_from_keywords(str(model), {"load_format": "dummy"}, {})
    with pytest.raises(PreflightError, match=r"no weights for the image tower .* add --language-model-only"):
        check_random_weights(options)
    check_random_weights(
        options_from_keywords(str(model), {"load_format": "dummy", "language_model_only": True}, {})
    )
