"""The command line as one frozen value, which serve, worker, engine and front all parse alike.

Every process of a service gets the same arguments, so there is one parser, one validation, and one way back from
the value to arguments (`arguments_from`). Names are vLLM's where vLLM has them. API keys are the exception: they
travel to child processes in the environment, because everybody on the machine can read a command line.

The flags are declared in `flags`; what is about HTTP and about logs is in `http_options` and `log_options`.
"""

import argparse
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from expert_placement.config import EplbConfig, EplbConfigError, parse_eplb_config
from server.options.checks import OptionsError, parse_bytes
from server.options.http_options import HttpOptions, http_arguments, http_options_from
from server.options.log_options import LogOptions, log_arguments, log_options_from

DEMO_MODEL = "demo"
API_KEY_VARIABLE = "WIDEEP_API_KEY"  # keys separated by spaces; added to those of --api-key

_LEAST = {  # the smallest value of whole-number flags
    "data_parallel_size": 1,
    "max_model_len": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 16,
    "threads": 1,
    "dispatch_node_size": 0,
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user asked for. `None` means: not said, the default is found where it is known."""

    model: str  # a directory, a hub name, or "demo"
    data_parallel_size: int | None  # ranks on this node; None: 2 on CPU, the GPUs otherwise
    host: str
    port: int
    served_model_names: tuple[str, ...]
    max_model_len: int | None  # tokens; None: the model's own
    device: str  # auto, cpu or cuda; see server.process.preflight.device
    max_num_seqs: int | None  # per rank; None: by the device, as is the next
    max_num_batched_tokens: int | None  # per rank and step
    dtype: str  # auto, float32 or bfloat16
    enforce_eager: bool  # no CUDA graphs
    enable_torch_compile: bool  # of a GPU: compile what lies between the kernels
    batch_invariant: bool  # of a GPU; a CPU always is
    kv_cache_bytes: int | None  # per rank; None: a share of free memory
    gpu_memory_utilization: float | None  # share of the device's memory; None: not said
    api_keys: tuple[str, ...]
    distributed_timeout_s: float  # how long a rank may keep another one waiting
    all2all_backend: str  # one of dispatch.availability's BACKENDS
    dispatch_mode: str  # auto, normal or low_latency
    dispatch_dtype: str  # auto or fp8
    dispatch_node_size: int  # ranks of a node; 0: tokens go straight to their ranks
    threads: int | None  # per rank; None: cores / local ranks
    enable_prefix_caching: bool
    enable_eplb: bool  # balance experts while serving
    eplb_config: EplbConfig
    expert_placement: str | None  # file of the placement to start with
    request_timeout_s: float  # 0 is none
    rank_recovery_timeout_s: float  # how long no rank may serve until the service ends
    tool_call_parser: str | None  # one of the names; None: by the model's chat template, as is the next
    reasoning_parser: str | None
    chat_template: str | None  # a file, absolute; None: the model's own
    http: HttpOptions
    log: LogOptions

    @property
    def needs_key(self) -> bool:
        """Whether requests must carry an API key."""
        return bool(self.api_keys) or self.http.api_key_file is not None


def options_from(args: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> Options:
    """Validate parsed arguments.

    Raises:
        OptionsError: naming the flag, the value seen and the values allowed.
    """
    _check_numbers(args)
    return Options(
        model=args.model,
        data_parallel_size=args.data_parallel_size,
        host=args.host,
        port=args.port,
        served_model_names=_served_names(args),
        max_model_len=args.max_model_len,
        device=args.device,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        dtype=args.dtype,
        enforce_eager=args.enforce_eager,
        enable_torch_compile=args.enable_torch_compile,
        batch_invariant=args.batch_invariant,
        kv_cache_bytes=None if args.kv_cache_memory is None else parse_bytes(args.kv_cache_memory),
        gpu_memory_utilization=args.gpu_memory_utilization,
        api_keys=_api_keys(args, environment),
        distributed_timeout_s=args.distributed_timeout_seconds,
        all2all_backend=args.all2all_backend,
        dispatch_mode=args.dispatch_mode,
        dispatch_dtype=args.dispatch_dtype,
        dispatch_node_size=args.dispatch_node_size,
        threads=args.threads,
        enable_prefix_caching=args.enable_prefix_caching,
        enable_eplb=args.enable_eplb,
        eplb_config=_eplb_config(args.eplb_config),
        expert_placement=args.expert_placement,
        request_timeout_s=args.request_timeout,
        rank_recovery_timeout_s=args.rank_recovery_timeout,
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        chat_template=_template_file(args.chat_template),
        http=http_options_from(args),
        log=log_options_from(args, environment),
    )


def _template_file(name: str | None) -> str | None:
    if name is None:
        return None
    if not os.path.isfile(name):
        raise OptionsError(
            f"--chat-template is {name!r}, which is not a file; give one with a Jinja template"
        )
    return os.path.abspath(name)  # processes of a service need not share a directory


def _eplb_config(text: str) -> EplbConfig:
    try:
        return parse_eplb_config(text)
    except EplbConfigError as error:
        raise OptionsError(f"--eplb-config: {error}") from error


def _check_numbers(args: argparse.Namespace) -> None:
    for name, least in _LEAST.items():
        value = getattr(args, name)
        if value is not None and value < least:
            raise OptionsError(f"--{name.replace('_', '-')} is {value}; it must be at least {least}")
    check_limits(args.max_num_seqs, args.max_num_batched_tokens)
    if not 0 <= args.port <= 65535:
        raise OptionsError(f"--port is {args.port}; it must be 0 to 65535")
    share = args.gpu_memory_utilization
    if share is not None and not 0 < share <= 1:
        raise OptionsError(f"--gpu-memory-utilization is {share}; it must be above 0 and at most 1")
    if share is not None and args.kv_cache_memory is not None:
        raise OptionsError("--kv-cache-memory and --gpu-memory-utilization both size the KV cache; give one")
    timeout_s = args.distributed_timeout_seconds
    if not 0 < timeout_s <= 86_400:
        raise OptionsError(
            f"--distributed-timeout-seconds is {timeout_s}; it must be above 0 and at most 86400 (a day)"
        )
    for name in ("request_timeout", "rank_recovery_timeout"):
        value = getattr(args, name)
        if not (value >= 0 and math.isfinite(value)):
            raise OptionsError(f"--{name.replace('_', '-')} is {value}; it must be 0 or more seconds")


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


def _served_names(args: argparse.Namespace) -> tuple[str, ...]:
    if not args.model:
        raise OptionsError("MODEL is empty; give a model directory, a hub name, or 'demo'")
    if "" in args.served_model_name:
        raise OptionsError("--served-model-name has an empty name; give at least one character")
    if args.served_model_name:
        return tuple(dict.fromkeys(args.served_model_name))
    is_directory = args.model != DEMO_MODEL and os.path.isdir(args.model)
    return (Path(args.model).resolve().name if is_directory else args.model,)


def _api_keys(args: argparse.Namespace, environment: Mapping[str, str]) -> tuple[str, ...]:
    for key in args.api_key:
        if not key or key.split() != [key]:
            raise OptionsError("--api-key is empty or has white space; give a key without any")
    return tuple(dict.fromkeys([*args.api_key, *environment.get(API_KEY_VARIABLE, "").split()]))


def arguments_from(options: Options) -> list[str]:
    """Write options as command-line arguments that parse back to the same value, but for the API keys."""
    flags: dict[str, object] = {
        "--host": options.host,
        "--port": options.port,
        "--data-parallel-size": options.data_parallel_size,
        "--threads": options.threads,
        "--distributed-timeout-seconds": options.distributed_timeout_s,
        "--all2all-backend": options.all2all_backend,
        "--dispatch-mode": options.dispatch_mode,
        "--dispatch-dtype": options.dispatch_dtype,
        "--dispatch-node-size": options.dispatch_node_size,
        "--device": options.device,
        "--dtype": options.dtype,
        "--max-model-len": options.max_model_len,
        "--max-num-seqs": options.max_num_seqs,
        "--max-num-batched-tokens": options.max_num_batched_tokens,
        "--request-timeout": options.request_timeout_s,
        "--rank-recovery-timeout": options.rank_recovery_timeout_s,
        "--tool-call-parser": options.tool_call_parser,
        "--reasoning-parser": options.reasoning_parser,
        "--chat-template": options.chat_template,
        "--kv-cache-memory": options.kv_cache_bytes,
        "--gpu-memory-utilization": options.gpu_memory_utilization,
        "--eplb-config": json.dumps(asdict(options.eplb_config)),
        "--expert-placement": options.expert_placement,
    }
    arguments = [options.model, *(f"--served-model-name={name}" for name in options.served_model_names)]
    arguments += [f"{flag}={value}" for flag, value in flags.items() if value is not None]
    arguments += ["--enable-eplb"] if options.enable_eplb else []
    arguments += ["--enforce-eager"] if options.enforce_eager else []
    arguments += ["--enable-torch-compile"] if options.enable_torch_compile else []
    arguments += ["--batch-invariant"] if options.batch_invariant else []
    arguments += [*http_arguments(options.http), *log_arguments(options.log)]
    return arguments if options.enable_prefix_caching else [*arguments, "--no-enable-prefix-caching"]


def environment_from(options: Options) -> dict[str, str]:
    """Return the environment variables that carry what `arguments_from` leaves out."""
    return {API_KEY_VARIABLE: " ".join(options.api_keys)}
