"""Lightning attention, whose modules are exchanged as a whole (`attention.recurrences.mixers`): tried, as all that is adopted."""

from types import SimpleNamespace
from typing import Any

import torch

from attention.recurrences.mixers import lightning_modules
from kvcache.step import Span, Step
from moe.adopt.adopt import SampleRows
from moe.families import UnsupportedModelError

_TOKENS = 24
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


@torch.no_grad()
def try_lightning(net: Any, step: Step, rows: SampleRows) -> None:
    """See that the modules give what `transformers`' own code gives.

    Raises:
        UnsupportedModelError: they do not.
    """
    for module in lightning_modules(net):
        step.fill([Span(0, min(_TOKENS, step.max_tokens), range(2))])
        step.inputs([0] * step.num_tokens, [])
        heads, dim, layer = int(module.num_attention_heads), int(module.head_dim), int(module.layer_idx)
        states = {layer: torch.zeros(0, heads, dim, dim, device=rows.device)}
        pages = SimpleNamespace(step=step, states=states)
        x = rows.draw(1, step.num_padded, module.qkv_proj.weight.shape[1])
        wanted = type(module).forward(module, x, None, None)[0][:, : step.num_tokens]
        found = module.forward(x, past_key_values=pages)[0][:, : step.num_tokens]
        tolerance = _TOLERANCE[rows.dtype]
        if not torch.allclose(found, wanted, rtol=tolerance, atol=tolerance):
            raise UnsupportedModelError(
                f"{net.config.model_type}: layer {layer} computes lightning attention in a way of its own"
            )
