"""The process that turns images into rows: it decodes, runs `transformers`' image processor, then the model's image tower.

Images are untrusted, and towers take long. So neither runs in the front: a crash ends this process, and its low priority leaves
the processors to the ranks (`priority`). It encodes one image at a time, always on the same number of threads, so that the rows of
an image are the same bits whenever they are computed. Decoding and the image processor run on the CPU. The tower may run on a GPU.

Input on stdin: the settings as one line of JSON, then one image per line: a number, the file with its bytes, its digest, and the
file to write the rows to. Files are paths to descriptors of the front, so no image is copied through a pipe.
Output on stdout: a line with the meaning of the rows, a digest of all settings that change them; then one line per image.
"""

import hashlib
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import PIL
import torch
import transformers
from transformers import AutoImageProcessor

from kvcache.images import write_rows
from moe.vision.tower import Tower
from server.front.images.encoder import EncoderSettings
from server.front.images.kimi_processor import KimiImageProcessor
from server.front.images.picture_files import UnusableImageError, open_picture
from server.front.images.priority import PoliteWorker
from server.front.images.tiles import TileProcessor
from server.machine.parent_death import die_with_parent

_OWN_PROCESSORS: dict[str, Any] = {
    "kimi_k25": KimiImageProcessor,
    "llama4": TileProcessor,
}  # transformers' own needs torchvision


def run_encoder(orders: TextIO = sys.stdin) -> int:
    """Answer until stdin ends; return the exit status."""
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    transformers.utils.logging.set_verbosity_error()  # of a missing torchvision, for example
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print too
    settings = EncoderSettings(**json.loads(orders.readline()))
    worker = PoliteWorker(settings.threads)
    worker.start()
    try:
        encoder = ImageEncoder(settings)
    except Exception as error:  # noqa: BLE001 - the front reports any of them
        print(json.dumps({"failure": f"{type(error).__name__}: {error}"}), file=answers, flush=True)
        return 1
    print(json.dumps({"meaning": encoder.meaning}), file=answers, flush=True)
    for line in orders:
        answer = worker.run(encoder.answer, json.loads(line))
        print(json.dumps(answer), file=answers, flush=True)
    return 0


class ImageEncoder:
    """A model's image processor and tower."""

    def __init__(self, settings: EncoderSettings) -> None:
        """Load both, and set the number of this process's threads.

        Raises:
            ValueError, OSError: The checkpoint has no usable processor or tower, or the settings do not fit.
        """
        directory = Path(settings.directory)
        check_device(settings.device)
        torch.set_num_threads(settings.threads)
        torch.backends.cudnn.allow_tf32 = False  # as in products of matrices
        self._most_pixels = settings.most_pixels
        self._processor = read_processor(directory, settings.processor)
        self._tower = Tower(directory, settings.device)
        # transformers' processor of these models overrides the patch size of the image processor, too.
        has_lines = "image_sizes" in self._processor.model_input_names
        self._options = {"patch_size": self._tower.pixels_per_row} if has_lines else {}
        versions = [transformers.__version__, PIL.__version__, torch.__version__]
        computing = [name_of(self._tower.device), str(self._tower.dtype), settings.threads]
        described = json.dumps([*versions, *computing, self._processor.to_json_string()])
        self.meaning = hashlib.sha256(described.encode()).hexdigest()

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        """Encode one image, write its rows, and return the answer."""
        times = [time.perf_counter()]
        try:
            picture = open_picture(Path(order["content"]).read_bytes(), self._most_pixels)
            times.append(time.perf_counter())
            try:
                inputs = self._processor(images=[picture], return_tensors="pt", **self._options)
            except ValueError as error:  # such as an aspect ratio above its limit
                raise UnusableImageError(f"the model's image processor refuses it: {error}") from error
            times.append(time.perf_counter())
            features = self._tower.encode(dict(inputs))
            rows = features.rows_LND.numpy()
            write_rows(order["rows"], order["digest"], rows)
        except UnusableImageError as error:
            return {"number": order["number"], "why_not": str(error)}
        except Exception as error:  # noqa: BLE001 - any of them concerns one request only
            return {"number": order["number"], **self._failure(error)}
        times.append(time.perf_counter())
        steps = ("decode_s", "process_s", "tower_s")
        return {
            "number": order["number"],
            "num_rows": rows.shape[1],
            "height": features.height,
            "width": features.width,
            "part": features.part,
            "columns": features.columns,
            "num_bytes": rows.nbytes,
            **{name: end - begin for name, begin, end in zip(steps, times, times[1:], strict=False)},
        }

    def _failure(self, error: Exception) -> dict[str, Any]:
        """Describe an error that the image did not cause."""
        traceback.print_exception(error)  # for the operator
        lacks_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
        # After other errors, a GPU may refuse all further work of the process.
        is_broken = self._tower.device.type != "cpu" and not lacks_memory
        reason = (str(error).splitlines() or [""])[0]
        return {
            "failure": f"{type(error).__name__}: {reason}" if reason else type(error).__name__,
            "lacks_memory": lacks_memory,
            "is_broken": is_broken,
        }


def check_device(name: str) -> None:
    """Raise if torch does not have a device.

    Raises:
        ValueError: It is missing.
    """
    device, count = torch.device(name), torch.cuda.device_count()
    if device.type != "cpu" and (device.index or 0) >= count:
        raise ValueError(f"--image-encoder-device is {name}, but torch finds {count} CUDA devices")


def name_of(device: torch.device) -> str:
    """Return the name of a device, for the meaning of rows: GPUs of different models compute different bits."""
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)


def read_processor(directory: Path, settings: Mapping[str, Any] | None = None) -> Any:
    """Return a model's image processor, on top of Pillow.

    Args:
        settings: Settings that replace the checkpoint's. Keys of `size` that are not given keep the checkpoint's values.

    Raises:
        ValueError, OSError: The model has no usable one, or it does not have these settings.
    """
    processor = _processor_with(directory, {})
    if not settings:
        return processor
    changed = dict(settings)
    if "size" in changed:
        size = dict(processor.size)
        if unknown := changed["size"].keys() - size.keys():
            raise ValueError(
                f"--mm-processor-kwargs: size has {', '.join(sorted(unknown))}, but that of the model's image processor has only "
                f"{', '.join(sorted(size))}"
            )
        changed["size"] = size | changed["size"]
    return _processor_with(directory, changed)


def _processor_with(directory: Path, settings: Mapping[str, Any]) -> Any:
    model_type = json.loads((directory / "config.json").read_bytes()).get("model_type")
    if own := _OWN_PROCESSORS.get(model_type):
        return own.from_pretrained(directory, local_files_only=True, trust_remote_code=False, **settings)
    return AutoImageProcessor.from_pretrained(
        directory, backend="pil", local_files_only=True, trust_remote_code=False, **settings
    )
