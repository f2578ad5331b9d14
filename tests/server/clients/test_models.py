"""`wideep models` shows which types take images."""

import argparse

import pytest

from moe.survey import SupportStatus, Verdict
from server.clients import models


def test_a_type_with_a_tower_shows_whether_it_takes_images(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verdicts = [
        Verdict("qwen3_vl_moe", SupportStatus.TEXT_PART, ""),
        Verdict("aria", SupportStatus.TEXT_PART, ""),
        Verdict("mixtral", SupportStatus.SERVED, ""),
    ]
    monkeypatch.setattr(models, "moe_types", lambda: [each.model_type for each in verdicts])
    monkeypatch.setattr(models, "survey", lambda _wanted: iter(verdicts))
    assert models.run_models(argparse.Namespace(types=[])) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()[:3]]
    assert lines == [
        f"qwen3_vl_moe {SupportStatus.TEXT_PART} and images",
        f"aria {SupportStatus.TEXT_PART} no images: this type was not checked with images",
        f"mixtral {SupportStatus.SERVED}",
    ]
