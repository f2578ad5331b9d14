"""Compare what must be equal on all nodes: programs, libraries, GPUs, the checkpoint and the cluster key.

Ranks run one program in lock-step over one checkpoint. Differences need not cause a failure: answers may be wrong, or
differ from run to run. So each node publishes its facts, and every node compares all of them, with the same result.

A checkpoint is compared by its files: configuration and tokenizer completely; weight files by size, header and samples of
every tensor. This takes seconds for hundreds of gigabytes, and training changes nearly every number of the tensors that it
trains, even if these are few: a merged adapter often leaves all experts as they were. Rejected: a digest of every byte, which
takes as long as loading the model on every node; samples at even distances in a file, which fall into experts only.

Versions of WideEP may differ, so that nodes can be upgraded one by one, if two digests are equal: the link digest, of everything
that nodes send each other outside of steps, and the dispatch digest, of everything that ranks run in lock-step. Both cover whole
source files. Rejected: a compatibility number, which a developer can forget to raise.
"""

import hashlib
import json
import os
import platform
import re
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from server.link.seal import SAME_KEY, mac
from server.machine.report import Check, failure, not_here, ok, warning
from server.machine.roots import PACKAGES
from server.machine.versions import version_of
from server.serve.preflight.device import NO_FACTS, GpuFacts
from server.serve.preflight.model import PreflightError, read_header, safetensors_files

_WIDEEP, _LINK, _DISPATCH = "wideep", "wideep's link digest", "wideep's dispatch digest"
# They compute or decide in lock-step, or define what nodes send each other: they must be equal.
_DECIDING = (_LINK, _DISPATCH, "torch", "transformers")
_SHOWN = (_WIDEEP, "torch", "transformers")  # if all are equal
_LINK_FOLDERS = ("server/link", "server/serve/store")
_DISPATCH_FOLDERS = tuple(package for package in PACKAGES if package != "server")
_OTHERS = ("numpy", "numba", "safetensors", "grpcio", "triton", "nvshmem4py-cu13", "llguidance")
_ROOT = Path(__file__).resolve().parents[3]
_NOT_WEIGHTS = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")
_SAMPLE_BYTES = 4096
_SECTION_BYTES = 8 << 20  # of a tensor; each has a sample
_UNKNOWN_SECTION_BYTES = 1 << 20  # of a file without a header of safetensors
# Of a tensor: the middle of joined q, k and v may be k, which many adapters leave as it is.
_LEAST_SAMPLES = 2
_READERS = 4  # threads: a disk reads many samples at once
_HEX = 12  # digits of a digest; enough to distinguish files


class Identity(NamedTuple):
    """The host and network namespace of a process."""

    host: str
    network: str  # equal for processes that share their interfaces, including loopback


def identity() -> Identity:
    """Return the identity of this process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return Identity(socket.gethostname(), f"{boot} {os.readlink('/proc/self/ns/net')}")


def driver_version(proc: Path = Path("/proc")) -> str:
    """Return the version of the NVIDIA driver, or "" if it is missing or unknown."""
    path = driver_file(proc)
    found = re.search(r"Module\s+(?:for \S+\s+)?([\d.]+)", path.read_text()) if path.exists() else None
    return found[1] if found else ""


def driver_file(proc: Path) -> Path:
    """Return the path of the NVIDIA driver's version file."""
    return proc / "driver" / "nvidia" / "version"


def facts_to_compare(
    directory: Path | None, key: bytes | None, gpus: GpuFacts = NO_FACTS, *, root: Path = _ROOT
) -> dict[str, Any]:
    """Return this node's facts, as JSON values.

    Args:
        directory: The model's directory; None without a model.
        key: The cluster key.
        gpus: Facts about the GPUs. A start compares the driver only, because each rank examines its own GPU.

    Raises:
        PreflightError: Files of the checkpoint are missing.
    """
    versions = {
        _WIDEEP: f"{version_of(_WIDEEP) or '(not installed)'} (source {source_digest(root)})",
        _LINK: source_digest(root, _LINK_FOLDERS),
        _DISPATCH: source_digest(root, _DISPATCH_FOLDERS),
        **{name: version_of(name) for name in ("torch", "transformers", *_OTHERS)},
    }
    return {
        "versions": {**versions, "Python": platform.python_version()},
        "processor": _processor(),
        "gpus": _gpus(gpus),
        "files": None if directory is None else file_digests(directory),
        "key": None if key is None else mac(key, b"wideep doctor").hex()[:_HEX],
    }


