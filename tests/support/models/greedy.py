"""Greedy answers of a reference model, at the cost of a few forward passes."""

import torch
from torch import Tensor
from transformers import PreTrainedModel


@torch.inference_mode()
def greedy(
    model: PreTrainedModel, prompt: list[int], guess: list[int], num_tokens: int
) -> tuple[list[int], Tensor]:
    """Return a prompt with the model's `num_tokens` greedy tokens after it, and logits: [tokens, V] float.

    One pass checks all guessed tokens, as in speculative decoding. A wrong guess costs another pass and changes no token.
    """
    unknown = num_tokens - len(guess)
    sequence = [*prompt, *guess[:num_tokens], *[0] * unknown]
    while True:
        logits = model(torch.tensor([sequence])).logits[0]
        best = logits.argmax(-1).tolist()
        wrong = [place for place in range(len(prompt), len(sequence)) if sequence[place] != best[place - 1]]
        if not wrong:
            return sequence, logits
        sequence[wrong[0]] = best[wrong[0] - 1]
