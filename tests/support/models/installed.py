"""Compare the installed `transformers` with the pinned one: some model types exist only in newer versions."""

from pathlib import Path

import pytest
import transformers
from packaging.requirements import Requirement
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

_PINS = Path(__file__).parents[3] / "requirements-cpu.txt"
SINCE_5_24 = ("sarvam_moe", "sarvam_mla", "lara_mini", "hy_v4_vl")
"""Tested types that the pinned version lacks."""


def pinned(package: str) -> str:
    """Return the version of a package in requirements-cpu.txt."""
    lines = (line.partition("#")[0].strip() for line in _PINS.read_text().splitlines())
    pins = [Requirement(line) for line in lines if line]
    return next(next(iter(pin.specifier)).version for pin in pins if pin.name == package)


def is_pinned() -> bool:
    """Return whether the installed `transformers` is the pinned one, which has all tested types except `SINCE_5_24`."""
    return str(transformers.__version__) == pinned("transformers")


def require_type(model_type: str) -> None:
    """Skip the test if the installed `transformers` lacks a type. The pinned version must have it."""
    if model_type in CONFIG_MAPPING_NAMES:
        return
    assert model_type in SINCE_5_24 or not is_pinned(), f"the pinned transformers lacks {model_type}"
    pytest.skip(f"transformers {transformers.__version__} has no type {model_type}")
