"""Recorded loads from files: how many tokens chose each expert, window by window.

Read are:
- SGLang's expert distribution record as JSON: {"logical_count": [layers][experts]} or [windows][layers][experts];
- {"load_history": [{"logical_expert_load": [layers][experts]}, ...]}, as published with ADRS's EPLB work;
- .npz with an array `load` or `logical_count` of two or three dimensions; `prefill` and `decode` of the same shape, as
  `wideep experts record` writes them, tell the phases apart.
Layers without any load in any window (dense ones) are left out.
"""

import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from expert_placement.load import PHASES

_ALL = "load"


class LoadFileError(ValueError):
    """A file that holds no load; the message names it and what is wrong."""


class LoadTrace(NamedTuple):
    """Loads over time."""

    load: np.ndarray  # [windows, layers, experts] float64
    layers: np.ndarray  # [layers] int64: which layers of the file these are
    phases: dict[str, np.ndarray]  # parts of the load, each of its shape; none where a file does not tell


def read_loads(paths: Sequence[Path]) -> LoadTrace:
    """Read files as one trace, in the order given.

    Raises:
        LoadFileError: a file cannot be read, holds no load, or does not fit the first.
    """
    files = [_read(path) for path in paths]
    if not files:
        raise LoadFileError("no load file was given")
    windows = [file[_ALL] for file in files]
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
    told = [phase for phase in PHASES if all(phase in file for file in files)]
    phases = {phase: np.concatenate([file[phase] for file in files])[:, layers] for phase in told}
    return LoadTrace(np.ascontiguousarray(load[:, layers]), layers, phases)


def _read(path: Path) -> dict[str, np.ndarray]:
    """The whole load, and by phase where the file says it."""
    if path.suffix in (".pt", ".pth"):
        raise LoadFileError(
            f"{path} is a PyTorch file, which can run code when it is read; convert it where it was made: "
            f"numpy.savez('load.npz', logical_count=torch.load(FILE)['logical_count'])"
        )
    try:
        is_npz = path.suffix == ".npz"
        values = _from_npz(path) if is_npz else {_ALL: _from_json(json.loads(path.read_text()))}
        loads = {name: np.array(value, dtype=np.float64) for name, value in values.items()}
    except OSError as error:
        raise LoadFileError(f"{path} cannot be read: {error.strerror or error}") from error
    except (EOFError, ValueError, TypeError, KeyError, zipfile.BadZipFile) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise LoadFileError(f"{path} holds no expert load: {reason}") from error
    load = loads[_ALL]
    if any(part.shape != load.shape for part in loads.values()):
        raise LoadFileError(f"{path}: its phases have other shapes than its load, {load.shape}")
    if load.ndim == 2:
        loads = {name: part[None] for name, part in loads.items()}
        load = loads[_ALL]
    if load.ndim != 3 or 0 in load.shape:
        raise LoadFileError(f"{path}: the load has shape {load.shape}; it must be [windows, layers, experts]")
    if any(not np.isfinite(part).all() or (part < 0).any() for part in loads.values()):
        raise LoadFileError(f"{path}: loads must be numbers from 0 up")
    return loads


def _from_npz(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as arrays:
        names = set(arrays.files)
        if "slot_expert" in names and "load" not in names:
            raise ValueError("it is a placement; `wideep experts record` writes loads")
        if not names & {_ALL, "logical_count"}:
            raise ValueError(
                f"it must have an array `load` or `logical_count`; it has {', '.join(sorted(names))}"
            )
        phases = PHASES if names.issuperset(PHASES) else ()
        return {
            _ALL: arrays["load" if "load" in names else "logical_count"],
            **{p: arrays[p] for p in phases},
        }


def _from_json(value: Any) -> Any:
    if isinstance(value, dict) and "load_history" in value:
        return [window["logical_expert_load"] for window in value["load_history"]]
    if not isinstance(value, dict) or "logical_count" not in value:
        raise ValueError('it must be an object with "logical_count" or "load_history"')
    return value["logical_count"]
