"""What GPUs this machine offers to us, and why it offers none: found by a process of its own, before any weight is read.

`wideep serve` and the workers never import torch, so a child looks and prints JSON. Without the driver's control device
there is nothing to look for, and no child is started.
"""

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from dispatch.availability import has_cuda_device

LEAST_CAPABILITY = (8, 0)  # Ampere: the first with bfloat16
LEAST_TRITON = (3, 5)
_TIMEOUT_S = 120.0  # torch's first import on a cold disk


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One device."""

    name: str
    capability: tuple[int, int]
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """What the child found; versions as their owners write them, "" for none."""

    devices: tuple[Gpu, ...] = ()
    torch: str = ""
    built_for: str = ""  # CUDA version of the torch build
    driver: str = ""  # newest CUDA version that the driver supports
    triton: str = ""


NO_FACTS = GpuFacts()


def why_not(facts: GpuFacts, *, has_device: bool) -> str:
    """Say why the service cannot compute on GPUs here; "" if it can."""
    if not has_device:
        return "this machine has no CUDA device (/dev/nvidiactl is missing)"
    if not facts.built_for:
        return f"torch {facts.torch} was built without CUDA; install a build for CUDA"
    if _numbers(facts.driver)[:1] < _numbers(facts.built_for)[:1]:
        return (
            f"the NVIDIA driver supports CUDA {facts.driver or 'of no known version'} and torch {facts.torch} was built "
            f"for CUDA {facts.built_for}; install a newer driver, or a torch built for an older CUDA"
        )
    if not facts.devices:
        return "torch finds no GPU that this process may use; see nvidia-smi and CUDA_VISIBLE_DEVICES"
    for index, gpu in enumerate(facts.devices):
        if tuple(gpu.capability) < LEAST_CAPABILITY:
            return (
                f"GPU {index} ({gpu.name}) has compute capability {_dotted(gpu.capability)}; "
                f"{_dotted(LEAST_CAPABILITY)} or higher is needed: hide it with CUDA_VISIBLE_DEVICES"
            )
    if not facts.triton:
        return "the package triton is not installed; install wideep[gpu]"
    if _numbers(facts.triton)[:2] < LEAST_TRITON:
        return f"triton is {facts.triton}; {_dotted(LEAST_TRITON)} or later is needed: install wideep[gpu]"
    return ""


def look(*, has_device: Callable[[], bool] = has_cuda_device) -> tuple[GpuFacts, str]:
    """Return what there is, and why it cannot be used ("" if it can)."""
    if not has_device():
        return NO_FACTS, why_not(NO_FACTS, has_device=False)
    try:
        found = subprocess.run(
            [sys.executable, "-P", "-m", "server.process.preflight.gpu_probe"],
            capture_output=True, text=True, timeout=_TIMEOUT_S, check=True,
        )  # fmt: skip
        facts = facts_from(json.loads(found.stdout))
    except (subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
        return NO_FACTS, f"looking for GPUs failed: {_last_line(error)}"
    return facts, why_not(facts, has_device=True)


def facts_from(values: dict[str, Any]) -> GpuFacts:
    """Read what a child printed."""
    devices = tuple(Gpu(**{**each, "capability": tuple(each["capability"])}) for each in values["devices"])
    return GpuFacts(**{**values, "devices": devices})


def collect(torch: Any, triton_version: str) -> GpuFacts:
    """Ask torch.

    Args:
        torch: the module.
        triton_version: "" if it is not installed.
    """
    built_for = str(torch.version.cuda or "")
    if not built_for:
        return GpuFacts(torch=torch.__version__, triton=triton_version)
    newest = int(torch._C._cuda_getDriverVersion())  # 12020 is 12.2, 0 no driver
    devices = [_device(torch.cuda, index) for index in range(torch.cuda.device_count())]
    return GpuFacts(
        devices=tuple(devices),
        torch=torch.__version__,
        built_for=built_for,
        driver=f"{newest // 1000}.{newest % 1000 // 10}" if newest else "",
        triton=triton_version,
    )


def _device(cuda: Any, index: int) -> Gpu:
    free_bytes, total_bytes = cuda.mem_get_info(index)
    return Gpu(
        name=cuda.get_device_name(index),
        capability=tuple(cuda.get_device_capability(index)),
        free_bytes=free_bytes,
        total_bytes=total_bytes,
    )


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version."""
    numbers = []
    for part in version.split("."):
        digits = part[: next((at for at, letter in enumerate(part) if not letter.isdigit()), len(part))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _last_line(error: Exception) -> str:
    text = (getattr(error, "stderr", "") or str(error)).strip()
    return text.splitlines()[-1] if text else type(error).__name__


def main() -> None:
    """Print what there is as JSON."""
    import torch  # noqa: PLC0415 - only here, in the child

    try:
        triton_version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton_version = ""
    print(json.dumps(asdict(collect(torch, triton_version))))


if __name__ == "__main__":
    main()
