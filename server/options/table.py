"""The table of options: every flag of `serve`, `worker`, `engine` and `front`, each declared once.

Names are vLLM's where vLLM has them. One difference on purpose: no origin is allowed unless it is named, so that a page
in somebody's browser cannot use a service that is meant for the machine it runs on. `reading` reads command lines and
keywords by this table, `page` makes docs/options.md of it.
"""

import json
import math
import os
from dataclasses import dataclass, field
from ipaddress import ip_network
from pathlib import Path
from typing import Any

from dispatch.wires.availability import BACKENDS
from expert_placement.config import EplbConfig, EplbConfigError, parse_eplb_config
from scheduler.policy.speculative import SpeculativeConfig, SpeculativeConfigError, parse_speculative_config
from server.api.parsers.registry import REASONING_PARSERS, TOOL_PARSERS
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
    size,
    switch,
    text,
    texts,
    tokens,
    whole,
)

DEMO_MODEL = "demo"
FCFS, PRIORITY = "fcfs", "priority"  # scheduling policies
ROUTER_NAMES = ("prefix", "fewest", "round-robin")  # see `server.front.routers`
SHUTDOWN_TIMEOUT_S = 25.0  # torchrun and Kubernetes kill 30 s after they asked
MAX_SOCKET_PATH = 107  # bytes; Linux's sockaddr_un has room for one more, a zero
QUIET_PATHS = (  # asked every few seconds, by machines and by the dashboard
    *("/health", "/metrics", "/ping", "/server_info"),
    *("/throughput", "/experts/load", "/v1/fault_tolerance/status"),
)

HTTP = Group("HTTP endpoint", "the front")
TOOLS = Group("tool calls and reasoning", "the front")
RANKS = Group("ranks", "the ranks")
DISPATCH = Group("dispatch", "the ranks")
PLACEMENT = Group("expert placement", "the front and the ranks")
LIMITS = Group("limits", "the front and the ranks")
MEMORY = Group("memory", "the ranks")
LOGS = Group("logs and traces", "the front")

_LEVELS = ("debug", "info", "warning", "error", "critical")
_NOT_NEGATIVE = number(lambda seconds: 0 <= seconds < math.inf, "0 or more seconds")
# vLLM's and SGLang's ways; each of ours has both modes, and `auto` is the fastest that the machine has.
_BACKENDS_OF_OTHERS = (
    "deepep", "deepep_low_latency", "deepep_high_throughput", "deepep_v2", "pplx", "naive", "allgather_reducescatter",
    "flashinfer", "flashinfer_all2allv", "flashinfer_nvlink_two_sided", "flashinfer_nvlink_one_sided", "nixl_ep", "nixl",
    "mori", "mori_low_latency", "mori_high_throughput", "mooncake", "moonep", "none",
)  # fmt: skip
_SHARE = number(lambda share: 0 < share <= 1, "above 0 and at most 1")
_AT_MOST_A_DAY = number(lambda seconds: 0 < seconds <= 86_400, "above 0 and at most 86400 (a day)")


def _root_path(name: str, given: Any) -> str:
    path = text(name, given).rstrip("/")
    if path and not path.startswith("/"):
        raise OptionsError(f"{name} is {given!r}; it must begin with / as in /llm")
    return path


def _key_file(name: str, given: Any) -> str:
    """Read the file once: a service whose keys cannot be read should not have loaded a model first."""
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
    return str(os.path.abspath(given))  # processes of a service need not share a directory


def _cluster_key_file(name: str, given: Any) -> str:
    path = os.path.abspath(text(name, given))
    read_cluster_key(Path(path))
    return path


def _directory(name: str, given: Any) -> str:
    path = os.path.abspath(os.path.expanduser(text(name, given)))
    if not given or (os.path.exists(path) and not os.path.isdir(path)):
        raise OptionsError(f"{name} is {given!r}; give a folder, which is made if it is missing")
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


def _eplb_config(name: str, given: Any) -> EplbConfig:
    try:
        return parse_eplb_config(given if isinstance(given, str) else json.dumps(given))
    except EplbConfigError as error:
        raise OptionsError(f"{name}: {error}") from error


