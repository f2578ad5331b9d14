"""Record launches of Triton kernels, so that tests compile exactly the kernels that are launched.

    with recording(decode, "attend_splits") as launched:
        paged_decode(...)  # on the meta device: only shapes and types count
    check_budget(launched[0].kernel(max_registers=255), folder)

Import it only in processes where triton compiles, not in one that interprets.
"""

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch

from tests.support.gpu.triton_compile import Kernel

TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}
OPTIONS = {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": True}  # and Triton's default options


class Launch(NamedTuple):
    """One launch: its kernel, grid and arguments by name, and Triton's options."""

    function: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]

    def kernel(self, max_registers: int = 255) -> Kernel:
        """Return the kernel as Triton would compile it: arguments divisible by 16 are marked, None and 1 are constants."""
        constants = {p.name for p in self.function.params if p.is_constexpr}
        plain = {p.name for p in self.function.params if p.do_not_specialize}
        passed = {name: value for name, value in self.arguments.items() if name not in constants}
        types = {
            name: _type_of(value)
            for name, value in passed.items()
            if value is not None and (name in plain or not _is_one(value))
        }
        sizes = {name: value for name, value in self.arguments.items() if name not in types}
        return Kernel(
            self.function,
            types,
            sizes,
            self.options["num_warps"],
            max_registers,
            self.options["num_stages"],
            self.options["enable_fp_fusion"],
            frozenset(name for name in types if name not in plain and _is_aligned(passed[name])),
        )


def _type_of(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"*{TYPES[value.dtype]}"
    return "fp32" if isinstance(value, float) else "i32"


def _is_one(value: object) -> bool:
    return isinstance(value, int) and value == 1


def _is_aligned(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.storage_offset() * value.itemsize % 16 == 0
    return isinstance(value, int) and value % 16 == 0


class _Recorder:
    """Replaces a kernel."""

    def __init__(self, function: Any, launched: list[Launch]) -> None:
        self._function, self._launched = function, launched

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            names = [parameter.name for parameter in self._function.params]
            options = {name: kwargs.pop(name, default) for name, default in OPTIONS.items()}
            arguments = dict(zip(names, args, strict=False)) | kwargs
            missing = set(names) ^ set(arguments)
            assert not missing, f"{self._function.__name__} was launched with unexpected arguments: {missing}"
            self._launched.append(Launch(self._function, grid, arguments, options))

        return launch


@contextlib.contextmanager
def recording(*kernels: tuple[ModuleType, str]) -> Iterator[list[Launch]]:
    """Record the launches of kernels, given as (module, name). The kernels do not run."""
    launched: list[Launch] = []
    functions = [(module, name, getattr(module, name)) for module, name in kernels]
    for module, name, function in functions:
        setattr(module, name, _Recorder(function, launched))
    try:
        yield launched
    finally:
        for module, name, function in functions:
            setattr(module, name, function)
