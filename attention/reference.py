"""Paged attention in plain torch: the oracle for every kernel. Slow and obvious, one sequence at a time.

Legend: T rows of the batch, H query heads, G KV heads, D key dim, V value dim, B tokens of a block, C context.
"""

import torch
from torch import Tensor

from kvcache.step import Step


def paged_attention(
    query_HTD: Tensor,
    keys_NGDB: Tensor,
    values_NGBV: Tensor,
    step: Step,
    *,
    scale: float,
    window: int = 0,
    chunk: int = 0,
    soft_cap: float = 0.0,
    sinks_H: Tensor | None = None,
    sees_images: bool = False,
) -> Tensor:
    """Attend every row of the step to the cached tokens of its sequence, like `cpu.attention.paged_attention`.

    With `soft_cap`, scores become soft_cap * tanh(scores / soft_cap).
    """
    heads, tokens, _ = query_HTD.shape
    group = heads // keys_NGDB.shape[1]
    out_THV = torch.zeros(tokens, heads, values_NGBV.shape[-1])
    starts = step.query_start_S.tolist()
    for sequence in range(step.num_sequences):
        begin, end, context = starts[sequence], starts[sequence + 1], int(step.context_S[sequence])
        blocks = step.block_table_SM[sequence, : -(-context // step.block_tokens)]
        key_GDC = keys_NGDB[blocks].permute(1, 2, 0, 3).flatten(2)[..., :context]
        value_GCV = values_NGBV[blocks].permute(1, 0, 2, 3).flatten(1, 2)[:, :context]
        scores_HQC = query_HTD[:, begin:end] @ key_GDC.repeat_interleave(group, 0) * scale
        if soft_cap:
            scores_HQC = soft_cap * torch.tanh(scores_HQC / soft_cap)
        position_Q1 = torch.arange(context - (end - begin), context)[:, None]
        token_C = torch.arange(context)
        end_Q1 = position_Q1 + 1
        if sees_images:
            end_Q1 = torch.maximum(end_Q1, step.image_end_T[begin:end, None])
        hidden_QC = token_C >= end_Q1
        if window > 0:
            hidden_QC |= token_C <= position_Q1 - window
        if chunk > 0:
            hidden_QC |= token_C // chunk < position_Q1 // chunk
        scores_HQC = scores_HQC.masked_fill(hidden_QC, float("-inf"))
        if sinks_H is not None:
            sink_HQ1 = sinks_H.view(heads, 1, 1).expand(heads, end - begin, 1)
            scores_HQC = torch.cat((scores_HQC, sink_HQ1), dim=-1)
        weights_HQC = scores_HQC.softmax(-1)[..., :context]
        out_THV[begin:end] = (weights_HQC @ value_GCV.repeat_interleave(group, 0)).transpose(0, 1)
    return out_THV
