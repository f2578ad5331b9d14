"""Which device a service computes on, and the defaults that follow from it; decided once, before any weight is read.

`wideep serve` decides for all ranks of its node, a worker under a plain torchrun for itself; the processes that they
start are told. Knows no torch.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from server.options.command_line import Options, check_limits
from server.process.preflight.gpu_probe import GpuFacts, look
from server.process.preflight.preflight_error import PreflightError

CPU_RANKS, CPU_NUM_SEQS = 2, 64
_LIMITS = {"cpu": (CPU_NUM_SEQS, 512), "cuda": (256, 8192)}  # --max-num-seqs, --max-num-batched-tokens

Look = Callable[[], tuple[GpuFacts, str]]


@dataclass(frozen=True, kw_only=True)
class Device:
    """What a service computes on."""

    name: str  # cpu or cuda
    reason: str  # why, in words
    facts: GpuFacts  # what was found; empty on a CPU

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
        PreflightError: cuda is wanted and cannot be had; the message says why.
    """
    if wanted == "cpu":
        return Device(name="cpu", reason="--device says so", facts=GpuFacts())
    facts, problem = look_for_gpus()
    if problem and wanted == "cuda":
        raise PreflightError(f"--device is cuda, which cannot be used: {problem}; or give --device cpu")
    if problem:
        return Device(name="cpu", reason=problem, facts=GpuFacts())
    names = sorted({gpu.name for gpu in facts.devices})
    found = (
        f"{len(facts.devices)} x {' and '.join(names)}, driver for CUDA {facts.driver}, triton {facts.triton}"
    )
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
    max_num_seqs, max_num_batched_tokens = _LIMITS[device.name]
    filled = replace(
        options,
        device=device.name,
        max_num_seqs=options.max_num_seqs or max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens or max_num_batched_tokens,
    )
    check_limits(filled.max_num_seqs, filled.max_num_batched_tokens)
    return filled
