"""Run `wideep size`: memory, step times, the ranks that a target needs, and whether expert parallelism pays."""

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace

from moe.families import UnsupportedModelError
from scheduler.policy.config import ConfigError
from server.options.flag import OptionsError
from server.options.pools import Pool, Role, num_ranks_of, read_pools
from server.options.reading import options_from_keywords
from server.options.table import Options
from server.serve.preflight.memory import float_bytes
from server.serve.preflight.model import PreflightError
from server.tools.size.costs.device_table import Device
from server.tools.size.costs.devices import UnknownDeviceError, device_named
from server.tools.size.costs.fit import SizeError
from server.tools.size.costs.read_model import ReadModel, read_model
from server.tools.size.deployment import Sized, Sizing
from server.tools.size.flags import SizeOptions, served_keywords
from server.tools.size.published import FIGURES, compare, costs_of
from server.tools.size.report import pools_json, pools_text, published_text, size_json, size_text
from server.tools.size.roles import FittedPools, sides_of, size_sides

_ERRORS = (
    ConfigError, OptionsError, PreflightError, SizeError, UnknownDeviceError, UnsupportedModelError,
)  # fmt: skip


def run_size(args: argparse.Namespace) -> int:
    """Run the command and return the exit status: 2 if no estimate is possible, 1 if the given ranks miss a target."""
    try:
        asked = SizeOptions.of(args)
        if args.published:
            compared = [compare(figure, costs_of(figure.model)) for figure in FIGURES]
            print(
                json.dumps([each.to_json() for each in compared]) if args.json else published_text(compared)
            )
            return 0
        if "pools" in served_keywords(args):
            pools = size_pools(args, asked)
            print(json.dumps(pools_json(pools, asked)) if args.json else pools_text(pools, asked))
            return int(any(each.chosen.misses(asked) is not None for each in pools.values()))
        sized = size(args, asked)
    except _ERRORS as error:
        print(f"wideep size: {error}", file=sys.stderr)
        return 2
    print(json.dumps(size_json(sized, asked)) if args.json else size_text(sized, asked))
    return int(sized.chosen.misses(asked) is not None)


def size(args: argparse.Namespace, asked: SizeOptions) -> Sized:
    """Read the model and the device, and return the estimate.

    Raises:
        SizeError: No number of ranks meets the targets, or the given one does not fit. Also the errors of `read_model`.
    """
    return _size_group(*_read(args), asked)


def size_pools(args: argparse.Namespace, asked: SizeOptions) -> dict[Pool, Sized]:
    """Return the estimate for each pool of --pools. Raises the errors of `size`."""
    model, device, options = _read(args)
    pools = read_pools(str(options.pools))
    if options.data_parallel_size is not None:
        raise OptionsError("--pools has the number of ranks; remove --ranks (-dp)")
    num_ranks = num_ranks_of(pools)
    prefill, decode, others = sides_of(pools)
    found = {
        pool: _size_group(
            model, *_part_of(pool, num_ranks, device, options), _with_part_of_users(asked, [pool], num_ranks)
        )
        for pool in others
    }
    if prefill:
        own = _with_part_of_users(asked, [*prefill, *decode], num_ranks)
        found |= _size_sides(prefill, decode, num_ranks, model, device, options, own)
    return {pool: found[pool] for pool in pools}


def _read(args: argparse.Namespace) -> tuple[ReadModel, Device, Options]:
    device = device_named(args.device)
    options = options_from_keywords(str(args.model), served_keywords(args), environment={})
    options = replace(options, device="cpu" if device.is_cpu else "cuda")
    model = read_model(
        args.model,
        on_gpu=not device.is_cpu,
        float_bytes=float_bytes(options),
        max_model_len=options.engine.max_model_len,
        quantization=options.engine.quantization,
        kv_cache_dtype=options.engine.kv_cache_dtype,
        adapted_modules=options.lora_target_modules,
    )
    return model, device, options


def _part_of(pool: Pool, num_ranks: int, device: Device, options: Options) -> tuple[Device, Options]:
    """Return a pool's device and options. On a CPU it has its part of the machine, and of a tier in host memory.

    Args:
        num_ranks: Number of ranks of all pools.
    """
    part = device.part_for(pool.num_ranks, num_ranks - pool.num_ranks)
    tier_bytes = math.ceil(options.engine.kv_offloading_bytes * part.memory_bytes / device.memory_bytes)
    return part, replace(options, data_parallel_size=pool.num_ranks).with_engine(
        kv_offloading_bytes=tier_bytes
    )


def _with_part_of_users(asked: SizeOptions, pools: Sequence[Pool], num_ranks: int) -> SizeOptions:
    """Return the options with the part of the users that these pools have by their ranks."""
    if asked.users is None:
        return asked
    return asked._replace(users=math.ceil(asked.users * num_ranks_of(pools) / num_ranks))


def _size_sides(
    prefill: Sequence[Pool],
    decode: Sequence[Pool],
    num_ranks: int,
    model: ReadModel,
    device: Device,
    options: Options,
    asked: SizeOptions,
) -> dict[Pool, Sized]:
    """Size pools that share requests: some run the prompts, the others generate."""
    parts = {pool: _part_of(pool, num_ranks, device, options) for pool in (*prefill, *decode)}

    def fitted(pools: Sequence[Pool]) -> FittedPools:
        # All ranks have the same limit of running requests, which follows from the users per decode rank.
        limits = {pool: _with_part_of_users(asked, [pool], num_ranks_of(decode)) for pool in pools}
        return FittedPools.of({pool: Sizing(model, *parts[pool], limits[pool]) for pool in pools})

    found = size_sides(fitted(prefill), fitted(decode), asked.users)
    return {
        pool: Sized(
            model,
            parts[pool][0],
            deployment,
            least=None,
            replicas=(),
            role=Role.PREFILL if pool in prefill else Role.DECODE,
        )
        for pool, deployment in found.items()
    }


def _size_group(model: ReadModel, device: Device, options: Options, asked: SizeOptions) -> Sized:
    sizing = Sizing(model, device, options, asked)
    has_target = asked.tpot_s is not None or asked.ttft_s is not None
    wanted = options.data_parallel_size
    least = None
    if has_target:
        with contextlib.nullcontext() if wanted is None else contextlib.suppress(SizeError):
            least = sizing.least()
    chosen = sizing.deployment(wanted) if wanted is not None else least or sizing.smallest()
    return Sized(model, device, chosen, least, tuple(sizing.replicas(chosen)))
