"""Recorded loads from files: how many tokens chose each expert, window by window.

Read are:
- SGLang's expert distribution record as JSON: {"logical_count": [layers][experts]} or [windows][layers][experts];
- {"load_history": [{"logical_expert_load": [layers][experts]}, ...]}, as published with ADRS's EPLB work;
- .npz with an array `load` or `logical_count` of two or three dimensions.
Layers without any load in any window (dense ones) are left out.
"""

import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class LoadFileError(ValueError):
    """A file that holds no load; the message names it and what is wrong."""


class LoadTrace(NamedTuple):
    """Loads over time."""

    load: np.ndarray  # [windows, layers, experts] float64
    layers: np.ndarray  # [layers] int64: which layers of the file these are


def read_loads(paths: Sequence[Path]) -> LoadTrace:
    """Read files as one trace, in the order given.

    Raises:
        LoadFileError: a file cannot be read, holds no load, or does not fit the first.
    """
    windows = [_read(path) for path in paths]
    if not windows:
        raise LoadFileError("no load file was given")
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
    return LoadTrace(np.ascontiguousarray(load[:, layers]), layers)


def _read(path: Path) -> np.ndarray:
    if path.suffix in (".pt", ".pth"):
        raise LoadFileError(
            f"{path} is a PyTorch file, which can run code when it is read; convert it where it was made: "
            f"numpy.savez('load.npz', logical_count=torch.load(FILE)['logical_count'])"
        )
    try:
        values = _from_npz(path) if path.suffix == ".npz" else _from_json(json.loads(path.read_text()))
        load = np.array(values, dtype=np.float64)
    except (OSError, EOFError, ValueError, TypeError, KeyError, zipfile.BadZipFile) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise LoadFileError(f"{path} holds no expert load: {reason}") from error
    if load.ndim == 2:
        load = load[None]
    if load.ndim != 3 or 0 in load.shape:
        raise LoadFileError(f"{path}: the load has shape {load.shape}; it must be [windows, layers, experts]")
    if not np.isfinite(load).all() or (load < 0).any():
        raise LoadFileError(f"{path}: loads must be numbers from 0 up")
    return load


def _from_npz(path: Path) -> np.ndarray:
    with np.load(path, allow_pickle=False) as arrays:
        result: np.ndarray = arrays["load" if "load" in arrays else "logical_count"]
        return result


def _from_json(value: Any) -> Any:
    if isinstance(value, dict) and "load_history" in value:
        return [window["logical_expert_load"] for window in value["load_history"]]
    if not isinstance(value, dict) or "logical_count" not in value:
        raise ValueError('it must be an object with "logical_count" or "load_history"')
    return value["logical_count"]
