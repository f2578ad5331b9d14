"""Which device a service computes on, what this machine's GPUs are, and the defaults that follow; decided before any weight is read.

`wideep serve` decides for all ranks of its node, a worker under a plain torchrun for itself; the processes that they
start are told. They never import torch, so a child process looks for GPUs and prints JSON. Without the driver's control
device there is nothing to look for, and no child is started.

A known lack (no GPU, an old driver, no triton) lets `--device auto` compute on the CPU and print the reason. An unexpected
error while a device is there ends the start with its cause: a service that silently computes on the CPU is no help.

torch has no public name for the driver's version, and its private one is missing in builds of 2.11 for CUDA. The version comes
from the CUDA driver API instead (cuDriverGetVersion in libcuda, which needs no initialised device).
"""

import ctypes
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dispatch.wires.availability import has_cuda_device
from server.options.reading import check_limits
from server.options.table import Options
from server.process.preflight.model import PreflightError
from server.process.preflight.processor import why_slow

LEAST_CAPABILITY = (8, 0)  # Ampere: the first with bfloat16
LEAST_TRITON = (3, 5)
# This very copy, installed or not, whatever else is called `server`.
_CHILD = (
    "import sys; sys.path.insert(0, sys.argv[1]); from server.process.preflight import device; device.main()"
)
_TIMEOUT_S = 120.0  # torch's first import on a cold disk
_DRIVER_LIBRARY = "libcuda.so.1"


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
    driver: str = ""  # newest CUDA version that the driver supports; "" if it does not say
    triton: str = ""
    nccl: str = ""
    apart: tuple[tuple[int, int], ...] = ()  # pairs of devices that do not read each other's memory


NO_FACTS = GpuFacts()


