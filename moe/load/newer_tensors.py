"""A checkpoint with newer tensors over it: tensors of folders hide those with the same names.

Tensors are copied as they are read. A file may be replaced once its tensors are loaded, and a mapped tensor would follow it.
"""

from collections.abc import Sequence

from torch import Tensor

from moe.load.checkpoint import Checkpoint


class NewerTensors(Checkpoint):
    """A `Checkpoint` of several sources."""

    def __init__(self, sources: Sequence[Checkpoint]) -> None:
        """`sources`: the newest last."""
        self.directory = sources[-1].directory
        self.bytes_read = 0
        self._shards = {}
        self._sources = tuple(sources)
        self._source_of = {name: source for source in sources for name in source.names()}

    def names(self) -> list[str]:
        return list(self._source_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source_of[name].shape(name)

    def dtype(self, name: str) -> str:
        return self._source_of[name].dtype(name)

    def num_bytes(self, name: str) -> int:
        return self._source_of[name].num_bytes(name)

    def read(self, name: str) -> Tensor:
        return self._counted(self._source_of[name].read(name).clone())

    def read_row(self, name: str, row: int) -> Tensor:
        return self._counted(self._source_of[name].read_row(name, row).clone())

    def release_memory(self) -> None:
        for source in self._sources:
            source.release_memory()
