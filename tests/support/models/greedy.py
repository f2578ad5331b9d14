"""Greedy answers of a reference model, at the cost of a few forward passes."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.support.models.seeing import SeenPrompt


@torch.inference_mode()
def greedy(
    model: PreTrainedModel, prompt: list[int], guess: list[int], num_tokens: int
) -> tuple[list[int], Tensor]:
    """Return a prompt with the model's `num_tokens` greedy tokens after it, and logits: [tokens, V] float.

    One pass checks all guessed tokens, as in speculative decoding. A wrong guess costs another pass and changes no token.
    """
    unknown = num_tokens - len(guess)
    sequence = [*prompt, *guess[:num_tokens], *[0] * unknown]
    return _corrected(sequence, len(prompt), lambda: model(torch.tensor([sequence])).logits[0])


@torch.inference_mode()
def greedy_with_images(
    model: PreTrainedModel, prompt: SeenPrompt, guess: list[int]
) -> tuple[list[int], Tensor]:
    """Return a prompt with images and the model's greedy tokens after it, one for each guessed one, as `greedy` does."""
    sequence = [*prompt.token_ids, *guess]
    return _corrected(sequence, len(prompt.token_ids), lambda: model(**prompt.inputs(sequence)).logits[0])


def _corrected(
    sequence: list[int], num_given: int, forward: Callable[[], Tensor]
) -> tuple[list[int], Tensor]:
    while True:
        logits = forward()
        best = logits.argmax(-1).tolist()
        wrong = [place for place in range(num_given, len(sequence)) if sequence[place] != best[place - 1]]
        if not wrong:
            return sequence, logits
        sequence[wrong[0]] = best[wrong[0] - 1]
