"""Errors as results, for functions that ranks of a pool run."""

from collections.abc import Callable
from typing import Any


def catch(action: Callable[[], Any]) -> str:
    """Return the error's type and text, or "no error"."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - what is raised is the test's result
        return f"{type(error).__name__}: {error}"
    return "no error"
