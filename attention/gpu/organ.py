"""The attention organ on GPUs: the function that `transformers`' attention modules call if the model is on a GPU.

Decodes use the split kernel and prompts the tiled one, even in the same step, because a row's bits must not depend on
whether prompts run in its step. Multi-head latent attention decodes absorbed, on the latents themselves (the two parts of
`kv_b_proj` move into the query and the output). Only the latents of prompts are expanded, within a memory bound. In short
steps of fixed shape prompts attend absorbed as well, row by row, unless bits must not depend on the step: expanding a
fixed number of latents would cost a short prompt more than its attention.
Nothing here waits for the device. A step of fixed shape reads nothing from the host but its padded size. If it has prompts,
decodes' rows are those with a context, and prompts' tiles come from the device.

Legend: P rows of the step, padding included, H query heads, D key dim, V value dim, L latent dim, E rotary dim,
N blocks, B tokens of a block, X blocks in use, U the part of the key dim that is not rotary.
"""

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attention.gpu.decode import DecodeScratch, paged_decode
from attention.gpu.limits import (
    ABSORBED_HEADS,
    ABSORBED_LAUNCHES,
    ABSORBED_PAIRS,
    EXPANDED_BYTES,
    expanded_bytes_of_token,
)
from attention.gpu.mla import latent_decode
from attention.gpu.prefill import paged_prefill, tile_tokens
from attention.gpu.sparse import chosen_attention
from attention.latents import Halves, halves_of
from attention.sparse.index import ANY_MASK, INDEXED
from attention.sparse.pools import ChosenMask
from kvcache.gpu.cache import DeviceCache
from kvcache.gpu.step import DeviceStep, Expansion
from kvcache.gpu.write import Scales

NAME = "wideep_paged_gpu"


class Pages(NamedTuple):
    """Pages of one layer for the kernels."""

    keys_NGBD: Tensor
    values_NGBV: Tensor
    table_SM: Tensor
    scales: Scales | None = None


class LatentAdapters(Protocol):
    """The adapters of a module's `kv_b_proj`, at `absorbed_adapters`. Methods add in place."""

    @property
    def is_used(self) -> bool:
        """Whether rows of the step may have one."""

    def add_to_queries(self, query_RHD: Tensor, out_HRL: Tensor, first: int) -> None:
        """Add to queries in latent space. The rows are the step's from `first` on."""

    def add_to_values(self, mean_RHL: Tensor, out_HRV: Tensor, first: int) -> None:
        """Add to values, given the means of latents. The rows are the step's from `first` on."""

    def add_to_expanded(
        self, latent_XBL: Tensor, out_XBY: Tensor, blocks: Expansion, first_head: int
    ) -> None:
        """Add to the keys and values of some heads, without rotary part, that latents are expanded to."""


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *,
    scaling: float,
    pages: DeviceCache,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    **_options: Any,
) -> tuple[Tensor, None]:
    """Attend the packed batch to the paged cache, like `attention.organ.attend`.

    Args:
        query: [1, H, P, D] of the cache's type. key, value: the step's own rows, already cached; only the shape of value
            is used.
        indices: [1, P, K] int32 cache slots that the rows attend to (latents only); None for all visible tokens.

    Returns:
        [1, P, H, V], padded rows zero, and None instead of attention weights.
    """
    own_layer, step = int(module.layer_idx), pages.step
    assert step is not None, "a step must be set before the model runs"
    if isinstance(attention_mask, ChosenMask):
        indices = attention_mask.indices
    query_PHD = _rows(query)
    shape, value_dim = pages.shapes[own_layer], value.shape[-1]
    layer = own_layer if shape.source is None else shape.source
    P, H, _ = query_PHD.shape
    if indices is not None:
        return _attend_chosen(module, query_PHD, pages, layer, indices[0], scaling, s_aux)[None], None
    if shape.latent and step.is_decode_only:
        return _decode_latents(module, query_PHD, pages, layer, scaling)[None], None
    if shape.latent and _absorbs_prompts(step):
        return _mixed_latents(module, query_PHD, pages, layer, scaling)[None], None
    out_PHV = query_PHD.new_empty(P, H, value_dim)
    if not step.is_decode_only:  # no kernel for prompts writes padded rows
        out_PHV[0 if step.has_fixed_shape else step.num_tokens :].zero_()
    of_decodes = slice(0, step.decode_rows)
    if shape.latent:
        if of_decodes.stop:
            out_PHV[of_decodes] = _decode_latents(module, query_PHD[of_decodes], pages, layer, scaling)
        _prefill_latents(module, query_PHD, pages, layer, out_PHV, scaling)
        return out_PHV[None], None
    own = Pages(pages.keys[layer], pages.values[layer], step.on_device.table_SM, pages.scales[layer])
    options: dict[str, Any] = {
        "scale": scaling,
        "window": shape.window,
        "chunk": shape.chunk,
        "sinks_H": s_aux,
    }
    if of_decodes.stop:
        paged_decode(
            query_PHD[of_decodes], own.keys_NGBD, own.values_NGBV, step.on_device.decode_context_S[of_decodes],
            own.table_SM[of_decodes], _scratch(pages, H, value_dim), scales=own.scales, out=out_PHV[of_decodes], **options,
        )  # fmt: skip
    if not step.is_decode_only:
        ends = step.image_ends_on_device() if shape.sees_images else None
        _prefill(query_PHD, own, step, out_PHV, step.prompts, image_end_T=ends, **options)
    return out_PHV[None], None


