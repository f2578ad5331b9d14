"""From a token's choices to ranks: what every exchange in plain torch asks first. Any device, no look of the host.

Legend: T tokens, N rows received, K choices, R ranks. A choice is an expert or a slot, of which each rank has equally many.
"""

import torch
from torch import Tensor

NOT_HERE = -1


def ranks_of(choices_TK: Tensor, per_rank: int) -> Tensor:
    """Return int64 [T, K]: the rank of each choice, -1 for none."""
    return torch.div(choices_TK, per_rank, rounding_mode="floor").long()


def token_mask(rank_TK: Tensor, num_ranks: int) -> Tensor:
    """Return bool [T, R]: whether a token has a choice on a rank."""
    mask_TR = torch.zeros(rank_TK.shape[0], num_ranks + 1, dtype=torch.bool, device=rank_TK.device)
    column_TK = torch.where(rank_TK == NOT_HERE, num_ranks, rank_TK)  # a column that is cut off again
    return mask_TR.scatter_(1, column_TK, True)[:, :num_ranks].contiguous()


def localise(choices_NK: Tensor, rank: int, per_rank: int) -> Tensor:
    """Turn choices into this rank's, 0 to per_rank - 1, and those of other ranks into -1."""
    local_NK = choices_NK - rank * per_rank
    is_here = (choices_NK != NOT_HERE) & (local_NK >= 0) & (local_NK < per_rank)
    return torch.where(is_here, local_NK, NOT_HERE)
