"""Record what a model's layers need of the cache and of attention, and refuse what the kernels do not support."""

from collections.abc import Container, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attention.sparse.index import AnyMask
from kvcache.paged_cache import LayerShape, StateShape
from kvcache.step import ROW_MULTIPLE
from moe.families import UnsupportedModelError

# Attention keywords that the organ supports, and those without effect on results at inference.
SERVED = {"indices", "sliding_window", "s_aux"}
WITHOUT_EFFECT = {
    "cache_position", "dropout", "input_ids", "is_causal", "output_attentions", "output_hidden_states",
    "output_router_logits", "position_ids", "use_cache",
}  # fmt: skip


class MissingStateError(UnsupportedModelError, AttributeError):
    """A layer needs more of its cache than there is. Also an AttributeError, so that `hasattr` works."""


@dataclass(frozen=True)
class Sight(AnyMask):
    """Tokens that a mask shows to a row: the last `window`, itself included. 0 means all, None another pattern.

    With a `chunk`, only tokens of the row's own chunk of that many tokens, counted from the first. 0: no chunks.
    """

    window: int | None
    chunk: int = 0


class Attended(NamedTuple):
    """One layer's call of attention."""

    is_latent: bool
    window: int
    chunk: int
    source: int | None  # layer whose keys and values it reads; None for its own


