"""Picture files of every kind become the same RGB pixels, and damaged or hostile ones are refused."""

import struct
import subprocess
import sys
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="needs Pillow: pip install 'wideep[images]'")
from PIL import Image

from server.front.images.picture_files import UnusableImageError, open_picture
from tests.support.requests.pictures import png, png_of

MOST_PIXELS = 1_000_000
RED, WHITE = [255, 0, 0], [255, 255, 255]


def saved(picture: Any, kind: str = "PNG", **how: Any) -> bytes:
    """Return a picture as a file."""
    file = BytesIO()
    picture.save(file, kind, **how)
    return file.getvalue()


def pixels(content: bytes) -> np.ndarray:
    """Return a file's pixels as the encoder sees them."""
    picture = open_picture(content, MOST_PIXELS)
    assert picture.mode == "RGB"
    return np.asarray(picture)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "BMP", "TIFF"])
def test_formats_without_loss_give_the_same_pixels(kind: str) -> None:
    picture = Image.open(BytesIO(png(9, 5)))
    how = {"lossless": True} if kind == "WEBP" else {}
    assert np.array_equal(pixels(saved(picture, kind, **how)), np.asarray(picture))


def test_a_jpeg_gives_nearly_the_same_pixels() -> None:
    found = pixels(saved(Image.new("RGB", (16, 16), (200, 30, 90)), "JPEG", quality=95))
    assert np.abs(found.astype(int) - [200, 30, 90]).max() < 6


def test_the_orientation_of_exif_is_applied() -> None:
    picture = Image.new("RGB", (4, 2), (0, 0, 255))
    picture.putpixel((0, 0), (255, 0, 0))
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    found = pixels(saved(picture, "PNG", exif=exif))
    assert found.shape == (4, 2, 3) and found[0, 1].tolist() == RED


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparent_parts_become_white(mode: str) -> None:
    picture = Image.new("RGBA", (2, 1), (255, 0, 0, 0)).convert(mode)
    assert pixels(saved(picture))[0, 0].tolist() == WHITE


def test_half_transparent_parts_are_mixed_with_white() -> None:
    found = pixels(saved(Image.new("RGBA", (1, 1), (255, 0, 0, 128))))
    assert np.abs(found[0, 0].astype(int) - [255, 127, 127]).max() <= 1


def test_a_palette_becomes_colours_and_its_transparent_entry_white() -> None:
    picture = Image.new("P", (2, 1))
    picture.putpalette([255, 0, 0, 0, 255, 0])
    picture.putpixel((1, 0), 1)
    assert pixels(saved(picture))[0].tolist() == [RED, [0, 255, 0]]
    assert pixels(saved(picture, transparency=0))[0].tolist() == [WHITE, [0, 255, 0]]


def test_16_bits_become_8() -> None:
    lines = b"\0" + struct.pack(">HHH", 0, 0x8000, 0xFFFF)
    found = pixels(png_of(3, 1, lines, depth=16, colour_type=0))
    assert found[0, :, 0].tolist() == [0, 128, 255] and (found == found[..., :1]).all()
    lines = b"\0" + struct.pack(">HHH", 0xFFFF, 0x8000, 0)
    assert pixels(png_of(1, 1, lines, depth=16, colour_type=2))[0, 0].tolist() == [255, 128, 0]


def test_black_and_white_and_cmyk_become_colours() -> None:
    assert pixels(saved(Image.new("1", (1, 1), 1)))[0, 0].tolist() == WHITE
    assert pixels(saved(Image.new("CMYK", (1, 1), (0, 0, 0, 0)), "TIFF"))[0, 0].tolist() == WHITE


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_an_animation_is_its_first_picture(kind: str) -> None:
    first, second = (Image.new("RGB", (4, 4), colour) for colour in ((255, 0, 0), (0, 0, 255)))
    how = {"lossless": True} if kind == "WEBP" else {}
    content = saved(first, kind, save_all=True, append_images=[second], duration=100, **how)
    assert pixels(content)[0, 0].tolist() == RED


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not an image of a supported format"),
        (b"hello", "not an image of a supported format"),
        (b"%PDF-1.4", "not an image of a supported format"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not an image of a supported format"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\n", "not an image of a supported format"),
        (png(64, 64)[:600], "damaged"),
        (png(64, 64)[:-40], "damaged"),
        (saved(Image.new("F", (1, 1)), "TIFF"), "floating-point"),
        (png_of(3000, 3000, b""), "3000 x 3000 pixels; at most 1000000"),
        (png_of(1 << 30, 1 << 30, b""), "at most 1000000"),
    ],
)
def test_other_files_are_refused(content: bytes, reason: str) -> None:
    with pytest.raises(UnusableImageError, match=reason):
        open_picture(content, MOST_PIXELS)


def test_a_small_file_with_many_pixels_is_refused_before_they_are_decoded() -> None:
    """A decompression bomb: 100 million pixels in some 100 kilobytes."""
    content = png_of(10_000, 10_000, bytes(10_001) * 100)
    with pytest.raises(UnusableImageError, match="10000 x 10000"):
        open_picture(content, MOST_PIXELS)


def test_a_chunk_that_expands_is_refused_or_ignored() -> None:
    """A compressed text of 20 MB next to one pixel."""
    text = b"zTXt" + b"Comment\0\0" + zlib.compress(bytes(20 << 20), 9)
    chunk = struct.pack(">I", len(text) - 4) + text + struct.pack(">I", zlib.crc32(text))
    plain = png_of(1, 1, b"\0\xff\0\0")
    with pytest.raises(UnusableImageError, match="damaged"):
        open_picture(plain[:33] + chunk + plain[33:], MOST_PIXELS)


def tiled_tiff(side: int, tile_side: int) -> bytes:
    """Return a black TIFF of one byte per pixel with one tile."""
    packed = zlib.compress(bytes(tile_side**2), 1)
    fields = {
        256: side, 257: side, 258: 8, 259: 8, 262: 1, 277: 1, 322: tile_side, 323: tile_side, 324: 0, 325: len(packed)
    }  # fmt: skip
    fields[324] = 8 + 2 + 12 * len(fields) + 4
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in fields.items())
    return b"II*\0" + struct.pack("<IH", 8, len(fields)) + entries + bytes(4) + packed


def test_a_tile_that_is_larger_than_its_image_is_refused(tmp_path: Path) -> None:
    """256 MB in one tile of an image of 16 x 16 pixels. A new process has no free memory that a tile could take."""
    (tmp_path / "small.tiff").write_bytes(tiled_tiff(16, 16))
    (tmp_path / "large.tiff").write_bytes(tiled_tiff(16, 16_000))
    code = f"""
import resource, sys
from server.front.images.picture_files import UnusableImageError, open_picture
small, large = (open(name, "rb").read() for name in sys.argv[1:])
assert open_picture(small, {MOST_PIXELS}).size == (16, 16)
before = resource.getrlimit(resource.RLIMIT_AS)
try:
    open_picture(large, {MOST_PIXELS})
except UnusableImageError:
    assert resource.getrlimit(resource.RLIMIT_AS) == before
else:
    raise SystemExit("the tile was decoded")
"""
    command = [sys.executable, "-c", code, str(tmp_path / "small.tiff"), str(tmp_path / "large.tiff")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