def _rows(query: Tensor) -> Tensor:
    """View [1, H, P, D] as [P, H, D] with each row's heads contiguous."""
    query_PHD = query[0].transpose(0, 1)
    is_plain = query_PHD.stride(2) == 1 and query_PHD.stride(1) == query_PHD.shape[2]
    return query_PHD if is_plain else query_PHD.contiguous()


def _scratch(pages: DeviceCache, heads: int, value_dim: int) -> DecodeScratch:
    """Return the scratch memory shared by all layers of these sizes, which run one after the other."""
    step = pages.step
    assert step is not None
    return pages.room(
        ("decode", heads, value_dim),
        lambda: DecodeScratch(
            max_sequences=step.sizes[-1],
            heads=heads,
            value_dim=value_dim,
            max_tokens=step.max_context,
            device=step.device,
            is_invariant=step.is_invariant,
        ),
    )


def _prefill(
    query_PHD: Tensor, own: Pages, step: DeviceStep, out_PHV: Tensor, sequences: range, **options: Any
) -> None:
    (_, H, D), (_, G, _, V) = query_PHD.shape, own.values_NGBV.shape
    tiles_X3 = step.tiles_on_device(tile_tokens(H, G, D, V), sequences)
    paged_prefill(
        query_PHD, own.keys_NGBD, own.values_NGBV, tiles_X3, step.on_device.query_start_S, step.on_device.context_S,
        own.table_SM, scales=own.scales, out=out_PHV, **options,
    )  # fmt: skip


def _halves(module: Any, query_PHD: Tensor) -> Halves:
    return halves_of(
        module.kv_b_proj.weight, query_PHD.shape[1], query_PHD.shape[2] - module.qk_rope_head_dim
    )


def _adapters(module: Any) -> LatentAdapters | None:
    """Return the module's adapters. None if no row uses one."""
    adapters: LatentAdapters | None = getattr(module, "absorbed_adapters", None)
    return None if adapters is None or not adapters.is_used else adapters


def _absorbed(module: Any, query_PHD: Tensor, key_HUL: Tensor, first: int = 0) -> Tensor:
    """Multiply queries into latent space: [P, H, L + E]. `first`: the step's row of the first query."""
    U = key_HUL.shape[1]
    query_HPL = torch.bmm(query_PHD[..., :U].transpose(0, 1), key_HUL)
    if (adapters := _adapters(module)) is not None:
        adapters.add_to_queries(query_PHD, query_HPL, first)
    return torch.cat((query_HPL.transpose(0, 1), query_PHD[..., U:]), dim=-1)


