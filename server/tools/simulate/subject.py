"""The service to simulate: a model on devices with a roofline, or a running service with measurements.

A running service is watched through /experts/load (steps, their seconds and tokens since startup, by rank) and /server_info
(caches and limits). A linear function is fitted to the step times between samples: a fixed time, and seconds per decode row
and per prompt token. Watch the service while it has work, under more than one load: with only one load, the fixed time
cannot be separated from the time per row.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from expert_placement.config import EplbConfig
from kvcache.paged_cache import BLOCK_TOKENS
from server.http.client import ServiceClient
from server.options.reading import options_from_keywords
from server.serve.preflight.device import with_limits
from server.serve.preflight.memory import float_bytes
from server.tools.simulate.experts import ExpertModel
from server.tools.simulate.flags import SimulateOptions
from server.tools.simulate.measured import MeasuredTimes
from server.tools.simulate.rank import RankLimits
from server.tools.size.costs.devices import device_named
from server.tools.size.costs.fit import engine_of, rank_memory
from server.tools.size.costs.read_model import read_model
from server.tools.size.costs.roofline import Roofline
from server.tools.size.costs.step_times import StepTimes

DEFAULT_RANKS = 8  # of a service with a roofline
EVERY_S = 1.0  # between samples of a running service
_LEAST_STEPS = 20  # of a service during its measurement, for a meaningful fit


class CalibrationError(ValueError):
    """A running service has no usable step times; the message has the reason and the remedy."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A pool to simulate, or all of a service without several pools."""

    name: str  # of model and device, or of the service
    num_ranks: int
    limits: RankLimits
    times: StepTimes
    experts: ExpertModel
    config: EplbConfig
    source: str  # description of the step times


def from_roofline(asked: SimulateOptions, placement: str, *, pool_ranks: int | None = None) -> Subject:
    """Return the service of a model and a device, or one of its pools.

    Args:
        placement: Placement of experts, which determines the number of slots.
        pool_ranks: Number of ranks of the pool; None is the whole service.

    Raises:
        SizeError, UnknownDeviceError, PreflightError, ConfigError, UnsupportedModelError: The model or device is unsuitable.
    """
    assert asked.model is not None, "the command line checks it"
    device = device_named(asked.device)
    options = options_from_keywords(str(asked.model), asked.served, environment={})
    all_ranks = options.given_ranks or DEFAULT_RANKS
    options = replace(options, pools=None, data_parallel_size=pool_ranks or all_ranks)
    options = with_limits(replace(options, device="cpu" if device.is_cpu else "cuda"))
    num_ranks = pool_ranks or all_ranks
    config = redundant(asked, options.engine.eplb_config, num_ranks, placement)
    options = options.with_engine(eplb_config=config)
    engine = options.engine
    model = read_model(
        asked.model,
        on_gpu=not device.is_cpu,
        float_bytes=float_bytes(options),
        max_model_len=engine.max_model_len,
        quantization=engine.quantization,
        kv_cache_dtype=engine.kv_cache_dtype,
    )
    memory = rank_memory(model, device, options, num_ranks)
    expert_layers = [layers.each for layers in model.costs.layers if layers.each.num_experts]
    assert engine.max_num_seqs and engine.max_num_batched_tokens, "limits are filled in"
    return Subject(
        name=f"{model.name} on {device.name}",
        num_ranks=num_ranks,
        limits=RankLimits(
            num_blocks=memory.kv_tokens // BLOCK_TOKENS,
            block_tokens=BLOCK_TOKENS,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            max_model_len=model.longest,
            enable_prefix_caching=engine.enable_prefix_caching,
            target_itl_s=engine.target_itl_s,
            is_paced=device.is_cpu or engine.target_itl_ms is not None,
        ),
        times=Roofline(
            model.costs,
            device.shared_by(min(all_ranks, device.node_ranks)),
            engine_of(device, options),
            slots_per_rank=memory.slots_per_rank,
        ),
        experts=ExpertModel(
            model.costs.num_expert_layers,
            model.costs.num_experts,
            model.costs.top_k,
            max(layer.expert_bytes for layer in expert_layers),
        ),
        config=config,
        source=f"roofline of {device.name}",
    )


