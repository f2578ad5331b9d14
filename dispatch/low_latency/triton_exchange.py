"""`LowLatencyExchange` by Triton kernels through symmetric memory: between GPUs, or in the interpreter between CPU ranks.

Nothing is allocated after the first call of a shape, and on a GPU the host looks at nothing and counts nothing, so that
a CUDA graph can replay the calls. Consequences there, unless `is_blocking`:
- choices out of range, and choices of a combine that were not dispatched, are no choices instead of errors;
- a call that a peer refused or that ranks disagree on delivers no rows and sums to zero; the error comes with the next
  `barrier` (`clean_low_latency_buffer`), which looks. Likewise a late peer: after about `timeout_s` its rows are left
  out, and it is masked if `mask_lost`.
Where the host waits anyway, on the CPU, errors are raised by the call, as `CpuExchange` does; only that a peer which
died is late, not lost.

Memory is opened once, and grows in a call that needs more: that one waits for all ranks, as opening is collective.

Interpreted across processes, and compiled for sm_90; never run on a GPU yet.
"""

import logging
import time
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dispatch.errors import DispatchError, DispatchTimeout, PeerRefused, RanksDisagree
from dispatch.low_latency import triton_flags as flags
from dispatch.low_latency.exchange import Posted
from dispatch.low_latency.ring import DispatchSlot, Results
from dispatch.low_latency.shape import LowLatencyShape
from dispatch.low_latency.symmetric import (
    TEXT_BYTES,
    CombineContents,
    DispatchContents,
    OpenMemory,
    SymmetricLayout,
    SymmetricMemory,
)
from dispatch.low_latency.triton_launches import DTYPES, Launches, TritonSlot
from dispatch.transport import decode_refusal, encode_refusal

POLLS_PER_S = 1_000_000  # of a GPU, about: a look at a flag goes to memory
_POLLS_PER_LOOK = 10_000  # by a host that looks at the clock in between
_INTERPRETED_POLLS = 4  # which are slow, and take the core that a peer may need: hence a pause
_PAUSE_S = 0.001
_TROUBLE_BITS = 3  # of a status, below the call's number
_KIND_BITS = 31  # of what a flag says beside the number, so that it is an int32 for the kernels

_REFUSAL = 0  # in place of a kind

log = logging.getLogger(__name__)


