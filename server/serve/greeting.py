"""The message of `wideep serve` when the service answers: its address, how to call it, and its capacity.

In a log it is a greeting with commands to copy. On a terminal it is a summary of one screen: each decision, and whether it
comes from the user ("flag", which includes the --config file) or from WideEP ("default").
"""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from server.machine.model_fields import field_of
from server.machine.report import count
from server.options.pools import in_words
from server.options.reading import API_KEY_VARIABLE
from server.options.table import Options
from server.serve.preflight.adapter_room import rank_adapter_bytes
from server.serve.preflight.memory import rank_bytes
from server.serve.preflight.model import read_config
from server.serve.preflight.probe import Capacity, reachable_host


def address_elsewhere(front: Mapping[str, str]) -> str:
    """Return the service's address as seen from another node: "http://HEAD:8000", or a note that only HEAD can reach it.

    Args:
        front: The front's announcement. The host of `ranks_address` is how ranks reach its node.
    """
    url, head = front["http"], front["ranks_address"].rpartition(":")[0]
    scheme, _, place = url.partition("://")
    host, _, port = place.rpartition(":")
    if host in ("", "0.0.0.0", "[::]") and port:
        return f"{scheme}://{head}:{port}"
    if _is_loopback(head):  # all ranks are on one machine
        return url
    if url.startswith("unix:"):
        return f"{url} (on {head} only)"
    return f"{url} (on {head} only; --host 0.0.0.0 opens it to others)" if _is_loopback(host) else url


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "[::1]") or host.startswith("127.")


def _chat(options: Options) -> str:
    where = _url(options) if options.uds is None else shlex.quote(f"unix:{options.uds}")
    return f"{_wideep_script()} chat {where}"


def _pages(options: Options, url: str) -> str:
    return f"""
  {_chat(options)}

  {url}/dashboard  ranks, throughput and experts, live
  {url}/docs       every endpoint
  {url}/metrics    for Prometheus
"""


def _url(options: Options) -> str:
    host = reachable_host(options.host)
    return f"{options.http.scheme}://{f'[{host}]' if ':' in host else host}:{options.port}"


def greeting(
    options: Options,
    capacity: Capacity | None,
    *,
    seconds: float,
    environment: Mapping[str, str] = os.environ,
) -> str:
    """Return the greeting: the URL, a curl command, the chat command, the pages and the capacity."""
    url = _url(options)
    at, curl, pages = url, "curl", _pages(options, url)
    if options.uds is not None:  # browsers cannot open Unix sockets
        at, url, pages = options.uds, "http://localhost", f"\n  {_chat(options)}\n"
        curl = f"curl --unix-socket {shlex.quote(options.uds)}"
    name = options.served_model_names[0]
    messages = [{"role": "user", "content": "Hello! Who are you?"}]
    body = json.dumps({"model": name, "messages": messages, "max_tokens": 100})
    key = _KeyHint.of(options, environment)
    ranks = ranks_in_words(options)
    log = " Each request logs a line (--disable-access-log turns this off)." if options.log.access else ""
    return f"""
wideep: serving {name} on {ranks} at {at} (ready after {seconds:.0f} s)
{key.export}
  {curl} {url}/v1/chat/completions{key.header} -H 'Content-Type: application/json' -d {shlex.quote(body)}
{pages}{_in_words(capacity)}
Ctrl-C stops everything.{log}
"""


class _KeyHint(NamedTuple):
    """How the commands in the greeting get an API key. The key itself is never printed."""

    export: str = ""  # a line to run first; empty if the shell that started the service has the variable
    header: str = ""  # of the curl command

    @classmethod
    def of(cls, options: Options, environment: Mapping[str, str]) -> "_KeyHint":
        if not options.needs_key:
            return cls()
        named = environment.get(API_KEY_VARIABLE, "")
        if not named.split():
            source = "from --api-key" if options.api_keys else f"from {options.http.api_key_file}"
            export = f"\nFirst, replace KEY with a key {source}:\n\n  export {API_KEY_VARIABLE}=KEY\n"
            return cls(export, f' -H "Authorization: Bearer ${API_KEY_VARIABLE}"')
        first = f"${{{API_KEY_VARIABLE}%% *}}" if len(named.split()) > 1 else f"${API_KEY_VARIABLE}"
        return cls("", f' -H "Authorization: Bearer {first}"')


