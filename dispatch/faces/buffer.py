"""`Buffer`: DeepEP's V1 interface over our wires, so that code written for `deep_ep` runs on ours.

Names, argument order, shapes and handles are DeepEP's (deep_ep/buffers/legacy.py at dd758ca); what comes after its
arguments, by keyword only, is ours. A face: `normal` and `low_latency` do the work, and the service's
own `Dispatcher` is not shaped by it. Differences are on our side of the contract: any floating dtype and hidden size,
any number of ranks, rows always in the same order, errors that name the argument and reach every rank.
"""

import weakref
from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from dispatch.errors import DispatchError
from dispatch.faces import checks, handles
from dispatch.faces.checks import CombineCall
from dispatch.faces.config import NVL_PEERS, Config, check_buffer
from dispatch.faces.events import EventHandle, EventOverlap, finished
from dispatch.faces.handles import Rows, as_biases, join_rows, split_rows
from dispatch.faces.installed import InstalledCalls
from dispatch.faces.low_latency import LowLatencyMode
from dispatch.faces.normal import NormalMode, find_layout
from dispatch.faces.rules import Problems, first_problem, forks_ask_nothing
from dispatch.faces.wires import Released, Wires, check_group, open_wires
from dispatch.low_latency.calls import LowLatencyExchange
from dispatch.rows import RowExchange

Dispatched = tuple[Rows, Tensor | None, Tensor | None, list[int] | None, handles.Handle | None, EventOverlap]


class Runtime(NamedTuple):
    """`Buffer.runtime`: a rank's place in the grid of nodes. No device or stream is behind it."""

    rank: int
    num_nodes: int
    node_size: int

    def is_available(self) -> bool:
        """Whether ranks have met: they have when a Buffer exists."""
        return True

    def get_num_rdma_ranks(self) -> int:
        """Return the number of nodes."""
        return self.num_nodes

    def get_rdma_rank(self) -> int:
        """Return this rank's node."""
        return self.rank // self.node_size


def scratch_like(
    dtype: torch.dtype, size: torch.Size | None, offset: int, *, name: str, num_bytes: int
) -> Tensor:
    """Return new memory shaped as a slice of a buffer of `num_bytes`, which the caller calls `name`.

    Raises:
        ValueError: the slice does not lie within the buffer.
    """
    elements = num_bytes // dtype.itemsize
    wanted = elements - offset if size is None else torch.Size(size).numel()
    if offset < 0 or not 0 <= wanted <= elements - offset:
        raise ValueError(
            f"size is {size} at offset {offset}; {name} is {num_bytes}, which is {elements} of {dtype}"
        )
    return torch.empty((wanted,) if size is None else size, dtype=dtype)


