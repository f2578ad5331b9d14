"""The table of options: every flag of `serve`, `worker`, `engine` and `front`, each declared once.

An engine's settings are the fields of `EngineSettings`; for each, the table has a row `engine_FIELD` with its flag.

Names follow vLLM where it has the option. One difference is deliberate: no origin is allowed by default, so that a page
of another web site cannot use a service that is meant for the local machine. `reading` reads command lines and keywords
with this table, and `tools.page` generates docs/options.md from it.
"""

import json
import math
import os
from dataclasses import dataclass, field, replace
from ipaddress import ip_network
from pathlib import Path
from typing import Any

from dispatch.wires.availability import BACKENDS
from expert_placement.config import EplbConfig, EplbConfigError, parse_eplb_config
from scheduler.policy.config import DispatchMode, EngineSettings
from scheduler.policy.speculative import SpeculativeConfig, SpeculativeConfigError, parse_speculative_config
from server.options.adapters import read_modules, read_targets
from server.options.checkpoint import MODEL, STORED_METHODS, CheckpointOptions
from server.options.checks import check_key, read_cluster_key, read_keys
from server.options.flag import (
    Flag,
    Group,
    Option,
    OptionsError,
    flag,
    json_texts,
    number,
    one_of,
    options_of,
    row,
    size,
    size_in_gib,
    switch,
    text,
    texts,
    tokens,
    whole,
)
from server.options.images import ImageOptions
from server.options.parser_names import REASONING_PARSERS, TOOL_PARSERS
from server.options.pools import (
    PREFILL_THRESHOLD,
    Pool,
    Role,
    check_pool_name,
    num_ranks_of,
    pools_of,
    read_pools,
)

DEMO_MODEL = "demo"
FCFS, PRIORITY = "fcfs", "priority"  # scheduling policies
ROUTER_NAMES = ("prefix", "fewest", "round-robin")  # see `server.front.routing.routers`
RESIZE_TIMEOUT_S = 600.0
STANDBY_PORT = 29401  # of the second store; torchrun's default for the first one is 29400
PER_NODE = "per-node"  # the value of --fronts with which every node has fronts
SHUTDOWN_TIMEOUT_S = 25.0  # torchrun and Kubernetes kill a process 30 s after SIGTERM
MAX_SOCKET_PATH = 107  # bytes; Linux's sockaddr_un holds 108, including the final zero
# Endpoints that machines and the dashboard poll every few seconds.
QUIET_PATHS = (
    *("/health", "/metrics", "/ping", "/server_info"),
    *("/throughput", "/experts/load", "/v1/fault_tolerance/status"),
)

HTTP = Group("HTTP endpoint", "the front")
TOOLS = Group("tool calls and reasoning", "the front")
RANKS = Group("ranks", "the ranks")
DISPATCH = Group("dispatch", "the ranks")
FAULTS = Group("fault tolerance", "the front and the ranks")
PLACEMENT = Group("expert placement", "the front and the ranks")
LIMITS = Group("limits", "the front and the ranks")
MEMORY = Group("memory", "the ranks")
ADAPTERS = Group("LoRA adapters", "the front and the ranks")
LOGS = Group("logs and traces", "the front")

_LEVELS = ("debug", "info", "warning", "error", "critical")
_NOT_NEGATIVE = number(lambda seconds: 0 <= seconds < math.inf, "0 or more seconds")
# Backends of vLLM and SGLang. Each of WideEP's has both modes, and `auto` is the fastest one on the machine.
_BACKENDS_OF_OTHERS = (
    "deepep", "deepep_low_latency", "deepep_high_throughput", "deepep_v2", "pplx", "naive", "allgather_reducescatter",
    "flashinfer", "flashinfer_all2allv", "flashinfer_nvlink_two_sided", "flashinfer_nvlink_one_sided", "nixl_ep", "nixl",
    "mori", "mori_low_latency", "mori_high_throughput", "mooncake", "moonep", "none",
)  # fmt: skip
# vLLM's values of --load-format that read safetensors files.
_READERS_OF_SAFETENSORS = ("hf", "safetensors", "fastsafetensors", "runai_streamer", "instanttensor")
_SHARE = number(lambda share: 0 < share <= 1, "above 0 and at most 1")
_AT_MOST_A_DAY = number(lambda seconds: 0 < seconds <= 86_400, "above 0 and at most 86400 (a day)")


def _root_path(name: str, given: Any) -> str:
    path = text(name, given).rstrip("/")
    if path and not path.startswith("/"):
        raise OptionsError(f"{name} is {given!r}; it must begin with / as in /llm")
    return path


def _key_file(name: str, given: Any) -> str:
    """Read the file once, so that an unreadable one fails before the model is loaded."""
    read_keys(Path(text(name, given)), name)
    return str(given)


def _hosts(name: str, given: Any) -> tuple[str, ...]:
    hosts = json_texts(name, given)
    for host in hosts:
        if set(host) & set(":/ "):
            raise OptionsError(
                f"{name} has {host!r}; give names without scheme or port, such as chat.example or *.example"
            )
    return hosts


def _keys(name: str, given: Any) -> tuple[str, ...]:
    keys = texts(name, given)
    for key in keys:
        check_key(name, key)
    return keys


def _names(name: str, given: Any) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(texts(name, given)))
    if "" in names:
        raise OptionsError(f"{name} has an empty name; give at least one character")
    return names


