"""Folders of safetensors with new weights, as the front sees them: names and facts of files. It reads headers only.

The format is that of https://github.com/huggingface/safetensors: eight bytes with the length of a JSON header, the header, the data.
Ranks decide whether tensors fit the model; the front finds problems that need no model.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scheduler.weights.versions import FileFacts, WeightFolder

_INDEX = "model.safetensors.index.json"
_MOST_HEADER_BYTES = 100_000_000  # as in the reference implementation
_NO_TENSOR = "__metadata__"


class WeightFilesError(ValueError):
    """A folder or an upload that cannot be used; the message names it and the reason."""


class FoundWeights(NamedTuple):
    """The tensors of a folder."""

    folder: WeightFolder
    names: frozenset[str]
    num_bytes: int  # of tensors


def read_folder(path: str, model_type: str = "") -> FoundWeights:
    """Read the headers of a folder's safetensors.

    Args:
        path: The folder, on the front's node.
        model_type: The served model's. A folder with a config.json of another type is refused.

    Raises:
        WeightFilesError: There are no such files, one is damaged, or they belong to another model.
    """
    folder = Path(path)
    if not folder.is_absolute():
        raise WeightFilesError(f"{path!r} is not an absolute path")
    if not folder.is_dir():
        raise WeightFilesError(f"{path} is not a folder on the node of the HTTP endpoint")
    try:
        _check_model_type(folder, model_type)
        paths = _files(folder)
        facts, names, num_bytes = [], set[str](), 0
        for file in paths:
            header = _header_of(file)
            names |= header.keys()
            for name, entry in header.items():
                begin, end = _offsets(str(file), name, entry)
                num_bytes += end - begin
            found = file.stat()
            facts.append(FileFacts(file.name, found.st_size, found.st_mtime_ns))
    except OSError as error:
        raise WeightFilesError(f"{path} cannot be read: {error.strerror or error}") from error
    return FoundWeights(WeightFolder(str(folder), tuple(facts)), frozenset(names), num_bytes)


class StoredTensor(NamedTuple):
    """A tensor in a file."""

    file: Path
    dtype: str  # safetensors' name
    shape: tuple[int, ...]
    start: int  # its first byte in the file
    num_bytes: int

    @property
    def item_bytes(self) -> int:
        """Bytes per value."""
        return self.num_bytes // max(1, math.prod(self.shape))


def tensors_in(folder: Path) -> dict[str, StoredTensor]:
    """Return all tensors of a folder's safetensors, by name.

    Raises:
        WeightFilesError, OSError: As for `read_folder`.
    """
    found = {}
    for file in _files(folder):
        with file.open("rb") as opened:
            first = 8 + _length(opened.read(8))
        for name, entry in _header_of(file).items():
            begin, end = _offsets(str(file), name, entry)
            shape = tuple(int(size) for size in entry.get("shape", ()))
            found[name] = StoredTensor(file, str(entry.get("dtype")), shape, first + begin, end - begin)
    return found


def check_upload(content: bytes) -> None:
    """Check that a client has sent a whole safetensors file.

    Raises:
        WeightFilesError: It is not such a file, or its end is missing.
    """
    start = content[:8]
    _parse(start, content[8 : 8 + _length(start)], len(content), "the upload")


def _files(folder: Path) -> Sequence[Path]:
    """Return the files that a rank reads: those of the index, or all."""
    index = folder / _INDEX
    if not index.is_file():
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise WeightFilesError(f"{folder} has no .safetensors files")
        return paths
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightFilesError(f"{index} is not a safetensors index: {error!r}") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise WeightFilesError(f"{index} names missing files: {', '.join(missing[:8])}")
    return [folder / name for name in names]


def _check_model_type(folder: Path, model_type: str) -> None:
    config = folder / "config.json"
    if not model_type or not config.is_file():
        return
    try:
        found = json.loads(config.read_bytes()).get("model_type", "")
    except (ValueError, AttributeError) as error:
        raise WeightFilesError(f"{config} is not a model's configuration: {error}") from error
    if found != model_type:
        raise WeightFilesError(
            f"{folder} is a folder of another model: its model_type is {found!r}, and this service has {model_type!r}"
        )


def _header_of(file: Path) -> Mapping[str, Any]:
    with file.open("rb") as opened:
        start = opened.read(8)
        text = opened.read(_length(start))
    return _parse(start, text, file.stat().st_size, str(file))


def _length(start: bytes) -> int:
    return min(int.from_bytes(start, "little"), _MOST_HEADER_BYTES)


def _parse(start: bytes, text: bytes, num_bytes: int, shown: str) -> Mapping[str, Any]:
    """Return the entries of a header. `num_bytes`: size of the file, which must be that of its tensors."""
    try:
        header = json.loads(text)
        if len(start) < 8 or not isinstance(header, dict):
            raise ValueError("no header")
    except (ValueError, RecursionError) as error:
        raise WeightFilesError(f"{shown} is not a safetensors file: {error}") from error
    header.pop(_NO_TENSOR, None)
    ends = (_offsets(shown, name, entry)[1] for name, entry in header.items())
    wanted = 8 + _length(start) + max(ends, default=0)
    if num_bytes != wanted:
        raise WeightFilesError(f"{shown} has {num_bytes} bytes; its header describes {wanted}")
    return header


def _offsets(shown: str, name: str, entry: Any) -> tuple[int, int]:
    """Return where a tensor begins and ends."""
    try:
        begin, end = entry["data_offsets"]
        return int(begin), int(end)
    except (TypeError, LookupError, ValueError) as error:
        raise WeightFilesError(f"{shown}: the header's entry of {name} has no data_offsets") from error