class LocalCalls:
    """Mixed into `Buffer`."""

    num_sms: int = 20
    _wires: Wires

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Say whether FP8 rows can be sent: always."""
        return True

    @classmethod
    def set_num_sms(cls, new_num_sms: int) -> None:
        """Set `num_sms` for all buffers: kept and put into configs, of no other effect."""
        if new_num_sms < 0 or new_num_sms % 2 != 0:
            raise ValueError(f"new_num_sms is {new_num_sms}; it must be an even number, 0 or more")
        cls.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """Return an event of the work so far: on the CPU it has happened."""
        return EventOverlap(EventHandle())

    @classmethod
    def get_dispatch_config(cls, num_ranks: int) -> Config:
        """Return a config for any number of ranks: ours have no effect, DeepEP's table is not repeated."""
        return cls._default_config(num_ranks)

    @classmethod
    def get_combine_config(cls, num_ranks: int) -> Config:
        """Return a config as `get_dispatch_config` does."""
        return cls._default_config(num_ranks)

    def get_comm_stream(self) -> Any:
        """Return the current CUDA stream: ours has none of its own. On the CPU there is none.

        Raises:
            DispatchError: the buffer is on the CPU.
        """
        device = self._wires.device
        if device.type != "cpu":
            return torch.cuda.current_stream(device)
        name = self._wires.name
        raise DispatchError(
            f"get_comm_stream: backend {name} has no streams; a call's work is done when it returns"
        )

    def get_local_buffer_tensor(
        self,
        dtype: torch.dtype,
        size: torch.Size | None = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> Tensor:
        """Return new memory of the size that DeepEP's buffer would have, which nobody reads.

        Callers zero the buffer after a fault; ours needs no clearing, so that doing it is harmless.

        Args:
            dtype: of the tensor.
            size: shape; None: all elements from `offset` on, as one dimension.
            offset: elements to leave out in front.
            use_rdma_buffer: sized by num_rdma_bytes instead of num_nvl_bytes.
        """
        name = "num_rdma_bytes" if use_rdma_buffer else "num_nvl_bytes"
        num_bytes = getattr(self, name)
        return scratch_like(dtype, size, offset, name=name, num_bytes=num_bytes).to(self._wires.device)

    @classmethod
    def _default_config(cls, num_ranks: int) -> Config:
        if num_ranks < 1:
            raise ValueError(f"num_ranks is {num_ranks}; it must be at least 1")
        return Config(cls.num_sms)


class Buffer(LocalCalls, LowLatencyMode, Released):
    """One rank's end of DeepEP's exchange. Calls are collective, in the same order on all ranks, unless said local.

    A bad argument is a ValueError on the rank that gave it and PeerRefused on all others, before anything is sent;
    the next call works. PeerLost and DispatchTimeout end the buffer; nothing else does.

    Args:
        group: a process group over all ranks; a gloo group where ours must meet (vLLM passes one).
        num_nvl_bytes, num_rdma_bytes: kept, of no effect on the CPU: buffers grow as needed.
        low_latency_mode: kept, of no effect on the CPU: both modes work on any buffer.
        num_qps_per_rank, allow_nvlink_for_low_latency_mode, allow_mnnvl: of no effect.
        explicitly_destroy: `destroy` may be called then, and must be to release the wire before the end.
        enable_shrink: a rank that is lost in a low-latency call is masked and not an error; see the mask methods.
            Normal mode needs every rank, as DeepEP's does.
        comm: an mpi4py communicator; refused, we meet over torch.distributed.
        backend: a wire ("auto", "gloo", "shm", ...; see `open_wire`), or "deep_ep": the installed package.
        strict: refuse what DeepEP's hardware could not do (dtypes, sizes, numbers of ranks, contiguity).
        timeout_s: how long a peer may keep this rank waiting.
        node_size: ranks of a node. With more ranks than that, layouts and handles are internode ones.
        kernels: what moves low-latency calls, by the buffer's device; "triton" has the CPU interpret the GPU's kernels.

    Where CUDA is, backends auto, nccl and nvshmem take and give tensors of the current device (never run yet; on a
    GPU low-latency mode is opened with the buffer if `low_latency_mode`, with memory of `num_rdma_bytes` to begin with).

    Attributes:
        num_sms: class attribute; kept, of no effect.
        rank, group, group_size, num_nvl_bytes, num_rdma_bytes, low_latency_mode, explicitly_destroy, enable_shrink,
        runtime: as callers of DeepEP read them; runtime is None once destroyed.

    Raises:
        ValueError: no group, comm, or a limit of DeepEP's with strict.
        WireUnavailable: the backend cannot work here.
    """

    def __new__(cls, *_: Any, backend: str = "auto", **__: Any) -> Self:
        if backend == "deep_ep" and cls is Buffer:
            return object.__new__(InstalledBuffer)  # type: ignore[return-value]
        return object.__new__(cls)

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        *,
        backend: str = "auto",
        strict: bool = False,
        timeout_s: float = 30.0,
        node_size: int = NVL_PEERS,
        kernels: str = "auto",
    ) -> None:
        group = check_group(group, comm)
        self.rank, self.group, self.group_size = dist.get_rank(group), group, dist.get_world_size(group)
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.enable_shrink = low_latency_mode, enable_shrink
        self.explicitly_destroy, self.strict = explicitly_destroy, strict
        if node_size < 1:
            raise ValueError(f"node_size is {node_size}; it must be at least 1")
        if strict:
            check_buffer(self.group_size, num_nvl_bytes, num_rdma_bytes, low_latency_mode)
        self._wires = open_wires(backend, group, timeout_s=timeout_s, mask_lost=enable_shrink)
        self._kernels = kernels
        self._normal = NormalMode(RowExchange(self._wires.mover), node_size=node_size)
        self._grid = checks.World(
            rank=self.rank, num_ranks=self.group_size, num_nodes=self._normal.num_nodes, strict=strict
        )
        self.runtime: Any = Runtime(self.rank, self._normal.num_nodes, node_size)
        self._close = weakref.finalize(self, self._wires.mover.close)
        if low_latency_mode and self._wires.device.type != "cpu":
            self.open_low_latency()

    @cached_property
    def exchange(self) -> LowLatencyExchange:  # type: ignore[override]
        """What low-latency calls go through; opened by the first. Collective where symmetric memory is opened."""
        exchange = self._wires.open_low_latency(self._kernels, self.num_rdma_bytes)
        weakref.finalize(self, exchange.close)
        return exchange

    def open_low_latency(self) -> None:
        """Open low-latency mode now and not with its first call. Collective where symmetric memory is opened."""
        _ = self.exchange

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        """Count where this rank's tokens go. Local.

        Args:
            topk_idx: int64 [T, K], experts in [0, num_experts), -1 for none.
            num_experts: a multiple of the ranks.
            previous_event, async_finish, allocate_on_comm_stream: see `dispatch`.

        Returns:
            num_tokens_per_rank int32 [R] (a token counts once per rank), num_tokens_per_rdma_rank int32 [nodes] (None
            within one node), num_tokens_per_expert int32 [E], is_token_in_rank bool [T, R], event.

        Raises:
            ValueError: a bad argument, on this rank alone.
        """
        problem = first_problem(
            checks.layout(topk_idx, num_experts, self._grid),
            checks.streams(previous_event, async_finish, allocate_on_comm_stream, None, self._grid),
        )
        if problem:
            raise ValueError(problem)
        layout = find_layout(topk_idx, num_experts, self.group_size, self._normal.node_size)
        return (*layout, finished(async_finish))

    def dispatch(
        self,
        x: Rows,
        handle: handles.Handle | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        **forks: Any,
    ) -> Dispatched:
        """Send each token once to every rank that holds one of its experts.

        Args:
            x: [T, H] of any floating dtype, or with scales: a tuple of [T, H] of one byte per element and float32 or
                int32 [T, any] or [T], in any layout.
            handle: of an earlier dispatch, to send x the same way (cached mode): then no layout, topk_idx or weights.
            num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert: of `get_dispatch_layout`.
            num_tokens_per_rdma_rank: likewise; not read, with strict it must be there for more than one node.
            topk_idx, topk_weights: int64 and float32 [T, K], both or neither.
            expert_alignment: what the counts per expert are rounded up to.
            num_worst_tokens: rows to return whatever arrives; needs topk_idx. Fails on all ranks if it is too few.
            config: checked, of no effect.
            previous_event, allocate_on_comm_stream: accepted, of no effect on the CPU.
            async_finish: the event returned can be waited for; the work is done in any case.
            forks: arguments of DeepEP's forks: a TypeError on every rank, unless None or False.

        Returns:
            `(recv_x, recv_topk_idx, recv_topk_weights, num_recv_tokens_per_expert_list, handle, event)`. Rows by
            source rank, then source token; scales contiguous by rows. recv_topk_idx has local experts, -1 for those
            of other ranks, with weight 0. With num_worst_tokens rows below those received are 0, their choices -1, and
            the list is empty. With a handle only recv_x and event are not None. All tensors are new.
        """
        rows, scales = split_rows(x)
        self._begin("dispatch", forks)
        common = (
            checks.streams(previous_event, async_finish, allocate_on_comm_stream, config, self._grid),
            checks.rows(rows, scales, self._grid),
        )
        if handle is not None:
            self._refuse_normal(
                *common,
                checks.normal_handle(handle, self._grid),
                checks.normal_cached(topk_idx, topk_weights, rows, handle),
            )
            recv, recv_scales = self._normal.dispatch_cached(rows, scales, handles.unpack(handle))
            return join_rows(recv, recv_scales), None, None, None, None, finished(async_finish)
        call = checks.DispatchArguments(
            x=rows, scales=scales, num_tokens_per_rank=num_tokens_per_rank,
            num_tokens_per_rdma_rank=num_tokens_per_rdma_rank, is_token_in_rank=is_token_in_rank,
            num_tokens_per_expert=num_tokens_per_expert, topk_idx=topk_idx, topk_weights=topk_weights,
            expert_alignment=expert_alignment, num_worst_tokens=num_worst_tokens,
        )  # fmt: skip
        self._refuse_normal(*common, checks.normal_dispatch(call, self._grid))
        got = self._normal.dispatch(call)
        recv_x = join_rows(got.x, got.scales)
        counts = got.num_tokens_per_expert
        return recv_x, got.topk_idx, got.topk_weights, counts, got.handle, finished(async_finish)

    def combine(
        self,
        x: Tensor,
        handle: handles.Handle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        **forks: Any,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Return rows to where they came from and add them up, without weights.

        One row per (token, rank) comes back, and is added in ascending order of ranks, after the biases, in float32
        (float64 for float64) with one rounding: deterministic, but grouped by rank, so that where an expert lives
        shows in the last bits (the service's own combine does not group).

        Args:
            x: [N, H], one row per row of recv_x, in its order (rows of num_worst_tokens' padding are not read).
            handle: of the dispatch.
            topk_weights: float32 [N, K]; added up beside the rows, not applied.
            bias: [T, H] in x's dtype, or a tuple of two.
            others: as in `dispatch`.

        Returns:
            `(combined_x, combined_topk_weights, event)`: [T, H] in x's dtype, float32 [T, K] or None. A token that
            went nowhere is its biases' sum.
        """
        self._begin("combine", forks)
        call = CombineCall(x=x, topk_weights=topk_weights, biases=as_biases(bias))
        self._refuse_normal(
            checks.streams(previous_event, async_finish, allocate_on_comm_stream, config, self._grid),
            checks.rows(x, None, self._grid),
            checks.normal_handle(handle, self._grid),
            checks.normal_combine(call, handle),
        )
        return (*self._normal.combine(call, handles.unpack(handle)), finished(async_finish))

    def _begin(self, method: str, forks: Mapping[str, Any]) -> None:
        """Look at what every call of normal mode depends on."""
        if self.runtime is None:
            raise DispatchError(f"{method}: the buffer is destroyed")
        if "exchange" in self.__dict__:
            self.exchange.settle()  # a low-latency call whose hook has not run, before anything else travels
        problem = forks_ask_nothing(method, forks)
        if problem:
            self._wires.mover.refuse(problem)
            raise TypeError(problem)

    def _refuse_normal(self, *lists: Problems) -> None:
        problem = first_problem(*lists)
        if problem:
            self._normal.exchange.refuse(problem)


class InstalledBuffer(InstalledCalls, Buffer):
    """What `Buffer(..., backend="deep_ep")` makes: every call goes to the installed package."""
