"""Flags of `vllm serve` that differ from WideEP's, as of vLLM 0.33, and older ones that guides still mention.

`flags` explains the three declarations. Flags with the same name and meaning are in `table`.
"""

import json
from typing import Any

from server.options.flag import OptionsError
from server.options.foreign.flags import (
    DRAFTS,
    GENERATES,
    GRAPHS,
    IMAGES,
    IMAGES_ONLY,
    KERNELS,
    LORA,
    LORA_LAYOUTS,
    MEMORY,
    NO_HALVES,
    NO_SLEEP,
    PACE,
    SLEEPS,
    TIERS,
    Fits,
    ForeignFlag,
    Said,
    alias,
    ignored,
    of,
    rejected,
)

_TRANSFER_ROLES = {"kv_producer": "prefill", "kv_consumer": "decode"}
# Connectors between engines. Others keep blocks, which WideEP's offloading does.
_TRANSFERS = {
    *("NixlConnector", "NixlPullConnector", "NixlPushConnector", "MooncakeConnector", "MoRIIOConnector", "P2pNcclConnector"),
}  # fmt: skip
# Settings of the connection between two engines. The front connects pools.
_OF_CONNECTION = {
    *("engine_id", "kv_buffer_device", "kv_buffer_size", "kv_rank", "kv_parallel_size", "kv_ip", "kv_port"),
}  # fmt: skip


def _role_of_transfer(given: Any) -> str:
    """Return the role of a pool with this --kv-transfer-config, as JSON or a mapping."""
    try:
        config = json.loads(given) if isinstance(given, str) else given
    except ValueError as error:
        raise OptionsError(f"it is not JSON ({error})") from error
    if not isinstance(config, dict):
        raise OptionsError("it must be a JSON object")
    role, connector = config.get("kv_role"), config.get("kv_connector")
    if connector not in _TRANSFERS:
        raise OptionsError(
            f"kv_connector is {connector!r}, which does not connect a prefill to a decode engine ({', '.join(sorted(_TRANSFERS))} "
            f"do); {TIERS}"
        )
    if role not in _TRANSFER_ROLES:
        raise OptionsError(
            f"kv_role is {role!r}, which leaves the part to a proxy; give the part of each request that this pool runs: --role prefill "
            "or --role decode"
        )
    if (policy := config.get("kv_load_failure_policy", "recompute")) != "recompute":
        raise OptionsError(f"kv_load_failure_policy is {policy!r}; blocks that fail are always recomputed")
    known = {"kv_connector", "kv_role", "kv_load_failure_policy", *_OF_CONNECTION}
    if unknown := sorted(config.keys() - known):
        raise OptionsError(
            f"{', '.join(unknown)}: the transfer between pools has no such setting; leave it out"
        )
    return _TRANSFER_ROLES[role]


_NODES = (
    "on several nodes, start the ranks with torchrun on each node: `torchrun --nnodes N --nproc-per-node GPUS ... "
    "--no-python wideep worker MODEL` (docs/nodes.md)"
)
_RANKS = (
    "attention runs data-parallel and experts are spread over all ranks: use --data-parallel-size {given}"
)
_ROUTES = "every front routes requests to all ranks; --fronts per-node serves HTTP on every node (docs/fronts.md); leave it out"
_OWN_PARSERS = "third-party code is not loaded; "


def on_one_node(said: Said) -> bool:
    """Return whether the given flags describe a single node."""
    nodes, here = str(said.get("--nnodes", 1)), said.get("--data-parallel-size-local")
    return nodes == "1" and (here is None or _is_whole(here, said))


def _is_whole(given: Any, said: Said) -> bool:
    return str(given) == str(said.get("data_parallel_size", given))


def is_size_of_one_group(given: Any, said: Said) -> bool:
    """Return whether a tensor-parallel size is 1 or, in SGLang's count with data-parallel attention, the number of all ranks."""
    ranks = said.get("data_parallel_size") if said.get("--enable-dp-attention") else 1
    return str(given) in ("1", str(ranks))


def _names_our_backend(given: Any, _said: Said) -> bool:
    try:
        config = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        return False
    return isinstance(config, dict) and config.get("backend", "auto") in ("auto", "guidance")


