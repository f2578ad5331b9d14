"""Which model directories take images on this machine, and why others do not."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from server.front.images.seeing import ImageTokens, image_support_of

CONFIG = {"model_type": "qwen3_vl_moe", "vision_config": {}, "image_token_id": 7}


def written(directory: Path, config: Any, *, has_processor: bool = True) -> Path:
    """Write a model directory."""
    (directory / "config.json").write_text(json.dumps(config))
    if has_processor:
        (directory / "preprocessor_config.json").write_text("{}")
    return directory


@pytest.fixture
def pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Pillow seem installed."""
    own = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *more: "found" if name == "PIL" else own(name, *more)
    )


@pytest.mark.usefixtures("pillow")
def test_a_checked_family_takes_images(tmp_path: Path) -> None:
    assert image_support_of(written(tmp_path, CONFIG)) == (ImageTokens(7, 7), "", False)


@pytest.mark.usefixtures("pillow")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"vision_config": None}, "it has no image tower"),
        ({"model_type": "qwen3_moe", "vision_config": None}, "it has no image tower"),
        ({"model_type": "new_vl_moe"}, "images for models of type new_vl_moe are not supported"),
        ({"image_token_id": None}, "no image_token_id"),
    ],
)
def test_other_models_take_no_images(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    assert reason in image_support_of(written(tmp_path, {**CONFIG, **change})).why_not


@pytest.mark.usefixtures("pillow")
def test_a_token_may_have_its_older_name_and_lines(tmp_path: Path) -> None:
    config = {"model_type": "mistral3", "vision_config": {}, "image_token_index": 8}
    directory = written(tmp_path, config)
    found = image_support_of(directory, {"[IMG_BREAK]": 5, "[IMG_END]": 6})
    assert found == (ImageTokens(8, 8, after_line=(5,), after=(6,)), "", False)
    assert (
        image_support_of(directory, {"[IMG_BREAK]": 5}).why_not
        == "its tokenizer or config.json lacks [IMG_END]"
    )


@pytest.mark.usefixtures("pillow")
def test_gemma_takes_tokens_of_its_configuration_and_keeps_images_whole(tmp_path: Path) -> None:
    config = {**CONFIG, "model_type": "gemma4", "boi_token_id": 3, "eoi_token_id": 4}
    found = image_support_of(written(tmp_path, config))
    assert found == (ImageTokens(7, 7, before=(3,), after=(4,)), "", False)
    text = {"use_bidirectional_attention": "vision"}
    assert image_support_of(written(tmp_path, {**config, "text_config": text})).stays_whole
    del config["eoi_token_id"]
    assert "lacks eoi_token_id" in image_support_of(written(tmp_path, config)).why_not


@pytest.mark.usefixtures("pillow")
def test_a_token_that_the_file_leaves_out_is_the_types_own(tmp_path: Path) -> None:
    config = {"model_type": "ernie4_5_vl_moe", "vision_config": {}}
    own = transformers.AutoConfig.for_model("ernie4_5_vl_moe").image_token_id
    assert image_support_of(written(tmp_path, config)) == (ImageTokens(own, own), "", False)
    assert image_support_of(written(tmp_path, {**config, "image_token_id": 5})).tokens.row == 5
    kimi = {"model_type": "kimi_k25", "vision_config": {}}
    assert image_support_of(written(tmp_path, kimi)).tokens.row == 163605
    published = {**kimi, "media_placeholder_token_id": 163606}
    assert image_support_of(written(tmp_path, published)) == (ImageTokens(163606, 163606), "", False)


@pytest.mark.usefixtures("pillow")
def test_a_directory_without_a_processor_takes_no_images(tmp_path: Path) -> None:
    assert (
        "no preprocessor_config.json"
        in image_support_of(written(tmp_path, CONFIG, has_processor=False)).why_not
    )


@pytest.mark.usefixtures("pillow")
def test_only_a_compiled_model_with_experts_for_images_takes_none(tmp_path: Path) -> None:
    assert image_support_of(written(tmp_path, CONFIG), has_image_experts=False).why_not == ""
    directory = written(tmp_path, {**CONFIG, "model_type": "ernie4_5_vl_moe"})
    reason = "images for models of type ernie4_5_vl_moe are not supported with --enable-torch-compile"
    assert image_support_of(directory, has_image_experts=False).why_not == reason
    assert image_support_of(directory).why_not == ""


def test_without_pillow_no_model_takes_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert "Pillow is not installed" in image_support_of(written(tmp_path, CONFIG)).why_not


def test_a_directory_without_a_configuration_takes_no_images(tmp_path: Path) -> None:
    assert "cannot be read" in image_support_of(tmp_path).why_not
