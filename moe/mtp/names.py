"""Find a checkpoint's tensors of multi-token-prediction (MTP) layers, and map their names to this code's.

Publishers name these layers in four ways, and configurations contain little about them. So they are found by tensor
names: a projection of a token's embedding and a hidden state (`eh_proj`, `fc`) starts a layer. Supported are
`model.layers.N.` after the decoder's last layer (DeepSeek-V3, GLM-4.5 and later, Hy3, Ling), `mtp.layers.N.` with the
projection next to the layers (Qwen3-Next, Qwen3.5) or within (Nemotron-H, several decoder layers each), and
`model.mtp.layers.N.` (MiMo-V2). Does not use torch.
Rejected: a table of model types, late for each new one.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

PREFIX = "drafting."  # of names in this code: a model's attribute with its `moe.mtp.layers.Drafting`
# Names of the parts that join a token's embedding with a hidden state, if they are within a layer.
_WITHIN = {
    "enorm": "enorm",
    "hnorm": "hnorm",
    "eh_proj": "eh_proj",
    "shared_head.norm": "norm",
    "final_layernorm": "norm",
}
# Names of these parts if they are next to the layers.
_BESIDE = {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "eh_proj", "norm": "norm"}
_OF_BLOCK = {"pre_mlp_layernorm": "post_attention_layernorm"}  # names that only MTP layers use
_SHARED = ("embed_tokens", "shared_head.head")  # copies of the model's own
_STARTS = re.compile(r"^((?:.*\.)?layers\.)(\d+)\.eh_proj\.")
_STARTS_BESIDE = re.compile(r"^((?:.*\.)?mtp\.)fc\.")
_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")  # in configurations


@dataclass(frozen=True, kw_only=True)
class MtpBlock:
    """One decoder layer of an MTP layer.

    Attributes:
        number: Layer number, counted on from the decoder's layers.
        has_experts, has_attention, has_sinks: Kinds of tensors that it has.
    """

    number: int
    has_experts: bool = True
    has_attention: bool = True
    has_sinks: bool = False


class _Part(NamedTuple):
    """Place of a tensor in the MTP layers."""

    at: int  # the layer's index among all decoder layers of MTP layers
    name: str  # within the layer
    joins: bool  # True if it joins the layer's inputs


class MtpNames:
    """MTP layers of a checkpoint.

    Attributes:
        layers: Decoder layers of each MTP layer; most have one.
    """

    def __init__(self, names: Iterable[str], num_hidden_layers: int) -> None:
        """`names` are those of all tensors; `num_hidden_layers` counts the decoder's layers."""
        all_names = list(names)
        self._first = num_hidden_layers
        self._prefix, self._beside, self._offset, starts = _find(all_names, num_hidden_layers)
        parts = [part for name in all_names if (part := self._part(name)) is not None]
        numbers = sorted({part.at for part in parts if not part.joins} | starts)
        blocks = {at: self._block(at, {part.name for part in parts if part.at == at}) for at in numbers}
        bounds = [*sorted(starts), (numbers or [0])[-1] + 1]
        self.layers: tuple[tuple[MtpBlock, ...], ...] = tuple(
            tuple(blocks[at] for at in numbers if begin <= at < end) for begin, end in pairwise(bounds)
        )
        self._starts = sorted(starts)

    def has(self, name: str) -> bool:
        """Return whether a tensor is of these layers, under its publisher's name or this code's (random weights have that)."""
        return self.renamed(name) is not None or name.startswith(PREFIX)

    def renamed(self, name: str) -> str | None:
        """Return a tensor's name in this code, "" for a copy of the model's own, or None outside MTP layers."""
        part = self._part(name)
        if part is None:
            return None
        if part.name.startswith(_SHARED):
            return ""
        if part.joins:
            layer = max((at for at, start in enumerate(self._starts) if start <= part.at), default=0)
            return f"{PREFIX}heads.{layer}.{part.name}"
        return f"{PREFIX}layers.{self._first + part.at}.{part.name}"

    def _part(self, name: str) -> _Part | None:
        if self._beside and name.startswith(self._beside):
            rest = name.removeprefix(self._beside)
            joining, dot, leaf = rest.partition(".")
            if joining in _BESIDE:
                return _Part(0, f"{_BESIDE[joining]}{dot}{leaf}", joins=True)
            if rest.startswith(_SHARED):
                return _Part(0, rest, joins=True)
        if not self._prefix or not name.startswith(self._prefix):
            return None
        number, _, rest = name.removeprefix(self._prefix).partition(".")
        if not number.isdigit() or int(number) < self._offset:
            return None
        at = int(number) - self._offset
        for theirs, ours in _WITHIN.items():
            if not self._beside and rest.startswith(f"{theirs}."):
                return _Part(at, ours + rest.removeprefix(theirs), joins=True)
        if rest.startswith(_SHARED):
            return _Part(at, rest, joins=True)
        first, dot, leaf = rest.partition(".")
        return _Part(at, f"{_OF_BLOCK.get(first, first)}{dot}{leaf}", joins=False)

    def _block(self, at: int, names: set[str]) -> MtpBlock:
        return MtpBlock(
            number=self._first + at,
            has_experts=any(".experts." in name for name in names),
            has_attention=any(re.search(r"\.(q|o|q_a|kv_a)_proj", name) for name in names),
            has_sinks=any(re.search(r"sink", name) for name in names),
        )


def _find(names: Iterable[str], num_hidden_layers: int) -> tuple[str, str, int, set[int]]:
    """Return the prefix of layers, of parts next to them (or ""), the first number, and the layers that start an MTP layer."""
    starts: dict[str, set[int]] = {}
    for name in names:
        if found := _STARTS_BESIDE.match(name):
            return f"{found[1]}layers.", found[1], 0, {0}
        if found := _STARTS.match(name):
            starts.setdefault(found[1], set()).add(int(found[2]))
    for prefix, numbers in starts.items():
        is_apart = prefix.endswith("mtp.layers.")
        offset = 0 if is_apart else num_hidden_layers
        if min(numbers) >= offset:
            return prefix, "", offset, {number - offset for number in numbers}
    return "", "", 0, set()


def why_no_mtp(model_type: str, directory: Path) -> str:
    """Return a message that a checkpoint has no MTP layers, with alternatives."""
    return (
        f"{model_type}: {directory} has no layers for multi-token prediction under a known name (eh_proj in a layer after "
        f"the decoder's last or in mtp.layers, or mtp.fc): use the method ngram or suffix, which need none, or disable drafts"
    )


def layers_of_config(config: Any) -> tuple[tuple[MtpBlock, ...], ...]:
    """Return the MTP layers that a text decoder's configuration lists, for weights that are not on disk."""
    count = next((int(found) for name in _COUNTS if (found := getattr(config, name, None))), 0)
    first = int(config.num_hidden_layers)
    return tuple((MtpBlock(number=first + at),) for at in range(count))
