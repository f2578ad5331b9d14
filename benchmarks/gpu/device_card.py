"""The machine of a day: the benchmarks' environment card, the driver's facts about the GPU, and the installed packages.

The facts come from `nvidia-smi`, so that the process with the results never opens the device.
"""

import importlib.metadata
import subprocess
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from benchmarks.card import environment_card
from benchmarks.gpu.results import Setting

# Imports of the parts. Units that need a missing package report it as well.
NEEDED = ("torch", "triton", "transformers", "safetensors", "tokenizers", "numba", "numpy")
_QUERY = (
    "name",
    "driver_version",
    "memory.total",
    "clocks.sm",
    "clocks.mem",
    "power.limit",
    "temperature.gpu",
)
_TIMEOUT_S = 20.0


class NoDeviceError(RuntimeError):
    """The driver finds no GPU."""


def day_card(setting: Setting, source: str) -> dict[str, Any]:
    """Return the machine, the device, the versions, the commit and the sources' digest.

    Raises:
        NoDeviceError: A GPU is required but missing.
    """
    card = environment_card()
    missing = [name for name in NEEDED if find_spec(name) is None]
    return {
        **_device_facts(setting, card),
        "triton": _version("triton"),
        **card,
        "source": source,
        "missing packages": ", ".join(missing) or "none",
    }


def _device_facts(setting: Setting, card: dict[str, Any]) -> dict[str, str]:
    if setting.is_interpreted:
        return {"device": f"Triton's interpreter on {card['cpu']} (times mean nothing)"}
    try:
        facts = _ask(_QUERY)
    except (
        OSError,
        subprocess.SubprocessError,
        ValueError,
    ):  # a driver may lack a fact, or take too long for all facts
        facts = _name_alone()
    return {"device": facts.pop("name"), **facts}


def _name_alone() -> dict[str, str]:
    try:
        return _ask(_QUERY[:1])
    except (OSError, subprocess.SubprocessError) as error:
        raise NoDeviceError(
            f"no GPU found ({error}); run on a machine with one, or use --device interpreter --tiny, which runs "
            "the whole day on CPU tensors"
        ) from error


def _ask(query: Sequence[str]) -> dict[str, str]:
    command = ["nvidia-smi", f"--query-gpu={','.join(query)}", "--format=csv,noheader", "--id=0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    values = [value.strip() for value in done.stdout.strip().split(",", len(query) - 1)]
    return dict(zip(query, values, strict=True))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
