"""The import order (DESIGN.md): imports point down, and modules that the simulator runs do not need torch.

All imports are read from the syntax trees, so that those inside functions and for type checking count too.
"""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from server.machine.roots import PACKAGES

ROOT = Path(__file__).resolve().parents[2]
BASE = ("kvcache", "dispatch", "expert_placement")
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "server": ("scheduler", "moe", "attention", *BASE),
    "scheduler": ("moe", "attention", *BASE),
    "moe": ("attention", *BASE),
    "attention": BASE,
    **dict.fromkeys(BASE, ()),
}
# The server's floors, from the top down: whole folders (DESIGN.md, "The house"). A folder may import from floors below its own.
FLOORS = (
    ("__main__",),
    ("cli", "offline"),
    ("tools",),
    ("clients",),
    ("serve",),
    ("api", "experts"),
    ("http",),
    ("front",),
    ("link",),
    ("options",),
    ("machine",),
)
# Order inside packages, from the top down: a part may import from parts below it. A module belongs to the part with the
# longest matching name prefix. Parts on one line do not import each other.
ORDER = (
    ("server.api.openai.batches", "server.api.sglang.service_routes"),
    ("server.api",),
    ("server.api.blocks", "server.api.tokenize"),
    ("server.api.chat_turn",),
    ("server.api.prompts", "server.api.sampling", "server.api.streaming", "server.api.structure"),
    ("server.api.answer_json", "server.api.served", "server.api.template_messages", "server.api.tools"),
    ("server.api.images", "server.api.schemas"),
    ("server.api.media",),
    ("server.api.parsers",),
    ("scheduler.assembly",),
    ("scheduler.engine", "scheduler.start"),
    ("scheduler.epochs",),
    ("scheduler.weights",),
    ("scheduler.moves",),
    ("scheduler.step",),
    ("scheduler.sampling", "scheduler.structure"),
    ("scheduler.drafts",),
    ("scheduler.policy",),
    ("moe.survey",),
    ("moe.demo_model", "moe.model"),
    ("moe.lora.bank",),
    ("moe.cpu", "moe.gpu", "moe.rehearsal"),
    ("moe.cpu.program",),
    ("moe.cpu.experts",),
    ("moe.cpu.weights", "moe.gpu.products"),
    ("moe.cpu.kernels", "moe.gpu.weights"),
    ("moe.gpu.limits",),
    ("moe.weight_digests", "moe.overwrite"),
    ("moe.adopt", "moe.expert_weights"),
    ("moe.backend", "moe.vision"),
    ("moe.families",),
    (
        "moe.kernel_weight",
        "moe.load",
        "moe.long_rotary",
        "moe.lora",
        "moe.published_types",
        "moe.load_counts",
        "moe.routing",
        "moe.scaled_experts",
        "moe.slot_choice",
    ),
    ("moe.mtp",),
    ("moe.projection",),
    ("moe.text_part",),
    ("attention.recurrences.gpu",),
    ("attention.recurrences.gpu_chunks",),
    ("attention.recurrences.gpu_kernels",),
    ("attention.gpu",),
    ("attention.organ", "attention.recurrences.cpu"),
    ("attention.sparse.cpu_pools",),
    ("attention.sparse.cpu",),
    ("attention.sparse.pools", "attention.recurrences.cpu_delta_net"),
    (
        "attention.latents",
        "attention.recurrences.cpu_kernels",
        "attention.reference",
        "attention.sparse.index",
    ),
    ("attention.cpu", "attention.recurrences.mixers"),
    ("attention.transformers_names",),
    ("dispatch.deep_ep_shim",),
    ("dispatch.gpu.deep_ep", "dispatch.gpu.open"),
    ("dispatch.faces",),
    ("dispatch.gpu",),
    (
        "dispatch.dispatcher",
        "dispatch.hierarchical",
        "dispatch.low_latency",
        "dispatch.rows",
    ),
    ("dispatch.programmed",),
    ("dispatch.arguments", "dispatch.exchange"),
    (
        "dispatch.dispatched",
        "dispatch.layout",
        "dispatch.row_formats",
        "dispatch.wires.open",
    ),
    ("dispatch.cpu_kernels",),
    ("dispatch.wires",),
    (
        "dispatch.wires.availability",
        "dispatch.buffers",
        "dispatch.errors",
        "dispatch.gathered",
        "dispatch.mode",
    ),
    ("dispatch.fp8", "dispatch.ports"),
    ("dispatch.compiled",),
    ("kvcache.tiers.peers",),
    ("kvcache.tiers.peer_link",),
    ("kvcache.tiers.opening", "kvcache.tiers.peer_server"),
    ("kvcache.tiers.tiers",),
    (
        "kvcache.tiers.disk_copies",
        "kvcache.tiers.early",
        "kvcache.tiers.frames",
        "kvcache.tiers.remote_memory",
    ),
    ("kvcache.tiers.tier",),
    ("kvcache.gpu.unit", "kvcache.tiers.records"),
    ("kvcache.gpu.sums",),
    ("kvcache.tiers.figures", "kvcache.tiers.jobs", "kvcache.unit"),
    ("kvcache.gpu",),
    ("kvcache.blocks", "kvcache.paged_cache"),
    ("kvcache.codes", "kvcache.prefix", "kvcache.progress", "kvcache.step"),
    ("kvcache.images", "kvcache.states"),
    (
        "expert_placement.control",
        "expert_placement.history",
        "expert_placement.resized",
        "expert_placement.tools",
    ),
    ("expert_placement.files", "expert_placement.forecast", "expert_placement.plan"),
    (
        "expert_placement.choose",
        "expert_placement.load",
        "expert_placement.moves",
        "expert_placement.nodes",
        "expert_placement.survivors",
    ),
    ("expert_placement.config", "expert_placement.kernels", "expert_placement.placement"),
)
WITHOUT_TORCH = [
    "scheduler.policy.scheduler",
    "scheduler.policy.request",
    "scheduler.policy.sequence",
    "scheduler.policy.config",
    "scheduler.epochs.heartbeat",
    "scheduler.epochs.orders",
    "scheduler.moves.reports",
    "kvcache.blocks",
    "kvcache.states",
    "moe.load.quantisation",
    "moe.lora.adapter_files",
    "server.serve.worker",
    "server.tools.doctor.run",
]
# Imports inside functions, by file, and the reason for each.
DEFERRED = {
    "kvcache/gpu/unit.py": "triton is optional, and only GPUs need the kernel",
    "server/serve/launcher.py": "torch is imported while workers start",
    "server/serve/preflight/model.py": "a directory needs neither the demo model's maker nor a hub's client",
    "server/serve/preflight/device.py": "only the child process that looks for GPUs loads torch",
    "server/serve/preflight/random_weights.py": "only the child process that builds the model loads torch",
    "server/tools/gpu_rates.py": "only the child process that looks for GPUs loads torch",
    "server/tools/bench/prompts.py": "only --tokenizer reads a tokenizer here, and transformers takes seconds to load",
    "server/http/observability/tracing.py": "OpenTelemetry is optional: its packages are loaded only if traces are sent",
}