class Notes:
    """Takes the cache's place and records how the layers use the cache and attention."""

    is_compileable = False
    is_sliding = (False,)

    def __init__(self, model_type: str) -> None:
        """`model_type` is used in messages."""
        self.model_type = model_type
        self.cached: dict[int, tuple[torch.Size, torch.Size]] = {}  # key and value shapes given to `update`
        self._rows: dict[int, tuple[Tensor, Tensor]] = {}  # those keys and values
        self.attended: dict[int, Attended] = {}
        self.tails: dict[int, tuple[int, int]] = {}  # rows that convolutions keep: see `StateShape`
        self.states: dict[int, Tensor] = {}  # recurrent state of one sequence, on meta
        self.indexed: dict[int, int] = {}  # dims of index keys
        self.pooled: set[int] = set()  # layers with an index over pools
        self._chosen: list[Tensor] = []  # outputs of indexes
        self._asked: set[int] = set()  # layers that use a state
        self._to_convolve: dict[int, Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        """Refuse attributes that only caches with other kinds of state have."""
        raise MissingStateError(
            f"{self.model_type} needs {name!r} in its cache: it keeps more than keys and values per token and the "
            f"states of convolutions and recurrences per sequence, which the paged KV cache cannot hold"
        )

    def update(
        self, key: Tensor, value: Tensor, layer: int, *_options: Any, **_more: Any
    ) -> tuple[Tensor, Tensor]:
        """Record what a layer caches; return its inputs."""
        if layer in self.cached:
            raise UnsupportedModelError(f"{self.model_type}: layer {layer} caches keys and values twice")
        self.cached[layer] = (key.shape, value.shape)
        self._rows[layer] = (key, value)
        return key, value

    def get_seq_length(self, layer_idx: int | None = None) -> int | Tensor:
        """Return 0; for a layer, the offset of positions from row numbers, 0 for every row (see `PagedCache`)."""
        return 0 if layer_idx is None else torch.zeros(ROW_MULTIPLE, dtype=torch.int64, device="meta")

    def get_query_offset(self, layer_idx: int | None = 0) -> int:
        """Return 0: the cache is empty."""
        return 0

    def get_mask_sizes(self, _rows: Any, layer_idx: int | None = 0) -> tuple[int, int]:
        """Return the number of keys that a mask covers, and the first."""
        return ROW_MULTIPLE, 0

    def has_previous_state(self, _layer_idx: int | None = None, **_options: Any) -> bool:
        """Return False: the cache is empty."""
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Record that a layer keeps a convolution state; it has none yet."""
        self._note_state(layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Record that a layer keeps a recurrent state; it has none yet."""
        self._note_state(layer_idx, state_idx)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **_options: Any
    ) -> Tensor:
        """Record the input of a layer's next convolution; return it."""
        self._note_state(layer_idx, state_idx)
        self._to_convolve[layer_idx] = conv_states
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_options: Any
    ) -> Tensor:
        """Check that the state a layer keeps is the one our recurrence returned; return it.

        Raises:
            UnsupportedModelError: It is another tensor.
        """
        self._note_state(layer_idx, state_idx)
        if recurrent_states is not self.states.get(layer_idx):
            self._refuse_state(layer_idx, "computes")
        return recurrent_states

    def convolve(self, layer: int, inputs: Tensor, taps: int) -> None:
        """Record one layer's convolution. Its input must be the tensor that was passed to the cache."""
        if inputs is not self._to_convolve.pop(layer, None):
            self._refuse_state(layer, "convolves")
        self.tails[layer] = (taps - 1, inputs.shape[1])

    def update_indexer(self, key: Tensor, layer: int, *, more: int = 0) -> Tensor:
        """Record a layer's index keys, [1, T, D], and `more` dims that a page has per token; return the keys."""
        if layer in self.indexed or key.dim() != 3:
            raise UnsupportedModelError(f"{self.model_type}: layer {layer} has an unsupported kind of index")
        self.indexed[layer] = key.shape[2] + more
        if more:
            self.pooled.add(layer)
        return key

    def choose(self, query_TID: Tensor, count: int) -> Tensor:
        """Record that an index chose tokens: [1, T, count]."""
        chosen = query_TID.new_empty(1, len(query_TID), count, dtype=torch.int32)
        self._chosen.append(chosen)
        return chosen

    def _note_state(self, layer: int, state_idx: int) -> None:
        if state_idx:
            raise UnsupportedModelError(
                f"{self.model_type}: layer {layer} keeps several states of one kind; only one is supported"
            )
        self._asked.add(layer)

    def _refuse_state(self, layer: int, does: str) -> None:
        raise UnsupportedModelError(
            f"{self.model_type}: layer {layer} keeps a state that it {does} with its own code; no kernel of ours keeps "
            f"the sequences of such a state apart"
        )

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: dict[str, Any]
    ) -> None:
        """Record one layer's attention.

        Args:
            mask: A `Sight`, unless the layer made its own mask.
            options: Further keywords of the call.

        Raises:
            UnsupportedModelError: The layer needs something that the attention organ does not support.
        """
        layer, is_latent = int(module.layer_idx), hasattr(module, "expand_kv")
        source = None if layer in self.cached else self._source(key, value)
        problems = chain(
            _problems_of_call(query, key, mask, options),
            self._problems_of_layer(layer, is_latent, source, mask, options),
        )
        for problem in problems:
            raise UnsupportedModelError(f"{self.model_type}: the attention of layer {layer} {problem}")
        self.attended[layer] = Attended(is_latent, mask.window, mask.chunk, source)

    def _problems_of_layer(
        self, layer: int, is_latent: bool, source: int | None, mask: Sight, options: dict[str, Any]
    ) -> Iterator[str]:
        chosen, has_sinks = options.get("indices"), options.get("s_aux") is not None
        if chosen is not None and not (is_latent and any(chosen is each for each in self._chosen)):
            yield "picks tokens by an index that is not over the latents of its own sequence"
        if chosen is not None and mask.window:
            yield "has both an index and a sliding window, which the attention kernels do not support"
        if chosen is None and layer in self.indexed:
            yield "has an index but does not pass the tokens that it chose"
        if is_latent and mask.chunk:
            yield "attends to latents in chunks, which the attention kernels do not support"
        if is_latent and has_sinks and chosen is None:
            yield "has sinks and latents, which the attention kernels do not support together"
        if layer in self.attended or (source is None and layer not in self.cached):
            yield "reads keys and values that no layer caches, or runs twice"
        if is_latent and source is not None:
            yield "reads another layer's latents, which is not supported"

    def _source(self, key: Tensor, value: Tensor) -> int | None:
        """Return the layer that cached these very tensors."""
        found = (layer for layer, rows in self._rows.items() if rows[0] is key and rows[1] is value)
        return next(found, None)

    def shapes(self, num_layers: int, row_by_row: Container[int] = ()) -> list[LayerShape]:
        """Return what each layer caches, in layer order.

        Args:
            row_by_row: Layers that may cache nothing.

        Raises:
            UnsupportedModelError: Another layer keeps neither keys and values per token nor a state.
        """
        for layer in sorted(self._asked - self.tails.keys() - self.states.keys() | self._to_convolve.keys()):
            self._refuse_state(layer, "computes")
        served = self.attended.keys() | self.tails.keys() | self.states.keys()
        silent = {layer for layer in range(num_layers) if layer not in served and layer not in row_by_row}
        reading = {layer for layer, attended in self.attended.items() if attended.source is not None}
        odd = sorted(
            self.cached.keys() ^ (self.attended.keys() - reading) | served - {*range(num_layers)} | silent
        )
        if not self.attended:
            raise UnsupportedModelError(
                f"{self.model_type} has no layer whose attention caches keys and values per token"
            )
        if odd:
            raise UnsupportedModelError(
                f"{self.model_type}: layers {odd[:8]} have no attention that caches keys and values per token, and no "
                f"recurrence that keeps a state"
            )
        return [self._shape(layer) for layer in range(num_layers)]

    def _shape(self, layer: int) -> LayerShape:
        state = None
        if layer in self.tails or layer in self.states:
            made = self.states.get(layer)
            state = StateShape(
                tail=self.tails.get(layer, (0, 0)), recurrent=(0,) if made is None else tuple(made.shape)
            )
        if layer not in self.attended:
            return LayerShape(state=state)  # perhaps without a state: some layers have only experts
        attended = self.attended[layer]
        if attended.source is not None:
            return LayerShape(
                window=attended.window, chunk=attended.chunk, source=attended.source, state=state
            )
        key, value = self.cached[layer]
        if attended.is_latent:
            return LayerShape(
                num_kv_heads=1,
                key_dim=key[3] + value[3],
                latent=True,
                window=attended.window,
                index_dim=self.indexed.get(layer, 0),
                has_pools=layer in self.pooled,
                state=state,
            )
        return LayerShape(
            num_kv_heads=key[1],
            key_dim=key[3],
            value_dim=value[3],
            window=attended.window,
            chunk=attended.chunk,
            state=state,
        )


def _problems_of_call(query: Tensor, key: Tensor, mask: Any, options: dict[str, Any]) -> Iterator[str]:
    given = {name for name, option in options.items() if option is not None}
    unknown, sinks = sorted(given - SERVED - WITHOUT_EFFECT), options.get("s_aux")
    if unknown or options.get("is_causal") is False:
        yield f"needs {', '.join(unknown) or 'is_causal=False'}, which the attention kernels do not support"
    if not isinstance(mask, Sight):
        yield "builds its own mask; only masks made by transformers are known to be causal"
    elif mask.window is None:
        yield "has a mask that is neither causal, nor a sliding window, nor in chunks"
    if sinks is not None and sinks.shape != query.shape[1:2]:
        yield f"has sinks of shape {list(sinks.shape)}, not one per head"
    if query.shape[1] % key.shape[1] or query.shape[3] != key.shape[3]:
        yield f"has queries {list(query.shape)} and keys {list(key.shape)}, which do not match"
