"""A model's source, its config.json, and files of weights that are missing, truncated or of another kind."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from server.machine.lines import FORMAT_VARIABLE
from server.serve.preflight.model import check_is_moe, check_length, resolve_model
from tests.support.models.fake_checkpoint import CONFIG


def test_a_directory_is_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    assert resolve_model("m") == (tmp_path / "m").resolve()


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


def test_a_length_up_to_the_models_is_taken_and_any_where_it_says_none() -> None:
    check_length(CONFIG, 128)
    check_length({}, 10_000)


def test_making_the_demo_model_is_told_in_the_form_of_all_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def make(report: Callable[[str, float], None] | None = None) -> Path:
        assert report is not None, "without it, a bar would be drawn"
        for stage, part in (("reading", 0.0), ("reading", 0.1), ("writing", 0.96)):
            report(stage, part)
        return tmp_path

    monkeypatch.setattr("moe.demo_model.ensure_demo_model", make)
    monkeypatch.setenv(FORMAT_VARIABLE, "json")
    assert resolve_model("demo") == tmp_path
    said = [json.loads(line)["message"] for line in capsys.readouterr().err.splitlines()]
    assert said == ["Making the demo model (once): 0%, reading", "Making the demo model (once): 96%, writing"]
