"""Files of placements and of recorded loads.

A placement is a JSON file for people and scripts. `--expert-placement FILE` reads it, `wideep experts plan --out FILE`
writes it, and HTTP and the ranks' messages carry it.

    {"format": "wideep-placement", "format_version": 1, "num_experts": 8, "num_ranks": 2, "version": 0,
     "digest": "...", "layers": [{"slots": [[0, 1, null], [2, 3, 0]], "shares": [[0.6, 1, 0], [1, 1, 0.4]]}, ...]}

`slots` has one list per rank; null is an empty slot. `shares` (even by default), `version` and `digest` are optional; a
given digest is checked. Files are written under a temporary name and renamed, so that readers never see a partial one.

A recorded load is the number of tokens that chose each expert, per window: [layers, experts] or [windows, layers,
experts]. `wideep experts record` writes .npz with `load`, and `prefill` and `decode` of the same shape. SGLang's expert
distribution record (`logical_count`, as JSON or .npz) and {"load_history": [{"logical_expert_load": [layers][experts]},
...]}, as published with ADRS's EPLB work, are also read. Layers without any load (dense ones) are left out.
"""

import json
import os
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from expert_placement.load import PHASES
from expert_placement.placement import EMPTY, Placement

FORMAT, FORMAT_VERSION = "wideep-placement", 1
_KEYS = {"format", "format_version", "num_experts", "num_ranks", "version", "digest", "layers"}
_LAYER_KEYS = {"slots", "shares", "slots_per_rank"}  # earlier versions wrote the last one, which is redundant


class PlacementFileError(ValueError):
    """An invalid placement file. The message names the file and the problem."""


class LoadFileError(ValueError):
    """An invalid load file. The message names the file and the problem."""


class LoadTrace(NamedTuple):
    """Loads over time."""

    load: np.ndarray  # [windows, layers, experts] float64
    layers: np.ndarray  # [layers] int64: their indices in the file
    phases: dict[str, np.ndarray]  # parts of the load, each of its shape; empty if a file does not have them


@contextmanager
def _naming(path: Path, what: str, error_type: type[ValueError]) -> Iterator[None]:
    """Turn any problem with a file into one error that names the file."""
    try:
        yield
    except OSError as error:
        raise error_type(f"{path} cannot be read: {error.strerror or error}") from error
    except error_type:
        raise
    except (EOFError, ValueError, TypeError, KeyError, zipfile.BadZipFile) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise error_type(f"{path} {what}: {reason}") from error


def save_placement(placement: Placement, path: Path) -> None:
    """Write a placement.

    Raises:
        PlacementFileError: The file's name is that of an archive. OSError: The file cannot be written.
    """
    if path.suffix == ".npz":
        raise PlacementFileError(f"{path}: a placement is written as JSON; give it a name that ends in .json")
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(json.dumps(to_json(placement)) + "\n")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def load_placement(path: Path) -> Placement:
    """Read a placement.

    Raises:
        PlacementFileError: The file cannot be read, or is not a placement.
    """
    with _naming(path, "is not a placement", PlacementFileError):
        content = path.read_bytes()
        if content.startswith(b"PK"):  # an archive, such as .npz
            raise ValueError(
                "placements are JSON; this is an archive, such as a recorded load, from which `wideep experts plan` "
                "makes a placement"
            )
        return from_json(json.loads(content))


def to_json(placement: Placement) -> dict[str, Any]:
    """Return a placement as JSON values."""
    slots, shares = (placement.by_rank(part).tolist() for part in (placement.slot_expert, placement.share))
    layers = [
        {
            "slots": [[None if expert == EMPTY else expert for expert in rank] for rank in slots[layer]],
            "shares": shares[layer],
        }
        for layer in range(placement.num_layers)
    ]
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "num_experts": placement.num_experts,
        "num_ranks": placement.num_ranks,
        "version": placement.version,
        "digest": placement.digest(),
        "layers": layers,
    }


def from_json(value: Any) -> Placement:
    """Build a placement from JSON values.

    Raises:
        ValueError: A value is wrong. KeyError: A key is missing.
    """
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise ValueError(f'it must be an object with "format": "{FORMAT}"')
    if value.get("format_version") != FORMAT_VERSION:
        raise ValueError(f"format_version is {value.get('format_version')!r}; it must be {FORMAT_VERSION}")
    _refuse_unknown(value, _KEYS)
    layers = value["layers"]
    if not isinstance(layers, list) or not layers:
        raise ValueError("layers must be a list with an entry for each MoE layer")
    for layer in layers:
        _refuse_unknown(layer, _LAYER_KEYS)
    slots = _rows([layer["slots"] for layer in layers], "slots", EMPTY)
    given = [layer.get("shares") for layer in layers]
    if any(shares is None for shares in given) and not all(shares is None for shares in given):
        raise ValueError("some layers have shares and others have none; give all or none")
    num_ranks = int(value["num_ranks"])
    if len(layers[0]["slots"]) != num_ranks:
        raise ValueError(
            f"slots has {len(layers[0]['slots'])} lists per layer for {num_ranks} ranks; it must have one per rank"
        )
    placement = Placement(
        slots,
        int(value["num_experts"]),
        num_ranks,
        share=None if given[0] is None else _rows(given, "shares", 0.0),  # type: ignore[arg-type]
        version=int(value.get("version", 0)),
    )
    digest = value.get("digest")
    if digest is not None and digest != placement.digest():
        raise ValueError(
            f"its digest is {digest}, but that of its content is {placement.digest()}: it was changed or cut off; "
            f"remove the digest from a file that you edit"
        )
    return placement


