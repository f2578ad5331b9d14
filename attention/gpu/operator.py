"""The attention organ as one PyTorch operator, for models compiled by torch.compile (see `kvcache.gpu.operators`)."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attention.gpu import organ
from kvcache.gpu.operators import CACHES, Numbered, OperatedCache

NAME = "wideep_paged_gpu_operator"

_MODULES: Numbered[nn.Module] = Numbered()


@torch.library.custom_op("wideep::attend", mutates_args=())
def _attend(
    query: Tensor, value: Tensor, sinks: Tensor | None, order: Tensor, cache: int, module: int, scaling: float
) -> Tensor:
    attending, pages = _MODULES.find(module), CACHES.find(cache)
    out, _ = organ.attend(attending, query, value, value, scaling=scaling, pages=pages, s_aux=sinks)
    return out.contiguous()


@_attend.register_fake
def _like_attend(query: Tensor, value: Tensor, *_rest: object) -> Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float,
    pages: OperatedCache,
    s_aux: Tensor | None = None,
    **_options: Any,
) -> tuple[Tensor, None]:
    """Attend like `organ.attend`. The result [1, P, H, V] is contiguous."""
    out_1PHV: Tensor = torch.ops.wideep.attend(
        query, value, s_aux, pages.order_1, pages.number, module.attention_number, scaling
    )
    return out_1PHV, None


def enter(net: nn.Module) -> None:
    """Number a model's attention modules, so that the operator can find them."""
    for module in net.modules():
        if hasattr(module, "layer_idx"):
            module.attention_number = _MODULES.enter(module)  # type: ignore[assignment]


def register() -> None:
    """Register the operator with `transformers` under `NAME`. It may be called again."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
