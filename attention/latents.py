"""Requirements on the modules of multi-head latent attention, and the two halves of the weight that is absorbed.

A module caches one latent per token and expands it with `kv_b_proj` into the key and value of every head. The kernels
read the latents directly: the key half is multiplied into the query and the value half into the output (DeepSeek-V2,
2024). CPU and GPU share this module.

Legend: H query heads, U the part of the key dim that is not rotary, V value dim, L latent dim.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

ABSORBED = ".kv_b_proj.weight"  # suffix of the names of these weights, which must not be quantised
_NEEDED = ("kv_b_proj", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")


class Halves(NamedTuple):
    """Views of `kv_b_proj`'s weight: the rows that make keys and the rows that make values."""

    key_HUL: Tensor
    value_HVL: Tensor


def latent_modules(net: nn.Module) -> Iterator[Any]:
    """Return the attention modules that cache latents."""
    return (module for module in net.modules() if hasattr(module, "expand_kv"))


def why_not(net: nn.Module) -> str | None:
    """Return why the kernels cannot read latents directly, as "the model has ...", or None if they can."""
    for module in latent_modules(net):
        missing = [name for name in _NEEDED if not hasattr(module, name)]
        if missing:
            return f"latent attention without {' and '.join(missing)}"
        if module.kv_b_proj.bias is not None:
            return "latent attention with a bias in kv_b_proj"
    return None


def halves_of(weight: Tensor, heads: int, unrotated_dim: int) -> Halves:
    """Split `kv_b_proj`'s weight [H * (U + V), L]."""
    weight_HXL = weight.view(heads, -1, weight.shape[-1])
    return Halves(weight_HXL[:, :unrotated_dim], weight_HXL[:, unrotated_dim:])


def expand_nothing(net: nn.Module) -> None:
    """Stop the modules from expanding the step's own rows: the kernels read latents from the pages."""
    for module in latent_modules(net):
        module.expand_kv = _Shapes(module)


class _Shapes:
    """Replacement for `expand_kv` that returns uninitialised tensors of one head, used only for their shapes."""

    def __init__(self, module: Any) -> None:
        self._rope_dim = int(module.qk_rope_head_dim)
        self._key_dim = int(module.qk_nope_head_dim) + self._rope_dim
        self._value_dim = int(module.v_head_dim)

    def __call__(self, latent: Tensor, _rope: Tensor) -> tuple[Tensor, Tensor]:
        batch, _, rows, _ = latent.shape
        return latent.new_empty(batch, 1, rows, self._key_dim), latent.new_empty(
            batch, 1, rows, self._value_dim
        )
