"""What `ElasticBuffer.dispatch` hands out for combines and cached dispatches: DeepEP's `EPHandle`.

A plain, writable record, because DeepEP's is one: code trims its tensors to the rows that count. What combine relies
on beside them is kept apart in `routes`, which callers leave alone.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from dispatch.rows import Route


class Routes(NamedTuple):
    """What is ours: the way the rows went, and what a cached dispatch returns again."""

    route: Route
    local_idx_NK: Tensor  # the received choices as local experts, -1 elsewhere; rows that were received only
    num_rows: int  # rows received; tensors may have more


@dataclass(eq=False)
class EPHandle:
    """A dispatch's layout. Fields and their order are DeepEP's; all tensors are int32 unless said otherwise.

    Attributes:
        do_expand: received rows lie once per local choice, grouped by expert.
        num_experts, expert_alignment, num_max_tokens_per_rank, num_sms: as the dispatch was given them.
        topk_idx: this rank's choices [T, K] in their own dtype: a copy, unless the dispatch got do_handle_copy=False.
        num_recv_tokens: rows of unexpanded results: those received, or without CPU sync the most that there can be.
        num_expanded_tokens: the same of expanded results, padding included.
        num_recv_tokens_per_expert_list: choices per local expert, each rounded up to the alignment; without CPU sync
            empty.
        psum_num_recv_tokens_per_scaleup_rank: [ranks of the scale-up domain], rows received from ranks of each local
            index and those before it.
        psum_num_recv_tokens_per_expert: [L], where each expert's rows end: with its padding if not expanded, without
            it if expanded (then rounding entry i up gives where expert i + 1 begins).
        num_unaligned_recv_tokens_per_expert: [L], choices per local expert.
        recv_src_metadata: [num_recv_tokens, 2 + K]: source rank * num_max_tokens_per_rank + source token; local index
            of the source times K plus the first choice that is here; and where expanded each choice's row (-1: none).
            Rows past those received are -1.
        dst_buffer_slot_idx: [T, K], the row that each choice's token has among its destination's received rows; -1
            for no choice. (DeepEP: a place in its communication buffer.)
        token_metadata_at_forward, channel_linked_list: None; DeepEP's bookkeeping of forwarding ranks.
    """

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: Tensor
    num_recv_tokens: int
    num_expanded_tokens: int
    num_recv_tokens_per_expert_list: list[int]
    psum_num_recv_tokens_per_scaleup_rank: Tensor
    psum_num_recv_tokens_per_expert: Tensor
    num_unaligned_recv_tokens_per_expert: Tensor
    recv_src_metadata: Tensor
    dst_buffer_slot_idx: Tensor
    token_metadata_at_forward: Tensor | None = None
    channel_linked_list: Tensor | None = None
    routes: Routes | None = field(default=None, repr=False)

    @property
    def slot_NK(self) -> Tensor:
        """int64: where each received row's choices lie in expanded results; -1 for those of other ranks."""
        assert self.routes is not None, "a dispatch made this handle"
        return self.recv_src_metadata[: self.routes.num_rows, 2:].long()
