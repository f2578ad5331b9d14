"""What a tuner decides and writes: the best of the tiles that were tried, as an entry of `attention.gpu.tiles`' table.

No torch in here.
"""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

Table = dict[str, dict[str, dict[str, dict[str, int]]]]  # device, kernel, shape, fields

LEAST_GAIN = 1.02  # below, the kernel's own choice stays: it is within what runs differ by


class Tried(NamedTuple):
    """A candidate, its times against the kernel's choice, and why it is out if it is."""

    tile: Any
    times: float
    trouble: str = ""


def best_of(tried: list[Tried]) -> Tried | None:
    """Return the fastest one that is worth it."""
    able = [candidate for candidate in tried if not candidate.trouble and candidate.times >= LEAST_GAIN]
    return max(able, key=lambda candidate: candidate.times, default=None)


def fields_of(tile: Any, choice: Any) -> dict[str, int]:
    """Return the fields in which a tile differs from the kernel's choice."""
    return {name: value for name, value in tile._asdict().items() if value != getattr(choice, name)}


def with_entry(table: Table, at: tuple[str, str, str], tile: Any) -> Table:
    """Return a table with one entry more, or another in its place; whole, as others may change what it does not say."""
    device, kernel, shape = at
    kernels = table.get(device, {})
    entries = {**kernels.get(kernel, {}), shape: tile._asdict()}
    return {**table, device: {**kernels, kernel: entries}}


def write_table(path: Path, table: Table) -> None:
    """Write whole or not at all."""
    scratch = path.with_suffix(f".{os.getpid()}")
    scratch.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    os.replace(scratch, path)
