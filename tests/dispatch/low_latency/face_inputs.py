"""Tensors for tests of the low-latency interface."""

import torch

BF16 = torch.bfloat16


def bring(tokens: int = 3, hidden: int = 512) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and the first two experts for each."""
    return torch.randn(tokens, hidden).to(BF16), torch.tensor([[0, 1]] * tokens)
