"""The names of the ways ranks can exchange tokens, and what each needs of this machine.

Knows no torch, so that a supervisor that never loads it can refuse a backend before any process starts or any weight
is read. It looks for a device and for packages; it does not open them.
"""

import importlib.util
from pathlib import Path

BACKENDS = ("auto", "local", "gloo", "shm", "nccl", "nvshmem", "deep_ep")
_CUDA_DEVICE = Path("/dev/nvidiactl")  # the NVIDIA driver's control device; a container with a GPU has it too
_PACKAGES = {  # name: the package that is imported, and how to get it
    "nvshmem": ("nvshmem", "nvshmem4py-cu13, in the extra wideep[gpu]"),
    "deep_ep": ("deep_ep", "DeepEP, built from its repository"),
}
ON_DEVICE = ("nccl", "nvshmem", "deep_ep")


def has_cuda_device() -> bool:
    """Whether the NVIDIA driver offers a device to this process."""
    return _CUDA_DEVICE.exists()


def why_unavailable(name: str) -> str | None:
    """Say what this machine lacks for `name`; None if nothing that can be seen from here."""
    missing = []
    if name in ON_DEVICE and not has_cuda_device():
        missing.append(f"this machine has no CUDA device ({_CUDA_DEVICE} is missing)")
    if name in _PACKAGES:
        module, source = _PACKAGES[name]
        if importlib.util.find_spec(module) is None:
            missing.append(f"the package {module} is not installed ({source})")
    return " and ".join(missing) or None


def why_not_served_by(name: str, num_ranks: int, *, on_gpus: bool = False) -> str | None:
    """Say why the service cannot exchange tokens through `name` here, and what to use; None if it can try.

    Args:
        name: one of BACKENDS.
        num_ranks: of the service.
        on_gpus: whether it computes on GPUs.
    """
    if name == "local" and num_ranks > 1:
        return f"--all2all-backend is local with {num_ranks} ranks; it serves one: use auto, gloo or shm"
    if name not in ON_DEVICE:
        return None
    problem = why_unavailable(name)
    if problem is None and not on_gpus:
        problem = "the service computes on the CPU"
    if problem is None:
        return None
    return f"--all2all-backend is {name}, which cannot be used: {problem}; use auto, gloo or shm"
