"""Run a whole model on a few tokens before the first step, with a cheap function of all inputs in place of the experts.

So the run is local and does not depend on the number of ranks, as what is found by it must not.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attention.recurrences import mixers
from attention.transformers_names import CACHE
from kvcache.paged_cache import BLOCK_TOKENS, PagedCache
from kvcache.step import Span, Step

_PROMPT_TOKENS, _DECODE_POSITION = 19, 20
TRIAL_BLOCKS = 2 * (_DECODE_POSITION // BLOCK_TOKENS + 1)  # of the cache that `run_whole` needs


class AnyExperts:
    """Replaces a layer of experts in a trial; its result depends on rows, choices and weights; local."""

    adds: Callable[[], Tensor] | None = None

    def run(self, module: Any, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Scale each row by a sum over its choices and weights, and add what a layer would add."""
        share_T1 = (weights_TK.float() * (ids_TK + 1)).sum(-1, keepdim=True) / int(module.num_experts)
        routed_TD = (hidden_TD * share_T1).to(hidden_TD.dtype)
        return routed_TD if self.adds is None else routed_TD + self.adds()


def note_products(net: Any, step: Step, cache: PagedCache) -> None:
    """Run the model's modules once, so that every weight notes whether its products can take adapters. Local; refills the step."""
    with torch.no_grad(), any_experts(net):
        run_whole(net, step, cache)


@contextmanager
def any_experts(net: nn.Module) -> Iterator[None]:
    """Replace all layers of experts, as long as the context lasts."""
    modules: list[Any] = [module for module in net.modules() if hasattr(module, "expert_layer")]
    layers = [module.expert_layer for module in modules]
    try:
        for module in modules:
            module.expert_layer = AnyExperts()
        yield
    finally:
        for module, layer in zip(modules, layers, strict=True):
            module.expert_layer = layer


def run_whole(net: Any, step: Step, cache: PagedCache) -> Tensor:
    """Fill the step with a prompt and, if there is room, a decode, and run it: [1, T, V] logits."""
    most_sequences, most_blocks = step.block_table_SM.shape
    most_tokens = most_blocks * BLOCK_TOKENS
    prompt = min(_PROMPT_TOKENS, most_tokens, step.max_tokens)
    blocks = min(_DECODE_POSITION // BLOCK_TOKENS + 1, most_blocks)
    spans = [Span(0, prompt, range(blocks))]
    if most_sequences > 1 and prompt < step.max_tokens:
        spans.append(Span(min(_DECODE_POSITION, most_tokens - 1), 1, range(blocks, 2 * blocks)))
    step.fill(spans)
    vocabulary = net.get_input_embeddings().weight.shape[0]
    tokens = torch.randint(vocabulary, (step.num_tokens,), generator=torch.Generator().manual_seed(0))
    inputs = step.inputs(tokens.tolist(), range(step.num_tokens))
    output = net(
        input_ids=inputs.token_T[None], position_ids=step.positions[None],
        use_cache=not mixers.lightning_modules(net),
        logits_to_keep=inputs.row_R, pages=cache, **{CACHE: cache},
    )  # fmt: skip
    logits: Tensor = output.logits
    return logits
