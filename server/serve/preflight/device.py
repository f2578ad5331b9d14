"""Choose the device, describe this machine's GPUs, and derive the defaults, before any weight is read.

`wideep serve` decides for all ranks of its node; under plain torchrun, each worker decides for itself. Both pass the choice to
their child processes. They never import torch, so a child process looks for GPUs and prints JSON. If the driver's control
device is missing, no child is started.

If a requirement is missing (a GPU, a recent driver, triton), `--device auto` uses the CPU and prints the reason. If a
device exists and the check fails unexpectedly, the start fails with the cause: users would not notice a fallback to the CPU.

torch has no public name for the driver's version, and its private one is missing in builds of 2.11 for CUDA. The version comes
from the CUDA driver API instead (cuDriverGetVersion in libcuda, which needs no initialised device).
"""

import ctypes
import json
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dispatch.wires.availability import has_cuda_device
from server.machine.versions import version_of
from server.options.reading import check_limits
from server.options.table import Options
from server.serve.preflight.model import PreflightError

LEAST_CAPABILITY = (8, 0)  # Ampere, the first with bfloat16
LEAST_TRITON = (3, 6)
# Import this copy of the code, installed or not, even if another package is named `server`.
_CHILD = (
    "import sys; sys.path.insert(0, sys.argv[1]); from server.serve.preflight import device; device.main()"
)
_TIMEOUT_S = 120.0  # torch's first import on a cold disk
_DRIVER_LIBRARY = "libcuda.so.1"
_CPU_FACTS = Path("/proc/cpuinfo")
_NEEDED = {
    "avx2": "AVX2",
    "fma": "FMA",
}  # flags in /proc/cpuinfo of instructions for fast kernels, and their names
# Measured without both, for float32 at 1 and at 128 rows, compiled for such a machine.
_COST = "kernels take 4 to 50 times as long (3 to 5 times with --quantization int8)"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU."""

    name: str
    capability: tuple[int, int]
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """The child's findings. Versions are as their owners write them, or "" if missing."""

    devices: tuple[Gpu, ...] = ()
    torch: str = ""
    built_for: str = ""  # CUDA version of the torch build
    driver: str = ""  # newest CUDA version that the driver supports; "" if unknown
    triton: str = ""
    nccl: str = ""
    apart: tuple[tuple[int, int], ...] = ()  # pairs of devices without access to each other's memory


NO_FACTS = GpuFacts()


def why_not(facts: GpuFacts, *, has_device: bool) -> str:
    """Return why the service cannot use GPUs here, or "" if it can."""
    if not has_device:
        return "this machine has no CUDA device (/dev/nvidiactl is missing)"
    if not facts.built_for:
        return f"torch {facts.torch} was built without CUDA; install a build for CUDA"
    if _is_too_old(facts.driver, facts.built_for):
        return (
            f"the NVIDIA driver supports CUDA {facts.driver}, but torch {facts.torch} was built for CUDA "
            f"{facts.built_for}; install a newer driver, or a torch build for an older CUDA"
        )
    if not facts.devices:
        return "torch finds no usable GPU; check nvidia-smi and CUDA_VISIBLE_DEVICES"
    for index, gpu in enumerate(facts.devices):
        if tuple(gpu.capability) < LEAST_CAPABILITY:
            return (
                f"GPU {index} ({gpu.name}) has compute capability {_dotted(gpu.capability)}; "
                f"{_dotted(LEAST_CAPABILITY)} or higher is required; hide this GPU with CUDA_VISIBLE_DEVICES"
            )
    if not facts.triton:
        return "the package triton is not installed; install wideep[gpu]"
    if _numbers(facts.triton)[:2] < LEAST_TRITON:
        return f"triton is {facts.triton}; {_dotted(LEAST_TRITON)} or later is required: install wideep[gpu]"
    return ""


def look(*, has_device: Callable[[], bool] = has_cuda_device, child: str = _CHILD) -> tuple[GpuFacts, str]:
    """Return the GPU facts and the reason why the GPUs cannot be used ("" if they can).

    Args:
        child: Program of the child process that examines the GPUs.

    Raises:
        PreflightError: A device exists, but the check failed; the message names the cause.
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
            f"this machine has an NVIDIA device, but the GPU check failed: {_last_line(error)}. Fix this, or "
            "use --device cpu"
        ) from error
    return facts, why_not(facts, has_device=True)


def facts_from(values: dict[str, Any]) -> GpuFacts:
    """Parse the child's output."""
    devices = tuple(Gpu(**{**each, "capability": tuple(each["capability"])}) for each in values["devices"])
    apart = tuple((one, other) for one, other in values["apart"])
    return GpuFacts(**{**values, "devices": devices, "apart": apart})


def driver_version(library: str = _DRIVER_LIBRARY) -> str:
    """Return the newest CUDA version that the NVIDIA driver supports, or "" if it is unknown."""
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return ""
    newest = ctypes.c_int(0)
    if driver.cuDriverGetVersion(ctypes.byref(newest)) != 0:
        return ""
    return f"{newest.value // 1000}.{newest.value % 1000 // 10}" if newest.value else ""  # 12020 is 12.2


