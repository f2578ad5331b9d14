"""The memory that LoRA adapters may take on a rank. No torch.

What an adapter adds to a matrix is held as rank x (inputs + outputs) numbers (`moe.lora.tables`), for linear layers and for the
experts of the rank's slots. Adapters are loaded while serving, so a start reserves room for as many of the largest allowed rank as
a rank may keep, on all matrices that they may change. The sizes of the matrices come from the headers of the checkpoint's files.
"""

import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from scheduler.policy.config import EngineSettings
from server.machine.model_fields import NOT_OF_TEXT, experts_per_token, most, num_experts
from server.options.table import Options
from server.serve.preflight.memory import (
    NOT_KEPT,
    SCALES,
    is_expert,
    mtp_names,
    slots_per_rank,
)
from server.serve.preflight.model import read_config, read_headers

RANK_STEP = 16  # ranks are rounded up to a multiple of this
_MOST_NUMBER_BYTES = 4  # of a value of an adapter
EXPERTS = "experts"  # name of all routed experts of a layer among the adapted modules
# On a GPU, of a pair of row and expert, for each inner feature: the first product without a gate, twice; its float32 form; the gate.
_PAIR_BYTES = 2 * 2 + 2 * 4 + 3 * 4 + 2
_WEIGHT = re.compile(r"\.(weight|qweight|weight_packed)$")
_CODES_PER_WORD = {"U8": 2, "I32": 8}  # of types that hold several weights
# The product after an expert's activation. All others are the product before it.
_IS_DOWN = re.compile(r"(down_proj|\bw2|output_linear)")


class AdaptedFeatures(NamedTuple):
    """Inputs plus outputs of the matrices that an adapter may change, an upper bound."""

    shared: int  # of linear layers and embeddings, which are on every rank
    slot: int  # of one expert of each layer
    pairs: int = 0  # inner features of all experts that a row chooses in a layer

    def rank_bytes(self, engine: EngineSettings, num_slots: int, *, on_gpu: bool = False) -> int:
        """Return the memory for all adapters that a rank may keep.

        Args:
            num_slots: Slots of a layer on the rank.
            on_gpu: Count the GPU's memory. It holds only those that a step may use, while the host keeps all, and what the
                largest step with adapters needs in addition.
        """
        if not engine.enable_lora:
            return 0
        rank = math.ceil(engine.max_lora_rank / RANK_STEP) * RANK_STEP
        kept, step_bytes = engine.most_adapters, 0
        if on_gpu:
            kept, step_bytes = (
                engine.max_loras,
                (engine.max_num_batched_tokens or 0) * self.pairs * _PAIR_BYTES,
            )
        number_bytes = 2 if engine.lora_dtype == "bfloat16" and not on_gpu else _MOST_NUMBER_BYTES
        return step_bytes + kept * rank * (self.shared + num_slots * self.slot) * number_bytes


NO_FEATURES = AdaptedFeatures(0, 0)


def adapted_features(
    directory: Path, config: dict[str, Any], modules: Collection[str] = ()
) -> AdaptedFeatures:
    """Sum the matrices of a checkpoint's text decoder, without its layers for multi-token prediction.

    Args:
        modules: Names of the modules that adapters may change. Empty means all.

    Raises:
        PreflightError: A file is missing or damaged.
    """
    count, hidden = max(1, num_experts(config)), most(config, "hidden_size")
    tensors = read_headers(directory)
    mtp = mtp_names(tensors, config)
    shared = experts = 0
    for name, tensor in tensors.items():
        is_of_experts = is_expert(name, tensor["shape"], count)
        module = EXPERTS if is_of_experts else _WEIGHT.sub("", name).rpartition(".")[2]
        if mtp.has(name) or NOT_OF_TEXT.search(name) or (modules and module not in modules):
            continue
        if is_of_experts:
            experts += _expert_features(name, tensor, hidden, count)
        elif len(tensor["shape"]) == 2 and _WEIGHT.search(name):
            shared += sum(_sides(tensor["shape"], tensor["dtype"], hidden))
    return AdaptedFeatures(shared, math.ceil(experts / count), pair_features(config, modules))


def pair_features(config: Mapping[str, Any], modules: Collection[str]) -> int:
    """Return the inner features of all experts that a row chooses, or 0 if adapters do not change experts."""
    if modules and EXPERTS not in modules:
        return 0
    inner = most(config, "moe_intermediate_size") or most(config, "intermediate_size")
    return (experts_per_token(config) or 1) * inner


def rank_adapter_bytes(options: Options, num_ranks: int) -> int:
    """Return the memory that adapters may take on a rank. The model has passed `check_start`."""
    if not options.engine.enable_lora:
        return 0
    config = read_config(Path(options.model))
    slots = slots_per_rank(
        max(1, num_experts(config)), num_ranks, num_redundant=options.engine.eplb_config.num_redundant_experts,
        placement_file=options.engine.expert_placement,
    )  # fmt: skip
    features = adapted_features(Path(options.model), config, options.lora_target_modules)
    return features.rank_bytes(options.engine, slots, on_gpu=options.device == "cuda")


def expert_features(hidden: int, inner: int, *, is_down: bool, is_joint: bool) -> int:
    """Return the inputs plus outputs of what an adapter adds to a matrix of an expert.

    Args:
        is_joint: The matrix holds gate and up. An adapter may have them apart: it then takes both ranks for the joint matrix.
    """
    if is_down:
        return hidden + inner
    return 2 * (hidden + inner) if is_joint else hidden + 2 * inner


def _expert_features(name: str, tensor: Mapping[str, Any], hidden: int, count: int) -> int:
    """Return the features of all experts that a tensor holds: one, or `count`."""
    shape, dtype = tensor["shape"], tensor["dtype"]
    is_weight = (len(shape) >= 3 or _WEIGHT.search(name)) and not name.endswith(("bias", *NOT_KEPT))
    if not is_weight or SCALES.search(name):
        return 0
    is_joint = len(shape) >= 3
    sides = _sides(shape[1:] if is_joint else shape, dtype, hidden)
    outer = hidden if hidden in sides else max(sides)
    each = expert_features(outer, sum(sides) - outer, is_down=bool(_IS_DOWN.search(name)), is_joint=is_joint)
    return each * (count if is_joint else 1)


def _sides(shape: list[int], dtype: str, hidden: int) -> tuple[int, int]:
    """Return both sides of a matrix. One side of a matrix of several weights per word counts as the model's hidden size."""
    codes = _CODES_PER_WORD.get(dtype, 1)
    if codes == 1 and len(shape) == 2:
        return shape[0], shape[1]
    return hidden, math.ceil(codes * math.prod(shape) / max(1, hidden))
