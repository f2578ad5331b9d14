"""Multi-token prediction: the layers of a checkpoint that draft the tokens after the next one.

An MTP layer joins the embedding of the token after a position with the hidden state that was computed there, runs a
decoder layer of the model's own kind over the two, with a cache of its own, and a norm; the model's output projection
makes logits of that: a draft of the token two places on (DeepSeek-V3, 2024). Its output is the next layer's hidden state,
or, where drafts go deeper than there are layers, the same layer's again. What it drafts is equal to `transformers`'
`MtpModel`, which counts rotary positions one higher: rotary angles only say how far apart tokens are.
The decoder layers' classes are the model's; which kind each is its tensors say (`moe.mtp.names`).
Rejected: `MtpModel` itself, which is built of a loaded model, knows its configuration's names for a third of the families,
and leaves numbering that a cache shared with the model's own layers needs.

Legend: T rows, D hidden dim, R rows whose logits are wanted, V vocabulary.
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
from moe.text_part import Output, body_of, project

NAME = "drafting"


class Origin(NamedTuple):
    """Where rows go on from: hidden states, and which of these each row's is."""

    hidden_TD: Tensor
    row_T: Tensor


class Drafted(NamedTuple):
    """What an MTP layer makes."""

    logits_RV: Tensor  # float32, new
    hidden_TD: Tensor  # normed, of all rows: what the next draft goes on from; stays until then


class DraftRunner(Protocol):
    """Runs an MTP layer in its modules' place."""

    def draft(self, token_T: Tensor, origin: Origin, pages: Any, logits_R: Tensor) -> Drafted | None:
        """See `Drafting.draft`; None: the modules are to do it this time."""
        ...


class MtpHead(nn.Module):
    """What an MTP layer has beside its decoder layers."""

    def __init__(self, norm: nn.Module, hidden_size: int) -> None:
        """`norm`: the decoder's last, on meta, of whose kind the layer's are."""
        super().__init__()
        self.enorm, self.hnorm, self.norm = (copy.deepcopy(norm) for _ in range(3))
        self.eh_proj = nn.Linear(2 * hidden_size, hidden_size, bias=False)


