"""What becomes of the flags of `vllm serve` that are not also ours, as of vLLM 0.33; older ones that guides still name, too.

`foreign` says what the three declarations mean. A flag that ours means the same as, under the same name, is in `table`.
"""

import json
from typing import Any

from server.options.foreign import (
    DRAFTS,
    GENERATES,
    GRAPHS,
    KERNELS,
    LORA,
    MEMORY,
    NO_HALVES,
    PACE,
    TEXT,
    TEXT_ONLY,
    Fits,
    ForeignFlag,
    Said,
    alias,
    harmless,
    of,
    refused,
)

_NODES = (
    "ranks on several nodes are started by torchrun on each of them, `torchrun --nnodes N --nproc-per-node GPUS ... "
    "--no-python wideep worker MODEL` (README.md, docs/faults.md)"
)
_RANKS = (
    "attention runs data-parallel and experts are spread over all ranks: say --data-parallel-size {given}"
)
_ROUTES = "one endpoint stands before all ranks and gives each request to one; leave it out"
_OWN_PARSERS = "code of others is not loaded; "


def on_one_node(said: Said) -> bool:
    """Whether nothing that was said speaks of a second node."""
    nodes, here = str(said.get("--nnodes", 1)), said.get("--data-parallel-size-local")
    return nodes == "1" and (here is None or _is_whole(here, said))


def _is_whole(given: Any, said: Said) -> bool:
    """Whether so many local ranks are all ranks."""
    return str(given) == str(said.get("data_parallel_size", given))


def is_size_of_one_group(given: Any, said: Said) -> bool:
    """Whether a tensor-parallel size is 1 or, as SGLang counts with data-parallel attention, that of all ranks."""
    ranks = said.get("data_parallel_size") if said.get("--enable-dp-attention") else 1
    return str(given) in ("1", str(ranks))


def _names_our_backend(given: Any, _said: Said) -> bool:
    try:
        config = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        return False
    return isinstance(config, dict) and config.get("backend", "auto") in ("auto", "guidance")


