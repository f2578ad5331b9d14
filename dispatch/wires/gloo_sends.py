"""Two ways to send the parts of an exchange over gloo: all together, or peer by peer if lost ranks are to be masked.

Together is one all-to-all. Peer by peer would be faster on an idle machine (2 ranks, 4 KB: 0.23 ms against 0.31), but
costs a whole scheduler tick (4 ms) if ranks share their cores with other work. The error of an all-to-all does not name
the failed rank, so connections are probed afterwards. After a rank died, no all-to-all works, but sends and receives
between two live ranks do, so peer by peer can mask a rank that died.
A rank that hangs cannot be masked: after a timeout, gloo closes all connections of the rank that waited.
"""

import logging
import time
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from dispatch.errors import DispatchError, DispatchTimeout, PeerLost
from dispatch.wires.wire import RankTable

_TAG_PART, _TAG_REST, _TAG_PROBE = 0x57E8, 0x57E9, 0x57EA
_NEARLY = 0.9  # share of the timeout
_DOING = "an exchange over gloo"
_LOOK_EVERY = timedelta(seconds=0.1)  # interval of checks for an interruption
_MAX_CUTS = 256  # lengths are multiples of 64, and repeat between small steps

log = logging.getLogger(__name__)

Rests = list[tuple[int, Tensor]]
"""Peers, each with the bytes to send to it or receive from it after the part."""


class _Sends:
    """Common part of both ways. `incoming` holds a part of `part_bytes` for each peer, in order of rank."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        incoming: Tensor,
        part_bytes: int,
        mask: RankTable,
        *,
        timeout_s: float,
    ) -> None:
        self._group = group
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._peers = [peer for peer in range(self._world_size) if peer != self._rank]
        self._incoming, self._part_bytes, self._mask = incoming, part_bytes, mask
        self._timeout_s = timeout_s
        self.interruption: DispatchError | None = None  # set by another thread: ends a wait

    def exchange_rests(self, sends: Rests, receives: Rests) -> None:
        """Send and receive the rests of messages that are longer than a part. Raises or masks as `finish` does.

        With more than two ranks, a timeout names no rank: the late peer may itself be waiting for a third rank.
        """
        self._deadline, suspect = time.monotonic() + self._timeout_s, self._only_peer
        works = [self._start("recv", memory, peer, _TAG_REST) for peer, memory in receives]
        works += [self._start("send", memory, peer, _TAG_REST) for peer, memory in sends]
        peers = [peer for peer, _ in [*receives, *sends]]
        for peer, work in zip(peers, works, strict=True):
            self._finish(work, peer, suspect)

    def close(self) -> None:
        """Release the group and all pending operations, which keep connections open. It cannot be used afterwards.

        An error raised here keeps this object alive for as long as the error is referenced.
        """
        vars(self).clear()

    @property
    def _only_peer(self) -> int | None:
        return self._peers[0] if self._world_size == 2 else None

    def _start(self, verb: str, memory: Tensor, peer: int, tag: int) -> Any:
        """Start to send or receive. Returns None if the peer is masked or already lost."""
        if self._mask.values[peer]:
            return None
        try:
            return getattr(self._group, verb)([memory], peer, tag)
        except RuntimeError as error:
            self._lose(peer, error)
            return None

    def _finish(self, work: Any, peer: int, suspect: int | None) -> None:
        """Wait for a message until the deadline. A timeout is attributed to `suspect`."""
        if work is None or self._mask.values[peer]:
            return
        try:
            work.wait(timedelta(seconds=max(self._deadline - time.monotonic(), 0.001)))
        except RuntimeError as error:
            if _is_timeout(_first_line(error)):
                raise DispatchTimeout(suspect, self._timeout_s, _DOING) from error
            self._lose(peer, error)

    def _lose(self, peer: int, error: RuntimeError) -> None:
        """Raise PeerLost. (`PeerByPeer` masks the peer instead.)"""
        self._check_time(error)
        raise PeerLost(peer, _first_line(error)) from error

    def _check_interruption(self) -> None:
        if self.interruption is not None:
            raise self.interruption

    def _check_time(self, error: RuntimeError) -> None:
        """Raise the interruption, if any. Near the deadline, raise a timeout: another rank's closed the connections."""
        self._check_interruption()
        if time.monotonic() > self._deadline - (1 - _NEARLY) * self._timeout_s:
            raise DispatchTimeout(self._only_peer, self._timeout_s, _DOING) from error


