"""Models that the GPU kernels support. Does not use Triton, so `wideep size` can check without a GPU or its packages."""

from torch import nn
from transformers import PreTrainedModel

from attention import latents
from attention.gpu import limits as attention_limits
from attention.sparse import pools as pooled_index
from kvcache.paged_cache import BLOCK_TOKENS, LayerShape
from moe.load.quantisation import Quantisation

TILE_INPUTS = 128  # inputs per tile of a quantised weight, in all launches


def why_unserved(
    net: PreTrainedModel | nn.Module, shapes: list[LayerShape], quantisation: Quantisation | None
) -> str | None:
    """Name what the kernels lack for a model on meta, to follow "the model has". None if nothing.

    Args:
        shapes: Shapes of what each layer caches.
    """
    ranks = [int(getattr(module, "kv_lora_rank", 0)) for module in latents.latent_modules(net)]
    problem = (
        latents.why_not(net)
        or pooled_index.why_not(net, BLOCK_TOKENS)
        or attention_limits.why_not(shapes, ranks)
    )
    if quantisation is not None:
        problem = problem or why_no_blocks(quantisation)
    return problem


def why_no_blocks(quantisation: Quantisation) -> str | None:
    """Return why quantised weights are not supported, or None if they are."""
    problems = (why_no_block(each.block) for each in quantisation.formats if each.block)
    return next((f"weights with unsupported scales: {problem}" for problem in problems if problem), None)


def why_no_block(block: int, in_dim: int | None = None) -> str | None:
    """Return why scales for `block` inputs, of a weight with `in_dim` or any, are not supported. None if they are."""
    is_whole_row = in_dim is not None and block >= in_dim
    if is_whole_row or block % TILE_INPUTS == 0 or block in (16, 32, 64):
        return None
    return f"scales are for {block} inputs; the GPU kernels support 16, 32, 64, multiples of {TILE_INPUTS}, or a whole row"
