"""The low-latency half of DeepEP's V1 `Buffer`: its methods, over the face that `dispatch.low_latency` gives.

Here are names, order of arguments and what forks add; shapes, rules and errors are `LowLatencyFace`'s.
"""

import weakref
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from torch import Tensor

from dispatch.faces.arguments import first_problem, fork_problem
from dispatch.faces.events import EventOverlap
from dispatch.faces.wires import Wires
from dispatch.low_latency.face import LowLatencyFace


class LowLatencyCalls:
    """Mixed into `Buffer`. Calls are collective unless they say local."""

    _wires: Wires
    _kernels: str
    num_rdma_bytes: int
    strict: bool
    enable_shrink: bool

    @cached_property
    def _low_latency(self) -> LowLatencyFace:
        exchange = self._wires.open_low_latency(self._kernels, self.num_rdma_bytes)
        weakref.finalize(self, exchange.close)
        return LowLatencyFace(exchange, strict=self.strict, enable_shrink=self.enable_shrink)

    def open_low_latency(self) -> None:
        """Open low-latency mode now and not with its first call. Collective where symmetric memory is opened."""
        _ = self._low_latency

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Return the bytes of buffer that low-latency calls of this size need; see `LowLatencyFace`. Local."""
        return LowLatencyFace.get_low_latency_rdma_size_hint(
            num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts
        )

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Meet all ranks between normal and low-latency mode; see `LowLatencyFace`."""
        self._low_latency.clean_low_latency_buffer(num_max_dispatch_tokens_per_rank, hidden, num_experts)

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        **forks: Any,
    ) -> tuple[
        Tensor | tuple[Tensor, Tensor], Tensor, tuple[Any, ...], EventOverlap, Callable[[], None] | None
    ]:
        """Send tokens to their experts in fixed shapes; see `LowLatencyFace.low_latency_dispatch`.

        Args:
            forks: arguments of DeepEP's forks (use_nvfp4, x_global_scale, ...): a TypeError on every rank, unless
                None or False.

        Returns:
            `(recv_x, recv_count, handle, event, hook)`.
        """
        self._refuse_forks("low_latency_dispatch", forks)
        return self._low_latency.low_latency_dispatch(
            x,
            topk_idx,
            num_max_dispatch_tokens_per_rank,
            num_experts,
            cumulative_local_expert_recv_stats=cumulative_local_expert_recv_stats,
            dispatch_wait_recv_cost_stats=dispatch_wait_recv_cost_stats,
            use_fp8=use_fp8,
            round_scale=round_scale,
            use_ue8m0=use_ue8m0,
            async_finish=async_finish,
            return_recv_hook=return_recv_hook,
        )

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: tuple[Any, ...],
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
        **forks: Any,
    ) -> tuple[Tensor, EventOverlap, Callable[[], None] | None]:
        """Bring answers home and sum them by weight; see `LowLatencyFace.low_latency_combine`.

        Args:
            forks: arguments of DeepEP's forks (overlap, src_signals, ...), as in `low_latency_dispatch`.

        Returns:
            `(combined_x, event, hook)`.
        """
        self._refuse_forks("low_latency_combine", forks)
        return self._low_latency.low_latency_combine(
            x,
            topk_idx,
            topk_weights,
            handle,
            use_logfmt=use_logfmt,
            zero_copy=zero_copy,
            async_finish=async_finish,
            return_recv_hook=return_recv_hook,
            out=out,
            combine_wait_recv_cost_stats=combine_wait_recv_cost_stats,
        )

    def get_next_low_latency_combine_buffer(self, handle: tuple[Any, ...]) -> Tensor:
        """Return the buffer to fill for a combine with zero_copy=True; see `LowLatencyFace`. Local."""
        return self._low_latency.get_next_low_latency_combine_buffer(handle)

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Do without a rank from now on, or with it again (mask=False). Local; see `LowLatencyFace`."""
        self._low_latency.low_latency_update_mask_buffer(rank_to_mask, mask)

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """Write the mask to `mask_status` int32 [R], 1 for a masked rank. Local; see `LowLatencyFace`."""
        self._low_latency.low_latency_query_mask_buffer(mask_status)

    def low_latency_clean_mask_buffer(self) -> None:
        """Do with all ranks again. Local; see `LowLatencyFace`."""
        self._low_latency.low_latency_clean_mask_buffer()

    def settle_low_latency(self) -> None:
        """Receive what a low-latency call has sent and its hook not received, before anything else travels."""
        if "_low_latency" in self.__dict__:
            self._low_latency.settle()

    def _refuse_forks(self, method: str, forks: Mapping[str, Any]) -> None:
        """Raise a TypeError here and PeerRefused elsewhere for arguments that V1 does not have."""
        problem = first_problem(fork_problem(method, forks))
        if problem:
            self._low_latency.exchange.refuse(problem)
            raise TypeError(problem)
