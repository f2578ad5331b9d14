"""Tiny checkpoints with multi-token-prediction layers under their publishers' names, and the drafts of `transformers`.

`transformers` has one class for these layers, `MtpModel`. It reads the layer names of some families, and the number of layers
from the configurations of some. For the other families, this module passes it what their files contain. Tensors are written
under published names by rules of this file, which share nothing with the product's.
"""

import copy
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, MtpCache
from transformers.core_model_loading import WeightRenaming
from transformers.modeling_layers import MtpModel

from attention.transformers_names import CACHE
from tests.support.models.families import make_model, seed_special_tensors

Tensors = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Published:
    """How a family's files store these layers.

    Attributes:
        config: Fields added to a family's configuration before the model is built.
        mtp_config: Fields that `MtpModel` also needs, because the configuration's class lacks them.
        prefix: Prefix of a layer's names. {at} counts from 0, {number} continues after the decoder's last layer.
        names: Names that differ from `MtpModel`'s.
        is_fused: All experts of a layer are one tensor.
    """

    config: dict[str, Any] = field(default_factory=dict)
    mtp_config: dict[str, Any] = field(default_factory=dict)
    prefix: str = "model.layers.{number}."
    names: dict[str, str] = field(default_factory=lambda: {"post_norm.": "shared_head.norm."})
    is_fused: bool = False


_SPARSE = {"mtp_mlp_layer_types": ["sparse"]}
_FULL = {"mtp_layer_types": ["full_attention"]}
_QWEN_NAMES = {
    "layers.0.enorm.": "mtp.pre_fc_norm_embedding.",
    "layers.0.hnorm.": "mtp.pre_fc_norm_hidden.",
    "layers.0.eh_proj.": "mtp.fc.",
    "layers.0.post_norm.": "mtp.norm.",
}
_LAST_IS_FULL = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
}
# Configurations on which `MtpModel` and our reader agree. The last decoder layer is of the same kind as the MTP layers.
PUBLISHED: dict[str, Published] = {
    "deepseek_v3": Published(),
    "glm4_moe": Published(),
    "glm4_moe_lite": Published(mtp_config=_SPARSE),
    "deepseek_v32": Published(mtp_config={**_SPARSE, "mtp_layer_types": ["indexed_attention"]}),
    "hy_v3": Published(mtp_config=_SPARSE, names={"post_norm.": "final_layernorm."}),
    "qwen3_next": Published(
        config=_LAST_IS_FULL, mtp_config=_FULL, prefix="mtp.layers.{at}.", names=_QWEN_NAMES
    ),
    "qwen3_5_moe": Published(
        config=_LAST_IS_FULL,
        mtp_config=_FULL,
        prefix="mtp.layers.{at}.",
        names=_QWEN_NAMES,
        is_fused=True,
    ),
    "glm_moe_dsa": Published(mtp_config={**_SPARSE, "mtp_layer_types": ["indexed_attention"]}),
    "bailing_hybrid": Published(
        config={
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
        },
        mtp_config={**_SPARSE, **_FULL},
        names={
            "post_norm.": "final_layernorm.",
            "self_attn.o_proj.": "attention.dense.",
            "self_attn.": "attention.",
            "e_score_correction_bias": "expert_bias",
        },
    ),
    "mellum": Published(config={"num_mtp_layers": 1}, prefix="mtp.layers.{at}.", names=_QWEN_NAMES),
    "nemotron_h": Published(prefix="mtp.layers.{at}."),
    "mimo_v2_flash": Published(
        mtp_config={
            "mtp_layer_types": ["sliding_attention"],
            "mtp_mlp_layer_types": ["dense"],
        },
        prefix="model.mtp.layers.{at}.",
        names={
            "post_norm.": "final_layernorm.",
            "post_attention_layernorm.": "pre_mlp_layernorm.",
            "self_attn.sinks": "self_attn.attention_sink_bias",
        },
    ),
}