def _model(name: str, given: Any) -> str:
    if not given:
        raise OptionsError(f"{name} is empty; give a model directory, a hub name, or 'demo'")
    return text(name, given)


def _template_file(name: str, given: Any) -> str:
    if not os.path.isfile(text(name, given)):
        raise OptionsError(f"{name} is {given!r}, which is not a file; give one with a Jinja template")
    return str(os.path.abspath(given))  # the processes of a service may have different working directories


def _cluster_key_file(name: str, given: Any) -> str:
    path = os.path.abspath(text(name, given))
    read_cluster_key(Path(path))
    return path


def _directory(name: str, given: Any) -> str:
    path = os.path.abspath(os.path.expanduser(text(name, given)))
    if not given or (os.path.exists(path) and not os.path.isdir(path)):
        raise OptionsError(f"{name} is {given!r}; give a folder (it is created if missing)")
    return path


def _socket_path(name: str, given: Any) -> str:
    path = os.path.abspath(os.path.expanduser(text(name, given)))
    if not given or len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise OptionsError(
            f"{name} is {given!r}; give a path of at most {MAX_SOCKET_PATH} bytes, folders included"
        )
    return path


def _endpoint(name: str, given: Any) -> str:
    host, _, port = text(name, given).rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise OptionsError(
            f"{name} is {given!r}; give HOST:PORT, the service's --rdzv-endpoint, such as 10.0.0.1:29400"
        )
    return str(given)


def standby_address(name: str, given: Any) -> str:
    """Return the HOST:PORT of --standby.

    Raises:
        OptionsError: The value has another form.
    """
    host, colon, port = text(name, given).rpartition(":")
    if not colon or port.endswith("]"):  # a host or an [IPv6] address
        host, port = str(given), str(STANDBY_PORT)
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536 or (":" in host and host[0] != "["):
        raise OptionsError(
            f"{name} is {given!r}; give a name or an address of the second node, such as 10.0.0.2 or 10.0.0.2:{STANDBY_PORT} "
            "(IPv6 in brackets)"
        )
    return f"{host}:{port}"


def _pools(name: str, given: Any) -> str:
    read_pools(text(name, given))
    return str(given)


def _pool(name: str, given: Any) -> str:
    return check_pool_name(name, text(name, given))


def _load_format(name: str, given: Any) -> str:
    if given not in ("auto", "dummy"):
        raise OptionsError(
            f"{name} is {given!r}; it must be auto or dummy: weights are read from safetensors files only (save_pretrained in "
            "transformers writes them)"
        )
    return str(given)


def _dispatch_mode(name: str, given: Any) -> DispatchMode:
    return DispatchMode(one_of(*DispatchMode)(name, given))


def _eplb_config(name: str, given: Any) -> EplbConfig:
    try:
        return parse_eplb_config(given if isinstance(given, str) else json.dumps(given))
    except EplbConfigError as error:
        raise OptionsError(f"{name}: {error}") from error


def _speculative_config(name: str, given: Any) -> SpeculativeConfig:
    try:
        return parse_speculative_config(given if isinstance(given, str) else json.dumps(given))
    except SpeculativeConfigError as error:
        raise OptionsError(f"{name}: {error}") from error


def _paths(name: str, given: Any) -> tuple[str, ...]:
    paths = [path.strip() for path in text(name, given).split(",")]
    for path in paths:
        if path and not path.startswith("/"):
            raise OptionsError(f"{name} has {path!r}; give paths such as /health,/metrics")
    return tuple(path for path in paths if path)


def _addresses(name: str, given: Any) -> tuple[str, ...]:
    words = given.split(",") if isinstance(given, str) else texts(name, given)
    addresses = tuple(word.strip() for word in words if word.strip())
    for each in addresses:
        try:
            is_known = each == "*" or bool(ip_network(each, strict=False))
        except ValueError:
            is_known = False
        if not is_known:
            raise OptionsError(
                f"{name} has {each!r}; give addresses such as 10.0.0.7, networks such as 10.0.0.0/8, or *"
            )
    return addresses


def _traces_url(name: str, given: Any) -> str:
    if not text(name, given).startswith(("http://", "https://")):
        raise OptionsError(f"{name} is {given!r}; give a URL such as http://127.0.0.1:4317")
    return str(given)


