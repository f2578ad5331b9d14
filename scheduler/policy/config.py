"""What an engine is told at start: one frozen value, checked before any weight is read."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from expert_placement.eplb_config import EplbConfig
from scheduler.step.lockstep import DispatchMode, HalfThresholds


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
    device: str = "cpu"  # see `scheduler.step.devices`
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
