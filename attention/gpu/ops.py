"""The attention kernels as operators of PyTorch, for code that torch.compile compiles: it does not look into them, and
no graph breaks there. Each public function is called like the one of its kernel's module and returns a new tensor.

Importing this registers the operators, under `torch.ops.wideep`.
"""

import torch
from torch import Tensor

from attention.gpu import decode, mla, prefill, rotary
from attention.gpu.splits import DecodeScratch

_PARTS = ("sums", "tops", "totals")


@torch.library.custom_op("wideep::paged_decode", mutates_args=_PARTS)
def _paged_decode(
    query: Tensor, keys: Tensor, values: Tensor, context: Tensor, table: Tensor, sums: Tensor, tops: Tensor,
    totals: Tensor, split_tokens: int, num_splits: int, multiprocessors: int, sinks: Tensor | None, scale: float,
    window: int, soft_cap: float,
) -> Tensor:  # fmt: skip
    scratch = DecodeScratch.around(sums, tops, totals, split_tokens, num_splits, multiprocessors)
    return decode.paged_decode(
        query,
        keys,
        values,
        context,
        table,
        scratch,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks_H=sinks,
    )


@_paged_decode.register_fake
def _like_decode(query: Tensor, keys: Tensor, values: Tensor, *_rest: object) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[1], values.shape[3])


def paged_decode(
    query_SHD: Tensor,
    keys_NGBD: Tensor,
    values_NGBV: Tensor,
    context_S: Tensor,
    block_table_SM: Tensor,
    scratch: DecodeScratch,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """See `decode.paged_decode`."""
    result: Tensor = torch.ops.wideep.paged_decode(
        query_SHD, keys_NGBD, values_NGBV, context_S, block_table_SM, scratch.sums, scratch.tops, scratch.totals,
        scratch.split_tokens, scratch.num_splits, scratch.multiprocessors, sinks_H, scale, window, soft_cap,
    )  # fmt: skip
    return result


@torch.library.custom_op("wideep::latent_decode", mutates_args=_PARTS)
def _latent_decode(
    query: Tensor, latents: Tensor, context: Tensor, table: Tensor, sums: Tensor, tops: Tensor, totals: Tensor,
    split_tokens: int, num_splits: int, multiprocessors: int, latent_dim: int, scale: float,
) -> Tensor:  # fmt: skip
    scratch = DecodeScratch.around(sums, tops, totals, split_tokens, num_splits, multiprocessors)
    return mla.latent_decode(query, latents, context, table, scratch, latent_dim=latent_dim, scale=scale)


@_latent_decode.register_fake
def _like_latent_decode(
    query: Tensor, latents: Tensor, context: Tensor, table: Tensor, sums: Tensor, tops: Tensor, totals: Tensor,
    split_tokens: int, num_splits: int, multiprocessors: int, latent_dim: int, scale: float,
) -> Tensor:  # fmt: skip
    return query.new_empty(query.shape[0], query.shape[1], latent_dim)


def latent_decode(
    query_SHC: Tensor,
    latents_NBC: Tensor,
    context_S: Tensor,
    block_table_SM: Tensor,
    scratch: DecodeScratch,
    *,
    latent_dim: int,
    scale: float,
) -> Tensor:
    """See `mla.latent_decode`."""
    result: Tensor = torch.ops.wideep.latent_decode(
        query_SHC, latents_NBC, context_S, block_table_SM, scratch.sums, scratch.tops, scratch.totals,
        scratch.split_tokens, scratch.num_splits, scratch.multiprocessors, latent_dim, scale,
    )  # fmt: skip
    return result


@torch.library.custom_op("wideep::paged_prefill", mutates_args=())
def _paged_prefill(
    query: Tensor, keys: Tensor, values: Tensor, tiles: Tensor, query_start: Tensor, context: Tensor, table: Tensor,
    sinks: Tensor | None, scale: float, window: int, soft_cap: float,
) -> Tensor:  # fmt: skip
    return prefill.paged_prefill(
        query, keys, values, tiles, query_start, context, table, scale=scale, window=window, soft_cap=soft_cap,
        sinks_H=sinks,
    )  # fmt: skip


@_paged_prefill.register_fake
def _like_prefill(query: Tensor, keys: Tensor, values: Tensor, *_rest: object) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[1], values.shape[3])


def paged_prefill(
    query_THD: Tensor,
    keys_NGBD: Tensor,
    values_NGBV: Tensor,
    tiles_X3: Tensor,
    query_start_S: Tensor,
    context_S: Tensor,
    block_table_SM: Tensor,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """See `prefill.paged_prefill`."""
    result: Tensor = torch.ops.wideep.paged_prefill(
        query_THD, keys_NGBD, values_NGBV, tiles_X3, query_start_S, context_S, block_table_SM, sinks_H, scale, window,
        soft_cap,
    )  # fmt: skip
    return result


@torch.library.custom_op("wideep::rotate", mutates_args=("x", "keys"))
def _rotate(x: Tensor, cosines: Tensor, sines: Tensor, keys: Tensor | None, is_interleaved: bool) -> None:
    rotary.rotate(x, cosines, sines, keys_TGD=keys, is_interleaved=is_interleaved)


def rotate(
    x_THD: Tensor,
    cosines_TE: Tensor,
    sines_TE: Tensor,
    *,
    keys_TGD: Tensor | None = None,
    is_interleaved: bool = False,
) -> None:
    """See `rotary.rotate`; in place."""
    torch.ops.wideep.rotate(x_THD, cosines_TE, sines_TE, keys_TGD, is_interleaved)