class _MoreNames(MtpModel):
    """`MtpModel` with the names that it lacks: Hy3's and MiMo-V2's last norm, and MiMo-V2's second norm."""

    def get_weight_conversions(self, main_model: PreTrainedModel) -> list[Any]:
        known: list[Any] = super().get_weight_conversions(main_model)
        return [
            *known,
            WeightRenaming("mtp_block.final_layernorm.", "post_norm."),
            WeightRenaming("pre_mlp_layernorm.", "post_attention_layernorm."),
        ]

    def create_masks_for_mtp_layer(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Build masks also for layers with an index, for which `MtpModel` has none: the mask of full attention."""
        kinds = getattr(self.config, "layer_types", None)
        if kinds is not None and "indexed_attention" in kinds:
            self.config.layer_types = ["full_attention"] * len(kinds)
        masks: dict[str, Any] = super().create_masks_for_mtp_layer(*arguments, **options)
        self.config.layer_types = kinds
        return masks


# `transformers` finds the conversions that it knows by class name and module.
_MoreNames.__name__, _MoreNames.__module__ = MtpModel.__name__, MtpModel.__module__


class NemotronMtp(nn.Module):
    """Nemotron-H's one layer of two blocks, with `MtpModel`'s interface: `transformers` has no class for it."""

    def __init__(self, main_model: PreTrainedModel) -> None:
        super().__init__()
        text = copy.deepcopy(main_model.config)
        text.layer_types = ["full_attention", "moe"]
        decoder: Any = main_model.get_decoder()
        block, norm, width = type(decoder.layers[0]), decoder.norm_f, text.hidden_size
        self.config, self._main = text, (main_model,)
        layer = nn.Module()
        layer.enorm, layer.hnorm, layer.final_layernorm = (copy.deepcopy(norm) for _ in range(3))
        layer.eh_proj = nn.Linear(2 * width, width, bias=False)
        layer.blocks = nn.ModuleList([block(text, at) for at in range(2)])
        self.layers = nn.ModuleList([layer])

    def forward_layer(
        self,
        _layer: int,
        hidden: Tensor,
        _positions: Tensor,
        cache: Any,
        *,
        input_ids: Tensor,
        use_cache: bool,
    ) -> Tensor:
        layer: Any = self.layers[0]
        embedded = self._main[0].get_input_embeddings()(input_ids)
        x = layer.eh_proj(torch.cat([layer.enorm(embedded), layer.hnorm(hidden)], dim=-1))
        past, rows = cache.get_seq_length(0), x.shape[1]
        mask = torch.full((1, 1, rows, past + rows), -torch.inf).triu(past + 1)
        for block in layer.blocks:
            x = block(x, attention_mask=mask, use_cache=use_cache, **{CACHE: cache})
        normed: Tensor = layer.final_layernorm(x)
        return normed

    def _project_to_logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._main[0].get_output_embeddings()(hidden)
        return logits

    def published(self) -> Tensors:
        """Return its tensors under the names in published files."""
        tensors: Tensors = {}
        for name, tensor in self.layers[0].state_dict().items():
            own = re.sub(r"^blocks\.(\d+)\.", r"\1.", name)
            own = own if own[0].isdigit() else f"{int(own.startswith('final'))}.{own}"
            tensors |= _experts_apart(f"mtp.layers.{own}", tensor)
        return tensors


class Drafter(NamedTuple):
    """A checkpoint, and the two models of `transformers` for it."""

    directory: Path
    model: PreTrainedModel
    mtp: Any  # MtpModel

    def hidden(self, tokens: list[int]) -> Tensor:
        """Return the decoder's hidden states of a text, [tokens, D]."""
        output = self.model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
        hidden_TD: Tensor = output.hidden_states[-1][0]
        return hidden_TD

    def start(self) -> "Chain":
        """Return a chain with empty caches for one text."""
        is_known = isinstance(self.mtp, MtpModel)
        return Chain(self, MtpCache(config=self.mtp.config) if is_known else DynamicCache())


class Chain(NamedTuple):
    """Drafts of one text."""

    drafter: Drafter
    cache: DynamicCache

    def run(self, layer: int, tokens: list[int], hidden_TD: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Run a layer. Return its logits [tokens, V] and its hidden states.

        Args:
            tokens: Token after each row's position. first: Position of the first row.
        """
        mtp = self.drafter.mtp
        positions = torch.arange(first, first + len(tokens))[None] + 1 + layer
        out = mtp.forward_layer(
            layer, hidden_TD[None], positions, self.cache, input_ids=torch.tensor([tokens]), use_cache=True
        )
        return mtp._project_to_logits(out)[0], out[0]


def write_mtp_checkpoint(
    family: str,
    directory: Path,
    *,
    num_layers: int = 1,
    seed: int = 0,
    change: Callable[[Tensors], Tensors] = lambda tensors: tensors,
    model: PreTrainedModel | None = None,
    **settings: Any,
) -> Drafter:
    """Write a family's checkpoint with such layers.

    Args:
        change: Changes the file's tensors before they are written. The oracle reads the changed tensors too.
        model: Model with the family's `Published.config`. None makes one with `settings`.
    """
    published = PUBLISHED[family]
    model = model or make_model(family, seed, **{**published.config, **settings})
    _tell(model, published, num_layers)
    torch.manual_seed(seed + 1)
    is_known = family != "nemotron_h"
    mtp: Any = MtpModel(model, num_layers) if is_known else NemotronMtp(model)
    mtp.eval()
    _draw(mtp, seed + 1)
    model.save_pretrained(directory)
    file = directory / "model.safetensors"
    count = model.config.get_text_config().num_hidden_layers
    tensors = load_file(file) | (_published(mtp, published, count) if is_known else mtp.published())
    save_file({name: tensor.contiguous() for name, tensor in change(tensors).items()}, file, {"format": "pt"})
    _forget(directory, published)
    if not is_known:
        return Drafter(directory, model, mtp)
    return read_back(family, directory, num_layers=num_layers)


def read_back(family: str, directory: Path, *, num_layers: int = 1) -> Drafter:
    """Let `transformers` read both parts of a checkpoint."""
    published = PUBLISHED[family]
    model = type(make_model(family, **published.config)).from_pretrained(
        directory, attn_implementation="eager", dtype=torch.float32
    )
    model.eval().set_experts_implementation("eager")
    _tell(model, published, num_layers)
    count = model.config.get_text_config().num_hidden_layers
    # Its pattern matches only the layer numbers of the published sizes.
    if "{number}" in published.prefix:
        model._keys_to_ignore_on_load_unexpected = [
            rf"model\.layers\.{count + at}\." for at in range(num_layers)
        ]
    mtp = _MoreNames.from_pretrained(model)
    for layer in mtp.layers:  # some also return the choice of their index, which `MtpLayer` does not expect
        layer.mtp_block.register_forward_hook(
            lambda _block, _inputs, output: output[0] if isinstance(output, tuple) else output
        )
    return Drafter(directory, model, mtp.eval())


def _tell(model: PreTrainedModel, published: Published, num_layers: int) -> None:
    text = model.config.get_text_config()
    text.num_mtp_layers = num_layers
    for name, value in published.mtp_config.items():
        setattr(text, name, value * num_layers)


def _forget(directory: Path, published: Published) -> None:
    """Remove from the file the fields that published configurations lack."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for part in (config, config.get("text_config", {})):
        for name in published.mtp_config:
            part.pop(name, None)
    path.write_text(json.dumps(config))


def _draw(mtp: Any, seed: int) -> None:
    """Draw norms near their initial values, so that each has an effect, and all other tensors as the family does."""
    seed_special_tensors(mtp, seed)
    generator, spread = torch.Generator().manual_seed(seed), float(mtp.config.initializer_range)
    with torch.no_grad():
        for name, tensor in mtp.layers.named_parameters():
            drawn = torch.randn(tensor.shape, generator=generator)
            if tensor.dim() > 1:  # `MtpModel` does not initialise experts
                tensor.copy_(drawn * spread)
            elif "norm" in name:
                tensor.add_(drawn * 0.2)


def _published(mtp: MtpModel, published: Published, num_hidden_layers: int) -> Tensors:
    tensors: Tensors = {}
    for at, layer in enumerate(mtp.layers):
        prefix = published.prefix.format(at=at, number=num_hidden_layers + at)
        for name, tensor in layer.state_dict().items():
            own = name.removeprefix("mtp_block.")
            whole = f"layers.{at}.{own}"
            target = next(
                (whole.replace(ours, theirs) for ours, theirs in published.names.items() if whole.startswith(ours)),
                None,
            )  # fmt: skip
            if target is None:
                for ours, theirs in published.names.items():
                    own = own.replace(ours, theirs) if not ours.startswith("layers.") else own
                target = prefix + own
            tensors |= {target: tensor} if published.is_fused else _experts_apart(target, tensor)
    return tensors


def _experts_apart(name: str, tensor: Tensor) -> Tensors:
    """Return one tensor per expert and projection."""
    stem, _, leaf = name.rpartition(".experts.")
    if leaf == "gate_up_proj":
        halves = [(expert, *rows.chunk(2)) for expert, rows in enumerate(tensor)]
        parts = [(expert, "gate_proj", gate) for expert, gate, _ in halves]
        parts += [(expert, "up_proj", up) for expert, _, up in halves]
    elif leaf in ("up_proj", "down_proj"):
        parts = [(expert, leaf, rows) for expert, rows in enumerate(tensor)]
    else:
        return {name: tensor}
    return {f"{stem}.experts.{expert}.{kind}.weight": part.clone() for expert, kind, part in parts}
