"""Every version of transformers works, or is refused with one message before torch is imported."""

import importlib
import importlib.metadata
import tomllib
from pathlib import Path

import pytest
import transformers
from packaging.requirements import Requirement

from server.cli import main
from server.machine import versions
from server.machine.versions import LOWEST, NEWEST_TESTED, check_transformers, why_unfit

ROOT = Path(__file__).parents[3]
REMEDY = "versions 5.21 to 5.24 are tested: pip install 'transformers>=5.21,<5.25'"


def install(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: version if name == "transformers" else found(name)
    )


@pytest.mark.parametrize("version", ["5.21.0", "5.22.2", "5.23.0", "5.24.0", "5.24.0.dev0"])
def test_tested_versions_are_taken_without_a_word(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(version, monkeypatch)
    assert check_transformers() is None


@pytest.mark.parametrize("version", ["5.25.0", "5.100.1", "5.25.0rc1"])
def test_newer_versions_are_taken_with_a_note(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(version, monkeypatch)
    assert check_transformers() == (
        f"transformers {version} is newer than 5.24, the newest version that WideEP is tested with"
    )


def test_a_start_says_once_that_the_version_is_newer_than_the_tested_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install("5.25.0", monkeypatch)
    monkeypatch.setattr("server.serve.serve.run_serve", lambda _options: 0)
    assert main(["serve"]) == 0
    assert "transformers 5.25.0 is newer than 5.24" in capsys.readouterr().err
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert main(["serve"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.crossed("version", "command", every=2)
@pytest.mark.parametrize("command", ["serve", "worker", "models", "size", "simulate"])
@pytest.mark.parametrize("version", ["4.57.6", "5.20.2", "6.0.0", "main"])
def test_a_version_outside_the_range_ends_every_command_that_needs_it(
    version: str, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(version, monkeypatch)
    words = {"size": ["nosuch"], "simulate": ["nosuch.csv", "--model", "nosuch"]}.get(command, [])
    assert main([command, *words]) == 1
    assert capsys.readouterr().err == f"wideep {command}: transformers {version} is not supported; {REMEDY}\n"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(versions.VersionError, match="transformers is not installed; versions "):
        check_transformers()


def test_a_name_that_is_gone_is_an_error_with_the_version_and_the_tested_range(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install("5.30.1", monkeypatch)

    def run_models(_args: object) -> int:
        from transformers.masking_utils import renamed  # type: ignore[attr-defined] # noqa: F401, PLC0415

        return 0

    monkeypatch.setattr("server.clients.models.run_models", run_models)
    assert main(["models"]) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(
        "wideep models: transformers 5.30.1 lacks a name that WideEP needs (cannot import name 'renamed'"
    )
    assert said.endswith(REMEDY)


def test_a_cache_of_another_name_is_such_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    names = importlib.import_module("attention.transformers_names")
    monkeypatch.setattr(names, "_NAMES", ("memory",))
    with pytest.raises(ImportError, match="create_causal_mask takes no memory, but config") as caught:
        names._cache_name()
    said = why_unfit(caught.value)
    assert said is not None and REMEDY in said
    assert why_unfit(ImportError("no torch", name="torch")) is None


def test_the_range_is_that_of_the_distribution_and_the_pin_lies_in_it() -> None:
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    specifier = next(
        Requirement(line).specifier for line in needed if Requirement(line).name == "transformers"
    )
    lowest = ".".join(map(str, LOWEST))
    assert specifier == Requirement(f"transformers>={lowest},<{versions.END[0]}").specifier
    major, minor = (int(part) for part in transformers.__version__.split(".")[:2])
    assert (major, minor) >= LOWEST, "the tests run with a version that users may not have"
    assert (major, minor) <= NEWEST_TESTED, "update NEWEST_TESTED"
