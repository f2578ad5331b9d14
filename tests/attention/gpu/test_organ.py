"""Attention on GPUs: latents of prompts are expanded within a memory limit, and no bit depends on the limit. In steps of fixed
shape prompts attend absorbed, or expand as many latents as the shape has room for."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from kvcache.paged_cache import LayerShape
from kvcache.step import Span
from tests.fixtures import OnDevice
from tests.support.cached_codes import FORMATS, quantised, rounded_row

HEADS, UNROTATED, ROTARY, VALUES, RANK = 4, 16, 16, 32, 32
BLOCK, NUM_BLOCKS = 16, 12
SPANS = [Span(20, 1, [3, 7]), Span(16, 20, [5, 1, 2]), Span(0, 9, [9]), Span(40, 8, [4, 6, 0])]


def expand_within(
    device: str,
    budget_bytes: int,
    *,
    sizes_of_prompts: Sequence[int] = (),
    is_invariant: bool = False,
    codes: torch.dtype | None = None,
    is_stored: bool = False,
) -> tuple[Tensor, list[int]]:
    """Attend a decode and three prompts over latents. Return the result, and the sizes of each launch.

    `codes` rounds the latents. They are stored as codes with `is_stored`, otherwise as the decoded numbers.
    """
    from attention.gpu import organ  # noqa: PLC0415 - in the interpreter
    from attention.gpu.prefill import paged_prefill  # noqa: PLC0415
    from kvcache.gpu.cache import DeviceCache  # noqa: PLC0415
    from kvcache.gpu.step import DeviceStep  # noqa: PLC0415

    torch.manual_seed(0)
    place = torch.device(device)
    shape = LayerShape(num_kv_heads=1, key_dim=RANK + ROTARY, latent=True, codes=codes if is_stored else None)
    step = DeviceStep(
        max_tokens=64,
        max_sequences=8,
        max_blocks=4,
        block_tokens=BLOCK,
        device=place,
        is_invariant=is_invariant,
    )
    step.fix_prompts(sizes_of_prompts)
    cache = DeviceCache([shape], NUM_BLOCKS, dtype=torch.float32, device=place)
    cache.step = step
    drawn = torch.randn(cache.keys[0].shape)
    if codes is not None and is_stored:
        found = [quantised(part, codes) for part in (drawn[..., :RANK], drawn[..., RANK:])]
        cache.keys[0].view(torch.uint8).copy_(torch.cat([code.view(torch.uint8) for code, _ in found], -1))
        for to, (_, scale) in zip(cache.scales[0] or (), found, strict=True):
            to[:, 0].copy_(scale[..., 0])
    else:
        cache.keys[0].copy_(rounded_row(drawn, replace(shape, codes=codes), RANK))
    step.fill(SPANS, 1)
    step.inputs(range(step.num_tokens), [0])
    module = SimpleNamespace(
        layer_idx=0, qk_rope_head_dim=ROTARY, v_head_dim=VALUES,
        kv_b_proj=nn.Linear(RANK, HEADS * (UNROTATED + VALUES), bias=False, device=place),
    )  # fmt: skip
    query = torch.randn(1, HEADS, step.num_padded, UNROTATED + ROTARY).to(place)
    value = torch.empty(1, 1, step.num_padded, VALUES, device=place)
    sizes = []

    def noting(query_THD: Tensor, keys: Tensor, values: Tensor, *rest: Tensor, **options: object) -> Tensor:
        sizes.append(keys.numel() + values.numel())
        return paged_prefill(query_THD, keys, values, *rest, **options)  # type: ignore[arg-type]

    with (
        torch.inference_mode(),
        mock.patch.object(organ, "paged_prefill", noting),
        mock.patch.object(organ, "EXPANDED_BYTES", budget_bytes),
    ):
        out, _ = organ.attend(module, query, value, value, scaling=0.2, pages=cache)
    assert not out[0, step.num_tokens :].any(), "padded rows are zero"
    return out[0, : step.num_tokens].cpu(), sizes


def bound_expansions(device: str) -> None:
    whole, sizes = expand_within(device, 1 << 30)
    assert len(sizes) == 1, "all heads of all prompts must be expanded at once"
    of_token = 2 * (UNROTATED + ROTARY + VALUES) * 4
    for most_tokens, launches in ((BLOCK * 12, 4), (BLOCK * 6, 6), (BLOCK * 3, 10), (1, 12)):
        out, sizes = expand_within(device, of_token * most_tokens)
        longest = BLOCK * 3  # of one sequence: at least one of its heads is expanded as a whole
        assert max(sizes) * 2 * 4 <= of_token * max(most_tokens, longest)
        assert len(sizes) == launches and out.isfinite().all()
        torch.testing.assert_close(out, whole, atol=1e-6, rtol=1e-5)  # the library chooses the order


def test_what_is_expanded_at_once_is_bounded_and_changes_nothing(on_device: OnDevice) -> None:
    on_device(bound_expansions)


def read_codes(device: str, codes: torch.dtype) -> None:
    """Compare codes with pages that hold the decoded numbers: expanded prompts, and absorbed ones."""
    for sizes in ((), (40, 48)):
        plain, _ = expand_within(device, 1 << 30, sizes_of_prompts=sizes, codes=codes)
        coded, _ = expand_within(device, 1 << 30, sizes_of_prompts=sizes, codes=codes, is_stored=True)
        torch.testing.assert_close(coded, plain, atol=1e-5, rtol=1e-4)


@pytest.mark.crossed("codes", every=2)
@pytest.mark.parametrize("codes", FORMATS)
def test_codes_of_latents_give_the_result_of_their_values(on_device: OnDevice, codes: torch.dtype) -> None:
    on_device(read_codes, codes)


def attend_in_a_shape(device: str) -> None:
    eager, _ = expand_within(device, 1 << 30)
    absorbed, sizes = expand_within(device, 1 << 30, sizes_of_prompts=(40, 48))
    assert not sizes, "prompts attend absorbed"
    torch.testing.assert_close(absorbed, eager, atol=1e-6, rtol=1e-4)
    expanded, (size,) = expand_within(device, 1 << 30, sizes_of_prompts=(40, 48), is_invariant=True)
    assert size == 1024 * HEADS * (UNROTATED + ROTARY + VALUES), "as many latents as the shape has room for"
    torch.testing.assert_close(expanded, eager, atol=1e-6, rtol=1e-5)


def test_latents_in_a_step_of_fixed_shape_give_the_same_result(on_device: OnDevice) -> None:
    on_device(attend_in_a_shape)
