"""Memory that all ranks of one host map, with the signals to wait in it and the watch over who is alive.

Rank 0 makes an anonymous file (memfd) and the others open it through /proc while they meet in the bootstrap group.
It has no name, so not even kill -9 leaves anything behind, and it needs no room in /dev/shm, which containers keep
small (64 MB by default). Rejected for that: a named file in /dev/shm that is unlinked once all have mapped it.

A peer is dead when its pid is gone, is a zombie, or has another start time. A rank that leaves, by an error or by
closing, says so in its state, so that nobody waits for it until the time-out.
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

from dispatch import native
from dispatch.errors import DispatchError, DispatchTimeout, PeerLost, WireUnavailable
from dispatch.gathered import gather_values
from dispatch.wires import signals
from dispatch.wires.wire import RankTable

_LIVENESS_NS = 50_000_000  # how long to wait before looking whether the peer lives
_SPIN_NS = 50_000  # ranks of one step arrive within tens of microseconds; a futex wake costs about as much
_CLOSED, _LOST, _TIMED_OUT = 1, 2, 3  # states, shifted left by 32; the low half is the rank it is about

log = logging.getLogger(__name__)


class HostIdentity(NamedTuple):
    """Two processes with equal hosts can share memory and see each other's pids."""

    host: tuple[str, str, str]  # boot id, host name, pid namespace
    pid: int
    start_ticks: int


def identify_process() -> HostIdentity:
    """Describe this process to its peers."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    host = (boot, socket.gethostname(), os.readlink("/proc/self/ns/pid"))
    return HostIdentity(host, os.getpid(), _start_ticks(os.getpid()) or 0)


def _start_ticks(pid: int) -> int | None:
    """Start time of a live process in clock ticks since boot; None if it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])  # proc(5): fields 3 and 22


class _Loss(NamedTuple):
    """Why a peer is not waited for any longer, as this rank raises it and as it tells the others."""

    kind: int
    about: int
    error: DispatchError


class SharedSegment:
    """A mapping of `signals` followed by `num_bytes`. Opening is collective over `group`.

    Args:
        group: the bootstrap group; not kept.
        num_bytes: what the owner needs behind the signals; equal on all ranks.
        timeout_s: how long a peer may keep this rank waiting.

    Raises:
        WireUnavailable: not one host, or the memory cannot be had or mapped; on every rank alike.
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
        self.memory = torch.from_numpy(content)  # all of it; of no bytes once closed
        self.base: int = content.ctypes.data  # address of the signals
        self.place = (self.base, self.world_size, self.rank)  # how every function of `signals` begins
        self.start = self.base + self._signals_bytes  # address of the owner's bytes
        cores = len(os.sched_getaffinity(0))
        self._spin_ns = _SPIN_NS if cores >= self.world_size else 0
        self._scratch = np.zeros(2, dtype=np.int64)
        self._scratch_address: int = self._scratch.ctypes.data
        self._has_left = self._has_closed = False
        self.interruption: DispatchError | None = None  # set by another thread: ends what is waited for

    def post(self, numbers: RankTable) -> None:
        """Publish a message to every peer of the table, with its number. Local."""
        signals.post(*self.place, numbers.address)

    def wait(
        self,
        numbers: RankTable,
        doing: str,
        timeout_s: float | None = None,
        mask: RankTable | None = None,
    ) -> None:
        """Wait for the messages of `numbers`.

        Args:
            mask: where to set a 1 for a peer that is lost or late, instead of raising; its entry in `numbers`
                becomes 0 then.

        Raises:
            PeerLost, DispatchTimeout: and tells the other peers, so that they raise too.
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
            if loss is None or self._has_come(numbers, late):  # the peer said what it had to, and then left
                late = self._wait_slice(numbers)
            elif mask is None:
                self._leave(loss.kind, loss.about)
                raise loss.error
            else:
                log.warning("rank %d goes on without rank %d: %s", self.rank, late, loss.error)
                mask.values[late], numbers.values[late] = 1, 0
                late = signals.missing(*self.place, numbers.address)

    def close(self) -> None:
        """Unmap, and tell peers that may wait. Addresses taken from it are dead afterwards.

        Memory of which somebody still holds a tensor stays mapped until that is gone.
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
        """Look whether a peer that is late has left or is dead."""
        state = signals.state_of(self.base, self.world_size, late)
        kind, about = state >> 32, state & 0xFFFFFFFF
        if kind in (_TIMED_OUT, _LOST) and about == self.rank:
            return _Loss(_LOST, late, PeerLost(late, "it gave this rank up, which was too late"))
        if kind == _TIMED_OUT:
            doing = f"an exchange that rank {late} gave up"
            return _Loss(_TIMED_OUT, about, DispatchTimeout(about, timeout_s, doing))
        if kind == _LOST:
            return _Loss(_LOST, about, PeerLost(about, f"rank {late} found that out"))
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
    """Make the file on rank 0, map it everywhere, and return only if all could."""
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
    """Memory that the kernel says can be had without swapping (proc(5), MemAvailable)."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def _make_file(total: int) -> tuple[str, int]:
    """Reserve the memory now: a page that cannot be had later is a SIGBUS, not an error.

    The size is checked first. A memfd has no limit of its own, and reserving more than there is does not fail: it
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
