"""The command line as one frozen value, which serve, worker, engine and front all parse alike.

Every process of a service gets the same arguments, so there is one parser and one validation. Names are vLLM's
where vLLM has them.
"""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

DEMO_MODEL = "demo"


class OptionsError(ValueError):
    """A command-line value that cannot be served; the message says what was wrong and what is allowed."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user asked for. `None` means: not said, the default is found where it is known."""

    model: str  # a directory, a hub name, or "demo"
    data_parallel_size: int | None  # ranks on this node; None: 2 on CPU, the GPUs otherwise
    host: str
    port: int
    served_model_names: tuple[str, ...]
    max_model_len: int | None  # tokens; None: the model's own
    max_num_seqs: int  # per rank
    max_num_batched_tokens: int  # per rank and step
    dtype: str  # auto, float32 or bfloat16
    kv_cache_bytes: int | None  # per rank; None: a share of free memory
    gpu_memory_utilization: float | None  # share of the device's memory; None: not said
    api_keys: tuple[str, ...]
    all2all_backend: str  # auto, gloo or shm
    threads: int | None  # per rank; None: cores / local ranks
    enable_prefix_caching: bool
    request_timeout_s: float  # 0 is none
    seed: int


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `serve`, `worker`, `engine` and `front` share."""
    add = parser.add_argument
    add(
        "model",
        nargs="?",
        default=DEMO_MODEL,
        metavar="MODEL",
        help="a Hugging Face model directory, a hub name, or 'demo' (default): the model that WideEP makes itself",
    )
    add(
        "--data-parallel-size",
        "-dp",
        type=int,
        metavar="N",
        help="ranks on this node, one process each (default: 2 on CPU)",
    )
    add("--host", default="127.0.0.1", help="address the HTTP endpoint listens on (default: %(default)s)")
    add("--port", type=int, default=8000, help="its port (default: %(default)s)")
    add(
        "--served-model-name",
        nargs="+",
        default=[],
        metavar="NAME",
        help="names that requests may use for the model (default: MODEL)",
    )
    add("--max-model-len", type=int, metavar="TOKENS", help="prompt plus output (default: the model's)")
    add("--max-num-seqs", type=int, default=64, help="requests a rank runs at once (default: %(default)s)")
    add(
        "--max-num-batched-tokens",
        type=int,
        default=512,
        help="tokens a rank runs in one step (default: %(default)s)",
    )
    add(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16"),
        help="type the weights are kept in; CPU computes in float32 (default: %(default)s)",
    )
    add(
        "--kv-cache-memory",
        metavar="BYTES",
        help="KV cache per rank, e.g. 512M or 2G (default: 25%% of free memory over the local ranks)",
    )
    add(
        "--gpu-memory-utilization",
        type=float,
        metavar="SHARE",
        help="size the KV cache as this share of free memory instead, in (0, 1]",
    )
    add(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="require this bearer key; may be repeated",
    )
    add(
        "--all2all-backend",
        default="auto",
        choices=("auto", "gloo", "shm"),
        help="how ranks exchange tokens (default: shm between ranks of one host, gloo otherwise)",
    )
    add("--threads", type=int, metavar="N", help="threads per rank (default: cores / local ranks)")
    add(
        "--no-enable-prefix-caching",
        dest="enable_prefix_caching",
        action="store_false",
        help="do not reuse the KV cache of equal prefixes",
    )
    add(
        "--request-timeout",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="deadline per request (default: none)",
    )
    add("--seed", type=int, default=0, help="seed of whatever is random and not asked for by a request")


def parse_bytes(text: str) -> int:
    """Read `512M`, `2G`, `1073741824`.

    Raises:
        OptionsError: the text is not a positive size.
    """
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
    digits = text.strip().upper().removesuffix("IB").removesuffix("B")
    unit = units.get(digits[-1:], 1)
    try:
        size = int(float(digits[:-1] if digits[-1:] in units else digits) * unit)
    except ValueError:
        size = 0
    if size <= 0:
        raise OptionsError(f"--kv-cache-memory is {text!r}; give a size such as 512M or 2G")
    return size


def options_from(args: argparse.Namespace) -> Options:
    """Validate parsed arguments.

    Raises:
        OptionsError: naming the flag, the value seen and the values allowed.
    """
    for flag, least in (
        ("max_num_seqs", 1),
        ("max_num_batched_tokens", 16),
        ("threads", 1),
        ("max_model_len", 1),
        ("data_parallel_size", 1),
    ):
        value = getattr(args, flag)
        if value is not None and value < least:
            raise OptionsError(f"--{flag.replace('_', '-')} is {value}; it must be at least {least}")
    if not 0 <= args.port <= 65535:
        raise OptionsError(f"--port is {args.port}; it must be 0 to 65535")
    share = args.gpu_memory_utilization
    if share is not None and not 0 < share <= 1:
        raise OptionsError(f"--gpu-memory-utilization is {share}; it must be above 0 and at most 1")
    if share is not None and args.kv_cache_memory is not None:
        raise OptionsError("--kv-cache-memory and --gpu-memory-utilization both size the KV cache; give one")
    if args.request_timeout < 0:
        raise OptionsError(f"--request-timeout is {args.request_timeout}; it must be 0 or more seconds")
    names = tuple(args.served_model_name) or (
        Path(args.model).name if os.path.isdir(args.model) else args.model,
    )
    return Options(
        model=args.model,
        data_parallel_size=args.data_parallel_size,
        host=args.host,
        port=args.port,
        served_model_names=names,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        dtype=args.dtype,
        kv_cache_bytes=None if args.kv_cache_memory is None else parse_bytes(args.kv_cache_memory),
        gpu_memory_utilization=share,
        api_keys=tuple(args.api_key),
        all2all_backend=args.all2all_backend,
        threads=args.threads,
        enable_prefix_caching=args.enable_prefix_caching,
        request_timeout_s=args.request_timeout,
        seed=args.seed,
    )
