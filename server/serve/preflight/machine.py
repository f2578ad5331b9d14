"""Check one node for problems that prevent or slow a service. Checks only read. Does not use torch.

They cover Python and packages, processor, GPUs and their links, NCCL and NVSHMEM, RDMA, interfaces, shared memory, huge pages,
limits and ports, the model's files, and whether a node's ranks fit. The checks that a start makes itself are reused
(`serve.preflight.checks`). Kernel files are read below root folders that a test can replace.
`problems_at_start` is the part that runs at every start: it takes milliseconds and reports problems only.
"""

import importlib.metadata
import os
import platform
import re
import resource
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dispatch.wires.availability import why_unavailable
from server.machine import interfaces as network
from server.machine.lines import say
from server.machine.report import Check, failure, not_here, ok, warning
from server.machine.versions import VersionError, check_transformers, version_of
from server.options.flag import OptionsError
from server.options.table import Options
from server.serve.preflight.checks import check_choices, check_files, check_listener, check_room
from server.serve.preflight.device import ChosenDevice, GpuFacts, why_slow
from server.serve.preflight.equal import driver_file, driver_version, source_digest
from server.serve.preflight.memory import available_bytes, gib, usable_cores
from server.serve.preflight.model import PreflightError, read_config, safetensors_files
from server.serve.preflight.probe import capacity_of
from server.serve.preflight.random_weights import check_random_weights

_NEEDED = ("torch", "transformers", "safetensors", "numpy", "numba", "grpcio", "fastapi", "uvicorn")
_FILES_BESIDES_REQUESTS = 256  # of a front: libraries, logs, pipes
_FILES_PER_RANK = 16
_LEAST_SHARED = 1 << 30  # NCCL's segments between GPUs of a node are in /dev/shm
_FEW_PORTS = 1024
_UNLIMITED = resource.RLIM_INFINITY


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The sources of a node's facts; tests replace them."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    dev: Path = Path("/dev")
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    host: str = field(default_factory=socket.gethostname)
    interfaces: Callable[[], Sequence[network.Interface]] = network.find_interfaces
    resolve: Callable[[str], str] = network.bindable_address
    limit_of: Callable[[int], int] = lambda which: resource.getrlimit(which)[0]
    shared_bytes: Callable[[Path], int] = lambda path: os.statvfs(path).f_frsize * os.statvfs(path).f_bavail


def check_machine(
    machine: Machine, device: ChosenDevice, options: Options, *, num_ranks: int, num_nodes: int, has_front: bool,
) -> Iterator[Check]:  # fmt: skip
    """Check this node, except for the model.

    Args:
        num_ranks: Number of ranks on this node.
        num_nodes: Number of nodes of the service.
        has_front: Whether this node listens for HTTP and holds the clients' connections.
    """
    yield ok("Python", f"{platform.python_version()}, Linux {platform.release()}")
    yield check_packages(_NEEDED)
    yield check_processor(machine)
    yield from check_gpus(machine, device)
    yield check_rdma(machine)
    yield from check_network(machine, has_gpus=device.name == "cuda", has_other_nodes=num_nodes > 1)
    yield check_shared_memory(machine, num_gpus=len(device.facts.devices))
    yield check_huge_pages(machine)
    yield check_open_files(machine, options, num_ranks * num_nodes if has_front else num_ranks)
    yield check_locked_memory(machine)
    yield check_ports(machine)
    yield check_http(options) if has_front else not_here("HTTP", "only the endpoint's node listens")


def problems_at_start(
    options: Options,
    *,
    num_ranks: int,
    has_other_nodes: bool,
    num_served_ranks: int | None = None,
    machine: Machine | None = None,
) -> list[Check]:
    """Return this node's problems for a service that starts now, except those that its start rejects itself.

    Args:
        num_ranks: Number of ranks on this node.
        num_served_ranks: Number of ranks that this node's front serves; None for the local ones.
    """
    machine = machine or Machine()
    on_gpus = options.device == "cuda"
    checks = [
        check_open_files(machine, options, num_served_ranks or num_ranks),
        check_shared_memory(machine, num_gpus=num_ranks if on_gpus else 0),
        check_fronts(options, usable_cores()),
    ]
    if has_other_nodes:
        checks += check_network(machine, has_gpus=on_gpus, has_other_nodes=True)
        checks += [check_ports(machine), check_locked_memory(machine)]
    return [check for check in checks if check.is_wrong]


