"""Random weights in place of a model's files (--load-format dummy): the names and shapes of their tensors, for checks before a start.

Preflight reads the headers of weight files. Without files, a child process builds the model without memory, as a rank does,
and writes the same facts to a file, which `model.read_headers` reads. So memory, adapters and drafts are checked as for a
checkpoint. The processes of a service that outlive its start never import torch, hence the child.
"""
# ruff: noqa: PLC0415 - only the child imports torch

import json
import subprocess
import sys
from pathlib import Path

from server.machine.lines import say
from server.options.table import Options
from server.serve.preflight.images import takes_images
from server.serve.preflight.model import RANDOM_TENSORS, PreflightError

# Import this copy of the code, as in `device`.
_CHILD = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from server.serve.preflight import random_weights; random_weights.main(*sys.argv[2:])"
)
_TIMEOUT_S = 300.0  # torch's first import on a cold disk, and a model of many layers


def write_tensors(folder: Path, *, shown: Path, has_mtp: bool) -> None:
    """Write the types and shapes of a model's random weights into its folder.

    Args:
        folder: Folder with config.json.
        shown: Name of the folder in messages.
        has_mtp: Whether the layers for multi-token prediction are read.

    Raises:
        PreflightError: The model cannot have random weights; the message gives the reason.
    """
    try:
        found = subprocess.run(
            [sys.executable, "-P", "-c", _CHILD, str(Path(__file__).parents[3]), str(folder), "mtp" if has_mtp else ""],
            capture_output=True, text=True, timeout=_TIMEOUT_S, check=True,
        )  # fmt: skip
        answer = json.loads(found.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        lines = (getattr(error, "stderr", "") or "").strip().splitlines()
        raise PreflightError(
            f"--load-format dummy: the tensors of {shown} cannot be listed: {lines[-1] if lines else error}"
        ) from error
    if problem := answer.get("problem"):
        raise PreflightError(f"--load-format dummy: {problem.replace(str(folder), str(shown))}")
    (folder / RANDOM_TENSORS).write_text(json.dumps(answer["tensors"]), encoding="utf-8")


def check_random_weights(options: Options) -> None:
    """Refuse features that need a checkpoint's own weights. The model has passed `with_checkpoint`.

    Raises:
        PreflightError: The message names the remedy.
    """
    if options.engine.load_format == "dummy" and takes_images(options):
        raise PreflightError(
            "--load-format dummy has no weights for the image tower of this model; add --language-model-only, which refuses images"
        )


def warn_of_random_weights(options: Options) -> None:
    """Log that answers have no meaning, if the weights are random."""
    if options.engine.load_format == "dummy":
        say(
            "wideep: --load-format dummy: the weights are random, so answers have no meaning; measure speed and memory only",
            error=True,
            level="warning",
        )


def main(folder: str, mtp: str) -> None:
    """Print the tensors, or why the model cannot have random weights, as JSON."""
    from moe.families import UnsupportedModelError
    from moe.load.quantisation import UnservedQuantisationError
    from moe.model import Skeleton
    from scheduler.policy.config import EngineConfig
    from scheduler.step.parts import open_checkpoint

    config = EngineConfig(directory=Path(folder), kv_cache_bytes=0, load_format="dummy")
    try:
        checkpoint = open_checkpoint(config, Skeleton(config.directory, has_mtp=bool(mtp)))
    except (UnsupportedModelError, UnservedQuantisationError) as error:
        print(json.dumps({"problem": str(error)}))
        return
    tensors = {
        name: {"dtype": checkpoint.dtype(name), "shape": checkpoint.shape(name)}
        for name in checkpoint.names()
    }
    print(json.dumps({"tensors": tensors}))
