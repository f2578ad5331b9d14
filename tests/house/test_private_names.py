"""Product code uses public names of torch and triton. A private one may be missing in the next release or another build.

torch 2.11 for CUDA lacked a private name of 2.13 for the CPU, so no service started on a GPU. Private names without a public
equivalent are listed here with the reason. Names are resolved through a file's imports, and searched in strings too (importlib).
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from server.machine.roots import PACKAGES

ROOT = Path(__file__).resolve().parents[2]
_LIBRARIES = ("torch", "triton")
_IN_A_STRING = re.compile(r"(?:torch|triton)(?:\.\w+)*\._[a-zA-Z]\w*(?:\.\w+)*")
# A private name, the files that may use it, and why no public one replaces it.
ALLOWED = {
    "torch._C.DisableTorchFunctionSubclass": (
        ("moe/kernel_weight.py", "moe/cpu/weights/packed_weight.py", "moe/gpu/device_weight.py"),
        "the name that torch's own guide to __torch_function__ gives (docs: Extending PyTorch)",
    ),
    "torch.Tensor._make_wrapper_subclass": (
        ("moe/adopt/stream.py", "moe/cpu/weights/packed_weight.py", "moe/gpu/device_weight.py"),
        "the only way to a tensor without storage; torchao and torch's DTensor use it",
    ),
    "torch._dynamo.config": (
        ("moe/gpu/compiling.py",),
        "torch's guide to recompilations names it; torch.compiler has no such setting. Runs only with --torch-compile",
    ),
    "torch.utils._pytree.tree_leaves": (
        ("moe/adopt/adopt.py",),
        "torch 2.13 has no public pytree; transformers imports this name as well",
    ),
    "torch.utils._pytree.tree_map": (
        ("moe/adopt/stream.py", "moe/kernel_weight.py"),
        "torch 2.13 has no public pytree; transformers imports this name as well",
    ),
    "torch.distributed._symmetric_memory": (
        ("dispatch/gpu/symmetric.py",),
        "the module's documented name (docs: PyTorch Symmetric Memory); one rank or NCCL runs without it",
    ),
    "torch.distributed.distributed_c10d._world": (
        ("scheduler/epochs/meeting.py",),
        "torch has no public way to reset the count that names groups",
    ),
}


def private_names(source: str) -> Iterator[tuple[int, str]]:
    """Yield every private name of torch or triton in a program, with its line."""
    tree = ast.parse(source)
    known = dict(_imported(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [name for _, name in _imported(node)]
        elif isinstance(node, ast.Attribute):
            names = [_dotted(node, known)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = _IN_A_STRING.findall(node.value) if "\n" not in node.value else []
        else:
            continue
        yield from ((node.lineno, name) for name in names if _is_private(name))


def _imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the names that imports bind: the local name and the full one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (
                    (alias.asname or alias.name.partition(".")[0]),
                    (alias.name if alias.asname else alias.name.partition(".")[0]),
                )
                yield "", alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _dotted(node: ast.expr, known: dict[str, str]) -> str:
    """Return the full name of an attribute of an imported module or class, or "" for other expressions."""
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value, known)
        return f"{owner}.{node.attr}" if owner else ""
    return known.get(node.id, "") if isinstance(node, ast.Name) else ""


def _is_private(name: str) -> bool:
    first, *others = name.split(".")
    return first in _LIBRARIES and any(each.startswith("_") and not each.startswith("__") for each in others)


def test_product_code_uses_public_names_of_torch_and_triton() -> None:
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    found = [
        (str(path.relative_to(ROOT)), line, name)
        for path in files
        if any(library in (source := path.read_text()) for library in _LIBRARIES)
        for line, name in private_names(source)
    ]
    wrong = [
        f"{path}:{line} uses {name}"
        for path, line, name in found
        if not any(_covers(allowed, name) and path in where for allowed, (where, _) in ALLOWED.items())
    ]
    assert not wrong, "\n".join(wrong)
    unused = [
        f"{allowed} in {path}"
        for allowed, (where, _) in ALLOWED.items()
        for path in where
        if not any(each == path and _covers(allowed, name) for each, _, name in found)
    ]
    assert not unused, unused


def _covers(allowed: str, name: str) -> bool:
    """Return whether a name is an allowed one, an attribute below one, or a prefix of one."""
    return f"{name}.".startswith(f"{allowed}.") or f"{allowed}.".startswith(f"{name}.")


def test_private_names_are_found_however_they_are_reached() -> None:
    source = """
import torch
import torch.distributed as dist
from torch import Tensor as T, nn
from torch._C import thing
import triton
import importlib
torch._C._cuda_getDriverVersion()
dist._private
T._make()
triton.runtime._x
importlib.import_module("torch.utils._pytree")
torch.__version__
nn.Module()._parameters
"""
    assert {name for _, name in private_names(source)} == {
        "torch._C.thing",
        "torch._C",
        "torch._C._cuda_getDriverVersion",
        "torch.distributed._private",
        "torch.Tensor._make",
        "triton.runtime._x",
        "torch.utils._pytree",
    }


PICKLING = re.compile(
    r"all_gather_object|gather_object|broadcast_object_list|scatter_object_list|send_object_list|pickle\.loads?\b"
)


def test_no_pickle_of_another_process_is_read() -> None:
    """Unpickling would let any process with access to a store or to gloo's connections run code here."""
    found = [
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if PICKLING.search(re.sub(r'"""(?s:.*?)"""', "", path.read_text()))
    ]
    assert not found, found