def summary(
    options: Options,
    asked: Options,
    capacity: Capacity | None,
    facts: Mapping[str, Any],
    *,
    seconds: float,
    environment: Mapping[str, str] = os.environ,
) -> str:
    """Return the summary of all decisions, on one screen of 24 lines and 80 columns.

    Args:
        options: The resolved options.
        asked: The options as given by the user.
        facts: Facts reported by the first rank (`engine`).
    """
    name, ranks = options.served_model_names[0], ranks_in_words(options)
    rows = [row for row in _decisions(options, asked, capacity, facts) if row.value]
    lines = [f"wideep: serving {name} on {ranks} (ready after {seconds:.0f} s)", ""]
    lines += [
        f"  {row.label:<12}{_cut(row.value, _VALUE_WIDTH):<{_VALUE_WIDTH}}  {row.source}" for row in rows
    ]
    lines += [
        "",
        *(_cut(f"  {label:<12}{value}", _WIDTH) for label, value in _addresses(options, environment)),
    ]
    log = " Each request logs a line (off: --disable-access-log)." if options.log.access else ""
    return "\n".join([*(_cut(line.rstrip(), _WIDTH) for line in lines), "", f"Ctrl-C stops everything.{log}"])


_WIDTH, _VALUE_WIDTH = 80, 57


class _Row(NamedTuple):
    label: str
    value: str  # empty hides the row
    source: str


def _decisions(
    options: Options, asked: Options, capacity: Capacity | None, facts: Mapping[str, Any]
) -> list[_Row]:
    ranks = options.data_parallel_size or 1
    pools = options.pools_among(ranks)

    def flat(options: Options) -> dict[str, Any]:
        return {**vars(options), **vars(options.engine)}

    def row(label: str, value: str, *fields: str) -> _Row:
        is_said = any(flat(asked)[field] != flat(Options())[field] for field in fields)
        return _Row(label, value, "flag" if is_said else "default")

    kv_bytes = f", {_size(facts['kv_cache_bytes'])} per rank" if facts else ""
    if options.engine.kv_cache_dtype != "auto":
        kv_bytes += f", in {options.engine.kv_cache_dtype}"
    at_once = capacity and min(capacity.requests, capacity.kv_tokens / capacity.max_len)
    return [
        row("model", f"{_model_type(facts)}{asked.model}", "model"),
        row("ranks", f"{ranks} on 1 node, {count(options.engine.threads, 'thread')} each", "data_parallel_size", "threads"),
        row("pools", in_words(pools) if options.pools else "", "pools"),
        row("device", options.device, "device"),
        row("experts", _experts(facts, ranks), "eplb_config", "expert_placement"),
        row("rebalancing", "on" if options.enable_eplb else "off", "enable_eplb", "eplb_config"),
        row("dispatch", str(facts.get("dispatch", "")), "all2all_backend", "dispatch_mode", "dispatch_dtype"),
        row("weights", f"{_weights(options, facts)}, {_size(rank_bytes(options, pools[0].num_ranks))} per rank", "dtype", "quantization"),
        row("adapters", _adapters(options, pools[0].num_ranks), "max_cpu_loras", "max_loras", "max_lora_rank", "lora_target_modules"),
        row("KV cache", f"{capacity.kv_tokens:,} tokens{kv_bytes}" if capacity else "", "kv_cache_bytes", "gpu_memory_utilization", "kv_cache_dtype"),
        row("KV tiers", _tiers(options), "kv_offloading_bytes", "kv_offloading_dir"),
        row(
            "in parallel", f"{at_once:.1f} requests of {capacity.max_len:,} tokens, up to {capacity.requests} shorter ones"
            if capacity else "", "max_num_seqs", "max_model_len",
        ),
        row("step size", f"up to {options.engine.max_num_batched_tokens:,} tokens per rank", "max_num_batched_tokens"),
        row("drafts", _drafts(options), "speculative_config"),
    ]  # fmt: skip


