"""A sparse index and attention to its choice for GPUs, in Triton's interpreter and on a GPU if there is one, against the
plain definition: ties go by position, and other rows do not matter."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from kvcache.paged_cache import LayerShape
from kvcache.step import Span
from tests.fixtures import OnDevice
from tests.support.cached_codes import FORMATS, quantised, rounded, rounded_row
from tests.support.models import pools
from tests.support.models.pools import Index, pooling_of, shape_of

HEADS, DIM, SCALE = 5, 24, 0.3
LATENT, ROTARY, UNROTATED, VALUES = 32, 16, 24, 20
SPANS = [(0, 1), (70, 1), (0, 19), (40, 5)]  # tokens cached, tokens of this step
TABLES = [[9], [3, 14, 0, 7, 11], [5, 1], [2, 8, 4]]


class Filled:
    """A step over shuffled blocks, with pages of latents and of index keys. If `values` > 0, it is the number of distinct keys."""

    def __init__(
        self,
        device: str,
        spans: list[tuple[int, int]],
        *,
        num_decodes: int = 0,
        values: int = 0,
        codes: torch.dtype | None = None,
    ) -> None:
        from kvcache.gpu.cache import DeviceCache  # noqa: PLC0415 - in the interpreter
        from kvcache.gpu.step import DeviceStep  # noqa: PLC0415

        generator, place = torch.Generator().manual_seed(4), torch.device(device)
        shape = LayerShape(num_kv_heads=1, key_dim=LATENT + ROTARY, latent=True, index_dim=DIM, codes=codes)
        self.step = DeviceStep(max_tokens=128, max_sequences=8, max_blocks=6, block_tokens=16, device=place)
        self.cache = DeviceCache([shape], 16, dtype=torch.float32, device=place)
        self.cache.step = self.step
        pages = torch.randn(self.cache.indexes[0].shape, generator=generator)
        if values:
            pages = pages.flatten(0, 1)[:values][torch.randint(values, (16, 16), generator=generator)]
        latents = torch.randn(self.cache.keys[0].shape, generator=generator)
        if codes is None:
            self.cache.indexes[0].copy_(pages)
            self.cache.keys[0].copy_(latents)
        else:
            self.store_codes(pages, latents, codes)
        # As stored, on the CPU.
        self.index_keys, self.latents = rounded(pages, codes), rounded_row(latents, shape, LATENT)
        self.fill(spans, num_decodes)

    def store_codes(self, pages: Tensor, latents: Tensor, codes: torch.dtype) -> None:
        """Store pages of index keys and of latents as codes, and their scales."""
        scales, index_scale = self.cache.scales[0], self.cache.index_scales[0]
        assert scales is not None and index_scale is not None
        (latent, of_latent), (rotary, of_rotary), (index, of_index) = (
            quantised(each, codes) for each in (latents[..., :LATENT], latents[..., LATENT:], pages)
        )
        self.cache.keys[0].view(torch.uint8).copy_(
            torch.cat([each.view(torch.uint8) for each in (latent, rotary)], -1)
        )
        self.cache.indexes[0].view(torch.uint8).copy_(index.view(torch.uint8))
        for to, scale in ((scales.keys, of_latent), (scales.values, of_rotary), (index_scale, of_index)):
            to[:, 0].copy_(scale[..., 0])

    def fill(self, spans: list[tuple[int, int]], num_decodes: int = 0, first: int = 0) -> None:
        """Fill the step with sequences, numbered from `first` on."""
        self.spans = spans
        tables = TABLES[first : first + len(spans)]
        self.step.fill([Span(*span, table) for span, table in zip(spans, tables, strict=True)], num_decodes)
        self.step.inputs([0] * self.step.num_tokens, [])

    def drawn(self) -> tuple[Tensor, Tensor]:
        """Return index queries and weights of the rows, which depend on their positions."""
        generator = torch.Generator().manual_seed(6)
        query, weight = (
            torch.randn(128, HEADS, DIM, generator=generator),
            torch.randn(128, HEADS, generator=generator),
        )
        position = self.step.on_device.position_P
        return query.to(position.device)[position], weight.to(position.device)[position]

    def choose(self, count: int) -> Tensor:
        """Choose with programs that take turns and each see few scores at a time."""
        from attention.gpu import sparse  # noqa: PLC0415

        with mock.patch.multiple(sparse, _SCORED=16, _SCORED_BY=2, _SCANNED=32):
            return sparse.choose_from_pages(self.cache, 0, *self.drawn(), SCALE, count)[0].cpu()

    def wanted(self, count: int) -> list[list[int]]:
        """Return the choice by the definition: slots of the cache, in the order of the text."""
        query, weight = (each.cpu().double() for each in self.drawn())
        found: list[list[int]] = []
        for (start, length), table in zip(self.spans, self.tables(), strict=True):
            own = self.index_keys[table].flatten(0, 1).double()
            for position in range(start, start + length):
                row = len(found)
                scores = weight[row] @ (query[row] @ own[: position + 1].T * SCALE).relu()
                order = torch.sort(scores.round(decimals=5), descending=True, stable=True).indices
                found.append([table[each // 16] * 16 + each % 16 for each in sorted(order[:count].tolist())])
        return found

    def tables(self) -> list[list[int]]:
        return [
            self.step.block_table_SM[row, : -(-(start + length) // 16)].tolist()
            for row, (start, length) in enumerate(self.spans)
        ]


def check_choice(device: str, count: int, values: int, codes: torch.dtype | None = None) -> None:
    filled = Filled(device, SPANS, values=values, codes=codes)
    chosen = filled.choose(count)
    for row, wanted in enumerate(filled.wanted(count)):
        assert chosen[row].tolist() == wanted + [-1] * (count - len(wanted)), row
    assert (chosen[filled.step.num_tokens :] == -1).all(), "padding rows must choose nothing"


def check_rows_of_their_own(device: str) -> None:
    """Compare rows next to others, in a step of decodes, in chunks, and scored a few at a time."""
    filled = Filled(device, SPANS, values=9)
    together = filled.choose(8)
    filled.fill([(70, 1)], num_decodes=1, first=1)
    assert torch.equal(filled.choose(8)[0], together[1])
    filled.fill([(0, 12)], first=2)
    assert torch.equal(filled.choose(8)[:12], together[2:14])
    filled.fill([(12, 7)], first=2)
    assert torch.equal(filled.choose(8)[:7], together[14:21])
    few = Filled(device, SPANS, values=9)
    with mock.patch("attention.gpu.sparse.score_rows", lambda *_: 7):
        assert torch.equal(few.choose(8), together)


def check_attention(device: str, has_sinks: bool, heads: int, codes: torch.dtype | None = None) -> None:
    """Attend to all tokens, and to few."""
    from attention.gpu import organ  # noqa: PLC0415

    torch.manual_seed(1)
    module: Any = SimpleNamespace(
        layer_idx=0, qk_rope_head_dim=ROTARY, v_head_dim=VALUES,
        kv_b_proj=nn.Linear(LATENT, heads * (UNROTATED + VALUES), bias=False, device=device),
    )  # fmt: skip
    filled = Filled(device, SPANS, codes=codes)
    sinks = torch.randn(heads).to(device) if has_sinks else None
    query = torch.randn(1, heads, filled.step.num_padded, UNROTATED + ROTARY).to(device)
    value = torch.empty(1, 1, filled.step.num_padded, VALUES, device=device)
    key_HUL, value_HVL = (
        module.kv_b_proj.weight.detach().cpu().double().view(heads, -1, LATENT).split([UNROTATED, VALUES], 1)
    )
    latents = filled.latents.flatten(0, 1).double()
    for count in (9, 100):
        chosen = filled.choose(count)
        with (
            torch.inference_mode(),
            mock.patch.object(organ, "EXPANDED_BYTES", 20_000),
        ):  # a few rows at a time
            out, _ = organ.attend(
                module, query, value, value, scaling=0.2, pages=filled.cache, s_aux=sinks,
                indices=chosen[None].to(device),
            )  # fmt: skip
        assert not out[0, filled.step.num_tokens :].any()
        for row, own in enumerate(filled.wanted(count)):
            of_latent, rotary = latents[own].split([LATENT, ROTARY], -1)
            plain, rotated = query[0, :, row].cpu().double().split([UNROTATED, ROTARY], -1)
            scores = (torch.einsum("hu,hul,cl->hc", plain, key_HUL, of_latent) + rotated @ rotary.T) * 0.2
            if sinks is not None:
                scores = torch.cat((scores, sinks.cpu().double()[:, None]), -1)
            shares = scores.softmax(-1)[:, : len(own)]
            want = torch.einsum("hc,cl,hvl->hv", shares, of_latent, value_HVL)
            torch.testing.assert_close(out[0, row].cpu().double(), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("count", "values"),
    [(7, 6), (300, 0), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, 0), (7, 0), (32, 6)))],
)
def test_the_best_of_a_row_s_own_tokens_are_chosen_and_of_equals_the_first(
    count: int, values: int, on_device: OnDevice
) -> None:
    on_device(check_choice, count, values)


def test_what_is_chosen_does_not_depend_on_what_is_beside(on_device: OnDevice) -> None:
    on_device(check_rows_of_their_own)


@pytest.mark.parametrize(("has_sinks", "heads"), [(False, 4), pytest.param(True, 20, marks=pytest.mark.slow)])
def test_attention_reads_chosen_tokens_only(has_sinks: bool, heads: int, on_device: OnDevice) -> None:
    on_device(check_attention, has_sinks, heads)


@pytest.mark.crossed("codes", every=2)
@pytest.mark.parametrize("codes", FORMATS)
def test_codes_of_index_keys_are_chosen_by_their_values(codes: torch.dtype, on_device: OnDevice) -> None:
    on_device(check_choice, 7, 6, codes)


@pytest.mark.crossed("codes", every=2)
@pytest.mark.parametrize("codes", FORMATS)
def test_attention_reads_codes_of_chosen_tokens(codes: torch.dtype, on_device: OnDevice) -> None:
    on_device(check_attention, False, 4, codes)


def pools_on(device: str, size: int, num_chosen: int, is_alike: bool = False) -> Index:
    from attention.gpu.sparse import choose_pools  # noqa: PLC0415
    from kvcache.gpu.cache import DeviceCache  # noqa: PLC0415
    from kvcache.gpu.step import DeviceStep  # noqa: PLC0415

    place = torch.device(device)
    step = DeviceStep(max_tokens=160, max_sequences=8, max_blocks=6, block_tokens=16, device=place)
    cache = DeviceCache([shape_of(size)], 16, dtype=torch.float32, device=place)
    cache.step = step
    return Index(
        pooling_of(size, num_chosen, device), step, cache, choose_pools, device=device, is_alike=is_alike
    )


def check_pools(device: str, size: int, num_chosen: int, is_alike: bool) -> None:
    from attention.gpu import sparse  # noqa: PLC0415

    with mock.patch.multiple(sparse, _SCORED=16, _SCORED_BY=2, _SCANNED=32, _POOLED_BY=3):
        pools.check_choice(pools_on(device, size, num_chosen, is_alike))


def check_cut_pools(device: str, size: int) -> None:
    from attention.gpu import sparse  # noqa: PLC0415

    with mock.patch.multiple(sparse, _SCORED=16, _SCORED_BY=2, _SCANNED=32, _POOLED_BY=3):
        pools.check_cuts(pools_on(device, size, 2), pools_on(device, size, 2))


@pytest.mark.parametrize(
    ("size", "num_chosen", "is_alike"),
    [
        (4, 3, False),
        pytest.param(16, 2, False, marks=pytest.mark.slow),
        pytest.param(4, 3, True, marks=pytest.mark.slow),
    ],
)
def test_the_best_pools_and_the_tokens_behind_the_last_are_chosen(
    size: int, num_chosen: int, is_alike: bool, on_device: OnDevice
) -> None:
    on_device(check_pools, size, num_chosen, is_alike)


@pytest.mark.slow
def test_cuts_change_no_pool(on_device: OnDevice) -> None:
    on_device(check_cut_pools, 4)
