"""Placements in files: what `--expert-placement FILE` reads and `wideep experts plan --out FILE` writes.

JSON, for people and scripts:

    {"format": "wideep-placement", "format_version": 1, "num_experts": 8, "num_ranks": 2, "version": 0,
     "digest": "...", "layers": [{"slots": [[0, 1, null], [2, 3, 0]], "shares": [[0.6, 1, 0], [1, 1, 0.4]],
     "slots_per_rank": 3}, ...]}

`slots` has one list per rank; null is an empty slot. `shares` (by default even), `slots_per_rank` (how many of the
slots the layer may use; by default all), `version` and `digest` may be left out; a digest that is there is checked.
A file whose name ends in .npz has the arrays slot_expert, num_experts and num_ranks, and where they differ from what a
JSON file may leave out, share, layer_slots, version, digest and format_version.
Files are written beside their place and renamed, so that nobody reads half of one.
"""

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from expert_placement.placement import EMPTY, Placement

FORMAT, FORMAT_VERSION = "wideep-placement", 1
_KEYS = {"format", "format_version", "num_experts", "num_ranks", "version", "digest", "layers"}
_NEEDED_ARRAYS = {"slot_expert", "num_experts", "num_ranks"}
_LAYER_KEYS = {"slots", "shares", "slots_per_rank"}


class PlacementFileError(ValueError):
    """A file that is no placement; the message names it and what is wrong."""


def save_placement(placement: Placement, path: Path) -> None:
    """Write a placement; .npz by its name, else JSON."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with part.open("wb") as file:
            if path.suffix == ".npz":
                np.savez_compressed(
                    file,
                    slot_expert=placement.slot_expert,
                    share=placement.share,
                    layer_slots=placement.layer_slots,
                    num_experts=placement.num_experts,
                    num_ranks=placement.num_ranks,
                    version=placement.version,
                    digest=placement.digest(),
                    format_version=FORMAT_VERSION,
                )
            else:
                file.write(json.dumps(to_json(placement)).encode() + b"\n")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def load_placement(path: Path) -> Placement:
    """Read a placement.

    Raises:
        PlacementFileError: it cannot be read, or is no placement.
    """
    try:
        if path.suffix == ".npz":
            return _from_arrays(path)
        return from_json(json.loads(path.read_text()))
    except OSError as error:
        raise PlacementFileError(f"{path} cannot be read: {error.strerror or error}") from error
    except (EOFError, ValueError, TypeError, KeyError, zipfile.BadZipFile) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise PlacementFileError(f"{path} is not a placement: {reason}") from error


def to_json(placement: Placement) -> dict[str, Any]:
    """Return a placement as JSON values."""
    shape = (placement.num_layers, placement.num_ranks, placement.slots_per_rank)
    slots, shares = placement.slot_expert.reshape(shape).tolist(), placement.share.reshape(shape).tolist()
    layers = [
        {
            "slots": [[None if expert == EMPTY else expert for expert in rank] for rank in slots[layer]],
            "shares": shares[layer],
            "slots_per_rank": int(placement.layer_slots[layer]),
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
    """Make a placement of JSON values.

    Raises:
        ValueError: what is wrong with them. KeyError: what is missing.
    """
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise ValueError(f'it must be an object with "format": "{FORMAT}"')
    _check_version(value.get("format_version"))
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
            f"slots has {len(layers[0]['slots'])} lists per layer for {num_ranks} ranks; it must have one each"
        )
    width = slots.shape[1] // num_ranks
    placement = Placement(
        slots,
        int(value["num_experts"]),
        num_ranks,
        share=None if given[0] is None else _rows(given, "shares", 0.0),  # type: ignore[arg-type]
        layer_slots=np.array([layer.get("slots_per_rank", width) for layer in layers]),
        version=int(value.get("version", 0)),
    )
    _check_digest(placement, value.get("digest"))
    return placement


def _rows(layers: list[Any], name: str, empty: float) -> np.ndarray:
    """Flatten [layers][ranks][slots], null being `empty`, all of one shape."""
    rows = []
    for index, layer in enumerate(layers):
        if not isinstance(layer, list) or not all(isinstance(rank, list) for rank in layer):
            raise ValueError(f"layer {index}: {name} must be a list of lists, one for each rank")
        if len({len(rank) for rank in layer}) > 1 or len(layer) != len(layers[0]):
            raise ValueError(
                f"layer {index}: {name} must have equally many ranks and slots per rank in all layers"
            )
        rows.append([empty if slot is None else slot for rank in layer for slot in rank])
    if len({len(row) for row in rows}) > 1:
        raise ValueError(f"{name} must have equally many slots in all layers")
    array = np.array(rows)
    if array.dtype.kind not in "iuf" or (name == "slots" and array.dtype.kind == "f"):
        raise ValueError(f"{name} must be numbers, whole ones for slots")
    return array


def _refuse_unknown(value: Any, known: set[str]) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{value!r} is not an object")
    unknown = sorted(set(value) - known)
    if unknown:
        raise ValueError(f"{', '.join(unknown)} is not known; there are {', '.join(sorted(known))}")


def _from_arrays(path: Path) -> Placement:
    with np.load(path, allow_pickle=False) as arrays:
        there = set(arrays.files)
        if missing := sorted(_NEEDED_ARRAYS - there):
            what = (
                "a recorded load, of which `wideep experts plan` makes one"
                if "load" in there
                else "no placement"
            )
            raise ValueError(f"it has no array {', '.join(missing)}: it is {what}")
        if arrays["slot_expert"].dtype.kind not in "iu":
            raise ValueError(f"slot_expert is of {arrays['slot_expert'].dtype}; it must be whole numbers")
        if "format_version" in there:
            _check_version(int(arrays["format_version"]))
        placement = Placement(
            arrays["slot_expert"],
            int(arrays["num_experts"]),
            int(arrays["num_ranks"]),
            share=arrays["share"] if "share" in there else None,  # type: ignore[arg-type]
            layer_slots=arrays["layer_slots"] if "layer_slots" in there else None,  # type: ignore[arg-type]
            version=int(arrays["version"]) if "version" in there else 0,
        )
        _check_digest(placement, str(arrays["digest"]) if "digest" in there else None)
        return placement


def _check_version(version: Any) -> None:
    if version != FORMAT_VERSION:
        raise ValueError(f"format_version is {version!r}; {FORMAT_VERSION} can be read")


def _check_digest(placement: Placement, digest: Any) -> None:
    if digest is not None and digest != placement.digest():
        raise ValueError(
            f"its digest is {digest}, that of its content {placement.digest()}: it was changed or cut off; leave "
            f"the digest out of a file that you edit"
        )
