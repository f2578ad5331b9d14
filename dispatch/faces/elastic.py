"""`ElasticBuffer`: DeepEP's 2.x interface for expert parallelism, over the same exchange as `Buffer`.

Names, argument order, shapes and handles are DeepEP's (deep_ep/buffers/elastic.py at dd758ca). Arguments after these,
by keyword only, are WideEP's. Rows are always in DeepEP's deterministic order. The other features of the class (engram,
pipeline sends, all-gather) are not part of expert parallelism; each of their methods raises an error with its name.

Every call is one exchange, for any domains. The domains decide how combine groups its sums, and the counts in the handle.
DeepEP's hybrid mode forwards rows inside a node; `dispatch.hierarchical` does that here.
"""

import weakref
from collections.abc import Hashable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from dispatch.errors import DispatchError
from dispatch.faces import checks
from dispatch.faces.checks import CombineCall, DispatchCall
from dispatch.faces.elastic_rows import ElasticMode, local_choices
from dispatch.faces.events import EventHandle, EventOverlap, finished
from dispatch.faces.handles import EPHandle, Rows, as_biases, split_rows
from dispatch.faces.rules import Problems, first_problem
from dispatch.faces.wires import Released
from dispatch.gathered import gather_values
from dispatch.rows import HostRows, RowExchange
from dispatch.wires.open import open_wire
from dispatch.wires.segment import identify_process
from dispatch.wires.wire import RankTable

BUFFER_ALIGNMENT = 2 << 20  # DeepEP, csrc/kernels/backend/symmetric.hpp
_MOST_CHOICES = 32  # DeepEP's limit, used if the number of choices is not given
_SCALE_CHANNELS = 32  # channels per scale in the size hint: the finest that DeepEP supports


def check_domains(num_ranks: int, node_size: int) -> tuple[int, int]:
    """Return the number of nodes and ranks per node. Raises ValueError if nodes of that size do not divide the group."""
    if node_size < 1 or num_ranks % node_size:
        allowed = [n for n in range(1, num_ranks + 1) if num_ranks % n == 0]
        raise ValueError(f"node_size is {node_size} for {num_ranks} ranks; it must be one of {allowed}")
    return num_ranks // node_size, node_size


def find_node_size(hosts: Sequence[Hashable]) -> int:
    """Return the ranks per host, given every rank's host. Returns all ranks if hosts do not hold equal blocks of ranks."""
    size = next((rank for rank, host in enumerate(hosts) if host != hosts[0]), len(hosts))
    blocks = [hosts[first : first + size] for first in range(0, len(hosts), size)]
    is_regular = all(len(block) == size and len(set(block)) == 1 for block in blocks)
    return size if is_regular and len({block[0] for block in blocks}) == len(blocks) else len(hosts)


