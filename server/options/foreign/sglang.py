"""Flags of `sglang.launch_server` that neither WideEP nor vLLM has, as of SGLang 0.5.23.

They include all flags of its published recipes for wide expert parallelism. One count differs: with data-parallel
attention, SGLang's --max-running-requests and --chunked-prefill-size count all ranks together, ours count one rank.
"""

from server.options.foreign.flags import (
    DRAFTS,
    GENERATES,
    GRAPHS,
    IMAGES,
    IMAGES_ONLY,
    KERNELS,
    LORA_LAYOUTS,
    MEMORY,
    NO_HALVES,
    NO_SLEEP,
    PACE,
    POOLS,
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

_BALANCES = "use --eplb-config to balance experts: "
_ROLES = f"the transfer between pools has no such setting; {POOLS}"


def _are_all_ranks(given: object, said: Said) -> bool:
    return str(given) in ("1", str(said.get("data_parallel_size", given)))


def _is_one_more(given: object, said: Said) -> bool:
    return str(given) == str(int(said.get("--speculative-num-steps", 0)) + 1)


def _has_host_tier(given: object, said: Said) -> bool:
    return given is False or str(said.get("kv_offloading_size", 0)) not in ("0", "0.0")


def _has_disk_tier(given: object, said: Said) -> bool:
    return given == "file" and "kv_offloading_dir" in said


_ONE_MORE_THAN_STEPS = Fits("one more than --speculative-num-steps", _is_one_more)
_MODEL = (
    alias("--model-path", "MODEL"),
    alias("--tokenizer-path", "--tokenizer"),
    alias("--context-length", "--max-model-len"),
    alias("--json-model-override-args", "--hf-overrides"),
    alias("--random-seed", "--seed"),
    alias("--sampling-defaults", "--generation-config", spelled={"model": "auto", "openai": "vllm"}),
    alias("--preferred-sampling-params", "--override-generation-config"),
    alias("--fastapi-root-path", "--root-path"),
    alias("--file-storage-path", "--files-dir"),
    alias("--log-level-http", "--log-level"),
    *rejected("give a file with the template: --chat-template FILE", values="--hf-chat-template-name --completion-template"),
    *rejected(GENERATES, switches="--is-embedding"),
    *rejected(
        "weights keep the checkpoint's format; to quantise on load, use --quantization int8 or int4",
        values="--quantization-param-path --modelopt-quant --modelopt-checkpoint-restore-path "
        "--modelopt-checkpoint-save-path --modelopt-export-path --rl-quant-profile --torchao-config",
        switches="--quantize-and-serve",
    ),
    *ignored(
        "each rank reads its own share of the safetensors files",
        values="--weight-loader-prefetch-num-threads --startup-weight-load-mode",
        switches="--weight-loader-disable-mmap --weight-loader-prefetch-checkpoints --weight-loader-drop-cache-after-load",
    ),
    *rejected(
        "a start reads safetensors files only; POST /update_weights replaces and labels weights later (docs/weights.md); leave it out",
        values="--custom-weight-loader --model-checksum --remote-instance-weight-loader-seed-instance-ip "
        "--remote-instance-weight-loader-backend --model-config-parser --weight-version",
        switches="--checkpoint-engine-wait-weights-before-ready --delete-ckpt-after-loading",
    ),
    *ignored(
        "POST /release_memory_occupation is always available", fits=SLEEPS, otherwise=NO_SLEEP, switches="--enable-memory-saver",
    ),
    *ignored(
        "weights stay, or are read from the checkpoint again", fits=SLEEPS, otherwise=NO_SLEEP, switches="--enable-weights-cpu-backup",
    ),
    *ignored(IMAGES, switches="--enable-multimodal --mm-enable-dp-encoder --disable-fast-image-processor", values="--mm-attention-backend"),
    *rejected(IMAGES_ONLY, switches="--encoder-only --language-only"),
    alias("--lora-paths", "--lora-modules", takes="values"),
    alias("--max-loras-per-batch", "--max-loras"),
    alias("--max-loaded-loras", "--max-cpu-loras"),
    *ignored("each kind of device has one set of kernels", values="--lora-backend --max-lora-chunk-size"),
    *ignored(
        "the least recently used adapter loses its adapter slot", fits=of("lru"), values="--lora-eviction-policy",
        otherwise="only lru is implemented; leave it out",
    ),
    *ignored(
        LORA_LAYOUTS, switches="--experts-shared-outer-loras --lora-use-virtual-experts --enable-lora-overlap-loading --lora-strict-loading",
    ),
)  # fmt: skip
_RANKS = (
    alias("--dp-size/--dp", "--data-parallel-size"),
    alias("--dist-timeout", "--distributed-timeout-seconds"),
    alias("--moe-a2a-backend", "--all2all-backend"),
    alias("--deepep-mode", "--dispatch-mode"),
    alias("--enable-deterministic-inference", "--batch-invariant", takes="nothing"),
    *ignored(
        "attention is always data-parallel, with all of the model's other layers on every rank",
        switches="--enable-dp-attention --enable-dp-lm-head --enable-dp-attention-local-control-broadcast",
    ),
    *ignored(
        "experts are spread over all ranks", fits=Fits("1, or the number of ranks", _are_all_ranks), otherwise="experts are spread over all ranks; use "
        "--data-parallel-size {given}",
        values="--ep-size/--expert-parallel-size/--ep --attn-dp-size/--attention-data-parallel-size",
    ),
    *ignored(
        "layers without experts are whole on every rank", fits=of(1), values="--moe-dense-tp-size --moe-dp-size/--moe-data-parallel-size --shared-experts-tp-size "
        "--attn-cp-size/--attention-context-parallel-size",
    ),
    *ignored("tokens are sent directly to their experts' ranks", switches="--enable-deepep-moe --enable-ep-moe --enable-p2p-check --pre-warm-nccl --disable-attn-tp-gather"),
    *rejected("use --dispatch-dtype fp8 or auto", values="--deepep-dispatcher-output-dtype --flashinfer-a2a-dispatch-type"),
    *rejected("the size of an exchange determines its layout; use --dispatch-mode and --dispatch-node-size", values="--deepep-config --deepep-v2-mode --fuseep-mode"),
    *rejected(_BALANCES + "max_bytes_per_step limits the bytes that move during a step", values="--eplb-rebalance-layers-per-chunk"),
    *rejected(_BALANCES + "min_gain is the saving that a plan must reach", values="--eplb-min-rebalancing-utilization-threshold"),
    *rejected(_BALANCES + "window_size is the number of recorded steps", values="--expert-distribution-recorder-buffer-size"),
    *ignored(
        "plans change the placement with few moves", fits=of("auto", "deepseek"), otherwise="use --eplb-config '{\"policy\": \"default\"}', "
        "or num_groups and min_nodes if experts are grouped (docs/rebalancing.md)", values="--eplb-algorithm",
    ),
    *ignored("the copies of an expert have fixed shares of its tokens, and responses do not depend on the choice", values="--ep-dispatch-algorithm"),
    *ignored(
        "experts are placed in order at first", fits=of("trivial"), otherwise="write a placement with `wideep experts plan ... --out FILE` and "
        "give it as --expert-placement FILE", values="--init-expert-location",
    ),
    *ignored(
        "load is always recorded; see `wideep experts load` and POST /start_expert_distribution_record",
        values="--expert-distribution-recorder-mode --expert-balancedness-report-mode",
        switches="--enable-expert-distribution-metrics",
    ),
    *ignored(
        "lost ranks are restarted without a flag (docs/faults.md), and resizing works on CPUs without pools (docs/resize.md)",
        values="--elastic-ep-backend --ep-join-mode/--elastic-ep-join-mode --elastic-ep-scale-timeout --max-ep-size",
        switches="--enable-elastic-expert-backup",
    ),
    *rejected(
        NO_HALVES,
        switches="--enable-two-batch-overlap --enable-single-batch-overlap", values="--tbo-token-distribution-threshold",
    ),
    *rejected("choose network devices with the environment variables of NCCL or NVSHMEM (NCCL_IB_HCA, NVSHMEM_HCA_LIST)", values="--mooncake-ib-device"),
    *rejected(
        "use --heartbeat-timeout-seconds for a process that hangs and --distributed-timeout-seconds for a rank that keeps "
        "others waiting", values="--watchdog-timeout --soft-watchdog-timeout",
    ),
    *rejected("choose GPUs with the environment variable CUDA_VISIBLE_DEVICES", values="--base-gpu-id --gpu-id-step"),
    *rejected("start the service under numactl, and set --threads", values="--numa-node"),
    *ignored(
        "the front routes each request to a rank by prefix and load", fits=of("auto"), values="--load-balance-method",
        otherwise="use --routing-policy prefix, fewest or round-robin (docs/scheduling.md)",
    ),
    *ignored("ranks do not reduce partial results", switches="--enable-nccl-nvls --enable-symm-mem --enable-mscclpp --enable-torch-symm-mem --enable-attn-tp-input-scattered"),
    *rejected(MEMORY, switches="--enable-paged-experts", values="--kt-weight-path --kt-method --kt-cpuinfer --kt-num-gpu-experts --offload-mode"),
)  # fmt: skip
_STEPS = (
    alias("--mem-fraction-static", "--gpu-memory-utilization"),
    alias("--disable-radix-cache", "--no-enable-prefix-caching", takes="nothing"),
    alias("--disable-cuda-graph", "--enforce-eager", takes="nothing"),
    *rejected("it counts all ranks together; use --max-num-seqs, the limit for running requests of one rank", values="--max-running-requests --prefill-max-requests"),
    *rejected("it counts waiting requests; use --max-num-queued-reqs, which also counts running ones, on all ranks", values="--max-queued-requests"),
    *rejected(
        "it counts all ranks together; use --max-num-batched-tokens, the limit for tokens in one rank's step",
        values="--chunked-prefill-size --max-prefill-tokens",
    ),
    *rejected("the KV cache is sized in bytes: --kv-cache-memory", values="--max-total-tokens --swa-full-tokens-ratio --max-mamba-cache-size --mamba-full-memory-ratio"),
    *ignored("a block has 16 tokens", fits=of(16), otherwise="a block has 16 tokens on every device; leave it out", values="--page-size"),
    *ignored(
        "requests run in order of arrival", fits=of("fcfs"), values="--schedule-policy",
    ),
    *ignored("the least recently used blocks are evicted first", fits=of("lru"), values="--radix-eviction-policy"),
    *rejected("use --scheduling-policy priority: requests with lower values of `priority` start first", switches="--enable-priority-scheduling"),
    *ignored("with priority scheduling, lower values start first", switches="--schedule-low-priority-values-first"),
    *ignored("a request with a priority is rejected unless --scheduling-policy is priority", switches="--abort-on-priority-when-disabled"),
    *rejected("waiting requests preempt no others, and the default priority is 0; leave it out", values="--priority-scheduling-preemption-threshold --default-priority-value"),
    *ignored("a request is admitted when its blocks fit", values="--schedule-conservativeness"),
    *ignored("steps are always planned ahead and shared by prompts and decodes", switches="--enable-mixed-chunk --disable-overlap-schedule --disable-chunked-prefix-cache --enable-dynamic-chunking --disable-hybrid-swa-memory", values="--scheduler-recv-interval"),
    *ignored("every step returns its tokens at once", fits=of(1), values="--num-continuous-decode-steps"),
    *rejected(PACE, switches="--enable-prefill-delayer", values="--prefill-decode-interval --prefill-delayer-max-delay-passes --prefill-delayer-queue-min-ratio --prefill-delayer-max-delay-ms"),
    *ignored(
        "the device determines the kernels", fits=of("auto"), otherwise=KERNELS,
        values="--moe-runner-backend --prefill-attention-backend --decode-attention-backend --linear-attn-backend "
        "--fp8-gemm-runner-backend/--fp8-gemm-backend --fp4-gemm-runner-backend/--fp4-gemm-backend --bf16-gemm-backend "
        "--dsa-prefill-backend --dsa-decode-backend --dsa-topk-backend --sampling-backend",
    ),
    *ignored("there is no such kernel", switches="--disable-shared-experts-fusion --flashinfer-mla-disable-ragged --triton-attention-reduce-in-fp32 --enable-flashinfer-allreduce-fusion --enable-fused-moe-sum-all-reduce", values="--flashinfer-mxfp4-moe-precision --triton-attention-num-kv-splits"),
    *rejected(KERNELS, switches="--enforce-shared-experts-fusion --enable-waterfill", values="--enable-fused-qk-norm-rope"),
    *rejected(
        GRAPHS, lists="--cuda-graph-bs --cuda-graph-bs-decode --cuda-graph-bs-prefill",
        values="--cuda-graph-max-bs --cuda-graph-max-bs-decode --cuda-graph-max-bs-prefill --cuda-graph-config "
        "--cuda-graph-backend-decode --cuda-graph-backend-prefill --torch-compile-max-bs",
        switches="--disable-cuda-graph-padding --disable-prefill-cuda-graph --disable-decode-cuda-graph "
        "--enable-profile-cuda-graph --enable-piecewise-cuda-graph",
    ),
    alias("--disaggregation-mode", "--role", spelled={"null": None, "prefill": "prefill", "decode": "decode"}),
    *ignored(
        "the front knows all pools, and blocks go through the node's host memory; --kv-transfer-backend nixl uses NIXL between nodes",
        values="--disaggregation-transfer-backend --disaggregation-bootstrap-port",
    ),
    *rejected(
        _ROLES, values="--disaggregation-ib-device "
        "--disaggregation-decode-tp --disaggregation-decode-dp --disaggregation-prefill-pp --num-reserved-decode-tokens "
        "--disaggregation-decode-polling-interval --disaggregation-decode-extra-slots --pdlb-url",
        switches="--disaggregation-decode-enable-offload-kvcache --disaggregation-decode-enable-radix-cache --enable-pdmux",
    ),
    *ignored(
        "--kv-offloading-size turns on offloading to host memory", fits=Fits("--kv-offloading-size", _has_host_tier),
        otherwise="give the size of host memory for offloading with --kv-offloading-size", switches="--enable-hierarchical-cache/--enable-hicache",
    ),
    *ignored(
        "--kv-offloading-dir turns on offloading to disk", fits=Fits("file and --kv-offloading-dir", _has_disk_tier),
        otherwise="offloading to disk needs --kv-offloading-dir and --kv-offloading-disk-size, and other storage is not supported",
        values="--hicache-storage-backend",
    ),
    *ignored(
        "--kv-offloading-size has the size", fits=of(0), otherwise="it counts one rank's memory in 10^9 bytes; use --kv-offloading-size, which "
        "counts the memory that the ranks of a node share", values="--hicache-size",
    ),
    *rejected("use --kv-offloading-size, the memory that the ranks of a node share", values="--hicache-ratio --hicache-host-memory-fraction --hicache-host-memory-mode"),
    *ignored(
        "offloaded blocks have one layout, and copies run in the background",
        values="--hicache-write-policy --hicache-io-backend --hicache-mem-layout --hicache-storage-prefetch-policy",
    ),
    *rejected(TIERS, switches="--enable-lmcache --enable-flexkv", values="--lmcache-config-file"),
    *rejected(MEMORY, switches="--enable-hisparse", values="--hisparse-config"),
    *rejected(
        "use --mamba-cache-mode align (states at the ends of blocks) or none",
        values="--mamba-radix-cache-strategy --mamba-track-interval --mamba-ssm-dtype --mamba-scheduler-strategy",
    ),
    # SGLang calls drafts by the model's own layers EAGLE or NEXTN, and counts the newest token as a draft.
    alias(
        "--speculative-algorithm", "--speculative-config", "method", spelled={"EAGLE": "mtp", "NEXTN": "mtp", "NGRAM": "ngram"}
    ),
    alias("--speculative-num-steps", "--speculative-config", "num_speculative_tokens"),
    *ignored(
        "drafts are one sequence of tokens, one per step", fits=_ONE_MORE_THAN_STEPS,
        otherwise="it must be one more than the steps, as it counts the newest token; use --speculative-config", values="--speculative-num-draft-tokens",
    ),
    *ignored("drafts are one sequence of tokens", fits=of(1), values="--speculative-eagle-topk"),
    *rejected(
        DRAFTS, values="--speculative-draft-model-path/--speculative-draft-model --speculative-attention-mode "
        "--speculative-draft-attention-backend --speculative-moe-runner-backend --speculative-moe-a2a-backend "
        "--speculative-draft-model-quantization --speculative-token-map --speculative-accept-threshold-single "
        "--speculative-accept-threshold-acc --speculative-ngram-capacity",
        switches="--enable-multi-layer-eagle --speculative-adaptive",
    ),
)  # fmt: skip
_SERVER = (
    *ignored("GET /metrics and GET /load are always available", switches="--enable-metrics --enable-metrics-for-all-schedulers"),
    *ignored("usage always includes cached tokens", switches="--enable-cache-report"),
    *ignored("GET /health returns 200 after all ranks have run a step", switches="--skip-server-warmup", values="--warmups"),
    *ignored("GET /metrics describes the steps", values="--decode-log-interval --gc-warning-threshold-secs", switches="--show-time-cost --enable-request-time-stats-logging"),
    *ignored("each front tokenizes for its own clients; --api-server-count sets the number of fronts", values="--tokenizer-worker-num --detokenizer-worker-num --tokenizer-backend", switches="--enable-tokenizer-batch-encode --disable-tokenizer-batch-decode --enable-dynamic-batch-tokenizer"),
    *ignored("streams send only new text", switches="--incremental-streaming-output"),
    *ignored(
        "llguidance compiles structures", fits=of("auto", "llguidance"), otherwise="llguidance compiles structures "
        "(docs/structured_output.md); leave it out", values="--grammar-backend",
    ),
    *ignored("idle ranks sleep", switches="--sleep-on-idle"),
    *rejected("use --otlp-traces-endpoint for spans of requests", switches="--enable-trace", values="--trace-modules"),
    *rejected("use --log-requests and --log-format", values="--log-requests-level --log-requests-format --log-requests-target"),
    *rejected("use --disable-access-log-for-endpoints /health,/metrics", lists="--uvicorn-access-log-exclude-prefixes"),
    *rejected("GET /metrics uses vLLM's names and buckets (docs/operations.md)", lists="--bucket-time-to-first-token --bucket-inter-token-latency --bucket-e2e-request-latency --prompt-tokens-buckets --generation-tokens-buckets"),
    *rejected("use --operator-key-file, a file of operator keys", values="--admin-api-key"),
    *rejected("private keys with a password are not supported", values="--ssl-keyfile-password"),
    *rejected("only HTTP/1.1 is supported; leave it out", switches="--enable-http2 --grpc-mode --smg-grpc-mode"),
    *rejected("prompts that are too long get 400, or are cut if the request sets truncate_prompt_tokens", switches="--allow-auto-truncate"),
    *rejected("responses contain only tokens and log-probabilities; leave it out", switches="--enable-return-hidden-states --enable-custom-logit-processor --return-input-ids --return-output-ids"),
    *rejected("requests may set stream_options: {\"include_usage\": true}", switches="--stream-response-default-include-usage"),
    *rejected("structures may set disable_any_whitespace (docs/structured_output.md)", switches="--constrained-json-disable-any-whitespace", values="--constrained-json-whitespace-pattern"),
    *rejected("crash dumps are not written; messages explain why a process ended (docs/faults.md)", values="--crash-dump-folder --debug-tensor-dump-output-folder"),
)  # fmt: skip

SGLANG_FLAGS: tuple[ForeignFlag, ...] = (*_MODEL, *_RANKS, *_STEPS, *_SERVER)
SAME_AS_SGLANG = (
    "--model --revision --download-dir --load-format --dtype --quantization --device --config --served-model-name --host --port --api-key "
    "--ssl-certfile --ssl-keyfile --chat-template --tokenizer-mode --tool-call-parser --reasoning-parser --data-parallel-size --enable-eplb "
    "--enable-torch-compile --kv-cache-dtype --log-level --log-requests --otlp-traces-endpoint --enable-lora --max-lora-rank --lora-target-modules"
)
DIFFERS_FROM_SGLANG = {
    "--load-format": "auto and safetensors are the same; dummy draws random weights; other formats are not read",
    "--port": "the default is 8000",
    "--kv-cache-dtype": "auto, fp8 (e4m3) and int8, with a scale per token and head",
    "--data-parallel-size": "ranks on this node, each with all attention weights and a share of the experts",
}
FITS_IN_SGLANG = {  # flag of `vllm` -> values without effect, if SGLang's differ
    "--tensor-parallel-size": "1, or the number of ranks with --enable-dp-attention",
}
SHARED_WITH_VLLM = (  # declared in `vllm`
    "--trust-remote-code --model-loader-extra-config --model-impl --skip-tokenizer-init "
    "--tensor-parallel-size --pipeline-parallel-size --decode-context-parallel-size --nnodes --node-rank "
    "--dist-init-addr --nccl-port --attention-backend --mamba-backend --disable-custom-all-reduce --cpu-offload-gb "
    "--ep-num-redundant-experts --eplb-rebalance-num-iterations --stream-interval --enable-return-routed-experts --kv-events-config "
    "--default-chat-template-kwargs --trust-request-chat-template --tool-server --grpc-port --ssl-ca-certs "
    "--enable-ssl-refresh --enable-mfu-metrics --watermark-config"
)
