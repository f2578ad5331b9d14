"""Resolve a model to a directory, and check its files before any weight is read. Does not use torch.

A model is the demo model, a directory, or a name on the hub. config.json gets a first check by field names; the
authoritative check, against the model's own code, happens when moe builds the model. The headers of safetensors files give
each tensor's name, shape and bytes, and the size of a complete file. Without the check of the placement file, every
rank would report a bad one at the same time, and only after seconds of loading.

The imports inside functions save start-up time and memory: supervisors live as long as the service.
"""
# ruff: noqa: PLC0415

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moe.load.quantisation import UnservedQuantisationError, find_configuration, read_quantisation
from server.machine.lines import is_json, say
from server.machine.model_fields import EXPERT_COUNT_FIELDS, field_of, most, num_experts
from server.options.checkpoint import STORED_METHODS
from server.options.table import DEMO_MODEL


class PreflightError(ValueError):
    """The service cannot be started as requested; the message gives the reason and a remedy."""


_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
_CONFIG_FILES = ("config.json", "hf_quant_config.json")


def resolve_model(
    name: str,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    what: str = "model",
    has_weights: bool = True,
) -> Path:
    """Return the directory of a model, after creating or downloading it if necessary.

    Args:
        revision: Branch, tag or commit of a model on the hub; None means the newest.
        download_dir: Cache folder for models of the hub; None means the hub's own cache.
        what: Word for the model in messages.
        has_weights: Whether files with weights are downloaded.

    Raises:
        PreflightError: The model does not exist or cannot be downloaded.
    """
    if name == DEMO_MODEL:
        return _make_demo_model()
    path = Path(name).expanduser()
    if path.exists():
        return path.resolve()
    if name.startswith((".", "/", "~")) or not _HUB_NAME.fullmatch(name):
        raise PreflightError(f"the {what} path {name} does not exist")
    return _download(name, revision, download_dir, what, has_weights=has_weights)


def resolve_config(name: str) -> Path:
    """Return a directory with the config.json of a model that is not a local path. Does not download a hub model's weights.

    Raises:
        PreflightError: The model does not exist, or the hub cannot be reached.
    """
    if name == DEMO_MODEL:
        return _make_demo_model()
    if name.startswith((".", "/", "~")) or not _HUB_NAME.fullmatch(name):
        raise PreflightError(
            f"{name} does not exist; use a model directory, its config.json, a name on the hub, or 'demo'"
        )
    return _download(name, None, None, "model", files=_CONFIG_FILES)


def _make_demo_model() -> Path:
    from moe.demo_model import DemoModelError, ensure_demo_model

    try:
        return ensure_demo_model(report=_say_stages() if is_json() else None)
    except DemoModelError as error:
        raise PreflightError(f"the demo model could not be made: {error}") from error


def _say_stages() -> Callable[[str, float], None]:
    """Return a function that logs one line per stage of making the model, in the log format."""
    last = ""

    def report(stage: str, fraction: float) -> None:
        nonlocal last
        if stage != last:
            last = stage
            say(f"Making the demo model (once): {fraction:.0%}, {stage}", error=True, level="info")

    return report


def _download(
    name: str,
    revision: str | None,
    download_dir: str | None,
    what: str,
    files: Sequence[str] = _HUB_FILES,
    *,
    has_weights: bool = True,
) -> Path:
    import httpx
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                cache_dir=download_dir,
                allow_patterns=list(files),
                ignore_patterns=None if has_weights else ["*.safetensors"],
            )
        )
    except (OSError, ValueError, httpx.HTTPError) as error:  # the hub's own errors are one of these
        at = f" at revision {revision!r}" if revision else ""
        needed = "a tokenizer" if what == "tokenizer" else "config.json and .safetensors files"
        raise PreflightError(
            f"the {what} {name!r}{at} is not a local directory, and {_why_not_fetched(error)}. Use a directory with {needed}"
            f"{'' if what == 'tokenizer' else ', or demo'}"
        ) from error


def _why_not_fetched(error: Exception) -> str:
    """Return why the download from the hub failed, and a remedy."""
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        return "the hub requires that you accept its licence: do so on the model's page and set HF_TOKEN"
    if isinstance(error, RevisionNotFoundError):
        return "the hub does not have that revision"
    if isinstance(error, RepositoryNotFoundError):
        return "the hub does not have it, or it is private: check the name, or set HF_TOKEN"
    if isinstance(error, LocalEntryNotFoundError):
        return "the hub cannot be reached (no network, or HF_HUB_OFFLINE is set) and the model is not in the cache"
    reason = str(error).strip().partition("\n")[0]
    return f"the download from the hub failed ({type(error).__name__}: {reason})"


_LENGTH_FIELDS = ("max_position_embeddings", "n_positions", "max_sequence_length")


def read_config(directory: Path) -> dict[str, Any]:
    """Return a model directory's config.json."""
    if not directory.exists():
        raise PreflightError(f"the model path {directory} does not exist")
    if not directory.is_dir():
        raise PreflightError(
            f"the model path {directory} is a file; use the directory that contains config.json"
        )
    path = directory / "config.json"
    if not path.is_file():
        hint = ""
        if (directory / "params.json").is_file():
            hint = "; params.json is Mistral's format, which is not supported: use the checkpoint in transformers' format"
        raise PreflightError(f"{directory} is not a model directory: it has no config.json{hint}")
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise PreflightError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise PreflightError(f"{path} is not a JSON object")
    return config


def check_is_moe(config: dict[str, Any], directory: Path) -> None:
    """Raise if a config has no experts."""
    if num_experts(config) < 2:
        raise PreflightError(
            f"{directory} is not a Mixture-of-Experts model: its config.json (model_type "
            f"{config.get('model_type', 'unknown')!r}) does not set any of {', '.join(EXPERT_COUNT_FIELDS)} above 1. WideEP "
            "serves MoE models only"
        )