def buffer_bytes(num_ranks: int, max_tokens: int, hidden: int, num_topk: int, use_fp8: bool) -> int:
    """Return the size of the largest call's messages, sent and received, rounded up to BUFFER_ALIGNMENT."""
    choices = num_topk or _MOST_CHOICES
    row = hidden + 4 * -(-hidden // _SCALE_CHANNELS) if use_fp8 else 2 * hidden
    dispatch = row + choices * (8 + 4) + 4  # choices, weights, source token
    combine = 2 * hidden + 4 * choices
    return align_to_buffer(2 * num_ranks * max_tokens * max(dispatch, combine))


def align_to_buffer(num_bytes: int) -> int:
    """Round up to BUFFER_ALIGNMENT."""
    return -(-num_bytes // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT


_ENGRAM, _PIPELINE, _GATHER = "engram", "pipeline sends", "all-gather and reduce-scatter"


def _refusal(name: str, family: str) -> Any:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            f"ElasticBuffer.{name}: DeepEP's {family} is not supported, only dispatch and combine are. "
            "Use torch.distributed instead"
        )

    refuse.__name__, refuse.__doc__ = name, f"Raise NotImplementedError: {family} is not supported."
    return staticmethod(refuse)


class RefusedCalls:
    """Unsupported methods, as static methods that raise NotImplementedError."""

    engram_write = _refusal("engram_write", _ENGRAM)
    engram_fetch = _refusal("engram_fetch", _ENGRAM)
    get_engram_storage_size_hint = _refusal("get_engram_storage_size_hint", _ENGRAM)
    pp_set_config = _refusal("pp_set_config", _PIPELINE)
    pp_send = _refusal("pp_send", _PIPELINE)
    pp_recv = _refusal("pp_recv", _PIPELINE)
    get_pp_buffer_size_hint = _refusal("get_pp_buffer_size_hint", _PIPELINE)
    create_agrs_session = _refusal("create_agrs_session", _GATHER)
    destroy_agrs_session = _refusal("destroy_agrs_session", _GATHER)
    agrs_new_session = _refusal("agrs_new_session", _GATHER)
    agrs_set_config = _refusal("agrs_set_config", _GATHER)
    agrs_get_inplace_tensor = _refusal("agrs_get_inplace_tensor", _GATHER)
    all_gather = _refusal("all_gather", _GATHER)
    get_agrs_num_max_session_bytes = _refusal("get_agrs_num_max_session_bytes", _GATHER)
    get_agrs_buffer_size_hint = _refusal("get_agrs_buffer_size_hint", _GATHER)


NUM_SMS = 4  # the smallest number that DeepEP accepts; WideEP uses no SMs


class ElasticDomains:
    """Domains of `ElasticBuffer`, as a mixin. `ElasticBuffer` documents the attributes."""

    def _set_domains(
        self, group: dist.ProcessGroup, node_size: int | None, allow_hybrid_mode: bool, num_allocated_qps: int
    ) -> None:
        """Set this rank's position. Collective if `node_size` is None."""
        self.group, self.rank_idx, self.num_ranks = group, group.rank(), group.size()
        size = _ranks_of_a_host(group) if node_size is None else node_size
        self.num_rdma_ranks, self.num_nvlink_ranks = check_domains(self.num_ranks, size)
        self.allow_hybrid_mode = allow_hybrid_mode
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = divmod(self.rank_idx, self.num_scaleup_ranks)
        self.num_allocated_qps = num_allocated_qps or (65 if allow_hybrid_mode else 17)

    @staticmethod
    def get_buffer_size_hint(
        group: dist.ProcessGroup,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Return a bound of the bytes of the largest call's messages, rounded up to 2 MiB. Local.

        It has no effect on the CPU, where memory grows as needed, and differs from DeepEP's number.
        """
        return buffer_bytes(group.size(), num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch)

    @staticmethod
    def capture() -> EventHandle:
        """Return an event of the work so far. On the CPU it has already happened. Local."""
        return EventHandle()

    def get_comm_stream(self) -> NoReturn:
        """Raise DispatchError: the CPU has no streams, and all work is done when a call returns. Local."""
        raise DispatchError("get_comm_stream: the CPU has no streams; a call's work is done when it returns")

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Return the number of nodes and ranks per node. Local."""
        return self.num_rdma_ranks, self.num_nvlink_ranks

    def get_logical_domain_size(self) -> tuple[int, int]:
        """Return the physical size with hybrid mode, and (1, all ranks) without it. Local."""
        return self.get_physical_domain_size() if self.allow_hybrid_mode else (1, self.num_ranks)

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """Return the smallest number that DeepEP returns, because no SMs are used here. Local."""
        return NUM_SMS

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Return DeepEP's number for `num_sms`; it has no effect here. Local."""
        wanted = num_sms * 16 + 1 if self.allow_hybrid_mode else min(num_sms, 9)
        return min(wanted, self.num_allocated_qps)


def _ranks_of_a_host(group: dist.ProcessGroup) -> int:
    """Return the ranks per host. Collective over `group`."""
    return find_node_size([tuple(host) for host in gather_values(identify_process().host, group)])


class ElasticBuffer(ElasticDomains, RefusedCalls, Released):
    """One rank's end of DeepEP's 2.x exchange. Calls are collective, in the same order on all ranks, unless marked local.

    A bad argument is a ValueError on the rank that passed it and PeerRefused on all others, before anything is sent;
    the next call works. PeerLost and DispatchTimeout end the buffer.

    Args:
        group: A gloo process group over all ranks.
        num_bytes: Stored (default: computed as in `get_buffer_size_hint`). Memory grows as needed either way.
        num_cpu_bytes: Must be 0; it is for engram storage.
        num_max_tokens_per_rank: Default for `dispatch`, and with `hidden` for `num_bytes`.
        hidden, num_topk, use_fp8_dispatch: Used for `num_bytes` only.
        deterministic: Stored; results are always deterministic.
        allow_hybrid_mode: With several nodes, group sums by node (and count ranks by node), as hybrid mode does.
        allow_multiple_reduction: Sum expanded rows on the rank that computed them, and with hybrid mode by node.
            Otherwise they come back one by one and are summed once.
        prefer_overlap_with_compute, sl_idx: Stored, without effect.
        num_allocated_qps: Stored; 0 is replaced by DeepEP's default.
        num_cpu_timeout_secs, num_gpu_timeout_secs: Upper limits of `timeout_s`.
        explicitly_destroy: Whether `destroy` may be called.
        backend: A wire, as in `open_wire`.
        strict: Refuse what DeepEP's hardware does not support.
        timeout_s: How long to wait for a peer.
        node_size: Ranks per node (default: ranks per host if hosts hold equal blocks of ranks, otherwise all ranks).

    Attributes:
        group, rank_idx, num_ranks, allow_hybrid_mode, allow_multiple_reduction, prefer_overlap_with_compute,
        deterministic, num_bytes, num_max_tokens_per_rank, num_allocated_qps, num_scaleout_ranks, num_scaleup_ranks,
        scaleout_rank_idx, scaleup_rank_idx, num_rdma_ranks, num_nvlink_ranks, explicitly_destroy: As in DeepEP.

    Raises:
        ValueError: No group, or impossible sizes or domains. WireUnavailable: As `open_wire`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: float = 300,
        num_gpu_timeout_secs: float = 100,
        explicitly_destroy: bool = False,
        *,
        backend: str = "auto",
        strict: bool = False,
        timeout_s: float = 30.0,
        node_size: int | None = None,
    ) -> None:
        if not isinstance(group, dist.ProcessGroup):
            raise ValueError(
                f"group is {group!r}; it must be a torch.distributed process group over all ranks"
            )
        self._set_domains(group, node_size, bool(allow_hybrid_mode), num_allocated_qps)
        if num_cpu_bytes:
            raise ValueError(f"num_cpu_bytes is {num_cpu_bytes}; engram storage is not supported, use 0")
        self.allow_multiple_reduction = bool(allow_multiple_reduction)
        self.prefer_overlap_with_compute, self.deterministic = prefer_overlap_with_compute, deterministic
        self.num_max_tokens_per_rank, self.explicitly_destroy = num_max_tokens_per_rank, explicitly_destroy
        sizes = (num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch)
        self.num_bytes = buffer_bytes(self.num_ranks, *sizes) if num_bytes is None else num_bytes
        if strict and align_to_buffer(self.num_bytes) != self.num_bytes:
            raise ValueError(f"num_bytes is {num_bytes}; DeepEP needs a multiple of 2 MiB (strict=True)")
        limit_s = min(timeout_s, num_cpu_timeout_secs, num_gpu_timeout_secs)
        wire = open_wire(backend, group, timeout_s=limit_s)
        self._mode = ElasticMode(
            RowExchange(HostRows(wire, torch.device("cpu"))),
            scaleup_ranks=self.num_scaleup_ranks,
            allow_multiple_reduction=self.allow_multiple_reduction,
        )
        self._world = checks.World(
            rank=self.rank_idx, num_ranks=self.num_ranks, num_nodes=self.num_rdma_ranks, strict=strict
        )
        self._nothing = RankTable(self.num_ranks)
        self.runtime: Any = wire
        self._close = weakref.finalize(self, wire.close)

    def barrier(
        self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True
    ) -> None:
        """Wait until all ranks have called this. Collective. The arguments have no effect on the CPU."""
        wire = self.runtime
        wire.open_windows(self._nothing)
        wire.exchange(self._nothing, self._nothing)

    def dispatch(
        self,
        x: Rows,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Rows, Tensor | None, Tensor | None, EPHandle, EventOverlap]:
        """Send each token once to every rank that holds one of its experts.

        Args:
            x: [T, H] of any floating dtype, or a tuple with scales: [T, H] of one byte per element and float32 or
                int32 [T, any], in any memory layout.
            topk_idx: int64 (or int32) [T, K], experts in [0, num_experts), -1 for no choice.
            topk_weights: float32 [T, K], optional; also with a handle.
            cumulative_local_expert_recv_stats: int32 [L]; this call's choices per local expert are added. A cached
                dispatch does not add them.
            num_experts: A multiple of the number of ranks; with a handle, the handle's.
            num_max_tokens_per_rank: M, equal on all ranks (default: the buffer's, or with a handle the handle's).
            expert_alignment: An expert's rows are padded to a multiple of this (default: 1, or with a handle the handle's).
            num_sms, num_qps: Stored in the handle, without effect. So are allocate_on_comm_stream and the events, which
                have always happened here.
            async_with_compute_stream: Return an event to wait for. The work is done when the call returns in any case.
            handle: Handle of an earlier dispatch, to use its choices (cached); then topk_idx is None.
            do_handle_copy: Store a copy of topk_idx in the handle instead of topk_idx itself.
            do_cpu_sync: Size results by the received rows (default). If False, and always with a handle of such a
                dispatch, size them for the largest possible number: M rows from each rank.
            do_expand: Return one row per local choice, grouped by expert, and no recv_topk_idx.
            do_zero_padding: Allowed with do_expand; padding is zero in any case.
            use_tma_aligned_col_major_sf: Return scales with strides (1, rows rounded up to 4).

        Returns:
            `(recv_x, recv_topk_idx, recv_topk_weights, handle, event)`. Rows by source rank, then token, within an
            expert too. recv_topk_idx [N, K]: local experts; -1 for choices of other ranks and after the received rows.
            recv_topk_weights: [N, K], all weights of the token, or if expanded one per row; None without topk_weights.
            Rows after the received ones are zero. With a handle, the same handle. All tensors are new.
        """
        cached = handle if isinstance(handle, EPHandle) else None
        rows, scales = split_rows(x)
        given = {
            "num_experts": num_experts, "num_max_tokens_per_rank": num_max_tokens_per_rank,
            "expert_alignment": expert_alignment,
        }  # fmt: skip
        num_experts, max_tokens, alignment = self._agreed(cached, **given)
        call = DispatchCall(
            x=rows, scales=scales, topk_idx=cached.topk_idx if cached else topk_idx, topk_weights=topk_weights,
            stats=cumulative_local_expert_recv_stats, num_experts=num_experts, max_tokens=max_tokens,
            alignment=alignment, num_sms=num_sms or NUM_SMS, do_handle_copy=bool(do_handle_copy),
            do_cpu_sync=do_cpu_sync is None or bool(do_cpu_sync), do_expand=bool(do_expand),
            do_zero_padding=bool(do_zero_padding), column_major_scales=bool(use_tma_aligned_col_major_sf),
        )  # fmt: skip
        self._refuse_first(
            checks.elastic_events(previous_event, previous_event_before_epilogue, allocate_on_comm_stream),
            checks.elastic_cached(handle, call, topk_idx, do_cpu_sync, given),
            checks.elastic_dispatch(call, self._world),
        )
        return (*self._dispatch(call, handle), finished(async_with_compute_stream))

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Return rows to their source ranks and add them up, without weights.

        Adds the biases, then the token's choices in order, in float32 with one rounding. Before that, if rows are
        expanded and multiple reductions allowed, a rank's choices are summed to one row. Then, in hybrid mode, a node's
        ranks are summed. Both sums are in the order of the choices, in float32 with one rounding, and take the place of
        their group's last choice. (Without expansion, a rank's row is the caller's own sum.)

        Args:
            x: All rows that the dispatch returned, [.., H] of any floating dtype and hidden size.
            handle: Handle of the dispatch.
            topk_weights: float32, in the shape that the dispatch returned; travels with the rows, is not applied.
            bias: [T, H] in x's dtype, or a tuple of two.
            others: As in `dispatch`.

        Returns:
            `(combined_x, combined_topk_weights, event)`: [T, H] in x's dtype; each choice's weight as float32 [T, K],
            0 for no choice, or None.
        """
        call = CombineCall(x=x, topk_weights=topk_weights, biases=as_biases(bias))
        self._refuse_first(
            checks.elastic_events(previous_event, previous_event_before_epilogue, allocate_on_comm_stream),
            checks.elastic_handle(handle),
            checks.elastic_combine(call, handle, self._world),
        )
        combined, weights = self._mode.combine(call, handle)
        return combined, weights, finished(async_with_compute_stream)

    def _agreed(
        self,
        cached: EPHandle | None,
        num_experts: int | None,
        num_max_tokens_per_rank: int | None,
        expert_alignment: int | None,
    ) -> tuple[int | None, int, int]:
        """Return a dispatch's parameters: from the handle if cached, otherwise from the caller or the buffer."""
        if cached is not None:
            return cached.num_experts, cached.num_max_tokens_per_rank, cached.expert_alignment
        max_tokens = num_max_tokens_per_rank or self.num_max_tokens_per_rank
        return num_experts, max_tokens, 1 if expert_alignment is None else expert_alignment

    def _dispatch(
        self, call: DispatchCall, handle: EPHandle | None
    ) -> tuple[Rows, Tensor | None, Tensor | None, EPHandle]:
        if handle is None:
            handle, recv_x, recv_weights = self._mode.dispatch(call)
        else:
            recv_x, recv_weights = self._mode.dispatch_cached(call, handle)
        recv_idx = None if call.do_expand else local_choices(handle)
        return recv_x, recv_idx, recv_weights, handle

    def _refuse_first(self, *lists: Problems) -> None:
        problem = first_problem(*lists)
        if problem:
            self._mode.exchange.refuse(problem)