@dataclass(frozen=True, kw_only=True)
class HttpOptions:
    """API keys, request limits, CORS, proxies, TLS and shutdown of the HTTP endpoint."""

    api_key_file: str | None = flag(
        HTTP, "--api-key-file", read=_key_file, metavar="FILE",
        help="require a bearer key from this file (one per line, # starts a comment) or from --api-key; reloaded when it changes",
    )  # fmt: skip
    operator_key_file: str | None = flag(
        HTTP, "--operator-key-file", read=_key_file, metavar="FILE", default_text="every key is an operator key",
        help="file of operator keys, in the form of --api-key-file; only they may act on the whole service: move experts, drain and "
        "resize, sleep, replace weights, load adapters, clear the prefix cache; they also open all other endpoints",
    )  # fmt: skip
    max_request_bytes: int = flag(
        HTTP, "--max-request-bytes", read=size, metavar="BYTES", default=32 << 20, default_text="32M",
        help="largest request body, e.g. 512K or 64M; larger ones get 413",
    )  # fmt: skip
    max_inflight_request_bytes: int | None = flag(
        HTTP, "--max-inflight-request-bytes", read=size, metavar="BYTES", default_text="8 times --max-request-bytes",
        help="total size of the bodies being read at once, without the first 64K of each; a body that exceeds it gets 503",
    )  # fmt: skip
    max_connections: int | None = flag(
        HTTP, "--max-connections", read=whole(1), metavar="N", default_text="from the limit of open files, at most 16384",
        help="maximum number of open connections; a further one replaces the longest idle one, or gets 503 if none is idle",
    )  # fmt: skip
    max_connections_per_address: int | None = flag(
        HTTP, "--max-connections-per-address", read=whole(1), metavar="N", default_text="half of --max-connections",
        help="maximum number of connections from one address (for IPv6, from one /64 network); loopback and "
        "--forwarded-allow-ips are exempt",
    )  # fmt: skip
    forwarded_allow_ips: tuple[str, ...] = flag(
        HTTP, "--forwarded-allow-ips", read=_addresses, metavar="ADDRESSES", default=(), default_text="none",
        help="proxies that may set X-Forwarded-For and X-Forwarded-Proto: comma-separated addresses or networks, or *",
    )  # fmt: skip
    files_dir: str | None = flag(
        HTTP, "--files-dir", read=_directory, metavar="DIR", default_text="a temporary folder, removed when the service ends",
        help="folder for the files of /v1/files and batches; they survive a restart of the service; one service at a time "
        "may use it",
    )  # fmt: skip
    max_files_bytes: int = flag(
        HTTP, "--max-files-bytes", read=size, metavar="BYTES", default=1 << 30, default_text="1G",
        help="total size of stored files; an upload that exceeds it gets 413; --max-request-bytes limits a single upload",
    )  # fmt: skip
    weights_dir: str | None = flag(
        HTTP, "--weights-dir", read=_directory, metavar="DIR", default_text="a temporary folder on the node of the endpoint",
        help="folder for new weights that clients send to /update_weights; the ranks of all nodes must be able to read it",
    )  # fmt: skip
    shutdown_timeout_s: float = flag(
        HTTP, "--shutdown-timeout-seconds", "--shutdown-timeout", read=_NOT_NEGATIVE, metavar="SECONDS",
        default=SHUTDOWN_TIMEOUT_S,
        help="time for open requests to finish after SIGTERM; 0 ends them at once",
    )  # fmt: skip
    allowed_origins: tuple[str, ...] = flag(
        HTTP, "--allowed-origins", read=json_texts, metavar="JSON", default=(), default_text="none",
        help="""origins whose pages may use the service from a browser, such as '["https://chat.example"]' or '["*"]'""",
    )  # fmt: skip
    allowed_hosts: tuple[str, ...] = flag(
        HTTP, "--allowed-hosts", read=_hosts, metavar="JSON", default=(), default_text="IP addresses and the machine's names",
        help="""further host names that clients may use if no API key is required, such as a proxy's: '["chat.example"]', """
        """'["*.example"]' or '["*"]'""",
    )  # fmt: skip
    allowed_methods: tuple[str, ...] = flag(
        HTTP, "--allowed-methods", read=json_texts, metavar="JSON", default=("*",), default_text='["*"]',
        help="methods that pages from --allowed-origins may use",
    )  # fmt: skip
    allowed_headers: tuple[str, ...] = flag(
        HTTP, "--allowed-headers", read=json_texts, metavar="JSON", default=("*",), default_text='["*"]',
        help="headers that pages from --allowed-origins may send",
    )  # fmt: skip
    allow_credentials: bool = switch(
        HTTP,
        "--allow-credentials",
        help="let pages from --allowed-origins send cookies and other credentials",
    )
    ssl_certfile: str | None = flag(
        HTTP, "--ssl-certfile", read=text, metavar="FILE", help="serve HTTPS with this certificate (PEM)"
    )
    ssl_keyfile: str | None = flag(
        HTTP, "--ssl-keyfile", read=text, metavar="FILE",
        help="private key of the certificate, if the file of --ssl-certfile does not contain it",
    )  # fmt: skip
    root_path: str = flag(
        HTTP, "--root-path", read=_root_path, metavar="PATH", default="",
        help="path prefix under which a proxy publishes the service, e.g. /llm",
    )  # fmt: skip

    @property
    def most_inflight_bytes(self) -> int:
        """Return the limit for the total size of bodies that are being read, in bytes."""
        return self.max_inflight_request_bytes or 8 * self.max_request_bytes

    @property
    def scheme(self) -> str:
        """Return the scheme of the service's URLs."""
        return "https" if self.ssl_certfile else "http"


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """Logs, tracing and their formats."""

    format: str = flag(
        LOGS, "--log-format", read=one_of("text", "json"), metavar="{text,json}", default="text",
        help="format of the access log and the error log",
    )  # fmt: skip
    level: str = flag(
        LOGS, "--log-level", "--uvicorn-log-level", read=one_of(*_LEVELS),
        metavar="{debug,info,warning,error,critical}", default="info", help="lowest level to log",
        taken_as={**{word.upper(): word for word in _LEVELS}, "trace": "debug", "NOTSET": "debug"},
        taken_because="levels are lower case, and debug is the lowest",
    )  # fmt: skip
    requests: bool = switch(
        LOGS, "--log-requests", "--enable-log-requests", off=["--disable-log-requests"],
        help="log the prompt and parameters of every request (off by default)",
        off_help="do not log prompts and parameters (the default)",
    )  # fmt: skip
    access: bool = switch(
        LOGS, off=["--disable-access-log", "--disable-uvicorn-access-log"], default=True, keyword="access_log",
        off_help="do not log answered HTTP requests",
    )  # fmt: skip
    stats: bool = switch(
        LOGS, off=["--disable-log-stats"], default=True, keyword="log_stats",
        off_help="do not log the throughput (every 10 s during traffic)",
    )  # fmt: skip
    quiet_paths: tuple[str, ...] = flag(
        LOGS, "--disable-access-log-for-endpoints", read=_paths, metavar="PATHS", default=QUIET_PATHS,
        default_text=",".join(QUIET_PATHS), help="comma-separated paths that the access log omits",
    )  # fmt: skip
    otlp_endpoint: str | None = flag(
        LOGS, "--otlp-traces-endpoint", read=_traces_url, metavar="URL",
        help="collector that receives one OpenTelemetry span per request, e.g. http://127.0.0.1:4317; needs wideep[otel]",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a service. None means "not given": the default depends on the machine or the model."""

    model: str = flag(
        MODEL, "MODEL", read=_model, metavar="MODEL", nargs="?", default=DEMO_MODEL,
        help="Hugging Face model directory, hub name, or 'demo' for a small model that WideEP generates",
    )  # fmt: skip
    checkpoint: CheckpointOptions = field(default=CheckpointOptions())
    host: str = flag(
        HTTP, "--host", read=text, metavar="ADDRESS", default="127.0.0.1", help="address to listen on"
    )
    port: int = flag(
        HTTP,
        "--port",
        read=whole(0, 65535),
        metavar="PORT",
        default=8000,
        help="port to listen on; 0 takes a free one",
    )
    uds: str | None = flag(
        HTTP, "--uds", read=_socket_path, metavar="PATH",
        help="Unix domain socket to listen on instead of --host and --port: curl --unix-socket PATH http://localhost/v1/models",
    )  # fmt: skip
    api_server_count: int = flag(
        HTTP, "--api-server-count", "-asc", read=whole(1), metavar="N", default=1,
        help="number of front processes that serve HTTP on one port, each on its own core (docs/fronts.md)",
    )  # fmt: skip
    fronts: str = flag(
        HTTP, "--fronts", read=one_of("head", PER_NODE), metavar="NODES", default="head",
        help="nodes that serve HTTP: head is the one of --rdzv-endpoint, per-node is every node of the first torchrun, each with "
        "--api-server-count fronts; the same on all nodes (docs/fronts.md)",
    )  # fmt: skip
    served_model_names: tuple[str, ...] = flag(
        HTTP, "--served-model-name", read=_names, metavar="NAME", action="extend", nargs="+", default=(),
        default_text="MODEL's", help="names that requests may use for the model; the service shows the first one",
    )  # fmt: skip
    api_keys: tuple[str, ...] = flag(
        HTTP, "--api-key", read=_keys, metavar="KEY", action="append", default=(),
        help="required bearer key; may be repeated. Other users of the machine can read a command line: prefer "
        "--api-key-file, or keys in the environment variable WIDEEP_API_KEY",
    )  # fmt: skip
    per_request_metrics: bool = switch(
        HTTP, "--enable-per-request-metrics",
        help="add the times of each request to its response, or to the usage chunk of its stream",
    )  # fmt: skip
    http: HttpOptions = field(default=HttpOptions())

    images: ImageOptions = field(default=ImageOptions())

    seed: int | None = flag(
        HTTP, "--seed", read=whole(0, 2**64 - 1), metavar="N", default_text="random for each request",
        help="base seed for requests without one, assigned in order of arrival: the same requests in the same order get the "
        "same answers",
    )  # fmt: skip

    tool_call_parser: str | None = flag(
        TOOLS, "--tool-call-parser", read=one_of(*TOOL_PARSERS), metavar="NAME",
        default_text="from the chat template", help=f"format of the model's tool calls: {', '.join(TOOL_PARSERS)}",
    )  # fmt: skip
    reasoning_parser: str | None = flag(
        TOOLS, "--reasoning-parser", read=one_of(*REASONING_PARSERS), metavar="NAME",
        default_text="from the chat template", help=f"format of the model's reasoning: {', '.join(REASONING_PARSERS)}",
    )  # fmt: skip
    chat_template: str | None = flag(
        TOOLS, "--chat-template", read=_template_file, metavar="FILE", default_text="the model's template",
        help="file with a Jinja template that renders chats",
    )  # fmt: skip
    tokenizer_mode: str = flag(
        TOOLS, "--tokenizer-mode", read=one_of("auto", "hf", "slow", "deepseek_v32"), metavar="NAME", default="auto",
        help="chat renderer: deepseek_v32 is DeepSeek-V3.2's published code, which auto uses for that model if it has no chat "
        "template; hf and slow mean auto",
    )  # fmt: skip

    data_parallel_size: int | None = flag(
        RANKS, "--data-parallel-size", "-dp", read=whole(1), metavar="N",
        default_text="2 on CPU, otherwise one per GPU", help="number of ranks on this node, one process each",
    )  # fmt: skip
    pools: str | None = flag(
        RANKS, "--pools", read=_pools, metavar="ROLE:RANKS,...", default_text="one pool with all ranks",
        help="separate expert groups of consecutive ranks behind one endpoint, such as both:2,both:2 (replicas) or "
        "prefill:1,decode:2; roles are prefill, decode and both; the same on all nodes (docs/pools.md)",
    )  # fmt: skip
    join: str | None = flag(
        RANKS, "--join", read=_endpoint, metavar="HOST:PORT",
        help="join the service with this --rdzv-endpoint from a separate torchrun, as the pool of --pool or in the place of a lost "
        "node; for `wideep worker`",
    )  # fmt: skip
    standby: str | None = flag(
        RANKS, "--standby", read=standby_address, metavar="HOST[:PORT]", default_text="none",
        help="address of a second node that takes over if the node of --rdzv-endpoint is lost, with a port for a second store "
        f"(default {STANDBY_PORT}); the same on all nodes; for `wideep worker` with --rdzv-backend wideep (docs/standby.md)",
    )  # fmt: skip
    pool: str | None = flag(
        RANKS, "--pool", read=_pool, metavar="NAME", default_text="the value of --role, if that is given",
        help="name of the pool that this torchrun starts; the first torchrun starts the service, the others add their pools with "
        "--join; for `wideep worker` (docs/pools.md)",
    )  # fmt: skip
    role: str | None = flag(
        RANKS, "--role", read=one_of(*(each.value for each in Role)), metavar="{both,prefill,decode}",
        default_text="both", help="part of each request that the pool of --pool runs (docs/pools.md)",
    )  # fmt: skip
    cluster_key_file: str | None = flag(
        RANKS, "--cluster-key-file", read=_cluster_key_file, metavar="FILE",
        help="file with a secret of at least 32 bytes, the same on all nodes, that authenticates the front, the ranks and all "
        "their messages; only its owner may have access to it",
    )  # fmt: skip
    device: str = flag(
        RANKS, "--device", read=one_of("auto", "cpu", "cuda"), metavar="{auto,cpu,cuda}", default="auto",
        help="device to compute on; auto uses cuda if a GPU and its requirements are found, otherwise cpu, and logs why",
    )  # fmt: skip
    engine: EngineSettings = field(default=EngineSettings())
    engine_threads = row(flag(
        RANKS, "--threads", read=whole(1), metavar="N", default_text="cores / local ranks", help="number of threads per rank"
    ))  # fmt: skip
    engine_load_format = row(flag(
        RANKS, "--load-format", read=_load_format, metavar="{auto,dummy}",
        taken_as=dict.fromkeys(_READERS_OF_SAFETENSORS, "auto"),
        taken_because="each rank reads its own share of the safetensors files",
        help="source of the weights: auto reads the model's safetensors files; dummy draws random weights, to measure speed and "
        "memory before a download: the folder needs config.json and the tokenizer's files only, and answers have no meaning "
        "(docs/start.md)",
    ))  # fmt: skip
    engine_dtype = row(flag(
        RANKS, "--dtype", read=one_of("auto", "float32", "bfloat16"), metavar="{auto,float32,bfloat16}",
        default_text="auto; bfloat16 on a GPU",
        taken_as={"half": "bfloat16", "float16": "bfloat16", "float": "float32"},
        taken_because="weights are kept in float32 or bfloat16; bfloat16 has float16's size and float32's range, and answers "
        "differ from float16's in the last digits",
        help="data type of the weights; quantised weights keep theirs. A GPU computes in this type, CPU in float32",
    ))  # fmt: skip
    engine_quantization = row(flag(
        RANKS, "--quantization", "-q", read=one_of("int8", "int4", *STORED_METHODS), metavar="{int8,int4}",
        help="quantise experts and linear layers on load, with one scale per 32 inputs: less memory, faster decoding on CPU, "
        "different answers (docs/quantised.md). Naming the checkpoint's own format changes nothing",
    ))  # fmt: skip
    engine_activation_dtype = row(flag(
        RANKS, "--activation-dtype", read=one_of("auto", "bf16", "fp8"), metavar="{auto,bf16,fp8}",
        taken_as={"bfloat16": "bf16"}, taken_because="it is the same type",
        help="data type of the rows that FP8 weights multiply on a GPU; auto quantises rows to FP8 if the checkpoint's "
        "configuration does and the GPU has FP8 units: faster prompts, answers that differ from a CPU's "
        "(docs/quantised.md); bf16 never quantises rows; fp8 is auto but refuses other checkpoints and devices",
    ))  # fmt: skip
    engine_batch_invariant = row(switch(
        RANKS, "--batch-invariant",
        help="make results independent of the other requests in a batch, bit for bit, at a cost in speed; always so on CPU",
    ))  # fmt: skip
    engine_enforce_eager = row(
        switch(RANKS, "--enforce-eager", help="run all steps on a GPU without CUDA graphs")
    )
    engine_enable_torch_compile = row(switch(
        RANKS, "--enable-torch-compile",
        help="compile the operations between attention, experts and routing on a GPU (norms, rotary, residuals); the start "
        "takes longer",
    ))  # fmt: skip

    engine_all2all_backend = row(flag(
        DISPATCH, "--all2all-backend", read=one_of(*BACKENDS), metavar=f"{{{','.join(BACKENDS)}}}",
        taken_as=dict.fromkeys(_BACKENDS_OF_OTHERS, "auto"),
        taken_because="steps that only decode use the low-latency exchange and steps with prompts the normal one, as far as "
        "this machine supports them; deep_ep is the installed DeepEP",
        help="backend that exchanges tokens between ranks; auto is shm within one host, otherwise gloo; on GPUs auto is nccl, "
        "with decode steps through peer memory (nvshmem between hosts) if available; deep_ep is the installed DeepEP "
        "package",
    ))  # fmt: skip
    engine_dispatch_mode = row(flag(
        DISPATCH, "--dispatch-mode", read=_dispatch_mode, metavar=f"{{{','.join(DispatchMode)}}}",
        help="mode of the exchange; auto is low_latency for steps that only decode and normal for steps with prompts",
    ))  # fmt: skip
    engine_dispatch_dtype = row(flag(
        DISPATCH, "--dispatch-dtype", read=one_of("auto", "fp8"), metavar="{auto,fp8}",
        help="format in which tokens are sent to experts; auto is the model's data type; fp8 has DeepSeek's block scales: a "
        "quarter of float32's bytes, different results",
    ))  # fmt: skip
    engine_dispatch_node_size = row(flag(
        DISPATCH, "--dispatch-node-size", read=whole(0), metavar="N", default_text="0, directly to every rank",
        help="on CPUs only: number of ranks per node for a two-stage exchange that sends a token once to each node and spreads it "
        "inside, for slow links between nodes; must divide the number of ranks",
    ))  # fmt: skip
    engine_distributed_timeout_s = row(flag(
        FAULTS, "--distributed-timeout-seconds", read=_AT_MOST_A_DAY, metavar="SECONDS",
        help="time that a rank may keep another one waiting before it counts as hung",
    ))  # fmt: skip

    engine_heartbeat_timeout_s = row(flag(
        FAULTS, "--heartbeat-timeout-seconds", read=_NOT_NEGATIVE, metavar="SECONDS",
        help="time without a heartbeat after which a rank is restarted; other ranks wait at least as long. 0 disables the check "
        "(for a debugger); cut links are then found only after --distributed-timeout-seconds",
    ))  # fmt: skip
    pool_roles: str = flag(
        RANKS, "--pool-roles", read=one_of("fixed", "auto"), metavar="{fixed,auto}", default="fixed",
        help="auto changes the roles of --pools while serving: pools follow waiting prompts and the use of the KV cache; fixed "
        "leaves that to `wideep pools` (docs/pools.md)",
    )  # fmt: skip
    prefill_threshold: int = flag(
        RANKS, "--prefill-threshold", read=tokens(0), metavar="TOKENS", default=PREFILL_THRESHOLD,
        help="with pools of role prefill: prompts with fewer tokens that are not cached run on a pool of role decode",
    )  # fmt: skip
    max_rank_restarts: int = flag(
        FAULTS, "--max-rank-restarts", read=whole(0), metavar="N", default=3,
        help="maximum number of restarts of a failing rank within 10 minutes; after these it stays down",
    )  # fmt: skip

    enable_eplb: bool = switch(
        PLACEMENT, "--enable-eplb",
        help="move experts during operation if the observed load makes it worthwhile; `wideep experts apply` works without it",
    )  # fmt: skip
    engine_eplb_config = row(flag(
        PLACEMENT, "--eplb-config", read=_eplb_config, metavar="JSON", default_text="{}",
        help='settings of expert placement, such as {"num_redundant_experts": 8}; keys: window_size, step_interval, num_redundant_experts, '
        "log_balancedness, policy, max_bytes_per_step, horizon_s, min_gain, max_moved, num_groups, min_nodes, "
        "spread, history_file",
    ))  # fmt: skip
    engine_expert_placement = row(flag(
        PLACEMENT, "--expert-placement", read=text, metavar="FILE", default_text="experts in order",
        help="initial placement, a file written by `wideep experts plan --out FILE`",
    ))  # fmt: skip

    engine_max_model_len = row(flag(
        LIMITS, "--max-model-len", read=tokens(1), metavar="TOKENS", default_text="the model's",
        help="maximum length of prompt plus output in tokens, such as 4096, 8k (8000) or 8K (8192)",
    ))  # fmt: skip
    engine_max_num_seqs = row(flag(
        LIMITS, "--max-num-seqs", read=whole(1), metavar="N", default_text="64 on CPU, 256 on a GPU",
        help="maximum number of requests that a rank runs at once",
    ))  # fmt: skip
    engine_max_num_batched_tokens = row(flag(
        LIMITS, "--max-num-batched-tokens", read=tokens(16), metavar="TOKENS",
        default_text="512 on CPU, 8192 on a GPU", help="maximum number of tokens in one step of a rank, such as 8192 or 8K",
    ))  # fmt: skip
    max_num_queued_reqs: int | None = flag(
        LIMITS, "--max-num-queued-reqs", read=whole(1), metavar="N", default_text="no limit",
        help="maximum number of waiting and running requests on all ranks (each of a request's n choices counts); further "
        "ones get 429 with Retry-After",
    )  # fmt: skip
    scheduling_policy: str = flag(
        LIMITS, "--scheduling-policy", read=one_of(FCFS, PRIORITY), metavar="{fcfs,priority}", default=FCFS,
        help="order in which a rank starts waiting requests: fcfs is the order of arrival; priority starts lower values of "
        "the field `priority` first, equal values in order of arrival (docs/scheduling.md)",
    )  # fmt: skip
    routing_policy: str = flag(
        LIMITS, "--routing-policy", read=one_of(*ROUTER_NAMES), metavar="{prefix,fewest,round-robin}", default=ROUTER_NAMES[0],
        help="rule that chooses a request's rank: prefix takes the one with the earliest expected first token; fewest takes the "
        "one with the fewest outstanding tokens; round-robin takes the next one and never moves a request. The last two are "
        "for comparison and ignore sessions (docs/scheduling.md)",
    )  # fmt: skip
    engine_target_itl_ms = row(flag(
        LIMITS, "--target-itl-ms", read=number(lambda given: given > 0, "above 0"), metavar="MS",
        default_text="2.2 decode steps of all running and waiting requests on CPU, none on a GPU",
        help="target time between two tokens of a stream; steps that include prompts take fewer prompt tokens to meet it, "
        "but never fewer than 16 to 64 (docs/scheduling.md)",
    ))  # fmt: skip
    target_ttft_ms: float | None = flag(
        LIMITS, "--target-ttft-ms", read=number(lambda given: given > 0, "above 0"), metavar="MS", default_text="none",
        help="target time to the first token; it changes no answer, but /metrics has the share of requests within it",
    )  # fmt: skip
    engine_speculative_config = row(flag(
        LIMITS, "--speculative-config", "-sc", read=_speculative_config, metavar="JSON", default_text="no drafts",
        help="speculative decoding: try several tokens of a request in a step, without changing its tokens; vLLM's keys, such as "
        '{"method": "ngram", "num_speculative_tokens": 4}; methods: ngram, suffix, mtp (docs/speculative.md)',
    ))  # fmt: skip
    max_logprobs: int | None = flag(
        LIMITS, "--max-logprobs", read=whole(-1), metavar="N", default_text="20, but all for a request with -1",
        help="maximum number of log-probabilities per token in a response; -1 removes the limit",
    )  # fmt: skip
    request_timeout_s: float = flag(
        LIMITS, "--request-timeout", read=_NOT_NEGATIVE, metavar="SECONDS", default=0.0, default_text="none",
        help="time limit of a request; 0 disables it",
    )  # fmt: skip
    engine_rank_recovery_timeout_s = row(flag(
        FAULTS, "--rank-recovery-timeout", read=_NOT_NEGATIVE, metavar="SECONDS",
        help="time that requests wait for a rank to return if none serves; after this time the service ends",
    ))  # fmt: skip
    engine_front_recovery_timeout_s = row(flag(
        FAULTS, "--front-recovery-timeout", read=_NOT_NEGATIVE, metavar="SECONDS",
        help="time that ranks wait for the front to restart or for the network to return; after this time they exit",
    ))  # fmt: skip

    resize_timeout_s: float = flag(
        LIMITS, "--resize-timeout-seconds", read=_NOT_NEGATIVE, metavar="SECONDS", default=RESIZE_TIMEOUT_S,
        help="time for new ranks to start, and for experts and requests to move, when `wideep scale` changes the number of "
        "ranks; after this time the service stays as it was (docs/resize.md)",
    )  # fmt: skip

    engine_kv_cache_bytes = row(flag(
        MEMORY, "--kv-cache-memory", "--kv-cache-memory-bytes", read=size, metavar="BYTES",
        default_text="25% of free memory, divided among the local ranks; on a GPU, the memory that --gpu-memory-utilization leaves",
        help="size of the KV cache per rank, e.g. 512M or 2G",
    ))  # fmt: skip
    gpu_memory_utilization: float | None = flag(
        MEMORY, "--gpu-memory-utilization", read=_SHARE, metavar="SHARE", default_text="0.9 on a GPU",
        help="share of free memory, above 0 and at most 1, for weights and KV cache on a GPU, or for the KV cache on CPU",
    )  # fmt: skip
    engine_kv_cache_dtype = row(flag(
        MEMORY, "--kv-cache-dtype", read=one_of("auto", "fp8", "int8"), metavar="{auto,fp8,int8}",
        taken_as={"fp8_e4m3": "fp8"}, taken_because="e4m3 is the only FP8 format of the KV cache",
        help="format of the KV cache; fp8 (e4m3) and int8 store keys, values, latents and index keys in 8 bits, with a scale per "
        "token and head: more tokens fit, and long contexts decode faster, but hardly with latents; responses differ (docs/quantised.md)",
    ))  # fmt: skip
    engine_enable_prefix_caching = row(switch(
        MEMORY, "--enable-prefix-caching", off=["--no-enable-prefix-caching"],
        help="reuse the KV cache of equal prefixes (the default)", off_help="do not reuse the KV cache of equal prefixes",
    ))  # fmt: skip
    engine_mamba_cache_mode = row(flag(
        MEMORY, "--mamba-cache-mode", read=one_of("none", "align"), metavar="{none,align}",
        default_text="align for models with recurrent layers",
        help="caching of recurrent states: align keeps the states at the ends of blocks, from which requests with equal "
        "prefixes continue; none keeps no states, and such requests run their whole prompts",
    ))  # fmt: skip
    engine_kv_offloading_bytes = row(flag(
        MEMORY, "--kv-offloading-size", read=size_in_gib, metavar="SIZE",
        default_text="0, no such tier; with prefill or decode pools, a tenth of the machine's memory",
        help="host memory in which the ranks of a node share cached prefixes, e.g. 20G; a plain number counts GiB, as in vLLM "
        "(docs/tiers.md)",
    ))  # fmt: skip
    engine_kv_offloading_dir = row(flag(
        MEMORY, "--kv-offloading-dir", read=_directory, metavar="DIR", default_text="no such tier",
        help="folder for cached prefixes on disk, which survive a restart; needs --kv-offloading-disk-size (docs/tiers.md)",
    ))  # fmt: skip
    engine_kv_offloading_disk_bytes = row(flag(
        MEMORY, "--kv-offloading-disk-size", read=size_in_gib, metavar="SIZE", default_text="0, no such tier",
        help="largest total size of the files in --kv-offloading-dir, e.g. 200G; a plain number counts GiB",
    ))  # fmt: skip
    engine_kv_transfer_backend = row(flag(
        MEMORY, "--kv-transfer-backend", read=one_of("tcp", "nixl"), metavar="{tcp,nixl}", default_text="tcp",
        help="how nodes fetch cached prefixes from each other's host memory: tcp sends them; nixl reads them with NIXL, by RDMA "
        "if the network has it (needs the package nixl; docs/tiers.md)",
    ))  # fmt: skip

    engine_enable_lora = row(switch(
        ADAPTERS, "--enable-lora",
        help="serve LoRA adapters in PEFT's format on attention, MLPs, routers and experts, on CPUs or GPUs (docs/adapters.md)",
    ))  # fmt: skip
    lora_modules: tuple[str, ...] = flag(
        ADAPTERS, "--lora-modules", read=read_modules, metavar="NAME=PATH", action="extend", nargs="+", default=(),
        default_text="none", help="adapters to load at the start; requests choose one by its name as `model`",
    )  # fmt: skip
    lora_dir: str | None = flag(
        ADAPTERS, "--lora-dir", read=_directory, metavar="DIR", default_text="none",
        help="folder with an adapter in each subfolder; new ones are loaded under the name of their subfolder, and changed ones again",
    )  # fmt: skip
    lora_target_modules: tuple[str, ...] = flag(
        ADAPTERS, "--lora-target-modules", read=read_targets, metavar="MODULE", action="extend", nargs="+", default=(),
        default_text="all", help="modules that adapters may change, by the last part of their names, e.g. q_proj or experts; "
        "adapters on others are refused",
    )  # fmt: skip
    engine_max_loras = row(flag(
        ADAPTERS, "--max-loras", read=whole(1, 128), metavar="N",
        help="maximum number of adapters that the requests of a step may use; requests of others wait for their turn",
    ))  # fmt: skip
    engine_max_lora_rank = row(flag(
        ADAPTERS, "--max-lora-rank", read=whole(1, 4096), metavar="R", help="largest rank of an adapter",
    ))  # fmt: skip
    engine_max_cpu_loras = row(flag(
        ADAPTERS, "--max-cpu-loras", read=whole(1), metavar="N", default_text="twice --max-loras",
        help="maximum number of adapters that a rank keeps in memory; others are read from their files again",
    ))  # fmt: skip
    engine_lora_dtype = row(flag(
        ADAPTERS, "--lora-dtype", read=one_of("auto", "float32", "bfloat16"), metavar="{auto,float32,bfloat16}",
        help="type to which the values of adapters are rounded on CPUs; auto is bfloat16 unless the model's weights are float32",
    ))  # fmt: skip

    log: LogOptions = field(default=LogOptions())
    # The cluster key that `wideep serve` generates for the processes of one start. No flag or command line contains it.
    own_cluster_key: str = field(default="", repr=False)

    def with_engine(self, **changes: Any) -> "Options":
        """Return options with these settings of the engine replaced."""
        return replace(self, engine=replace(self.engine, **changes))

    @property
    def given_ranks(self) -> int | None:
        """Return the given number of ranks: that of all pools, or --data-parallel-size. None if neither is given."""
        return self.data_parallel_size if self.pools is None else num_ranks_of(read_pools(self.pools))

    @property
    def has_own_pool(self) -> bool:
        """Whether the ranks of this torchrun are one pool of a service to which torchruns may add pools."""
        return self.pool is not None or self.role is not None

    @property
    def pool_name(self) -> str:
        """The name of this torchrun's own pool."""
        return self.pool or self.pool_role.value

    @property
    def pool_role(self) -> Role:
        """The role of this torchrun's own pool."""
        return Role(self.role or Role.BOTH.value)

    def pools_among(self, num_ranks: int) -> tuple[Pool, ...]:
        """Return the pools with which a service of this number of ranks starts.

        Raises:
            OptionsError: --pools has another number of ranks.
        """
        if self.has_own_pool:
            return (Pool(self.pool_name, self.pool_role, 0, num_ranks),)
        return pools_of(self.pools, num_ranks)

    @property
    def cluster_key(self) -> bytes | None:
        """Return the shared secret of front and ranks. Returns None if there is no key."""
        if self.cluster_key_file is None:
            return self.own_cluster_key.encode() or None
        return read_cluster_key(Path(self.cluster_key_file))

    @property
    def needs_key(self) -> bool:
        """Return whether requests must carry an API key."""
        return bool(self.api_keys) or self.http.api_key_file is not None


CONFIG_FILE = Option(
    "config", (),
    Flag(
        group=MODEL, names=("--config",), read=text, default=None, metavar="FILE",
        help="YAML file of options in vLLM's format, e.g. `max-model-len: 4096`; the command line takes precedence",
    ),
)  # fmt: skip
OPTIONS = (*options_of(Options), CONFIG_FILE)
