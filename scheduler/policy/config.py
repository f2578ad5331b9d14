"""The settings of an engine: one frozen value, checked before any weight is read. Does not use torch."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from dispatch.mode import prompt_capacity
from expert_placement.config import EplbConfig
from scheduler.policy.speculative import Method, SpeculativeConfig


class DispatchMode(StrEnum):
    """Which of the modes of `dispatch.mode` steps use. The values are those of the command line."""

    AUTO = "auto"  # low latency for decode-only steps, normal for the others
    NORMAL = "normal"  # for all steps
    LOW_LATENCY = "low_latency"  # for all steps, with room for the largest batch


def why_no_compiler(*, on_gpus: bool, is_invariant: bool) -> str | None:
    """Return why models cannot be compiled with these settings, or None if they can."""
    if not on_gpus:
        return "--enable-torch-compile is for GPUs; the CPU's kernels are compiled already: remove it"
    if is_invariant:
        return (
            "--enable-torch-compile cannot be combined with --batch-invariant: compiled code may sum in a different "
            "order for a different number of rows; remove one of them"
        )
    return None


def why_no_fp8_rows(activation_dtype: str) -> str | None:
    """Return why a CPU does not support `activation_dtype`, or None if it does."""
    if activation_dtype == "fp8":
        return "--activation-dtype fp8 is for GPUs; a CPU never quantises the rows of FP8 weights: use auto"
    return None


def why_no_adapters(device: str, num_ranks: int, all2all_backend: str) -> str | None:
    """Return why LoRA adapters are unavailable for a group of ranks, or None if they are available."""
    if device == "cpu" or num_ranks == 1 or all2all_backend != "deep_ep":
        return None
    return (
        f"--enable-lora with {num_ranks} GPUs and --all2all-backend deep_ep: DeepEP's messages have no room for the adapter of a "
        "row; use auto, nccl or nvshmem, or merge an adapter into the weights"
    )


def why_no_nodes(node_size: int) -> str:
    """Return why dispatch by node is unavailable on GPUs."""
    return f"--dispatch-node-size is {node_size}; between GPUs every rank sends to every other: give 0"


class ConfigError(ValueError):
    """An engine setting that this model or machine does not support."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The settings of engines that a user gives, equal on all ranks. `server.options.table` has the flag of each field.

    A limit or size of None is not given: the default depends on the machine or the model.
    """

    threads: int | None = None
    load_format: str = "auto"  # the directory's safetensors; "dummy": see `moe.load.random_checkpoint`
    dtype: str = "auto"
    quantization: str | None = None  # int8 or int4, applied while loading
    activation_dtype: str = (
        "auto"  # of rows that FP8 weights multiply on GPUs; see `moe.gpu.backend.GpuDevice`
    )
    batch_invariant: bool = False  # for GPUs; CPUs always are
    enforce_eager: bool = False  # no CUDA graphs
    enable_torch_compile: bool = False  # on GPUs, the code between attention and experts
    all2all_backend: str = "auto"
    dispatch_mode: DispatchMode = DispatchMode.AUTO
    dispatch_dtype: str = "auto"  # see dispatch.row_formats
    dispatch_node_size: int = 0  # ranks per node in node-limited dispatch; 0: flat
    distributed_timeout_s: float = 30.0  # of every collective
    heartbeat_timeout_s: float = 2.0  # see `scheduler.epochs.heartbeat`; also for silent connections; 0: off
    eplb_config: EplbConfig = field(default=EplbConfig())  # redundant experts, nodes, pace of moves
    expert_placement: str | None = None  # file with the first placement
    max_model_len: int | None = None  # tokens; None is the model's limit
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    # Target time between two tokens while prompts run. `scheduler.step.prefill_pace` sets it if None.
    target_itl_ms: float | None = None
    speculative_config: SpeculativeConfig | None = None  # None: no drafts
    rank_recovery_timeout_s: float = 600.0  # how long the front waits for a rank to return if no rank serves
    # How long an engine tries to reach the front after it has lost it, or after a restart.
    front_recovery_timeout_s: float = 60.0
    kv_cache_bytes: int | None = None  # per rank
    kv_cache_dtype: str = "auto"  # fp8 or int8: codes of eight bits with scales (`kvcache.codes`)
    enable_prefix_caching: bool = True
    mamba_cache_mode: str | None = None  # for recurrent layers: see `keeps_snapshots`; None is align
    enable_lora: bool = False  # serve LoRA adapters
    max_loras: int = 8  # adapters that may be used in the same step
    max_lora_rank: int = 64
    max_cpu_loras: int | None = None  # adapters that a rank keeps in memory; None means twice `max_loras`
    lora_dtype: str = "auto"  # of their factors; see `moe.model.Model`
    kv_offloading_bytes: int = 0  # of host memory for KV blocks, shared by the ranks of a node; 0: none
    kv_offloading_dir: str | None = None  # for KV blocks on a disk; None: none
    kv_offloading_disk_bytes: int = 0  # most bytes in that directory
    kv_transfer_backend: str = "tcp"  # how nodes fetch prefixes from each other: tcp, or nixl

    @property
    def target_itl_s(self) -> float | None:
        """`target_itl_ms` in seconds."""
        return None if self.target_itl_ms is None else self.target_itl_ms / 1000

    @property
    def num_adapters(self) -> int:
        """Places of adapters in a step."""
        return self.max_loras if self.enable_lora else 0

    @property
    def most_adapters(self) -> int:
        """Most adapters that a rank keeps in memory."""
        return max(self.max_loras, self.max_cpu_loras or 2 * self.max_loras)

    @property
    def num_drafts(self) -> int:
        """Most drafts that a step may try after a sequence's newest token."""
        return 0 if self.speculative_config is None else self.speculative_config.num_drafts

    @property
    def has_mtp(self) -> bool:
        """Whether the model's own layers draft (multi-token prediction)."""
        return self.speculative_config is not None and self.speculative_config.method is Method.MTP

    @property
    def has_kv_tiers(self) -> bool:
        """Whether KV blocks are kept in host memory or on a disk."""
        return bool(self.kv_offloading_bytes or self.kv_offloading_dir)

    @property
    def keeps_snapshots(self) -> bool:
        """Whether recurrent states are kept at the ends of blocks ("align"), so that requests can continue from cached prefixes."""
        return self.enable_prefix_caching and self.mamba_cache_mode != "none"


