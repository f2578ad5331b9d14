"""Multi-token prediction: a checkpoint's layers that draft the tokens after the next one.

An MTP layer joins the embedding of the token after a position with the hidden state of that position, runs a
decoder layer of the model's own kind on them, with its own cache, and a norm. The model's output projection
gives logits for the token two positions later (DeepSeek-V3, 2024). The output is the next layer's hidden state,
or the same layer's again if drafts are deeper than there are layers. Drafts are equal to those of `transformers`'
`MtpModel`, which counts rotary positions one higher: rotary angles depend only on distances between tokens. Next to images, where
positions do not count tokens, a row has the position of its hidden state, as in vLLM.
The decoder layers have the model's classes; their tensors determine their kinds (`moe.mtp.names`).
Rejected: `MtpModel` itself. It needs a loaded model, supports the configurations of a third of the families,
and does not number its layers so that they can share a cache with the model's own.

Legend: T rows, D hidden dim, R rows that need logits, V vocabulary.
"""

import copy
import inspect
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast

from attention.transformers_names import CACHE
from moe.mtp.names import MtpBlock
from moe.projection import project
from moe.text_part import Output, body_of

NAME = "drafting"


class Origin(NamedTuple):
    """Hidden states that rows continue from, and the index of each row's."""

    hidden_TD: Tensor
    row_T: Tensor


class Drafted(NamedTuple):
    """Output of an MTP layer."""

    logits_RV: Tensor  # float32, new
    hidden_TD: Tensor  # normed, all rows: input of the next draft, valid until then


class DraftRunner(Protocol):
    """Runs an MTP layer instead of its modules."""

    def draft(self, token_T: Tensor, origin: Origin, pages: Any, logits_R: Tensor) -> Drafted | None:
        """Draft as `Drafting.draft` does. Return None if the modules must run this time."""


class MtpHead(nn.Module):
    """Parts of an MTP layer outside its decoder layers."""

    def __init__(self, norm: nn.Module, hidden_size: int) -> None:
        """`norm` is the decoder's last norm, on meta; the layer's norms are of the same kind."""
        super().__init__()
        self.enorm, self.hnorm, self.norm = (copy.deepcopy(norm) for _ in range(3))
        self.eh_proj = nn.Linear(2 * hidden_size, hidden_size, bias=False)


