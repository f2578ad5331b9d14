"""Turn what the user calls the model into a directory: the demo model, a directory, or a name on the hub.

The imports inside functions are for start-up time: none is needed when MODEL is a directory, and the demo
model's maker may import torch.
"""
# ruff: noqa: PLC0415

import re
from pathlib import Path

from server.options.command_line import DEMO_MODEL
from server.process.preflight.preflight_error import PreflightError

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def resolve_model(name: str) -> Path:
    """Return the directory of a model, making or fetching it first where needed.

    Raises:
        PreflightError: there is no such model, or it cannot be had from here.
    """
    if name == DEMO_MODEL:
        return _make_demo_model()
    path = Path(name).expanduser()
    if path.exists():
        return path.resolve()
    if name.startswith((".", "/", "~")) or not _HUB_NAME.fullmatch(name):
        raise PreflightError(f"the model path {name} does not exist")
    return _download(name)


def _make_demo_model() -> Path:
    from moe.demo_model import DemoModelError, ensure_demo_model

    try:
        return ensure_demo_model()
    except DemoModelError as error:
        raise PreflightError(f"the demo model could not be made: {error}") from error


def _download(name: str) -> Path:
    import httpx
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except (OSError, ValueError, httpx.HTTPError) as error:  # the hub's own errors are one of these
        reason = str(error).strip().partition("\n")[0]
        raise PreflightError(
            f"the model {name!r} is neither a directory here nor to be had from the hub ({type(error).__name__}: "
            f"{reason}); give a directory with config.json and .safetensors files, or 'demo'"
        ) from error