def redundant(asked: SimulateOptions, config: EplbConfig, num_ranks: int, placement: str) -> EplbConfig:
    """Set the redundant experts of a placement: none for `linear`, otherwise the given number or one per rank."""
    if placement == "linear" or num_ranks == 1:  # a rank holds no expert twice
        return replace(config, num_redundant_experts=0)
    return config if asked.says_redundancy else replace(config, num_redundant_experts=num_ranks)


class Look(NamedTuple):
    """The work of a service between two samples."""

    steps: float
    decode_rows: float  # sum over steps, on the rank with the most
    prompt_tokens: float  # sum over steps and ranks: usually only one rank has prompts in a step
    seconds: float  # in steps and between them


def from_service(
    asked: SimulateOptions, client: ServiceClient, *, sleep: Callable[[float], None] = time.sleep
) -> Subject:
    """Watch a running service for some time. The settings of expert placement are those of --eplb-config, not the service's.

    Raises:
        ServiceError: The service cannot be reached.
        CalibrationError: The service has no serving rank, or had too little work.
    """
    info, load = client.get_json("/server_info"), client.get_json("/experts/load")
    if not info["max_running_requests"]:
        raise CalibrationError(
            f"{client.url} has no serving rank; wait until /health returns 200, then try again"
        )
    num_served = len(load["ranks"])  # /server_info has the sums over these ranks
    looks = []
    for _ in range(max(1, round(asked.calibrate_s / EVERY_S))):
        sleep(EVERY_S)
        before, load = load, client.get_json("/experts/load")
        looks.append(look_of(before, load))
    times = fit(looks)
    served = asked.served
    options = options_from_keywords("demo", served, environment={})
    engine = options.engine
    num_ranks = options.given_ranks or int(info["dp_size"])
    batched = engine.max_num_batched_tokens or int(info["chunked_prefill_size"])
    seqs = engine.max_num_seqs or int(info["max_running_requests"]) // num_served
    longest = engine.max_model_len or int(info["context_length"])
    block_tokens = int(info["page_size"] or BLOCK_TOKENS)
    return Subject(
        name=f"{info['served_model_name']} at {client.url}",
        num_ranks=num_ranks,
        limits=RankLimits(
            num_blocks=int(info["max_total_num_tokens"]) // num_served // block_tokens,
            block_tokens=block_tokens,
            max_num_seqs=seqs,
            max_num_batched_tokens=max(batched, seqs),
            max_model_len=longest,
            enable_prefix_caching=engine.enable_prefix_caching,
            target_itl_s=engine.target_itl_s,
            is_paced=info["device"] == "cpu" or engine.target_itl_ms is not None,
        ),
        times=times,
        experts=ExpertModel(int(load["num_layers"]), int(load["num_experts"]), 1, 1 << 20),
        config=engine.eplb_config,
        source=times.describe(),
    )


def look_of(before: Mapping[str, Any], after: Mapping[str, Any]) -> Look:
    """Return the work between two responses of /experts/load. Ranks that are not in both are ignored."""
    first = {rank["rank"]: rank["since_start"] for rank in before["ranks"]}
    last = {rank["rank"]: rank["since_start"] for rank in after["ranks"]}
    both = [rank for rank in first if rank in last]
    if not both:
        return Look(0.0, 0.0, 0.0, 0.0)
    steps, decodes, prompts, step_s, between_s = (
        np.array([last[rank][name] - first[rank][name] for rank in both], dtype=np.float64)
        for name in ("steps", "decode_tokens", "prefill_tokens", "step_s", "between_steps_s")
    )
    return Look(
        float(steps.mean()), float(decodes.max()), float(prompts.sum()), float((step_s + between_s).mean())
    )


def fit(looks: list[Look]) -> MeasuredTimes:
    """Fit a linear function to the samples, without negative times.

    Raises:
        CalibrationError: There were too few steps.
    """
    if sum(each.steps for each in looks) < _LEAST_STEPS:
        raise CalibrationError(
            f"the service ran fewer than {_LEAST_STEPS} steps during the measurement; send requests meanwhile"
        )
    table = np.array(looks)
    known = [0, 1, 2]
    while True:
        found = np.linalg.lstsq(table[:, known], table[:, 3], rcond=None)[0]
        if (found >= 0).all() or len(known) == 1:
            break
        del known[int(found.argmin())]
    values = dict(zip(known, np.maximum(found, 0.0).tolist(), strict=True))
    return MeasuredTimes(
        step_s=values.get(0, 0.0), decode_row_s=values.get(1, 0.0), prefill_token_s=values.get(2, 0.0)
    )
