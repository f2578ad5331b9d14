"""Reads options: from a command line, from a script's keywords, from the process that started this one.

What a process of a service hands to its children is the value itself, as JSON (`handed_on`), but for the API keys:
everybody on the machine can read a command line, so keys travel in the environment.
"""

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from expert_placement.config import EplbConfig
from server.options.checks import check_certificate, check_traces
from server.options.flag import OptionsError, add_flags
from server.options.table import ALWAYS_ON, DEMO_MODEL, OPTIONS, REFUSED, HttpOptions, LogOptions, Options

API_KEY_VARIABLE = "WIDEEP_API_KEY"  # keys separated by spaces; added to those of --api-key
PRIVATE_DEFAULTS = {
    "port": 0,
    "access_log": False,
    "log_stats": False,
}  # of a service that belongs to one script or batch
_HANDED_ON = "--options"  # what a process of ours gets instead of flags
_INNER: dict[str, Any] = {"http": HttpOptions, "log": LogOptions, "eplb_config": EplbConfig}


def _keyword(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")


_ALWAYS_ON = frozenset(map(_keyword, ALWAYS_ON))
_REFUSED = {_keyword(name): name for name in REFUSED}


def add_options(parser: argparse.ArgumentParser, defaults: Mapping[str, Any] | None = None) -> None:
    """Add MODEL and all flags to a command's parser.

    Args:
        defaults: by keyword, shown by --help instead of the table's.
    """
    add_flags(parser, OPTIONS, defaults or {})
    group = parser.add_argument_group("accepted for vLLM's sake")
    for name, why in ALWAYS_ON.items():
        group.add_argument(name, action="store_true", help=f"nothing to enable: {why}")
    for name in REFUSED:
        parser.add_argument(
            name, action="store_true", dest=_keyword(name), default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )
    parser.add_argument(_HANDED_ON, dest="handed_on", help=argparse.SUPPRESS)


def said_in(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that a command line gives, by keyword."""
    known = [*(option.keyword for option in OPTIONS), *_REFUSED]
    return {keyword: vars(args)[keyword] for keyword in known if keyword in vars(args)}


def options_from(
    args: argparse.Namespace,
    environment: Mapping[str, str] = os.environ,
    *,
    defaults: Mapping[str, Any] | None = None,
) -> Options:
    """Return the options of a parsed command line.

    Args:
        defaults: by keyword, instead of the table's.

    Raises:
        OptionsError: naming the flag, the value seen and the values allowed.
    """
    if args.handed_on is not None:
        return options_from_json(args.handed_on, environment)
    return _read({**(defaults or {}), **said_in(args)}, environment)


def options_from_keywords(
    model: str, keywords: Mapping[str, Any], environment: Mapping[str, str] = os.environ
) -> Options:
    """Return the options of a service that belongs to one script.

    Args:
        keywords: flags without dashes and with underscores: numbers and strings as they are, a flag without a value
            as a bool (enable_prefix_caching=False is --no-enable-prefix-caching), a flag that repeats as a list, JSON
            as a list or dict; None is not said. The port is a free one and nothing is logged of every request, unless
            said.

    Raises:
        OptionsError: no such option, or a value that its flag would not take.
    """
    known = {option.keyword for option in OPTIONS if option.keyword != "model"} | _ALWAYS_ON
    for name in sorted(set(keywords) - known - set(_REFUSED)):
        raise OptionsError(f"{name!r} is no option; the options are {', '.join(sorted(known))}")
    said = {name: value for name, value in keywords.items() if value is not None}
    return _read({**PRIVATE_DEFAULTS, **said, "model": model}, environment)


def _read(said: Mapping[str, Any], environment: Mapping[str, str]) -> Options:
    """Check what was said, by keyword, and complete it by the defaults."""
    for keyword in _REFUSED.keys() & said.keys():
        raise OptionsError(f"{_REFUSED[keyword]}: {REFUSED[_REFUSED[keyword]]}")
    read: dict[str, Any] = {"http": {}, "log": {}}
    for option in OPTIONS:
        if option.keyword in said:
            value = option.flag.read(option.flag.name, said[option.keyword])
            *outer, last = option.path
            (read[outer[0]] if outer else read)[last] = value
    read["api_keys"] = (*read.get("api_keys", ()), *environment.get(API_KEY_VARIABLE, "").split())
    read["api_keys"] = tuple(dict.fromkeys(read["api_keys"]))
    read["served_model_names"] = read.get("served_model_names") or (_name_of(read.get("model", DEMO_MODEL)),)
    options = Options(**{**read, "http": HttpOptions(**read["http"]), "log": LogOptions(**read["log"])})
    _check_together(options, environment)
    return options


def _name_of(model: str) -> str:
    is_directory = model != DEMO_MODEL and os.path.isdir(model)
    return Path(model).resolve().name if is_directory else model


def _check_together(options: Options, environment: Mapping[str, str]) -> None:
    """Check options against each other, and what they need of the machine."""
    check_limits(options.max_num_seqs, options.max_num_batched_tokens)
    if options.gpu_memory_utilization is not None and options.kv_cache_bytes is not None:
        raise OptionsError("--kv-cache-memory and --gpu-memory-utilization both size the KV cache; give one")
    check_certificate(options.http.ssl_certfile, options.http.ssl_keyfile)
    if options.log.otlp_endpoint is not None:
        check_traces(environment)


def check_limits(max_num_seqs: int | None, max_num_batched_tokens: int | None) -> None:
    """Check two limits against each other, where both are known.

    Raises:
        OptionsError: a step has no room for all running requests.
    """
    if max_num_seqs and max_num_batched_tokens and max_num_batched_tokens < max_num_seqs:
        raise OptionsError(
            f"--max-num-batched-tokens is {max_num_batched_tokens}; it must be at least --max-num-seqs "
            f"({max_num_seqs}), so that every running request gets its token in every step"
        )


def handed_on(options: Options) -> list[str]:
    """Return the command-line arguments with which a child process gets the same options, but for the API keys."""
    said = asdict(options)
    del said["api_keys"]
    return [_HANDED_ON, json.dumps(said)]


def environment_from(options: Options) -> dict[str, str]:
    """Return the environment variables that carry what `handed_on` leaves out."""
    return {API_KEY_VARIABLE: " ".join(options.api_keys)}


def options_from_json(handed: str, environment: Mapping[str, str]) -> Options:
    """Read what `handed_on` wrote; it was checked by who wrote it."""
    try:
        said = json.loads(handed)
        inner = {name: kind(**_with_tuples(said[name])) for name, kind in _INNER.items()}
        keys = tuple(environment.get(API_KEY_VARIABLE, "").split())
        return Options(**{**_with_tuples(said), **inner, "api_keys": keys})
    except (ValueError, TypeError, KeyError) as error:
        raise OptionsError(f"{_HANDED_ON} is for processes that WideEP starts itself: {error}") from error


def _with_tuples(said: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in said.items()}
