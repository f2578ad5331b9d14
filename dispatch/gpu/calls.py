"""Calls of the Triton kernels: symmetric memory, numbered flags, waits and errors.

This module does not depend on the contents: `exchange` writes them between `_begin` and `_post`, in a launch that may also
count the call and publish it.

On a GPU the host reads and counts nothing, so that a CUDA graph can replay the launches. Unless `is_blocking`, this has
consequences. A call that a peer refused or that ranks disagree on delivers nothing; the next check (`begin_check`, `barrier`)
raises the error. A late peer is ignored after `timeout_s`, and masked if `mask_lost`. If it is not masked, later
calls do not wait for it again until the host has checked.
On the CPU, where the host waits, the call itself raises errors. But a peer that died is reported as late, not as lost.
A host that learns of a peer's end otherwise calls `interrupt`: waiting kernels poll a word in the host's memory.

Memory is opened once. If a call needs more, it waits for all ranks and opens larger memory, because opening is collective.
The smaller memory stays open, because graphs that were captured with it still write there. All calls share one
numbering, so these graphs remain valid.
"""

import logging
import time
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dispatch.dispatched import Check
from dispatch.errors import DispatchError, DispatchTimeout, PeerRefused, RanksDisagree
from dispatch.gpu.host_copy import HostCopy
from dispatch.gpu.kernels import flags
from dispatch.gpu.symmetric import TEXT_BYTES, OpenMemory, SymmetricLayout, SymmetricMemory
from dispatch.low_latency.calls import LowLatencyShape, OneTravels, Posted
from dispatch.wires.wire import decode_refusal, encode_refusal

_POLLS_PER_S = 1_000_000  # in place of a clock
_POLLS_PER_LOOK = 10_000  # of a host that checks the clock in between
_INTERPRETED_POLLS = 4  # they are slow and use a core that a peer may need, so the host pauses in between
_PAUSE_S = 0.001
_TROUBLE_BITS = 3  # for a status, below the call's number
_KIND_BITS = 31  # for the kind in a flag, next to the number; so it is an int32 for the kernels
_REFUSAL = 0  # used in place of a kind
# Most programs of a launch that counts them to publish a call: they add to one address, about one in a nanosecond.
_MOST_COUNTED = 4096

log = logging.getLogger(__name__)