def computing_facts(root: Path = _ROOT) -> str:
    """Return a text that two processes share if they compute the same bits: versions of what computes, and the processor."""
    facts = facts_to_compare(None, None, root=root)
    versions = {name: found for name, found in facts["versions"].items() if name not in (_WIDEEP, _LINK)}
    return json.dumps([versions, facts["processor"]], sort_keys=True)


def source_digest(root: Path, folders: Sequence[str] = PACKAGES) -> str:
    """Return a digest of our source files below some folders: two checkouts often have the same version number."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in folders for path in (root / folder).rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:_HEX]


def file_digests(directory: Path) -> dict[str, str]:
    """Return a digest of each file of a checkpoint, by name.

    Raises:
        PreflightError: Weight files are missing.
    """
    small = {path for pattern in _NOT_WEIGHTS for path in directory.glob(pattern) if path.is_file()}
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:_HEX] for path in sorted(small)}
    files = safetensors_files(directory)
    with ThreadPoolExecutor(_READERS) as readers:
        digests = list(readers.map(_sampled_digest, files))
    return found | {path.name: digest for path, digest in zip(files, digests, strict=True)}


def _sampled_digest(path: Path) -> str:
    """Return a digest of a weight file's size, header and samples."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    try:
        pieces = list(_samples_of_tensors(path))
    except (PreflightError, ValueError, KeyError, TypeError, AttributeError):  # not a safetensors file
        pieces = [(0, min(size, _SAMPLE_BYTES)), *_samples(0, size, 1, _UNKNOWN_SECTION_BYTES)]
    with path.open("rb") as file:
        descriptor = file.fileno()
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # read no more than the samples
        for at, num_bytes in pieces:
            digest.update(os.pread(descriptor, num_bytes, at))
    return digest.hexdigest()[:_HEX]


def _samples_of_tensors(path: Path) -> Iterator[tuple[int, int]]:
    """Yield where the header and the samples of a safetensors file begin, and how many bytes they have."""
    tensors = read_header(path).values()
    first = path.stat().st_size - max(tensor["data_offsets"][1] for tensor in tensors)
    yield 0, first
    for tensor in tensors:
        begin, end = tensor["data_offsets"]
        shape = tensor["shape"]
        # Training may change some experts of a tensor that has all of them.
        num_matrices = shape[0] if len(shape) > 2 else 1
        yield from _samples(first + begin, end - begin, num_matrices, _SECTION_BYTES)


