"""Memory that all ranks of one host map, with signals to wait for in it and a check of which ranks are alive.

Rank 0 makes an anonymous file (memfd). The others open it through /proc while they connect in the bootstrap group.
It has no name, so not even kill -9 leaves anything behind, and it needs no room in /dev/shm, which is small in
containers (64 MB by default). Rejected for this reason: a named file in /dev/shm, unlinked after all have mapped it.

A peer is dead if its pid is gone, is a zombie, or has another start time. A rank that leaves, by an error or by
closing, publishes it in its state, so that peers do not wait until the timeout.
"""

import contextlib
import logging
import mmap
import os
import socket
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from dispatch.compiled import native
from dispatch.errors import DispatchError, DispatchTimeout, PeerLost, WireUnavailable
from dispatch.gathered import gather_values
from dispatch.wires import signals
from dispatch.wires.wire import RankTable

_LIVENESS_NS = 50_000_000  # time to wait before checking whether the peer is alive
_SPIN_NS = 50_000  # ranks of one step arrive within tens of microseconds; a futex wake takes about as long
_CLOSED, _LOST, _TIMED_OUT = 1, 2, 3  # states, shifted left by 32; the low half is the rank concerned

log = logging.getLogger(__name__)


class HostIdentity(NamedTuple):
    """Identity of a process. Two processes with equal hosts can share memory and see each other's pids."""

    host: tuple[str, str, str]  # boot id, host name, pid namespace
    pid: int
    start_ticks: int


def identify_process() -> HostIdentity:
    """Return the identity of this process, for its peers."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    host = (boot, socket.gethostname(), os.readlink("/proc/self/ns/pid"))
    return HostIdentity(host, os.getpid(), _start_ticks(os.getpid()) or 0)


def _start_ticks(pid: int) -> int | None:
    """Return a live process's start time in clock ticks since boot, or None if it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])  # proc(5): fields 3 and 22


class _Loss(NamedTuple):
    """Reason to stop waiting for a peer: the error to raise, and the state to publish to other ranks."""

    kind: int
    about: int
    error: DispatchError


class SharedSegment:
    """A mapping of `signals` followed by `num_bytes`. Opening is collective over `group`.

    Args:
        group: The bootstrap group; not kept.
        num_bytes: Size of the owner's memory after the signals; equal on all ranks.
        timeout_s: How long to wait for a peer.

    Raises:
        WireUnavailable: The ranks are on several hosts, or the memory is missing or cannot be mapped; on every rank.
    """

    def __init__(self, group: dist.ProcessGroup, num_bytes: int, *, timeout_s: float) -> None:
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.timeout_s = timeout_s
        self._signals_bytes = signals.block_bytes(self.world_size) * self.world_size
        if native.is_supported():
            native.compile_all(*signals.KERNELS)
        total = self._signals_bytes + num_bytes
        self._peers, self._memory = _map_together(group, total)
        content = np.frombuffer(self._memory, dtype=np.uint8)
        self.memory = torch.from_numpy(content)  # the whole mapping; empty after close
        self.base: int = content.ctypes.data  # address of the signals
        self.place = (self.base, self.world_size, self.rank)  # first arguments of every function of `signals`
        self.start = self.base + self._signals_bytes  # address of the owner's memory
        cores = len(os.sched_getaffinity(0))
        self._spin_ns = _SPIN_NS if cores >= self.world_size else 0
        self._scratch = np.zeros(2, dtype=np.int64)
        self._scratch_address: int = self._scratch.ctypes.data
        self._has_left = self._has_closed = False
        self.interruption: DispatchError | None = None  # set by another thread; ends the wait

    def post(self, numbers: RankTable) -> None:
        """Publish a message with its number to every peer of the table. Local."""
        signals.post(*self.place, numbers.address)

    def wait(
        self, numbers: RankTable, doing: str, timeout_s: float | None = None, mask: RankTable | None = None
    ) -> None:
        """Wait for the messages of `numbers`.

        Args:
            mask: If given, set to 1 for a lost or late peer instead of raising. The peer's entry in `numbers`
                then becomes 0.

        Raises:
            PeerLost, DispatchTimeout: Also published to the other peers, so that they raise too.
        """
        late = self._wait_slice(numbers)
        if late < 0:
            return
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        while late >= 0:
            if self.interruption is not None:
                self._leave(_CLOSED, self.rank)
                raise self.interruption
            loss = self._find_loss(late, timeout_s)
            if loss is None and time.monotonic() >= deadline:
                loss = _Loss(_TIMED_OUT, late, DispatchTimeout(late, timeout_s, doing))
            if loss is None or self._has_come(numbers, late):  # the peer posted its message before it left
                late = self._wait_slice(numbers)
            elif mask is None:
                self._leave(loss.kind, loss.about)
                raise loss.error
            else:
                log.warning("rank %d continues without rank %d: %s", self.rank, late, loss.error)
                mask.values[late], numbers.values[late] = 1, 0
                late = signals.missing(*self.place, numbers.address)

    def close(self) -> None:
        """Unmap the memory and wake waiting peers. Addresses in it are invalid afterwards.

        If a tensor in this memory still exists, the memory stays mapped until the tensor is deleted.
        """
        if self._has_closed:
            return
        self._has_closed = True
        self._leave(_CLOSED, self.rank)
        self.memory = torch.empty(0, dtype=torch.uint8)
        with contextlib.suppress(BufferError):
            self._memory.close()
        del self._memory

    def _wait_slice(self, numbers: RankTable) -> int:
        place = self.place
        return signals.wait_all(*place, numbers.address, self._spin_ns, _LIVENESS_NS, self._scratch_address)

    def _has_come(self, numbers: RankTable, peer: int) -> bool:
        number = int(numbers.values[peer])
        return signals.flag_of(*self.place, peer, number) >= number

    def _find_loss(self, late: int, timeout_s: float) -> "_Loss | None":
        """Check whether a late peer has left or is dead."""
        state = signals.state_of(self.base, self.world_size, late)
        kind, about = state >> 32, state & 0xFFFFFFFF
        if kind in (_TIMED_OUT, _LOST) and about == self.rank:
            return _Loss(_LOST, late, PeerLost(late, "it stopped waiting for this rank, which was too late"))
        if kind == _TIMED_OUT:
            doing = f"an exchange for which rank {late} stopped waiting"
            return _Loss(_TIMED_OUT, about, DispatchTimeout(about, timeout_s, doing))
        if kind == _LOST:
            return _Loss(_LOST, about, PeerLost(about, f"rank {late} reported it"))
        if kind == _CLOSED:
            return _Loss(_LOST, late, PeerLost(late, "it has closed its wire"))
        peer = self._peers[late]
        if _start_ticks(peer.pid) != peer.start_ticks:
            return _Loss(_LOST, late, PeerLost(late, f"its process {peer.pid} is gone"))
        return None

    def _leave(self, kind: int, about: int) -> None:
        if not self._has_left:
            self._has_left = True
            signals.set_state(*self.place, kind << 32 | about)


