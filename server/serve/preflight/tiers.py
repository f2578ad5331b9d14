"""Check that the tiers of the KV cache fit on this node: into its free memory and on its disk. Does not use torch.

A tier that is too large fails here and not at its first use, when it would end ranks or fill the disk. A disk that becomes
full or unwritable later only disables its tier. The size of /dev/shm is not checked: the ranks share an unnamed file, which
that limit does not concern.
"""

import os
from pathlib import Path

from kvcache.tiers.remote_memory import RemoteMemoryError, check_installed
from scheduler.policy.config import EngineSettings
from server.options.pools import have_roles
from server.options.table import Options
from server.serve.preflight.memory import gib, total_bytes
from server.serve.preflight.model import PreflightError

# Pools hand requests over through host memory. Its size need only cover the requests that are on the way; more keeps prefixes.
HAND_OVER_SHARE = 0.1  # of this machine's memory


def with_hand_over(options: Options, *, machine_bytes: int | None = None) -> Options:
    """Return options with a tier in host memory if pools hand requests over and none is given.

    The size depends on the machine only, so that all processes of a node compute the same one.

    Args:
        machine_bytes: Memory of the machine. None measures it.
    """
    if not have_roles(options.pools_among(options.given_ranks or 1)) or options.engine.kv_offloading_bytes:
        return options
    machine_bytes = total_bytes() if machine_bytes is None else machine_bytes
    return options.with_engine(kv_offloading_bytes=int(machine_bytes * HAND_OVER_SHARE))


def note_on_hand_over(given: Options, options: Options) -> str | None:
    """Return a note on the tier that `with_hand_over` has added, or None if it has added none."""
    if given.engine.kv_offloading_bytes == options.engine.kv_offloading_bytes:
        return None
    return (
        f"the pools share {gib(options.engine.kv_offloading_bytes)} of host memory for handing requests over, "
        f"{HAND_OVER_SHARE:.0%} of this machine's by default (--kv-offloading-size)"
    )


def check_tiers(engine: EngineSettings, *, ranks_bytes: int, free_bytes: int) -> None:
    """Check the sizes of this node's tiers, and how other nodes reach them.

    Args:
        ranks_bytes: Host memory that the ranks of this node need for themselves.
        free_bytes: Free host memory, before any rank has started.

    Raises:
        PreflightError: A tier does not fit, its folder cannot be written, or NIXL is missing. The message has the sizes and
            the remedy.
    """
    if engine.kv_offloading_bytes:
        _check_host(engine.kv_offloading_bytes, free_bytes - ranks_bytes, ranks_bytes)
    if engine.kv_transfer_backend == "nixl":
        _check_nixl(engine)
    if engine.kv_offloading_dir is not None:
        _check_disk(engine.kv_offloading_disk_bytes, Path(engine.kv_offloading_dir))


def _check_host(tier_bytes: int, left_bytes: int, ranks_bytes: int) -> None:
    if tier_bytes > left_bytes:
        of_ranks = f" after the {gib(ranks_bytes)} that this node's ranks need" if ranks_bytes else ""
        raise PreflightError(
            f"--kv-offloading-size is {gib(tier_bytes)}, but {gib(max(0, left_bytes))} of host memory is free{of_ranks}; "
            "give a smaller size, or add a tier on disk with --kv-offloading-dir"
        )


def _check_nixl(engine: EngineSettings) -> None:
    if not engine.kv_offloading_bytes:
        raise PreflightError(
            "--kv-transfer-backend nixl reads the host memory of other nodes; give its size with --kv-offloading-size"
        )
    try:
        check_installed()
    except RemoteMemoryError as error:
        raise PreflightError(f"--kv-transfer-backend nixl: {error}") from error


def _check_disk(tier_bytes: int, folder: Path) -> None:
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PreflightError(
            f"--kv-offloading-dir is {str(folder)!r}, but {existing} cannot be written; give a folder on a writable disk"
        )
    free_bytes = free_at(existing)
    # Files of an earlier start count towards the tier, not against it. Counting them takes time, so it is the second step.
    if tier_bytes > free_bytes and tier_bytes > free_bytes + (kept_bytes := _size_of(folder)):
        kept = f" besides the {gib(kept_bytes)} in the folder" if kept_bytes else ""
        raise PreflightError(
            f"--kv-offloading-disk-size is {gib(tier_bytes)}, but the disk of {folder} has {gib(free_bytes)} free{kept}; "
            "give a smaller size, or a folder on a larger disk"
        )


def free_at(path: Path) -> int:
    """Return the bytes that this user may still write to the file system of `path`."""
    found = os.statvfs(path)
    return found.f_frsize * found.f_bavail


def _size_of(folder: Path) -> int:
    """Return the size on disk of all files below a folder. Files that vanish meanwhile do not count."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total