_MODEL = (
    *ignored(
        "code from a checkpoint is never run; startup rejects a model whose type the installed transformers "
        "does not know (`wideep models` lists the types)",
        switches="--trust-remote-code",
    ),
    *ignored("code from a checkpoint is never run", values="--code-revision"),
    *rejected(
        "--revision applies to the tokenizer too; for another one, give a folder with --tokenizer",
        values="--tokenizer-revision",
    ),
    *rejected("config.json is read from MODEL; change fields with --hf-overrides", values="--hf-config-path"),
    *rejected("use --hf-overrides '{\"rope_scaling\": {...}}'", values="--rope-scaling --rope-theta"),
    *rejected(
        "other users of the machine can read a command line; give the token in the environment variable HF_TOKEN", values="--hf-token"
    ),
    *ignored(
        "config.json is in transformers' format", fits=of("auto", "hf"),
        otherwise="the model needs a config.json in transformers' format; use auto", values="--config-format",
    ),
    *ignored(
        "models use the code of transformers", fits=of("auto", "transformers"),
        otherwise="models use the code of transformers, with WideEP's attention and experts; use transformers, or leave it out",
        values="--model-impl",
    ),
    *ignored(
        "models generate text", fits=of("auto", "generate", "none"), otherwise=GENERATES,
        values="--runner --convert --task",
    ),
    *rejected(GENERATES, values="--pooler-config --io-processor-plugin"),
    *ignored("late-interaction scores are not supported", switches="--enable-flash-late-interaction"),
    *rejected("transformers determines the class from the model's type; leave it out", values="--model-class-overrides"),
    *ignored(
        "each rank reads its own share of the safetensors files",
        values="--safetensors-load-strategy --safetensors-prefetch-num-threads --safetensors-prefetch-block-size "
        "--model-loader-extra-config --pt-load-map-location --max-parallel-loading-workers",
        lists="--ignore-patterns",
        switches="--use-tqdm-on-load --enable-ep-weight-filter",
    ),
    *rejected(
        "the quantisation of a checkpoint is read from its config; to quantise on load, use --quantization int8 or int4",
        values="--quantization-config",
    ),
    *ignored("docs/quantised.md lists the supported formats", switches="--allow-deprecated-quantization"),
    *rejected("a sliding window is part of the model; shorten the context with --max-model-len", switches="--disable-sliding-window"),
    *rejected("text is always served, and prompts of token ids are also accepted; leave it out", switches="--skip-tokenizer-init"),
    *rejected("prompts are text or token ids; leave it out", switches="--enable-prompt-embeds"),
    *rejected(LORA, switches="--enable-lora-bias --enable-tower-connector-lora",
        values="--default-mm-loras --max-lora-cls-labels --lora-extra-vocab-size"),
    *ignored(
        LORA_LAYOUTS, switches="--enable-mixed-moe-lora-format --enable-moe-shared-loras --fully-sharded-loras --specialize-active-lora",
    ),
)  # fmt: skip
_MEDIA = (
    *ignored(
        IMAGES, switches="--skip-mm-profiling --disable-chunked-mm-input --mm-device-do-normalize "
        "--disable-mm-preprocessor-cache --trust-request-mm-kwargs",
        values="--mm-processor-cache-type --mm-hasher-algorithm --mm-shm-cache-max-object-size-mb --mm-encoder-tp-mode "
        "--mm-encoder-attn-backend --mm-encoder-attn-dtype --mm-tensor-ipc --mm-processor-device --mm-ipc-gpu-memory-gb",
    ),
    *rejected(
        IMAGES_ONLY, switches="--enable-mm-embeds --mm-encoder-only --interleave-mm-strings",
        values="--media-io-kwargs --video-pruning-rate --video-pruning-method "
        "--mm-encoder-fp8-scale-path --mm-encoder-fp8-scale-save-path --mm-encoder-fp8-scale-save-margin "
        "--ec-transfer-config --ec-manager-config",
    ),
)  # fmt: skip
_PARALLEL = (
    *ignored(
        "every rank is one process with all attention weights", fits=Fits("1", is_size_of_one_group), otherwise=_RANKS,
        values="--tensor-parallel-size/-tp/--tp-size/--tp",
    ),
    *ignored(
        "a rank has all layers", fits=of(1), otherwise="layers are not split over ranks, but experts are: use "
        "--data-parallel-size {given}",
        values="--pipeline-parallel-size/-pp/--pp-size/--pp",
    ),
    *ignored(
        "a request's context is on one rank", fits=of(1), otherwise="a request's context is on one rank; use "
        "--data-parallel-size with the number of GPUs",
        values="--decode-context-parallel-size/-dcp/--dcp-size --prefill-context-parallel-size/-pcp "
        "--dcp-kv-cache-interleave-size --cp-kv-cache-interleave-size",
    ),
    *rejected("a request's context is on one rank; leave it out", values="--dcp-comm-backend", switches="--dcp-q-replicate"),
    *ignored(
        "all ranks are on this node", fits=Fits("the number of all ranks", _is_whole), otherwise=_NODES, values="--data-parallel-size-local/-dpl"
    ),
    *ignored("all ranks are on this node", fits=of(1), otherwise=_NODES, values="--nnodes/-n"),
    *ignored("this is the only node", fits=of(0), otherwise=_NODES, values="--node-rank/-r --data-parallel-start-rank/-dpr"),
    *ignored(
        "ranks on one node need no address",
        fits=Fits("any value on one node", lambda _given, said: on_one_node(said)), otherwise=_NODES,
        values="--master-addr --master-port --data-parallel-address/-dpa --data-parallel-rpc-port/-dpp "
        "--dist-init-addr/--nccl-init-addr --nccl-port",
    ),
    *ignored(
        "every rank is a separate process", fits=of("mp", "uni"), otherwise=f"Ray is not used; {_NODES}",
        values="--data-parallel-backend/-dpb --distributed-executor-backend",
    ),
    *rejected(f"only the node of the rendezvous endpoint serves HTTP, unless --fronts is per-node; {_NODES}", switches="--headless"),
    *rejected(
        _ROUTES, switches="--data-parallel-hybrid-lb/-dph --data-parallel-external-lb/-dpe "
        "--data-parallel-multi-port-external-lb/-dpm",
        values="--data-parallel-rank/-dpn --data-parallel-supervisor-port --dp-supervisor-probe-interval-s "
        "--dp-supervisor-probe-timeout-s --dp-supervisor-probe-failure-threshold",
    ),
    *ignored("each front tokenizes for its own clients", values="--renderer-num-workers"),
    *ignored("HTTP always has a separate process", switches="--disable-frontend-multiprocessing"),
    *ignored(
        "experts are always spread over the ranks", fits=of(True), switches="--enable-expert-parallel/-ep",
        otherwise="experts are always spread over the ranks; one rank, --data-parallel-size 1, holds them all",
    ),
    *ignored("ranks synchronise in every step", values="--dp-sync-interval", switches="--disable-nccl-for-dp-synchronization"),
    *ignored("ranks do not reduce partial results", switches="--disable-custom-all-reduce --enable-shm-tensor-arena"),
    *rejected(
        "attention runs data-parallel and is not split between ranks; leave it out",
        switches="--enable-hc-sp --enable-batch-sharded-sampling",
    ),
    *ignored(
        "experts are placed in order at first", fits=of("linear"), values="--expert-placement-strategy",
        otherwise="write a placement with `wideep experts plan ... --out FILE` and give it as --expert-placement FILE",
    ),
    alias("--num-redundant-experts/--ep-num-redundant-experts", "--eplb-config", "num_redundant_experts"),
    alias("--eplb-window-size", "--eplb-config", "window_size"),
    alias("--eplb-step-interval/--eplb-rebalance-num-iterations", "--eplb-config", "step_interval"),
    alias("--eplb-log-balancedness", "--eplb-config", "log_balancedness", takes="nothing"),
    *ignored("lost ranks are restarted without a flag (docs/faults.md)", switches="--enable-fault-tolerance"),
    *ignored("POST /scale_elastic_ep needs no flag, and works on CPUs without pools (docs/resize.md)", switches="--enable-elastic-ep"),
    *ignored("no buffer depends on the largest number of ranks (docs/resize.md)", values="--elastic-ep-max-dp-size"),
    *rejected(
        "use --heartbeat-timeout-seconds, --max-rank-restarts and --rank-recovery-timeout (docs/faults.md)",
        values="--fault-tolerance-config --watchdog-config",
    ),
    *rejected(
        NO_HALVES,
        switches="--enable-dbo", values="--ubatch-size --dbo-decode-token-threshold --dbo-prefill-token-threshold",
    ),
    *rejected("one timeout applies to all: --distributed-timeout-seconds", values="--cpu-distributed-timeout-seconds"),
    *rejected("start the service under numactl, and set --threads", switches="--numa-bind", lists="--numa-bind-nodes --numa-bind-cpus"),
    *rejected("choose GPUs with the environment variable CUDA_VISIBLE_DEVICES", values="--device-ids"),
    *ignored(
        "ranks run WideEP's own worker", fits=of("auto"), values="--worker-cls",
        otherwise="third-party code is not loaded into ranks; leave it out",
    ),
    *rejected("third-party code is not loaded into ranks; leave it out", values="--worker-extension-cls --scheduler-cls --additional-config"),
)  # fmt: skip
_CACHE = (
    *ignored("a block has 16 tokens", fits=of(16), otherwise="a block has 16 tokens on every device; leave it out", values="--block-size"),
    *rejected("all layers store their keys and values in one format; leave it out", lists="--kv-cache-dtype-skip-layers"),
    *ignored("every token and head has its own scale", switches="--calculate-kv-scales"),
    *rejected("the KV cache is sized in bytes: --kv-cache-memory", values="--num-gpu-blocks-override"),
    *ignored("responses do not depend on the hash of prefixes", values="--prefix-caching-hash-algo"),
    *rejected(
        "use --mamba-cache-mode align (states at the ends of blocks) or none",
        values="--prefix-cache-retention-interval --mamba-block-size --prefix-match-unit --replayssm-buffer-len",
        switches="--enable-mamba-shared-prefix-checkpoint --use-replayssm --swa-bounded-replay --kv-sharing-fast-prefill",
    ),
    *ignored(
        "states have the type in which the model computes them", fits=of("auto"), values="--mamba-cache-dtype --mamba-ssm-cache-dtype",
    ),
    *rejected(
        "states have the type in which the model computes them; leave it out", switches="--enable-mamba-cache-stochastic-rounding",
        values="--mamba-cache-philox-rounds",
    ),
    *ignored("layers of every kind share one cache", switches="--disable-hybrid-kv-cache-manager --use-v2-block-manager"),
    *ignored(
        "weights are not moved to host memory", fits=of(0, 0.0, "0.0"), otherwise=MEMORY,
        values="--cpu-offload-gb --offload-group-size",
    ),
    *ignored(
        "--kv-offloading-size uses WideEP's own offloading", fits=of("native"), otherwise=f"other backends are not supported; {TIERS}",
        values="--kv-offloading-backend",
    ),
    *ignored("preempted requests are recomputed, not swapped", values="--swap-space --preemption-mode"),
    *ignored("POST /sleep is always available", fits=SLEEPS, otherwise=NO_SLEEP, switches="--enable-sleep-mode"),
    *rejected(
        "sleep mode has no such setting (docs/sleep.md); leave it out", values="--sleep-mode-backend", lists="--sleep-preserve-parameter-names",
        switches="--sleep-mode-offload-cudagraph --enable-cumem-allocator --enable-nccl-comm-suspend",
    ),
    *rejected(
        MEMORY, values="--offload-backend --offload-num-in-group --offload-prefetch-step",
        lists="--cpu-offload-params --offload-params",
    ),
    alias(
        "--kv-transfer-config", "--role", means=_role_of_transfer,
        spelled={f'"kv_role": "{theirs}"': ours for theirs, ours in _TRANSFER_ROLES.items()},
    ),
    *rejected("changes of the KV cache are not published; leave it out", values="--kv-events-config"),
    *rejected(
        "POST /update_weights needs no flag (docs/weights.md); leave it out", values="--weight-transfer-config"
    ),
)  # fmt: skip
_STEPS = (
    *ignored(
        "prompts always run in chunks", fits=of(True), otherwise="prompts always run in chunks; for chunks the length "
        "of your prompts, raise --max-num-batched-tokens", switches="--enable-chunked-prefill",
    ),
    *ignored("steps are always planned ahead", switches="--async-scheduling"),
    *rejected("use --max-num-batched-tokens, the limit for tokens in a step", values="--max-num-scheduled-tokens"),
    *rejected("use --max-num-seqs, the limit for running requests of a rank", values="--max-num-active-seqs"),
    *rejected("use --max-num-queued-reqs, which limits the queue in requests", values="--max-num-queued-tokens"),
    *ignored(
        "prompts share steps with decodes", fits=of(0, 1, 0.0, "0.0"), otherwise=PACE,
        values="--long-prefill-token-threshold --prefill-schedule-interval --watermark --num-scheduler-steps "
        "--num-lookahead-slots --max-num-partial-prefills --max-long-partial-prefills --scheduler-delay-factor",
    ),
    *rejected(PACE, switches="--long-prefill-token-threshold-adaptive"),
    *ignored("a request is admitted when its blocks fit", switches="--scheduler-reserve-full-isl"),
    *ignored("every token is sent at once", fits=of(1), values="--stream-interval"),
    *ignored(
        "the device determines the kernels", fits=of("auto"), otherwise=KERNELS,
        values="--attention-backend --mamba-backend --moe-backend --linear-backend --sparse-indexer-topk-backend "
        "--gdn-prefill-backend --kda-prefill-backend --kda-decode-backend",
    ),
    *rejected(KERNELS, values="--mamba-ssu-algorithm --ir-op-priority --kernel-config --attention-config/-ac", switches="--monokernel"),
    *ignored("there is no such kernel", switches="--enable-flashinfer-autotune --disable-cascade-attn"),
    *rejected(GRAPHS, values="--compilation-config/-cc --optimization-level/-O --max-cudagraph-capture-size --max-seq-len-to-capture", lists="--cudagraph-capture-sizes --cuda-graph-sizes"),
    *ignored("one policy balances latency and throughput; --target-itl-ms adjusts it", fits=of("balanced"), otherwise=PACE, values="--performance-mode"),
    alias("--spec-method", "--speculative-config", "method"),
    alias("--spec-tokens/--num-speculative-tokens", "--speculative-config", "num_speculative_tokens"),
    *rejected(
        DRAFTS,
        values="--spec-model/--speculative-model",
    ),
    *rejected(
        "only autoregressive text without watermarks is supported; leave it out",
        values="--diffusion-config/-dc --watermark-config --engram-config",
    ),
)  # fmt: skip
_ANSWERS = (
    *ignored("automatic tool choice is always on", switches="--enable-auto-tool-choice"),
    *ignored("the chat template or --reasoning-parser determines the reasoning format", switches="--enable-reasoning"),
    *ignored("usage always includes cached tokens", switches="--enable-prompt-tokens-details"),
    *ignored("responses always have a request id header", switches="--enable-request-id-headers"),
    *ignored("GET /load is always available", switches="--enable-server-load-tracking"),
    *ignored("GET /tokenizer_info is always available", switches="--enable-tokenizer-info-endpoint"),
    *ignored(
        "log-probabilities are those of the raw logits", fits=of("raw_logprobs"),
        values="--logprobs-mode",
    ),
    *rejected(_OWN_PARSERS + "choose a parser with --tool-call-parser", values="--tool-parser-plugin"),
    *rejected(_OWN_PARSERS + "choose a parser with --reasoning-parser", values="--reasoning-parser-plugin"),
    *rejected(_OWN_PARSERS + "requests may use logit_bias, allowed_token_ids and bad_words", lists="--logits-processors"),
    *rejected(_OWN_PARSERS + "use a proxy, and give its path as --root-path", values="--middleware"),
    *rejected("tool calls are returned to the client, which runs them; leave it out", values="--tool-server"),
    *rejected("a call follows its schema if the request sets strict; leave it out", values="--tool-strict-level"),
    *rejected("requests may set stream_options: {\"include_usage\": true}", switches="--enable-force-include-usage"),
    *rejected("requests may set return_tokens_as_token_ids", switches="--return-tokens-as-token-ids"),
    *rejected("requests may set chat_template_kwargs", values="--default-chat-template-kwargs"),
    *rejected("requests may set reasoning_effort, which the chat template reads", values="--reasoning-effort-map --anthropic-disabled-thinking-effort --reasoning-config"),
    *rejected("the template is the checkpoint's or the file of --chat-template", switches="--trust-request-chat-template"),
    *ignored("the template determines the format", fits=of("auto"), otherwise="the chat template determines the format; leave it out", values="--chat-template-content-format"),
    *ignored("the role is always assistant", fits=of("assistant"), values="--response-role"),
    *rejected("the model sees the tools in the request; send a request without tools", switches="--exclude-tools-when-tool-choice-none"),
    *ignored(
        "llguidance compiles structures", fits=Fits("no backend other than auto or guidance", _names_our_backend), otherwise="llguidance compiles structures "
        "(docs/structured_output.md); leave it out", values="--structured-outputs-config",
    ),
    *ignored(
        "llguidance compiles structures", fits=of("auto", "guidance"), otherwise="llguidance compiles structures "
        "(docs/structured_output.md); leave it out", values="--guided-decoding-backend",
    ),
    *rejected(
        "the chosen experts are counted but not returned with responses; use `wideep experts load` or `wideep experts record`",
        switches="--enable-return-routed-experts", values="--aux-output-config",
    ),
    *rejected("responses contain only tokens and log-probabilities; leave it out", switches="--return-sampling-mask --enable-trace-replay"),
    *ignored("tokens are sampled without Gumbel noise (docs/sampling.md)", switches="--use-fp64-gumbel"),
    *ignored("an idle stream sends a comment every 15 s", fits=of(15), values="--sse-keep-alive-interval"),
    *rejected("responses have no system fingerprint; leave it out", values="--fingerprint-mode --fingerprint-value"),
    *rejected("Cohere's endpoints are not supported; use /v1/chat/completions", switches="--cohere-is-reasoning-model", values="--cohere-format"),
    *rejected("one endpoint accepts text and token ids; leave it out", switches="--tokens-only --enable-scale-out"),
)  # fmt: skip
_SERVER = (
    *rejected("only HTTP is supported; leave it out", switches="--grpc", values="--grpc-port"),
    *rejected(
        "client certificates are not supported, and the certificate is read once; use a proxy (--root-path)",
        values="--ssl-ca-certs --ssl-ciphers", switches="--enable-ssl-refresh",
    ),
    *ignored("client certificates are not requested", fits=of(0), otherwise="client certificates are not supported; use a proxy (--root-path)", values="--ssl-cert-reqs"),
    *rejected("use --max-request-bytes, the limit for the size of a request", values="--h11-max-incomplete-event-size --h11-max-header-count"),
    *ignored("/docs needs no network", switches="--enable-offline-docs"),
    *rejected("use a proxy that hides /docs and /openapi.json", switches="--disable-fastapi-docs"),
    *rejected("use --log-level, --log-format and --disable-access-log", values="--logging-config --log-config-file"),
    *rejected("--log-requests does not shorten prompts; leave it out", values="--max-log-len"),
    *rejected("responses are not logged; --log-requests logs prompts and parameters", switches="--enable-log-outputs"),
    *ignored("responses are not logged", switches="--enable-log-deltas"),
    *ignored("internal errors are always logged with their stack", switches="--log-error-stack"),
    *ignored("one log covers all ranks", switches="--aggregate-engine-logging"),
    *ignored("GET /metrics has no hidden metrics", values="--show-hidden-metrics-for-version"),
    *rejected(
        "GET /metrics and /dashboard show all measurements (docs/operations.md)",
        values="--kv-cache-metrics-sample --custom-histogram-buckets --jit-monitor-mode",
        switches="--kv-cache-metrics --cudagraph-metrics --enable-mfu-metrics --enable-logging-iteration-details "
        "--jit-monitor-verbose",
    ),
    *ignored("requests have no such metrics", fits=of("none"), otherwise="GET /metrics has the measurements of drafts; leave it out", values="--per-request-spec-decode-metrics"),
    *rejected("use --otlp-traces-endpoint for spans of requests; steps are not traced", lists="--collect-detailed-traces"),
    *rejected(
        "external profiling of steps is not supported; `wideep experts load` shows what ranks wait for (docs/expert_load.md)",
        switches="--enable-layerwise-nvtx-tracing --ray-workers-use-nsight", values="--profiler-config",
    ),
    *ignored("vLLM's environment variables are not read", switches="--fail-on-environ-validation"),
)  # fmt: skip

