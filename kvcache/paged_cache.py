"""The paged KV cache: what a model's layers write, laid out for the attention kernels.

`transformers` calls `update(key, value, layer)` in every layer. It writes the new rows at the step's places and returns
its inputs; the attention module reads the pages. A block holds `block_tokens` tokens of one layer, contiguously, so that
it can be exported as bytes. Keys are stored transposed, [head, dim, token], so that a block is a panel of
`attention.cpu.tiles`; values are [head, token, dim]. Multi-head latent attention only stores its latents: [token,
kv_lora_rank + qk_rope_head_dim rounded up to 16] (DeepSeek-V2, 2024). Numbers are float32, or codes of eight bits with
scales (`kvcache.codes`). Recurrent layers keep a state per sequence, in slots: see `kvcache.states`. Paging follows
PagedAttention (Kwon et al., 2023). `kvcache.blocks` assigns the blocks.

Legend: N blocks, B tokens of a block (16), G KV heads, D key dim, V value dim rounded up to 16, W width of a latent's
row, T tokens, Z state slots.
"""

import contextlib
import mmap
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from kvcache import codes
from kvcache.codes import LATENT_SCALES_BYTES, SCALE_BYTES
from kvcache.progress import Progress
from kvcache.step import Step

BLOCK_TOKENS = codes.BLOCK_TOKENS


