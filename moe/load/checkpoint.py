"""A Hugging Face checkpoint on disk: names, shapes, and reads that are counted.

Reads are lazy (memory-mapped safetensors), of whole tensors or rows of the first dimension, so a rank reads only
what it keeps. Independent of models: `moe.load.loader` maps names to parameters.
"""

import ctypes
import json
import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

INDEX_NAME = "model.safetensors.index.json"
_MAPS = Path("/proc/self/maps")
_DONTNEED = 4  # madvise(2)


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; the message lists the problems."""


class Checkpoint:
    """Tensors of a directory, in one file or in shards."""

    def __init__(self, directory: Path) -> None:
        """Open all shards and read their headers.

        Raises:
            CheckpointError: There are no safetensors; a shard or tensor of the index is missing; a name is in two files
                and no index chooses one; or a file is damaged.
        """
        self.directory = directory
        self.bytes_read = 0  # of tensor data, counted per read
        self._shards: dict[str, Any] = {}  # tensor name -> open file
        indexed = self._indexed()
        for path in self._paths(indexed):
            try:
                shard: Any = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error
            self._add(path.name, shard, indexed)
        absent = sorted(indexed.keys() - self._shards.keys())
        if absent:
            raise CheckpointError(
                f"{directory / INDEX_NAME} lists {len(absent)} tensors that are not in their files, such as "
                f"{', '.join(f'{name} ({indexed[name]})' for name in absent[:3])}: download index and files again, or remove "
                f"the index to read what the files contain"
            )

    def _add(self, file: str, shard: Any, indexed: Mapping[str, str]) -> None:
        """Add a file's tensors, except names that the index assigns to another file (left over from an older save)."""
        own = [name for name in shard.keys() if indexed.get(name, file) == file]  # noqa: SIM118 - no mapping
        twice = sorted(self._shards.keys() & set(own))
        if twice:
            raise CheckpointError(
                f"{self.directory} has {len(twice)} tensors in two files, such as {twice[0]} in {file} and in an earlier "
                f"file; remove one of them, or add an index ({INDEX_NAME}) that names the file to use"
            )
        self._shards.update(dict.fromkeys(own, shard))

    def _paths(self, indexed: Mapping[str, str]) -> list[Path]:
        if indexed:
            names = sorted(set(indexed.values()))
            missing = [name for name in names if not (self.directory / name).is_file()]
            if missing:
                index = self.directory / INDEX_NAME
                raise CheckpointError(f"{index} names missing files: {', '.join(missing[:8])}")
            return [self.directory / name for name in names]
        paths = sorted(self.directory.glob("*.safetensors"))
        if not paths:
            raise CheckpointError(f"{self.directory} has no .safetensors files, the only supported format")
        return paths

    def _indexed(self) -> dict[str, str]:
        """Return the file of every tensor in the index, or {} if there is no index."""
        index = self.directory / INDEX_NAME
        if not index.is_file():
            return {}
        try:
            files = json.loads(index.read_bytes())["weight_map"]
            return {str(name): str(file) for name, file in files.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} is not a safetensors index: {error!r}") from error

    def names(self) -> list[str]:
        """Return all tensor names, in no particular order."""
        return list(self._shards)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape from the header."""
        return tuple(self._shards[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return a tensor's dtype from the header, as safetensors writes it (F32, BF16, F8_E4M3)."""
        return str(self._shards[name].get_slice(name).get_dtype())

    def num_bytes(self, name: str) -> int:
        """Return a tensor's size in the file from the header."""
        bits = re.search(r"\d+", self.dtype(name))  # BOOL has none: one byte
        return prod(self.shape(name)) * (int(bits[0]) if bits else 8) // 8

    def read(self, name: str) -> Tensor:
        """Read a whole tensor, in its own dtype."""
        return self._counted(self._shards[name].get_tensor(name))

    def read_row(self, name: str, row: int) -> Tensor:
        """Read row `row` of the first dimension, kept as a dimension of 1."""
        return self._counted(self._shards[name].get_slice(name)[row : row + 1])

    def release_memory(self) -> None:
        """Give the memory that reads have mapped back to the system. Later accesses read the same files again.

        Tensors that were read keep their values, unless they were written to since.
        """
        firsts = {id(shard): name for name, shard in self._shards.items()}.values()
        mapped = [self._shards[name].get_tensor(name).data_ptr() for name in firsts]
        for line in _MAPS.read_text().splitlines() if mapped and _MAPS.exists() else ():
            begin, end = (int(part, 16) for part in line.partition(" ")[0].split("-"))
            if "/" in line and any(begin <= address < end for address in mapped):
                ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _DONTNEED)

    def _counted(self, tensor: Tensor) -> Tensor:
        self.bytes_read += tensor.numel() * tensor.element_size()
        return tensor
