"""Where a model comes from."""

from pathlib import Path

import pytest

import moe.demo_model
from server.process.preflight.model import resolve_model
from tests.support.starts import complaint_of


def test_a_hub_that_cannot_be_reached_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub  # noqa: PLC0415 - half a second, for one test

    def fail(*_: object, **__: object) -> str:
        raise OSError("no route to the hub\nsecond line")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.chdir(tmp_path)
    complaint = complaint_of(lambda: resolve_model("org/name"))
    assert (
        "'org/name' is neither a directory here nor to be had from the hub (OSError: no route to the hub)"
        in complaint
    )


def test_a_demo_model_that_cannot_be_made_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Path:
        raise moe.demo_model.DemoModelError("the disk is full")

    monkeypatch.setattr(moe.demo_model, "ensure_demo_model", fail)
    assert complaint_of(lambda: resolve_model("demo")) == "the demo model could not be made: the disk is full"


def test_a_directory_is_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    assert resolve_model("m") == (tmp_path / "m").resolve()
