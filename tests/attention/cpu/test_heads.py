"""Norms of rows and heads, rotary embedding and the cache, against plain torch."""

import pytest
import torch
from torch import Tensor

from attention.cpu.heads import COSINES, SINES, HeadNorms, heads_row
from attention.cpu.norm import norm_rows, rms_norm
from dispatch.compiled.team import Team, program_of, run_alone
from kvcache.paged_cache import LayerShape, PagedCache
from kvcache.step import Span, Step
from tests.support.cached_codes import ALL, decoded, stored_bytes

TOLERANCE = {"atol": 2e-6, "rtol": 2e-6}


def random(*shape: int, seed: int = 0) -> Tensor:
    """Return seeded normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute LlamaRMSNorm's forward."""
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


@pytest.mark.parametrize("dim", [1, 7, 16, 24, 576, 2048])
@pytest.mark.parametrize("rows", [0, 1, 5, 200])
def test_rows_are_normed_as_transformers_norms_them(rows: int, dim: int) -> None:
    x, weight = random(rows, dim) * 3, random(dim, seed=1)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), normed(x, weight, 1e-5), **TOLERANCE)


def test_a_rows_bits_do_not_depend_on_the_rows_beside_it() -> None:
    x, weight = random(200, 72), random(72, seed=1)
    whole = rms_norm(x, weight, 1e-5)
    for rows in (slice(0, 1), slice(13, 20), slice(199, 200)):
        assert torch.equal(rms_norm(x[rows].contiguous(), weight, 1e-5), whole[rows])


def test_a_sum_is_kept_and_normed() -> None:
    x, added, weight = random(9, 40), random(9, 40, seed=1), random(40, seed=2)
    sums, out, rows = torch.empty(9, 40), torch.empty(9, 40), torch.tensor([9])
    row = norm_rows(
        x.data_ptr(), weight.data_ptr(), 1e-5, 40, out.data_ptr(), rows.data_ptr(), added=added.data_ptr(),
        sums=sums.data_ptr(),
    )  # fmt: skip
    run_alone(program_of([row]))
    assert torch.equal(sums, x + added) and torch.equal(out, rms_norm(x + added, weight, 1e-5))


def rotated(x_TAD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """Apply `transformers`' apply_rotary_pos_emb to the first dims only."""
    E = cos_TE.shape[1]
    turned, rest = x_TAD[..., :E], x_TAD[..., E:]
    halves = torch.cat((-turned[..., E // 2 :], turned[..., : E // 2]), dim=-1)
    return torch.cat((turned * cos_TE[:, None] + halves * sin_TE[:, None], rest), dim=-1)


@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize("sizes", [(4, 2, 32, 32, 32), (3, 1, 24, 20, 8), (9, 3, 64, 64, 64)])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("between", [0, 7], ids=["", "something between query heads"])
@pytest.mark.parametrize("codes", ALL)
def test_heads_are_normed_rotated_and_cached(
    sizes: tuple[int, int, int, int, int],
    is_normed: bool,
    threads: int,
    between: int,
    codes: torch.dtype | None,
) -> None:
    H, G, D, V, E = sizes
    Q = D + between
    shape = LayerShape(num_kv_heads=G, key_dim=D, value_dim=V, codes=codes)
    step = Step(max_tokens=64, max_sequences=4, max_blocks=4, block_tokens=16)
    step.fill([Span(0, 20, [4, 1]), Span(33, 1, [0, 2, 5])])
    T, width = step.num_tokens, H * Q + G * D + G * V
    qkv, angles = random(T, width), random(T, E // 2, seed=1)
    both = torch.cat((angles, angles), dim=-1)
    cos, sin = both.cos().contiguous(), both.sin().contiguous()
    weights = [random(D, seed=seed) for seed in (2, 3)]
    norms = HeadNorms(*(each.data_ptr() for each in weights), eps=1e-6) if is_normed else HeadNorms()
    ours, theirs = PagedCache([shape], 6), PagedCache([shape], 6)
    theirs.step = step
    x = qkv.clone()
    row = heads_row(
        x.data_ptr(), width * 4, H, V, E, norms, (ours.keys[0], ours.values[0]), step, query_dim=Q
    )
    row[COSINES], row[SINES] = cos.data_ptr(), sin.data_ptr()
    team = Team(threads)
    team.run(program_of([row]))
    team.close()
    queries, key, value = qkv.split((H * Q, G * D, G * V), dim=1)
    query, key = queries.view(T, H, Q)[..., :D], key.view(T, G, D)
    if is_normed:
        query, key = (normed(each, weight, 1e-6) for each, weight in zip((query, key), weights, strict=True))
    query, key = rotated(query, cos, sin), rotated(key, cos, sin)
    found = x[:, : H * Q].view(T, H, Q)
    torch.testing.assert_close(found[..., :D], query, **TOLERANCE)
    assert torch.equal(found[..., D:], queries.view(T, H, Q)[..., D:])
    padding = torch.zeros(step.num_padded - T, 1, 1)
    rows = (torch.cat((each, padding.expand(-1, G, each.shape[2]))) for each in (key, value.view(T, G, V)))
    theirs.update(*(each.transpose(0, 1)[None] for each in rows), 0)
    for mine, wanted in zip(decoded(ours, 0), decoded(theirs, 0), strict=True):
        # Nearly equal numbers may be rounded to neighbouring codes.
        step_of_codes = {} if codes is None else {"atol": float(wanted.abs().max()) / 14, "rtol": 0.0}
        torch.testing.assert_close(mine, wanted, **{**TOLERANCE, **step_of_codes})
        assert torch.isclose(mine, wanted, **TOLERANCE).float().mean() > 0.98


@pytest.mark.parametrize("codes", ALL)
def test_a_block_starts_clean_for_its_new_owner(codes: torch.dtype | None) -> None:
    shape = LayerShape(num_kv_heads=1, key_dim=16, value_dim=16, codes=codes)
    cache = PagedCache([shape], 2)
    for part in stored_bytes(cache, 0):
        part.fill_(255)
    step = Step(max_tokens=4, max_sequences=1, max_blocks=1, block_tokens=16)
    step.fill([Span(0, 1, [1])])
    x, cos, sin = random(1, 48), torch.ones(1, 16), torch.zeros(1, 16)
    row = heads_row(
        x.data_ptr(), 192, 1, 16, 16, HeadNorms(), (cache.keys[0], cache.values[0]), step, query_dim=16
    )
    row[COSINES], row[SINES] = cos.data_ptr(), sin.data_ptr()
    run_alone(program_of([row]))
    assert all(page[1].isfinite().all() for page in decoded(cache, 0))
    assert all((part[0] == 255).all() for part in stored_bytes(cache, 0)), (
        "blocks of other sequences must not be touched"
    )
