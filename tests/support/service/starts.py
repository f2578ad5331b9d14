"""Starts that must be rejected, for tests of the checks before a start."""

from collections.abc import Callable
from pathlib import Path

import pytest

from server.cli import build_parser
from server.options.reading import options_from
from server.options.table import Options
from server.serve.preflight.model import PreflightError


def options_for(model: Path, *flags: str) -> Options:
    """Return the options of `wideep serve MODEL` with these flags."""
    return options_from(build_parser().parse_args(["serve", str(model), "--port=0", *flags]), {})


def complaint_of(call: Callable[[], object]) -> str:
    """Return the refusal message of a call as one line."""
    with pytest.raises(PreflightError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)
