"""Heads and latents without a GPU kernel are named when a model is built."""

import pytest
import torch

from attention.gpu.limits import check_heads, check_latents, check_layout

BF16 = torch.bfloat16


def test_the_heads_of_known_models_pass() -> None:
    check_heads(32, 4, 128, 128, BF16)  # Qwen3-30B
    check_heads(64, 8, 64, 64, BF16)  # gpt-oss
    check_heads(128, 128, 192, 128, BF16)  # DeepSeek-V3's expanded
    check_latents(512, 64, BF16)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((32, 4, 128, 128, torch.float64), r"attention in torch\.float64 has no GPU kernel; there are bfloat16"),
        ((32, 5, 128, 128, BF16), "32 query heads on 5 KV heads"),
        ((130, 2, 128, 128, BF16), "at most 64"),
        ((8, 8, 512, 512, BF16), "keys of 512 and values of 512 have no GPU kernel; there are 16 to 256"),
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
        (384, 64, BF16, "latent_dim is 384; the kernel takes powers of 2"),
        (1024, 64, BF16, "from 16 to 512"),
        (512, 0, BF16, "the rotary part of latents is 0; the kernel takes 1 to 128"),
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
        ValueError, match="heads lie 1 and its dims 8 numbers apart; the kernels take 4 and 1"
    ):
        check_layout(query.transpose(1, 2), pages)
    with pytest.raises(ValueError, match=r"query is torch\.float32 and the pages are torch\.float16"):
        check_layout(query, pages.half())
    with pytest.raises(ValueError, match="no contiguous tensor"):
        check_layout(query, pages[:, :1])