class Together(_Sends):
    """One all-to-all."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        incoming: Tensor,
        part_bytes: int,
        mask: RankTable,
        *,
        timeout_s: float,
    ) -> None:
        super().__init__(group, incoming, part_bytes, mask, timeout_s=timeout_s)
        self._options = dist.AllToAllOptions()
        self._options.timeout = timedelta(seconds=timeout_s)
        self._cut_of, self._cuts = incoming, dict[int, Tensor]()
        self._received = [0 if rank == self._rank else part_bytes for rank in range(self._world_size)]

    def start(self, outgoing: Tensor, split: list[int]) -> None:
        """Start to exchange parts. `outgoing` holds messages of `split` [R] bytes in rank order; 0 for this rank."""
        self._check_interruption()
        if 1 in self._mask.values.tolist():  # ndarray.any takes 25 us when its code is cold
            raise DispatchError(
                "a rank is masked; to continue without it, gloo needs a wire that was opened with mask_lost"
            )
        if max(split) > self._part_bytes:
            heads = [message[: self._part_bytes] for message in torch.split(outgoing[: sum(split)], split)]
            outgoing, split = torch.cat(heads), [len(head) for head in heads]
        self._deadline = time.monotonic() + self._timeout_s
        try:
            self._work = self._group.alltoall_base(
                self._incoming, self._cut(outgoing, sum(split)), self._received, split, self._options
            )
        except RuntimeError as error:
            self._fail(error)

    def finish(self) -> None:
        """Wait for every part.

        Raises:
            PeerLost, DispatchTimeout: With more than two ranks, a timeout names no rank.
        """
        while not self._has_ended():
            self._check_interruption()
        try:
            self._work.wait()
        except RuntimeError as error:
            self._fail(error)

    def _has_ended(self) -> bool:
        """Wait for the end of the all-to-all, also by an error, at most until the next check for an interruption."""
        try:
            self._work.wait(_LOOK_EVERY)
        except RuntimeError:  # the all-to-all failed, or only this wait is over
            return bool(self._work.is_completed())
        return True

    def _cut(self, outgoing: Tensor, num_bytes: int) -> Tensor:
        """Return outgoing[:num_bytes], cached: making it takes 20 us when torch's code is not in the CPU's cache."""
        if outgoing is not self._cut_of or len(self._cuts) > _MAX_CUTS:
            self._cut_of, self._cuts = outgoing, {}
        cut = self._cuts.get(num_bytes)
        if cut is None:
            self._cuts[num_bytes] = cut = outgoing[:num_bytes]
        return cut

    def _fail(self, error: RuntimeError) -> NoReturn:
        self._check_interruption()
        text = _first_line(error)
        if _is_timeout(text):
            raise DispatchTimeout(self._only_peer, self._timeout_s, _DOING) from error
        self._check_time(error)
        raise PeerLost(self._find_lost(), text) from error

    def _find_lost(self) -> int:
        """Find the lost peer: gloo refuses a receive from a peer if its connection is closed. Local."""
        self._probes = []  # accepted receives stay pending for the life of this object
        for peer in self._peers:
            try:
                probe = torch.empty(1, dtype=torch.uint8)
                self._probes.append((probe, self._group.recv([probe], peer, _TAG_PROBE)))
            except RuntimeError:
                return peer
        return self._peers[0]


class PeerByPeer(_Sends):
    """A send and a receive per peer. A lost peer is masked; a hung peer is an error."""

    def start(self, outgoing: Tensor, split: list[int]) -> None:
        """Start as `Together.start`."""
        self._check_interruption()
        self._deadline = time.monotonic() + self._timeout_s
        parts = zip(self._peers, torch.split(self._incoming, self._part_bytes), strict=True)
        self._works = [(peer, self._start("recv", memory, peer, _TAG_PART)) for peer, memory in parts]
        at = 0
        for peer, length in enumerate(split):
            if length > 0:
                head = outgoing[at : at + min(length, self._part_bytes)]
                self._works.append((peer, self._start("send", head, peer, _TAG_PART)))
            at += length

    def finish(self) -> None:
        """Wait for every part of peers that are alive.

        Raises:
            DispatchTimeout: A peer hangs; then all connections are closed.
        """
        for peer, work in self._works:
            self._finish(work, peer, suspect=peer)

    def _lose(self, peer: int, error: RuntimeError) -> None:
        self._check_time(error)
        log.warning("rank %d continues without rank %d: %s", self._rank, peer, _first_line(error))
        self._mask.values[peer] = 1


def _first_line(error: RuntimeError) -> str:
    return str(error).split("\n")[0]


def _is_timeout(text: str) -> bool:
    return "imed out" in text or "imeout" in text
