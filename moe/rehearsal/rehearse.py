"""Run a model once on the meta device to learn what its layers need of our organs, before any weight is read.

A family may need more than the organs provide: a bias on the attention scores, selected blocks, a recurrent state in
the cache that it computes itself, or its own mask. Such a model would return wrong answers without an error. So the
skeleton's forward runs on a few rows with organs that only record: what every layer caches, which tokens its mask shows
to a row, which keywords it passes. Windows are read from the mask, not from fields (phimoe has a sliding mask and
passes no `sliding_window`): `transformers`' mask functions are evaluated on selected pairs of tokens.
Rejected: a list of supported families (late for each new one), and trusting configuration fields.
"""

import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attention.recurrences import mixers
from attention.sparse import index as sparse_index
from attention.sparse import pools as pooled_index
from attention.transformers_names import CACHE, MIXER_CACHES
from kvcache.paged_cache import LayerShape
from kvcache.step import ROW_MULTIPLE
from moe import long_rotary
from moe.families import FOREIGN_ERRORS, UnsupportedModelError
from moe.mtp.layers import drafting_of
from moe.rehearsal.notes import Notes
from moe.rehearsal.stand_ins import RECURRENCES, attend, choose, choose_pools, make_mask
from moe.scaled_experts import use_experts
from moe.text_part import decoder_layers, leave_idle_experts, use_attention

NAME = "wideep_rehearsal"


@torch.no_grad()
def rehearse(model: PreTrainedModel) -> list[LayerShape]:
    """Run a model on meta and return what each layer caches. Leaves the rehearsal's organs set.

    Removes from the model experts that no text token reaches.

    Raises:
        UnsupportedModelError: The model needs something that the organs do not support; the message names it.
    """
    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, make_mask)
    called: set[torch.nn.Module] = set()

    def serve_experts(_module: Any, hidden_TD: Tensor, _ids_TK: Tensor, _weights_TK: Tensor) -> Tensor:
        return torch.empty_like(hidden_TD)

    def note_call(module: torch.nn.Module, _inputs: Any) -> None:
        called.add(module)

    ALL_EXPERTS_FUNCTIONS.register(NAME, serve_experts)
    use_attention(model, NAME)
    use_experts(model, NAME)
    mixers.exchange(model, RECURRENCES)
    long_rotary.rehearse(model)
    sparse_index.exchange(model, choose)
    pooled_index.exchange(model, choose_pools)
    model_type = model.config.model_type
    notes = Notes(model_type)
    rows = torch.zeros(1, ROW_MULTIPLE, dtype=torch.int64, device="meta")
    hook = register_module_forward_pre_hook(note_call)
    try:
        logits = model(
            input_ids=rows,
            position_ids=rows,
            use_cache=not mixers.lightning_modules(model),
            logits_to_keep=rows[0, :2],
            pages=notes,
            **{CACHE: notes},
        ).logits
        _rehearse_drafts(model, rows[0], notes)
    except UnsupportedModelError:
        raise
    except FOREIGN_ERRORS as error:
        raise UnsupportedModelError(
            f"{model_type} does not run on a packed batch with a paged cache "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'})"
        ) from error
    finally:
        hook.remove()
    leave_idle_experts(model, called)
    config = model.config.get_text_config(decoder=True)
    if logits.shape != (1, 2, config.vocab_size):
        raise UnsupportedModelError(f"{model_type} has logits of shape {list(logits.shape)} for two tokens")
    long_rotary.restore(model)
    layers = decoder_layers(model)
    if (drafting := drafting_of(model)) is not None:
        layers += drafting.layers.values()
    row_by_row = [index for index, layer in enumerate(layers) if _is_row_by_row(layer)]
    num_drafting = 0 if drafting is None else drafting.num_blocks
    shapes = notes.shapes(config.num_hidden_layers + num_drafting, row_by_row)
    # As transformers' mask for prompts with images (Gemma 4), which the text part does not build.
    sees_images = getattr(config, "use_bidirectional_attention", None) == "vision"
    return [replace(shape, sees_images=sees_images and shape.window > 0) for shape in shapes]


def _rehearse_drafts(model: PreTrainedModel, row_T: Tensor, notes: Notes) -> None:
    """Run every multi-token-prediction layer once, if the model has any."""
    drafting = drafting_of(model)
    if drafting is None:
        return
    width = model.get_input_embeddings().weight.shape[1]
    hidden_TD = torch.empty(len(row_T), width, device="meta", dtype=model.dtype)
    for depth in range(drafting.num_layers):
        drafting(depth, row_T, hidden_TD, row_T[None], notes)


def _is_row_by_row(layer: torch.nn.Module) -> bool:
    """Return whether a layer is only experts or a gated MLP: no part can take a cache or see neighbouring rows."""
    parts = [module for module in layer.modules() if module is not layer]
    return not any(
        isinstance(module, torch.nn.Conv1d)
        or set(MIXER_CACHES) & set(inspect.signature(type(module).forward).parameters)
        for module in parts
    )
