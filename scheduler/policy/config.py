"""What an engine is told at start: one frozen value, checked before any weight is read. Knows no torch."""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from expert_placement.config import EplbConfig


class DispatchMode(Enum):
    """Which of `dispatch.mode`'s modes steps take; the values are the command line's."""

    AUTO = "auto"  # low latency for decode-only steps, normal for the others
    NORMAL = "normal"  # always
    LOW_LATENCY = "low_latency"  # always, with room for the largest batch


class HalfThresholds(NamedTuple):
    """Tokens that every rank must have for a step to run in two halves; vLLM's names and numbers."""

    decode_tokens: int = 32  # of a step that only decodes
    prefill_tokens: int = 512  # of one with prompts, its decodes included


def why_no_halves(
    num_ranks: int, *, on_gpus: bool = False, replays: bool = False, backend: str = "auto"
) -> str:
    """Say what two halves of a step cannot work with, and what to do; "" if they can.

    Args:
        num_ranks: of the service.
        on_gpus: whether it computes there. replays: whether decode steps would be replayed from CUDA graphs.
        backend: how ranks exchange tokens.
    """
    if num_ranks == 1:
        return "--enable-dbo runs a step in two halves, one computing while the other's tokens travel between ranks; there is one rank: leave it out"
    if on_gpus and replays:
        return "--enable-dbo cannot be replayed from CUDA graphs, whose halves could not take turns: give --enforce-eager with it"
    if backend == "deep_ep":
        return "--enable-dbo needs two ways between the ranks, and deep_ep's buffer is one: give another --all2all-backend"
    return ""


def why_no_compiler(*, on_gpus: bool, is_invariant: bool, in_halves: bool) -> str:
    """Say why models are not compiled with these settings; "" if they can be."""
    if not on_gpus:
        return "--enable-torch-compile is for GPUs; the CPU's kernels are compiled already: leave it out"
    if is_invariant:
        return (
            "--enable-torch-compile does not go with --batch-invariant: compiled sums may have another order for "
            "another number of rows; leave one of them out"
        )
    if in_halves:
        return (
            "--enable-torch-compile does not go with --enable-dbo, whose halves run on two threads; leave one of "
            "them out"
        )
    return ""


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
    load_format: str = "auto"  # the directory's safetensors; "random": see `moe.load.random_checkpoint`
    batch_invariant: bool = False  # of a GPU; a CPU always is
    enforce_eager: bool = False  # no CUDA graphs
    compiler: str = ""  # of a GPU: the backend of torch.compile for what lies between the organs; "": none
    halves: HalfThresholds | None = None  # run large steps in two halves that take turns; None: never
    enable_prefix_caching: bool = True
    all2all_backend: str = "auto"
    dispatch_mode: DispatchMode = DispatchMode.AUTO
    dispatch_dtype: str = "auto"  # see dispatch.row_formats
    dispatch_node_size: int = 0  # ranks of a node in node-limited dispatch; 0: flat
    placement_file: Path | None = None
    eplb: EplbConfig = field(default_factory=EplbConfig)  # redundant experts, nodes, bytes beside a step
    threads: int = 1
    num_spare: int | None = (
        None  # experts that may move to a GPU at once; None: a layer's slots, if there are ranks
    )
    timeout_s: float = 30.0  # of every collective
    epoch: int = 0


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
