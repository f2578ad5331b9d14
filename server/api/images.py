"""Images of a prompt: find them in the messages, read and encode them, and give each its range of the prompt.

A chat template writes one token for an image. The prompt gets as many as the image has rows, so the length of the context and the
usage count them before the request is queued.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvcache.images import Image
from server.api.media import IMAGE_PARTS, refuse_other_url, why_unserved
from server.front.errors import bad_request
from server.front.images.encoder import EncodedImage
from server.front.images.input import ImageInput


class ImagePart(NamedTuple):
    """An image in a message."""

    where: str  # its place in the request, for errors
    url: str = ""
    file_id: str = ""  # of an uploaded file, instead of a URL


class PromptImages(NamedTuple):
    """The images of a prompt."""

    ranges: tuple[Image, ...] = ()
    files: tuple[EncodedImage, ...] = ()  # of their rows, which exist as long as these


NO_IMAGES = PromptImages()
# Key of a part that another API's request became: the part's place in that request, for errors.
FIELD = "wideep_field"
NO_TOWER = "it has no image tower"  # why a model takes no images, unless another reason is given


def place_of(part: Mapping[str, Any], where: str) -> str:
    """Return a part's place in the client's request; `where` is its place in the chat."""
    given = part.get(FIELD)
    return given if isinstance(given, str) else where


def image_part(part: Mapping[str, Any], where: str) -> ImagePart:
    """Return the image of a content part of one of `IMAGE_PARTS`.

    Args:
        where: The part's place in the chat.

    Raises:
        ApiError: 400, naming the field.
    """
    kind, where = part["type"], place_of(part, where)
    field = "image_url" if kind == "input_image" else kind
    given = part.get(field)
    shown = where if FIELD in part else f"{where}.{field}"
    if isinstance(file_id := part.get("file_id"), str):
        return ImagePart(where if FIELD in part else f"{where}.file_id", file_id=file_id)
    if isinstance(given, Mapping):
        given, shown = given.get("url"), shown if FIELD in part else f"{shown}.url"
    if not isinstance(given, str) or not given:
        raise bad_request(
            f"{shown} must be a URL, such as data:image/png;base64,..., unless there is a file_id.", shown
        )
    refuse_other_url(given, shown)
    return ImagePart(shown, given)


def image_parts(contents: Sequence[Any]) -> Iterator[ImagePart]:
    """Yield the images in the contents of a chat's messages, in order."""
    for place, content in enumerate(contents):
        for number, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS:
                yield image_part(part, f"messages.{place}.content.{number}")


def listed_images(images: Any, field: str) -> list[ImagePart]:
    """Return the images of a list of parts outside messages.

    Args:
        field: The list's name in errors.

    Raises:
        ApiError: 400, naming the part.
    """
    if not isinstance(images, list):
        raise bad_request(f"{field} must be a list of image parts.", field)
    for number, part in enumerate(images):
        if not isinstance(part, Mapping) or part.get("type") not in IMAGE_PARTS:
            where = f"{field}.{number}"
            if isinstance(part, Mapping) and (reason := why_unserved(part.get("type"))):
                raise bad_request(f"{where} is of type {part['type']!r}; {reason}.", f"{where}.type")
            raise bad_request(f"{where} must be a part of type {', '.join(IMAGE_PARTS)}.", where)
    return [image_part(part, f"{field}.{number}") for number, part in enumerate(images)]


async def encode_images(
    prompt_ids: Sequence[int],
    parts: Sequence[ImagePart],
    taken: ImageInput,
    *,
    prompt_field: str | None = None,
    images_field: str = "images",
) -> tuple[list[int], PromptImages]:
    """Read and encode a prompt's images.

    Args:
        prompt_ids: Tokens of the rendered prompt, with one token for each image.
        parts: The images, in order.
        taken: Reads and encodes them.
        prompt_field: The prompt's name in errors if the client wrote the image tokens. None means a rendered chat.
        images_field: The name of the list of images in errors about such a prompt.

    Returns:
        The tokens with one for each row of the images, and the images at their places.

    Raises:
        ApiError: 400 if an image cannot be read or used, or the prompt does not show each image once.
    """
    if len(parts) > taken.most_images:
        raise bad_request(
            f"The request has {len(parts)} images; at most {taken.most_images} are allowed (--limit-mm-per-prompt).",
            parts[taken.most_images].where,
        )
    num_shown = sum(token_id == taken.tokens.shown for token_id in prompt_ids)
    if num_shown != len(parts) and prompt_field is not None:
        raise bad_request(
            f"{prompt_field} has the image token {num_shown} times, but {images_field} has {len(parts)} parts; "
            "write it once for each.",
            prompt_field,
        )
    if num_shown != len(parts):
        raise bad_request(
            f"The rendered prompt shows {num_shown} images, but the messages have {len(parts)}: a text contains the image "
            "token, or the chat template does not show images in this role.",
            "messages",
        )
    tasks = [asyncio.ensure_future(_encoded(part, taken)) for part in parts]
    try:
        files = await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    for part, file in zip(parts, files, strict=True):
        _check_rows(file.num_rows, taken.most_rows(), part.where)
    _check_bytes(parts, files, taken.most_bytes())
    ids: list[int] = []
    ranges: list[Image] = []
    waiting = iter(files)
    for token_id in prompt_ids:
        if token_id != taken.tokens.shown:
            ids.append(token_id)
            continue
        more, places = next(waiting).placed(len(ids), taken.tokens)
        ids += more
        ranges += places
    return ids, PromptImages(tuple(ranges), tuple(files))


def _check_rows(num_rows: int, most: int, where: str) -> None:
    if most and num_rows > most:
        raise bad_request(
            f"{where}: the image has {num_rows} tokens, which one step must run, and a step has at most {most}. Send a smaller "
            "image, or raise --max-num-batched-tokens.",
            where,
        )


def _check_bytes(parts: Sequence[ImagePart], files: Sequence[EncodedImage], most: int) -> None:
    """Refuse images that do not fit into one request together. The rows of equal images count once."""
    if not most:
        return
    bytes_of: dict[str, int] = {}
    for part, file in zip(parts, files, strict=True):
        bytes_of[file.digest] = file.num_bytes
        if (num_bytes := sum(bytes_of.values())) > most:
            raise bad_request(
                f"{part.where}: with this image, the encoded images of the request have {num_bytes} bytes. Ranks on another host than "
                f"the front take at most {most}. Send fewer or smaller images.",
                part.where,
            )


async def _encoded(part: ImagePart, taken: ImageInput) -> EncodedImage:
    async with taken.encoder.room(part.where):
        begun_s = time.perf_counter()
        if part.file_id:
            content = await taken.read_file(part.file_id, part.where)
        else:
            content = await taken.sources.read(part.url, part.where)
        taken.encoder.count(fetch_s=time.perf_counter() - begun_s)
        return await taken.encoder.encode(content, part.where)
