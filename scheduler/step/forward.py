"""What runs a step: a model, or what replays it."""

from typing import Protocol

from torch import Tensor

from kvcache.paged_cache import PagedCache


class Forward(Protocol):
    """Runs a step; see `moe.model.Model.forward`."""

    def __call__(
        self, token_T: Tensor, cache: PagedCache, logits_R: Tensor, *, keeps_hidden: bool = False
    ) -> Tensor:
        """Return logits [R, V]."""
        ...
