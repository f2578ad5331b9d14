"""The KV cache in eight bits, in plain torch: rows quantised by the definition, and pages decoded to float32."""

import pytest
import torch
from torch import Tensor

from kvcache.codes import E4M3, INDEX_SCALE_ROWS, INT8, LATENT_SCALES_BYTES, SCALE_ROWS, is_coded
from kvcache.paged_cache import LayerShape, PagedCache

FORMATS = [pytest.param(INT8, id="int8"), pytest.param(E4M3, id="fp8")]
ALL = [pytest.param(None, id="plain"), *FORMATS]


def quantised(x: Tensor, codes: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantise finite rows [..., D]. Return codes of this type, and scales [..., 1].

    Both operands of a division are tensors on the rows' device. Torch turns a division by a number (on a GPU) or of a number
    into a product with a rounded reciprocal, which can differ in the last bit.
    """
    top = x.abs().amax(-1, keepdim=True)
    largest = top.new_tensor(127.0 if codes is INT8 else 448.0)
    is_seen = top >= 1e-30
    scaled = torch.where(is_seen, x * (largest / top), 0.0)
    return (scaled.round() if codes is INT8 else scaled).to(codes), torch.where(is_seen, top / largest, 0.0)


def rounded(x: Tensor, codes: torch.dtype | None) -> Tensor:
    """Quantise rows and decode them. None changes nothing."""
    if codes is None:
        return x
    code, scale = quantised(x, codes)
    return code.float() * scale


def rounded_row(row: Tensor, shape: LayerShape, first: int) -> Tensor:
    """Round [..., first + rest] as its two parts are stored: key and value, or latent and rotary key."""
    parts = row[..., :first], row[..., first:]
    return torch.cat([rounded(part, shape.codes) for part in parts], dim=-1)


def _scales(pages: Tensor) -> Tensor:
    return pages.contiguous().view(torch.float32)


def plain_keys(keys_NGDB: Tensor) -> Tensor:
    """Return a CPU's pages of keys in float32, without scales."""
    if not is_coded(keys_NGDB):
        return keys_NGDB
    scales_NGB = _scales(keys_NGDB[:, :, -SCALE_ROWS:-INDEX_SCALE_ROWS]).flatten(2)
    return keys_NGDB[:, :, :-SCALE_ROWS].float() * scales_NGB[:, :, None]


def plain_values(keys_NGDB: Tensor, values_NGBV: Tensor) -> Tensor:
    """Return a CPU's pages of values in float32."""
    if not is_coded(values_NGBV):
        return values_NGBV
    scales_NGB = _scales(keys_NGDB[:, :, -INDEX_SCALE_ROWS:]).flatten(2)
    return values_NGBV.float() * scales_NGB[..., None]


def plain_latents(pages_NBW: Tensor, latent_dim: int) -> Tensor:
    """Return a CPU's pages of latents in float32, without scales."""
    if not is_coded(pages_NBW):
        return pages_NBW
    scales = _scales(pages_NBW[..., -LATENT_SCALES_BYTES:])
    row = pages_NBW[..., :-LATENT_SCALES_BYTES].float()
    return torch.cat((row[..., :latent_dim] * scales[..., :1], row[..., latent_dim:] * scales[..., 1:2]), -1)


def plain_index(pages_NDB: Tensor) -> Tensor:
    """Return a CPU's pages of index keys in float32, without scales."""
    if not is_coded(pages_NDB) or not pages_NDB.numel():
        return pages_NDB
    scales_NB = _scales(pages_NDB[:, -INDEX_SCALE_ROWS:]).flatten(1)
    return pages_NDB[:, :-INDEX_SCALE_ROWS].float() * scales_NB[:, None]


def stored_bytes(cache: PagedCache, layer: int) -> list[Tensor]:
    """View the parts of a layer's blocks as bytes. 255 everywhere is NaN as float32 and as e4m3."""
    return [part.view(torch.uint8) for part in cache.parts(layer) if part.numel()]


def decoded(cache: PagedCache, layer: int, latent_dim: int = 0) -> tuple[Tensor, Tensor]:
    """Return a layer's pages of keys and values in float32. Those of values are empty if the layer caches latents."""
    keys, values = cache.keys[layer], cache.values[layer]
    if cache.shapes[layer].latent:
        return plain_latents(keys, latent_dim), values
    return plain_keys(keys), plain_values(keys, values)