class Drafting(nn.Module):
    """All MTP layers of a model; a part of it, which its own forward does not call."""

    def __init__(self, net: PreTrainedModel, layers: Sequence[Sequence[MtpBlock]]) -> None:
        """Build the modules on the device that is the default.

        Args:
            net: the model.
            layers: the decoder layers of each.
        """
        super().__init__()
        decoder: Any = net.get_decoder().base_model
        self._net, self._layers = weakref.ref(net), [list(blocks) for blocks in layers]
        config = decoder.config
        norm = next(part for name, part in reversed([*decoder.named_children()]) if "norm" in name)
        self.programs: dict[
            int, DraftRunner
        ] = {}  # of layers, by their numbers: a device's faster form of them
        self.heads = nn.ModuleList([MtpHead(norm, int(config.hidden_size)) for _ in layers])
        blocks = [block for each in layers for block in each]
        with _extended(config, blocks):
            kind = type(decoder.layers[-1])
            self.layers = nn.ModuleDict({str(each.number): kind(config, each.number) for each in blocks})

    @property
    def num_layers(self) -> int:
        """MTP layers: drafts deeper than so many use them again."""
        return len(self._layers)

    def blocks(self, layer: int) -> list[nn.Module]:
        """The decoder layers of one of them, in order."""
        return [self.layers[str(block.number)] for block in self._layers[layer]]

    @property
    def num_blocks(self) -> int:
        """Their decoder layers, each with a place in the cache."""
        return len(self.layers)

    def draft(
        self, depth: int, token_T: Tensor, origin: Origin, position_T: Tensor, pages: Any, logits_R: Tensor
    ) -> Drafted:
        """Run the MTP layer for a depth. Collective where it has experts.

        Args:
            depth: of the draft, from 0.
            token_T: int64, the token after each row's.
            origin: what was computed at each row before: by the decoder, its norm included, or by the draft before.
            position_T: int64.
            pages: the cache.
            logits_R: rows whose logits are wanted.
        """
        program = self.programs.get(depth % self.num_layers)
        drafted = None if program is None else program.draft(token_T, origin, pages, logits_R)
        if drafted is not None:
            return drafted
        hidden_TD = self(depth, token_T, origin.hidden_TD[origin.row_T], position_T, pages)
        net: Any = self._net()
        decoded = Output(BaseModelOutputWithPast(last_hidden_state=hidden_TD[None]))
        return Drafted(project(net, body_of(net), decoded, logits_R), hidden_TD)

    def forward(
        self, depth: int, token_T: Tensor, hidden_TD: Tensor, position_T: Tensor, pages: Any
    ) -> Tensor:
        """Run the modules, up to the last norm: [T, D]. `hidden_TD`: of each row; for the rest see `draft`."""
        decoder: Any = self._decoder
        head: Any = self.heads[depth % self.num_layers]
        embedded = decoder.get_input_embeddings()(token_T[None])
        joined = torch.cat((head.enorm(embedded), head.hnorm(hidden_TD[None])), dim=-1)
        x = head.eh_proj(joined)
        for block in self._layers[depth % self.num_layers]:
            x = self._run(block, x, position_T[None], pages)
        normed: Tensor = head.norm(x)
        return normed[0]

    def _run(self, block: MtpBlock, x: Tensor, positions: Tensor, pages: Any) -> Tensor:
        decoder: Any = self._decoder
        rotary: Any = getattr(decoder, "rotary_emb", None)
        angles = {}
        if rotary is not None:
            by_kind = "layer_type" in inspect.signature(type(rotary).forward).parameters
            kind = (_attention_kind(decoder.config, block),) if by_kind else ()
            angles["position_embeddings"] = rotary(x, positions, *kind)
        out = self.layers[str(block.number)](
            x, attention_mask=self._mask(block, x, positions, pages), position_ids=positions,
            use_cache=True, pages=pages, **angles, **{CACHE: pages},
        )  # fmt: skip
        rows: Tensor = out[0] if isinstance(out, tuple) else out  # some return what their index chose as well
        return rows

    def _mask(self, block: MtpBlock, x: Tensor, positions: Tensor, pages: Any) -> Any:
        """Whatever stands for a mask where the model attends through our organs."""
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
    """Give a model on meta its MTP layers, as the attribute `drafting`."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(net.dtype)
    try:
        with torch.device("meta"):
            setattr(net, NAME, Drafting(net, layers).eval())
    finally:
        torch.set_default_dtype(dtype)


def drafting_of(net: nn.Module) -> Drafting | None:
    """Return a model's MTP layers, if it was given them."""
    found = getattr(net, NAME, None)
    return found if isinstance(found, Drafting) else None


def _attention_kind(config: Any, block: MtpBlock) -> str:
    said = getattr(config, "mtp_layer_types", None) or ()
    at = block.number - int(config.num_hidden_layers)
    if at < len(said):
        return str(said[at])
    # Only layers that slide have sinks in the families whose MTP layers slide and whose configuration does not say so (MiMo-V2).
    return "sliding_attention" if block.has_sinks else "full_attention"


def _more(name: str, config: Any, block: MtpBlock, values: Sequence[Any]) -> Any:
    """What a list of the configuration says of one more layer."""
    if name in ("layer_types", "layers_block_type"):
        wanted = _attention_kind(config, block) if block.has_attention else "moe"
        return next((kind for kind in (wanted, "indexed_attention") if kind in values), values[-1])
    if name == "mlp_layer_types":
        return "sparse" if block.has_experts else "dense"
    return "full" if name == "indexer_types" else values[-1]


@contextmanager
def _extended(config: Any, blocks: Sequence[MtpBlock]) -> Iterator[None]:
    """Let a configuration's lists of layers go on with these, while they are built: modules keep the configuration itself."""
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