@dataclass(frozen=True, kw_only=True)
class StateShape:
    """The state of a recurrent layer per sequence, float32."""

    tail: tuple[int, int] = (0, 0)  # the convolution's last inputs: taps before the newest, channels
    recurrent: tuple[int, ...] = (0,)

    @property
    def num_bytes(self) -> int:
        """Bytes of one sequence's state."""
        return (prod(self.tail) + prod(self.recurrent)) * 4


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """What one layer caches per token, how far back it attends, and its state per sequence."""

    num_kv_heads: int = 0  # 0: nothing per token
    key_dim: int = 0
    value_dim: int = 0  # 0 if the layer caches latents; key_dim is then their size
    latent: bool = False
    window: int = 0  # tokens that a row attends to, itself included; 0: all
    # A row attends within its chunk of this many tokens, counted from the first token. 0: no chunks.
    chunk: int = 0
    sees_images: bool = False  # rows of an image attend to all of its rows, within the window
    source: int | None = None  # earlier layer with the keys and values to attend to; None uses its own
    index_dim: int = 0  # dim of a sparse index's key per token; 0: no index
    has_pools: bool = False  # the index is over pools of tokens: `index_dim` includes the keys of pools
    state: StateShape | None = None
    codes: torch.dtype | None = None  # int8 or float8_e4m3fn with scales; None stores numbers as computed

    @property
    def padded_key_dim(self) -> int:
        """Size of a token's key. A latent is rounded up to the kernels' 16 lanes."""
        return -(-self.key_dim // 16) * 16 if self.latent else self.key_dim

    @property
    def padded_value_dim(self) -> int:
        """The value dim rounded up to the kernels' 16 lanes."""
        return -(-self.value_dim // 16) * 16

    @property
    def index_codes(self) -> torch.dtype | None:
        """Format of the index, as `codes`. The keys of pools are made from numbers that are not rounded."""
        return None if self.has_pools else self.codes

    @property
    def token_bytes(self) -> int:
        """Bytes per token on a CPU, scales included."""
        numbers = self.num_kv_heads * (self.padded_key_dim + self.padded_value_dim)
        own, index = 4 * numbers, 4 * self.index_dim
        if self.codes is not None:
            scales = LATENT_SCALES_BYTES if self.latent else 2 * SCALE_BYTES
            own = numbers + self.num_kv_heads * scales
        if self.index_codes is not None and self.index_dim:
            index = self.index_dim + SCALE_BYTES
        return own + index

    def device_token_bytes(self, number_bytes: int) -> int:
        """Return the bytes per token on a GPU: without the CPU kernels' padding, codes with one scale per head and part.

        `number_bytes`: size of a number that is not a code.
        """
        numbers = self.num_kv_heads * (self.key_dim + self.value_dim)
        if self.codes is None:
            return (numbers + self.index_dim) * number_bytes
        index = self.index_dim * number_bytes
        if self.index_codes is not None and self.index_dim:
            index = self.index_dim + SCALE_BYTES
        return numbers + self.num_kv_heads * 2 * SCALE_BYTES + index


@njit(nogil=True, cache=True)
def _write_heads(key_TGD, value_TGV, slots, count, keys_NGDB, values_NGBV):  # type: ignore[no-untyped-def]
    for row in range(count):
        block, offset = slots[row] // BLOCK_TOKENS, slots[row] % BLOCK_TOKENS
        if offset == 0:  # a block's tail is read with weight 0, which requires finite values
            keys_NGDB[block] = 0.0
            values_NGBV[block] = 0.0
        for head in range(key_TGD.shape[1]):
            for dim in range(key_TGD.shape[2]):
                keys_NGDB[block, head, dim, offset] = key_TGD[row, head, dim]
            for dim in range(value_TGV.shape[2]):
                values_NGBV[block, head, offset, dim] = value_TGV[row, head, dim]


@njit(nogil=True, cache=True)
def _write_latents(latent_TR, rotary_TE, slots, count, pages_NBW):  # type: ignore[no-untyped-def]
    rank = latent_TR.shape[1]
    for row in range(count):
        block, offset = slots[row] // BLOCK_TOKENS, slots[row] % BLOCK_TOKENS
        if offset == 0:  # as above
            pages_NBW[block] = 0.0
        for dim in range(rank):
            pages_NBW[block, offset, dim] = latent_TR[row, dim]
        for dim in range(rotary_TE.shape[1]):
            pages_NBW[block, offset, rank + dim] = rotary_TE[row, dim]


@njit(nogil=True, cache=True)
def _write_index(key_TD, slots, count, pages_NDB):  # type: ignore[no-untyped-def]
    for row in range(count):
        block, offset = slots[row] // BLOCK_TOKENS, slots[row] % BLOCK_TOKENS
        if offset == 0:  # as above
            pages_NDB[block] = 0.0
        for dim in range(key_TD.shape[1]):
            pages_NDB[block, dim, offset] = key_TD[row, dim]


def _lazy_zeros(*shape: int, codes: torch.dtype | None = None) -> Tensor:
    """Return zeros that use memory only when written; torch.zeros would touch every page at once.

    Huge pages are avoided: a step would wait up to 8 ms for each of them if a virtual machine gets its memory late (docs/LOG.md).
    """
    dtype = np.dtype(np.float32 if codes is None else np.uint8)
    if not (num_bytes := prod(shape) * dtype.itemsize):
        return torch.empty(shape, dtype=codes or torch.float32)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    zeros = torch.from_numpy(np.frombuffer(memory, dtype).reshape(shape))
    return zeros if codes is None else zeros.view(codes)


class PagedCache:
    """All layers' pages of one rank. Replaces the `Cache` of `transformers`."""

    is_compileable = False
    is_sliding = (False,)

    def __init__(self, shapes: list[LayerShape], num_blocks: int, num_states: int = 0) -> None:
        """Reserve the pages and state slots (zeroed lazily by the operating system)."""
        self.shapes = shapes
        self.num_blocks = num_blocks
        self.step: Step | None = None
        self.progress = Progress()
        # With codes, keys, latents and indexes are longer by their scales (`kvcache.codes`).
        self.keys: list[Tensor] = []  # [N, G, D, B], or [N, B, W] for latents
        self.values: list[Tensor] = []  # [N, G, B, V]
        self.indexes: list[Tensor] = []  # [N, D, B]: keys of a sparse index
        self.tails: list[Tensor] = []  # [Z, taps - 1, channels]
        self.states: list[Tensor] = []  # [Z, ...]
        for shape in shapes:
            state = shape.state or StateShape()
            kind, index_kind = shape.codes, shape.index_codes
            is_even = shape.key_dim % 2 == shape.index_dim % 2 == 0
            assert kind is None or is_even, "kernels that read codes take two dims at a time"
            index_rows = shape.index_dim
            index_rows += codes.INDEX_SCALE_ROWS if index_kind is not None and index_rows else 0
            self.indexes.append(_lazy_zeros(num_blocks, index_rows, BLOCK_TOKENS, codes=index_kind))
            self.tails.append(_lazy_zeros(num_states, *state.tail))
            self.states.append(_lazy_zeros(num_states, *state.recurrent))
            if shape.latent:
                width = shape.padded_key_dim + (0 if kind is None else LATENT_SCALES_BYTES)
                self.keys.append(_lazy_zeros(num_blocks, BLOCK_TOKENS, width, codes=kind))
                self.values.append(torch.empty(0))
                continue
            heads, key_rows = shape.num_kv_heads, shape.key_dim
            key_rows += 0 if kind is None else codes.SCALE_ROWS
            self.keys.append(_lazy_zeros(num_blocks, heads, key_rows, BLOCK_TOKENS, codes=kind))
            self.values.append(
                _lazy_zeros(num_blocks, heads, BLOCK_TOKENS, shape.padded_value_dim, codes=kind)
            )

    def update(
        self, key: Tensor, value: Tensor, layer: int, *_options: Any, **_more: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the step's new rows of one layer.

        Args:
            key: [1, G, T, D] float32; for a latent layer [1, 1, T, kv_lora_rank].
            value: [1, G, T, V]; for a latent layer the rotary keys [1, 1, T, qk_rope_head_dim].
            layer: Index of the layer.

        Returns:
            Its inputs.
        """
        step = self.step
        assert step is not None, "a step must be set before the model runs"
        self.progress.note(layer)  # layers run in order
        slots_T, count, kind = step.cache_slot_T.numpy(), step.num_tokens, self.shapes[layer].codes
        keys, values = self.keys[layer], self.values[layer]
        if self.shapes[layer].latent:
            latent_TR, rotary_TE = (rows[0, 0].contiguous().numpy() for rows in (key, value))
            if kind is None:
                _write_latents(latent_TR, rotary_TE, slots_T, count, keys.numpy())
            else:
                rows = latent_TR, rotary_TE, slots_T, count, kind is codes.E4M3
                codes.write_latents(*rows, codes.bytes_of(keys), codes.scales_of(keys))
            return key, value
        # Modules project token by token, so this transposes back to the contiguous layout. All families then need
        # one layout and one compiled kernel.
        key_TGD, value_TGV = (rows[0].transpose(0, 1).contiguous().numpy() for rows in (key, value))
        if kind is None:
            _write_heads(key_TGD, value_TGV, slots_T, count, keys.numpy(), values.numpy())
        else:
            rows = key_TGD, value_TGV, slots_T, count, kind is codes.E4M3
            codes.write_heads(*rows, codes.bytes_of(keys), codes.bytes_of(values), codes.scales_of(keys))
        return key, value

    def update_indexer(self, key: Tensor, layer: int, *, more: int = 0) -> Tensor:
        """Write the step's new index keys of one layer: [1, T, D] float32. Returns them.

        `more`: number of further dims in a page after a token's key, which the index kernels write.
        """
        step = self.step
        assert step is not None, "a step must be set before the model runs"
        key_TD, pages, kind = key[0].contiguous().numpy(), self.indexes[layer], self.shapes[layer].index_codes
        slots_T, count = step.cache_slot_T.numpy(), step.num_tokens
        if kind is None:
            _write_index(key_TD, slots_T, count, pages.numpy())
        else:
            is_e4m3 = kind is codes.E4M3
            codes.write_index(key_TD, slots_T, count, is_e4m3, codes.bytes_of(pages), codes.scales_of(pages))
        return key

    def parts(self, layer: int) -> list[Tensor]:
        """Return the parts of a layer's blocks, scales included: tensors [N, ...], contiguous. Some may be empty."""
        values = [] if self.shapes[layer].latent else [self.values[layer]]
        return [self.keys[layer], *values, self.indexes[layer]]

    def block_bytes(self, layer: int, block: int) -> bytes:
        """Return one block of one layer as contiguous bytes: its share of every part."""
        blocks = (part[block].cpu().view(-1).view(torch.uint8) for part in self.parts(layer) if part.numel())
        return b"".join(block.numpy().tobytes() for block in blocks)

    def get_seq_length(self, layer_idx: int | None = None) -> int | Tensor:
        """Return zero to a model, because positions come with the step and not from the cache's length.

        A layer adds the rows' numbers in the batch to the result, so it gets positions minus these: [T] int64.
        """
        if layer_idx is None:
            return 0
        assert self.step is not None, "a step must be set before the model runs"
        positions_T = self.step.positions
        return positions_T - torch.arange(len(positions_T), device=positions_T.device)

    def get_query_offset(self, layer_idx: int | None = 0) -> int:
        """Return zero, as `get_seq_length` for a model."""
        return 0

    def get_mask_sizes(self, _rows: Any, layer_idx: int | None = 0) -> tuple[int, int]:
        """Return placeholder sizes, which code that builds masks requires."""
        return 1, 0

    def has_previous_state(self, *_layer: Any, **_options: Any) -> bool:
        """Return False: recurrences read the step's state slots themselves (`attention.recurrences.mixers`)."""
        return False

    def get_conv_state(self, *_layer: Any, **_options: Any) -> None:
        """Return None, for the same reason."""
        return

    get_recurrent_state = get_conv_state

    def update_conv_state(self, conv_states: Tensor, *_layer: Any, **_options: Any) -> Tensor:
        """Return the step's own inputs: the convolution prepends the earlier ones."""
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, *_layer: Any, **_options: Any) -> Tensor:
        """Do nothing: the recurrence has already written the states."""
        return recurrent_states
