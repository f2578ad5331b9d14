"""The output of `wideep size` for users: figures, all assumptions behind them, and the command line to use."""

import json
import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from expert_placement.config import EplbConfig
from server.options.pools import Pool, Role
from server.options.table import Options
from server.serve.preflight.kv_share import GPU_SHARE, KV_SHARE
from server.tools.size.costs.device_table import Device
from server.tools.size.costs.estimate import KEPT_BALANCE, LOAD_SPREAD, Estimate
from server.tools.size.costs.roofline import shares_of
from server.tools.size.deployment import Deployment, Replicas, Sized
from server.tools.size.flags import SizeOptions
from server.tools.size.published import Compared, median_error

_GIB = 1 << 30


def size_text(sized: Sized, asked: SizeOptions) -> str:
    """Return the text about one deployment."""
    parts = [
        _estimates(sized, asked),
        "start it with\n" + _command(sized),
        "assumed\n" + "\n".join(f"  {line}" for line in _assumptions(sized)),
    ]
    return "\n\n".join(parts)


def _estimates(sized: Sized, asked: SizeOptions) -> str:
    parts = [
        _head(sized),
        _memory(sized),
        _load(sized, asked),
        _targets(sized, asked),
        _against_replicas(sized.chosen, sized.replicas) if sized.role is Role.BOTH else "",
    ]
    return "\n\n".join(part for part in parts if part)


def size_json(sized: Sized, asked: SizeOptions) -> dict[str, Any]:
    """Return the same as JSON values."""
    return {
        **sized.to_json(),
        "misses": sized.chosen.misses(asked),
        "max_num_seqs": sized.chosen.options.engine.max_num_seqs,
        "max_num_batched_tokens": sized.chosen.options.engine.max_num_batched_tokens,
        "command": _command(sized),
        "assumed": list(_assumptions(sized)),
    }


def pools_text(pools: Mapping[Pool, Sized], asked: SizeOptions) -> str:
    """Return the text about several pools: each of them with its part of the users, and all together."""
    first = next(iter(pools.values()))
    parts = [f"== pool {pool.name} ==\n" + _estimates(sized, asked) for pool, sized in pools.items()]
    total = _totals(pools)
    parts += [
        f"== all {len(pools)} pools ==\n{_ranks(total['ranks'])}, {total['kv_tokens']:,} tokens of KV cache, "
        f"{total['running']:,} requests at once, {total['output']:,.0f} output tokens per second{_bottleneck(pools)}",
        "start it with\n" + _command(first, pools),
        "assumed\n" + "\n".join(f"  {line}" for line in _assumptions(first)),
    ]
    return "\n\n".join(parts)


def _bottleneck(pools: Mapping[Pool, Sized]) -> str:
    """Return what limits pools with roles, as the end of a sentence."""
    busy = max((sized.chosen.busy or 0.0 for sized in pools.values()), default=0.0)
    if not busy:
        return ""
    decodes = [sized.chosen for sized in pools.values() if sized.role is Role.DECODE]
    if busy >= 1:
        return "; the prefill pools limit them: give prompts more ranks"
    if any(each.expected.waiting_users for each in decodes):
        return "; the KV cache of the decode pools limits them: give decodes more ranks"
    return f"; the prefill pools are busy {busy:.0%} of the time"


def pools_json(pools: Mapping[Pool, Sized], asked: SizeOptions) -> dict[str, Any]:
    """Return the same as JSON values."""
    first = next(iter(pools.values()))
    each = {
        pool.name: {**sized.to_json(), "misses": sized.chosen.misses(asked)} for pool, sized in pools.items()
    }
    return {
        **_totals(pools),
        "pools": each,
        "command": _command(first, pools),
        "assumed": list(_assumptions(first)),
    }


def _totals(pools: Mapping[Pool, Sized]) -> dict[str, Any]:
    chosen = [sized.chosen for sized in pools.values()]
    return {
        "ranks": sum(each.num_ranks for each in chosen),
        "kv_tokens": sum(each.memory.kv_tokens * each.num_ranks for each in chosen),
        "running": sum(
            min(each.work.users, each.expected.running_per_rank * each.num_ranks)
            for each in chosen
            if each.busy is None  # others generate only the first token
        ),
        "output": sum(each.expected.output_per_rank * each.num_ranks for each in chosen),
    }


