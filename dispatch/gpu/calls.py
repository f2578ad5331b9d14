"""How ranks meet for calls of the Triton kernels: symmetric memory, numbered flags, waits, and what went wrong.

Nothing here knows what travels: `exchange` writes contents between `_begin` and `_post`.

On a GPU the host looks at nothing and counts nothing, so that a CUDA graph can replay the launches. Consequences there,
unless `is_blocking`: a call that a peer refused or that ranks disagree on delivers nothing; the error comes with the next
look (`check`, `barrier`). Likewise a late peer: after about `timeout_s` it is left out, and masked if `mask_lost`; if not,
later calls do not wait for it again until somebody has looked.
Where the host waits anyway, on the CPU, errors are raised by the call; only that a peer which died is late, not lost.
A host that learns otherwise of a peer's end calls `interrupt`: kernels that wait look at a word in the host's memory.

Memory is opened once, and a call that needs more opens larger memory: it waits for all ranks, as opening is collective.
What is outgrown stays open, because graphs that were captured with it still write there; calls are numbered through, so
that they may go on.
"""

import logging
import time
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dispatch.errors import DispatchError, DispatchTimeout, PeerRefused, RanksDisagree
from dispatch.gpu import flags
from dispatch.gpu.symmetric import TEXT_BYTES, OpenMemory, SymmetricLayout, SymmetricMemory
from dispatch.low_latency.calls import LowLatencyShape, OneTravels, Posted
from dispatch.wires.wire import decode_refusal, encode_refusal

POLLS_PER_S = 1_000_000  # of a GPU, about: a look at a flag goes to memory
_POLLS_PER_LOOK = 10_000  # by a host that looks at the clock in between
_INTERPRETED_POLLS = 4  # which are slow, and take the core that a peer may need: hence a pause
_PAUSE_S = 0.001
_TROUBLE_BITS = 3  # of a status, below the call's number
_KIND_BITS = 31  # of what a flag says beside the number, so that it is an int32 for the kernels
_REFUSAL = 0  # in place of a kind

log = logging.getLogger(__name__)


