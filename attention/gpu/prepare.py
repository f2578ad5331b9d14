# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""One launch between an attention module's products and its attention: norms of heads, rotary embedding, page write.

Queries are changed in place. Keys and values, or latents, go from the product's output to their pages and nowhere else.
Pages of codes take a second launch: keys are changed in place too, and then quantised with values (`kvcache.gpu.write`).
Rows without a cache slot (-1) are not written, so the launch can be replayed for any number of tokens. Rounding is that of
the separate kernels (`moe.gpu.norm`, `rotary`, `kvcache.gpu.write`). Norm and rotary in one launch are SGLang's
fused_qk_norm_rope; the write is added here.
Rejected: several rows per program, which share nothing, and a separate launch for values.

Legend: T rows, H query heads, G KV heads, D key dim, V value dim, E rotary dim, U = D - E, L latent dim, N blocks, B tokens
of a block, A columns of the angles.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from attention.gpu.rotary import Rotation, check_angles, tile_heads, turn_heads
from kvcache.gpu.write import Scales, write_pages


class HeadNorm(NamedTuple):
    """RMSNorm of each head, or of each latent."""

    weight_D: Tensor
    eps: float


class Angles(NamedTuple):
    """Cosines and sines [T, A] of a step's rows, with the same strides, and how heads are rotated by them."""

    cosines_TA: Tensor
    sines_TA: Tensor
    rotation: Rotation


@triton.jit
def prepare_heads(
    query, key, value, query_weight, key_weight, cosines, sines, slots, key_pages, value_pages,
    query_stride, key_stride, value_stride, angle_row_stride, angle_stride, query_eps, key_eps, query_tiles,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, V_PAD: tl.constexpr, E: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr, IS_SORTED: tl.constexpr, HAS_QUERY_NORM: tl.constexpr, HAS_KEY_NORM: tl.constexpr,
    IS_IN_PLACE: tl.constexpr,
):  # fmt: skip
    """Run as program (row, tile): tiles of query heads, then of KV heads."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cosines += row * angle_row_stride
    sines += row * angle_row_stride
    if tile < query_tiles:
        own = query + row * query_stride
        turn_heads(
            own, own, query_weight, cosines, sines, tile * HEADS, H, D, D, angle_stride, query_eps, D, E, HALF, REST,
            HEADS, IS_INTERLEAVED, IS_SORTED, HAS_QUERY_NORM,
        )  # fmt: skip
    elif IS_IN_PLACE:
        own = key + row * key_stride
        turn_heads(
            own, own, key_weight, cosines, sines, (tile - query_tiles) * KV_HEADS, G, D, D, angle_stride, key_eps, D, E,
            HALF, REST, KV_HEADS, IS_INTERLEAVED, IS_SORTED, HAS_KEY_NORM,
        )  # fmt: skip
    else:
        slot = tl.load(slots + row)
        if slot >= 0:
            first = (tile - query_tiles) * KV_HEADS
            place = slot // BLOCK * G * BLOCK + slot % BLOCK  # of the first head, in rows
            turn_heads(
                key + row * key_stride, key_pages + place * D, key_weight, cosines, sines, first, G, D, BLOCK * D,
                angle_stride, key_eps, D, E, HALF, REST, KV_HEADS, IS_INTERLEAVED, IS_SORTED, HAS_KEY_NORM,
            )  # fmt: skip
            head, dim = first + tl.arange(0, KV_HEADS)[:, None], tl.arange(0, V_PAD)[None, :]
            is_in = (head < G) & (dim < V)
            copied = tl.load(value + row * value_stride + head * V + dim, mask=is_in)
            tl.store(value_pages + (place + head * BLOCK) * V + dim, copied, mask=is_in)


@triton.jit
def prepare_latent_rows(
    query, latent, weight, cosines, sines, slots, pages, query_stride, latent_stride, angle_row_stride, angle_stride,
    eps, query_tiles,
    H: tl.constexpr, D: tl.constexpr, L: tl.constexpr, L_PAD: tl.constexpr, E: tl.constexpr, HALF: tl.constexpr,
    HEADS: tl.constexpr, IS_INTERLEAVED: tl.constexpr, IS_SORTED: tl.constexpr, IS_IN_PLACE: tl.constexpr,
):  # fmt: skip
    """Run as program (row, tile): tiles of query heads, then the latent with its rotary key."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cosines += row * angle_row_stride
    sines += row * angle_row_stride
    if tile < query_tiles:
        own = query + row * query_stride + (D - E)
        turn_heads(
            own, own, None, cosines, sines, tile * HEADS, H, D, D, angle_stride, eps, E, E, HALF, 1, HEADS,
            IS_INTERLEAVED, IS_SORTED, False,
        )  # fmt: skip
    else:
        slot = tl.load(slots + row)
        if slot >= 0:
            own = latent + row * latent_stride
            place = own if IS_IN_PLACE else pages + slot * (L + E)
            dtype = latent.dtype.element_ty
            dim = tl.arange(0, L_PAD)
            wide = tl.load(own + dim, mask=dim < L, other=0.0).to(tl.float32)
            scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / L + eps)
            factor = tl.load(weight + dim, mask=dim < L, other=0.0).to(tl.float32)
            normed = (wide * scale).to(dtype).to(tl.float32) * factor
            tl.store(place + dim, normed.to(dtype), mask=dim < L)
            turn_heads(
                own + L, place + L, None, cosines, sines, 0, 1, E, E, angle_stride, eps, E, E, HALF, 1, 1,
                IS_INTERLEAVED, IS_SORTED, False,
            )  # fmt: skip


