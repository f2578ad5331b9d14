"""What the front needs to take images for a model: their sources, the encoder, and the image token."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from server.front.images.encoder import Encoder
from server.front.images.seeing import ImageTokens
from server.front.images.sources import ImageSources

ReadFile = Callable[[str, str], Awaitable[bytes]]


class ImageInput(NamedTuple):
    """Reads and encodes the images of requests."""

    tokens: ImageTokens
    most_images: int  # of a request
    sources: ImageSources
    encoder: Encoder
    most_rows: Callable[[], int]  # of an image; 0 sets no limit
    most_bytes: Callable[[], int]  # of the rows of a request; 0 sets no limit
    read_file: ReadFile  # takes a file's id and the field that names it, for errors

    async def close(self) -> None:
        """Close connections and end the encoder process."""
        await self.sources.close()
        await self.encoder.close()
