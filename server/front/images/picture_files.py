"""Decode picture files of clients to RGB. Needs Pillow, and runs in the encoder process only.

What a file means here: the orientation of EXIF is applied; palettes become colours; transparent parts become white; 16 bits per
value become 8; an animation is its first picture. Other formats, and pixels of floating-point values, are refused. The size is
read from the header and limited before a pixel is decoded. Files can still make a decoder take more memory than the size explains:
the tiles of a TIFF may be larger than its image. So a decoder's memory is limited by the size, too.
"""

import os
import resource
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_DEEP = ("I;16", "I;16L", "I;16B", "I;16N", "I")  # Pillow's modes of 16 bits per value
# Errors that Pillow raises for damaged files.
_BROKEN = (
    ArithmeticError, AttributeError, EOFError, LookupError, OSError, SyntaxError, TypeError, ValueError, struct.error, zlib.error,
)  # fmt: skip


# Memory of a decoder: some copies of the pixels, of four bytes each, and its own tables and buffers.
_BYTES_PER_PIXEL = 40
_OTHER_BYTES = 128 << 20


class UnusableImageError(ValueError):
    """An image that cannot be used; the message gives the reason."""


def open_picture(content: bytes, most_pixels: int) -> Any:
    """Decode a picture file.

    Args:
        content: The file.
        most_pixels: Largest width times height.

    Returns:
        A `PIL.Image.Image` of mode RGB.

    Raises:
        UnusableImageError: It is damaged, too large, or of an unsupported format.
    """
    Image.MAX_IMAGE_PIXELS = None  # `most_pixels` takes its place
    try:
        picture = Image.open(BytesIO(content), formats=FORMATS)
    except UnidentifiedImageError:
        raise UnusableImageError(f"it is not an image of a supported format ({', '.join(FORMATS)})") from None
    except _BROKEN as error:
        raise UnusableImageError(f"it is damaged: {_first_line(error)}") from error
    if picture.width * picture.height > most_pixels:
        raise UnusableImageError(
            f"it has {picture.width} x {picture.height} pixels; at most {most_pixels} pixels are allowed "
            "(--max-image-pixels)"
        )
    if picture.mode == "F":
        raise UnusableImageError("its pixels are floating-point numbers; use 8 or 16 bits per value")
    try:
        with _memory_limit(_OTHER_BYTES + _BYTES_PER_PIXEL * picture.width * picture.height):
            picture.load()
            return _as_rgb(ImageOps.exif_transpose(picture))
    except MemoryError:
        raise UnusableImageError("it needs too much memory") from None
    except _BROKEN as error:
        raise UnusableImageError(f"it is damaged: {_first_line(error)}") from error


@contextmanager
def _memory_limit(num_bytes: int) -> Iterator[None]:
    """Let allocations of this process fail beyond so many bytes more than it has now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    limits = [each for each in (used + num_bytes, soft) if each != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _as_rgb(picture: Any) -> Any:
    if picture.mode in _DEEP:
        picture = picture.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    if "A" in picture.getbands() or "transparency" in picture.info:
        picture = picture.convert("RGBA")
        white = Image.new("RGBA", picture.size, (255, 255, 255, 255))
        picture = Image.alpha_composite(white, picture)
    return picture.convert("RGB")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
