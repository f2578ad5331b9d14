"""Tiles of kernels by GPU: a table checked in as data, with fallbacks for missing entries.

`tiles.json` holds {device: {kernel: {shape: {field: number}}}}. A device is a CUDA device name ("NVIDIA H200") or an
architecture ("sm_90"). A shape is a result of `shape_key`, or "e2m1 *" for all other shapes of a kind. The fields are
those of the kernel's tile that differ from its fallback. The tuner in the benchmarks writes the table; it also has entries
for architectures with too few registers or too little shared memory, found by a compile test. Tiles determine the order in
which numbers are added, so a table is part of a release: it is never tuned while serving, and all ranks of a service
read the same one.
Rejected: Triton's own autotuner, which times kernels when they first run and may choose differently on another rank.
"""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

TABLE = Path(__file__).with_name("tiles.json")

Tile = TypeVar("Tile", bound=tuple[int, ...])  # a NamedTuple of ints
Fields = Mapping[str, int]
Table = Mapping[str, Mapping[str, Mapping[str, Fields]]]


def shape_key(kind: torch.dtype | str, **sizes: int | str) -> str:
    """Return the name of a class of shapes: `shape_key(torch.bfloat16, D=128, V=128)` is "bfloat16 D128 V128"."""
    return " ".join([str(kind).removeprefix("torch."), *(f"{name}{size}" for name, size in sizes.items())])


@functools.cache
def read_table(path: Path = TABLE) -> Table:
    """Read a table.

    Raises:
        ValueError: The table contains a value that is not a positive whole number.
    """
    table: Table = json.loads(path.read_text())
    for device, kernels in table.items():
        for kernel, shapes in kernels.items():
            for shape, fields in shapes.items():
                for field, value in fields.items():
                    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                        at = f"{device} / {kernel} / {shape} / {field}"
                        raise ValueError(f"{path.name}: {at} is {value!r}; it must be a whole number above 0")
    return table


@functools.cache
def device_names(device: torch.device) -> tuple[str, ...]:
    """Return the names of a device in a table, the most specific first; none for the CPU."""
    if device.type != "cuda":
        return ()
    major, minor = torch.cuda.get_device_capability(device)
    return torch.cuda.get_device_name(device), f"sm_{major}{minor}"


def tile_of(
    kernel: str, shape: str, fallback: Tile, names: tuple[str, ...], table: Table | None = None
) -> Tile:
    """Return a kernel's tile.

    Args:
        kernel: Name of the kernel in the table. shape: a result of `shape_key`.
        fallback: NamedTuple to use if the table has no entry.
        names: Names of the device, from `device_names`.
        table: Table to use; by default the one that is checked in.

    Raises:
        ValueError: The table has a field that the tile does not have.
    """
    table = read_table() if table is None else table
    for name in names:
        shapes = table.get(name, {}).get(kernel, {})
        for key in (shape, f"{shape.split()[0]} *"):
            if key in shapes:
                return _with(fallback, shapes[key], f"{name} / {kernel} / {key}")
    return fallback


def _with(fallback: Tile, fields: Fields, at: str) -> Tile:
    tile = cast(Any, fallback)  # mypy does not know the methods of named tuples on a type variable
    unknown = sorted(set(fields) - set(tile._fields))
    if unknown:
        raise ValueError(f"tiles.json: {at} has {', '.join(unknown)}; its tile has {', '.join(tile._fields)}")
    return cast(Tile, tile._replace(**fields))
