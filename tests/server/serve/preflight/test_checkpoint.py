"""A model's folder with replaced files: config.json, generation_config.json, the tokenizer."""

import json
from pathlib import Path
from typing import Any

import pytest

from server.front.tokenizer import Tokenizer
from server.options.reading import options_from_keywords
from server.options.table import Options
from server.serve.preflight.checkpoint import merged, with_checkpoint
from server.serve.preflight.model import PreflightError, read_config
from tests.support.models.tiny_tokenizer import write_tokenizer


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's folder, with a separate cache for copies of it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = write_tokenizer(tmp_path / "model")
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


def found(model: Path, **keywords: Any) -> Path:
    return Path(with_checkpoint(options_from_keywords(str(model), keywords, {})).model)


def test_a_model_whose_files_are_its_own_is_served_from_its_folder(model: Path) -> None:
    assert found(model) == model


def test_overrides_reach_config_json_and_nothing_else(model: Path) -> None:
    made = found(model, hf_overrides={"max_position_embeddings": 64, "rope_scaling": {"rope_type": "yarn"}})
    assert made != model
    own = read_config(model)
    assert read_config(made) == {**own, "max_position_embeddings": 64, "rope_scaling": {"rope_type": "yarn"}}
    assert (made / "model.safetensors").read_bytes() == b"weights"
    assert (made / "generation_config.json").read_text() == json.dumps(
        {"eos_token_id": [1], "top_k": 7}, indent=1
    )
    assert own["max_position_embeddings"] == 512, "the model's own file is unchanged"


def test_inner_configs_are_merged_and_all_else_is_replaced() -> None:
    config = {"text_config": {"a": 1, "rope": {"x": 1}}, "rope": {"x": 1}, "b": 1}
    changed = merged(config, {"text_config": {"rope": {"y": 2}}, "rope": {"y": 2}, "c": 3})
    assert changed == {"text_config": {"a": 1, "rope": {"y": 2}}, "rope": {"y": 2}, "b": 1, "c": 3}


def test_the_same_wish_is_the_same_folder(model: Path) -> None:
    first = found(model, hf_overrides={"a": 1})
    assert found(model, hf_overrides={"a": 1}) == first != found(model, hf_overrides={"a": 2})
    assert len(list(first.parent.iterdir())) == 2, "no partial copy is left"


@pytest.mark.parametrize(
    ("keywords", "written"),
    [
        ({"generation_config": "vllm"}, None),
        ({"override_generation_config": {"top_k": 1}}, {"eos_token_id": [1], "top_k": 1}),
        ({"generation_config": "vllm", "override_generation_config": {"top_p": 0.5}}, {"top_p": 0.5}),
    ],
)
def test_generation_config_is_whose_it_is_said_to_be(
    model: Path, keywords: dict[str, Any], written: dict[str, Any] | None
) -> None:
    file = found(model, **keywords) / "generation_config.json"
    assert (json.loads(file.read_text()) if file.exists() else None) == written


def test_generation_config_may_be_another_folder_s(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"temperature": 0.5}')
    made = found(model, generation_config=str(other))
    assert json.loads((made / "generation_config.json").read_text()) == {"temperature": 0.5}


def test_a_tokenizer_of_another_folder_comes_with_its_template(model: Path, tmp_path: Path) -> None:
    (model / "chat_template.jinja").write_text("of the model")
    other = write_tokenizer(
        tmp_path / "other", special_tokens=["<extra>"], chat_template="{{ messages[0].role }}"
    )
    made = found(model, tokenizer=str(other))
    tokenizer = Tokenizer(str(made))
    assert "<extra>" in tokenizer.special_ids and tokenizer.template.text == "{{ messages[0].role }}"
    assert (made / "model.safetensors").exists() and read_config(made) == read_config(model)


@pytest.mark.parametrize(
    ("keywords", "complaint"),
    [
        ({"tokenizer": "/no/such/folder"}, "the tokenizer path /no/such/folder does not exist"),
        ({"tokenizer": "/proc/self"}, "--tokenizer is /proc/self, which has no tokenizer"),
        (
            {"quantization": "fp8"},
            r"--quantization is fp8, but the weights of .* are not quantised\. Remove the flag",
        ),
    ],
)
def test_what_cannot_be_had_is_named(model: Path, keywords: dict[str, Any], complaint: str) -> None:
    with pytest.raises(PreflightError, match=complaint):
        found(model, **keywords)


def test_a_model_without_a_tokenizer_is_rejected_before_a_rank_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        PreflightError, match=r"has no tokenizer .* name a directory that has them with --tokenizer"
    ):
        found(tmp_path)


@pytest.mark.parametrize(("asked", "method"), [("fp8", "fp8"), ("awq_marlin", "awq")])
def test_the_format_that_a_checkpoint_has_changes_nothing(model: Path, asked: str, method: str) -> None:
    stored: dict[str, dict[str, Any]] = {
        "fp8": {"weight_block_size": [128, 128]},
        "awq": {"bits": 4, "group_size": 128, "zero_point": True},
    }
    described = {"quant_method": method, **stored[method]}
    (model / "config.json").write_text(json.dumps({**read_config(model), "quantization_config": described}))
    options: Options = options_from_keywords(str(model), {"quantization": asked}, {})
    assert with_checkpoint(options) == options.with_engine(quantization=None)
    other = options_from_keywords(str(model), {"quantization": "gptq"}, {})
    with pytest.raises(PreflightError, match=f"are quantised as {method}"):
        with_checkpoint(other)


def test_the_hub_is_asked_for_the_revision_and_the_folder(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def snapshot_download(name: str, **how: Any) -> str:
        asked.append({"name": name, **how})
        return str(model)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    options = options_from_keywords(
        "org/model", {"revision": "v2", "download_dir": str(tmp_path / "hub")}, {}
    )
    assert with_checkpoint(options).model == str(model)
    assert [(each["name"], each["revision"], each["cache_dir"]) for each in asked] == [
        ("org/model", "v2", str(tmp_path / "hub"))
    ]