def check_quantisation(config: dict[str, Any], directory: Path, *, asked: str | None) -> None:
    """Raise if the stored format of the weights is not supported, or if `asked`, the --quantization flag, conflicts with it."""
    given = field_of(config, "quantization_config")
    if not isinstance(given, dict | None):
        raise PreflightError(f"{directory}: quantization_config is {given!r}; it must be an object")
    try:
        configured = find_configuration(directory, given)
        found = read_quantisation(configured)
    except UnservedQuantisationError as error:
        raise PreflightError(f"{directory} cannot be served: {error}") from error
    if asked in STORED_METHODS:
        if found is None or found.method != STORED_METHODS[asked]:
            stored = "not quantised" if found is None else f"quantised as {found.method}"
            raise PreflightError(
                f"--quantization is {asked}, but the weights of {directory} are {stored}. Remove the flag to serve them in their "
                "format; only int8 and int4 quantise on load"
            )
    elif asked is not None and found is not None:
        raise PreflightError(
            f"--quantization is {asked}, but the weights of {directory} are already quantised ({found.method}) and stay in this "
            "format; remove the flag"
        )


def check_length(config: dict[str, Any], max_model_len: int | None) -> None:
    """Raise if the requested length exceeds the model's."""
    longest = max(most(config, name) for name in _LENGTH_FIELDS)
    if max_model_len is not None and 0 < longest < max_model_len:
        raise PreflightError(f"--max-model-len is {max_model_len}; the model's limit is {longest} tokens")


_OTHER_FORMATS = ("*.bin", "*.gguf", "*.pt", "*.pth")
# File of a folder with random weights: the tensors' types and shapes, in the form of a safetensors header.
RANDOM_TENSORS = "random_tensors.json"
_MAX_HEADER_BYTES = 100_000_000  # the safetensors format's own limit


def has_random_weights(directory: Path) -> bool:
    """Return whether a folder is one that `random_weights` has made."""
    return (directory / RANDOM_TENSORS).is_file()


def safetensors_files(directory: Path) -> list[Path]:
    """Return a checkpoint's files: those in its index or, without an index, all of them. Random weights have none."""
    if has_random_weights(directory):
        return []
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        return _indexed_files(index)
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        others = sorted(path.name for pattern in _OTHER_FORMATS for path in directory.glob(pattern))
        seen = f"; it has {', '.join(others[:3])}, in a format that WideEP does not read" if others else ""
        raise PreflightError(
            f"{directory} has no .safetensors weights{seen}. Download or save the model as safetensors "
            "(model.save_pretrained in transformers)"
        )
    return files


def read_headers(directory: Path) -> dict[str, Any]:
    """Return a checkpoint's tensors by name. If two files contain a name, the index decides."""
    if has_random_weights(directory):
        return dict(json.loads((directory / RANDOM_TENSORS).read_bytes()))
    index = directory / "model.safetensors.index.json"
    indexed = _weight_map(index) if index.is_file() else {}
    return {
        name: tensor
        for path in safetensors_files(directory)
        for name, tensor in read_header(path).items()
        if indexed.get(name, path.name) == path.name
    }


def _weight_map(index: Path) -> dict[str, str]:
    try:
        found = json.loads(index.read_bytes())["weight_map"]
        return {str(name): str(file) for name, file in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PreflightError(f"{index} is not a safetensors index: {error!r}") from error


def _indexed_files(index: Path) -> list[Path]:
    names = sorted(set(_weight_map(index).values()))
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise PreflightError(
            f"{len(missing)} of the {len(names)} weight files listed in {index} are missing: "
            f"{', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}. Download the model again"
        )
    return [index.parent / name for name in names]


def read_header(path: Path) -> dict[str, Any]:
    """Return a safetensors file's tensors by name. Raises if the file is incomplete."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        content = file.read(min(header_bytes, _MAX_HEADER_BYTES))
    try:
        tensors = json.loads(content) if len(content) == header_bytes else {}
        tensors.pop("__metadata__", None)
        end = 8 + header_bytes + max(tensor["data_offsets"][1] for tensor in tensors.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PreflightError(
            f"{path} is not a safetensors file (perhaps a git-lfs pointer or an incomplete download). Download it again"
        ) from error
    if (size := path.stat().st_size) != end:
        raise PreflightError(f"{path} has {size} bytes, but its header implies {end}. Download it again")
    return dict(tensors)


def slots_in(file: str) -> int:
    """Return the number of slots per layer and rank in a placement file; 0 if it is not a placement."""
    from expert_placement.files import PlacementFileError, load_placement

    try:
        return load_placement(Path(file)).slots_per_rank
    except PlacementFileError:
        return 0


def why_unfit(file: str, *, num_layers: int, num_experts: int, num_ranks: int) -> str | None:
    """Return why a service cannot use the placement file, or None if it can.

    Args:
        num_layers: Number of MoE layers. num_experts: Number of experts in each.
    """
    from expert_placement.files import PlacementFileError, load_placement

    try:
        placement = load_placement(Path(file))
    except PlacementFileError as error:
        return str(error)
    found = (placement.num_layers, placement.num_experts, placement.num_ranks)
    if found == (num_layers, num_experts, num_ranks):
        return None
    return (
        f"{file} is a placement for {found[0]} layers of {found[1]} experts on {found[2]} ranks, but this service has "
        f"{num_layers} layers of {num_experts} experts on {num_ranks} ranks. Plan a new one (wideep experts plan), "
        "or remove the flag"
    )