VLLM_FLAGS: tuple[ForeignFlag, ...] = (
    alias("--device-memory-utilization", "--gpu-memory-utilization"),
    *_MODEL, *_MEDIA, *_PARALLEL, *_CACHE, *_STEPS, *_ANSWERS, *_SERVER,
)  # fmt: skip
SAME_AS_VLLM = (
    "--model --tokenizer --revision --download-dir --load-format --dtype --quantization -q --seed --max-model-len --max-logprobs "
    "--hf-overrides --generation-config --override-generation-config --config --served-model-name --host --port --uds --api-key "
    "--ssl-certfile --ssl-keyfile --root-path --allowed-origins --allowed-methods --allowed-headers --allow-credentials "
    "--shutdown-timeout --chat-template --tokenizer-mode --tool-call-parser --reasoning-parser --enable-per-request-metrics "
    "--api-server-count -asc --data-parallel-size -dp --enable-eplb --eplb-config --all2all-backend --distributed-timeout-seconds "
    "--gpu-memory-utilization --kv-cache-memory-bytes --kv-cache-dtype --kv-offloading-size --enable-prefix-caching --mamba-cache-mode --max-num-seqs "
    "--max-num-batched-tokens --max-num-queued-reqs --scheduling-policy --enforce-eager --log-level --uvicorn-log-level --enable-log-requests "
    "--disable-uvicorn-access-log --disable-access-log-for-endpoints --otlp-traces-endpoint --disable-log-stats "
    "--speculative-config -sc --enable-lora --lora-modules --max-loras --max-lora-rank --max-cpu-loras --lora-dtype --lora-target-modules --allowed-media-domains --allowed-local-media-path --limit-mm-per-prompt --mm-processor-cache-gb --mm-processor-kwargs "
    "--language-model-only"
)
DIFFERS_FROM_VLLM = {  # flag of the same name -> the difference
    "--load-format": "auto and the names of readers of safetensors files are the same; dummy draws random weights; other formats are not "
    "read",
    "--lora-dtype": "auto, float32 or bfloat16; ranks on GPUs store float32",
    "--limit-mm-per-prompt": "the default is 16 images; video and audio are not supported",
    "--mm-processor-cache-gb": "the default is 1; the cache holds the rows of images, in the front's memory",
    "--mm-processor-kwargs": "only settings of the size of images; they hold for all requests",
    "--host": "the default is 127.0.0.1, this machine only",
    "--data-parallel-size": "ranks on this node, each with all attention weights and a share of the experts",
    "--gpu-memory-utilization": "the share of the memory that is free at startup",
    "--eplb-config": "has additional keys (docs/rebalancing.md)",
    "--quantization": "int8 and int4 quantise on load; naming the checkpoint's own format has no effect",
    "--seed": "requests without a seed get one from it, in order of arrival; by default their seeds are random",
    "--kv-cache-memory-bytes": "both 2g and 2G are 2 GiB",
    "--kv-offloading-size": "a plain number counts GiB, as in vLLM; 20G is accepted too; all ranks of a node share it",
    "--kv-cache-dtype": "auto, fp8 (e4m3) and int8, with a scale per token and head",
    "--max-num-batched-tokens": "counts the tokens of one rank's step",
    "--enable-log-requests": "does not shorten prompts",
    "--max-num-queued-reqs": "a request above the limit gets 429 with Retry-After (503 in vLLM)",
}
