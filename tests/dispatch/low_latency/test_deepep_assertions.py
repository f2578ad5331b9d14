"""The assertions of DeepEP's own low-latency test in our code: rows that carry their source, counts, ranges, sums.

Values show the source of a row: all channels except the last 128 hold the source rank, and the last 128 hold the
token. The original file runs through `dispatch.deep_ep_shim`, from a checkout.
"""

from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dispatch import fp8
from dispatch.faces.low_latency import LowLatencyFace
from tests.dispatch.faces.deep_ep_utils.math import calc_diff
from tests.dispatch.low_latency.ranks import open_face
from tests.fixtures import PoolOf

T, H, K, L = 8, 512, 4, 3
RANK_OFFSET = 128
FORMS = [(False, False, False), (True, False, False), (True, True, False), (True, True, True)]
COUNT_MASK = (1 << 32) - 1


def bring(rank: int, world_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return rows that name their source, random rows, choices with some -1, and weights."""
    generator = torch.Generator().manual_seed(1 + rank)
    named = torch.full((T, H), float(rank - RANK_OFFSET), dtype=torch.bfloat16)
    named[:, -128:] = torch.arange(T).to(torch.bfloat16).view(-1, 1)
    noise = (torch.randn(T, H, generator=generator) * 0.1).to(torch.bfloat16)
    topk = torch.rand(T, world_size * L, generator=generator).topk(K, dim=1).indices
    topk[torch.rand(T, K, generator=generator) < 0.15] = -1
    return named, noise, topk, torch.randn(T, K, generator=generator).abs()


def check_rows(
    rows_NH: Tensor, src_info: Tensor, ranges: Tensor, all_topk: Tensor, expert: int, rounded: bool
) -> None:
    """Check that valid rows are constant except for the last channels, which hold the token, and that sources match ranges."""
    sources, tokens = rows_NH[:, :-128], rows_NH[:, -128:]
    assert torch.equal(sources.amin(dim=1), sources.amax(dim=1))
    if rounded:
        assert calc_diff(tokens[:, -1], src_info) < 0.007
        return
    assert torch.equal(tokens, src_info.to(rows_NH.dtype).view(-1, 1).expand_as(tokens))
    for source, packed in enumerate(ranges.tolist()):
        begin, count = packed >> 32, packed & COUNT_MASK
        assert count == int((all_topk[source] == expert).sum())
        assert (sources[begin : begin + count] == source - RANK_OFFSET).all()


def check_form(face: LowLatencyFace, form: tuple[bool, bool, bool], hooks: bool, is_named: bool) -> None:
    """Run one dispatch, and two combines of its result."""
    rank, world_size = face.exchange.rank, face.exchange.world_size
    named, noise, topk, weights = bring(rank, world_size)
    all_topk = torch.stack([bring(source, world_size)[2] for source in range(world_size)])
    x, (use_fp8, round_scale, use_ue8m0) = named if is_named else noise, form
    stats = torch.zeros(L, dtype=torch.int32)
    recv_x, recv_count, handle, event, hook = face.low_latency_dispatch(
        x, topk, T, world_size * L, stats, use_fp8=use_fp8, round_scale=round_scale, use_ue8m0=use_ue8m0,
        async_finish=not hooks, return_recv_hook=hooks,
    )  # fmt: skip
    hook() if hook is not None else event.current_stream_wait()
    rows = fp8.dequantise_fp8(*recv_x, torch.bfloat16) if isinstance(recv_x, tuple) else recv_x.clone()
    assert torch.equal(stats, recv_count)
    assert recv_count.tolist() == (handle[1] & COUNT_MASK).sum(dim=1).tolist()
    for local, count in enumerate(recv_count.tolist()):
        expert = rank * L + local
        assert count == int((all_topk == expert).sum())
        if is_named and count:
            check_rows(
                rows[local, :count], handle[0][local, :count], handle[1][local], all_topk, expert, round_scale
            )
    for zero_copy in (False, True):
        if zero_copy:
            face.get_next_low_latency_combine_buffer(handle)[:, :, :] = rows
        out = torch.empty(T, H, dtype=torch.bfloat16)
        combined, event, hook = face.low_latency_combine(
            rows,
            topk,
            weights,
            handle,
            zero_copy=zero_copy,
            async_finish=not hooks,
            return_recv_hook=hooks,
            out=out,
        )
        hook() if hook is not None else event.current_stream_wait()
        assert combined.data_ptr() == out.data_ptr()
        assert not combined.isnan().any()
        want = x * weights.masked_fill(topk == -1, 0).sum(dim=1, keepdim=True)
        if not round_scale:
            assert calc_diff(want, combined) < (9e-4 if use_fp8 else 1e-5)


def check_all(name: str, combinations: list[tuple[tuple[bool, bool, bool], bool, bool]]) -> int:
    """Check combinations of form, hooks and named rows. Return the number of checks."""
    with open_face(name) as face:
        for form, hooks, is_named in combinations:
            check_form(face, form, hooks, is_named)
        dist.barrier()
        return len(combinations)


@pytest.mark.parametrize(("name", "world_size"), [("shm", 4), ("gloo", 2)])
def test_what_deepep_asserts_holds(pool_of: PoolOf, name: str, world_size: int) -> None:
    combinations = list(product(FORMS, (False, True), (True, False)))
    assert pool_of(world_size).run(check_all, name, combinations) == [16] * world_size


def test_the_assertions_notice_a_wrong_source() -> None:
    rows, topk = bring(0, 2)[0], torch.zeros(1, T, 1, dtype=torch.int64)
    tokens, ranges = torch.arange(T, dtype=torch.int32), torch.tensor([T])
    check_rows(rows, tokens, ranges, topk, 0, False)
    for wrong in ((rows, tokens.roll(1), ranges), (rows, tokens, ranges - 1), (rows + 1, tokens, ranges)):
        with pytest.raises(AssertionError):
            check_rows(*wrong, topk, 0, False)
