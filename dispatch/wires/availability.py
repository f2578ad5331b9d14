"""Names of the ways to exchange tokens between ranks, and their requirements on this machine.

Does not import torch, so that a supervisor without torch can refuse a backend before any process starts or any weight
is read. It looks for a device and for packages, but does not open them.
"""

import importlib.util
from pathlib import Path

BACKENDS = ("auto", "local", "gloo", "shm", "nccl", "nvshmem", "deep_ep")
_CUDA_DEVICE = Path("/dev/nvidiactl")  # the NVIDIA driver's control device; containers with a GPU have it too
_PACKAGES = {  # name: the module to import, and the package that contains it
    "nvshmem": ("nvshmem", "nvshmem4py-cu13, in the extra wideep[gpu]"),
    "deep_ep": ("deep_ep", "DeepEP, built from its repository"),
}
ON_DEVICE = ("nccl", "nvshmem", "deep_ep")


def has_cuda_device() -> bool:
    """Return whether the NVIDIA driver offers a device to this process."""
    return _CUDA_DEVICE.exists()


def why_unavailable(name: str) -> str | None:
    """Return what this machine lacks for `name`, or None if nothing is missing as far as this module can see."""
    missing = []
    if name in ON_DEVICE and not has_cuda_device():
        missing.append(f"this machine has no CUDA device ({_CUDA_DEVICE} is missing)")
    if name in _PACKAGES:
        module, source = _PACKAGES[name]
        if importlib.util.find_spec(module) is None:
            missing.append(f"the package {module} is not installed ({source})")
    return " and ".join(missing) or None


def why_not_served_by(name: str, num_ranks: int, *, on_gpus: bool = False) -> str | None:
    """Return why the service cannot exchange tokens through `name` here, and the alternatives. None if it can try.

    Args:
        name: One of BACKENDS.
        num_ranks: Number of the service's ranks.
        on_gpus: Whether the service computes on GPUs.
    """
    if name == "local" and num_ranks > 1:
        return f"--all2all-backend is local with {num_ranks} ranks; it supports one: use auto, gloo or shm"
    if name not in ON_DEVICE:
        return None
    problem = why_unavailable(name)
    if problem is None and not on_gpus:
        problem = "the service computes on the CPU"
    if problem is None:
        return None
    return f"--all2all-backend is {name}, which cannot be used: {problem}; use auto, gloo or shm"