def collect(torch: Any, triton_version: str, driver: str) -> GpuFacts:
    """Return the facts that torch reports through its public names.

    Args:
        torch: The module.
        triton_version: Version of triton; "" if it is not installed.
        driver: Newest CUDA version that the driver supports; "" if unknown.
    """
    facts = GpuFacts(
        torch=torch.__version__, built_for=str(torch.version.cuda or ""), triton=triton_version, driver=driver
    )
    # If torch is too new for the driver, it counts devices but raises on queries about them.
    if not facts.built_for or _is_too_old(facts.driver, facts.built_for):
        return facts
    devices = [_device(torch.cuda, index) for index in range(torch.cuda.device_count())]
    return replace(
        facts, devices=tuple(devices), nccl=_nccl_version(torch), apart=_apart(torch.cuda, len(devices))
    )


def _nccl_version(torch: Any) -> str:
    """Return the version of NCCL that torch was built with, or "" without NCCL."""
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
    """Return whether a driver of known version is too old for a build for this CUDA version."""
    return bool(driver) and _numbers(driver)[:1] < _numbers(built_for)[:1]


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version."""
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
    said = getattr(error, "stderr", "") or own  # bytes after a timeout
    text = (said.decode(errors="replace") if isinstance(said, bytes) else said).strip()
    return text.splitlines()[-1] if text else type(error).__name__


def why_slow(machine: str | None = None, facts: str | None = None) -> str:
    """Return the processor's missing instructions and their cost, or "" if none is known to be missing.

    Args:
        machine: Name as from `platform.machine`. facts: Content of /proc/cpuinfo.
    """
    if (machine or platform.machine()) not in ("x86_64", "AMD64"):
        return ""
    if facts is None:
        facts = _CPU_FACTS.read_text() if _CPU_FACTS.exists() else ""
    found = re.search(r"^flags\s*:(.*)$", facts, re.MULTILINE)
    flags = set(found[1].split()) if found else set(_NEEDED)
    missing = [name for flag, name in _NEEDED.items() if flag not in flags]
    if not missing:
        return ""
    return f"this processor has no {' and no '.join(missing)}; {_COST}"


CPU_RANKS, CPU_NUM_SEQS = 2, 64
DEFAULT_LIMITS = {"cpu": (CPU_NUM_SEQS, 512), "cuda": (256, 8192)}  # --max-num-seqs, --max-num-batched-tokens

Look = Callable[[], tuple[GpuFacts, str]]


@dataclass(frozen=True, kw_only=True)
class ChosenDevice:
    """The device of a service, and why it was chosen."""

    name: str  # cpu or cuda
    reason: str  # for messages
    facts: GpuFacts  # empty on a CPU

    @property
    def in_words(self) -> str:
        """The device and the reason as text, with a note on a slow processor."""
        slow = why_slow() if self.name == "cpu" else ""
        return f"{self.name} ({self.reason}){slow and f'; {slow}'}"

    @property
    def ranks(self) -> int:
        """Default number of ranks of a node."""
        return CPU_RANKS if self.name == "cpu" else len(self.facts.devices)

    @property
    def free_bytes(self) -> int | None:
        """Smallest free memory of all GPUs; None on a CPU."""
        return min((gpu.free_bytes for gpu in self.facts.devices), default=None)


def choose_device(wanted: str, look_for_gpus: Look = look) -> ChosenDevice:
    """Choose the device.

    Args:
        wanted: auto, cpu or cuda.

    Raises:
        PreflightError: cuda is wanted but unusable, or the GPU check failed; the message gives the reason.
    """
    if wanted == "cpu":
        return ChosenDevice(name="cpu", reason="set by --device", facts=GpuFacts())
    facts, problem = look_for_gpus()
    if problem and wanted == "cuda":
        raise PreflightError(f"--device is cuda, but it is unusable: {problem}; or use --device cpu")
    if problem:
        return ChosenDevice(name="cpu", reason=problem, facts=GpuFacts())
    names = sorted({gpu.name for gpu in facts.devices})
    found = f"{len(facts.devices)} x {' and '.join(names)}, driver for CUDA {facts.driver or 'of an unknown version'}, triton {facts.triton}"
    return ChosenDevice(name="cuda", reason=found, facts=facts)


def on_device(options: Options, device: ChosenDevice, *, num_local_ranks: int) -> Options:
    """Fill in the defaults that depend on the device.

    Raises:
        PreflightError: There are more ranks than GPUs.
        OptionsError: A given limit conflicts with the other's default.
    """
    gpus = len(device.facts.devices)
    if device.name == "cuda" and num_local_ranks > gpus:
        raise PreflightError(
            f"{num_local_ranks} ranks on a node with {gpus} GPU{'' if gpus == 1 else 's'}, but each rank needs its own GPU; use "
            f"--data-parallel-size {gpus} or less, or --device cpu"
        )
    return with_limits(replace(options, device=device.name))


def with_limits(options: Options) -> Options:
    """Fill in the limits that are not given with the defaults of the chosen device.

    Raises:
        OptionsError: A given limit conflicts with the other's default.
    """
    seqs, batched = DEFAULT_LIMITS[options.device]
    seqs = options.engine.max_num_seqs or seqs
    batched = options.engine.max_num_batched_tokens or batched
    check_limits(seqs, batched)
    return options.with_engine(max_num_seqs=seqs, max_num_batched_tokens=batched)


def main() -> None:
    """Print the GPU facts as JSON."""
    import torch  # noqa: PLC0415 - needed in the child process only

    print(json.dumps(asdict(collect(torch, version_of("triton"), driver_version()))))
