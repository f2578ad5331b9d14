"""Read options from a command line, from a script's keywords, or from the parent process.

A process of a service passes its options to its children as JSON (`handed_on`), without the API keys: every user of the
machine can read a command line, so keys are passed in the environment, as is the generated cluster key.
"""

import argparse
import difflib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, get_args

import yaml

from scheduler.policy.config import EngineSettings
from server.options.adapters import modules_of
from server.options.checks import check_certificate, check_traces
from server.options.flag import OptionsError, add_flags, words_of
from server.options.foreign.flags import ForeignFlag, judge
from server.options.foreign.sglang import SGLANG_FLAGS
from server.options.foreign.vllm import VLLM_FLAGS
from server.options.pools import have_roles
from server.options.table import CONFIG_FILE, DEMO_MODEL, OPTIONS, PER_NODE, Options

API_KEY_VARIABLE = "WIDEEP_API_KEY"  # keys separated by spaces; added to those of --api-key
# For processes that `wideep serve` starts; users give a file.
_CLUSTER_KEY_VARIABLE = "WIDEEP_OWN_CLUSTER_KEY"
# Defaults of a service that belongs to one script or batch.
PRIVATE_DEFAULTS = {"port": 0, "access_log": False, "log_stats": False}
_HANDED_ON = "--options"  # passed to our own processes instead of flags
_ALIKE = 0.75  # difflib's ratio; below it, a name counts as a different word, not as a typing error
_NESTED: dict[str, Any] = {each.name: each.type for each in fields(Options) if is_dataclass(each.type)}
# By the name under which values are stored.
_FOREIGN = {flag.name: flag for flag in (*VLLM_FLAGS, *SGLANG_FLAGS)}
_NAMES = {name: flag for flag in _FOREIGN.values() for name in (*flag.names, *flag.off_names)}
_BY_NAME = {word: option for option in OPTIONS for word in words_of(option)}


def keyword(name: str) -> str:
    """Return the keyword of a flag in scripts."""
    return name.lstrip("-").replace("-", "_")


def add_options(
    parser: argparse.ArgumentParser,
    defaults: Mapping[str, Any] | None = None,
    *,
    own: Sequence[str] = (),
) -> None:
    """Add MODEL and all flags to a command's parser.

    Args:
        defaults: Defaults that --help shows instead of the table's, by keyword.
        own: Flags of other programs that this command defines itself.
    """
    add_flags(parser, OPTIONS, defaults or {})
    parser.add_argument(
        "--model",
        dest="model_flag",
        metavar="MODEL",
        default=argparse.SUPPRESS,
        help="the same as MODEL",
    )
    for flag in _FOREIGN.values():
        names = [name for name in flag.names if name not in _BY_NAME and name not in own]
        settings: dict[str, Any] = {
            "dest": flag.name,
            "default": argparse.SUPPRESS,
            "help": argparse.SUPPRESS,
        }
        if flag.takes != "nothing":
            parser.add_argument(*names, nargs="+" if flag.takes == "values" else None, **settings)
            continue
        parser.add_argument(*names, action="store_const", const=True, **settings)
        parser.add_argument(*flag.off_names, action="store_const", const=False, **settings)
    parser.add_argument(_HANDED_ON, dest="handed_on", help=argparse.SUPPRESS)


def known_words() -> tuple[str, ...]:
    """Return every flag that a service accepts or refuses with a reason, ours first."""
    return (*_BY_NAME, "--model", *_NAMES)


def said_in(args: argparse.Namespace) -> dict[str, Any]:
    """Return the values on a command line: by keyword, or by name for flags of other programs.

    Raises:
        OptionsError: MODEL is given twice.
    """
    known = [*(option.keyword for option in OPTIONS), *_FOREIGN]
    said = {keyword: vars(args)[keyword] for keyword in known if keyword in vars(args)}
    if "model_flag" in args:
        if "model" in said:
            raise OptionsError(f"the model is given twice, {said['model']!r} and --model {args.model_flag!r}")
        said["model"] = args.model_flag
    return said


def options_from(
    args: argparse.Namespace,
    environment: Mapping[str, str] = os.environ,
    *,
    defaults: Mapping[str, Any] | None = None,
) -> Options:
    """Return the options of a parsed command line.

    Args:
        defaults: Defaults to use instead of the table's, by keyword.

    Raises:
        OptionsError: A value is invalid; the message names the flag, the value and the allowed values.
    """
    if args.handed_on is not None:
        return options_from_json(args.handed_on, environment)
    return _read({**(defaults or {}), **_with_file(said_in(args))}, environment)


