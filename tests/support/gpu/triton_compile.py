"""Compile Triton kernels without a GPU, up to the assembler's report: registers, spills, shared memory.

Import it only in processes where triton compiles, not in one that interprets.
"""

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend

SHARED_LIMITS = {
    80: 163 << 10,
    89: 99 << 10,
    90: 227 << 10,
    100: 227 << 10,
}  # maximum bytes of one program, by architecture


OTHERS = (80, 89, 100)  # architectures besides the one for which each test compiles


def another(place: int) -> int:
    """Return one of the other architectures by turns: the one for which to compile a list's configuration."""
    return OTHERS[place % len(OTHERS)]


class Kernel(NamedTuple):
    """A kernel as it is launched, and its limits."""

    function: Any
    types: dict[str, str]  # types of arguments; all others are constexpr
    sizes: dict[str, Any]
    warps: int = 8
    max_registers: int = 80
    stages: int = 2
    fuses: bool = False  # whether products may be fused into sums
    aligned: bool | frozenset[str] = False  # names of pointers and sizes divisible by 16; True: all pointers
    maxnreg: int | None = None  # registers that the launch allows


class Compiled(NamedTuple):
    """Result of a compilation: the kernel's PTX text, its shared memory in bytes, and Triton's own GPU code before both."""

    ptx: str
    shared_bytes: int
    ttgir: str = ""


def _is_aligned(kernel: Kernel, name: str) -> bool:
    if isinstance(kernel.aligned, frozenset):
        return name in kernel.aligned
    return kernel.aligned and kernel.types.get(name, "").startswith("*")


def compile_kernel(kernel: Kernel, arch: int = 90) -> Compiled:
    """Compile a kernel to PTX without a GPU."""
    return Compiled(*_compile(kernel, arch, ("ttir", "ttgir", "llir", "ptx")))


def compile_loops(kernel: Kernel, arch: int = 90) -> str:
    """Compile a kernel to Triton's own GPU code, which has its loops and copies. This takes half as long as PTX."""
    return _compile(kernel, arch, ("ttir", "ttgir"))[2]


def _compile(kernel: Kernel, arch: int, names_of_stages: Sequence[str]) -> tuple[str, int, str]:
    """Return the code of the last stage, the bytes of shared memory, and Triton's own GPU code."""
    names = [parameter.name for parameter in kernel.function.params]
    signature = {name: kernel.types.get(name, "constexpr") for name in names}
    constants = {name: value for name, value in kernel.sizes.items() if name in names}
    aligned = [place for place, name in enumerate(names) if _is_aligned(kernel, name)]
    attributes = {(place,): [["tt.divisibility", 16]] for place in aligned}
    source = ASTSource(fn=kernel.function, signature=signature, constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    options = backend.parse_options(
        {
            "num_warps": kernel.warps,
            "num_stages": kernel.stages,
            "enable_fp_fusion": kernel.fuses,
            "maxnreg": kernel.maxnreg,
        }
    )
    context = ir.context()
    stages: dict[str, Any] = {}
    ir.load_dialects(context)
    backend.load_dialects(context)
    backend.add_stages(stages, options, source.language)
    module = source.make_ir(
        target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
    )
    metadata = {"target": target, **options.__dict__}
    ttgir = ""
    for stage in names_of_stages:
        module = stages[stage](module, metadata)
        ttgir = str(module) if stage == "ttgir" else ttgir
    return module, metadata.get("shared", 0), ttgir


def waits_in_loops(ttgir: str) -> list[int]:
    """Return for each wait inside a counted loop how many groups of copies it leaves in flight; 0 waits for all copies."""
    waits, loops = [], [-1]
    for line in ttgir.splitlines():
        text, indent = line.strip(), len(line) - len(line.lstrip())
        if "scf.for " in text:
            loops.append(indent)
        elif text.startswith("}") and indent == loops[-1]:
            loops.pop()
        elif len(loops) > 1 and (found := re.search(r"async_wait.*num = (\d+)", text)):
            waits.append(int(found[1]))
    return waits


def assemble(ptx: str, folder: Path, *flags: str, arch: int = 90) -> tuple[int, int]:
    """Return registers per thread and spilled bytes as reported by the assembler."""
    (folder / "kernel.ptx").write_text(ptx)
    name = f"sm_{arch}a" if arch >= 90 else f"sm_{arch}"
    command = [get_ptxas(arch).path, "-v", *flags, f"--gpu-name={name}", "kernel.ptx", "-o", "kernel.o"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", done.stderr)]
    return max(registers), sum(int(size) for size in re.findall(r"(\d+) bytes spill", done.stderr))


def check_budget(kernel: Kernel, folder: Path, arch: int = 90) -> Compiled:
    """Compile and assemble a kernel. Check spills, registers and shared memory against their limits. Return its code."""
    compiled = compile_kernel(kernel, arch)
    check_compiled(compiled, kernel.max_registers, folder, arch)
    return compiled


def check_compiled(compiled: Compiled, max_registers: int, folder: Path, arch: int = 90) -> None:
    """Assemble a kernel's code, and check it as `check_budget` does."""
    registers, spilled = assemble(compiled.ptx, folder, arch=arch)
    assert spilled == 0, f"{spilled} bytes spilled with {registers} registers"
    assert registers <= max_registers, f"{registers} registers"
    assert compiled.shared_bytes <= SHARED_LIMITS[arch], f"{compiled.shared_bytes} bytes of shared memory"
