"""`Buffer`: DeepEP's V1 interface over WideEP's wires, so that code written for `deep_ep` runs here.

Names, argument order, shapes and handles are DeepEP's (deep_ep/buffers/legacy.py at dd758ca). Arguments after these,
by keyword only, are WideEP's. `normal` and `low_latency` do the work; the service's own `Dispatcher` does not depend on
this interface. This side accepts more than DeepEP: any floating dtype and hidden size, and any number of ranks. Rows
are always in the same order, and errors name the argument and reach every rank.
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
    """`Buffer.runtime`: a rank's position in the grid of nodes. It has no device or stream."""

    rank: int
    num_nodes: int
    node_size: int

    def is_available(self) -> bool:
        """Return whether the ranks are connected: always true, because a Buffer exists."""
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
    """Return new memory shaped as a slice of a buffer of `num_bytes`. Errors call that size `name`.

    Raises:
        ValueError: The slice exceeds the buffer.
    """
    elements = num_bytes // dtype.itemsize
    wanted = elements - offset if size is None else torch.Size(size).numel()
    if offset < 0 or not 0 <= wanted <= elements - offset:
        raise ValueError(
            f"size is {size} at offset {offset}; {name} is {num_bytes}, which holds {elements} elements of {dtype}"
        )
    return torch.empty((wanted,) if size is None else size, dtype=dtype)