_MODEL = (
    *harmless(
        "code that comes with a checkpoint is never run; the start rejects a model whose type the installed transformers "
        "does not know (`wideep models` lists the types)",
        switches="--trust-remote-code",
    ),
    *harmless("no code of a checkpoint is run", values="--code-revision"),
    *refused(
        "--revision is that of the tokenizer too; give another one as a folder with --tokenizer",
        values="--tokenizer-revision",
    ),
    *refused("config.json is MODEL's; say what differs with --hf-overrides", values="--hf-config-path"),
    *refused("say it as --hf-overrides '{\"rope_scaling\": {...}}'", values="--rope-scaling --rope-theta"),
    *refused(
        "others on the machine can read a command line: give the token in the variable HF_TOKEN", values="--hf-token"
    ),
    *harmless(
        "config.json is transformers' form", fits=of("auto", "hf"),
        otherwise="the model needs a config.json in transformers' form; say auto", values="--config-format",
    ),
    *harmless(
        "model code is transformers' own", fits=of("auto", "transformers"),
        otherwise="model code is transformers' own, with WideEP's attention and experts; say transformers, or leave it out",
        values="--model-impl",
    ),
    *harmless(
        "text is generated", fits=of("auto", "generate", "none"), otherwise=GENERATES,
        values="--runner --convert --task",
    ),
    *refused(GENERATES, values="--pooler-config --io-processor-plugin"),
    *harmless("there are no scores of late interaction", switches="--enable-flash-late-interaction"),
    *refused("the class is the one that transformers has for the model's type; leave it out", values="--model-class-overrides"),
    *harmless(
        "each rank reads its own share of the safetensors files",
        fits=of("auto", "hf", "safetensors", "fastsafetensors", "runai_streamer", "instanttensor"),
        otherwise="weights are read from safetensors files; save the model as such (save_pretrained in transformers), and "
        "say auto",
        values="--load-format",
    ),
    *harmless(
        "each rank reads its own share of the safetensors files",
        values="--safetensors-load-strategy --safetensors-prefetch-num-threads --safetensors-prefetch-block-size "
        "--model-loader-extra-config --pt-load-map-location --max-parallel-loading-workers",
        lists="--ignore-patterns",
        switches="--use-tqdm-on-load --enable-ep-weight-filter",
    ),
    *refused(
        "how a checkpoint is quantised is read from its own config; to quantise on load say --quantization int8 or int4",
        values="--quantization-config",
    ),
    *harmless("what is read is listed in docs/quantised.md", switches="--allow-deprecated-quantization"),
    *refused("a model's sliding window is part of it; shorten the context with --max-model-len", switches="--disable-sliding-window"),
    *refused("text is always served; prompts of token ids are taken beside it: leave it out", switches="--skip-tokenizer-init"),
    *refused("prompts are text or token ids; leave it out", switches="--enable-prompt-embeds"),
    *refused(LORA, switches="--enable-lora --enable-lora-bias --enable-tower-connector-lora --fully-sharded-loras "
        "--specialize-active-lora --enable-mixed-moe-lora-format --enable-moe-shared-loras",
        values="--max-loras --max-lora-rank --lora-dtype --max-cpu-loras --default-mm-loras --max-lora-cls-labels "
        "--lora-extra-vocab-size",
        lists="--lora-modules --lora-target-modules"),
)  # fmt: skip
_MEDIA = (
    *harmless(
        TEXT, switches="--language-model-only --skip-mm-profiling --disable-chunked-mm-input --mm-device-do-normalize "
        "--disable-mm-preprocessor-cache --trust-request-mm-kwargs",
        values="--limit-mm-per-prompt --mm-processor-kwargs --mm-processor-cache-gb --mm-processor-cache-type "
        "--mm-hasher-algorithm --mm-shm-cache-max-object-size-mb --mm-encoder-tp-mode --mm-encoder-attn-backend "
        "--mm-encoder-attn-dtype --mm-tensor-ipc --mm-processor-device --mm-ipc-gpu-memory-gb --media-io-kwargs",
    ),
    *refused(
        TEXT_ONLY, switches="--enable-mm-embeds --mm-encoder-only --interleave-mm-strings",
        values="--allowed-local-media-path --video-pruning-rate --video-pruning-method --mm-encoder-fp8-scale-path "
        "--mm-encoder-fp8-scale-save-path --mm-encoder-fp8-scale-save-margin --ec-transfer-config --ec-manager-config",
        lists="--allowed-media-domains",
    ),
)  # fmt: skip
_PARALLEL = (
    *harmless(
        "every rank is one process with all of attention", fits=Fits("1, or beside SGLang's --enable-dp-attention the number of ranks", is_size_of_one_group), otherwise=_RANKS,
        values="--tensor-parallel-size/-tp/--tp-size/--tp",
    ),
    *harmless(
        "a rank has all layers", fits=of(1), otherwise="layers are not split over ranks, experts are: say "
        "--data-parallel-size {given}",
        values="--pipeline-parallel-size/-pp/--pp-size/--pp",
    ),
    *harmless(
        "a request's context is on one rank", fits=of(1), otherwise="a request's context is on one rank; say "
        "--data-parallel-size with the number of GPUs",
        values="--decode-context-parallel-size/-dcp/--dcp-size --prefill-context-parallel-size/-pcp "
        "--dcp-kv-cache-interleave-size --cp-kv-cache-interleave-size",
    ),
    *refused("a request's context is on one rank; leave it out", values="--dcp-comm-backend", switches="--dcp-q-replicate"),
    *harmless(
        "all ranks are on this node", fits=Fits("the number of all ranks", _is_whole), otherwise=_NODES, values="--data-parallel-size-local/-dpl"
    ),
    *harmless("all ranks are on this node", fits=of(1), otherwise=_NODES, values="--nnodes/-n"),
    *harmless("this is the only node", fits=of(0), otherwise=_NODES, values="--node-rank/-r --data-parallel-start-rank/-dpr"),
    *harmless(
        "the ranks of one node find each other by themselves",
        fits=Fits("any value on one node", lambda _given, said: on_one_node(said)), otherwise=_NODES,
        values="--master-addr --master-port --data-parallel-address/-dpa --data-parallel-rpc-port/-dpp "
        "--dist-init-addr/--nccl-init-addr --nccl-port",
    ),
    *harmless(
        "every rank is a process of its own", fits=of("mp", "uni"), otherwise=f"Ray is not used; {_NODES}",
        values="--data-parallel-backend/-dpb --distributed-executor-backend",
    ),
    *refused(f"HTTP is served on the node of the rendezvous endpoint alone, by itself; {_NODES}", switches="--headless"),
    *refused(
        _ROUTES, switches="--data-parallel-hybrid-lb/-dph --data-parallel-external-lb/-dpe "
        "--data-parallel-multi-port-external-lb/-dpm",
        values="--data-parallel-rank/-dpn --data-parallel-supervisor-port --dp-supervisor-probe-interval-s "
        "--dp-supervisor-probe-timeout-s --dp-supervisor-probe-failure-threshold",
    ),
    *harmless("one process serves HTTP for all ranks", values="--api-server-count/-asc --renderer-num-workers"),
    *harmless("HTTP always has a process of its own", switches="--disable-frontend-multiprocessing"),
    *harmless(
        "experts are always spread over the ranks", fits=of(True), switches="--enable-expert-parallel/-ep",
        otherwise="experts are always spread over the ranks; one rank, --data-parallel-size 1, holds them all",
    ),
    *harmless("ranks meet in every step", values="--dp-sync-interval", switches="--disable-nccl-for-dp-synchronization"),
    *harmless("ranks do not add up partial results", switches="--disable-custom-all-reduce --enable-shm-tensor-arena"),
    *refused(
        "attention runs data-parallel, and nothing of it is shared between ranks; leave it out",
        switches="--enable-hc-sp --enable-batch-sharded-sampling",
    ),
    *harmless(
        "experts begin in order", fits=of("linear"), values="--expert-placement-strategy",
        otherwise="write a placement with `wideep experts plan ... --out FILE` and give it as --expert-placement FILE",
    ),
    alias("--num-redundant-experts/--ep-num-redundant-experts", "--eplb-config", "num_redundant_experts"),
    alias("--eplb-window-size", "--eplb-config", "window_size"),
    alias("--eplb-step-interval/--eplb-rebalance-num-iterations", "--eplb-config", "step_interval"),
    alias("--eplb-log-balancedness", "--eplb-config", "log_balancedness", takes="nothing"),
    *harmless("a rank may leave and come back at any time (docs/faults.md)", switches="--enable-elastic-ep --enable-fault-tolerance"),
    *refused("the number of ranks is --data-parallel-size; one that is lost comes back (docs/faults.md)", values="--elastic-ep-max-dp-size"),
    *refused(
        "say --heartbeat-timeout-seconds, --max-rank-restarts and --rank-recovery-timeout (docs/faults.md)",
        values="--fault-tolerance-config --watchdog-config",
    ),
    *refused(
        NO_HALVES,
        switches="--enable-dbo", values="--ubatch-size --dbo-decode-token-threshold --dbo-prefill-token-threshold",
    ),
    *refused("one time-out holds for all: --distributed-timeout-seconds", values="--cpu-distributed-timeout-seconds"),
    *refused("start it under numactl, and say --threads", switches="--numa-bind", lists="--numa-bind-nodes --numa-bind-cpus"),
    *refused("choose GPUs with the variable CUDA_VISIBLE_DEVICES", values="--device-ids"),
    *harmless(
        "ranks run WideEP's own worker", fits=of("auto"), values="--worker-cls",
        otherwise="code of others is not loaded into ranks; leave it out",
    ),
    *refused("code of others is not loaded into ranks; leave it out", values="--worker-extension-cls --scheduler-cls --additional-config"),
)  # fmt: skip
_CACHE = (
    *harmless("a block has 16 tokens", fits=of(16), otherwise="a block has 16 tokens on every device; leave it out", values="--block-size"),
    *harmless(
        "keys and values are kept in the model's own type", fits=of("auto"),
        otherwise="keys and values are kept in the model's own type; where memory is short say a smaller --max-model-len, or "
        "more with --kv-cache-memory",
        values="--kv-cache-dtype",
    ),
    *refused("keys and values are kept in the model's own type; leave it out", lists="--kv-cache-dtype-skip-layers", switches="--calculate-kv-scales"),
    *refused("the KV cache is sized in bytes: --kv-cache-memory", values="--num-gpu-blocks-override"),
    *harmless("answers do not depend on how prefixes are found", values="--prefix-caching-hash-algo"),
    *refused(
        "say --mamba-cache-mode align (states at the ends of blocks) or none",
        values="--prefix-cache-retention-interval --mamba-block-size --prefix-match-unit --replayssm-buffer-len",
        switches="--enable-mamba-shared-prefix-checkpoint --use-replayssm --swa-bounded-replay --kv-sharing-fast-prefill",
    ),
    *harmless(
        "states are kept as the model computes them", fits=of("auto"), values="--mamba-cache-dtype --mamba-ssm-cache-dtype",
    ),
    *refused(
        "states are kept as the model computes them; leave it out", switches="--enable-mamba-cache-stochastic-rounding",
        values="--mamba-cache-philox-rounds",
    ),
    *harmless("layers of every kind share one cache", switches="--disable-hybrid-kv-cache-manager --use-v2-block-manager"),
    *harmless(
        "nothing is moved to the host's memory", fits=of(0, 0.0, "0.0"), otherwise=MEMORY,
        values="--cpu-offload-gb --offload-group-size --kv-offloading-size",
    ),
    *harmless("requests that must wait are computed again, and nothing is swapped", values="--swap-space --preemption-mode"),
    *refused(
        MEMORY, values="--kv-offloading-backend --offload-backend --offload-num-in-group --offload-prefetch-step "
        "--sleep-mode-backend",
        lists="--cpu-offload-params --offload-params --sleep-preserve-parameter-names",
        switches="--enable-sleep-mode --sleep-mode-offload-cudagraph --enable-cumem-allocator --enable-nccl-comm-suspend",
    ),
    *refused(
        "ranks do both prompts and decodes, and keep their KV caches for themselves; leave it out",
        values="--kv-transfer-config --kv-events-config --weight-transfer-config",
    ),
)  # fmt: skip
_STEPS = (
    *harmless(
        "prompts are always run in chunks", fits=of(True), otherwise="prompts are always run in chunks; make a chunk as long "
        "as your prompts with --max-num-batched-tokens", switches="--enable-chunked-prefill",
    ),
    *harmless("steps are always planned ahead", switches="--async-scheduling"),
    *refused("a step's tokens are bounded by --max-num-batched-tokens", values="--max-num-scheduled-tokens"),
    *refused("the requests that a rank runs at once are bounded by --max-num-seqs", values="--max-num-active-seqs"),
    *refused("what may wait is bounded by --max-num-queued-reqs, in requests", values="--max-num-queued-tokens"),
    *harmless(
        "prompts share steps with decodes", fits=of(0, 1, 0.0, "0.0"), otherwise=PACE,
        values="--long-prefill-token-threshold --prefill-schedule-interval --watermark --num-scheduler-steps "
        "--num-lookahead-slots --max-num-partial-prefills --max-long-partial-prefills --scheduler-delay-factor",
    ),
    *refused(PACE, switches="--long-prefill-token-threshold-adaptive"),
    *harmless("a request is admitted when its blocks fit", switches="--scheduler-reserve-full-isl"),
    *harmless("every token is sent as it comes", fits=of(1), values="--stream-interval"),
    *harmless(
        "the kernels are chosen by the device", fits=of("auto"), otherwise=KERNELS,
        values="--attention-backend --mamba-backend --moe-backend --linear-backend --sparse-indexer-topk-backend "
        "--gdn-prefill-backend --kda-prefill-backend --kda-decode-backend",
    ),
    *refused(KERNELS, values="--mamba-ssu-algorithm --ir-op-priority --kernel-config --attention-config/-ac", switches="--monokernel"),
    *harmless("there is no such kernel to tune or to turn off", switches="--enable-flashinfer-autotune --disable-cascade-attn"),
    *refused(GRAPHS, values="--compilation-config/-cc --optimization-level/-O --max-cudagraph-capture-size --max-seq-len-to-capture", lists="--cudagraph-capture-sizes --cuda-graph-sizes"),
    *harmless("one plan serves short and long waits; --target-itl-ms moves it", fits=of("balanced"), otherwise=PACE, values="--performance-mode"),
    alias("--spec-method", "--speculative-config", "method"),
    alias("--spec-tokens/--num-speculative-tokens", "--speculative-config", "num_speculative_tokens"),
    *refused(
        DRAFTS,
        values="--spec-model/--speculative-model",
    ),
    *refused(
        "only autoregressive text without marks is served; leave it out",
        values="--diffusion-config/-dc --watermark-config --engram-config",
    ),
)  # fmt: skip
_ANSWERS = (
    *harmless("the model may always call tools", switches="--enable-auto-tool-choice"),
    *harmless("reasoning is found by the chat template, or --reasoning-parser", switches="--enable-reasoning"),
    *harmless("usage always tells of cached tokens", switches="--enable-prompt-tokens-details"),
    *harmless("answers always have one", switches="--enable-request-id-headers"),
    *harmless("GET /load is always there", switches="--enable-server-load-tracking"),
    *harmless("GET /tokenizer_info is always there", switches="--enable-tokenizer-info-endpoint"),
    *harmless(
        "log-probabilities are those of the raw logits", fits=of("raw_logprobs"),
        values="--logprobs-mode",
    ),
    *refused(_OWN_PARSERS + "choose one with --tool-call-parser", values="--tool-parser-plugin"),
    *refused(_OWN_PARSERS + "choose one with --reasoning-parser", values="--reasoning-parser-plugin"),
    *refused(_OWN_PARSERS + "requests have logit_bias, allowed_token_ids and bad_words", lists="--logits-processors"),
    *refused(_OWN_PARSERS + "put a proxy in front, and name it with --root-path", values="--middleware"),
    *refused("the model's calls go to the client, which runs them; leave it out", values="--tool-server"),
    *refused("a call is bound to its schema where the request says strict; leave it out", values="--tool-strict-level"),
    *refused("requests have stream_options: {\"include_usage\": true}", switches="--enable-force-include-usage"),
    *refused("requests have return_tokens_as_token_ids", switches="--return-tokens-as-token-ids"),
    *refused("requests have chat_template_kwargs", values="--default-chat-template-kwargs"),
    *refused("requests have reasoning_effort, which the chat template reads", values="--reasoning-effort-map --anthropic-disabled-thinking-effort --reasoning-config"),
    *refused("templates are the checkpoint's, or the file of --chat-template", switches="--trust-request-chat-template"),
    *harmless("the template says which form it takes", fits=of("auto"), otherwise="the chat template says which form it takes; leave it out", values="--chat-template-content-format"),
    *harmless("answers are the assistant's", fits=of("assistant"), values="--response-role"),
    *refused("tools are shown to the model as the request sends them; send none", switches="--exclude-tools-when-tool-choice-none"),
    *harmless(
        "structures are compiled by llguidance", fits=Fits("a backend of auto or guidance alone", _names_our_backend), otherwise="structures are compiled by llguidance "
        "(docs/structured_output.md); leave it out", values="--structured-outputs-config",
    ),
    *harmless(
        "structures are compiled by llguidance", fits=of("auto", "guidance"), otherwise="structures are compiled by "
        "llguidance (docs/structured_output.md); leave it out", values="--guided-decoding-backend",
    ),
    *refused(
        "which experts were chosen is counted, not sent with answers: `wideep experts load`, `wideep experts record`",
        switches="--enable-return-routed-experts", values="--aux-output-config",
    ),
    *refused("answers have tokens and log-probabilities; leave it out", switches="--return-sampling-mask --enable-trace-replay"),
    *harmless("tokens are drawn without Gumbel noise (docs/sampling.md)", switches="--use-fp64-gumbel"),
    *harmless("a silent stream sends a comment every 15 s", fits=of(15), values="--sse-keep-alive-interval"),
    *refused("answers have no fingerprint of the service; leave it out", values="--fingerprint-mode --fingerprint-value"),
    *refused("Cohere's own endpoints are not served; use /v1/chat/completions", switches="--cohere-is-reasoning-model", values="--cohere-format"),
    *refused("one endpoint takes text and token ids; leave it out", switches="--tokens-only --enable-scale-out"),
)  # fmt: skip
_SERVER = (
    *refused("the service speaks HTTP on --port; leave it out", switches="--grpc", values="--grpc-port"),
    *refused(
        "certificates of clients are not asked for, and a certificate is read once; put a proxy in front (--root-path)",
        values="--ssl-ca-certs --ssl-ciphers", switches="--enable-ssl-refresh",
    ),
    *harmless("certificates of clients are not asked for", fits=of(0), otherwise="certificates of clients are not asked for; put a proxy in front (--root-path)", values="--ssl-cert-reqs"),
    *refused("the length of a request is bounded by --max-request-bytes", values="--h11-max-incomplete-event-size --h11-max-header-count"),
    *harmless("/docs needs no network", switches="--enable-offline-docs"),
    *refused("put a proxy in front that hides /docs and /openapi.json", switches="--disable-fastapi-docs"),
    *refused("say --log-level, --log-format and --disable-access-log", values="--logging-config --log-config-file"),
    *refused("--log-requests writes prompts whole; leave it out", values="--max-log-len"),
    *refused("--log-requests writes prompts and parameters; answers are not logged", switches="--enable-log-outputs"),
    *harmless("answers are not logged", switches="--enable-log-deltas"),
    *harmless("an error of the service is always logged whole", switches="--log-error-stack"),
    *harmless("one log tells of all ranks", switches="--aggregate-engine-logging"),
    *harmless("GET /metrics shows all it has", values="--show-hidden-metrics-for-version"),
    *refused(
        "GET /metrics and /dashboard have what is measured (docs/operations.md)",
        values="--kv-cache-metrics-sample --custom-histogram-buckets --jit-monitor-mode",
        switches="--kv-cache-metrics --cudagraph-metrics --enable-mfu-metrics --enable-logging-iteration-details "
        "--jit-monitor-verbose",
    ),
    *harmless("there are none without drafts", fits=of("none"), otherwise="GET /metrics has what is measured of drafts; leave it out", values="--per-request-spec-decode-metrics"),
    *refused("spans of requests are sent with --otlp-traces-endpoint; steps are not traced", lists="--collect-detailed-traces"),
    *refused(
        "steps are not profiled from outside; `wideep experts load` says what ranks wait for (docs/expert_load.md)",
        switches="--enable-layerwise-nvtx-tracing --ray-workers-use-nsight", values="--profiler-config",
    ),
    *harmless("variables of vLLM's are not read", switches="--fail-on-environ-validation"),
)  # fmt: skip