def ranks_in_words(options: Options) -> str:
    """Return the number of ranks as text, with the pools if there are several."""
    ranks = count(options.data_parallel_size, "rank")
    return (
        ranks
        if options.pools is None
        else f"{ranks} ({in_words(options.pools_among(options.data_parallel_size or 1))})"
    )


def _adapters(options: Options, num_ranks: int) -> str:
    engine = options.engine
    if not engine.enable_lora:
        return ""
    size = _size(rank_adapter_bytes(options, num_ranks))
    return f"up to {engine.most_adapters} in memory, {engine.max_loras} in a step, of rank {engine.max_lora_rank}: at most {size} per rank"


def _tiers(options: Options) -> str:
    engine = options.engine
    host = f"{_size(engine.kv_offloading_bytes)} of host memory" if engine.kv_offloading_bytes else ""
    disk = (
        f"{_size(engine.kv_offloading_disk_bytes)} in {engine.kv_offloading_dir}"
        if engine.kv_offloading_dir
        else ""
    )
    return ", ".join(part for part in (host, disk) if part)


def _model_type(facts: Mapping[str, Any]) -> str:
    return f"{facts['model_type']}, {count(facts['layers'], 'layer')}, " if facts else ""


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def _experts(facts: Mapping[str, Any], ranks: int) -> str:
    if not facts:
        return ""
    redundant = facts["num_slots"] - facts["num_experts"]
    return (
        f"{facts['num_experts']} in each of {count(facts['moe_layers'], 'layer')}, {count(facts['slots_per_rank'], 'slot')} per rank, "
        f"{redundant} redundant"
    )


def _weights(options: Options, facts: Mapping[str, Any]) -> str:
    if stored := facts.get("stored"):
        return f"{stored} as stored"
    if options.engine.quantization is not None:
        return f"{options.engine.quantization}, quantised on load"
    if options.engine.dtype != "auto":
        return options.engine.dtype
    config = read_config(Path(options.model))
    is_short = options.device == "cuda" or "bfloat16" in [
        field_of(config, name) for name in ("dtype", "torch_dtype")
    ]
    return "bfloat16" if is_short else "float32"


def _drafts(options: Options) -> str:
    speculative = options.engine.speculative_config
    return (
        "none"
        if speculative is None
        else f"up to {speculative.num_drafts} tokens per step, by {speculative.method.value}"
    )


def _addresses(options: Options, environment: Mapping[str, str]) -> list[tuple[str, str]]:
    key = [("API key", f"required; commands read it from {API_KEY_VARIABLE}")] if options.needs_key else []
    if options.uds is not None:
        ask = f"curl --unix-socket {shlex.quote(options.uds)} http://localhost/v1/models"
        return [("API", ask), ("chat", _chat(options)), *key]
    url = _url(options)
    pages = [("API", f"{url}/v1"), *((page, f"{url}/{page}") for page in ("dashboard", "docs", "metrics"))]
    return [*pages, ("chat", _chat(options)), *key]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _in_words(capacity: Capacity | None) -> str:
    if capacity is None:
        return ""
    at_once = min(capacity.requests, capacity.kv_tokens / capacity.max_len)
    return (
        f"\nKV cache: {capacity.kv_tokens:,} tokens, for {at_once:.1f} requests of {capacity.max_len:,} tokens in parallel, or up "
        f"to {capacity.requests} shorter ones.\n"
    )


def _wideep_script() -> str:
    """Return how the user can run `wideep` from the current folder: by name if it is on PATH, otherwise by path."""
    beside_python = Path(sys.executable).with_name("wideep")
    on_path = shutil.which("wideep")
    if on_path is not None and os.path.samefile(
        on_path, beside_python if beside_python.exists() else on_path
    ):
        return "wideep"
    return shlex.quote(os.path.relpath(beside_python)) if beside_python.exists() else "wideep"
