"""Where an engine's weights come from."""

from moe.load.checkpoint import Checkpoint
from moe.load.random_checkpoint import RandomCheckpoint
from moe.model import Skeleton
from scheduler.policy.config import ConfigError, EngineConfig


def open_checkpoint(config: EngineConfig, skeleton: Skeleton) -> Checkpoint:
    """Open the model's directory, or what draws a model's weights.

    Raises:
        ConfigError: there is no such format.
        CheckpointError: the directory has no weights that can be read.
    """
    if config.load_format == "auto":
        return Checkpoint(config.directory)
    if config.load_format != "random":
        raise ConfigError(f"load_format is {config.load_format!r}; it must be auto or random")
    backend = skeleton.backend
    return RandomCheckpoint(
        config.directory, skeleton.model, device=backend.device, dtype=backend.model_dtype
    )