def published_text(compared: list[Compared]) -> str:
    """Return the table of published figures with predictions and errors."""
    lines = [f"{'':33}{'device':>6} {'ranks':>5} {'even':>5} {'published':>10} {'predicted':>9} {'error':>6}"]
    sources: dict[str, int] = {}
    notes = []
    for each in compared:
        figure = each.figure
        number = sources.setdefault(figure.source, len(sources) + 1)
        mark = " *" if figure.is_asked else ""
        lines.append(
            f"{figure.what:33}{figure.device:>6} {figure.num_ranks:5} {each.balance:5.2f} {figure.published:10,.0f} "
            f"{each.predicted:9,.0f} {each.error:+6.0%} [{number}]{mark}"
        )
        if figure.note:
            notes.append(f"{figure.what}: {figure.note}")
    others = [each for each in compared if not each.figure.is_asked]
    faster = sum(each.error > 0 for each in others)
    lines += [
        "tokens per second and device: output tokens for decode, input tokens for prefill",
        "",
        f"median error {median_error(compared):.0%} over the {len(others)} figures without *; {faster} of the predictions are too high",
        "* one share of the roofline (whole) was fitted to these two; no other share was fitted to a figure",
        "None of these figures was measured on WideEP.",
        "",
        *notes,
        "",
        *(f"[{number}] {source}" for source, number in sources.items()),
    ]
    return "\n".join(lines)


def _head(sized: Sized) -> str:
    costs, chosen, device, nodes = sized.model.costs, sized.chosen, sized.device, sized.num_nodes
    where = f"{nodes} nodes" if nodes > 1 else "one node"
    layers = (
        f"{costs.num_expert_layers} layers of {costs.num_experts} experts, {costs.top_k} of them per token"
    )
    return (
        f"{sized.model.name}: {costs.name}, {_large(costs.total_weights)} weights, {_large(costs.active_weights)} per "
        f"token; {layers}; experts in {costs.expert_kind}\n{_ranks(chosen.num_ranks)} on {where}, device {device.name}"
    )


def _large(count: int) -> str:
    return f"{count / 1e9:,.4g} B" if count >= 1e9 else f"{count / 1e6:,.3g} M"


def _ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"


def _memory(sized: Sized) -> str:
    memory, chosen = sized.chosen.memory, sized.chosen
    source = "headers of the weight files" if sized.model.has_files else "config.json, without weight files"
    rows = (
        ("weights on every rank", memory.shared_weights, ""),
        (
            "experts", memory.expert_weights,
            f"{memory.slots_per_rank} slots per layer, {memory.num_redundant} redundant in total",
        ),
        ("room for moving experts", memory.spare_experts, ""),
        *((("LoRA adapters, at most", memory.adapters, _adapters(chosen.options)),) if memory.adapters else ()),
        ("buffers of steps", memory.buffers, ""),
        ("KV cache and states", memory.kv_cache, f"{memory.token_bytes:,} bytes per token"),
        *((("tier in host memory", memory.host_tier, "this rank's share"),) if memory.host_tier else ()),
        ("total", memory.total, ""),
    )  # fmt: skip
    lines = [f"memory per rank, GiB ({source})"]
    lines += [
        f"  {name:30}{num_bytes / _GIB:9.3f}{f'  {note}' if note else ''}" for name, num_bytes, note in rows
    ]
    lines.append(
        f"  KV cache: {memory.kv_tokens:,} tokens per rank, {memory.kv_tokens * chosen.num_ranks:,} in total; "
        f"{memory.kv_tokens / sized.model.longest:.1f} requests of {sized.model.longest:,} tokens per rank"
    )
    if memory.num_states:
        lines.append(f"  states: {memory.num_states} slots of {memory.state_bytes / 2**20:.2f} MiB per rank")
    return "\n".join([*lines, *_tiers(sized)])


def _adapters(options: Options) -> str:
    engine = options.engine
    modules = ", ".join(options.lora_target_modules) or "all modules"
    count = engine.most_adapters if options.device == "cpu" else engine.max_loras
    return f"{count} of rank {engine.max_lora_rank} on {modules}"