VLLM_FLAGS: tuple[ForeignFlag, ...] = (
    alias("--device-memory-utilization", "--gpu-memory-utilization"),
    *_MODEL, *_MEDIA, *_PARALLEL, *_CACHE, *_STEPS, *_ANSWERS, *_SERVER,
)  # fmt: skip
SAME_AS_VLLM = (
    "--model --tokenizer --revision --download-dir --dtype --quantization -q --seed --max-model-len --max-logprobs "
    "--hf-overrides --generation-config --override-generation-config --config --served-model-name --host --port --uds --api-key "
    "--ssl-certfile --ssl-keyfile --root-path --allowed-origins --allowed-methods --allowed-headers --allow-credentials "
    "--shutdown-timeout --chat-template --tokenizer-mode --tool-call-parser --reasoning-parser --enable-per-request-metrics "
    "--data-parallel-size -dp --enable-eplb --eplb-config --all2all-backend --distributed-timeout-seconds "
    "--gpu-memory-utilization --kv-cache-memory-bytes --enable-prefix-caching --mamba-cache-mode --max-num-seqs "
    "--max-num-batched-tokens --max-num-queued-reqs --scheduling-policy --enforce-eager --log-level --uvicorn-log-level --enable-log-requests "
    "--disable-uvicorn-access-log --disable-access-log-for-endpoints --otlp-traces-endpoint --disable-log-stats "
    "--speculative-config -sc"
)
DIFFERS_FROM_VLLM = {  # flags of the same name -> what is not the same
    "--host": "the default is this machine alone, 127.0.0.1",
    "--data-parallel-size": "ranks on this node, each with all of attention and its share of the experts",
    "--gpu-memory-utilization": "the share of the memory that is free at the start",
    "--eplb-config": "has keys of ours beside vLLM's (docs/rebalancing.md)",
    "--quantization": "int8 and int4 quantise on load; the name of the format that the checkpoint has changes nothing",
    "--seed": "requests that bring no seed get theirs from it, in order of arrival; without it they are drawn anew",
    "--kv-cache-memory-bytes": "2g and 2G both are 2 GiB",
    "--max-model-len": "8k is 8,000 and 8K is 8,192, as in vLLM",
    "--max-num-batched-tokens": "counts one rank's step",
    "--enable-log-requests": "writes prompts whole",
    "--max-num-queued-reqs": "one more is a 429 with Retry-After (vLLM's is a 503)",
}