class DeviceCalls(OneTravels):
    """One rank's end. Opening is collective.

    Args:
        open_memory: Provides memory; called again if a call needs more. `close` closes all of it.
        world_size: Number of ranks.
        num_bytes: Initial memory, at least.
        timeout_s: How long to wait for a peer.
        mask_lost: Whether to mask late ranks.
        is_blocking: Whether the host checks every call's outcome (default: on the CPU only).

    Attributes:
        rank, world_size, device: Those of the memory.
        is_blocking: As given, or as the device requires.
        memory, layout: Used by calls from now on.
        mask, arrived: int32 [R], and calls: int64 [1], see `flags`.
        dispatch_ns, combine_ns: int64 [R] on the device, the wait for each rank so far, of calls that count it there.
        waited_ns: The longest of these waits for any rank, of dispatches and of combines, until the last check.
    """

    def __init__(
        self,
        open_memory: OpenMemory,
        world_size: int,
        *,
        num_bytes: int = 0,
        timeout_s: float = 30.0,
        mask_lost: bool = False,
        is_blocking: bool | None = None,
    ) -> None:
        self._open_memory, self._timeout_s, self._mask_lost = open_memory, timeout_s, mask_lost
        self._opened: list[SymmetricMemory] = []
        self._use(open_memory(max(num_bytes, SymmetricLayout.bytes_for(world_size, 0))))
        self.rank, self.world_size, self.device = self.memory.rank, world_size, self.memory.device
        self.is_blocking = self.device.type == "cpu" if is_blocking is None else is_blocking
        self.mask = torch.zeros(world_size, dtype=torch.int32, device=self.device)
        self.arrived = torch.zeros_like(self.mask)
        self.calls = torch.zeros(1, dtype=torch.int64, device=self.device)  # number of the last call
        self._is_posted = False  # whether the launch of the contents publishes the call
        self.ended = torch.zeros(1, dtype=torch.int32, device=self.device)  # see `flags.end_call`
        self._watched = torch.zeros(
            3, world_size, dtype=torch.int64, device=self.device
        )  # one copy takes all
        self._trouble, self.dispatch_ns, self.combine_ns = self._watched
        self.waited_ns = 0, 0
        self._text = torch.zeros(TEXT_BYTES, dtype=torch.uint8, device=self.device)
        self._stop = torch.zeros(1, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        self._interruption: DispatchError | None = None

    @property
    def has_remote(self) -> bool:
        """Whether puts are needed to reach a peer. They need staging memory."""
        return bool(self.memory.reach["HAS_REMOTE"])

    def refuse(self, text: str, *, is_combine: bool = False) -> None:
        """Refuse a call. If the host checks calls, returns after all ranks have taken part."""
        self.settle()
        self._begin_call()
        content = encode_refusal(text).ljust(TEXT_BYTES, b"\0")
        self._text.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        memory, layout = self.memory, self.layout
        flags.post_refusal[(self.world_size,)](
            self._text, memory.peers, self.mask, self.calls, self.rank, layout.half_bytes, layout.texts_at,
            TEXT_BYTES=TEXT_BYTES, **memory.reach, num_warps=1,
        )  # fmt: skip
        self._wait(_REFUSAL, "a refusal", is_any_call=True)

    def set_mask(self, rank: int, is_masked: bool) -> None:
        self.settle()
        self.mask[rank] = int(is_masked)

    def write_mask(self, status_R: Tensor) -> None:
        status_R.copy_(self.mask)

    def barrier(self) -> None:
        """Wait for every rank, and raise the errors since the last check, on a GPU too."""
        self.settle()
        self._meet("barrier")

    def interrupt(self, error: DispatchError) -> None:
        """Make current and later waits end; checks raise the error. Permanent. Local; may be called from any thread."""
        self._interruption = self._interruption or error
        self._stop.fill_(1)

    def begin_check(self, doing: str = "step") -> Check:
        """Begin to check the calls since the last check, as `TokenDispatcher.begin_check`. Local.

        Args:
            doing: Purpose of the calls, for messages.

        Returns:
            Raises PeerRefused, RanksDisagree; DispatchTimeout, unless late ranks are masked; the error passed to `interrupt`.
        """
        copy = HostCopy([self._watched.view(-1)])

        def check() -> None:
            trouble, *waits = copy.read().reshape(self._watched.shape).tolist()
            self.waited_ns = max(waits[0]), max(waits[1])
            if self._interruption is not None:
                raise self._interruption
            if any(trouble):
                self._trouble.zero_()
                self._raise(
                    {rank: divmod(word, 1 << _TROUBLE_BITS) for rank, word in enumerate(trouble) if word},
                    doing,
                )

        return check

    def close(self) -> None:
        """Release all memory. Local; peers must have finished their last call."""
        while self._opened:
            self._opened.pop().close()

    def _begin(self, num_bytes: int, num_programs: int) -> bool:
        """Finish the last call, then begin one with `num_bytes` of contents.

        Args:
            num_programs: Programs of the launch that writes them.

        Returns:
            Whether that launch must count the call and publish it (BEGINS).
        """
        self.settle()
        self._make_room(num_bytes)
        self._is_posted = not self.has_remote and num_programs <= _MOST_COUNTED
        if not self._is_posted:
            self._begin_call()
        return self._is_posted

    def _post(
        self, doing: str, shape: LowLatencyShape, deliver: Callable[[], None], waited_R: Tensor | None = None
    ) -> Posted:
        """Publish this call's contents unless their launch did. The returned call waits for the peers' and delivers them."""
        kind = kind_of(doing, shape)
        if not self._is_posted:
            self._post_flags(kind)

        def finish() -> None:
            self._wait(kind, f"a {doing}", waited_R=waited_R)
            deliver()

        return self._travel(finish)

    def _use(self, memory: SymmetricMemory) -> None:
        self.memory = memory
        self._opened.append(memory)
        self.layout = SymmetricLayout(world_size=memory.world_size, total_bytes=int(memory.memory.numel()))

    def _make_room(self, num_bytes: int) -> None:
        """Open larger memory if a call needs it, after all ranks have reached this point."""
        if num_bytes <= self.layout.content_bytes:
            return
        self._meet(f"need of {num_bytes} bytes")
        if self.mask.any():
            raise DispatchError(
                f"a low-latency call needs {num_bytes} bytes but has {self.layout.content_bytes}, and memory cannot "
                "grow while ranks are masked: open the buffer with num_rdma_bytes of get_low_latency_rdma_size_hint"
            )
        self._use(self._open_memory(SymmetricLayout.bytes_for(self.world_size, num_bytes)))

    def _meet(self, doing: str) -> None:
        """Make a call without contents and check its outcome."""
        kind = kind_of(doing, None)
        self._begin_call()
        self._post_flags(kind)
        self._wait(kind, f"a {doing}", must_look=True)

    def _begin_call(self) -> None:
        flags.begin_call[(1,)](self.calls, num_warps=1)

    def _post_flags(self, kind: int) -> None:
        flags.post_flags[(self.world_size,)](
            self.memory.peers, self.mask, self.calls, self.rank, self.layout.half_bytes, kind, **self.memory.reach,
            num_warps=1,
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
        """Wait for every peer's flag. If the host checks calls, raise their errors."""
        options = {"IS_MASKING": self._mask_lost, "ANY_CALL": is_any_call}
        if not (self.is_blocking or must_look):
            has_clock = self.device.type != "cpu"  # the interpreter has none
            limit = int(self._timeout_s * (1e9 if has_clock else _POLLS_PER_S))
            has_waits = has_clock and waited_R is not None
            self._wait_flags(
                kind, waited_R, limit, IS_LAST=True, HAS_CLOCK=has_clock, HAS_WAITS=has_waits, **options
            )
            return
        begin = time.monotonic()
        self._poll(kind, begin, **options)
        if waited_R is not None:
            others = self.mask == 0
            others[self.rank] = False
            waited_R += others * int((time.monotonic() - begin) * 1e9)
        self.begin_check(doing)()

    def _poll(self, kind: int, begin: float, **options: Any) -> None:
        """Poll until every flag has arrived or the time is over."""
        is_interpreted, is_late = self.device.type == "cpu", False
        polls = _INTERPRETED_POLLS if is_interpreted else _POLLS_PER_LOOK
        while not is_late:
            is_late = time.monotonic() - begin > self._timeout_s
            self._wait_flags(kind, None, polls, IS_LAST=is_late, HAS_CLOCK=False, HAS_WAITS=False, **options)
            if self._interruption is not None or bool(((self.arrived != 0) | (self.mask != 0)).all()):
                break
            if is_interpreted:
                time.sleep(_PAUSE_S)

    def _wait_flags(self, kind: int, waited_R: Tensor | None, limit: int, **options: Any) -> None:
        flags.wait_flags[(self.world_size,)](
            self.memory.peers, self.mask, self.arrived, self._trouble, waited_R, self.calls, self._stop.data_ptr(),
            self.rank, self.layout.half_bytes, kind, limit, **options, num_warps=1,
        )  # fmt: skip

    def _raise(self, found: dict[int, tuple[int, int]], doing: str) -> None:
        """Raise the worst error. `found`: by rank, the call's number and a status."""
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
        log.warning(
            "rank %d continues without ranks %s: they were late for %s", self.rank, list(found), doing
        )

    def _read_text(self, rank: int, number: int) -> str:
        at = (number & 1) * self.layout.half_bytes + self.layout.texts_at + rank * TEXT_BYTES
        return decode_refusal(bytes(self.memory.memory[at : at + TEXT_BYTES].tolist()).rstrip(b"\0"))


def kind_of(doing: str, shape: LowLatencyShape | None) -> int:
    """Return the kind of a call, which its flag holds next to the number; never _REFUSAL."""
    return max(1, zlib.crc32(f"{doing} {shape}".encode()) >> (32 - _KIND_BITS))
