"""The image tower of a multimodal checkpoint: everything that turns pixels into rows for the decoder.

`transformers` builds the whole model on the meta device. Its decoder and output projection are removed, the rest is loaded, and
the family's own `get_image_features` runs. So a rank never reads the tower, and the process with the tower never reads the
decoder. The tower computes one image at a time, so that an image's rows do not depend on other images. On a CPU it computes in
float32. On a GPU it computes in bfloat16 if the checkpoint stores all its matrices so, which is the type of its training, otherwise
in float32: other types may overflow.
Rejected: building the family's tower class alone. Projectors between tower and decoder belong to other classes, and the names
of the parts differ between families.

Legend: L layers that take rows, N rows, D hidden size, C tiles.
"""

import inspect
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForMultimodalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from moe.families import FOREIGN_ERRORS, UnsupportedModelError, quantisation_of, read_config
from moe.load.checkpoint import Checkpoint
from moe.load.loader import Loader, Weight, restore_buffers
from moe.load.plan import LoadPlan
from moe.load.quantised_weight import QuantisedWeight
from moe.load.stored_tensors import StoredTensors
from moe.published_types import settle
from moe.text_part import is_wrapped


class ImageFeatures(NamedTuple):
    """What a decoder takes in the places of an image's tokens."""

    rows_LND: Tensor  # float32: rows instead of embedded tokens; the others are added after the first layers
    # Rows per column and per line, for positions on several axes. 0 if the positions count the rows.
    height: int = 0
    width: int = 0
    part: int = 0  # rows per part, if tokens separate the parts of an image; 0 if the rows are consecutive
    columns: int = 1  # parts per line


class Tower:
    """A loaded image tower."""

    def __init__(self, directory: Path, device: str = "cpu", *, dtype: torch.dtype | None = None) -> None:
        """Build the tower and load its weights.

        Args:
            device: cpu, cuda or cuda:N.
            dtype: Type of the weights and the computation. None chooses it by the device and the checkpoint.

        Raises:
            UnsupportedModelError: The model has no image tower, or its structure is not supported.
            CheckpointError: The checkpoint does not fit.
        """
        config = read_config(directory)
        model = _build(config)
        checkpoint = Checkpoint(directory)
        stored = StoredTensors(checkpoint, quantisation_of(directory, config))
        plan = LoadPlan(model, stored, {})
        self.device = torch.device(device)
        is_bfloat16 = self.device.type != "cpu" and _is_bfloat16(checkpoint, plan)
        self.dtype = dtype or (torch.bfloat16 if is_bfloat16 else torch.float32)
        keep = partial(_keep, device=self.device, dtype=self.dtype)
        with torch.no_grad():
            Loader(model, stored, plan, "auto").load_plain(keep, lambda _stage, _done, _total: None)
            restore_buffers(model)
            _move_buffers(model, self.device)
        checkpoint.release_memory()
        self._joining: Any = _joining(model)
        self._accepted = frozenset(inspect.signature(self._joining.get_image_features).parameters)
        self._merge = _merge_of(config)
        patch_size = getattr(config.vision_config, "patch_size", 0)
        # Pixels per row and direction; 0 if the family's patches are not square.
        self.pixels_per_row = patch_size * self._merge if isinstance(patch_size, int) else 0
        self.has_tiles = config.model_type == "llama4"
        self._has_axes = hasattr(self._joining, "get_rope_index")  # multimodal rotary embeddings

    @torch.inference_mode()
    def encode(self, inputs: Mapping[str, Tensor]) -> ImageFeatures:
        """Compute the rows of one image.

        Args:
            inputs: Tensors of one image from the model's image processor, such as pixel_values and image_grid_thw.
        """
        taken = {name: self._placed(value) for name, value in inputs.items() if name in self._accepted}
        output: Any = self._joining.get_image_features(**taken)
        if self.has_tiles:
            return self._of_tiles(output.last_hidden_state, inputs["aspect_ratios"])
        [rows_ND] = output.pooler_output
        later = [rows for [rows] in getattr(output, "deepstack_features", None) or ()]
        rows_LND = torch.stack([rows_ND, *later]).float().cpu()
        if "image_sizes" in inputs:
            _, pixels = inputs["image_sizes"][0].tolist()
            return ImageFeatures(rows_LND, part=pixels // self.pixels_per_row)
        if "image_grid_thw" not in inputs or not self._has_axes:
            return ImageFeatures(rows_LND)
        _, height, width = inputs["image_grid_thw"][0].tolist()
        return ImageFeatures(rows_LND, height // self._merge, width // self._merge)

    def _placed(self, value: Tensor) -> Tensor:
        """Return an input on the tower's device. Numbers of patches keep their type."""
        return value.to(self.device, self.dtype if value.is_floating_point() else value.dtype)

    def _of_tiles(self, hidden_CND: Tensor, canvas: Tensor) -> ImageFeatures:
        """Project the rows of tiles. Llama 4 projects them in the whole model's forward, behind `get_image_features`."""
        rows_ND = self._joining.multi_modal_projector(hidden_CND.flatten(0, 1))
        return ImageFeatures(rows_ND[None].float().cpu(), part=hidden_CND.shape[1], columns=int(canvas[0, 1]))


def _merge_of(config: Any) -> int:
    """Return how many patches in each direction become one row."""
    merges = (getattr(part, "spatial_merge_size", None) for part in (config.vision_config, config))
    return next((int(merge) for merge in merges if merge), 1)


def _build(config: Any) -> PreTrainedModel:
    """Build a model without its decoder on the meta device."""
    if not is_wrapped(config) or type(config) not in AutoModelForMultimodalLM._model_mapping:
        raise UnsupportedModelError(f"{config.model_type} has no image tower")
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
    except FOREIGN_ERRORS as error:
        raise UnsupportedModelError(
            f"{config.model_type} cannot be built from its config.json: {type(error).__name__}: {error}"
        ) from error
    joining, decoder, head = _joining(model), model.get_decoder(), model.get_output_embeddings()
    if not hasattr(joining, "get_image_features") or decoder not in list(joining.children()):
        raise UnsupportedModelError(
            f"{config.model_type}: {type(model).__name__} does not separate its image tower from its decoder"
        )
    whole = set(model.state_dict())
    model.conversions = get_model_conversion_mapping(model)
    settle(model)
    for holder in {joining, model}:
        for name, part in [*holder.named_children()]:
            if part is decoder or part is head:
                delattr(holder, name)
    model.left_out = frozenset(whole - set(model.state_dict()))
    model.all_tied_weights_keys = {}  # they tie parts that were removed
    return model.eval()


def _joining(model: PreTrainedModel) -> Any:
    """Return the module that holds both the tower and the decoder."""
    return getattr(model, model.base_model_prefix, model)


def _keep(
    _name: str, weight: Weight, _declared: Tensor, *, device: torch.device, dtype: torch.dtype
) -> nn.Parameter:
    plain = weight.dequantised() if isinstance(weight, QuantisedWeight) else weight
    return nn.Parameter(plain.to(device, dtype), requires_grad=False)


def _is_bfloat16(checkpoint: Checkpoint, plan: LoadPlan) -> bool:
    """Return whether all matrices of the tower are stored in bfloat16."""
    known = set(checkpoint.names())
    names = [name for source in plan.plain.values() for name, _ in source.names]
    matrices = [name for name in names if name not in known or len(checkpoint.shape(name)) > 1]
    return all(name in known and checkpoint.dtype(name) == "BF16" for name in matrices)


def _move_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Move values that no checkpoint contains. They stay in float32: rotary frequencies in bfloat16 would be wrong."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