def _expanded_values(module: Any, mean_PHL: Tensor, value_HVL: Tensor, first: int = 0) -> Tensor:
    """Multiply means of latents into values: [P, H, V]. `first`: the step's row of the first one."""
    value_HPV = torch.bmm(mean_PHL.transpose(0, 1), value_HVL.transpose(1, 2))
    if (adapters := _adapters(module)) is not None:
        adapters.add_to_values(mean_PHL, value_HPV, first)
    return value_HPV.transpose(0, 1)


def _decode_latents(module: Any, query_SHD: Tensor, pages: DeviceCache, layer: int, scale: float) -> Tensor:
    """Decode absorbed: [S, H, V]."""
    step = pages.step
    assert step is not None
    S, H, _ = query_SHD.shape
    key_HUL, value_HVL = _halves(module, query_SHD)
    latent_dim = key_HUL.shape[2]
    out_SHL = latent_decode(
        _absorbed(module, query_SHD, key_HUL), pages.keys[layer], step.on_device.decode_context_S[:S],
        step.on_device.table_SM[:S], _scratch(pages, H, latent_dim), latent_dim=latent_dim, scale=scale,
        scales=pages.scales[layer],
    )  # fmt: skip
    return _expanded_values(module, out_SHL, value_HVL)


def _absorbs_prompts(step: DeviceStep) -> bool:
    """Whether prompts attend to latents absorbed. Depends on the step's size only."""
    is_few = step.num_padded <= ABSORBED_LAUNCHES * step.sizes[-1]
    return step.prompt_shape is not None and is_few and not step.is_invariant


