"""A checkpoint's safetensors files: which there are, and what their headers say, before any weight is read.

The headers tell every tensor's name, shape and bytes, and the length of a file that came whole.
"""

import json
from pathlib import Path
from typing import Any

from server.process.preflight.preflight_error import PreflightError

_OTHER_FORMATS = ("*.bin", "*.gguf", "*.pt", "*.pth")
_MAX_HEADER_BYTES = 100_000_000  # the safetensors format's own limit


def safetensors_files(directory: Path) -> list[Path]:
    """Return a checkpoint's files: those that its index names, or all where it has no index."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        return _indexed_files(index)
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        others = sorted(path.name for pattern in _OTHER_FORMATS for path in directory.glob(pattern))
        seen = f"; it has {', '.join(others[:3])}, a format that WideEP does not read" if others else ""
        raise PreflightError(
            f"{directory} has no .safetensors weights{seen}. Get or save the model as safetensors "
            "(model.save_pretrained in transformers)"
        )
    return files


def _indexed_files(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PreflightError(f"{index} is not a safetensors index: {error!r}") from error
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise PreflightError(
            f"{len(missing)} of the {len(names)} weight files that {index} names are missing: "
            f"{', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}. Download the model again"
        )
    return [index.parent / name for name in names]


def read_header(path: Path) -> dict[str, Any]:
    """Return a safetensors file's tensors by name, after checking that the file is whole."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        content = file.read(min(header_bytes, _MAX_HEADER_BYTES))
    try:
        tensors = json.loads(content) if len(content) == header_bytes else {}
        tensors.pop("__metadata__", None)
        end = 8 + header_bytes + max(tensor["data_offsets"][1] for tensor in tensors.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PreflightError(
            f"{path} is not a safetensors file (is it a git-lfs pointer or a cut download?). Download it again"
        ) from error
    if (size := path.stat().st_size) != end:
        raise PreflightError(f"{path} has {size} bytes, its header says {end}. Download it again")
    return dict(tensors)
