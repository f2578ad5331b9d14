"""Kimi-K2.5's image processor in Pillow and NumPy: from a picture to the patches that its tower takes.

`transformers` has this processor only on top of torchvision. Its resized pixels differ from Pillow's in the last bits. Steps and
names of settings are those of its `Kimi_K25ImageProcessor`: reduce to the limits of patches, pad right and below with black to whole
rows, normalise, and cut into patches, line by line. Its file in published checkpoints has the settings under other names, which are
read too (`media_proc_cfg`).

Legend: C channels, H, W patches of an image's height and width, P pixels of a patch's side.
"""

import math
from typing import Any

import numpy as np
from transformers.feature_extraction_utils import BatchFeature
from transformers.image_processing_backends import PilBackend
from transformers.image_utils import PILImageResampling, SizeDict
from transformers.processing_utils import ImagesKwargs

_PUBLISHED = {  # name in media_proc_cfg -> name here
    "in_patch_limit": "max_patches",
    "patch_size": "patch_size",
    "merge_kernel_size": "merge_size",
    "image_mean": "image_mean",
    "image_std": "image_std",
}


class _Settings(ImagesKwargs, total=False):  # type: ignore[misc, call-arg]
    max_patches: int
    patch_size: int
    merge_size: int


class KimiImageProcessor(PilBackend):  # type: ignore[misc]
    """The processor; used like those of `transformers`."""

    do_resize = do_rescale = do_normalize = do_convert_rgb = True
    resample = PILImageResampling.BICUBIC
    size = {"max_height": 512, "max_width": 512}  # noqa: RUF012 - as in transformers; most patches per side
    max_patches = 16384
    image_mean = image_std = [0.5, 0.5, 0.5]  # noqa: RUF012 - as in transformers
    patch_size = 14
    merge_size = 2
    valid_kwargs = _Settings
    model_input_names = ["pixel_values", "image_grid_thw"]  # noqa: RUF012 - as in transformers

    def __init__(self, **settings: Any) -> None:
        """Take settings from the model's preprocessor_config.json.

        Raises:
            ValueError: They demand a fixed number of tokens.
        """
        published = settings.pop("media_proc_cfg", None)
        if isinstance(published, dict):
            if published.get("fixed_output_tokens") is not None:
                raise ValueError("media_proc_cfg has fixed_output_tokens, which are not supported")
            named = {ours: published[theirs] for theirs, ours in _PUBLISHED.items() if theirs in published}
            if (side := published.get("patch_limit_on_one_side")) is not None:
                named["size"] = {"max_height": side, "max_width": side}
            settings = named | settings
        super().__init__(**settings)

    def _preprocess(
        self,
        images: list[np.ndarray],
        size: SizeDict,
        resample: Any,
        rescale_factor: float,
        image_mean: Any,
        image_std: Any,
        patch_size: int,
        merge_size: int,
        max_patches: int,
        return_tensors: Any,
        **_: Any,
    ) -> BatchFeature:
        patches, grids = [], []
        for image in images:
            limits = max_patches, int(size.max_height)
            kept, padded = sizes_of(image.shape[1:], patch_size, merge_size, *limits)
            small = self.resize(image, SizeDict(height=kept[0], width=kept[1]), resample)
            [whole] = self.pad([small], SizeDict(height=padded[0], width=padded[1]))
            pixels = self.normalize(self.rescale(whole, rescale_factor), image_mean, image_std)
            of_image, grid = _patches_of(pixels, patch_size)
            patches.append(of_image)
            grids.append(grid)
        made = {"pixel_values": np.concatenate(patches), "image_grid_thw": np.array(grids, dtype=np.int64)}
        return BatchFeature(data=made, tensor_type=return_tensors)


def sizes_of(
    shape: tuple[int, ...], patch_size: int, merge_size: int, most_patches: int, most_per_side: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the height and width that an image is reduced to, and then padded to. Images are never enlarged."""
    height, width = shape
    num_patches = max(1.0, height // patch_size) * max(1.0, width // patch_size)
    most = most_per_side * patch_size
    scale = min(1.0, math.sqrt(most_patches / num_patches), most / height, most / width)
    kept = min(max(1, int(height * scale)), most), min(max(1, int(width * scale)), most)
    unit = merge_size * patch_size
    return kept, (-(-kept[0] // unit) * unit, -(-kept[1] // unit) * unit)


def _patches_of(pixels_CYX: np.ndarray, patch_size: int) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Cut an image into patches [H * W, C, P, P] float32, and return (1, H, W)."""
    channels, height, width = pixels_CYX.shape
    lines, columns = height // patch_size, width // patch_size
    cut = pixels_CYX.astype(np.float32).reshape(channels, lines, patch_size, columns, patch_size)
    patches = cut.transpose(1, 3, 0, 2, 4).reshape(lines * columns, channels, patch_size, patch_size)
    return np.ascontiguousarray(patches), (1, lines, columns)
