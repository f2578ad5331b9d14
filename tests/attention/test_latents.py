"""Modules with latents that attention can use directly."""

import torch
from torch import nn

from attention import latents


class Module(nn.Module):
    """The interface of an attention module that caches latents."""

    qk_rope_head_dim, qk_nope_head_dim, v_head_dim = 4, 8, 6

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        self.kv_b_proj = nn.Linear(16, 2 * (8 + 6), bias=bias)

    def expand_kv(self, latent: torch.Tensor, rope: torch.Tensor) -> None:
        """Do nothing: latents are not expanded."""
        raise AssertionError


class Foreign(nn.Module):
    """Caches latents in a different way."""

    qk_rope_head_dim = 4

    def expand_kv(self) -> None: ...


def test_what_cannot_be_absorbed_is_named() -> None:
    assert latents.why_not(nn.Sequential(Module(), nn.Linear(2, 2))) is None
    biased = nn.Sequential(Module(), Module(bias=True))
    assert latents.why_not(biased) == "latent attention with a bias in kv_b_proj"
    missing = latents.why_not(nn.Sequential(Foreign()))
    assert missing == "latent attention without kv_b_proj and qk_nope_head_dim and v_head_dim"


def test_modules_expand_nothing_and_still_say_the_shapes_of_values() -> None:
    net = nn.Sequential(Module())
    latents.expand_nothing(net)
    (module,) = latents.latent_modules(net)
    key, value = module.expand_kv(torch.zeros(1, 1, 5, 16), torch.zeros(1, 1, 5, 4))
    assert key.shape == (1, 1, 5, 12) and value.shape == (1, 1, 5, 6)


def test_a_weight_is_split_into_views_by_head() -> None:
    weight = torch.arange(2 * 14 * 3.0).view(2 * 14, 3)
    halves = latents.halves_of(weight, 2, 8)
    assert torch.equal(halves.key_HUL[1], weight[14:22]) and torch.equal(halves.value_HVL[1], weight[22:])
    assert halves.key_HUL.data_ptr() == weight.data_ptr()
