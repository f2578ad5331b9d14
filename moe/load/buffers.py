"""Values of a model that no checkpoint contains, such as rotary frequencies.

A model is built on the meta device, which keeps no values, and its weights are read afterwards. What remains is computed again by
the family's own initialisation, with the loaded weights protected from it.
"""

import torch
from transformers import PreTrainedModel


def restore_buffers(model: PreTrainedModel) -> None:
    """Compute again, on the CPU, the buffers that are in no checkpoint and were lost on the meta device."""
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    for module in model.modules():
        lost = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        if not lost:
            continue
        for name in lost:
            module._buffers[name] = torch.empty_like(getattr(module, name), device="cpu")
        model._init_weights(module)
    stranded = [
        name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta
    ]
    assert not stranded, f"not materialised: {stranded}"
