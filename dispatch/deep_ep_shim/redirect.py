"""Patches to a process that imports the shim on a machine without CUDA, and their reasons.

Code written for `deep_ep` is written for CUDA. Most of its CUDA code is inside that package, which WideEP replaces.
The rest is redirected, for this process and its whole life:

- `device="cuda"` (also "cuda:3", a torch.device or an index) in any torch call, and in `Tensor.to`, means the CPU: a
  TorchFunctionMode rewrites the arguments. It applies to the thread that imports `deep_ep`. `torch.set_default_device` too.
- `Tensor.cuda()` and `Module.cuda()` return the object itself.
- `torch.cuda.synchronize`, `set_device` and `empty_cache` do nothing; `current_device` is 0.
- `torch.distributed`: a backend "nccl" means "gloo", and `device_id` is dropped, because a torch without CUDA has no
  NCCL. `all_gather_into_tensor` gets flat views: gloo refuses an output [R, T, K] for an input [T, K].

On a machine with CUDA nothing is patched. Processes that a script spawns import `deep_ep` again and patch themselves.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


class CudaMeansCpu(TorchFunctionMode):
    """Rewrite CUDA devices in the arguments of torch functions."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to:
            args = tuple(_redirected(value) for value in args)
        named = dict(kwargs or {})
        if "device" in named:
            device = named["device"]
            named["device"] = _CPU if type(device) is int else _redirected(device)
        return func(*args, **named)


def redirect_cuda() -> None:
    """Patch this process if there is no CUDA. Does nothing if it is patched already."""
    if torch.cuda.is_available() or getattr(torch.cuda, "is_redirected_by_wideep", False):
        return
    torch.cuda.is_redirected_by_wideep = True  # type: ignore[attr-defined]
    CudaMeansCpu().__enter__()  # type: ignore[no-untyped-call]
    _patch_cuda()
    _patch_distributed()


def _patch_cuda() -> None:
    def ignore(*_: Any, **__: Any) -> None:
        """Do nothing, as there is no CUDA."""

    for name in ("synchronize", "set_device", "empty_cache"):
        setattr(torch.cuda, name, ignore)
    torch.cuda.current_device = lambda: 0
    torch.nn.Module.cuda = lambda self, device=None: self  # type: ignore[method-assign]
    set_default_device = torch.set_default_device
    torch.set_default_device = lambda device: set_default_device(_redirected(device))


def _patch_distributed() -> None:
    init_process_group, new_group = dist.init_process_group, dist.new_group
    all_gather_into_tensor = dist.all_gather_into_tensor

    @functools.wraps(init_process_group)
    def init(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        return init_process_group(_backend(backend), *args, **kwargs)

    @functools.wraps(new_group)
    def group(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        if "backend" in kwargs:
            kwargs["backend"] = _backend(kwargs["backend"])
        return new_group(*args, **kwargs)

    @functools.wraps(all_gather_into_tensor)
    def gather(output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return all_gather_into_tensor(
            output_tensor.view(-1), input_tensor.contiguous().view(-1), *args, **kwargs
        )

    dist.init_process_group, dist.new_group, dist.all_gather_into_tensor = init, group, gather


def _backend(name: Any) -> Any:
    return "gloo" if name == "nccl" else name


def _redirected(value: Any) -> Any:
    """Return the CPU for a CUDA device, and any other value unchanged."""
    if isinstance(value, torch.device):
        return _CPU if value.type == "cuda" else value
    if isinstance(value, str):
        return _CPU if value == "cuda" or value.startswith("cuda:") else value
    return value
