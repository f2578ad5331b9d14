"""Which tiles a kernel runs with on which GPU: a table checked in as data, and what is used where it says nothing.

`tiles.json` holds {device: {kernel: {shape: {field: number}}}}: a device is a name as CUDA gives it ("NVIDIA H200") or
an architecture ("sm_90"), a shape is what `shape_key` writes, or "e2m1 *" for all of a kind that the device has no
entry of, and the fields are those of the kernel's tile that differ from its fallback. The tuner of the benchmarks writes
it; what an architecture has no room for (registers, shared memory) is in it because a compile test says so. Tiles decide
in which order numbers are added, so a table is part of a release: it is never tuned while serving, and ranks of one
service read the same one (I2).
Rejected: Triton's own autotuner, which times kernels when they first run and may choose otherwise on another rank.
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
    """Name a class of shapes: `shape_key(torch.bfloat16, D=128, V=128)` is "bfloat16 D128 V128"."""
    return " ".join([str(kind).removeprefix("torch."), *(f"{name}{size}" for name, size in sizes.items())])


@functools.cache
def read_table(path: Path = TABLE) -> Table:
    """Read a table.

    Raises:
        ValueError: it is no table of positive whole numbers.
    """
    table: Table = json.loads(path.read_text())
    for device, kernels in table.items():
        for kernel, shapes in kernels.items():
            for shape, fields in shapes.items():
                for field, value in fields.items():
                    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                        at = f"{device} / {kernel} / {shape} / {field}"
                        raise ValueError(f"{path.name}: {at} is {value!r}; tiles are whole numbers from 1 on")
    return table


@functools.cache
def device_names(device: torch.device) -> tuple[str, ...]:
    """How a table may name a device, the closest first; nothing for the CPU."""
    if device.type != "cuda":
        return ()
    major, minor = torch.cuda.get_device_capability(device)
    return torch.cuda.get_device_name(device), f"sm_{major}{minor}"


def tile_of(
    kernel: str, shape: str, fallback: Tile, names: tuple[str, ...], table: Table | None = None
) -> Tile:
    """Return a kernel's tile.

    Args:
        kernel: as the table names it. shape: see `shape_key`.
        fallback: what is used where the table is silent, a NamedTuple.
        names: of the device, see `device_names`.
        table: None: the one that is checked in.

    Raises:
        ValueError: the table has a field that the tile lacks.
    """
    table = read_table() if table is None else table
    for name in names:
        shapes = table.get(name, {}).get(kernel, {})
        for key in (shape, f"{shape.split()[0]} *"):
            if key in shapes:
                return _with(fallback, shapes[key], f"{name} / {kernel} / {key}")
    return fallback


def _with(fallback: Tile, fields: Fields, at: str) -> Tile:
    tile = cast(Any, fallback)  # what all named tuples have, mypy does not know of a type variable
    unknown = sorted(set(fields) - set(tile._fields))
    if unknown:
        raise ValueError(f"tiles.json: {at} has {', '.join(unknown)}; its tile has {', '.join(tile._fields)}")
    return cast(Tile, tile._replace(**fields))