def say_problems(checks: Sequence[Check]) -> None:
    """Log problems that do not prevent the start."""
    for check in checks:
        say(
            f"wideep: {check.name}: {check.sentence} (run `wideep doctor` for more checks)",
            error=True,
            level="warning",
        )


def check_packages(names: Sequence[str]) -> Check:
    """Check that all required packages are installed in supported versions."""
    needs = _requirements()
    missing = [name for name in names if not version_of(name)]
    if missing:
        return failure(
            "packages", f"not installed: {', '.join(missing)}", "reinstall WideEP with its dependencies"
        )
    outside = [
        f"{name} is {version_of(name)}, but {needs[name]} is required"
        for name in names
        if not _fits(version_of(name), needs.get(name, ""))
    ]
    if outside:
        return failure("packages", "; ".join(outside), "reinstall WideEP with its dependencies")
    try:
        note = check_transformers()
    except VersionError as error:  # a checkout may be newer than the installed wideep
        return failure("packages", str(error), "reinstall WideEP with its dependencies")
    if note is not None:
        return warning("packages", note, "install the tested version if a model fails to start")
    told = ", ".join(f"{name} {version_of(name)}" for name in names[:3])
    own = f"wideep {version_of('wideep') or '(not installed)'} (source {source_digest(Path(__file__).resolve().parents[3])})"
    return ok("packages", f"{own}, {told}")


def _requirements() -> dict[str, str]:
    """Return the requirements of our own distribution by package, such as ">=5.21,<6"."""
    try:
        lines = importlib.metadata.requires("wideep") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    parts = [re.match(r"([\w.-]+)\s*([<>=!~,.\d\s]*)$", line.partition(";")[0].strip()) for line in lines]
    return {found[1].lower(): found[2].strip() for found in parts if found}


def _fits(version: str, needed: str) -> bool:
    """Return whether a version satisfies bounds with >= and <."""
    for operator, bound in re.findall(r"(>=|<)\s*([\d.]+)", needed):
        is_lower = _numbers(version) < _numbers(bound)
        if is_lower != (operator == "<"):
            return False
    return True


def _numbers(version: str) -> list[int]:
    numbers = [int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3]]
    return numbers + [0] * (3 - len(numbers))


def check_processor(machine: Machine) -> Check:
    """Check cores, memory and the instructions that kernels need."""
    facts = machine.proc / "cpuinfo"
    slow = why_slow(facts=facts.read_text() if facts.exists() else "")
    free = available_bytes(machine.proc / "meminfo", machine.sys / "fs" / "cgroup")
    found = f"{usable_cores(machine.sys / 'fs' / 'cgroup')} cores, {gib(free)} of memory free"
    return warning("processor", f"{found}; {slow}", "use another machine") if slow else ok("processor", found)


def check_gpus(machine: Machine, device: ChosenDevice) -> Iterator[Check]:
    """Check the driver, GPUs, their links, NCCL and NVSHMEM, from the driver's files and the facts of a child process."""
    driver = driver_version(machine.proc)
    yield (
        ok("driver", f"NVIDIA {driver}")
        if driver
        else not_here("driver", f"no NVIDIA driver ({driver_file(machine.proc)} is missing)")
    )
    facts = device.facts
    if not facts.devices:
        yield warning("GPUs", device.reason, "the service will use the CPU") if driver else not_here("GPUs", device.reason)  # fmt: skip
        for name in ("GPU links", "NCCL", "NVSHMEM"):
            yield not_here(name, "no GPU")
        return
    each = ", ".join(f"{gpu.name} with {gib(gpu.free_bytes)} free" for gpu in facts.devices)
    yield ok("GPUs", f"{len(facts.devices)}: {each}")
    yield check_links(facts)
    yield ok("NCCL", facts.nccl) if facts.nccl else failure("NCCL", f"torch {facts.torch} has no NCCL", "install a torch build for CUDA")  # fmt: skip
    problem = why_unavailable("nvshmem")
    yield (
        not_here("NVSHMEM", problem)
        if problem
        else ok("NVSHMEM", f"nvshmem4py {version_of('nvshmem4py-cu13')}")
    )