def prepare(
    query_THD: Tensor,
    key_TGD: Tensor,
    value_TGV: Tensor,
    angles: Angles,
    slots_T: Tensor,
    key_pages_NGBD: Tensor,
    value_pages_NGBV: Tensor,
    *,
    query_norm: HeadNorm | None = None,
    key_norm: HeadNorm | None = None,
    scales: Scales | None = None,
) -> None:
    """Norm and rotate queries in place; norm and rotate keys into their pages; write values to theirs.

    Args:
        query_THD, key_TGD, value_TGV: A row's heads are contiguous; rows may have gaps between them. Of the pages' type.
        slots_T: int64 [T], block * B + offset; -1 for a row that is not stored.
        key_pages_NGBD, value_pages_NGBV: Contiguous.
        query_norm, key_norm: None for heads that are not normed.
        scales: Given for pages of codes. Keys are then changed in place.

    Raises:
        ValueError: The angles do not fit.
    """
    (T, H, D), (_, G, V) = query_THD.shape, value_TGV.shape
    rotation = angles.rotation
    rotary_dim = rotation.rotary_dim(angles.cosines_TA)
    check_angles(rotary_dim, D)
    half = triton.next_power_of_2(max(1, rotary_dim // 2))
    heads = tile_heads(half)
    query_tiles, kv_heads = triton.cdiv(H, heads), min(heads, triton.next_power_of_2(G))
    prepare_heads[(T, query_tiles + triton.cdiv(G, kv_heads))](
        query_THD, key_TGD, value_TGV, query_norm and query_norm.weight_D, key_norm and key_norm.weight_D,
        angles.cosines_TA, angles.sines_TA, slots_T, key_pages_NGBD, value_pages_NGBV, query_THD.stride(0),
        key_TGD.stride(0), value_TGV.stride(0), *angles.cosines_TA.stride(), query_norm.eps if query_norm else 0.0,
        key_norm.eps if key_norm else 0.0, query_tiles, H=H, G=G, D=D, V=V, V_PAD=triton.next_power_of_2(V),
        E=rotary_dim, HALF=half, REST=triton.next_power_of_2(max(1, D - rotary_dim)), HEADS=heads, KV_HEADS=kv_heads,
        BLOCK=key_pages_NGBD.shape[2], IS_INTERLEAVED=rotation.is_interleaved, IS_SORTED=rotation.is_sorted,
        HAS_QUERY_NORM=query_norm is not None, HAS_KEY_NORM=key_norm is not None, IS_IN_PLACE=scales is not None, num_warps=4,
    )  # fmt: skip
    if scales is not None:
        write_pages(key_TGD, slots_T, key_pages_NGBD, value_TGV, value_pages_NGBV, scales)


def prepare_latents(
    query_THD: Tensor,
    latent_TC: Tensor,
    norm: HeadNorm,
    angles: Angles,
    slots_T: Tensor,
    pages_NBC: Tensor,
    scales: Scales | None = None,
) -> None:
    """Rotate the last E dims of queries in place; write normed latents and rotated keys to their pages.

    Args:
        query_THD: A row's heads are contiguous; rows may have gaps between them.
        latent_TC: [T, L + E], the latent before its norm and the key before its rotation; last dim contiguous.
        norm: Norm of the latent.
        slots_T: int64 [T], block * B + offset; -1 for a row that is not stored.
        pages_NBC: Contiguous.
        scales: Given for pages of codes. Latents are then changed in place.

    Raises:
        ValueError: The angles do not fit.
    """
    T, H, D = query_THD.shape
    rotation = angles.rotation
    rotary_dim = rotation.rotary_dim(angles.cosines_TA)
    check_angles(rotary_dim, D)
    half = triton.next_power_of_2(max(1, rotary_dim // 2))
    heads = tile_heads(half)
    latent_dim, query_tiles = pages_NBC.shape[2] - rotary_dim, triton.cdiv(H, heads)
    prepare_latent_rows[(T, query_tiles + 1)](
        query_THD, latent_TC, norm.weight_D, angles.cosines_TA, angles.sines_TA, slots_T, pages_NBC,
        query_THD.stride(0), latent_TC.stride(0), *angles.cosines_TA.stride(), norm.eps, query_tiles, H=H, D=D,
        L=latent_dim, L_PAD=triton.next_power_of_2(latent_dim), E=rotary_dim, HALF=half, HEADS=heads,
        IS_INTERLEAVED=rotation.is_interleaved, IS_SORTED=rotation.is_sorted, IS_IN_PLACE=scales is not None, num_warps=4,
    )  # fmt: skip
    if scales is not None:
        latent_T1C, pages_N1BC = latent_TC[:, None], pages_NBC[:, None]
        write_pages(
            latent_T1C[..., :latent_dim], slots_T, pages_N1BC[..., :latent_dim], latent_T1C[..., latent_dim:],
            pages_N1BC[..., latent_dim:], scales,
        )  # fmt: skip