def _mixed_latents(module: Any, query_PHD: Tensor, pages: DeviceCache, layer: int, scale: float) -> Tensor:
    """Attend absorbed in a step of fixed shape, decodes as in steps without prompts: [P, H, V]."""
    step = pages.step
    assert step is not None
    (P, H, _), S, at_once = query_PHD.shape, step.decode_rows, step.sizes[-1]
    key_HUL, value_HVL = _halves(module, query_PHD)
    query_PHC, latent_dim = _absorbed(module, query_PHD, key_HUL), key_HUL.shape[2]
    mean_PHL = query_PHD.new_empty(P, H, latent_dim)
    context_P, table_PM = step.rows_as_sequences(ABSORBED_PAIRS // -(-H // ABSORBED_HEADS))
    decode_S = step.on_device.decode_context_S[:S]
    about: Any = {"latent_dim": latent_dim, "scale": scale, "scales": pages.scales[layer]}
    about |= {"latents_NBC": pages.keys[layer], "scratch": _scratch(pages, H, latent_dim)}
    for first in range(0, P, at_once):
        here = slice(first, min(first + at_once, P))
        latent_decode(
            query_PHC[here],
            context_S=context_P[here],
            block_table_SM=table_PM[here],
            out=mean_PHL[here],
            **about,
        )
    of_decodes_SHL = latent_decode(
        query_PHC[:S], context_S=decode_S, block_table_SM=step.on_device.table_SM[:S], **about
    )
    mean_PHL[:S] = torch.where((decode_S > 0)[:, None, None], of_decodes_SHL, mean_PHL[:S])
    return _expanded_values(module, mean_PHL, value_HVL)


def _attend_chosen(
    module: Any, query_PHD: Tensor, pages: DeviceCache, layer: int, chosen_PK: Tensor, scale: float,
    sinks_H: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attend absorbed to chosen latents, for as many rows at a time as fit EXPANDED_BYTES: [P, H, V]."""
    P, H, _ = query_PHD.shape
    key_HUL, value_HVL = _halves(module, query_PHD)
    L, V = key_HUL.shape[2], value_HVL.shape[1]
    of_row = H * (2 * L + module.qk_rope_head_dim) * query_PHD.element_size()
    at_once = max(1, EXPANDED_BYTES // of_row)
    out_PHV = query_PHD.new_empty(P, H, V)
    for first in range(0, P, at_once):
        here = slice(first, min(first + at_once, P))
        mean_RHL = chosen_attention(
            _absorbed(module, query_PHD[here], key_HUL, first), pages.keys[layer], chosen_PK, first, latent_dim=L,
            scale=scale, scales=pages.scales[layer], sinks_H=sinks_H,
        )  # fmt: skip
        out_PHV[here] = _expanded_values(module, mean_RHL, value_HVL, first)
    return out_PHV


def _prefill_latents(
    module: Any, query_PHD: Tensor, pages: DeviceCache, layer: int, out_PHV: Tensor, scale: float
) -> None:
    """Prefill with expanded latents of the prompts' contexts, for as many heads and sequences at a time as fit EXPANDED_BYTES.

    A head's result depends only on its own keys and values, so the grouping changes no result.
    """
    step, B = pages.step, pages.keys[layer].shape[1]
    assert step is not None
    (_, H, D), V = query_PHD.shape, out_PHV.shape[-1]
    most_tokens = EXPANDED_BYTES // expanded_bytes_of_token(D, V, query_PHD.element_size())
    for blocks in step.expansions(most_tokens // B):
        latent_XBC = _gathered(module, pages, layer, blocks.block_X).to(query_PHD.dtype)
        at_once = max(1, min(H, most_tokens // (len(latent_XBC) * B)))
        for first in range(0, H, at_once):
            here = slice(first, min(first + at_once, H))
            own = _expanded(module, latent_XBC, blocks, H, here)
            _prefill(query_PHD[:, here], own, step, out_PHV[:, here], blocks.sequences, scale=scale)


def _gathered(module: Any, pages: DeviceCache, layer: int, block_X: Tensor) -> Tensor:
    """Return the latents of some blocks, decoded: [X, B, L + E]."""
    latents_NBC, scales = pages.keys[layer], pages.scales[layer]
    if scales is None:
        return latents_NBC[block_X]
    # As bytes: torch does not index float8.
    code_XBC = latents_NBC.view(torch.uint8)[block_X].view(latents_NBC.dtype).float()
    parts = code_XBC[..., : -module.qk_rope_head_dim], code_XBC[..., -module.qk_rope_head_dim :]
    decoded = (part * scale[block_X, 0][..., None] for part, scale in zip(parts, scales, strict=True))
    return torch.cat(list(decoded), -1)


def _expanded(module: Any, latent_XBC: Tensor, blocks: Expansion, heads: int, here: slice) -> Pages:
    """Expand latents into pages of some heads, as the module's `expand_kv` does for all heads."""
    X, B, C = latent_XBC.shape
    E, V = module.qk_rope_head_dim, module.v_head_dim
    weight_HYL = module.kv_b_proj.weight.view(heads, -1, C - E)[here]
    h, U = len(weight_HYL), weight_HYL.shape[1] - V
    both_XBY = F.linear(latent_XBC[..., :-E], weight_HYL.flatten(0, 1))
    if (adapters := _adapters(module)) is not None:
        adapters.add_to_expanded(latent_XBC[..., :-E], both_XBY, blocks, here.start)
    both_XBHY = both_XBY.view(X, B, h, U + V)
    keys_XHBD = latent_XBC.new_empty(X, h, B, U + E)
    keys_XHBD[..., :U] = both_XBHY[..., :U].transpose(1, 2)
    keys_XHBD[..., U:] = latent_XBC[:, None, :, -E:]
    return Pages(keys_XHBD, both_XBHY[..., U:].transpose(1, 2).contiguous(), blocks.table_SM)


def register() -> None:
    """Register the organ with `transformers` under its names. It may be called again."""
    for name in (NAME, NAME + INDEXED):
        ALL_ATTENTION_FUNCTIONS.register(name, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME + INDEXED, lambda **_options: ANY_MASK)