def _speculative_config(name: str, given: Any) -> str:
    """Its text, with what is not given filled in."""
    try:
        return parse_speculative_config(given if isinstance(given, str) else json.dumps(given)).as_json()
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
    """Who may ask over HTTP, from where, how much, over TLS or not, and until when."""

    api_key_file: str | None = flag(
        HTTP, "--api-key-file", read=_key_file, metavar="FILE",
        help="require a key of this file too: one per line, # begins a comment; read again when it changes",
    )  # fmt: skip
    operator_key_file: str | None = flag(
        HTTP, "--operator-key-file", read=_key_file, metavar="FILE", default_text="every key may",
        help="only keys of this file may change or record experts and reset the prefix cache; they open all else too; the "
        "form is that of --api-key-file",
    )  # fmt: skip
    max_request_bytes: int = flag(
        HTTP, "--max-request-bytes", read=size, metavar="BYTES", default=32 << 20, default_text="32M",
        help="longest body that is read, e.g. 512K or 64M; longer ones are a 413",
    )  # fmt: skip
    max_inflight_request_bytes: int | None = flag(
        HTTP, "--max-inflight-request-bytes", read=size, metavar="BYTES", default_text="8 times --max-request-bytes",
        help="bytes of all bodies that are being read at once, without the first 64K of each; a body that does not fit is a 503",
    )  # fmt: skip
    max_connections: int | None = flag(
        HTTP, "--max-connections", read=whole(1), metavar="N", default_text="by the limit of open files, at most 16384",
        help="connections that are open at once; one more closes the longest idle one, or is a 503 if none is idle",
    )  # fmt: skip
    max_connections_per_address: int | None = flag(
        HTTP, "--max-connections-per-address", read=whole(1), metavar="N", default_text="half of --max-connections",
        help="connections from one address (of IPv6, one network of 64 bits); loopback and --forwarded-allow-ips have no such "
        "bound",
    )  # fmt: skip
    forwarded_allow_ips: tuple[str, ...] = flag(
        HTTP, "--forwarded-allow-ips", read=_addresses, metavar="ADDRESSES", default=(), default_text="none",
        help="proxies whose X-Forwarded-For and X-Forwarded-Proto are believed: addresses or networks, separated by commas, or *",
    )  # fmt: skip
    files_dir: str | None = flag(
        HTTP, "--files-dir", read=_directory, metavar="DIR", default_text="a temporary one, removed when the service ends",
        help="keep files of /v1/files and batches in this folder, also for a service that is started again; one service at "
        "a time",
    )  # fmt: skip
    max_files_bytes: int = flag(
        HTTP, "--max-files-bytes", read=size, metavar="BYTES", default=1 << 30, default_text="1G",
        help="uploads are a 413 where the files that are kept would have more; one upload has up to --max-request-bytes",
    )  # fmt: skip
    shutdown_timeout_s: float = flag(
        HTTP, "--shutdown-timeout-seconds", "--shutdown-timeout", read=_NOT_NEGATIVE, metavar="SECONDS",
        default=SHUTDOWN_TIMEOUT_S,
        help="how long open requests may go on after SIGTERM; 0 ends them at once",
    )  # fmt: skip
    allowed_origins: tuple[str, ...] = flag(
        HTTP, "--allowed-origins", read=json_texts, metavar="JSON", default=(), default_text="none",
        help="""origins whose pages may use the service from a browser, such as '["https://chat.example"]' or '["*"]'""",
    )  # fmt: skip
    allowed_hosts: tuple[str, ...] = flag(
        HTTP, "--allowed-hosts", read=_hosts, metavar="JSON", default=(), default_text="addresses and own names",
        help="""without API keys: further names that clients may use for the service, such as a proxy's: '["chat.example"]', """
        """'["*.example"]' or '["*"]'""",
    )  # fmt: skip
    allowed_methods: tuple[str, ...] = flag(
        HTTP, "--allowed-methods", read=json_texts, metavar="JSON", default=("*",), default_text='["*"]',
        help="methods that those pages may use",
    )  # fmt: skip
    allowed_headers: tuple[str, ...] = flag(
        HTTP, "--allowed-headers", read=json_texts, metavar="JSON", default=("*",), default_text='["*"]',
        help="headers that those pages may send",
    )  # fmt: skip
    allow_credentials: bool = switch(
        HTTP, "--allow-credentials", help="let those pages send cookies and the like"
    )
    ssl_certfile: str | None = flag(
        HTTP, "--ssl-certfile", read=text, metavar="FILE", help="serve HTTPS with this certificate (PEM)"
    )
    ssl_keyfile: str | None = flag(
        HTTP, "--ssl-keyfile", read=text, metavar="FILE",
        help="the certificate's key, where the certificate's file does not hold it",
    )  # fmt: skip
    root_path: str = flag(
        HTTP, "--root-path", read=_root_path, metavar="PATH", default="",
        help="path under which a proxy shows the service, e.g. /llm",
    )  # fmt: skip

    @property
    def most_inflight_bytes(self) -> int:
        """Bytes of all bodies that are read at once."""
        return self.max_inflight_request_bytes or 8 * self.max_request_bytes

    @property
    def scheme(self) -> str:
        """What URLs begin with."""
        return "https" if self.ssl_certfile else "http"


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """What is logged and traced, and how."""

    format: str = flag(
        LOGS, "--log-format", read=one_of("text", "json"), metavar="{text,json}", default="text",
        help="form of access and error log",
    )  # fmt: skip
    level: str = flag(
        LOGS, "--log-level", "--uvicorn-log-level", read=one_of(*_LEVELS),
        metavar="{debug,info,warning,error,critical}", default="info", help="least that is logged",
        taken_as={**{word.upper(): word for word in _LEVELS}, "trace": "debug", "NOTSET": "debug"},
        taken_because="levels are written in small letters, and debug is the least of them",
    )  # fmt: skip
    requests: bool = switch(
        LOGS, "--log-requests", "--enable-log-requests", off=["--disable-log-requests"],
        help="log every request's prompt and parameters, which is off by default",
        off_help="do not (the default, for scripts that say so)",
    )  # fmt: skip
    access: bool = switch(
        LOGS, off=["--disable-access-log", "--disable-uvicorn-access-log"], default=True, keyword="access_log",
        off_help="no line per answered HTTP request",
    )  # fmt: skip
    stats: bool = switch(
        LOGS, off=["--disable-log-stats"], default=True, keyword="log_stats",
        off_help="no line of throughput every 10 s while there is traffic",
    )  # fmt: skip
    quiet_paths: tuple[str, ...] = flag(
        LOGS, "--disable-access-log-for-endpoints", read=_paths, metavar="PATHS", default=QUIET_PATHS,
        default_text=",".join(QUIET_PATHS), help="no such line for these paths, separated by commas",
    )  # fmt: skip
    otlp_endpoint: str | None = flag(
        LOGS, "--otlp-traces-endpoint", read=_traces_url, metavar="URL",
        help="send one OpenTelemetry span per request there, e.g. http://127.0.0.1:4317; needs wideep[otel]",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user asked for. `None` means: not said, the default is found where it is known."""

    model: str = flag(
        MODEL, "MODEL", read=_model, metavar="MODEL", nargs="?", default=DEMO_MODEL,
        help="a Hugging Face model directory, a hub name, or 'demo', the model that WideEP makes itself",
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
        help="listen on a Unix domain socket instead of --host and --port: curl --unix-socket PATH http://localhost/v1/models",
    )  # fmt: skip
    served_model_names: tuple[str, ...] = flag(
        HTTP, "--served-model-name", read=_names, metavar="NAME", action="extend", nargs="+", default=(),
        default_text="MODEL's", help="names that requests may use for the model; the first is shown",
    )  # fmt: skip
    api_keys: tuple[str, ...] = flag(
        HTTP, "--api-key", read=_keys, metavar="KEY", action="append", default=(),
        help="require this bearer key; may be repeated. Others on the machine can read a command line: prefer "
        "--api-key-file, or keys in the variable WIDEEP_API_KEY",
    )  # fmt: skip
    per_request_metrics: bool = switch(
        HTTP, "--enable-per-request-metrics",
        help="add the times of each request to its answer, or to the usage chunk of its stream",
    )  # fmt: skip
    http: HttpOptions = field(default=HttpOptions())

    seed: int | None = flag(
        HTTP, "--seed", read=whole(0, 2**64 - 1), metavar="N", default_text="drawn anew",
        help="requests that bring no seed get theirs from this one, in order of arrival: the same requests in the same "
        "order are answered the same",
    )  # fmt: skip

    tool_call_parser: str | None = flag(
        TOOLS, "--tool-call-parser", read=one_of(*TOOL_PARSERS), metavar="NAME",
        default_text="by its chat template", help=f"how the model writes tool calls: {', '.join(TOOL_PARSERS)}",
    )  # fmt: skip
    reasoning_parser: str | None = flag(
        TOOLS, "--reasoning-parser", read=one_of(*REASONING_PARSERS), metavar="NAME",
        default_text="by its chat template", help=f"how the model writes reasoning: {', '.join(REASONING_PARSERS)}",
    )  # fmt: skip
    chat_template: str | None = flag(
        TOOLS, "--chat-template", read=_template_file, metavar="FILE", default_text="the model's own",
        help="render chats with this Jinja template",
    )  # fmt: skip
    tokenizer_mode: str = flag(
        TOOLS, "--tokenizer-mode", read=one_of("auto", "hf", "slow", "deepseek_v32"), metavar="NAME", default="auto",
        help="deepseek_v32 renders chats as DeepSeek-V3.2's published code does, which auto chooses for that model if it has no "
        "chat template; hf and slow are auto",
    )  # fmt: skip

    data_parallel_size: int | None = flag(
        RANKS, "--data-parallel-size", "-dp", read=whole(1), metavar="N",
        default_text="2 on CPU, else one per GPU", help="ranks on this node, one process each",
    )  # fmt: skip
    join: str | None = flag(
        RANKS, "--join", read=_endpoint, metavar="HOST:PORT",
        help="for `wideep worker` under a torchrun of its own: take the place of a node that is away in the service "
        "whose --rdzv-endpoint this is",
    )  # fmt: skip
    cluster_key_file: str | None = flag(
        RANKS, "--cluster-key-file", read=_cluster_key_file, metavar="FILE",
        help="a secret of 32 bytes or more, the same on all nodes, with which front and ranks authenticate each other and all "
        "they say; only its owner may read it",
    )  # fmt: skip
    device: str = flag(
        RANKS, "--device", read=one_of("auto", "cpu", "cuda"), metavar="{auto,cpu,cuda}", default="auto",
        help="what computes; auto is cuda where a GPU and all that it needs is found, else cpu, and says why",
    )  # fmt: skip
    threads: int | None = flag(
        RANKS, "--threads", read=whole(1), metavar="N", default_text="cores / local ranks", help="threads per rank"
    )  # fmt: skip
    dtype: str = flag(
        RANKS, "--dtype", read=one_of("auto", "float32", "bfloat16"), metavar="{auto,float32,bfloat16}",
        default="auto", default_text="auto, on a GPU bfloat16",
        taken_as={"half": "bfloat16", "float16": "bfloat16", "float": "float32"},
        taken_because="weights are kept in float32 or bfloat16, which has float16's size and float32's range: answers "
        "differ from float16's in the last digits",
        help="type the weights are kept in, but for quantised ones, which stay as they are; CPU computes in float32, a "
        "GPU in this type",
    )  # fmt: skip
    quantization: str | None = flag(
        RANKS, "--quantization", "-q", read=one_of("int8", "int4", *STORED_METHODS), metavar="{int8,int4}",
        help="quantise experts and linear layers as they are loaded, a scale per 32 inputs; less memory, on a CPU faster "
        "decodes, other answers (docs/quantised.md); the name of the format that the checkpoint has changes nothing",
    )  # fmt: skip
    batch_invariant: bool = switch(
        RANKS, "--batch-invariant",
        help="on a GPU: no token's bits depend on the requests beside it, at a price in speed; always so on CPU",
    )  # fmt: skip
    enforce_eager: bool = switch(
        RANKS, "--enforce-eager", help="on a GPU: run decode steps without CUDA graphs"
    )
    enable_torch_compile: bool = switch(
        RANKS, "--enable-torch-compile",
        help="on a GPU: compile what lies between attention, experts and routing (norms, rotary, residuals); the start "
        "takes longer",
    )  # fmt: skip

    all2all_backend: str = flag(
        DISPATCH, "--all2all-backend", read=one_of(*BACKENDS), metavar=f"{{{','.join(BACKENDS)}}}", default="auto",
        taken_as=dict.fromkeys(_BACKENDS_OF_OTHERS, "auto"),
        taken_because="steps that only decode use the low-latency exchange and steps with prompts the normal one, as far as "
        "this machine goes; deep_ep is the installed DeepEP",
        help="how ranks exchange tokens; auto is shm between ranks of one host, gloo otherwise; on GPUs it is nccl, with "
        "decode steps through each other's memory (nvshmem between hosts) where that can be had; deep_ep is the "
        "installed package",
    )  # fmt: skip
    dispatch_mode: str = flag(
        DISPATCH, "--dispatch-mode", read=one_of("auto", "normal", "low_latency"),
        metavar="{auto,normal,low_latency}", default="auto",
        help="auto is low_latency for steps that only decode, normal for steps with prompts",
    )  # fmt: skip
    dispatch_dtype: str = flag(
        DISPATCH, "--dispatch-dtype", read=one_of("auto", "fp8"), metavar="{auto,fp8}", default="auto",
        help="what tokens travel to experts as: the model's own type, or FP8 with DeepSeek's block scales, a quarter of "
        "float32's bytes and not the same bits",
    )  # fmt: skip
    dispatch_node_size: int = flag(
        DISPATCH, "--dispatch-node-size", read=whole(0), metavar="N", default=0,
        default_text="0, straight to every rank",
        help="send a token once to each node of N ranks and spread it inside, where links between nodes are the slow "
        "ones; divides the number of ranks",
    )  # fmt: skip
    distributed_timeout_s: float = flag(
        DISPATCH, "--distributed-timeout-seconds", read=_AT_MOST_A_DAY, metavar="SECONDS", default=30.0,
        help="how long a rank may keep another one waiting before it counts as hung",
    )  # fmt: skip

    heartbeat_timeout_s: float = flag(
        DISPATCH, "--heartbeat-timeout-seconds", read=_NOT_NEGATIVE, metavar="SECONDS", default=2.0,
        help="how long a rank's process may stand still until it is killed and started again, and the others' least patience; 0: for ever, for a debugger, and links that are cut "
        "are found by --distributed-timeout-seconds only",
    )  # fmt: skip
    max_rank_restarts: int = flag(
        DISPATCH, "--max-rank-restarts", read=whole(0), metavar="N", default=3,
        help="how often within 10 minutes a rank that died is started again before it stays away",
    )  # fmt: skip

    enable_eplb: bool = switch(
        PLACEMENT, "--enable-eplb",
        help="move experts while serving, where that pays by the load seen; `wideep experts apply` works without",
    )  # fmt: skip
    eplb_config: EplbConfig = flag(  # noqa: RUF009 - it declares a field
        PLACEMENT, "--eplb-config", read=_eplb_config, metavar="JSON", default=EplbConfig(), default_text="{}",
        help='such as {"num_redundant_experts": 8}; keys: window_size, step_interval, num_redundant_experts, '
        "log_balancedness, policy, max_bytes_per_step, horizon_s, min_gain, max_moved, num_groups, min_nodes, "
        "spread, history_file",
    )  # fmt: skip
    expert_placement: str | None = flag(
        PLACEMENT, "--expert-placement", read=text, metavar="FILE", default_text="experts evenly",
        help="start with this placement, as `wideep experts plan --out FILE` writes it",
    )  # fmt: skip

    max_model_len: int | None = flag(
        LIMITS, "--max-model-len", read=tokens(1), metavar="TOKENS", default_text="the model's",
        help="prompt plus output, such as 4096, 8k (8000) or 8K (8192)",
    )  # fmt: skip
    max_num_seqs: int | None = flag(
        LIMITS, "--max-num-seqs", read=whole(1), metavar="N", default_text="64 on CPU, 256 on a GPU",
        help="requests a rank runs at once",
    )  # fmt: skip
    max_num_batched_tokens: int | None = flag(
        LIMITS, "--max-num-batched-tokens", read=tokens(16), metavar="TOKENS",
        default_text="512 on CPU, 8192 on a GPU", help="tokens a rank runs in one step, such as 8192 or 8K",
    )  # fmt: skip
    max_num_queued_reqs: int | None = flag(
        LIMITS, "--max-num-queued-reqs", read=whole(1), metavar="N", default_text="no bound",
        help="choices of requests that may wait or run, all ranks together; one more is a 429 with Retry-After",
    )  # fmt: skip
    scheduling_policy: str = flag(
        LIMITS, "--scheduling-policy", read=one_of(FCFS, PRIORITY), metavar="{fcfs,priority}", default=FCFS,
        help="who begins first of those that wait at a rank: fcfs is who came first; priority is who has the lower number in "
        "the field `priority`, then who came first (docs/scheduling.md)",
    )  # fmt: skip
    routing_policy: str = flag(
        LIMITS, "--routing-policy", read=one_of(*ROUTER_NAMES), metavar="{prefix,fewest,round-robin}", default=ROUTER_NAMES[0],
        help="which rank a request goes to: prefix is the one that comes to its first token soonest; fewest is the one with the "
        "fewest outstanding tokens; round-robin is the next one, whatever they do, and nothing is moved; the last two are to "
        "compare with, and know no sessions (docs/scheduling.md)",
    )  # fmt: skip
    target_itl_ms: float | None = flag(
        LIMITS, "--target-itl-ms", read=number(lambda given: given > 0, "above 0"), metavar="MS",
        default_text="2.2 decode steps of all who run or wait on CPU, none on a GPU",
        help="time between two tokens of a stream that a step with prompts keeps to, as far as it can: it takes on fewer "
        "tokens of prompts, at least 16 to 64",
    )  # fmt: skip
    speculative_config: str | None = flag(
        LIMITS, "--speculative-config", "-sc", read=_speculative_config, metavar="JSON", default_text="nothing is drafted",
        help="try several tokens of a request in a step, without changing any of them: vLLM's keys, such as "
        '{"method": "ngram", "num_speculative_tokens": 4}; methods: ngram, suffix, mtp (docs/speculative.md)',
    )  # fmt: skip
    max_logprobs: int | None = flag(
        LIMITS, "--max-logprobs", read=whole(-1), metavar="N", default_text="20, or all by -1",
        help="log-probabilities that a request may ask for beside each token; -1 is as many as it likes",
    )  # fmt: skip
    request_timeout_s: float = flag(
        LIMITS, "--request-timeout", read=_NOT_NEGATIVE, metavar="SECONDS", default=0.0, default_text="none",
        help="deadline of a request; 0 is none",
    )  # fmt: skip
    rank_recovery_timeout_s: float = flag(
        LIMITS, "--rank-recovery-timeout", read=_NOT_NEGATIVE, metavar="SECONDS", default=600.0,
        help="when no rank serves any more, how long requests wait for one to come back until the service ends",
    )  # fmt: skip

    kv_cache_bytes: int | None = flag(
        MEMORY, "--kv-cache-memory", "--kv-cache-memory-bytes", read=size, metavar="BYTES",
        default_text="25% of free memory over the local ranks; on a GPU what --gpu-memory-utilization leaves",
        help="KV cache per rank, e.g. 512M or 2G",
    )  # fmt: skip
    gpu_memory_utilization: float | None = flag(
        MEMORY, "--gpu-memory-utilization", read=_SHARE, metavar="SHARE", default_text="0.9 on a GPU",
        help="on a GPU: share of its free memory for weights and KV cache; on CPU: share of free memory for the KV cache; "
        "above 0 and at most 1",
    )  # fmt: skip
    enable_prefix_caching: bool = switch(
        MEMORY, "--enable-prefix-caching", off=["--no-enable-prefix-caching"], default=True,
        help="the default", off_help="do not reuse the KV cache of equal prefixes",
    )  # fmt: skip
    mamba_cache_mode: str | None = flag(
        MEMORY, "--mamba-cache-mode", read=one_of("none", "align"), metavar="{none,align}", default=None,
        default_text="align, where there are recurrent layers",
        help="of recurrent layers: align keeps states at the ends of blocks, from which requests with equal prefixes go on; "
        "none keeps none, and such requests run their whole prompts",
    )  # fmt: skip

    log: LogOptions = field(default=LogOptions())
    # A cluster key that `wideep serve` makes for the processes of one start; no flag sets it, and no command line shows it.
    own_cluster_key: str = field(default="", repr=False)

    @property
    def cluster_key(self) -> bytes | None:
        """The secret of front and ranks; None: there is none."""
        if self.cluster_key_file is None:
            return self.own_cluster_key.encode() or None
        return read_cluster_key(Path(self.cluster_key_file))

    @property
    def speculative(self) -> SpeculativeConfig | None:
        """How tokens are drafted; None: they are not."""
        given = self.speculative_config
        return parse_speculative_config(given) if given else None

    @property
    def needs_key(self) -> bool:
        """Whether requests must carry an API key."""
        return bool(self.api_keys) or self.http.api_key_file is not None


CONFIG_FILE = Option(
    "config", (),
    Flag(
        group=MODEL, names=("--config",), read=text, default=None, metavar="FILE",
        help="read options of a YAML file, as vLLM's: `max-model-len: 4096`; what the command line says goes before it",
    ),
)  # fmt: skip
OPTIONS = (*options_of(Options), CONFIG_FILE)