@dataclass(frozen=True, kw_only=True)
class EngineConfig(EngineSettings):
    """One rank's settings: those of the user, without gaps, and the rank's place."""

    kv_cache_bytes: int = field()  # an estimate with `memory_bytes` on a GPU
    # Of a GPU's memory, all that the rank may take. Its KV cache gets what remains after a measurement. None: `kv_cache_bytes`.
    memory_bytes: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    threads: int = 1
    directory: Path
    rank: int = 0
    world_size: int = 1
    num_local_ranks: int = 1  # ranks on this rank's host, which share its memory
    device: str = "cpu"  # see `scheduler.step.parts`
    compiler: str = "inductor"  # backend of torch.compile
    # Experts that may move to a rank at once; a GPU reserves memory for them. None is one layer's slots, or 0 if alone.
    num_spare: int | None = None
    epoch: int = 0
    checkpoint_facts: str = ""  # digests of the model's files: a KV tier of another checkpoint is refused
    software_facts: str = ""  # versions and processor: blocks of others in a KV tier are not used
    # Whether a rank launches steps before the one before is done, if it can (`scheduler.step.overlap`). None: on a GPU.
    overlaps_steps: bool | None = None

    @property
    def max_decode_tokens(self) -> int:
        """Most tokens of a step without prompts."""
        return min(self.max_num_seqs * (1 + self.num_drafts), self.max_num_batched_tokens)

    @property
    def repeats_decodes(self) -> bool:
        """Whether generated tokens that are computed again run as decodes, and their blocks are not shared.

        No bit may depend on preemption, a lost rank or a prefix hit. A GPU's kernels for prompts and for decodes give different bits.
        """
        return self.batch_invariant and self.device != "cpu"

    @property
    def prompt_capacity(self) -> int:
        """Most tokens of a rank in a low-latency step with prompts; 0 on CPUs, where normal mode waits for nothing more."""
        return 0 if self.device == "cpu" else prompt_capacity(self.max_num_batched_tokens)


def model_length(config: Any, wanted: int | None) -> int:
    """Return the longest sequence to serve, in tokens.

    Raises:
        ConfigError: `wanted` exceeds the model's positions, or neither is known.
    """
    positions = int(getattr(config, "max_position_embeddings", 0) or 0)
    if wanted is not None and positions and wanted > positions:
        raise ConfigError(
            f"--max-model-len is {wanted}; this model has {positions} positions "
            f"(max_position_embeddings); give {positions} or less"
        )
    if not (wanted or positions):
        raise ConfigError("the model's config has no maximum sequence length; give --max-model-len")
    return wanted or positions
