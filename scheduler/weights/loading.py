"""Load a version of the base weights next to the serving ones: a second model of the same rank, placement and settings.

It is built like the first one, from the same configuration, so quantisation, packing and adopted layers are those of a service that
starts with these weights. Until it serves, it has a separate step.

On a CPU, the models then exchange all that they refer to. On a GPU, captured steps read weights at fixed addresses: the new weights
are copied there on the device, between two steps, and the second model is freed.
"""

from collections.abc import Callable
from pathlib import Path

from kvcache.step import Step
from moe.expert_weights import Held
from moe.load.checkpoint import Checkpoint, CheckpointError
from moe.load.newer_tensors import NewerTensors
from moe.model import Model, Skeleton
from moe.overwrite import OtherStructureError, Overwrite
from scheduler.moves.expert_transfer import MovableLayer
from scheduler.moves.relocation import Relocation
from scheduler.policy.config import EngineConfig
from scheduler.step.parts import open_checkpoint
from scheduler.weights.updates import Loaded, NoRoomError, WeightParts
from scheduler.weights.versions import WeightDigests, WeightFolder, WeightVersion

MOST_OF_AVAILABLE = 0.9  # share of free memory that a second copy of the weights may take


class VersionLoader:
    """Loads and installs versions for one rank."""

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        relocation: Relocation,
        *,
        make_step: Callable[[], Step],
        available: Callable[[], int],
    ) -> None:
        """Args: model serves; make_step returns another step like its own; available returns the device's free memory in bytes."""
        self._config, self._model, self._relocation = config, model, relocation
        self._make_step, self._available = make_step, available

    @property
    def parts(self) -> WeightParts:
        """What updates use."""
        return WeightParts(self._load, self._install, self._held, self._check)

    def _load(self, version: WeightVersion, look: Callable[[], None]) -> Loaded:
        """Load a version for the present placement.

        Raises:
            NoRoomError: There is too little memory for a second copy.
            CheckpointError: The tensors do not fit, or a file has changed since the front read its header.
        """
        config, relocation = self._config, self._relocation
        self._check_room()
        for folder in version.folders:
            check_facts(folder)
        held = self._held()
        backend = self._model.skeleton.backend
        skeleton = Skeleton(
            config.directory, backend, has_mtp=config.has_mtp, kv_cache_dtype=config.kv_cache_dtype
        )
        look()
        checkpoint = self._open(version, skeleton)
        model = Model(
            skeleton,
            dispatcher=self._model.layers[0].dispatcher,
            placement=relocation.placement,
            rank=relocation.place,
            step=self._make_step(),
            dtype=config.dtype,
            quantization=config.quantization,
            checkpoint=checkpoint,
            report=lambda _stage, _done, _total: look(),
        )
        for folder in version.folders:
            check_facts(folder)
        overwrite = self._overwrite_by(model) if backend.keeps_addresses else None
        digests = WeightDigests(model.plain_digest(), model.expert_digests(held))
        return Loaded(model, held, digests, checkpoint.bytes_read, overwrite)

    def _overwrite_by(self, model: Model) -> Overwrite:
        try:
            return Overwrite(self._model.net, model.net)
        except OtherStructureError as error:
            raise CheckpointError(
                f"these weights cannot replace the serving ones on a GPU: {error}"
            ) from error

    def _open(self, version: WeightVersion, skeleton: Skeleton) -> Checkpoint:
        newer = [Checkpoint(Path(folder.path)) for folder in version.folders]
        base = [] if version.hides_checkpoint else [open_checkpoint(self._config, skeleton)]
        return NewerTensors([*base, *newer])

    def _check_room(self) -> None:
        is_on_host = self._model.device.type == "cpu"
        needed = self._model.weight_bytes * (self._config.num_local_ranks if is_on_host else 1)
        available = self._available()
        if needed > MOST_OF_AVAILABLE * available:
            raise NoRoomError(
                f"a second copy of the weights takes {needed / 2**20:.0f} MiB on this {'host' if is_on_host else 'GPU'}, but only "
                f"{MOST_OF_AVAILABLE:.0%} of the free memory may be taken, and {available / 2**20:.0f} MiB are available"
                f"{'' if is_on_host else '; --kv-cache-memory can leave room for it'}"
            )

    def _install(self, loaded: Loaded, digests: WeightDigests | None) -> Callable[[], None]:
        model = self._model
        other: Model = loaded.model
        other.digests_LE = None if digests is None else digests.experts_LE
        if loaded.overwrite is not None:
            model.overwrite(other, loaded.overwrite)
            return other.dismantle
        model.exchange(other)
        places = [
            MovableLayer(layer, module) for layer, module in zip(model.layers, model.modules, strict=True)
        ]
        self._relocation.use_layers(places)
        return other.dismantle  # it has the old weights now

    def _held(self) -> Held:
        held: Held = self._relocation.placement.local(self._relocation.place).tolist()
        return held

    def _check(self) -> WeightDigests:
        """Compute the check sums of the serving weights. No expert may move meanwhile."""
        return WeightDigests(self._model.plain_digest(), self._model.expert_digests(self._held()))


def check_facts(folder: WeightFolder) -> None:
    """Check that the files of a folder are those that the front has seen.

    Raises:
        CheckpointError: A file has changed or is not there.
    """
    for name, num_bytes, mtime_ns in folder.files:
        path = Path(folder.path) / name
        try:
            found = path.stat()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read on this node: {error.strerror or error}") from error
        if (found.st_size, found.st_mtime_ns) != (num_bytes, mtime_ns):
            raise CheckpointError(
                f"{path} has changed since the update began; write each version to another folder"
            )
