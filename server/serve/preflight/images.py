"""Check the options for images before anything is loaded, and count the memory of the processes that encode them.

Each front has one such process, with the model's image tower. Reads config.json and the headers of weight files only.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from server.front.images.seeing import SIZE_SETTINGS, why_no_images
from server.machine.model_fields import NOT_OF_TEXT
from server.options.table import Options
from server.serve.preflight.device import GpuFacts, Look, look
from server.serve.preflight.memory import (
    NO_ENCODERS,
    NOT_KEPT,
    PROCESS_BYTES,
    SCALES,
    EncoderMemory,
    gib,
    has_image_experts,
)
from server.serve.preflight.model import PreflightError, read_config, read_headers


def check_images(options: Options, look_for_gpus: Look = look) -> None:
    """Check the processor's settings and the device of the encoder, if the model takes images.

    Raises:
        PreflightError: The processor has no such setting, or the device is missing or too small.
    """
    images, directory = options.images, Path(options.model)
    reason = _why_no_images(options)
    if images.processor_settings and not images.why_off:
        if reason:
            raise PreflightError(f"--mm-processor-kwargs is given, but the model takes no images: {reason}")
        _check_settings(images.processor_settings, read_config(directory)["model_type"])
    if images.encoder_device != "cpu" and not images.why_off and not reason:
        facts, problem = look_for_gpus()
        _check_device(images.encoder_device, facts, problem, tower_bytes(directory))


def _check_settings(settings: Mapping[str, Any], model_type: str) -> None:
    known = SIZE_SETTINGS[model_type]
    given = [
        f"{name}.{key}" if key else name
        for name, value in settings.items()
        for key in (value if isinstance(value, dict) else ("",))
    ]
    for name in given:
        if name not in known:
            raise PreflightError(
                f"--mm-processor-kwargs has {name}, but the image processor of {model_type} has only {', '.join(known)}"
            )


def _check_device(name: str, facts: GpuFacts, problem: str, num_bytes: int) -> None:
    if not facts.devices:
        raise PreflightError(f"--image-encoder-device is {name}, but {problem}; use cpu")
    index = int(name.partition(":")[2] or 0)
    if index >= len(facts.devices):
        last = len(facts.devices) - 1
        raise PreflightError(
            f"--image-encoder-device is {name}, but this machine has {len(facts.devices)} GPUs; use cuda:0 to cuda:{last}, or cpu"
        )
    if num_bytes > facts.devices[index].free_bytes:
        raise PreflightError(
            f"--image-encoder-device is {name}, which has {gib(facts.devices[index].free_bytes)} free, but the image tower takes up to "
            f"{gib(num_bytes)}; use another GPU, or cpu"
        )


def encoder_memory(options: Options) -> EncoderMemory:
    """Return the host memory of all fronts' encoders on this node."""
    if not takes_images(options):
        return NO_ENCODERS
    tower = tower_bytes(Path(options.model)) if options.images.encoder_device == "cpu" else 0
    return EncoderMemory(options.api_server_count, options.api_server_count * (tower + PROCESS_BYTES))


def tower_bytes(directory: Path) -> int:
    """Return the size of a model's towers in float32."""
    shapes = [
        tensor["shape"]
        for name, tensor in read_headers(directory).items()
        if NOT_OF_TEXT.search(name) and not SCALES.search(name) and not name.endswith(NOT_KEPT)
    ]
    return 4 * sum(map(math.prod, shapes))


def takes_images(options: Options) -> bool:
    """Return whether the service takes images, as far as config.json and the names of files show it."""
    return not options.images.why_off and not _why_no_images(options)


def _why_no_images(options: Options) -> str:
    directory = Path(options.model)
    return why_no_images(read_config(directory), directory, has_image_experts=has_image_experts(options))
