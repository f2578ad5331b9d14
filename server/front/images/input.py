"""What the front needs to take images for a model: their sources, the encoder, and the image token."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from server.front.images.encoder import Encoder, LineTokens
from server.front.images.sources import ImageSources

ReadFile = Callable[[str, str], Awaitable[bytes]]


class ImageInput(NamedTuple):
    """Reads and encodes the images of requests."""

    token_id: int  # in a rendered prompt, once per image; in a request, once per row
    most_images: int  # of a request
    sources: ImageSources
    encoder: Encoder
    read_file: ReadFile  # takes a file's id and the field that names it, for errors
    line_tokens: LineTokens | None = None  # of models that mark the lines of an image

    async def close(self) -> None:
        """Close connections and end the encoder process."""
        await self.sources.close()
        await self.encoder.close()