class DeviceCalls(OneTravels):
    """One rank's end. Opening is collective.

    Args:
        open_memory: provides memory; called again where a call needs more. What it gave is closed by `close`.
        world_size: ranks that it connects.
        num_bytes: of memory to begin with, at least.
        timeout_s: how long a peer may keep this rank waiting.
        mask_lost: mask ranks that are late.
        is_blocking: look at every call's outcome from the host; None: on the CPU only.

    Attributes:
        rank, world_size, device: of the memory.
        is_blocking: as given, or as the device decides.
        memory, layout: of calls from now on.
        mask, arrived: int32 [R], and calls: int64 [1], see `flags`.
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
        self.calls = torch.zeros(1, dtype=torch.int64, device=self.device)  # the number of the last one
        self._trouble = torch.zeros(world_size, dtype=torch.int64, device=self.device)
        self._text = torch.zeros(TEXT_BYTES, dtype=torch.uint8, device=self.device)
        self._stop = torch.zeros(1, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        self._interruption: DispatchError | None = None

    @property
    def has_remote(self) -> bool:
        """Whether some peer is reached by puts, which need room to start from."""
        return bool(self.memory.reach["HAS_REMOTE"])

    def refuse(self, text: str, *, is_combine: bool = False) -> None:
        """See `LowLatencyExchange`. Returns when all have met, where the host looks."""
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
        """See `LowLatencyExchange`."""
        self.settle()
        self.mask[rank] = int(is_masked)

    def write_mask(self, status_R: Tensor) -> None:
        """See `LowLatencyExchange`."""
        status_R.copy_(self.mask)

    def barrier(self) -> None:
        """See `LowLatencyExchange`. Looks at what went wrong since it last did, on a GPU too."""
        self.settle()
        self._meet("barrier")

    def interrupt(self, error: DispatchError) -> None:
        """End what waits for peers, now and later; `check` raises the error. Local, from any thread, for good."""
        self._interruption = self._interruption or error
        self._stop.fill_(1)

    def check(self, doing: str) -> None:
        """Wait for the device, and raise what went wrong since the last look. Local.

        Args:
            doing: what calls were made for, in words.

        Raises:
            PeerRefused, RanksDisagree; DispatchTimeout, unless late ranks are masked; what `interrupt` was given.
        """
        trouble = self._trouble.tolist()
        if self._interruption is not None:
            raise self._interruption
        if any(trouble):
            self._trouble.zero_()
            self._raise(
                {rank: divmod(word, 1 << _TROUBLE_BITS) for rank, word in enumerate(trouble) if word}, doing
            )

    def close(self) -> None:
        """Release all memory. Local; peers must have finished their last call."""
        while self._opened:
            self._opened.pop().close()

    def _begin(self, num_bytes: int) -> None:
        """Begin a call with contents of so many bytes, when the one before is finished."""
        self.settle()
        self._make_room(num_bytes)
        self._begin_call()

    def _post(
        self,
        doing: str,
        shape: LowLatencyShape,
        deliver: Callable[[], None],
        waited_R: Tensor | None = None,
    ) -> Posted:
        """Say that this call's contents are there; the result waits for the peers' and delivers them."""
        kind = _kind(doing, shape)
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
        """Open larger memory if a call needs it, when all ranks have come to do so."""
        if num_bytes <= self.layout.content_bytes:
            return
        self._meet(f"need of {num_bytes} bytes")
        if self.mask.any():
            raise DispatchError(
                f"a low-latency call needs {num_bytes} bytes and there are {self.layout.content_bytes}; memory cannot "
                "grow while ranks are masked: open the buffer with num_rdma_bytes of get_low_latency_rdma_size_hint"
            )
        self._use(self._open_memory(SymmetricLayout.bytes_for(self.world_size, num_bytes)))

    def _meet(self, doing: str) -> None:
        """Make a call without contents, and look at its outcome."""
        kind = _kind(doing, None)
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
        """Wait for every peer's flag; where the host looks, raise what went wrong."""
        options = {"IS_MASKING": self._mask_lost, "ANY_CALL": is_any_call}
        if not (self.is_blocking or must_look):
            polls = int(self._timeout_s * POLLS_PER_S)
            has_clock = waited_R is not None and self.device.type != "cpu"  # the interpreter has none
            self._wait_flags(kind, waited_R, polls, IS_LAST=True, HAS_CLOCK=has_clock, **options)
            return
        begin = time.monotonic()
        self._poll(kind, begin, **options)
        if waited_R is not None:
            others = self.mask == 0
            others[self.rank] = False
            waited_R += others * int((time.monotonic() - begin) * 1e9)
        self.check(doing)

    def _poll(self, kind: int, begin: float, **options: Any) -> None:
        """Look until every flag has come, or the time is over."""
        is_interpreted, is_late = self.device.type == "cpu", False
        polls = _INTERPRETED_POLLS if is_interpreted else _POLLS_PER_LOOK
        while not is_late:
            is_late = time.monotonic() - begin > self._timeout_s
            self._wait_flags(kind, None, polls, IS_LAST=is_late, HAS_CLOCK=False, **options)
            if self._interruption is not None or bool(((self.arrived != 0) | (self.mask != 0)).all()):
                break
            if is_interpreted:
                time.sleep(_PAUSE_S)

    def _wait_flags(self, kind: int, waited_R: Tensor | None, polls: int, **options: Any) -> None:
        flags.wait_flags[(self.world_size,)](
            self.memory.peers, self.mask, self.arrived, self._trouble, waited_R, self.calls, self._stop.data_ptr(),
            self.rank, self.layout.half_bytes, kind, polls, **options, num_warps=1,
        )  # fmt: skip

    def _raise(self, found: dict[int, tuple[int, int]], doing: str) -> None:
        """Raise the worst of what went wrong: by rank, the call's number and a status."""
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
        at = (number & 1) * self.layout.half_bytes + self.layout.texts_at + rank * TEXT_BYTES
        return decode_refusal(bytes(self.memory.memory[at : at + TEXT_BYTES].tolist()).rstrip(b"\0"))


def _kind(doing: str, shape: LowLatencyShape | None) -> int:
    """Return what a flag says of a call beside its number, never _REFUSAL."""
    return max(1, zlib.crc32(f"{doing} {shape}".encode()) >> (32 - _KIND_BITS))