class Drafting(nn.Module):
    """All MTP layers of a model: a part of it that its own forward does not call."""

    def __init__(self, net: PreTrainedModel, layers: Sequence[Sequence[MtpBlock]]) -> None:
        """Build the modules on the default device.

        Args:
            net: Model.
            layers: Decoder layers of each MTP layer.
        """
        super().__init__()
        decoder: Any = net.get_decoder().base_model
        self._net, self._layers = weakref.ref(net), [list(blocks) for blocks in layers]
        config = decoder.config
        norm = next(part for name, part in reversed([*decoder.named_children()]) if "norm" in name)
        # A device's faster forms of layers, by layer number.
        self.programs: dict[int, DraftRunner] = {}
        self.heads = nn.ModuleList([MtpHead(norm, int(config.hidden_size)) for _ in layers])
        blocks = [block for each in layers for block in each]
        with _extended(config, blocks):
            kind = type(decoder.layers[-1])
            self.layers = nn.ModuleDict({str(each.number): kind(config, each.number) for each in blocks})

    @property
    def num_layers(self) -> int:
        """Number of MTP layers. Deeper drafts use them again."""
        return len(self._layers)

    def blocks(self, layer: int) -> list[nn.Module]:
        """Return the decoder layers of one MTP layer, in order."""
        return [self.layers[str(block.number)] for block in self._layers[layer]]

    @property
    def num_blocks(self) -> int:
        """Number of their decoder layers, each with a place in the cache."""
        return len(self.layers)

    def draft(
        self, depth: int, token_T: Tensor, origin: Origin, positions: Tensor, pages: Any, logits_R: Tensor
    ) -> Drafted:
        """Run the MTP layer for a depth; collective if it has experts.

        Args:
            depth: Depth of the draft, from 0.
            token_T: int64 token after each row's.
            origin: Hidden states of each row, from the decoder (after its final norm) or from the previous draft.
            positions: int64 `Step.model_positions`: [1, T], or [4, 1, T] in tokens, time, height and width.
            pages: Cache.
            logits_R: Rows that need logits.
        """
        program = self.programs.get(depth % self.num_layers)
        drafted = None if program is None else program.draft(token_T, origin, pages, logits_R)
        if drafted is not None:
            return drafted
        hidden_TD = self(depth, token_T, origin.hidden_TD[origin.row_T], positions, pages)
        net: Any = self._net()
        decoded = Output(BaseModelOutputWithPast(last_hidden_state=hidden_TD[None]))
        return Drafted(project(net, body_of(net), decoded, logits_R), hidden_TD)

    def forward(
        self, depth: int, token_T: Tensor, hidden_TD: Tensor, positions: Tensor, pages: Any
    ) -> Tensor:
        """Run the modules up to the last norm: [T, D]. `hidden_TD` has each row's hidden state; otherwise like `draft`."""
        decoder: Any = self._decoder
        head: Any = self.heads[depth % self.num_layers]
        embedded = decoder.get_input_embeddings()(token_T[None])
        joined = torch.cat((head.enorm(embedded), head.hnorm(hidden_TD[None])), dim=-1)
        x = head.eh_proj(joined)
        for block in self._layers[depth % self.num_layers]:
            x = self._run(block, x, positions, pages)
        normed: Tensor = head.norm(x)
        return normed[0]

    def _run(self, block: MtpBlock, x: Tensor, positions: Tensor, pages: Any) -> Tensor:
        decoder: Any = self._decoder
        axes, positions = (positions[1:], positions[0]) if positions.dim() == 3 else (positions, positions)
        rotary: Any = getattr(decoder, "rotary_emb", None)
        angles = {}
        if rotary is not None:
            by_kind = "layer_type" in inspect.signature(type(rotary).forward).parameters
            kind = (_attention_kind(decoder.config, block),) if by_kind else ()
            angles["position_embeddings"] = rotary(x, axes, *kind)
        out = self.layers[str(block.number)](
            x, attention_mask=self._mask(block, x, positions, pages), position_ids=positions,
            use_cache=True, pages=pages, **angles, **{CACHE: pages},
        )  # fmt: skip
        rows: Tensor = out[0] if isinstance(out, tuple) else out  # some also return their index's choice
        return rows

    def _mask(self, block: MtpBlock, x: Tensor, positions: Tensor, pages: Any) -> Any:
        """Return the stand-in for a mask that our organs take."""
        config = self._decoder.config
        slides = _attention_kind(config, block) == "sliding_attention"
        make = create_sliding_window_causal_mask if slides else create_causal_mask
        return make(
            config=config, inputs_embeds=x, attention_mask=None, position_ids=positions, **{CACHE: pages}
        )

    @property
    def _decoder(self) -> Any:
        net: Any = self._net()
        return net.get_decoder().base_model


def add_drafting(net: PreTrainedModel, layers: Sequence[Sequence[MtpBlock]]) -> None:
    """Add MTP layers to a model on meta, as the attribute `drafting`."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(net.dtype)
    try:
        with torch.device("meta"):
            setattr(net, NAME, Drafting(net, layers).eval())
    finally:
        torch.set_default_dtype(dtype)


def drafting_of(net: nn.Module) -> Drafting | None:
    """Return a model's MTP layers, or None if it has none."""
    found = getattr(net, NAME, None)
    return found if isinstance(found, Drafting) else None


def _attention_kind(config: Any, block: MtpBlock) -> str:
    said = getattr(config, "mtp_layer_types", None) or ()
    at = block.number - int(config.num_hidden_layers)
    if at < len(said):
        return str(said[at])
    # MiMo-V2's configuration does not list its sliding MTP layers. There, only sliding layers have sinks.
    return "sliding_attention" if block.has_sinks else "full_attention"


def _more(name: str, config: Any, block: MtpBlock, values: Sequence[Any]) -> Any:
    """Return the entry of a configuration's list for one more layer."""
    if name in ("layer_types", "layers_block_type"):
        wanted = _attention_kind(config, block) if block.has_attention else "moe"
        return next((kind for kind in (wanted, "indexed_attention") if kind in values), values[-1])
    if name == "mlp_layer_types":
        return "sparse" if block.has_experts else "dense"
    return "full" if name == "indexer_types" else values[-1]


@contextmanager
def _extended(config: Any, blocks: Sequence[MtpBlock]) -> Iterator[None]:
    """Extend a configuration's lists of layers while these are built. Modules keep a reference to the configuration."""
    count = int(config.num_hidden_layers)
    lists = {
        name: value for name, value in vars(config).items() if isinstance(value, list) and len(value) == count
    }
    try:
        for name, value in lists.items():
            setattr(config, name, [*value, *(_more(name, config, block, value) for block in blocks)])
        yield
    finally:
        for name, value in lists.items():
            setattr(config, name, value)