def why_not(facts: GpuFacts, *, has_device: bool) -> str:
    """Say why the service cannot compute on GPUs here; "" if it can."""
    if not has_device:
        return "this machine has no CUDA device (/dev/nvidiactl is missing)"
    if not facts.built_for:
        return f"torch {facts.torch} was built without CUDA; install a build for CUDA"
    if _is_too_old(facts.driver, facts.built_for):
        return (
            f"the NVIDIA driver supports CUDA {facts.driver} and torch {facts.torch} was built for CUDA "
            f"{facts.built_for}; install a newer driver, or a torch built for an older CUDA"
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


def look(*, has_device: Callable[[], bool] = has_cuda_device, child: str = _CHILD) -> tuple[GpuFacts, str]:
    """Return what there is, and why it cannot be used ("" if it can).

    Args:
        child: the program that looks.

    Raises:
        PreflightError: there is a device, and looking at it failed; the message names the cause.
    """
    if not has_device():
        return NO_FACTS, why_not(NO_FACTS, has_device=False)
    try:
        found = subprocess.run(
            [sys.executable, "-P", "-c", child, str(Path(__file__).parents[3])],
            capture_output=True, text=True, timeout=_TIMEOUT_S, check=True,
        )  # fmt: skip
        facts = facts_from(json.loads(found.stdout))
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
        raise PreflightError(
            f"this machine has an NVIDIA device, but looking for GPUs failed: {_last_line(error)}. Repair this, or "
            "give --device cpu to compute without GPUs"
        ) from error
    return facts, why_not(facts, has_device=True)


def facts_from(values: dict[str, Any]) -> GpuFacts:
    """Read what a child printed."""
    devices = tuple(Gpu(**{**each, "capability": tuple(each["capability"])}) for each in values["devices"])
    apart = tuple((one, other) for one, other in values["apart"])
    return GpuFacts(**{**values, "devices": devices, "apart": apart})


def driver_version(library: str = _DRIVER_LIBRARY) -> str:
    """Return the newest CUDA version that the NVIDIA driver supports; "" if there is no driver library or it does not say."""
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return ""
    newest = ctypes.c_int(0)
    if driver.cuDriverGetVersion(ctypes.byref(newest)) != 0:
        return ""
    return f"{newest.value // 1000}.{newest.value % 1000 // 10}" if newest.value else ""  # 12020 is 12.2


def collect(torch: Any, triton_version: str, driver: str) -> GpuFacts:
    """Ask torch, by its public names only.

    Args:
        torch: the module.
        triton_version: "" if it is not installed.
        driver: the newest CUDA version that the driver supports; "" if it is unknown.
    """
    facts = GpuFacts(
        torch=torch.__version__, built_for=str(torch.version.cuda or ""), triton=triton_version, driver=driver
    )
    # A torch that is too new for the driver counts devices, and raises when it is asked about one.
    if not facts.built_for or _is_too_old(facts.driver, facts.built_for):
        return facts
    devices = [_device(torch.cuda, index) for index in range(torch.cuda.device_count())]
    return replace(
        facts,
        devices=tuple(devices),
        nccl=_nccl_version(torch),
        apart=_apart(torch.cuda, len(devices)),
    )


def _nccl_version(torch: Any) -> str:
    """The version of NCCL that torch was built with; "" where it has none."""
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return ""
    return ".".join(map(str, torch.cuda.nccl.version()))


def _apart(cuda: Any, num_devices: int) -> tuple[tuple[int, int], ...]:
    pairs = ((one, other) for one in range(num_devices) for other in range(one + 1, num_devices))
    return tuple(pair for pair in pairs if not cuda.can_device_access_peer(*pair))


def _device(cuda: Any, index: int) -> Gpu:
    free_bytes, total_bytes = cuda.mem_get_info(index)
    return Gpu(
        name=cuda.get_device_name(index),
        capability=tuple(cuda.get_device_capability(index)),
        free_bytes=free_bytes,
        total_bytes=total_bytes,
    )


def _is_too_old(driver: str, built_for: str) -> bool:
    """Whether a driver of a known version cannot run what was built for a CUDA version."""
    return bool(driver) and _numbers(driver)[:1] < _numbers(built_for)[:1]


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
    own = str(error) if isinstance(error, subprocess.SubprocessError) else f"{type(error).__name__}: {error}"
    said = getattr(error, "stderr", "") or own  # bytes where the time ran out
    text = (said.decode(errors="replace") if isinstance(said, bytes) else said).strip()
    return text.splitlines()[-1] if text else type(error).__name__


CPU_RANKS, CPU_NUM_SEQS = 2, 64
DEFAULT_LIMITS = {"cpu": (CPU_NUM_SEQS, 512), "cuda": (256, 8192)}  # --max-num-seqs, --max-num-batched-tokens

Look = Callable[[], tuple[GpuFacts, str]]


@dataclass(frozen=True, kw_only=True)
class Device:
    """What a service computes on."""

    name: str  # cpu or cuda
    reason: str  # why, in words
    facts: GpuFacts  # what was found; empty on a CPU

    @property
    def in_words(self) -> str:
        """What, why, and what makes it slow."""
        slow = why_slow() if self.name == "cpu" else ""
        return f"{self.name} ({self.reason}){slow and f'; {slow}'}"

    @property
    def ranks(self) -> int:
        """Ranks of a node where the user says nothing."""
        return CPU_RANKS if self.name == "cpu" else len(self.facts.devices)

    @property
    def free_bytes(self) -> int | None:
        """Free memory of the GPU that has the least; None on a CPU."""
        return min((gpu.free_bytes for gpu in self.facts.devices), default=None)


def choose_device(wanted: str, look_for_gpus: Look = look) -> Device:
    """Choose.

    Args:
        wanted: auto, cpu or cuda.

    Raises:
        PreflightError: cuda is wanted and cannot be used, or looking for GPUs failed; the message says why.
    """
    if wanted == "cpu":
        return Device(name="cpu", reason="--device says so", facts=GpuFacts())
    facts, problem = look_for_gpus()
    if problem and wanted == "cuda":
        raise PreflightError(f"--device is cuda, which cannot be used: {problem}; or give --device cpu")
    if problem:
        return Device(name="cpu", reason=problem, facts=GpuFacts())
    names = sorted({gpu.name for gpu in facts.devices})
    found = f"{len(facts.devices)} x {' and '.join(names)}, driver for CUDA {facts.driver or 'of an unknown version'}, triton {facts.triton}"
    return Device(name="cuda", reason=found, facts=facts)


def on_device(options: Options, device: Device, *, num_local_ranks: int) -> Options:
    """Fill in what follows from the device.

    Raises:
        PreflightError: there are more ranks than GPUs.
        OptionsError: a limit that was said does not go with the other's default.
    """
    gpus = len(device.facts.devices)
    if device.name == "cuda" and num_local_ranks > gpus:
        raise PreflightError(
            f"{num_local_ranks} ranks on a node with {gpus} GPU{'' if gpus == 1 else 's'}; a rank has a GPU of its own: give "
            f"--data-parallel-size {gpus} or less, or --device cpu"
        )
    max_num_seqs, max_num_batched_tokens = DEFAULT_LIMITS[device.name]
    filled = replace(
        options,
        device=device.name,
        max_num_seqs=options.max_num_seqs or max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens or max_num_batched_tokens,
    )
    check_limits(filled.max_num_seqs, filled.max_num_batched_tokens)
    return filled


def main() -> None:
    """Print what there is as JSON."""
    import torch  # noqa: PLC0415 - only here, in the child

    try:
        triton_version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton_version = ""
    print(json.dumps(asdict(collect(torch, triton_version, driver_version()))))
