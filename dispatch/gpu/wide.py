"""Several ranks' dispatch on devices: each step goes the way that the lock-step header's mode says, as on the CPU.

Decode steps go by low-latency kernels, which the host neither waits for nor counts; steps with prompts by a wire.
Both give the pairs and the bits of `Dispatcher`. Where ranks have no memory that kernels can write to, all steps go by
the wire.

Legend: T tokens, K choices, H hidden, P pairs, S slots per rank.
"""

from typing import NoReturn

import torch
from torch import Tensor

from dispatch.arguments import combine_problem, dispatch_problem, dtype_problem
from dispatch.dispatched import Dispatched, Handle, Waits
from dispatch.gpu.memory import STORED
from dispatch.gpu.packed import Way
from dispatch.meanwhile import Meanwhile, nothing
from dispatch.mode import NORMAL, Mode


class WideDispatcher:
    """See `TokenDispatcher`. Calls are collective, in the same order on all ranks.

    Args:
        normal: taken over, as is the next; `close` closes them.
        low_latency: for steps in that mode; None: they go the normal way.
        world_size: ranks.
        device: of all tensors.
        row_format: how rows travel, in words.
        name, reason: of the backend.
    """

    def __init__(
        self,
        normal: Way,
        low_latency: Way | None,
        *,
        world_size: int,
        device: torch.device,
        row_format: str,
        name: str,
        reason: str,
    ) -> None:
        self._normal, self._low_latency = normal, low_latency
        self._ways = [normal] if low_latency is None else [normal, low_latency]
        self.world_size, self.device, self.row_format = world_size, device, row_format
        self.name, self.reason = name, reason
        self.is_replayable = low_latency is not None and low_latency.is_replayable
        self._call = 0
        self._last = normal

    @property
    def waits(self) -> Waits:
        """See `TokenDispatcher`. Waits for the device."""
        return Waits(*(sum(parts) for parts in zip(*(way.waited_ns for way in self._ways), strict=True)))

    def sent_to_ranks(self) -> tuple[list[int], list[int]]:
        """See `TokenDispatcher`. Waits for the device."""
        dispatched, combined = zip(*(way.sent_bytes for way in self._ways), strict=True)
        return [sum(ways) for ways in zip(*dispatched, strict=True)], [
            sum(ways) for ways in zip(*combined, strict=True)
        ]

    def dispatch(
        self, x_TH: Tensor, slots_TK: Tensor, mode: Mode = NORMAL, *, meanwhile: Meanwhile = nothing
    ) -> Dispatched:
        """See `Dispatcher`. In low-latency mode nobody looks at slots: one out of range is no choice, one that
        a token repeats is one pair, and P is room.

        Raises:
            ValueError: a bad argument; all other ranks get PeerRefused.
            RanksDisagree, PeerLost, DispatchTimeout: in normal mode; in low-latency mode `check` raises them, and
                PeerRefused too, where the host does not wait.
        """
        self._call += 1
        self._last = self._low_latency if mode.capacity and self._low_latency is not None else self._normal
        problem = dispatch_problem(x_TH, slots_TK, mode, self.device) or dtype_problem("x_TH", x_TH, STORED)
        if problem:
            self._refuse(problem)
        packed = self._last.dispatch(x_TH.contiguous(), slots_TK.contiguous(), mode.capacity, meanwhile)
        (T, H), K = x_TH.shape, slots_TK.shape[1]
        handle = Handle(self._call, T, K, H, x_TH.dtype, packed.num_pairs)
        return Dispatched(packed.x_NH, packed.row_P, packed.slot_offsets, handle)

    def combine(
        self,
        y_PH: Tensor,
        weights_TK: Tensor,
        dispatched: Dispatched,
        *,
        out: Tensor | None = None,
        meanwhile: Meanwhile = nothing,
    ) -> Tensor:
        """See `Dispatcher`. Answers behind the last pair are not read."""
        handle = dispatched.handle
        problem = combine_problem(
            y_PH, weights_TK, out, pairs_shape=(handle.num_pairs, handle.hidden),
            tokens_shape=(handle.num_tokens, handle.num_choices), dtype=handle.dtype, device=self.device,
        )  # fmt: skip
        if handle.call != self._call:
            problem = "dispatched is not of the last dispatch; its buffers are overwritten"
        if problem:
            self._refuse(problem)
        if out is None:
            out = y_PH.new_empty(handle.num_tokens, handle.hidden)
        self._last.combine(y_PH.contiguous(), weights_TK.float().contiguous(), out, meanwhile)
        return out

    def check(self) -> None:
        """See `TokenDispatcher`."""
        for way in self._ways:
            way.check()

    def close(self) -> None:
        """See `TokenDispatcher`."""
        for way in self._ways:
            way.close()

    def _refuse(self, problem: str) -> NoReturn:
        """Tell all ranks, on the way that they are on; collective."""
        self._last.refuse(problem)
        raise ValueError(problem)
