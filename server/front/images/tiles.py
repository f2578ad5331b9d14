"""The image processor of Llama 4: an image becomes square tiles, and a smaller copy of the whole image follows them.

`transformers` has this processor only for torchvision, which WideEP does not use. This one follows the same steps: resize the
image without distortion to the best canvas of tiles, pad the canvas with black, round values to bfloat16, and cut. The settings
come from the checkpoint. It resizes with Pillow. Pixels differ from torchvision's in the last bit at most.
"""

import math
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers.image_processing_backends import PilBackend
from transformers.image_utils import PILImageResampling, SizeDict
from transformers.processing_utils import ImagesKwargs


class Canvas(NamedTuple):
    """A number of tiles in each direction."""

    lines: int
    columns: int


class _Settings(ImagesKwargs, total=False):  # type: ignore[misc, call-arg]
    max_patches: int  # tiles of the largest canvas
    resize_to_max_canvas: bool  # enlarge an image as much as possible


class TileProcessor(PilBackend):  # type: ignore[misc]
    """Returns `pixel_values` [tiles, 3, height, width] and `aspect_ratios` [1, 2], the canvas. Takes one image at a time."""

    valid_kwargs = _Settings
    resample = PILImageResampling.BILINEAR
    image_mean = (0.5, 0.5, 0.5)
    image_std = (0.5, 0.5, 0.5)
    size: ClassVar[Any] = {"height": 336, "width": 336}
    do_resize = True
    do_rescale = True
    do_normalize = True
    do_convert_rgb = True
    max_patches = 16
    resize_to_max_canvas = False

    def __init__(self, **settings: Any) -> None:
        """Take the settings of a checkpoint.

        Raises:
            ValueError: The tiles are not square, or images are not resized.
        """
        super().__init__(**settings)
        if self.size.height != self.size.width or not self.do_resize:
            raise ValueError(
                "its preprocessor_config.json has tiles that are not square, or do_resize is false"
            )

    def _preprocess(self, images: list[np.ndarray], **settings: Any) -> dict[str, Tensor]:
        [image] = images
        tile = int(settings["size"].height)
        height, width = image.shape[1:]
        is_largest = bool(settings["resize_to_max_canvas"])
        canvas = best_canvas(height, width, tile, settings["max_patches"], is_largest=is_largest)
        inner = fitting(height, width, canvas, tile, is_largest=is_largest)
        padded = torch.zeros(3, canvas.lines * tile, canvas.columns * tile, dtype=torch.uint8)
        padded[:, : inner[0], : inner[1]] = self._resized(image, *inner, settings)
        cut = padded.view(3, canvas.lines, tile, canvas.columns, tile).permute(1, 3, 0, 2, 4)
        tiles = cut.reshape(-1, 3, tile, tile)
        if len(tiles) > 1:
            tiles = torch.cat((tiles, self._resized(image, tile, tile, settings)[None]))
        return {"pixel_values": _values(tiles, settings), "aspect_ratios": torch.tensor([canvas])}

    def _resized(self, image: np.ndarray, height: int, width: int, settings: dict[str, Any]) -> Tensor:
        size = SizeDict(height=height, width=width)
        return torch.from_numpy(np.array(self.resize(image, size, resample=settings["resample"])))


def best_canvas(height: int, width: int, tile: int, most: int, *, is_largest: bool) -> Canvas:
    """Return the smallest canvas of at most `most` tiles that shows an image best.

    The scale is the smallest of at least 1, or the largest if `is_largest`. If the image fits no canvas, it is the largest scale
    below 1.
    """
    canvases = [(lines, columns) for lines in range(1, most + 1) for columns in range(1, most // lines + 1)]
    sizes = torch.tensor(canvases) * tile
    scales = torch.minimum(
        sizes[:, 0] / height, sizes[:, 1] / width
    )  # float32, so that ties are transformers'
    enlarging = scales[scales >= 1]
    chosen = enlarging.min() if len(enlarging) and not is_largest else scales.max()
    equal = [canvas for canvas, scale in zip(canvases, scales, strict=True) if scale == chosen]
    return Canvas(*min(equal, key=math.prod))


def fitting(height: int, width: int, canvas: Canvas, tile: int, *, is_largest: bool) -> tuple[int, int]:
    """Return the size to which an image is resized on a canvas. Unless `is_largest`, only small images are enlarged."""
    most_height, most_width = canvas.lines * tile, canvas.columns * tile
    if not is_largest:
        most_height, most_width = min(max(height, tile), most_height), min(max(width, tile), most_width)
    scale_height, scale_width = most_height / height, most_width / width
    if scale_width < scale_height:
        return max(1, min(math.floor(height * scale_width), most_height)), most_width
    return most_height, max(1, min(math.floor(width * scale_height), most_width))


def _values(tiles: Tensor, settings: dict[str, Any]) -> Tensor:
    """Turn bytes into the tower's values."""
    scaled = tiles.float()
    is_normal = settings["do_normalize"]
    if settings["do_rescale"]:
        kind = torch.bfloat16 if is_normal else torch.float32  # as in training
        scaled = tiles.to(kind) * settings["rescale_factor"]
    if is_normal:
        mean, std = (
            torch.tensor(settings[name], dtype=scaled.dtype)[:, None, None]
            for name in ("image_mean", "image_std")
        )
        scaled = (scaled - mean) / std
    return scaled.float()
