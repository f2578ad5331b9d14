"""What this machine still has to give: cores and memory, as the kernel and a container's limits allow.

Knows no torch. Reads cgroup v2 (and v1's memory limit) because inside a container /proc speaks of the whole host.
"""

import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """Return the cores that this process may use: its affinity, capped by the container's quota."""
    cores = len(os.sched_getaffinity(0))
    quota, _, period = _read(cgroup / "cpu.max").partition(" ")
    if quota.isdigit() and period.strip().isdigit():
        cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)


def available_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = _CGROUP) -> int:
    """Return the memory that can be had without swapping: MemAvailable, capped by the container's limit."""
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024  # the kernel writes KiB
    for limit_name, usage_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit, usage = _read(cgroup / limit_name), _read(cgroup / usage_name)
        if limit.isdigit() and usage.isdigit():
            stat = _read((cgroup / usage_name).with_name("memory.stat"))
            cache = next(
                (int(line.split()[1]) for line in stat.splitlines() if line.startswith("inactive_file ")), 0
            )
            available = min(available, int(limit) - int(usage) + cache)  # page cache can be given back
    return max(0, available)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # not in a cgroup of this kind
        return ""