def _rows(layers: list[Any], name: str, empty: float) -> np.ndarray:
    """Flatten [layers][ranks][slots] of equal shapes. null becomes `empty`."""
    rows = []
    for index, layer in enumerate(layers):
        if not isinstance(layer, list) or not all(isinstance(rank, list) for rank in layer):
            raise ValueError(f"layer {index}: {name} must be a list of lists, one per rank")
        if len({len(rank) for rank in layer}) > 1 or len(layer) != len(layers[0]):
            raise ValueError(
                f"layer {index}: {name} must have the same number of ranks and of slots per rank in all layers"
            )
        rows.append([empty if slot is None else slot for rank in layer for slot in rank])
    if len({len(row) for row in rows}) > 1:
        raise ValueError(f"{name} must have the same number of slots in all layers")
    array = np.array(rows)
    if array.dtype.kind not in "iuf" or (name == "slots" and array.dtype.kind == "f"):
        raise ValueError(f"{name} must be numbers, and whole numbers for slots")
    return array


def _refuse_unknown(value: Any, known: set[str]) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{value!r} is not an object")
    unknown = sorted(set(value) - known)
    if unknown:
        raise ValueError(f"{', '.join(unknown)} is not known; the keys are {', '.join(sorted(known))}")


def read_loads(paths: Sequence[Path]) -> LoadTrace:
    """Read files as one trace, in the given order.

    Raises:
        LoadFileError: A file cannot be read, holds no load, or does not match the first.
    """
    files = [_read_load(path) for path in paths]
    if not files:
        raise LoadFileError("no load file was given")
    windows = [file["load"] for file in files]
    for path, load in zip(paths, windows, strict=True):
        if load.shape[1:] != windows[0].shape[1:]:
            raise LoadFileError(
                f"{path} has {load.shape[1]} layers of {load.shape[2]} experts, {paths[0]} has "
                f"{windows[0].shape[1]} of {windows[0].shape[2]}; give loads of one model"
            )
    load = np.concatenate(windows)
    layers = np.flatnonzero(load.sum(axis=(0, 2)) > 0)
    if not len(layers):
        raise LoadFileError(f"{paths[0]} has no layer with any load")
    known = [phase for phase in PHASES if all(phase in file for file in files)]
    phases = {phase: np.concatenate([file[phase] for file in files])[:, layers] for phase in known}
    return LoadTrace(np.ascontiguousarray(load[:, layers]), layers, phases)


def _read_load(path: Path) -> dict[str, np.ndarray]:
    """Read the total load as "load", and by phase if the file has phases. Each is [windows, layers, experts]."""
    if path.suffix in (".pt", ".pth"):
        raise LoadFileError(
            f"{path} is a PyTorch file, which can run code when it is loaded; convert it on the machine that made it: "
            f"numpy.savez('load.npz', logical_count=torch.load(FILE)['logical_count'])"
        )
    with _naming(path, "holds no expert load", LoadFileError):
        is_npz = path.suffix == ".npz"
        values = _from_npz(path) if is_npz else {"load": _from_json_load(json.loads(path.read_text()))}
        loads = {name: np.array(value, dtype=np.float64) for name, value in values.items()}
    shape = loads["load"].shape
    if any(part.shape != shape for part in loads.values()):
        raise LoadFileError(f"{path}: its phases and its load must have one shape; the load's is {shape}")
    if len(shape) not in (2, 3) or 0 in shape:
        raise LoadFileError(f"{path}: the load has shape {shape}; it must be [windows, layers, experts]")
    if any(not np.isfinite(part).all() or (part < 0).any() for part in loads.values()):
        raise LoadFileError(f"{path}: loads must be numbers from 0 up")
    return {name: part.reshape(-1, *shape[-2:]) for name, part in loads.items()}


def _from_npz(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as arrays:
        names = set(arrays.files)
        if not names & {"load", "logical_count"}:
            raise ValueError(
                f"it must have an array `load` or `logical_count`; it has {', '.join(sorted(names))}"
            )
        phases = PHASES if names.issuperset(PHASES) else ()
        load = arrays["load" if "load" in names else "logical_count"]
        return {"load": load, **{phase: arrays[phase] for phase in phases}}


def _from_json_load(value: Any) -> Any:
    if isinstance(value, dict) and value.get("format") == FORMAT:
        raise ValueError("it is a placement; `wideep experts record` writes loads")
    if isinstance(value, dict) and "load_history" in value:
        return [window["logical_expert_load"] for window in value["load_history"]]
    if not isinstance(value, dict) or "logical_count" not in value:
        raise ValueError('it must be an object with "logical_count" or "load_history"')
    return value["logical_count"]
