"""Absorbed latent decode for GPUs against the plain oracle: in Triton's interpreter, and on a GPU if there is one."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fixtures import OnDevice
from tests.support.cached_codes import FORMATS, quantised
from tests.support.gpu.attention import (
    SCALE,
    Heads,
    Paged,
    check_close,
    dtypes_on,
    make_paged,
    oracle,
    some_fast,
)


def make_latents(
    contexts: list[int], latent_dim: int, rope_dim: int, dtype: torch.dtype = torch.float32
) -> Paged:
    """Return pages with values that are the first part of their keys."""
    width = latent_dim + rope_dim
    paged = make_paged([(context - 1, 1) for context in contexts], Heads(1, 1, width, 1), dtype)
    return paged._replace(values_NGBV=paged.keys_NGBD[..., :latent_dim])  # a view


def coded(paged: Paged, latent_dim: int, codes: torch.dtype) -> tuple[Paged, Paged]:
    """Return pages with latents and rotary keys as codes, and the same decoded."""
    parts = paged.keys_NGBD[..., :latent_dim].float(), paged.keys_NGBD[..., latent_dim:].float()
    is_held = parts[0].isfinite().all(-1)
    found = [quantised(part.nan_to_num(0.0), codes) for part in parts]
    scales = [scale[..., 0].masked_fill(~is_held, float("nan")) for _, scale in found]
    pages = torch.cat([code.view(torch.uint8) for code, _ in found], -1).view(codes)
    plain = torch.cat([code.float() * scale for code, scale in found], -1)
    values = pages.view(torch.uint8)[..., :latent_dim]  # only its shape is used
    stored = paged._replace(keys_NGBD=pages, values_NGBV=values, scales=(scales[0], scales[1]))
    return stored, paged._replace(keys_NGBD=plain, values_NGBV=plain[..., :latent_dim])


def decode(
    paged: Paged,
    query_SHC: Tensor,
    rows: slice | int,
    *,
    seats: int = 3,
    heads: int = 16,
    is_invariant: bool = True,
) -> Tensor:
    from attention.gpu.decode import DecodeScratch  # noqa: PLC0415 - in the interpreter
    from attention.gpu.mla import LatentTile, latent_decode  # noqa: PLC0415

    latent_dim = paged.values_NGBV.shape[3]
    scratch = DecodeScratch(
        max_sequences=query_SHC.shape[0], heads=query_SHC.shape[1], value_dim=latent_dim, max_tokens=512,
        device=query_SHC.device, split_tokens=64, is_invariant=is_invariant,
    )  # fmt: skip
    scratch.multiprocessors = seats
    for part in (scratch.sums, scratch.tops, scratch.totals):
        part.fill_(float("nan"))
    return latent_decode(
        query_SHC, paged.keys_NGBD[:, 0], *paged.of(rows), scratch, latent_dim=latent_dim, scale=SCALE,
        scales=paged.scales,  # type: ignore[arg-type]
        tile=LatentTile(tokens=16, heads=heads), out=torch.full_like(query_SHC[..., :latent_dim], float("nan")).contiguous(),
    )  # fmt: skip


def compare(
    device: str,
    contexts: list[int],
    heads: int,
    latent_dim: int,
    rope_dim: int,
    short: torch.dtype,
    tile_heads: int = 16,
    codes: torch.dtype | None = None,
) -> None:
    """Compare all sequences and a padded row."""
    for dtype in dtypes_on(device, short):
        paged = plain = make_latents(contexts, latent_dim, rope_dim, dtype)
        if codes is not None:
            paged, plain = coded(paged, latent_dim, codes)
        paged = paged.to(device)
        query = (torch.randn(len(contexts) + 1, heads, latent_dim + rope_dim) * 0.3).to(device, dtype)
        ours = decode(paged, query, len(contexts) + 1, heads=tile_heads)
        assert not ours[-1].any()
        check_close(ours[:-1], oracle(query[:-1], plain))


CASES: dict[str, tuple[Any, ...]] = {
    "edges, 20 heads in two tiles": ([1, 16, 17, 64, 65, 140], 20, 32, 24, torch.float32),
    "one head": ([1, 70], 1, 16, 16, torch.float32),
    "70 heads in two wide tiles": ([1, 40], 70, 16, 8, torch.float16, 64),
    "DeepSeek's 512 + 64": ([40], 16, 512, 64, torch.float32),
    "float16": ([1, 65], 20, 64, 24, torch.float16),
}


@pytest.mark.parametrize("case", some_fast(CASES, "float16"))
def test_latent_decode_equals_the_oracle(on_device: OnDevice, case: tuple[Any, ...]) -> None:
    on_device(compare, *case)


@pytest.mark.parametrize("codes", FORMATS)
def test_latent_decode_of_codes_equals_the_oracle(on_device: OnDevice, codes: torch.dtype) -> None:
    on_device(compare, [1, 16, 65], 20, 32, 24, torch.float32, 16, codes)


def vary_what_must_not_matter(device: str) -> None:
    paged = make_latents([70, 1], 32, 16).to(device)
    query = torch.randn(3, 2, 48).to(device)
    whole = decode(paged, query, 3)
    for row in range(2):
        only = slice(row, row + 1)
        assert torch.equal(decode(paged, query[only], only)[0], whole[row])
    assert torch.equal(decode(paged, query, 3, seats=5), whole)
    paged.step.context_S[1:] = 0  # a replay with fewer sequences
    again = decode(paged, query, 3)
    assert torch.equal(again[0], whole[0])
    assert not again[1:].any()


def test_a_row_has_the_same_bits_alone_in_a_batch_and_in_a_replay(on_device: OnDevice) -> None:
    on_device(vary_what_must_not_matter)


def adapt_to_the_batch(device: str) -> None:
    paged = make_latents([140, 1, 70], 32, 16).to(device)
    query = torch.randn(4, 2, 48).to(device)
    want = oracle(query[:3], paged)
    for seats in (1, 3):
        ours = decode(paged, query, 4, seats=seats, is_invariant=False)
        check_close(ours[:3], want)
        assert not ours[3].any()


def test_splits_that_adapt_to_the_batch_give_the_oracles_results(on_device: OnDevice) -> None:
    on_device(adapt_to_the_batch)


def refuse(device: str) -> None:
    paged = make_latents([5], 60, 4).to(device)
    with pytest.raises(ValueError, match="latent_dim is 60; the kernel supports powers of 2"):
        decode(paged, torch.randn(1, 2, 64).to(device), 1)


def test_latents_that_the_kernel_lacks_are_refused(on_device: OnDevice) -> None:
    on_device(refuse)
