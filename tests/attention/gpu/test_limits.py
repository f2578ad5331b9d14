"""Heads and latents without a GPU kernel raise an error when a model is built."""

from dataclasses import replace

import pytest
import torch

from attention.gpu.limits import (
    check_heads,
    check_latents,
    check_layout,
    scratch_bytes,
    split_sizes,
    why_not,
)
from kvcache.paged_cache import LayerShape, StateShape

BF16 = torch.bfloat16


def test_the_heads_of_known_models_pass() -> None:
    check_heads(32, 4, 128, 128, BF16)  # Qwen3-30B
    check_heads(64, 8, 64, 64, BF16)  # gpt-oss
    check_heads(128, 128, 192, 128, BF16)  # DeepSeek-V3, expanded
    check_latents(512, 64, BF16)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((32, 4, 128, 128, torch.float64), r"attention in torch\.float64 has no GPU kernel; use bfloat16"),
        ((32, 5, 128, 128, BF16), "32 query heads on 5 KV heads"),
        ((130, 2, 128, 128, BF16), "at most 64"),
        ((8, 8, 640, 512, BF16), "keys of 640 and values of 512 have no GPU kernel; both must be 16 to 512"),
        ((32, 1, 512, 512, BF16), "at most 16"),
    ],
)  # fmt: skip
def test_heads_without_a_kernel_are_named(
    shape: tuple[int, int, int, int, torch.dtype], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_heads(*shape)


@pytest.mark.parametrize(
    ("latent_dim", "rope_dim", "dtype", "message"),
    [
        (384, 64, BF16, "latent_dim is 384; the kernel supports powers of 2"),
        (1024, 64, BF16, "from 16 to 512"),
        (512, 129, BF16, "the rotary part of latents is 129; the kernel supports 0 to 128"),
        (512, 64, torch.int8, r"attention in torch\.int8 has no GPU kernel"),
    ],
)
def test_latents_without_a_kernel_are_named(
    latent_dim: int, rope_dim: int, dtype: torch.dtype, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_latents(latent_dim, rope_dim, dtype)


def test_layouts_that_kernels_would_misread_are_named() -> None:
    query, pages = torch.zeros(2, 4, 8), torch.zeros(3, 2, 16, 8)
    check_layout(query, pages)
    check_layout(torch.zeros(2, 9, 8)[:, :4], pages)  # rows may have gaps between them
    with pytest.raises(
        ValueError, match="heads have stride 1 and its dims stride 8; the kernels need 4 and 1"
    ):
        check_layout(query.transpose(1, 2), pages)
    with pytest.raises(ValueError, match=r"query is torch\.float32 and the pages are torch\.float16"):
        check_layout(query, pages.half())
    with pytest.raises(ValueError, match="the pages are not contiguous"):
        check_layout(query, pages[:, :1])


def heads(key_dim: int, value_dim: int) -> LayerShape:
    return LayerShape(num_kv_heads=2, key_dim=key_dim, value_dim=value_dim)


def recurrent(*state: int) -> LayerShape:
    return LayerShape(state=StateShape(recurrent=state))


LATENT = LayerShape(num_kv_heads=1, key_dim=576, value_dim=0, latent=True)


@pytest.mark.parametrize(
    ("shapes", "ranks", "text"),
    [
        ([heads(128, 128), heads(64, 64)], [], None),
        ([heads(192, 128), heads(16, 256)], [], None),
        ([LATENT], [512], None),
        ([heads(128, 128), heads(8, 8)], [], "heads of 8 values; the GPU kernels support 16 to 512"),
        ([heads(256, 256), heads(512, 512)], [], None),
        ([heads(128, 640)], [], "heads of 640 values"),
        (
            [LATENT],
            [384],
            "latents of 384 values (kv_lora_rank); the GPU kernels support powers of 2 from 16 to 512",
        ),
        ([replace(LATENT, window=8)], [512], "a sliding window over latents"),
        ([replace(heads(128, 128), codes=torch.int8)], [], None),
        ([replace(LATENT, codes=torch.int8, index_dim=128)], [512], None),
        ([LATENT], [1024], "latents of 1024 values"),
        ([replace(LATENT, index_dim=128), recurrent(32, 128, 128), recurrent(16, 8192)], [512], None),
        ([replace(LATENT, index_dim=1024)], [512], "an index of more than 768 values per token"),
        ([recurrent(2, 1024, 64)], [], "recurrent states of 1024 rows; the GPU kernels support up to 512"),
        ([LayerShape(state=StateShape(tail=(3, 64)))], [], None),
    ],
)
def test_what_the_kernels_lack_is_named(shapes: list[LayerShape], ranks: list[int], text: str | None) -> None:
    found = why_not(shapes, ranks)
    assert found is None if text is None else found is not None and text in found


def test_the_memory_beside_the_pages_is_what_is_allocated() -> None:
    """DeepSeek-V3 with 256 sequences of up to 128k tokens: 2.1 GB if splits may not adapt to the batch, otherwise 0.13 GB."""
    sizes = {"max_sequences": 256, "heads": 128, "value_dim": 512, "max_tokens": 131072}
    assert scratch_bytes(**sizes, is_invariant=True) == 256 * 32 * 128 * 514 * 4
    qwen3 = {"max_sequences": 256, "heads": 32, "value_dim": 128, "max_tokens": 40960}
    assert scratch_bytes(**qwen3, is_invariant=True) == 4096 * 32 * 130 * 4, "the splits of smaller batches"
    assert scratch_bytes(**sizes) == (256 + 255) * 128 * 514 * 4
    assert scratch_bytes(max_sequences=2, heads=4, value_dim=64, max_tokens=128) == 2 * 2 * 4 * 66 * 4
    assert split_sizes(128, 40960, is_invariant=True) == (256, 64)
    assert split_sizes(128, 40960) == (64, 128) and split_sizes(128, 1000) == (64, 16)
