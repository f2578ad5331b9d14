"""Resources of a process from /proc: memory, descriptors, threads."""

from pathlib import Path


def rss_bytes(pid: int) -> int:
    """Return the current resident memory."""
    return _kib(pid, "VmRSS") * 1024


def peak_rss_bytes(pid: int) -> int:
    """Return the peak resident memory since the start, or since `reset_peak`."""
    return _kib(pid, "VmHWM") * 1024


def reset_peak(pid: int) -> None:
    """Restart the measurement of `peak_rss_bytes`."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def num_descriptors(pid: int) -> int:
    """Return the number of open files and sockets."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def num_threads(pid: int) -> int:
    return _kib(pid, "Threads")


def _kib(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
    raise LookupError(f"/proc/{pid}/status has no {name}")
