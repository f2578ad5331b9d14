"""The paged KV cache on a GPU: token-major pages in the model's type.

The counterpart of `kvcache.paged_cache` for GPU kernels. A token's row is contiguous, [N, G, B, D], and latents are rows
of one head. Writes use the step's cache slots on the device and skip padded rows, so that a CUDA graph can replay them.

Legend: N blocks, B tokens of a block, G KV heads, D key dim, V value dim, L latent dim, E rotary dim, I index dim, P rows,
Z state slots.
"""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from kvcache.gpu.step import DeviceStep
from kvcache.gpu.write import Scales, write_pages
from kvcache.paged_cache import BLOCK_TOKENS, LayerShape, PagedCache, StateShape
from kvcache.progress import Progress

Room = TypeVar("Room")


class DeviceCache(PagedCache):
    """All layers' pages of one rank.

    Attributes:
        keys: [N, G, B, D] of each layer, or [N, B, L + E] for latents.
        values: [N, G, B, V], or empty for latents.
        indexes: [N, B, I]. tails, states: as `PagedCache`'s, float32.
        scales: Scales of each layer's keys and values, or latents and their rotary keys, if these are codes of eight bits;
            otherwise None. index_scales: those of index keys, [N, 1, B].
    """

    step: DeviceStep | None

    def __init__(
        self,
        shapes: list[LayerShape],
        num_blocks: int,
        num_states: int = 0,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate zeroed pages: a masked load of memory that was never written must not be NaN."""
        self.shapes, self.num_blocks, self.step = shapes, num_blocks, None
        self.progress = Progress()  # without layers: captured graphs do not note them
        self.keys, self.values, self.indexes, self.tails, self.states = [], [], [], [], []
        self.scales: list[Scales | None] = []
        self.index_scales: list[Tensor | None] = []
        self._rooms: dict[Hashable, Any] = {}

        def pages(*shape: int, of: torch.dtype | None = None) -> Tensor:
            return torch.zeros(num_blocks, *shape, dtype=of or dtype, device=device)

        for shape in shapes:
            state = shape.state or StateShape()
            self.indexes.append(pages(BLOCK_TOKENS, shape.index_dim, of=shape.index_codes))
            self.tails.append(torch.zeros(num_states, *state.tail, device=device))
            self.states.append(torch.zeros(num_states, *state.recurrent, device=device))
            heads = shape.num_kv_heads
            of_scales = (
                [pages(heads, BLOCK_TOKENS, of=torch.float32) for _ in range(3)] if shape.codes else []
            )
            self.scales.append(Scales(*of_scales[:2]) if of_scales else None)
            has_index = shape.index_dim and shape.index_codes is not None
            self.index_scales.append(of_scales[2] if has_index else None)
            if shape.latent:
                self.keys.append(pages(BLOCK_TOKENS, shape.key_dim, of=shape.codes))
                self.values.append(torch.empty(0, dtype=dtype, device=device))
            else:
                self.keys.append(pages(heads, BLOCK_TOKENS, shape.key_dim, of=shape.codes))
                self.values.append(pages(heads, BLOCK_TOKENS, shape.value_dim, of=shape.codes))

    def update(
        self, key: Tensor, value: Tensor, layer: int, *_options: Any, **_more: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the step's new rows of one layer.

        Args:
            key: [1, G, P, D]; for a latent layer [1, 1, P, kv_lora_rank].
            value: [1, G, P, V]; for a latent layer the rotary keys [1, 1, P, qk_rope_head_dim].
            layer: Index of the layer.

        Returns:
            Its inputs.
        """
        assert self.step is not None, "a step must be set before the model runs"
        slot_P = self.step.on_device.cache_slot_P
        scales = self.scales[layer]
        if self.shapes[layer].latent and scales is not None:
            pages, rank = self.keys[layer][:, None], key.shape[-1]
            write_pages(_by_row(key), slot_P, pages[..., :rank], _by_row(value), pages[..., rank:], scales)
        elif self.shapes[layer].latent:
            row_P1C = torch.cat((key[0, 0], value[0, 0]), dim=-1)[:, None]
            write_pages(row_P1C, slot_P, self.keys[layer][:, None])
        else:
            write_pages(_by_row(key), slot_P, self.keys[layer], _by_row(value), self.values[layer], scales)
        return key, value

    def update_indexer(self, key: Tensor, layer: int, *, more: int = 0) -> Tensor:
        """Write the step's new index keys of one layer: [1, P, I]. Returns them. `more`: zeros to append to each."""
        assert self.step is not None, "a step must be set before the model runs"
        pages, scale, slot_P = self.indexes[layer], self.index_scales[layer], self.step.on_device.cache_slot_P
        if scale is not None:
            write_pages(_by_row(key[None]), slot_P, pages[:, None], scales=Scales(scale, scale))
            return key
        rows_P1I = F.pad(key[0].to(pages.dtype), (0, more))[:, None].contiguous()
        write_pages(rows_P1I, slot_P, pages[:, None])
        return key

    def parts(self, layer: int) -> list[Tensor]:
        index = self.index_scales[layer]
        return [*super().parts(layer), *(self.scales[layer] or ()), *(() if index is None else (index,))]

    def room(self, key: Hashable, make: Callable[[], Room]) -> Room:
        """Return memory that kernels keep with the pages they read. Allocated at the first call."""
        if key not in self._rooms:
            self._rooms[key] = make()
        return cast(Room, self._rooms[key])


def token_bytes(shape: LayerShape, dtype: torch.dtype) -> int:
    """Return the bytes of one layer per token."""
    return shape.device_token_bytes(dtype.itemsize)


def _by_row(heads_1GPD: Tensor) -> Tensor:
    """View as [P, G, D], the last dim contiguous."""
    row_PGD = heads_1GPD[0].transpose(0, 1)
    return row_PGD if row_PGD.stride(-1) == 1 else row_PGD.contiguous()