class LocalCalls:
    """Local calls of `Buffer`, as a mixin."""

    num_sms: int = 20
    _wires: Wires

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Return whether FP8 rows can be sent: always true."""
        return True

    @classmethod
    def set_num_sms(cls, new_num_sms: int) -> None:
        """Set `num_sms` for all buffers, only for default configs. Raises ValueError if it is odd or negative."""
        if new_num_sms < 0 or new_num_sms % 2 != 0:
            raise ValueError(f"new_num_sms is {new_num_sms}; it must be an even number, 0 or more")
        cls.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """Return an event of the work so far. On the CPU it has already happened."""
        return EventOverlap(EventHandle())

    @classmethod
    def get_dispatch_config(cls, num_ranks: int) -> Config:
        """Return a config for any number of ranks. Configs have no effect here, so DeepEP's table is not repeated."""
        return cls._default_config(num_ranks)

    @classmethod
    def get_combine_config(cls, num_ranks: int) -> Config:
        """Return the same config as `get_dispatch_config`."""
        return cls._default_config(num_ranks)

    def get_comm_stream(self) -> Any:
        """Return the current CUDA stream, because this buffer has no separate stream.

        Raises:
            DispatchError: The buffer is on the CPU, which has no streams.
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
        """Return new memory of the size that DeepEP's buffer would have. It is never read.

        Callers zero the buffer after a fault. Here it needs no clearing, and clearing it is harmless.

        Args:
            dtype: Type of the tensor.
            size: Shape (default: all elements from `offset` on, as one dimension).
            offset: Number of elements to skip at the front.
            use_rdma_buffer: Use the size num_rdma_bytes instead of num_nvl_bytes.
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
    """One rank's end of DeepEP's exchange. Calls are collective, in the same order on all ranks, unless marked local.

    A bad argument is a ValueError on the rank that passed it and PeerRefused on all others, before anything is sent;
    the next call works. Only PeerLost and DispatchTimeout end the buffer.

    Args:
        group: A process group over all ranks; a gloo group if WideEP's wires need one to connect (vLLM passes one).
        num_nvl_bytes, num_rdma_bytes: Stored, without effect on the CPU: buffers grow as needed.
        low_latency_mode: Stored, without effect on the CPU: both modes work on any buffer.
        num_qps_per_rank, allow_nvlink_for_low_latency_mode, allow_mnnvl: Without effect.
        explicitly_destroy: If true, `destroy` may be called, and must be to release the wire before the program ends.
        enable_shrink: A rank that is lost in a low-latency call is masked instead of an error; see the mask methods.
            Normal mode needs every rank, as in DeepEP.
        comm: An mpi4py communicator; refused, because ranks connect over torch.distributed.
        backend: A wire ("auto", "gloo", "shm", ...; see `open_wire`), or "deep_ep" for the installed package.
        strict: Refuse what DeepEP's hardware does not support (dtypes, sizes, numbers of ranks, contiguity).
        timeout_s: How long to wait for a peer.
        node_size: Ranks per node. With more ranks than that, layouts and handles are internode ones.
        kernels: Kernels of low-latency calls; auto chooses by device, "triton" on a CPU interprets the GPU's kernels.

    With CUDA, backends auto, nccl and nvshmem take and return tensors of the current device (not yet run on a GPU). On a
    GPU, `low_latency_mode` opens low-latency mode with the buffer, with `num_rdma_bytes` of memory at first.

    Attributes:
        num_sms: Class attribute; stored, without effect.
        rank, group, group_size, num_nvl_bytes, num_rdma_bytes, low_latency_mode, explicitly_destroy, enable_shrink,
        runtime: As callers of DeepEP read them. After `destroy`, runtime is None.

    Raises:
        ValueError: No group, a comm, or with `strict` a limit of DeepEP.
        WireUnavailable: The backend cannot work here.
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
        """Exchange of low-latency calls, opened by the first. Opening symmetric memory is collective."""
        exchange = self._wires.open_low_latency(self._kernels, self.num_rdma_bytes)
        weakref.finalize(self, exchange.close)
        return exchange

    def open_low_latency(self) -> None:
        """Open low-latency mode now instead of with its first call. Opening symmetric memory is collective."""
        _ = self.exchange

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        """Count the destinations of this rank's tokens. Local.

        Args:
            topk_idx: int64 [T, K], experts in [0, num_experts), -1 for no choice.
            num_experts: A multiple of the number of ranks.
            previous_event, async_finish, allocate_on_comm_stream: See `dispatch`.

        Returns:
            num_tokens_per_rank int32 [R] (a token counts once per rank), num_tokens_per_rdma_rank int32 [nodes] (None
            with one node), num_tokens_per_expert int32 [E], is_token_in_rank bool [T, R], event.

        Raises:
            ValueError: An argument is bad; only on this rank.
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
            x: [T, H] of any floating dtype, or a tuple with scales: [T, H] of one byte per element and float32 or
                int32 [T, any] or [T], in any memory layout.
            handle: Handle of an earlier dispatch, to send x the same way (cached mode), without layout, topk_idx or weights.
            num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert: Results of `get_dispatch_layout`.
            num_tokens_per_rdma_rank: As those; not read. With `strict` and several nodes it must be given.
            topk_idx, topk_weights: int64 and float32 [T, K], both or neither.
            expert_alignment: Counts per expert are rounded up to a multiple of this.
            num_worst_tokens: Fixed number of rows to return; needs topk_idx. If it is too small, all ranks fail.
            config: Checked, without effect.
            previous_event, allocate_on_comm_stream: Accepted, without effect on the CPU.
            async_finish: Return an event to wait for. The work is done when the call returns in any case.
            forks: Arguments of DeepEP's forks: a TypeError on every rank, unless None or False.

        Returns:
            `(recv_x, recv_topk_idx, recv_topk_weights, num_recv_tokens_per_expert_list, handle, event)`. Rows by
            source rank, then source token; scales contiguous by rows. recv_topk_idx has local experts; choices of other
            ranks are -1, with weight 0. With num_worst_tokens, rows after the received ones are 0, their choices are -1,
            and the list is empty. With a handle, only recv_x and event are not None. All tensors are new.
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
        """Return rows to their source ranks and add them up, without weights.

        One row per (token, rank) comes back. Rows are added in ascending order of ranks, after the biases, in float32
        (float64 for float64) with one rounding. This is deterministic, but grouped by rank: the last bits depend on the
        placement of experts. (The service's own combine does not group.)

        Args:
            x: [N, H], one row per row of recv_x, in its order (padding rows of num_worst_tokens are not read).
            handle: Handle of the dispatch.
            topk_weights: float32 [N, K]; added up like the rows, not applied.
            bias: [T, H] in x's dtype, or a tuple of two.
            others: As in `dispatch`.

        Returns:
            `(combined_x, combined_topk_weights, event)`: [T, H] in x's dtype, float32 [T, K] or None. A token without
            a destination gets the sum of its biases.
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
        """Check the state that every normal-mode call needs."""
        if self.runtime is None:
            raise DispatchError(f"{method}: the buffer is destroyed")
        if "exchange" in self.__dict__:
            self.exchange.settle()  # finish a low-latency call with an unused hook before anything else is sent
        problem = forks_ask_nothing(method, forks)
        if problem:
            self._wires.mover.refuse(problem)
            raise TypeError(problem)

    def _refuse_normal(self, *lists: Problems) -> None:
        problem = first_problem(*lists)
        if problem:
            self._normal.exchange.refuse(problem)


class InstalledBuffer(InstalledCalls, Buffer):
    """Result of `Buffer(..., backend="deep_ep")`: every call goes to the installed package."""
