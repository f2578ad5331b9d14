"""Whether new base weights leave the image tower as it is.

Ranks ignore tensors of towers, and the process that encodes images keeps those of the checkpoint. So a folder with the tower of the
checkpoint is accepted, which is what a trainer writes that froze it. A changed tower is refused by name, because images would be
encoded with the old one. Values are compared, not types: a trainer may write float32 for a checkpoint in bfloat16.
Rejected: loading the tower again. It takes as long as a start, for each front, and every update would wait for it.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from server.front.weights.files import FoundWeights, StoredTensor, WeightFilesError, tensors_in
from server.machine.model_fields import NOT_OF_TEXT

_PART_BYTES = 16 << 20  # of a tensor, read at once


def check_tower(found: FoundWeights, directory: Path) -> None:
    """Compare the tensors of towers in a folder of new weights with the checkpoint's.

    Args:
        directory: The served checkpoint.

    Raises:
        WeightFilesError: One differs; the message names it.
    """
    names = sorted(name for name in found.names if NOT_OF_TEXT.search(name))
    if not names:
        return
    try:
        new, known = tensors_in(Path(found.folder.path)), tensors_in(directory)
        for name in names:
            if name not in known or not _are_equal(new[name], known[name]):
                raise WeightFilesError(
                    f"{found.folder.path} changes {name}, a tensor of the image tower; the image tower cannot change while the "
                    "service runs. Leave out tensors of the tower, restart the service with the new weights, or start it "
                    "with --language-model-only"
                )
    except OSError as error:
        raise WeightFilesError(f"tensors of the image tower cannot be compared: {error}") from error


def _are_equal(one: StoredTensor, other: StoredTensor) -> bool:
    if one.shape != other.shape:
        return False
    if one.dtype != other.dtype and not {one.dtype, other.dtype} <= _AS_FLOAT32.keys():
        return False
    return all(
        np.array_equal(mine, its, equal_nan=True)
        for mine, its in zip(_parts(one), _parts(other), strict=True)
    )


def _parts(tensor: StoredTensor) -> Iterator[np.ndarray]:
    """Yield a tensor's values, the same number in each part for all types."""
    item, read = _AS_FLOAT32.get(tensor.dtype, (tensor.item_bytes, _bytes))
    num_values = _PART_BYTES // 8
    with tensor.file.open("rb") as file:
        file.seek(tensor.start)
        left = tensor.num_bytes
        while left > 0:
            content = file.read(min(left, num_values * item))
            left -= num_values * item
            yield read(content)


def _bytes(content: bytes) -> np.ndarray:
    return np.frombuffer(content, np.uint8)


def _of_bfloat16(content: bytes) -> np.ndarray:
    return (np.frombuffer(content, np.uint16).astype(np.uint32) << 16).view(np.float32)


def _of_float16(content: bytes) -> np.ndarray:
    return np.frombuffer(content, np.float16).astype(np.float32)


def _of_float32(content: bytes) -> np.ndarray:
    return np.frombuffer(content, np.float32)


# By safetensors' name of a type: bytes per value, and a function that returns the values.
_AS_FLOAT32 = {"F32": (4, _of_float32), "BF16": (2, _of_bfloat16), "F16": (2, _of_float16)}
