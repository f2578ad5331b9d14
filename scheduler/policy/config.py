"""What an engine is told at start: one frozen value, checked before any weight is read. Knows no torch."""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from expert_placement.config import EplbConfig
from scheduler.policy.speculative import Method, SpeculativeConfig


class DispatchMode(Enum):
    """Which of `dispatch.mode`'s modes steps take; the values are the command line's."""

    AUTO = "auto"  # low latency for decode-only steps, normal for the others
    NORMAL = "normal"  # always
    LOW_LATENCY = "low_latency"  # always, with room for the largest batch


def why_no_compiler(*, on_gpus: bool, is_invariant: bool) -> str | None:
    """Say why models are not compiled with these settings; None if they can be."""
    if not on_gpus:
        return "--enable-torch-compile is for GPUs; the CPU's kernels are compiled already: leave it out"
    if is_invariant:
        return (
            "--enable-torch-compile does not go with --batch-invariant: compiled sums may have another order for "
            "another number of rows; leave one of them out"
        )
    return None


def why_no_nodes(node_size: int) -> str:
    """Say why ranks on GPUs are not dispatched to by node."""
    return f"--dispatch-node-size is {node_size}; between GPUs every rank sends to every other: give 0"


class ConfigError(ValueError):
    """An engine setting that this model or machine cannot serve."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """One rank's settings; equal on all ranks but for `rank` and what follows from it."""

    directory: Path
    kv_cache_bytes: int  # this rank's
    rank: int = 0
    world_size: int = 1
    num_local_ranks: int = 1  # of this rank's host, which share its memory
    max_model_len: int | None = None  # tokens; None: the model's
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    device: str = "cpu"  # see `scheduler.step.parts`
    dtype: str = "auto"
    quantization: str | None = None  # int8 or int4, on load
    load_format: str = "auto"  # the directory's safetensors; "random": see `moe.load.random_checkpoint`
    batch_invariant: bool = False  # of a GPU; a CPU always is
    enforce_eager: bool = False  # no CUDA graphs
    compiler: str = ""  # of a GPU: the backend of torch.compile for what lies between the organs; "": none
    enable_prefix_caching: bool = True
    mamba_cache_mode: str | None = None  # of recurrent layers: see `keeps_snapshots`; None: align
    all2all_backend: str = "auto"
    dispatch_mode: DispatchMode = DispatchMode.AUTO
    dispatch_dtype: str = "auto"  # see dispatch.row_formats
    dispatch_node_size: int = 0  # ranks of a node in node-limited dispatch; 0: flat
    placement_file: Path | None = None
    eplb: EplbConfig = field(default_factory=EplbConfig)  # redundant experts, nodes, bytes beside a step
    speculative: SpeculativeConfig | None = None  # None: nothing is drafted
    threads: int = 1
    num_spare: int | None = (
        None  # experts that may move to a GPU at once; None: a layer's slots, if there are ranks
    )
    target_itl_s: float | None = (
        None  # between two tokens, beside prompts; None: see `scheduler.step.prefill_pace`
    )
    timeout_s: float = 30.0  # of every collective
    heartbeat_timeout_s: float = (
        2.0  # see `scheduler.epochs.heartbeat`; also of connections that say nothing; 0: off
    )
    recovery_timeout_s: float = 600.0  # how long the front waits for a rank to come back when nobody serves
    epoch: int = 0

    @property
    def num_drafts(self) -> int:
        """Tokens that a step may try behind a sequence's newest, at most."""
        return 0 if self.speculative is None else self.speculative.num_drafts

    @property
    def has_mtp(self) -> bool:
        """Whether the model's own layers draft."""
        return self.speculative is not None and self.speculative.method is Method.MTP

    @property
    def max_decode_tokens(self) -> int:
        """Tokens of a step without prompts, at most."""
        return min(self.max_num_seqs * (1 + self.num_drafts), self.max_num_batched_tokens)

    @property
    def keeps_snapshots(self) -> bool:
        """Whether states of recurrent layers are kept at the ends of blocks ("align"), for prefixes to go on from."""
        return self.enable_prefix_caching and self.mamba_cache_mode != "none"


def model_length(config: Any, wanted: int | None) -> int:
    """The longest sequence to serve, in tokens.

    Raises:
        ConfigError: more is wanted than the model has positions for.
    """
    positions = int(getattr(config, "max_position_embeddings", 0) or 0)
    if wanted is not None and positions and wanted > positions:
        raise ConfigError(
            f"--max-model-len is {wanted}; this model has {positions} positions "
            f"(max_position_embeddings); give {positions} or less"
        )
    if not (wanted or positions):
        raise ConfigError("the model does not say how long a sequence may be; give --max-model-len")
    return wanted or positions