def _samples(begin: int, num_bytes: int, num_matrices: int, section_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield samples in the middle of equal sections, or all bytes if the samples would be most of them."""
    count = max(_LEAST_SAMPLES, num_matrices, -(-num_bytes // section_bytes))
    if num_bytes <= 2 * count * _SAMPLE_BYTES:
        yield begin, num_bytes
        return
    for sample in range(count):
        yield begin + (2 * sample + 1) * num_bytes // (2 * count) - _SAMPLE_BYTES // 2, _SAMPLE_BYTES


def _gpus(facts: GpuFacts) -> dict[str, str]:
    kinds = Counter(gpu.name for gpu in facts.devices)
    return {
        "set of GPUs": " and ".join(f"{count} x {name}" for name, count in sorted(kinds.items())),
        "NCCL": facts.nccl,
        "torch's CUDA": facts.built_for,
        "NVIDIA driver": driver_version(),
    }


def _processor() -> str:
    facts = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", facts.read_text() if facts.exists() else "", re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def compare(names: Sequence[str], facts: Sequence[Mapping[str, Any]]) -> list[Check]:
    """Compare the facts of all nodes.

    Args:
        names: Names of the nodes, in the order of `facts`.
    """
    checks = [_compare_versions(names, [each["versions"] for each in facts])]
    checks += _compare_gpus(names, [each["gpus"] for each in facts])
    checks.append(_compare_checkpoints(names, [each["files"] for each in facts]))
    checks.append(_compare_keys(names, [each["key"] for each in facts]))
    checks += _compare_pools(names, [each.get("pools") for each in facts])
    processors = [each["processor"] for each in facts]
    if len(set(processors)) > 1:
        text = f"the processors differ: {_who_has(names, processors)}"
        checks.append(warning("processors", text, "CPU results are bit-equal on identical processors only"))
    return checks


def _compare_versions(names: Sequence[str], versions: Sequence[Mapping[str, str]]) -> Check:
    differing = _differing(versions)
    if not differing:
        told = ", ".join(f"{name} {version}" for name, version in versions[0].items() if name in _SHOWN)
        return ok("versions", f"equal on all {len(names)} nodes: {told}")
    said, same = f"the nodes differ: {_told(names, differing)}", "install the same versions on all nodes"
    if any(package in _DECIDING for package in differing):
        return failure("versions", said, same)
    if differing.keys() == {_WIDEEP}:  # an upgrade node by node
        return warning("versions", said, "they serve together, but upgrade the others too")
    return warning("versions", said, same)


def _differing(told: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """Return the facts that differ between nodes, with the value of each node."""
    every = dict.fromkeys(name for each in told for name in each)
    found = {name: [each.get(name, "") for each in told] for name in every}
    return {name: values for name, values in found.items() if len(set(values)) > 1}


def _told(
    names: Sequence[str], differing: Mapping[str, Sequence[str]], *, missing: str = "not installed"
) -> str:
    return "; ".join(
        f"{name} is {_who_has(names, found, missing=missing)}" for name, found in differing.items()
    )


def _compare_gpus(names: Sequence[str], gpus: Sequence[Mapping[str, str]]) -> list[Check]:
    """Compare GPUs and libraries: NCCL's versions must be equal, and kernels too. Returns no check for nodes without GPUs."""
    if not any(value for each in gpus for value in each.values()):
        return []
    differing = _differing(gpus)
    if not differing:
        told = ", ".join(f"{name} {value}" for name, value in gpus[0].items() if value)
        return [ok("equal GPUs", f"on all {len(names)} nodes: {told}")]
    said = f"the nodes differ: {_told(names, differing, missing='none')}"
    if "NCCL" in differing or "torch's CUDA" in differing:
        return [failure("equal GPUs", said, "install the same torch on all nodes")]
    return [
        warning(
            "equal GPUs", said, "results are bit-equal on identical GPUs only, and the slowest sets the pace"
        )
    ]


def _compare_checkpoints(names: Sequence[str], files: Sequence[Mapping[str, str] | None]) -> Check:
    if all(each is None for each in files):
        return not_here("checkpoints", "no MODEL was given")
    told = [each or {} for each in files]
    every = sorted({name for each in told for name in each})
    differing = [name for name in every if len({each.get(name, "") for each in told}) > 1]
    if not differing:
        return ok(
            "checkpoints", f"equal on all {len(names)} nodes: {len(every)} files, by size, header and samples"
        )
    first = differing[0]
    more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
    found = _who_has(names, [each.get(first, "") for each in told], missing="missing")
    return failure(
        "checkpoints", f"the nodes have different checkpoints: {first}{more} differ; {first} is {found}",
        "copy the model from one node to the others",
    )  # fmt: skip


def _compare_keys(names: Sequence[str], keys: Sequence[str | None]) -> Check:
    told = ["none" if each is None else each for each in keys]
    if len(set(told)) == 1:
        if keys[0] is None:
            return ok(
                "cluster key", "no node has one (--cluster-key-file): keep the nodes on a private network"
            )
        return ok("cluster key", f"equal on all {len(names)} nodes")
    which = _who_has(names, ["none" if each is None else f"key {each[:4]}..." for each in keys])
    return failure("cluster key", f"the cluster keys differ: {which}", SAME_KEY)


def _compare_pools(names: Sequence[str], pools: Sequence[str | None]) -> list[Check]:
    """Return a failure if the nodes were started with different pools."""
    if len(set(pools)) == 1:
        return []
    found = _who_has(names, [each or "" for each in pools], missing="none")
    return [failure("pools", f"the nodes have different --pools: {found}", "give all nodes the same")]


def _who_has(names: Sequence[str], values: Sequence[str], *, missing: str = "not installed") -> str:
    """Return which nodes have which value, the most common first: "2.13.0 on a and 2 more, 2.11.0 on b"."""
    nodes: dict[str, list[str]] = {}
    for name, value in zip(names, values, strict=True):
        nodes.setdefault(value, []).append(name)
    told = []
    for value, having in sorted(nodes.items(), key=lambda each: -len(each[1])):
        more = f" and {len(having) - 1} more" if len(having) > 1 else ""
        told.append(f"{value or missing} on {having[0]}{more}")
    return ", ".join(told)
