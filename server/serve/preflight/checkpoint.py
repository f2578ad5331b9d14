"""Resolve a model to a folder that contains the options' changes to its files.

If options change config.json, generation_config.json or the tokenizer, this module creates a folder of links to the model's
files, with new copies of the changed ones. All processes then use this folder and do not need the options. Its name is a
digest of its content: ranks that create it at the same time create the same one, and the first is kept. Rejected: passing
the changes to each reader of config.json (preflight, transformers, tokenizer, survey), which would need four implementations.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moe.demo_model.cache import demo_model_path
from server.machine.versions import version_of
from server.options.checkpoint import STORED_METHODS, CheckpointOptions
from server.options.table import Options
from server.serve.preflight.model import (
    PreflightError,
    check_is_moe,
    check_quantisation,
    has_random_weights,
    read_config,
    resolve_model,
)
from server.serve.preflight.random_weights import write_tensors

CONFIG, GENERATION = "config.json", "generation_config.json"
_TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.tiktoken", "tiktoken.model",
    "tokenization_*.py", "spiece.model", "sentencepiece*.model", "chat_template*", "*.jinja",
)  # fmt: skip


def with_checkpoint(options: Options) -> Options:
    """Return options with a model folder that contains all changes to the model's files.

    Raises:
        PreflightError: The model does not exist or has no tokenizer, or --quantization names a format that its weights
            do not have.
    """
    has_weights = options.engine.load_format != "dummy"
    directory = find_checkpoint(options.model, options.checkpoint, has_weights=has_weights)
    if options.engine.quantization in STORED_METHODS:
        check_quantisation(read_config(directory), directory, asked=options.engine.quantization)
        options = options.with_engine(quantization=None)
    if (directory / CONFIG).is_file():
        check_tokenizer(directory)
    if not has_weights:
        directory = _without_weights(directory, has_mtp=options.engine.has_mtp)
    return replace(options, model=str(directory), checkpoint=CheckpointOptions())


def find_checkpoint(name: str, options: CheckpointOptions, *, has_weights: bool = True) -> Path:
    """Return the model's folder with the options' changes, after creating or downloading it if necessary.

    Args:
        has_weights: Whether files with weights are downloaded.

    Raises:
        PreflightError: The model or the tokenizer does not exist or cannot be downloaded.
    """
    directory = resolve_model(
        name, revision=options.revision, download_dir=options.download_dir, has_weights=has_weights
    )
    if not options.replaces_files:
        return directory
    tokenizer = (
        directory if options.tokenizer is None else _tokenizer_folder(options.tokenizer, options.download_dir)
    )
    written = {CONFIG: merged(read_config(directory), options.hf_overrides or {})}
    generation = _generation(directory, options)
    if generation is not None:
        written[GENERATION] = generation
    return _assemble(_links(directory, tokenizer), written)


def merged(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with overrides. Nested configs are merged, other values replaced."""
    found = dict(config)
    for name, value in overrides.items():
        inner = found.get(name)
        is_config = name.endswith("_config") and isinstance(inner, dict) and isinstance(value, dict)
        found[name] = merged(inner, value) if is_config else value  # type: ignore[arg-type]  # is_config says so
    return found


def _tokenizer_folder(name: str, download_dir: str | None) -> Path:
    folder = resolve_model(name, download_dir=download_dir, what="tokenizer", has_weights=False)
    if not folder.is_dir() or not any(_tokenizer_files(folder)):
        raise PreflightError(
            f"--tokenizer is {name}, which has no tokenizer; use a folder with tokenizer.json and tokenizer_config.json"
        )
    return folder


def check_tokenizer(directory: Path) -> None:
    """Raise if a model's directory has no tokenizer, before the ranks load weights.

    Raises:
        PreflightError: The directory has no tokenizer.
    """
    if not any(_tokenizer_files(directory)):
        raise PreflightError(
            f"{directory} has no tokenizer (no tokenizer.json, tokenizer.model or similar file). Download the model's tokenizer "
            "files too, or name a directory that has them with --tokenizer"
        )


def _tokenizer_files(folder: Path) -> list[Path]:
    return sorted({path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern) if path.is_file()})


def _generation(directory: Path, options: CheckpointOptions) -> dict[str, Any] | None:
    source = {"auto": directory, "vllm": None}.get(options.generation_config, Path(options.generation_config))
    path = None if source is None else source / GENERATION
    changes = options.override_generation_config or {}
    if path is None or not path.is_file():
        return dict(changes) or None
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise PreflightError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise PreflightError(f"{path} is not a JSON object")
    return {**found, **changes}


def _links(directory: Path, tokenizer: Path) -> dict[str, Path]:
    """Return the targets of the folder's links, by name."""
    others = set() if tokenizer == directory else {path.name for path in _tokenizer_files(directory)}
    links = {
        path.name: path
        for path in directory.iterdir()
        if path.name not in others and path.name not in (CONFIG, GENERATION)
    }
    return (
        links
        if tokenizer == directory
        else {**links, **{path.name: path for path in _tokenizer_files(tokenizer)}}
    )


def _without_weights(directory: Path, *, has_mtp: bool) -> Path:
    """Return a folder of links to a model's files except those with weights, and with the names of random weights.

    The names depend on the versions of the code that builds models, so these are part of the folder's digest.
    """
    if has_random_weights(directory):
        return directory
    config = read_config(directory)
    check_is_moe(config, directory)
    check_quantisation(config, directory, asked=None)
    links = {
        name: path
        for name, path in _links(directory, directory).items()
        if not name.endswith((".safetensors", ".safetensors.index.json"))
    }
    written = {CONFIG: config}
    if (directory / GENERATION).is_file():
        links[GENERATION] = directory / GENERATION
    about = {name: version_of(name) for name in ("wideep", "transformers")}
    return _assemble(
        links, written, made_of={**about, "has_mtp": has_mtp},
        complete=lambda folder: write_tensors(folder, shown=directory, has_mtp=has_mtp),
    )  # fmt: skip


def _assemble(
    links: Mapping[str, Path],
    written: Mapping[str, Any],
    *,
    made_of: Mapping[str, Any] | None = None,
    complete: Callable[[Path], None] = lambda _folder: None,
) -> Path:
    """Make a folder, unless the cache has it.

    Args:
        made_of: Further values that decide its content.
        complete: Writes further files into the new folder.
    """
    said = {name: str(path.resolve()) for name, path in sorted(links.items())}
    digest = hashlib.sha256(
        json.dumps([said, written, *([made_of] if made_of else [])], sort_keys=True).encode()
    ).hexdigest()[:16]
    root = demo_model_path().parent / "checkpoints"
    target = root / digest
    if target.is_dir():
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=root))
        for name, path in said.items():
            (made / name).symlink_to(path)
        for name, content in written.items():
            (made / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
        try:
            complete(made)
        except PreflightError:
            shutil.rmtree(made)
            raise
        _keep_first(made, target)
    except OSError as error:
        raise PreflightError(
            f"cannot write to the cache folder {root}: {error.strerror}; set XDG_CACHE_HOME to a writable folder"
        ) from error
    return target


def _keep_first(made: Path, target: Path) -> None:
    try:
        os.rename(made, target)
    except OSError:
        if not target.is_dir():
            raise
        shutil.rmtree(made)  # another process was first