class Import(NamedTuple):
    """One module that a file imports."""

    file: Path
    line: int
    module: str
    inside: str  # the enclosing function, or empty
    is_for_types: bool  # under `if TYPE_CHECKING:`, never executed

    def __str__(self) -> str:
        """Return a location that editors can open."""
        return f"{self.file.relative_to(ROOT)}:{self.line} imports {self.module}"


@functools.cache
def files() -> tuple[Path, ...]:
    """Return all source files of the seven packages."""
    return tuple(sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")))


def module_of(path: Path) -> str:
    """Return the module name of a file."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def path_of(module: str) -> Path | None:
    """Return the file of one of our modules, or None if the module does not exist."""
    base = ROOT.joinpath(*module.split("."))
    candidates = (base.with_suffix(".py"), base / "__init__.py")
    return next((path for path in candidates if path.is_file()), None)


@functools.cache
def imports_of(path: Path) -> tuple[Import, ...]:
    """Return every import of a file. `from package import module` counts as both."""
    return tuple(_read_imports(path))


def _read_imports(path: Path) -> Iterator[Import]:
    scopes: list[tuple[ast.AST, str, bool]] = [(ast.parse(path.read_text()), "", False)]
    while scopes:
        node, inside, is_for_types = scopes.pop()
        for child in ast.iter_child_nodes(node):
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            function = getattr(child, "name", "lambda") if is_function else inside
            scopes.append((child, function, is_for_types or _is_type_checking(child)))
            if isinstance(child, ast.Import):
                yield from (
                    Import(path, child.lineno, alias.name, inside, is_for_types) for alias in child.names
                )
            elif isinstance(child, ast.ImportFrom):
                assert not child.level, f"{path}:{child.lineno}: use absolute imports"
                names = [child.module or "", *(f"{child.module}.{alias.name}" for alias in child.names)]
                yield from (
                    Import(path, child.lineno, name, inside, is_for_types)
                    for name in names
                    if name == child.module or path_of(name)
                )


def _is_type_checking(node: ast.AST) -> bool:
    """Return whether a statement is `if TYPE_CHECKING:` without an else."""
    if not isinstance(node, ast.If) or node.orelse:
        return False
    return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def top(module: str) -> str:
    """Return the top-level package of a module."""
    return module.partition(".")[0]


def closure(module: str) -> dict[str, list[str]]:
    """Return all modules executed by an import of one, each with its import chain. Imports inside functions run later."""
    ways = {module: [module]}
    waiting = [module]
    while waiting:
        current = waiting.pop()
        path = path_of(current)
        entries = imports_of(path) if path else iter(())
        found = [entry.module for entry in entries if not entry.inside and not entry.is_for_types]
        parts = current.split(".")
        found += [".".join(parts[:length]) for length in range(1, len(parts))]  # packages run first
        for name in found:
            if name not in ways:
                ways[name] = [*ways[current], name]
                waiting.append(name)
    return ways


def ways_to(module: str, packages: set[str]) -> list[str]:
    """Return the import chains through which a module would load one of some packages."""
    return [" > ".join(way) for name, way in closure(module).items() if top(name) in packages]


def ways_to_torch(module: str) -> list[str]:
    """Return the import chains through which a module would load torch or a package built on it."""
    return ways_to(module, {"torch", "transformers", "safetensors", "triton"})


def test_the_order_names_all_seven_packages() -> None:
    assert set(MAY_IMPORT) == set(PACKAGES)
    assert len(files()) > 50


def test_imports_point_down() -> None:
    wrong = [
        str(entry)
        for path in files()
        for entry in imports_of(path)
        if top(entry.module) in PACKAGES
        and top(entry.module) != top(module_of(path))
        and top(entry.module) not in MAY_IMPORT[top(module_of(path))]
    ]
    assert not wrong, "\n".join(wrong)


def part_of(module: str) -> str | None:
    """Return the part of its package that a module belongs to, or None if ORDER does not name one."""
    parts = [part for level in ORDER for part in level if module == part or module.startswith(f"{part}.")]
    return max(parts, key=len, default=None)


def floor_of(module: str) -> str:
    """Return the folder of the server that a module is in, or the module itself."""
    return module.split(".")[1]


def test_the_server_has_the_floors_of_the_design() -> None:
    level_of = {folder: number for number, floor in enumerate(FLOORS) for folder in floor}
    wrong = [
        str(entry)
        for path in files()
        if top(module_of(path)) == "server" and module_of(path) != "server"
        for entry in imports_of(path)
        if entry.module.startswith("server.") and floor_of(entry.module) != floor_of(module_of(path))
        if level_of[floor_of(entry.module)] <= level_of[floor_of(module_of(path))]
    ]
    assert not wrong, "\n".join(wrong)


def test_imports_point_down_inside_packages() -> None:
    level_of = {part: number for number, level in enumerate(ORDER) for part in level}
    ordered = {top(part) for part in level_of} - {"server"}
    wrong = []
    for path in files():
        module, part = module_of(path), part_of(module_of(path))
        if module in PACKAGES:
            continue
        entries = [entry for entry in imports_of(path) if top(entry.module) == top(module) != entry.module]
        assert part or not entries or top(module) not in ordered, f"{module} is missing from ORDER"
        for entry in entries if part else ():
            imported = part_of(entry.module)
            if imported and part and imported != part and level_of[imported] <= level_of[part]:
                wrong.append(str(entry))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", PACKAGES)
def test_files_of_a_package_import_each_other_in_no_circle(package: str) -> None:
    imported = {
        module_of(path): {
            entry.module for entry in imports_of(path) if path_of(entry.module) and not entry.is_for_types
        }
        - {module_of(path)}
        for path in files()
        if top(module_of(path)) == package
    }
    left = {module: names & imported.keys() for module, names in imported.items()}
    while free := [module for module, names in left.items() if not names & left.keys()]:
        for module in free:
            del left[module]
    assert not left, f"these contain import cycles: {sorted(left)}"


def test_packages_import_no_tests_and_no_benchmarks() -> None:
    wrong = [
        str(entry)
        for path in files()
        for entry in imports_of(path)
        if top(entry.module) in ("tests", "benchmarks")
    ]
    assert not wrong, "\n".join(wrong)


def test_our_own_imports_exist() -> None:
    wrong = [
        str(entry)
        for path in files()
        for entry in imports_of(path)
        if top(entry.module) in PACKAGES
        and path_of(entry.module) is None
        and not (ROOT / entry.module.replace(".", "/")).is_dir()
    ]
    assert not wrong, "\n".join(wrong)


def test_what_must_do_without_torch_does() -> None:
    for module in (*WITHOUT_TORCH, *map(module_of, sorted((ROOT / "expert_placement").rglob("*.py")))):
        assert path_of(module), f"{module} does not exist; replace it here by its successor"
        assert not ways_to_torch(module), module


@pytest.mark.parametrize(
    "module", ["scheduler.step.runner", "moe.model", "attention.organ", "kvcache.paged_cache"]
)
def test_serving_on_a_cpu_does_without_triton(module: str) -> None:
    assert path_of(module), f"{module} does not exist; replace it here by its successor"
    assert not ways_to(module, {"triton"})
    assert ways_to("attention.gpu.decode", {"triton"})


def test_the_check_for_torch_finds_it_where_it_is() -> None:
    assert any(way.startswith("scheduler.step.runner > ") for way in ways_to_torch("scheduler.step.runner"))


def test_importing_the_policy_and_the_placement_leaves_torch_out() -> None:
    code = (
        "import sys, scheduler.policy.scheduler, expert_placement.placement, kvcache.blocks\n"
        "sys.exit(', '.join(sorted({'torch', 'transformers'} & set(sys.modules))) or None)"
    )
    child = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert child.returncode == 0, child.stderr


def test_imports_inside_functions_are_few_and_have_reasons() -> None:
    inside = [entry for path in files() for entry in imports_of(path) if entry.inside]
    places = {str(entry.file.relative_to(ROOT)) for entry in inside}
    assert not [str(entry) for entry in inside if str(entry.file.relative_to(ROOT)) not in DEFERRED]
    assert places == set(DEFERRED), "DEFERRED differs from the deferred imports found"
