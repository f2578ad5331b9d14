"""The settings of an engine: one frozen value, checked before any weight is read. Does not use torch."""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from expert_placement.config import EplbConfig
from scheduler.policy.speculative import Method, SpeculativeConfig


class DispatchMode(Enum):
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


def why_no_nodes(node_size: int) -> str:
    """Return why dispatch by node is unavailable on GPUs."""
    return f"--dispatch-node-size is {node_size}; between GPUs every rank sends to every other: give 0"


class ConfigError(ValueError):
    """An engine setting that this model or machine does not support."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """One rank's settings. They are equal on all ranks, except `rank` and the settings that depend on it."""

    directory: Path
    kv_cache_bytes: int  # of this rank
    rank: int = 0
    world_size: int = 1
    num_local_ranks: int = 1  # ranks on this rank's host, which share its memory
    max_model_len: int | None = None  # tokens; None: the model's limit
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    device: str = "cpu"  # see `scheduler.step.parts`
    dtype: str = "auto"
    quantization: str | None = None  # int8 or int4, applied while loading
    load_format: str = "auto"  # the directory's safetensors; "random": see `moe.load.random_checkpoint`
    batch_invariant: bool = False  # for GPUs; CPUs always are
    enforce_eager: bool = False  # no CUDA graphs
    compiler: str = ""  # on GPUs: torch.compile backend for the code between attention and experts; "": off
    enable_prefix_caching: bool = True
    mamba_cache_mode: str | None = None  # for recurrent layers: see `keeps_snapshots`; None: align
    all2all_backend: str = "auto"
    dispatch_mode: DispatchMode = DispatchMode.AUTO
    dispatch_dtype: str = "auto"  # see dispatch.row_formats
    dispatch_node_size: int = 0  # ranks per node in node-limited dispatch; 0: flat
    placement_file: Path | None = None
    eplb: EplbConfig = field(default_factory=EplbConfig)  # redundant experts, nodes, pace of moves
    speculative: SpeculativeConfig | None = None  # None: no drafts
    threads: int = 1
    # Experts that may move to a rank at once; a GPU reserves memory for them. None: one layer's slots, or 0 if alone.
    num_spare: int | None = None
    # Target time between two tokens while prompts run. None: see `scheduler.step.prefill_pace`.
    target_itl_s: float | None = None
    timeout_s: float = 30.0  # of every collective
    heartbeat_timeout_s: float = 2.0  # see `scheduler.epochs.heartbeat`; also for silent connections; 0: off
    recovery_timeout_s: float = 600.0  # how long the front waits for a rank to return if no rank serves
    epoch: int = 0

    @property
    def num_drafts(self) -> int:
        """Most drafts that a step may try after a sequence's newest token."""
        return 0 if self.speculative is None else self.speculative.num_drafts

    @property
    def has_mtp(self) -> bool:
        """Whether the model's own layers draft (multi-token prediction)."""
        return self.speculative is not None and self.speculative.method is Method.MTP

    @property
    def max_decode_tokens(self) -> int:
        """Most tokens of a step without prompts."""
        return min(self.max_num_seqs * (1 + self.num_drafts), self.max_num_batched_tokens)

    @property
    def keeps_snapshots(self) -> bool:
        """Whether recurrent states are kept at the ends of blocks ("align"), so that requests can continue from cached prefixes."""
        return self.enable_prefix_caching and self.mamba_cache_mode != "none"


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
