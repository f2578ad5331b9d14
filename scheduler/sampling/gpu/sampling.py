"""From logits to tokens on a GPU, a whole batch at once: the order, rules and random numbers of `scheduler.sampling.sampler`.

Single logits are edited (biases, penalties), masks applied and tops found; greedy rows are done then. For the others each
part of a row is weighed at a few levels, what may be drawn is gathered, and one program per row draws from that
(`row_weights`). A row whose candidates are more than there is room for, of a flat distribution, is drawn from as a whole:
slower, the same token. Nothing is sorted and nothing waits for the host.
Tokens are the CPU's for the same float32 logits, but for exponentials that round otherwise: a draw that falls within
about 1e-7 of a border between two tokens may fall on the other side. A row's token never depends on its batch.

The idea of drawing by bisection instead of sorting: FlashInfer's sampling kernels (2024). Rejected: their rejection
rounds, whose number of random draws depends on the logits, so that a replay on the CPU could not follow.

Legend: R rows, V vocabulary.
"""

import torch
import triton
from torch import Tensor

from scheduler.sampling.gpu import sampling_kernels as kernels
from scheduler.sampling.gpu.draws import Draws
from scheduler.sampling.gpu.row_weights import LEVELS

EDIT_BLOCK = 256


class SamplingScratch:
    """Memory of sampling, for as many rows as a step samples at most; used by one step at a time."""

    def __init__(
        self, rows: int, vocabulary: int, device: torch.device, *, part: int = 2048, candidates: int = 8192
    ) -> None:
        """Reserve it.

        Args:
            rows: at most so many per step. vocabulary: V.
            part: how many logits a program reads, a power of two.
            candidates: room for tokens per row that filters leave; rows with more are slower.
        """
        self.rows, self.vocabulary, self.part, self.candidates = rows, vocabulary, part, candidates
        self.parts = -(-vocabulary // part)

        def reserve(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(rows, *shape, dtype=dtype, device=device)

        self.top_values = reserve(self.parts, dtype=torch.float32)
        self.top_ids = reserve(self.parts, dtype=torch.int32)
        self.counts = reserve(self.parts, LEVELS, dtype=torch.int32)
        self.masses = reserve(self.parts, LEVELS, dtype=torch.int64)
        self.candidate_logits = reserve(candidates, dtype=torch.float32)
        self.candidate_ids = reserve(candidates, dtype=torch.int32)


def choose_tokens(
    logits_RV: Tensor, draws: Draws, scratch: SamplingScratch, *, out: Tensor | None = None
) -> Tensor:
    """Choose a token per row.

    Args:
        logits_RV: float32 contiguous; changed in place where a row has a mask or edits.
        draws: of R rows.
        scratch: of R rows or more, and V.
        out: int64 [R] to write into; None: a new one.

    Returns:
        int64 [R].

    Raises:
        ValueError: other logits than these.
    """
    R, V = logits_RV.shape
    if logits_RV.dtype != torch.float32 or not logits_RV.is_contiguous():
        raise ValueError(
            f"logits_RV are {logits_RV.dtype}, strides {logits_RV.stride()}; give contiguous float32"
        )
    if scratch.rows < R or scratch.vocabulary != V:
        raise ValueError(
            f"logits_RV are {R} x {V}; the scratch has room for {scratch.rows} x {scratch.vocabulary}"
        )
    if out is None:
        out = torch.empty(R, dtype=torch.int64, device=logits_RV.device)
    sizes = {"S": scratch.parts, "S_PAD": triton.next_power_of_2(scratch.parts), "PART": scratch.part}
    options = {"num_warps": 8, "enable_fp_fusion": False}
    _edit(logits_RV, draws)
    kernels.find_tops[(R, scratch.parts)](
        logits_RV, draws.masks_MW, draws.mask_row_R, scratch.top_values, scratch.top_ids, V, draws.masks_MW.shape[1],
        HAS_MASKS=len(draws.masks_MW) > 0, PART=scratch.part, **options,
    )  # fmt: skip
    if draws.draws:
        kernels.weigh_parts[(R, scratch.parts)](
            logits_RV, draws.inverse_temperature_R, scratch.top_values, scratch.counts, scratch.masses, V, **sizes,
            **options,
        )  # fmt: skip
        kernels.gather_candidates[(R, scratch.parts)](
            logits_RV, draws.inverse_temperature_R, draws.least_weight_R, draws.top_k_R, draws.top_p_R,
            scratch.top_values, scratch.counts, scratch.masses, scratch.candidate_logits, scratch.candidate_ids, V,
            C=scratch.candidates, **sizes, **options,
        )  # fmt: skip
    kernels.choose_tokens[(R,)](
        logits_RV, draws.inverse_temperature_R, draws.least_weight_R, draws.top_k_R, draws.top_p_R, draws.uniform_R,
        scratch.top_values, scratch.top_ids, scratch.counts, scratch.masses, scratch.candidate_logits,
        scratch.candidate_ids, out, V, C=scratch.candidates, DRAWS=draws.draws, **sizes, **options,
    )  # fmt: skip
    return out


def _edit(logits_RV: Tensor, draws: Draws) -> None:
    """Biases and penalties, of the few logits that have them."""
    num_edits = draws.edit_id_E.numel()
    if num_edits:
        kernels.edit_logits[(triton.cdiv(num_edits, EDIT_BLOCK),)](
            logits_RV, draws.edit_row_E, draws.edit_id_E, draws.bias_E, draws.is_seen_E, draws.subtracted_E,
            draws.penalty_R, num_edits, logits_RV.shape[1], BLOCK=EDIT_BLOCK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
