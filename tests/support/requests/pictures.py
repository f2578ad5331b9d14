"""Small picture files for tests, written without an image library."""

import base64
import struct
import zlib

import numpy as np


def png(width: int, height: int, seed: int = 0) -> bytes:
    """Return a PNG of 8-bit colours: four coloured quarters with some noise."""
    draw = np.random.default_rng(seed)
    is_low, is_right = 2 * np.arange(height) >= height, 2 * np.arange(width) >= width
    colours = draw.integers(256, size=(4, 3))[2 * is_low[:, None] + is_right]
    lines = np.zeros((height, 1 + 3 * width), np.uint8)  # the first byte of a line: no filter
    lines[:, 1:] = ((colours + draw.integers(16, size=colours.shape)) % 256).reshape(height, -1)
    return png_of(width, height, lines.tobytes())


def png_of(width: int, height: int, lines: bytes, *, depth: int = 8, colour_type: int = 2) -> bytes:
    """Return a PNG with these lines, each after its filter byte."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour_type, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in chunks)


def data_url(content: bytes, kind: str = "image/png") -> str:
    """Return a data URL of a file."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