def check_links(facts: GpuFacts) -> Check:
    """Check that the GPUs of the node can access each other's memory."""
    if len(facts.devices) < 2:
        return not_here("GPU links", "only one GPU")
    if not facts.apart:
        return ok("GPU links", f"all {len(facts.devices)} GPUs can access each other's memory")
    pairs = ", ".join(f"{one} and {other}" for one, other in facts.apart[:4])
    return warning(
        "GPU links", f"{len(facts.apart)} pairs of GPUs cannot access each other's memory ({pairs})",
        "their traffic goes through the host; check `nvidia-smi topo -m`, and IOMMU or ACS in the firmware",
    )  # fmt: skip


def check_rdma(machine: Machine) -> Check:
    """Check RDMA devices and the state of their ports."""
    ports = sorted((machine.sys / "class" / "infiniband").glob("*/ports/*"))
    if not ports:
        return not_here("RDMA", f"no device in {machine.sys / 'class' / 'infiniband'}")
    told, down = [], []
    for port in ports:
        state, rate, layer = (_line(port / name) for name in ("state", "rate", "link_layer"))
        name = f"{port.parts[-3]} port {port.name}"
        told.append(f"{name} {layer} {rate}".strip())
        if "ACTIVE" not in state:
            down.append(f"{name} is {state.rpartition(':')[2].strip() or 'in an unknown state'}")
    if not (machine.dev / "infiniband").is_dir():
        return warning(
            "RDMA", f"{len(ports)} ports, but {machine.dev / 'infiniband'} is missing",
            "pass the devices to the container (--device=/dev/infiniband)",
        )  # fmt: skip
    if down:
        return warning("RDMA", "; ".join(down), "check cables, the switch and the subnet manager")
    return ok("RDMA", "; ".join(told))


def check_network(machine: Machine, *, has_gpus: bool, has_other_nodes: bool) -> list[Check]:
    """Check the interfaces that gloo and NCCL will use."""
    found = machine.interfaces()
    taken = network.gloo_takes(machine.environment, found, machine.host, machine.resolve)
    return [
        network.check_gloo(taken, found, has_other_nodes=has_other_nodes),
        network.check_nccl(machine.environment, found, has_gpus=has_gpus, has_other_nodes=has_other_nodes),
    ]


def check_shared_memory(machine: Machine, *, num_gpus: int) -> Check:
    """Check the free space in /dev/shm, which NCCL uses. Our own wires map unnamed files."""
    folder = machine.dev / "shm"
    if not folder.is_dir():
        return warning("shared memory", f"{folder} is missing", "mount a tmpfs there")
    free = machine.shared_bytes(folder)
    found = f"{gib(free)} free in {folder}"
    if num_gpus > 1 and free < _LEAST_SHARED:
        return warning("shared memory", f"{found}; NCCL between {num_gpus} GPUs may need more", "docker run --shm-size=8g, or --ipc=host")  # fmt: skip
    return ok("shared memory", found + ("" if num_gpus else " (only NCCL needs it)"))


def check_huge_pages(machine: Machine) -> Check:
    """Report the mode of transparent huge pages. A service needs no reserved ones."""
    mode = re.search(r"\[(\w+)\]", _line(machine.sys / "kernel" / "mm" / "transparent_hugepage" / "enabled"))
    reserved = re.search(r"HugePages_Total:\s*(\d+)", (machine.proc / "meminfo").read_text())
    if mode is None:
        return not_here("huge pages", "this kernel has no transparent huge pages")
    return ok(
        "huge pages", f"transparent: {mode[1]}; {reserved[1] if reserved else 0} reserved (none needed)"
    )


def check_open_files(machine: Machine, options: Options, num_ranks: int) -> Check:
    """Check that the front can hold a socket for every concurrent request."""
    limit = machine.limit_of(resource.RLIMIT_NOFILE)
    requests = (options.engine.max_num_seqs or 0) * num_ranks
    needed = requests + _FILES_BESIDES_REQUESTS + _FILES_PER_RANK * num_ranks
    if limit == _UNLIMITED or limit >= needed:
        return ok("open files", f"limit {_limit(limit)}; about {needed:,} needed")
    return warning(
        "open files", f"limit {limit:,}, but {requests:,} concurrent requests need about {needed:,}",
        f"ulimit -n {1 << (needed - 1).bit_length()}, or a smaller --max-num-seqs",
    )  # fmt: skip