def notes_on(args: argparse.Namespace) -> list[str]:
    """Return a line for each flag on a command line that has no effect or whose value is replaced.

    Raises:
        OptionsError: As for `options_from`.
    """
    return [] if args.handed_on is not None else _settle(_with_file(said_in(args)))[1]


def _with_file(said: dict[str, Any]) -> dict[str, Any]:
    """Add the options of the --config file that the command line does not give."""
    if "config" not in said:
        return said
    return {**said_in_file(Path(said["config"])), **said}


def said_in_file(path: Path) -> dict[str, Any]:
    """Return the options in a --config file, by keyword.

    Raises:
        OptionsError: The file cannot be read, or contains an unknown option.
    """
    return _by_keyword(_read_config_file(path), f"--config {path}: ")


def _read_config_file(path: Path) -> dict[str, Any]:
    """Return the options of a YAML file by name, in the format of vLLM and SGLang; null means "not given".

    Raises:
        OptionsError: The file cannot be read, is not YAML, or is not a mapping with names as keys.
    """
    name = f"--config {str(path)!r}"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise OptionsError(f"{name} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        first = str(error).replace("\n", " ")
        raise OptionsError(f"{name} is not YAML: {first}") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise OptionsError(f"{name} is not a mapping; give lines such as `max-model-len: 4096`")
    if "config" in content:
        raise OptionsError(f"{name} names another file under config; put all options into one")
    return content


def _by_keyword(given: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Return options given by name, with dashes or underscores, in the form of `said_in`."""
    keywords = {option.keyword: option.keyword for option in OPTIONS if option is not CONFIG_FILE}
    keywords |= {
        keyword(name): option.keyword for name, option in _BY_NAME.items() if not option.flag.is_switch
    }
    found: dict[str, Any] = {}
    for name, value in given.items():
        plain = keyword(name)
        flag = _NAMES.get(f"--{plain.replace('_', '-')}")
        if plain in keywords:
            found[keywords[plain]] = value
        elif flag is not None:
            found[flag.name] = value
        else:
            close = nearest(plain, [*keywords, *map(keyword, _NAMES)])
            raise OptionsError(
                f"{where}{name!r} is not an option{close}; the options are {', '.join(sorted({*keywords.values()}))}"
            )
    return {name: value for name, value in found.items() if value is not None}


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a " (did you mean X?)" for the most similar name. Returns an empty text if no name is similar."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=_ALIKE)
    return f" (did you mean {found[0]}?)" if found else ""


def options_from_keywords(
    model: str, keywords: Mapping[str, Any], environment: Mapping[str, str] = os.environ
) -> Options:
    """Return the options of a service that belongs to one script.

    Args:
        keywords: Flags without dashes and with underscores. Numbers and strings are given unchanged, switches as
            bools (enable_prefix_caching=False is --no-enable-prefix-caching), repeated flags as lists, JSON as a list
            or dict; None means "not given". By default the port is a free one, and requests and throughput are not
            logged.

    Raises:
        OptionsError: An option is unknown, or its flag would refuse the value.
    """
    return _read({**PRIVATE_DEFAULTS, **_by_keyword(keywords), "model": model}, environment)


def _settle(said: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the given values under our names, and a line for each flag that has no effect or whose value is replaced.

    Raises:
        OptionsError: A flag of another program is not supported or contradicts one of ours.
    """
    ours = {name: value for name, value in said.items() if name not in _FOREIGN}
    notes: list[str] = []
    foreign = [_FOREIGN[name] for name in said if name in _FOREIGN]
    for flag in foreign:
        if flag.key:
            _take_part(ours, flag, said[flag.name])
        elif flag.becomes:
            _take_alias(ours, flag, said[flag.name])
    notes += _judge_all([flag for flag in foreign if not flag.becomes], {**said, **ours})
    for option in OPTIONS:
        given, declared = ours.get(option.keyword), option.flag
        if isinstance(given, str) and given in declared.taken_as:
            value = ours[option.keyword] = declared.taken_as[given]
            if given.lower() != value:
                notes.append(f"{declared.name} {given} means {value} here: {declared.taken_because}")
    return ours, notes


def _judge_all(foreign: Sequence[ForeignFlag], said: Mapping[str, Any]) -> list[str]:
    """Return a line for each flag that has no effect.

    Raises:
        OptionsError: Flags are not supported; the message names all of them, so that one run shows every problem.
    """
    notes, refusals = [], []
    for flag in foreign:
        try:
            notes.append(judge(flag, said[flag.name], said))
        except OptionsError as error:
            refusals.append(str(error))
    if len(refusals) > 1:
        raise OptionsError("\n  ".join([f"{len(refusals)} flags are not supported:", *refusals]))
    if refusals:
        raise OptionsError(refusals[0])
    return notes


def _take_part(ours: dict[str, Any], flag: ForeignFlag, given: Any) -> None:
    option = _BY_NAME[flag.becomes]
    value = flag.ours(given)
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    before = _object(ours.get(option.keyword, {}))
    if not isinstance(before, dict) or before.get(flag.key, value) != value:
        raise OptionsError(f"{flag.name} is {given}, but {option.flag.name} sets the same value; give one")
    ours[option.keyword] = {**before, flag.key: value}


def _object(given: Any) -> Any:
    """Return a text's JSON value, or the text itself if it is not JSON; the flag's reader then refuses it."""
    try:
        return json.loads(given) if isinstance(given, str) else given
    except ValueError:
        return given


def _take_alias(ours: dict[str, Any], flag: ForeignFlag, given: Any) -> None:
    option = _BY_NAME[flag.becomes]
    value = flag.ours(given)
    if value is None:
        return
    if flag.becomes in option.flag.off_names:
        value = not given
    before = ours.get(option.keyword, value)
    if str(before) != str(value):
        raise OptionsError(
            f"{flag.name} is {given} and {option.flag.name} is {before}; they mean the same: give one"
        )
    ours[option.keyword] = value


def _read(said: Mapping[str, Any], environment: Mapping[str, str]) -> Options:
    """Check the given values, by keyword, and fill in the defaults."""
    said, _ = _settle(said)
    read: dict[str, Any] = {name: {} for name in _NESTED}
    for option in OPTIONS:
        if option.keyword in said and option.path:
            value = option.flag.read(option.flag.name, said[option.keyword])
            *outer, last = option.path
            (read[outer[0]] if outer else read)[last] = value
    read["api_keys"] = (*read.get("api_keys", ()), *environment.get(API_KEY_VARIABLE, "").split())
    read["api_keys"] = tuple(dict.fromkeys(read["api_keys"]))
    read["served_model_names"] = read.get("served_model_names") or (_name_of(read.get("model", DEMO_MODEL)),)
    options = Options(**{**read, **{name: kind(**read[name]) for name, kind in _NESTED.items()}})
    _check_together(options, environment)
    return options


def _name_of(model: str) -> str:
    is_directory = model != DEMO_MODEL and os.path.isdir(model)
    return Path(model).resolve().name if is_directory else model


def _check_together(options: Options, environment: Mapping[str, str]) -> None:
    """Check options against each other and against the machine."""
    check_limits(options.engine.max_num_seqs, options.engine.max_num_batched_tokens)
    if options.gpu_memory_utilization is not None and options.engine.kv_cache_bytes is not None:
        raise OptionsError("--kv-cache-memory and --gpu-memory-utilization both size the KV cache; give one")
    if options.http.most_inflight_bytes < options.http.max_request_bytes:
        raise OptionsError(
            f"--max-inflight-request-bytes is {options.http.most_inflight_bytes}; it must be at least --max-request-bytes "
            f"({options.http.max_request_bytes}), or a body of that length never fits"
        )
    if options.uds is not None and options.http.ssl_certfile is not None:
        raise OptionsError(
            "--ssl-certfile does not apply to --uds, whose socket is local to this machine; leave it out"
        )
    _check_standby(options)
    _check_fronts(options)
    _check_tiers(options.engine)
    _check_adapters(options)
    _check_pools(options)
    check_certificate(options.http.ssl_certfile, options.http.ssl_keyfile)
    if options.log.otlp_endpoint is not None:
        check_traces(environment)


def _check_standby(options: Options) -> None:
    if options.standby is not None:
        _check_without(
            "--standby",
            {"--uds": options.uds is not None, "--pool": options.has_own_pool, "--port 0": options.port == 0},
        )


def _check_fronts(options: Options) -> None:
    if options.fronts == PER_NODE:
        _check_without(
            f"--fronts {PER_NODE}",
            {
                "--standby, which takes over the fronts of one node": options.standby is not None,
                "--pool, because torchruns that join have no fronts": options.has_own_pool,
                "--port 0, because clients must know the port of every node": options.port == 0,
            },
        )


def _check_without(flag: str, others: Mapping[str, bool]) -> None:
    """Check that none of the other flags is given."""
    for other, is_given in others.items():
        if is_given:
            raise OptionsError(f"{flag} does not work with {other}; leave one of the two out")


def _check_tiers(engine: EngineSettings) -> None:
    if (engine.kv_offloading_dir is None) != (engine.kv_offloading_disk_bytes == 0):
        given, missing = "--kv-offloading-dir", "--kv-offloading-disk-size"
        if engine.kv_offloading_dir is None:
            given, missing = missing, given
        raise OptionsError(f"{given} needs {missing}: a tier on disk has a folder and a size above 0")
    if engine.has_kv_tiers and not engine.enable_prefix_caching:
        flag = "--kv-offloading-size" if engine.kv_offloading_bytes else "--kv-offloading-dir"
        raise OptionsError(
            f"{flag} keeps cached prefixes, but --no-enable-prefix-caching disables the prefix cache; remove one of them"
        )


def _check_adapters(options: Options) -> None:
    engine = options.engine
    if not engine.enable_lora:
        for flag, is_given in (
            ("--lora-modules", options.lora_modules),
            ("--lora-dir", options.lora_dir is not None),
            ("--lora-target-modules", options.lora_target_modules),
        ):
            if is_given:
                raise OptionsError(f"{flag} needs --enable-lora")
        return
    if engine.max_cpu_loras is not None and engine.max_cpu_loras < engine.max_loras:
        raise OptionsError(
            f"--max-cpu-loras is {engine.max_cpu_loras}; it must be at least --max-loras ({engine.max_loras})"
        )
    for name in modules_of(options.lora_modules):
        if name in options.served_model_names:
            raise OptionsError(
                f"--lora-modules has the name {name!r}, which is a name of the model; choose another"
            )


def _check_pools(options: Options) -> None:
    if options.has_own_pool and options.pools is not None:
        given = "--pool" if options.pool is not None else "--role"
        raise OptionsError(
            f"--pools lists all pools of one torchrun, and {given} makes this torchrun one pool; give one of them"
        )
    pools = options.pools_among(options.given_ranks or 1)
    if options.pool_roles == "auto" and len(pools) == 1 and not options.has_own_pool:
        raise OptionsError(
            "--pool-roles auto changes the roles of several pools; give them with --pools, or leave it out"
        )
    if have_roles(pools) and not options.engine.enable_prefix_caching:
        given = f"--role {options.role}" if options.has_own_pool else f"--pools {options.pools}"
        raise OptionsError(
            f"{given} hands requests over through cached prefixes, but --no-enable-prefix-caching disables "
            "the prefix cache; remove one of them, or give all pools the role both"
        )


def check_limits(max_num_seqs: int | None, max_num_batched_tokens: int | None) -> None:
    """Check two limits against each other if both are known.

    Raises:
        OptionsError: A step is too small for all running requests.
    """
    if max_num_seqs and max_num_batched_tokens and max_num_batched_tokens < max_num_seqs:
        raise OptionsError(
            f"--max-num-batched-tokens is {max_num_batched_tokens}; it must be at least --max-num-seqs "
            f"({max_num_seqs}), so that every running request gets a token in every step"
        )


def handed_on(options: Options) -> list[str]:
    """Return the command-line arguments that pass these options to a child process, except for keys."""
    said = asdict(options)
    del said["api_keys"], said["own_cluster_key"]
    return [_HANDED_ON, json.dumps(said)]


def environment_from(options: Options) -> dict[str, str]:
    """Return the environment variables with the keys that `handed_on` omits."""
    own = {_CLUSTER_KEY_VARIABLE: options.own_cluster_key} if options.own_cluster_key else {}
    return {API_KEY_VARIABLE: " ".join(options.api_keys), **own}


def options_from_json(handed: str, environment: Mapping[str, str]) -> Options:
    """Read the output of `handed_on`, which the parent process has checked."""
    try:
        keys = environment.get(API_KEY_VARIABLE, "").split()
        own_key = environment.get(_CLUSTER_KEY_VARIABLE, "")
        options: Options = _rebuilt(
            Options, {**json.loads(handed), "api_keys": keys, "own_cluster_key": own_key}
        )
        return options
    except (ValueError, TypeError, KeyError) as error:
        raise OptionsError(f"{_HANDED_ON} is for processes that WideEP starts itself: {error}") from error


def _rebuilt(kind: Any, said: Any) -> Any:
    """Return the value of a field's type that JSON holds as lists, texts and objects."""
    if isinstance(kind, UnionType):
        kind = None if said is None else get_args(kind)[0]
    if isinstance(kind, type) and is_dataclass(kind):
        return kind(**{each.name: _rebuilt(each.type, said[each.name]) for each in fields(kind)})
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(said)
    return tuple(said) if isinstance(said, list) else said