class TritonExchange:
    """See `LowLatencyExchange`. Opening is collective.

    Args:
        open_memory: provides memory; called again where a call needs more. What it gave is closed by `close`.
        world_size: ranks that it connects.
        num_bytes: of memory to begin with, at least.
        timeout_s: how long a peer may keep this rank waiting.
        mask_lost: mask ranks that are late.
        is_blocking: look at every call's outcome from the host; None: on the CPU only.
        lanes: programs per expert that copy rows.
    """

    dtypes: tuple[torch.dtype, ...] | None = DTYPES

    def __init__(
        self,
        open_memory: OpenMemory,
        world_size: int,
        *,
        num_bytes: int = 0,
        timeout_s: float = 30.0,
        mask_lost: bool = False,
        is_blocking: bool | None = None,
        lanes: int = 16,
    ) -> None:
        self._open_memory, self._timeout_s, self._mask_lost = open_memory, timeout_s, mask_lost
        self._lanes = lanes
        memory = open_memory(max(num_bytes, SymmetricLayout.bytes_for(world_size, 0)))
        self.rank, self.world_size, self.device = memory.rank, memory.world_size, memory.device
        self._is_blocking = self.device.type == "cpu" if is_blocking is None else is_blocking
        self._mask = torch.zeros(world_size, dtype=torch.int32, device=self.device)
        self._arrived = torch.zeros_like(self._mask)
        self._trouble = torch.zeros(world_size, dtype=torch.int64, device=self.device)
        self._text = torch.zeros(TEXT_BYTES, dtype=torch.uint8, device=self.device)
        self._results = Results(TritonSlot, self.device)
        self._calls = torch.zeros(1, dtype=torch.int64, device=self.device)  # the number of the last one
        self._travelling: Posted | None = None
        self._use(memory)

    def settle(self) -> None:
        """See `LowLatencyExchange`."""
        if self._travelling is not None:
            self._travelling.settle()
            self._travelling = None

    def refuse(self, text: str) -> None:
        """See `LowLatencyExchange`. Returns when all have met, where the host looks."""
        self.settle()
        self._begin_call()
        content = encode_refusal(text).ljust(TEXT_BYTES, b"\0")
        self._text.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        memory, layout = self._memory, self._layout
        flags.post_refusal[(self.world_size,)](
            self._text, memory.peers, self._mask, self._calls, self.rank, layout.half_bytes, layout.texts_at,
            TEXT_BYTES=TEXT_BYTES, **memory.reach, num_warps=1,
        )  # fmt: skip
        self._wait(_REFUSAL, "a refusal", is_any_call=True)

    def slot_of(self, source_token_LN: Tensor) -> TritonSlot | None:
        """See `LowLatencyExchange`."""
        return self._results.slot_of(source_token_LN)

    def find_bad_choice(self, topk_TK: Tensor, num_experts: int) -> int:
        """See `LowLatencyExchange`."""
        return self._find((topk_TK < -1) | (topk_TK >= num_experts)) if self._is_blocking else -1

    def find_other_choice(self, topk_TK: Tensor, slot: DispatchSlot) -> int:
        """See `LowLatencyExchange`."""
        if not self._is_blocking:
            return -1
        return self._find((topk_TK != -1) & (topk_TK != slot.sent_TK[: topk_TK.shape[0]]))

    def set_mask(self, rank: int, is_masked: bool) -> None:
        """See `LowLatencyExchange`."""
        self.settle()
        self._mask[rank] = int(is_masked)

    def write_mask(self, status_R: Tensor) -> None:
        """See `LowLatencyExchange`."""
        status_R.copy_(self._mask)

    def post_dispatch(
        self,
        shape: LowLatencyShape,
        x_TH: Tensor,
        topk_TK: Tensor,
        *,
        round_scale: bool,
        may_wait: bool,
        stats_L: Tensor | None = None,
        waited_R: Tensor | None = None,
    ) -> tuple[TritonSlot, Posted]:
        """See `LowLatencyExchange`."""
        self.settle()
        self._make_room(DispatchContents(shape=shape, has_remote=self._has_remote).num_bytes)
        slot = self._results.next_slot(shape)
        slot.num_tokens = x_TH.shape[0]
        self._begin_call()
        self._launches.send_rows(slot, x_TH, topk_TK, round_scale=round_scale)
        deliver = partial(self._launches.deliver_rows, slot, stats_L)
        return slot, self._post(_kind("dispatch", shape), "a dispatch", deliver, waited_R)

    def post_combine(
        self,
        slot: DispatchSlot,
        y_LNH: Tensor,
        topk_TK: Tensor,
        weights_TK: Tensor,
        *,
        may_wait: bool,
        out_TH: Tensor | None = None,
        waited_R: Tensor | None = None,
    ) -> tuple[Tensor, Posted]:
        """See `LowLatencyExchange`."""
        assert isinstance(slot, TritonSlot), "slots come from this exchange"
        self.settle()
        contents = CombineContents(shape=slot.shape, dtype=y_LNH.dtype, has_remote=self._has_remote)
        self._make_room(contents.num_bytes)
        if out_TH is None:
            out_TH = self._results.next_output(slot.shape, y_LNH.dtype, topk_TK.shape[0])
        self._begin_call()
        self._launches.send_answers(slot, y_LNH)
        add_up = partial(self._launches.sum_answers, slot, topk_TK, weights_TK, out_TH)
        kind = _kind(f"combine of {y_LNH.dtype}", slot.shape)
        return out_TH, self._post(kind, "a combine", add_up, waited_R)

    def barrier(self) -> None:
        """See `LowLatencyExchange`. Looks at what went wrong since it last did, on a GPU too."""
        self.settle()
        self._meet("barrier")

    def close(self) -> None:
        """Release the memory. Local; peers must have finished their last call."""
        self._memory.close()

    def _use(self, memory: SymmetricMemory) -> None:
        self._memory, self._has_remote = memory, memory.reach["HAS_REMOTE"]
        size = int(memory.memory.numel())
        self._layout = SymmetricLayout(world_size=self.world_size, total_bytes=size)
        self._launches = Launches(
            memory,
            self._layout,
            mask=self._mask,
            arrived=self._arrived,
            calls=self._calls,
            lanes=self._lanes,
        )

    def _make_room(self, num_bytes: int) -> None:
        """Open larger memory if a call needs it, when all ranks have come to do so."""
        if num_bytes <= self._layout.content_bytes:
            return
        self._meet(f"need of {num_bytes} bytes")
        if self._mask.any():
            raise DispatchError(
                f"a low-latency call needs {num_bytes} bytes and there are {self._layout.content_bytes}; memory cannot "
                "grow while ranks are masked: open the buffer with num_rdma_bytes of get_low_latency_rdma_size_hint"
            )
        self._memory.close()
        self._use(self._open_memory(SymmetricLayout.bytes_for(self.world_size, num_bytes)))

    def _meet(self, doing: str) -> None:
        """Make a call without contents, and look at its outcome."""
        kind = _kind(doing, None)
        self._begin_call()
        self._post_flags(kind)
        self._wait(kind, f"a {doing}", must_look=True)

    def _begin_call(self) -> None:
        flags.begin_call[(1,)](self._calls, num_warps=1)

    def _post(self, kind: int, doing: str, deliver: Callable[[], None], waited_R: Tensor | None) -> Posted:
        """Say that this call's contents are there; the result waits for the peers' and delivers them."""
        self._post_flags(kind)

        def finish() -> None:
            self._wait(kind, doing, waited_R=waited_R)
            deliver()

        self._travelling = Posted(finish)
        return self._travelling

    def _post_flags(self, kind: int) -> None:
        flags.post_flags[(self.world_size,)](
            self._memory.peers, self._mask, self._calls, self.rank, self._layout.half_bytes, kind,
            **self._memory.reach, num_warps=1,
        )  # fmt: skip

    def _wait(
        self,
        kind: int,
        doing: str,
        *,
        waited_R: Tensor | None = None,
        is_any_call: bool = False,
        must_look: bool = False,
    ) -> None:
        """Wait for every peer's flag; where the host looks, raise what went wrong."""
        options = {"IS_MASKING": self._mask_lost, "ANY_CALL": is_any_call}
        if not (self._is_blocking or must_look):
            polls = int(self._timeout_s * POLLS_PER_S)
            self._wait_flags(kind, waited_R, polls, IS_LAST=True, HAS_CLOCK=waited_R is not None, **options)
            return
        is_interpreted = self.device.type == "cpu"
        polls = _INTERPRETED_POLLS if is_interpreted else _POLLS_PER_LOOK
        begin, is_late = time.monotonic(), False
        while not is_late:
            is_late = time.monotonic() - begin > self._timeout_s
            self._wait_flags(kind, None, polls, IS_LAST=is_late, HAS_CLOCK=False, **options)
            if bool(((self._arrived != 0) | (self._mask != 0)).all()):
                break
            if is_interpreted:
                time.sleep(_PAUSE_S)
        if waited_R is not None:
            others = self._mask == 0
            others[self.rank] = False
            waited_R += others * int((time.monotonic() - begin) * 1e9)
        self._raise_trouble(doing)

    def _wait_flags(self, kind: int, waited_R: Tensor | None, polls: int, **options: Any) -> None:
        flags.wait_flags[(self.world_size,)](
            self._memory.peers, self._mask, self._arrived, self._trouble, waited_R, self._calls, self.rank,
            self._layout.half_bytes, kind, polls, **options, num_warps=1,
        )  # fmt: skip

    def _raise_trouble(self, doing: str) -> None:
        """Look at what went wrong, and forget it."""
        trouble = self._trouble.tolist()
        if not any(trouble):
            return
        self._trouble.zero_()
        found = {rank: (word >> _TROUBLE_BITS, word & 7) for rank, word in enumerate(trouble) if word}
        for rank, (number, status) in found.items():
            if status == flags.REFUSED.value:
                raise PeerRefused(rank, self._read_text(rank, number))
        for rank, (_, status) in found.items():
            if status == flags.OTHER_CALL.value:
                raise RanksDisagree(
                    f"rank {rank} made another call than rank {self.rank}'s {doing} in low-latency mode"
                )
        if not self._mask_lost:
            raise DispatchTimeout(min(found), self._timeout_s, f"{doing} in low-latency mode")
        log.warning("rank %d goes on without ranks %s: they were late for %s", self.rank, list(found), doing)

    def _read_text(self, rank: int, number: int) -> str:
        at = (number & 1) * self._layout.half_bytes + self._layout.texts_at + rank * TEXT_BYTES
        return decode_refusal(bytes(self._memory.memory[at : at + TEXT_BYTES].tolist()).rstrip(b"\0"))

    @staticmethod
    def _find(is_bad_TK: Tensor) -> int:
        bad = is_bad_TK.flatten().nonzero()
        return int(bad[0]) if bad.numel() else -1


def _kind(doing: str, shape: LowLatencyShape | None) -> int:
    """Return what a flag says of a call beside its number, never _REFUSAL."""
    return max(1, zlib.crc32(f"{doing} {shape}".encode()) >> (32 - _KIND_BITS))