def check_fronts(options: Options, num_cores: int) -> Check:
    """Check that each front can have a core."""
    num_fronts = options.api_server_count
    found = f"{num_fronts} on {num_cores} core{'s' if num_cores > 1 else ''}"
    if num_fronts <= max(1, num_cores):
        return ok("fronts", found)
    return warning(
        "fronts", f"{found}, so they slow each other down", f"--api-server-count {max(1, num_cores)} or less"
    )  # fmt: skip


def check_locked_memory(machine: Machine) -> Check:
    """Check that RDMA may pin its buffers."""
    limit = machine.limit_of(resource.RLIMIT_MEMLOCK)
    found = "unlimited" if limit == _UNLIMITED else f"at most {limit >> 10:,} KiB"
    if not any((machine.sys / "class" / "infiniband").glob("*")):
        return ok("locked memory", f"{found} (only RDMA needs it)")
    if limit == _UNLIMITED:
        return ok("locked memory", found)
    return warning("locked memory", f"{found}, but RDMA pins its buffers", "ulimit -l unlimited, or docker run --ulimit memlock=-1")  # fmt: skip


def check_ports(machine: Machine) -> Check:
    """Check the range of ports that the kernel assigns to ranks."""
    path = machine.proc / "sys" / "net" / "ipv4" / "ip_local_port_range"
    first, last = map(int, path.read_text().split())
    text = f"ranks listen on free ports from {first} to {last}"
    if last - first < _FEW_PORTS:
        return warning("ports", f"{text}, a small range", "sysctl net.ipv4.ip_local_port_range='32768 60999'")
    return ok("ports", f"{text}; allow them between the nodes")


def check_http(options: Options) -> Check:
    """Check that HTTP can listen."""
    try:
        check_listener(options)
    except (PreflightError, OptionsError) as error:
        served = capacity_of(options)
        if served is not None:
            where = options.uds or f"port {options.port}"
            return warning(
                "HTTP", f"a WideEP service already answers on {where}", "use another --port for a second one"
            )
        return failure("HTTP", str(error))
    where = options.uds or (
        f"{options.host} port {options.port}" if options.port else f"a free port of {options.host}"
    )
    return ok("HTTP", f"can listen on {where}")


def check_model(
    options: Options, *, pool_sizes: Sequence[int], num_ranks: int, gpu_bytes: int | None
) -> Iterator[Check]:
    """Check a model's files and whether a node's ranks fit, as at a start.

    Args:
        options: The options; `model` is a directory.
        pool_sizes: For each rank on this node, the number of ranks of its pool.
        num_ranks: Number of ranks on all nodes.
        gpu_bytes: Smallest free memory of all GPUs; None on a CPU.
    """
    try:
        check_choices(options, pool_sizes)
        weights = check_files(options, pool_sizes)
        check_random_weights(options)
        files = safetensors_files(Path(options.model))
        size = sum(path.stat().st_size for path in files)
        kind = read_config(Path(options.model)).get("model_type", "unknown")
        found = f"{len(files)} weight file{'s' if len(files) > 1 else ''} of {gib(size)}, complete"
        yield ok("model files", f"{kind}, {found if files else 'with random weights'}")
    except PreflightError as error:
        yield failure("model files", str(error))
        return
    try:
        experts = check_room(options, weights, pool_sizes=pool_sizes, gpu_bytes=gpu_bytes)
    except PreflightError as error:
        yield failure("memory", str(error))
        return
    free = available_bytes() if gpu_bytes is None else gpu_bytes
    where = (
        f"{gib(free)} free on this node (local ranks: {len(pool_sizes)})"
        if gpu_bytes is None
        else f"{gib(free)} free on a GPU"
    )
    which = "each" if len(set(pool_sizes)) == 1 else "the largest"
    yield ok(
        "memory", f"{which} of {num_ranks} ranks holds {gib(weights.shared + experts.serving)} of weights; {where}",
        rank_bytes=weights.shared + experts.serving + experts.spare, free_bytes=free,
    )  # fmt: skip


def _line(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""


def _limit(limit: int) -> str:
    return "not set" if limit == _UNLIMITED else f"{limit:,}"
