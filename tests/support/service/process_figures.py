"""What a process holds, from /proc: memory, descriptors, threads."""

from pathlib import Path


def rss_bytes(pid: int) -> int:
    """Resident memory now."""
    return _kib(pid, "VmRSS") * 1024


def peak_rss_bytes(pid: int) -> int:
    """The most resident memory since the start, or since `reset_peak`."""
    return _kib(pid, "VmHWM") * 1024


def reset_peak(pid: int) -> None:
    """Let `peak_rss_bytes` begin anew."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def num_descriptors(pid: int) -> int:
    """Open files and sockets."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def num_threads(pid: int) -> int:
    """Threads."""
    return _kib(pid, "Threads")


def _kib(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
    raise LookupError(f"/proc/{pid}/status has no {name}")
