"""What config.json says of a model."""

from pathlib import Path

import pytest

from server.process.preflight.model import check_is_moe, check_length, read_config
from tests.support.fake_checkpoint import CONFIG
from tests.support.starts import complaint_of


def test_a_directory_without_config_is_no_model(tmp_path: Path) -> None:
    assert "it has no config.json" in complaint_of(lambda: read_config(tmp_path))


@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
def test_a_broken_config_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    assert "config.json is not" in complaint_of(lambda: read_config(tmp_path))


@pytest.mark.parametrize(
    "config",
    [
        {"num_local_experts": 8},
        {"num_experts": 64},
        {"n_routed_experts": 256},
        {"moe_num_experts": 64},
        {"num_experts": [4, 8]},
        {"text_config": {"num_experts": 128}},
    ],
)
def test_the_families_ways_to_count_experts_are_known(config: dict[str, object]) -> None:
    check_is_moe(config, Path("m"))


@pytest.mark.parametrize("config", [{}, {"num_experts": None}, {"num_experts": 0}, {"num_local_experts": 1}])
def test_a_dense_model_is_refused(config: dict[str, object]) -> None:
    complaint = complaint_of(lambda: check_is_moe({**config, "model_type": "llama"}, Path("m")))
    assert "m is not a Mixture-of-Experts model" in complaint
    assert "'llama'" in complaint


def test_a_length_over_the_models_is_refused() -> None:
    check_length(CONFIG, 128)
    check_length({}, 10_000)
    assert complaint_of(lambda: check_length(CONFIG, 129)) == (
        "--max-model-len is 129; the model takes at most 128 tokens"
    )
