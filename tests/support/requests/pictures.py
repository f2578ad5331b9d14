"""Small picture files for tests, written without an image library."""

import base64
import random
import struct
import zlib


def png(width: int, height: int, seed: int = 0) -> bytes:
    """Return a PNG of 8-bit colours: four coloured quarters with some noise."""
    draw = random.Random(seed)
    colours = [[draw.randrange(256) for _ in range(3)] for _ in range(4)]
    lines = []
    for y in range(height):
        line = bytearray([0])  # no filter
        for x in range(width):
            colour = colours[2 * (2 * y >= height) + (2 * x >= width)]
            line += bytes((value + draw.randrange(16)) % 256 for value in colour)
        lines.append(bytes(line))
    return png_of(width, height, b"".join(lines))


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
