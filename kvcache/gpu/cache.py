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
from kvcache.gpu.write import write_pages
from kvcache.paged_cache import BLOCK_TOKENS, LayerShape, PagedCache, StateShape

Room = TypeVar("Room")


class DeviceCache(PagedCache):
    """All layers' pages of one rank.

    Attributes:
        keys: [N, G, B, D] of each layer, or [N, B, L + E] for latents.
        values: [N, G, B, V], or empty for latents.
        indexes: [N, B, I]. tails, states: as `PagedCache`'s, float32.
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
        self.keys, self.values, self.indexes, self.tails, self.states = [], [], [], [], []
        self._rooms: dict[Hashable, Any] = {}

        def pages(*shape: int) -> Tensor:
            return torch.zeros(num_blocks, *shape, dtype=dtype, device=device)

        for shape in shapes:
            state = shape.state or StateShape()
            self.indexes.append(pages(BLOCK_TOKENS, shape.index_dim))
            self.tails.append(torch.zeros(num_states, *state.tail, device=device))
            self.states.append(torch.zeros(num_states, *state.recurrent, device=device))
            if shape.latent:
                self.keys.append(pages(BLOCK_TOKENS, shape.key_dim))
                self.values.append(torch.empty(0, dtype=dtype, device=device))
            else:
                self.keys.append(pages(shape.num_kv_heads, BLOCK_TOKENS, shape.key_dim))
                self.values.append(pages(shape.num_kv_heads, BLOCK_TOKENS, shape.value_dim))

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
        if self.shapes[layer].latent:
            row_P1C = torch.cat((key[0, 0], value[0, 0]), dim=-1)[:, None]
            write_pages(row_P1C, slot_P, self.keys[layer][:, None])
        else:
            write_pages(_by_row(key), slot_P, self.keys[layer], _by_row(value), self.values[layer])
        return key, value

    def update_indexer(self, key: Tensor, layer: int, *, more: int = 0) -> Tensor:
        """Write the step's new index keys of one layer: [1, P, I]. Returns them. `more`: zeros to append to each."""
        assert self.step is not None, "a step must be set before the model runs"
        pages = self.indexes[layer]
        rows_P1I = F.pad(key[0].to(pages.dtype), (0, more))[:, None].contiguous()
        write_pages(rows_P1I, self.step.on_device.cache_slot_P, pages[:, None])
        return key

    def room(self, key: Hashable, make: Callable[[], Room]) -> Room:
        """Return memory that kernels keep with the pages they read. Allocated at the first call."""
        if key not in self._rooms:
            self._rooms[key] = make()
        return cast(Room, self._rooms[key])


def token_bytes(shape: LayerShape, dtype: torch.dtype) -> int:
    """Return the bytes of one layer per token."""
    return shape.token_numbers * dtype.itemsize


def _by_row(heads_1GPD: Tensor) -> Tensor:
    """View as [P, G, D], the last dim contiguous."""
    row_PGD = heads_1GPD[0].transpose(0, 1)
    return row_PGD if row_PGD.stride(-1) == 1 else row_PGD.contiguous()
