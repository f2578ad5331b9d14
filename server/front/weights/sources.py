"""The tensors of an update that a client has begun: folders that it names, files that it sends, and what its group sends."""

import asyncio
import contextlib
import itertools
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from scheduler.weights.versions import WeightFolder, WeightVersion
from server.front.errors import ApiError, bad_request
from server.front.weights.files import FoundWeights, WeightFilesError, check_upload, read_folder


class Sources:
    """Where the tensors of one update are. The caller appends to `found`, in the order in which tensors replace each other."""

    def __init__(self, label: str, uploads: Path, *, is_partial: bool) -> None:
        """Begin without tensors.

        Args:
            label: Name of the version, "" if it has none yet.
            uploads: Folder of tensors that clients send. It is made if needed.
            is_partial: Whether tensors that the update lacks keep their values.
        """
        self.label, self.is_partial, self.uploads = label, is_partial, uploads
        self.found: list[FoundWeights] = []
        self._is_closed = False
        self._numbers = itertools.count()

    async def folder(self, path: str, model_type: str) -> FoundWeights:
        """Read the headers of a folder.

        Raises:
            ApiError: It cannot be used; see `read_folder`.
        """
        try:
            return await asyncio.to_thread(read_folder, path, model_type)
        except WeightFilesError as error:
            raise bad_request(f"{error}.", "path") from error

    async def upload(self, content: bytes) -> FoundWeights:
        """Store a safetensors file.

        Raises:
            ApiError: It is damaged, or cannot be stored.
        """
        folder = self._new_folder()

        def store() -> FoundWeights:
            check_upload(content)
            try:
                folder.mkdir(mode=0o700, parents=True)
                (folder / "model.safetensors").write_bytes(content)
                return read_folder(str(folder))
            finally:
                self._remove_late(folder)

        try:
            return await asyncio.to_thread(store)
        except (WeightFilesError, OSError) as error:
            if self._is_closed:  # its folder is removed
                raise ended() from error
            if isinstance(error, WeightFilesError):
                raise bad_request(f"{error}.") from error
            raise ApiError(
                507, f"The upload cannot be stored in {folder}: {error.strerror or error}."
            ) from error

    async def received(self, receive: Callable[[Path], Awaitable[None]]) -> FoundWeights:
        """Read the headers of a new folder that `receive` writes.

        Raises:
            ApiError: The tensors did not come, or cannot be used, such as one of a forbidden name.
        """
        folder = self._new_folder()
        try:
            await receive(folder)
            return await asyncio.to_thread(read_folder, str(folder))
        except WeightFilesError as error:
            if self._is_closed:  # its folder is removed
                raise ended() from error
            raise bad_request(f"{error}.") from error
        finally:
            if self._is_closed:
                await asyncio.to_thread(self._remove_late, folder)

    def version(
        self, serving: WeightVersion, names: Mapping[WeightFolder, frozenset[str]], label: str
    ) -> WeightVersion:
        """Return the version with these tensors, still without a number. Folders with only replaced tensors are left out.

        Args:
            serving: The version before.
            names: The tensors of its folders, as far as they are known.
            label: Name of the version; "" keeps the one from the beginning.
        """
        before = list(serving.folders) if self.is_partial else []
        hides = not self.is_partial or serving.hides_checkpoint
        known = {**names, **{found.folder: found.names for found in self.found}}
        kept: list[WeightFolder] = []
        hidden: frozenset[str] = frozenset()
        for folder in reversed([*before, *(found.folder for found in self.found)]):
            own = known.get(folder)
            if folder not in kept and (own is None or not own <= hidden):
                kept.insert(0, folder)
            hidden |= own or frozenset()
        return WeightVersion(0, label or self.label, tuple(kept), hides)

    def close(self) -> None:
        """Accept no more tensors. What is still being stored is removed when it has been written."""
        self._is_closed = True

    async def remove(self) -> None:
        """Close this, and remove what clients sent."""
        self.close()
        await asyncio.to_thread(shutil.rmtree, self.uploads, True)

    def _remove_late(self, folder: Path) -> None:
        """Remove a folder that was written while this was closed, and the folder of uploads if it has no other."""
        if self._is_closed:
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                self.uploads.rmdir()

    def _new_folder(self) -> Path:
        return self.uploads / f"part-{next(self._numbers)}"


def ended() -> ApiError:
    """Return the error of a request with tensors for an update that has ended meanwhile."""
    return ApiError(409, "The update ended while its tensors were read.")


def remove_unused(uploads: Sequence[Path], kept: Sequence[Path]) -> list[Path]:
    """Remove folders of uploads that contain no folder of `kept`. Returns the others."""
    used = [each for each in uploads if any(path.is_relative_to(each) for path in kept)]
    for each in uploads:
        if each not in used:
            shutil.rmtree(each, ignore_errors=True)
    return used