def _tiers(sized: Sized) -> Iterator[str]:
    """Yield a line for each tier of a node."""
    memory, chosen = sized.chosen.memory, sized.chosen
    on_device = memory.kv_tokens * (chosen.num_ranks // sized.num_nodes)
    states = ", less if it holds snapshots of states" if memory.num_states else ""
    for tier in sized.tiers:
        yield (
            f"  a node's tier, {tier.name}: {tier.num_bytes / _GIB:.1f} GiB, {tier.tokens:,} tokens{states}; "
            f"{tier.tokens / on_device:.1f} times the KV cache of its ranks"
        )


def _load(sized: Sized, asked: SizeOptions) -> str:
    return {Role.BOTH: _load_of_both, Role.PREFILL: _load_of_prefill, Role.DECODE: _load_of_decode}[
        sized.role
    ](sized, asked)


def _step(chosen: Deployment) -> str:
    step, ms = chosen.expected.step, 1000
    return (
        f"takes {ms * step.total_s:.2f} ms: {ms * step.attention_s:.2f} attention and the rank's own weights, "
        f"{ms * step.experts_s:.2f} experts (balancedness {chosen.balance:.2f}), {ms * step.dispatch_s:.2f} dispatch, "
        f"{ms * step.other_s:.2f} output projection and host"
    )


def _load_of_prefill(sized: Sized, asked: SizeOptions) -> str:
    chosen, expected = sized.chosen, sized.chosen.expected
    prompts_per_s = expected.input_per_rank * chosen.num_ranks / chosen.work.input_tokens
    return "\n".join(
        (
            f"under a steady load: {prompts_per_s:,.1f} prompts per second of {chosen.work.input_tokens:,} tokens; the pool is "
            f"busy {chosen.busy or 0.0:.0%} of the time",
            f"  a step with {expected.prefill_per_step:,.0f} prompt tokens per rank {_step(chosen)}",
            f"  a rank holds {expected.running_per_rank} requests; its KV cache has room for "
            f"{chosen.memory.kv_tokens // chosen.work.input_tokens:,} such prompts, and keeps prefixes in the rest",
            f"  time to the first token {1000 * expected.ttft_s:,.0f} ms",
            f"  input tokens per second: {expected.input_per_rank:,.0f} per rank, "
            f"{expected.input_per_rank * chosen.num_ranks:,.0f} in total",
        )
    )


def _load_of_decode(sized: Sized, asked: SizeOptions) -> str:
    chosen, expected = sized.chosen, sized.chosen.expected
    waiting = f"; {expected.waiting_users} users wait for room" if expected.waiting_users else ""
    output = expected.output_per_rank
    return "\n".join(
        (
            f"under a steady load: {chosen.work.users:,} requests in parallel, with prompts of {chosen.work.input_tokens:,} tokens and "
            f"responses of {chosen.work.output_tokens:,}",
            f"  a step {_step(chosen)}",
            f"  a rank runs {expected.running_per_rank} requests, without prompts{waiting}",
            f"  time per output token {1000 * expected.tpot_s:.1f} ms",
            f"  output tokens per second: {output:,.0f} per rank, {sized.output_per_node:,.0f} per node, "
            f"{output * chosen.num_ranks:,.0f} in total",
        )
    )


def _load_of_both(sized: Sized, asked: SizeOptions) -> str:
    chosen = sized.chosen
    work, expected = chosen.work, chosen.expected
    fits = " (as many as fit)" if asked.users is None else ""
    output, ms = expected.output_per_rank, 1000
    waiting = f"; {expected.waiting_users} users wait for room" if expected.waiting_users else ""
    return "\n".join(
        (
            f"under a steady load: {work.users:,} users{fits}, {work.input_tokens:,} tokens in, {work.output_tokens:,} out",
            f"  a step {_step(chosen)}",
            f"  a rank runs {expected.running_per_rank} requests, with {expected.prefill_per_step:.0f} prompt tokens per step"
            f"{waiting}",
            f"  time per output token {ms * expected.tpot_s:.1f} ms, to the first token {ms * expected.ttft_s:,.0f} ms",
            f"  output tokens per second: {output:,.0f} per rank, {sized.output_per_node:,.0f} per node, "
            f"{output * chosen.num_ranks:,.0f} in total; "
            f"input {expected.input_per_rank:,.0f} per rank",
        )
    )


def _targets(sized: Sized, asked: SizeOptions) -> str:
    if asked.tpot_s is None and asked.ttft_s is None:
        return ""
    wanted = [
        f"{name} {1000 * target:g} ms"
        for name, target in (("TPOT", asked.tpot_s), ("TTFT", asked.ttft_s))
        if target is not None
    ]
    missed = sized.chosen.misses(asked)
    verdict = "met" if missed is None else f"missed ({missed})"
    if sized.role is not Role.BOTH:
        return f"target {' and '.join(wanted)}: {verdict} on {_ranks(sized.chosen.num_ranks)}"
    least = (
        "no number of ranks meets it"
        if sized.least is None
        else f"at least {sized.least.num_ranks} are needed"
    )
    return f"target {' and '.join(wanted)}: {verdict} on {_ranks(sized.chosen.num_ranks)}; {least}"


def _against_replicas(chosen: Deployment, replicas: tuple[Replicas, ...]) -> str:
    """Return the comparison of expert parallelism with replicas."""
    if chosen.num_ranks == 1:
        return ""
    count, ours = chosen.num_ranks, chosen.expected
    lines = [f"does expert parallelism pay here? {count} devices, the same users and kernels"]
    lines.append(f"  {'':34}{'run at once':>12}{'tokens/s':>10}{'TPOT ms':>9}{'TTFT ms':>9}")

    def row(name: str, running: int, each: Estimate) -> str:
        output = each.output_per_rank * count
        return f"  {name:34}{running:12,}{output:10,.0f}{1000 * each.tpot_s:9.1f}{1000 * each.ttft_s:9,.0f}"

    running = min(chosen.work.users, ours.running_per_rank * count)
    lines.append(row(f"expert parallelism over {count}", running, ours))
    for each in replicas:
        name = (
            f"{each.copies} x tensor parallelism over {each.ways}"
            if each.ways > 1
            else f"{each.copies} x one device"
        )
        running = min(chosen.work.users, each.expected.running_per_rank * each.copies)
        lines.append(row(name, running, each.expected))
    if not replicas:
        return "\n".join(
            [
                *lines,
                "  yes: no replica of the whole model fits, with any even split of the model over these devices",
            ]
        )
    best = max(replicas, key=lambda each: each.expected.output_per_rank)
    ratio = ours.output_per_rank / best.expected.output_per_rank
    verdict = (
        f"yes: {ratio:.2f} x the tokens of the best replicas"
        if ratio > 1
        else f"no: the best replicas give {1 / ratio:.2f} x the tokens (WideEP has no tensor parallelism)"
    )
    return "\n".join([*lines, f"  {verdict}"])


def _command(sized: Sized, pools: Mapping[Pool, Sized] | None = None) -> str:
    """Return the command that starts a deployment, or all of the pools, of which `sized` is the first."""
    chosen, device = sized.chosen, sized.device
    num_ranks = chosen.num_ranks if pools is None else sum(pool.num_ranks for pool in pools)
    options = chosen.options
    engine = options.engine
    tier_bytes = engine.kv_offloading_bytes
    if pools is not None and device.is_cpu:
        tier_bytes = sum(each.chosen.options.engine.kv_offloading_bytes for each in pools.values())
    flags = [
        "--device", "cpu" if device.is_cpu else "cuda", "--max-model-len", str(sized.model.longest),
        "--max-num-seqs", str(engine.max_num_seqs), "--max-num-batched-tokens", str(engine.max_num_batched_tokens),
    ]  # fmt: skip
    if options.enable_eplb:
        flags.append("--enable-eplb")
    usual = asdict(EplbConfig())
    if given := {name: value for name, value in asdict(engine.eplb_config).items() if value != usual[name]}:
        flags += ["--eplb-config", json.dumps(given)]
    if engine.enable_lora:
        flags += [
            "--enable-lora",
            "--max-loras",
            str(engine.max_loras),
            "--max-lora-rank",
            str(engine.max_lora_rank),
        ]
    if options.lora_target_modules:
        flags += ["--lora-target-modules", *options.lora_target_modules]
    for name, value in (
        ("--max-cpu-loras", engine.max_cpu_loras if engine.enable_lora else None),
        ("--dtype", None if engine.dtype == "auto" else engine.dtype),
        ("--quantization", engine.quantization),
        ("--mamba-cache-mode", engine.mamba_cache_mode),
        ("--kv-cache-memory", engine.kv_cache_bytes),
        ("--kv-cache-dtype", None if engine.kv_cache_dtype == "auto" else engine.kv_cache_dtype),
        ("--gpu-memory-utilization", options.gpu_memory_utilization),
        ("--kv-offloading-size", _size_flag(tier_bytes)),
        ("--kv-offloading-dir", engine.kv_offloading_dir),
        ("--kv-offloading-disk-size", _size_flag(engine.kv_offloading_disk_bytes)),
    ):
        if value is not None:
            flags += [name, str(value)]
    of_pools = [] if pools is None else ["--pools", str(options.pools)]
    model, nodes = sized.model.path, math.ceil(num_ranks / device.node_ranks)
    if nodes == 1:
        return f"  {shlex.join(['wideep', 'serve', model, *(of_pools or ('-dp', str(num_ranks))), *flags])}"
    return (
        f"  torchrun --nnodes {nodes} --nproc-per-node {num_ranks // nodes} --rdzv-backend wideep "
        f"--rdzv-endpoint HEAD:29400 \\\n      --no-python {shlex.join(['wideep', 'worker', model, *of_pools, *flags])}\n"
        f"  on each of the {nodes} nodes; HEAD is one of them"
    )


def _size_flag(num_bytes: int) -> str | None:
    """Return a size as a flag's value, in whole GiB if it is that, or None for 0."""
    if not num_bytes:
        return None
    return f"{num_bytes >> 30}G" if num_bytes % (1 << 30) == 0 else f"{num_bytes >> 20}M"


def _assumptions(sized: Sized) -> Iterator[str]:
    device, chosen = sized.device, sized.chosen
    shares = shares_of(device)
    yield _device_line(device)
    yield (
        f"achieved shares: {shares.memory:.0%} of memory, {shares.products:.0%} of products, {shares.attention:.0%} in attention, "
        f"{shares.link:.0%} of links, {shares.network:.0%} of the network; {shares.whole:.0%} of all these together"
    )
    yield (
        f"{1e6 * shares.layer_s:.0f} us per layer and {1000 * shares.step_s:g} ms per step are added; "
        f"{shares.padding_rows:.0f} rows of padding per expert; {shares.passes:g} passes over the rows per product"
    )
    if chosen.num_ranks > 1:
        yield (
            f"a message takes {1e6 * shares.link_latency_s:.0f} us by links, {1e6 * shares.network_latency_s:.0f} us by the network"
        )
    if chosen.options.engine.kv_cache_bytes is None:
        share = chosen.options.gpu_memory_utilization or (KV_SHARE if device.is_cpu else GPU_SHARE)
        what = "the KV cache" if device.is_cpu else "weights, buffers and the KV cache"
        yield f"{share:.0%} of the memory is for {what} (--gpu-memory-utilization)"
    kind = "float32" if device.is_cpu else "bfloat16"
    yield f"WideEP multiplies in {kind} for all storage formats, sends rows and answers in it, and does not overlap dispatch"
    if chosen.num_ranks > 1:
        how = (
            f"placed by load, with {1 - KEPT_BALANCE:.0%} of the balance lost as it changes"
            if chosen.options.enable_eplb
            else "in order (--enable-eplb places them by load)"
        )
        yield f"expert loads are log-normal with sigma {LOAD_SPREAD} (as measured in TensorRT-LLM's blog 4); experts are {how}"
    yield "no prefix cache hits; requests arrive evenly; no drafts"
    if sized.role is not Role.BOTH:
        yield "requests are handed over at once, and the less than 16 prompt tokens that are computed again are not counted"
    if not device.is_cpu:
        yield "predictions for GPUs have not been compared with WideEP on GPUs (`wideep size --published`)"


def _device_line(device: Device) -> str:
    rates = ", ".join(f"{rate / 1e12:,.4g} in {kind}" for kind, rate in device.rates.items())
    link = "shared memory" if device.is_cpu else f"{device.link_ranks} devices on links"
    return (
        f"{device.name}: {device.memory_bytes / _GIB:.1f} GiB at {device.memory_bytes_per_s / 1e9:,.0f} GB/s, 10^12 operations/s: "
        f"{rates}; {link} of {device.link_bytes_per_s / 1e9:.0f} GB/s, network {device.network_bytes_per_s / 1e9:g} GB/s "
        f"({device.source})"
    )