def _map_together(group: dist.ProcessGroup, total: int) -> tuple[list[HostIdentity], mmap.mmap]:
    """Make the file on rank 0 and map it on every rank. Returns only if all ranks succeeded."""
    problem, descriptor = _make_file(total) if dist.get_rank(group) == 0 else ("", -1)
    try:
        offers = gather_values((identify_process(), problem, descriptor), group)
        peers = [HostIdentity(tuple(host), *others) for (host, *others), _, _ in offers]
        _, problem, remote = offers[0]
        strangers = [r for r, peer in enumerate(peers) if peer.host != peers[0].host]
        memory = None
        if strangers:
            problem = f"ranks {strangers} are not on the host of rank 0, {peers[0].host[1]}"
        elif not problem:
            problem, memory = _map_file(f"/proc/{peers[0].pid}/fd/{remote}", total)
        problems = gather_values(problem, group)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    first = next((text for text in problems if text), None)
    if first or memory is None:
        raise WireUnavailable(f"shared memory cannot be used: {first}")
    return peers, memory


def available_bytes() -> int:
    """Return the memory that the kernel can provide without swapping (proc(5), MemAvailable), in bytes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def _make_file(total: int) -> tuple[str, int]:
    """Reserve the memory now: if a page were missing later, the process would get SIGBUS instead of an error.

    The size is checked first. A memfd has no size limit, and reserving more than the available memory does not fail: it
    takes all memory and the kernel kills processes at random.
    """
    if not native.is_supported():
        return "it needs Linux on x86-64 or aarch64", -1
    available = available_bytes()
    if total > available // 2:
        return f"{total} bytes are needed, more than half of the {available} that are available", -1
    descriptor = os.memfd_create("wideep-dispatch", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, total)
    except OSError as error:
        os.close(descriptor)
        return f"{total} bytes are needed and cannot be reserved ({error.strerror})", -1
    return "", descriptor


def _map_file(path: str, total: int) -> tuple[str, mmap.mmap | None]:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        return f"the mapping of rank 0 cannot be opened ({error.strerror}: {path})", None
    try:
        return "", mmap.mmap(descriptor, total)
    except OSError as error:
        return f"{total} bytes cannot be mapped ({error.strerror})", None
    finally:
        os.close(descriptor)
