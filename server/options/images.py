"""Options for images in requests: their limits, and the places from which the front reads them."""

import json
import os
import re
from dataclasses import dataclass
from typing import Any

from server.options.flag import (
    Group,
    OptionsError,
    flag,
    number,
    size,
    size_in_gib,
    switch,
    text,
    texts,
    whole,
)

IMAGES = Group("images", "the front")
MOST_IMAGES = 16
PROCESSOR_SETTINGS = ("max_pixels", "min_pixels", "size", "max_soft_tokens", "max_patches")
_FETCH_S = number(lambda seconds: 0 < seconds <= 600, "above 0 and at most 600 seconds")


def _domains(name: str, given: Any) -> tuple[str, ...]:
    return tuple(_domain(name, each) for each in texts(name, given))


def _domain(name: str, given: str) -> str:
    try:
        host = given.encode("idna").decode().lower()  # as the front compares it
    except UnicodeError:
        host = ""
    if not host or set(host) & set("/ @"):
        raise OptionsError(
            f"{name} has {given!r}; give host names such as images.example, *.example or 10.0.0.7"
        )
    return host


def _folder(name: str, given: Any) -> str:
    path = os.path.realpath(os.path.expanduser(text(name, given)))
    if not given or not os.path.isdir(path):
        raise OptionsError(f"{name} is {given!r}, which is not a folder; give one that exists")
    return path


def _json_object(name: str, given: Any, example: str) -> dict[str, Any]:
    try:
        value = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise OptionsError(f"{name} is {given!r}; give a JSON object such as '{example}'")
    return value


def _most_images(name: str, given: Any) -> int:
    """Read vLLM's JSON object. Video and audio may only have 0."""
    limits, shown = _json_object(name, given, '{"image": 4}'), f"{name} is {given!r}"
    counts = {
        kind: limit.get("count", 0) if isinstance(limit, dict) else limit for kind, limit in limits.items()
    }
    for kind, count in counts.items():
        if kind not in ("image", "video", "audio") or not isinstance(count, int) or count < 0:
            raise OptionsError(f"""{shown}; give a number of images, such as '{{"image": 4}}'""")
        if kind != "image" and count:
            raise OptionsError(f"{shown}; {kind} is not supported: set it to 0 or leave it out")
    return int(counts.get("image", MOST_IMAGES))


def _device(name: str, given: Any) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text(name, given)):
        raise OptionsError(f"{name} is {given!r}; it must be cpu, cuda or cuda:N, such as cuda:1")
    return str(given)


def _processor_settings(name: str, given: Any) -> str:
    """Read vLLM's JSON object. Return it as JSON."""
    settings, shown = _json_object(name, given, '{"max_pixels": 1000000}'), f"{name} is {given!r}"
    for key, value in settings.items():
        if key not in PROCESSOR_SETTINGS:
            raise OptionsError(f"{shown}; {key} cannot be set: use {', '.join(PROCESSOR_SETTINGS)}")
        counts = [*value.values()] if key == "size" and isinstance(value, dict) else [value]
        if not counts or not all(type(count) is int and count > 0 for count in counts):
            wanted = "an object of whole numbers" if key == "size" else "a whole number"
            raise OptionsError(f"{shown}; {key} must be {wanted} above 0")
        if key == "size" and not isinstance(value, dict):
            raise OptionsError(f"{shown}; size must be an object of whole numbers above 0")
    return json.dumps(settings, sort_keys=True) if settings else ""


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """Limits of images, and their allowed sources."""

    allowed_domains: tuple[str, ...] = flag(
        IMAGES, "--allowed-media-domains", read=_domains, metavar="HOST", action="extend", nargs="+", default=(),
        default_text="every host with a public address",
        help="hosts from which images may be fetched, such as images.example or *.example; listed hosts may have private "
        "addresses, and all others are refused",
    )  # fmt: skip
    local_path: str | None = flag(
        IMAGES, "--allowed-local-media-path", read=_folder, metavar="DIR", default_text="file:// URLs are refused",
        help="folder of files that file:// URLs may name; links to files outside it are refused",
    )  # fmt: skip
    most_images: int = flag(
        IMAGES, "--limit-mm-per-prompt", read=_most_images, metavar="JSON", default=MOST_IMAGES,
        default_text='{"image": 16}', help="maximum number of images in one request; 0 refuses images",
    )  # fmt: skip
    is_off: bool = switch(
        IMAGES, "--language-model-only", help="refuse images, also for models that take them"
    )
    most_bytes: int = flag(
        IMAGES, "--max-image-bytes", read=size, metavar="BYTES", default=20 << 20, default_text="20M",
        help="maximum size of an encoded image; --max-request-bytes limits data URLs, too",
    )  # fmt: skip
    most_pixels: int = flag(
        IMAGES, "--max-image-pixels", read=whole(1), metavar="N", default=50_000_000,
        help="maximum width times height of an image; a decoded pixel takes three bytes",
    )  # fmt: skip
    fetch_timeout_s: float = flag(
        IMAGES, "--image-fetch-timeout", read=_FETCH_S, metavar="SECONDS", default=5.0,
        help="time limit for fetching one image, redirects included",
    )  # fmt: skip
    encoder_device: str = flag(
        IMAGES, "--image-encoder-device", read=_device, metavar="DEVICE", default="cpu",
        help="cpu, cuda or cuda:N: device of the image tower. On a GPU it computes in bfloat16 if the checkpoint stores it so, "
        "otherwise in float32",
    )  # fmt: skip
    encoder_threads: int = flag(
        IMAGES, "--image-encoder-threads", read=whole(1, 1024), metavar="N", default=1,
        help="threads of a front's image encoder. They have a lower priority than ranks, but take their caches and memory "
        "bandwidth",
    )  # fmt: skip
    processor_json: str = flag(
        IMAGES, "--mm-processor-kwargs", read=_processor_settings, metavar="JSON", default="",
        help="""settings of the image processor that limit the tokens of an image, such as '{"max_pixels": 1000000}'; the names """
        f"depend on the model: {', '.join(PROCESSOR_SETTINGS)}",
    )  # fmt: skip
    cache_bytes: int = flag(
        IMAGES, "--image-cache-size", "--mm-processor-cache-gb", read=size_in_gib, metavar="SIZE", default=1 << 30,
        default_text="1G",
        help="host memory for the encoded form of recent images, so that a repeated image is not encoded again; a plain number "
        "counts GiB, as in vLLM; 0 disables it",
    )  # fmt: skip

    @property
    def processor_settings(self) -> dict[str, Any]:
        """Settings of the image processor that replace the checkpoint's."""
        return dict(json.loads(self.processor_json)) if self.processor_json else {}

    @property
    def why_off(self) -> str:
        """Why the operator refuses images, in a form that follows "because"; empty if images are accepted."""
        if self.is_off:
            return "the server was started with --language-model-only"
        return "" if self.most_images else "the server was started with --limit-mm-per-prompt and 0 images"
