"""Heads and latents that the kernels do not take are named, with the sizes that they do."""

from dataclasses import replace

import pytest

from attention.gpu.served_shapes import why_not
from kvcache.paged_cache import LayerShape


def heads(key_dim: int, value_dim: int) -> LayerShape:
    return LayerShape(num_kv_heads=2, key_dim=key_dim, value_dim=value_dim)


LATENT = LayerShape(num_kv_heads=1, key_dim=576, value_dim=0, latent=True)


@pytest.mark.parametrize(
    ("shapes", "ranks", "text"),
    [
        ([heads(128, 128), heads(64, 64)], [], ""),
        ([heads(192, 128), heads(16, 256)], [], ""),
        ([LATENT], [512], ""),
        ([heads(128, 128), heads(8, 8)], [], "heads of 8 values; the GPU kernels take 16 to 256"),
        ([heads(128, 320)], [], "heads of 320 values"),
        (
            [LATENT],
            [384],
            "latents of 384 values (kv_lora_rank); the GPU kernels take powers of 2 from 16 to 512",
        ),
        ([replace(LATENT, window=8)], [512], "a sliding window over latents"),
        ([LATENT], [1024], "latents of 1024 values"),
    ],
)
def test_what_the_kernels_lack_is_named(shapes: list[LayerShape], ranks: list[int], text: str) -> None:
    found = why_not(shapes, ranks)
    assert text in found if text else not found
