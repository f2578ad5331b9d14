"""Versions of tiny models' weights, on disk and in engines."""

import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from scheduler.weights.versions import WeightAction, WeightDigests, WeightOrder, WeightReport, WeightVersion
from server.front.weights.files import read_folder
from tests.support.models.families import write_checkpoint

FILE = "model.safetensors"


def write_other(family: str, directory: Path, seed: int = 1) -> Path:
    """Write a checkpoint of the same configuration with other weights."""
    write_checkpoint(family, directory, seed=seed)
    return directory


def tensors_of(directory: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint."""
    return {
        name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()
    }


def write_tensors(tensors: dict[str, Tensor], directory: Path) -> Path:
    """Write a folder with these tensors only."""
    directory.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / FILE)
    return directory


def write_merged(base: Path, newer: Path, directory: Path) -> Path:
    """Write the checkpoint that a partial update of `base` gives."""
    shutil.copytree(base, directory)
    tensors = tensors_of(base) | tensors_of(newer)
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / FILE)
    return directory


def some_names(directory: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """Return the tensors with names that `wanted` accepts; at least one."""
    found = {name: tensor for name, tensor in tensors_of(directory).items() if wanted(name)}
    assert found, f"no such tensor in {sorted(tensors_of(directory))}"
    return found


def version(number: int, *folders: Path, hides: bool = True, digest: str = "") -> WeightVersion:
    """Return a version of these folders."""
    found = tuple(read_folder(str(folder)).folder for folder in folders)
    return WeightVersion(number, f"v{number}", found, hides, digest or f"digest {number}")


def stage(one: WeightVersion) -> WeightOrder:
    """Return the order to load a version."""
    return WeightOrder(action=WeightAction.STAGE, version=one)


def serve_version(one: WeightVersion) -> WeightOrder:
    """Return the order to serve a version."""
    return WeightOrder(action=WeightAction.SERVE, version=one)


def digests_of(report: WeightReport) -> WeightDigests:
    """Return the check sums of a report on weights that were loaded or checked."""
    assert report.digests is not None, report
    return report.digests
