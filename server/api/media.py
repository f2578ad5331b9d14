"""The names of media in requests of all APIs. Images are read by `images`; video and audio are refused by name."""

from collections.abc import Mapping
from typing import Any

from server.front.errors import bad_request

IMAGE_PARTS = ("image_url", "input_image", "image")
# Types of parts with other media, and the words for them in errors.
_OTHER_PARTS = {
    "video_url": "video", "video": "video", "input_video": "video", "audio_url": "audio", "audio": "audio",
    "input_audio": "audio",
}  # fmt: skip
# Fields of a request or a message: those of vLLM, SGLang and OpenAI, and names that clients of Ollama might try.
_OTHER_FIELDS = {
    "video_data": "video", "audio_data": "audio", "videos": "video", "audios": "audio", "video": "video", "audio": "audio",
    "video_url": "video", "audio_url": "audio", "input_audio": "audio",
}  # fmt: skip
_NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})


def why_unserved(kind: Any) -> str:
    """Return why parts of a type are not supported, if the type is one of video or audio; otherwise an empty text."""
    word = _OTHER_PARTS.get(kind) if isinstance(kind, str) else None
    return f"{word} is not supported" if word else ""


def refuse_other_fields(fields: Mapping[str, Any] | None, where: str = "") -> None:
    """Refuse fields with video or audio.

    Args:
        where: Prefix of the names in errors.

    Raises:
        ApiError: 400, naming the field.
    """
    for name, word in _OTHER_FIELDS.items():
        if fields and fields.get(name) not in _NOTHING:
            raise bad_request(
                f"{where}{name}: {word} is not supported by this server; leave it out.", f"{where}{name}"
            )


def refuse_other_url(url: str, where: str) -> None:
    """Refuse a data URL of video or audio in the place of an image's.

    Raises:
        ApiError: 400, naming the field.
    """
    for word in ("video", "audio"):
        if url[:32].lower().startswith(f"data:{word}/"):
            raise bad_request(f"{where} is a data URL of {word}; {word} is not supported.", where)
