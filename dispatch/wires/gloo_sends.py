"""How the parts of an exchange travel over gloo: all together, or peer by peer where the lost are to be masked.

Together is one all-to-all. Peer by peer would be faster on an idle machine (2 ranks, 4 KB: 0.23 ms against 0.31), but
costs a whole scheduler tick (4 ms) where ranks share their cores with anything else. An all-to-all does not say who
failed, so that is asked for afterwards, and none works once a rank has died. Between two that live, sends and
receives go on working; so that is the way to mask a rank that died.
A rank that hangs cannot be masked: after a time-out gloo closes all connections of the rank that waited.
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
_NEARLY = 0.9  # of a time-out
_DOING = "an exchange over gloo"
_MAX_CUTS = 256  # lengths are multiples of 64 and repeat from step to step while steps are small

log = logging.getLogger(__name__)

Rests = list[tuple[int, Tensor]]
"""Peers with what is to be sent to them, or received from them, behind the part."""


class _Sends:
    """What both ways share. `incoming` holds a part of `part_bytes` for each peer, in order of rank."""

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
        self.interruption: DispatchError | None = None  # set by another thread: raised when a wait ends badly

    def exchange_rests(self, sends: Rests, receives: Rests) -> None:
        """Send and receive what is longer than a part. Raises or masks as `finish` does.

        Above two ranks a time-out names nobody: who is late here may itself be kept waiting by a third.
        """
        self._deadline, suspect = time.monotonic() + self._timeout_s, self._only_peer
        works = [self._start("recv", memory, peer, _TAG_REST) for peer, memory in receives]
        works += [self._start("send", memory, peer, _TAG_REST) for peer, memory in sends]
        peers = [peer for peer, _ in [*receives, *sends]]
        for peer, work in zip(peers, works, strict=True):
            self._finish(work, peer, suspect)

    def close(self) -> None:
        """Be of no more use: let go of the group and of all that is under way, which keeps connections open.

        An error that was raised here holds this object for as long as anybody looks at it.
        """
        vars(self).clear()

    @property
    def _only_peer(self) -> int | None:
        return self._peers[0] if self._world_size == 2 else None

    def _start(self, verb: str, memory: Tensor, peer: int, tag: int) -> Any:
        """Start to send or receive; None if the peer is masked, or lost by now."""
        if self._mask.values[peer]:
            return None
        try:
            return getattr(self._group, verb)([memory], peer, tag)
        except RuntimeError as error:
            self._lose(peer, error)
            return None

    def _finish(self, work: Any, peer: int, suspect: int | None) -> None:
        """Wait for a message until the deadline; a time-out is laid to `suspect`."""
        if work is None or self._mask.values[peer]:
            return
        try:
            work.wait(timedelta(seconds=max(self._deadline - time.monotonic(), 0.001)))
        except RuntimeError as error:
            if _is_timeout(_first_line(error)):
                raise DispatchTimeout(suspect, self._timeout_s, _DOING) from error
            self._lose(peer, error)

    def _lose(self, peer: int, error: RuntimeError) -> None:
        """Raise, or mask the peer."""
        self._check_time(error)
        raise PeerLost(peer, _first_line(error)) from error

    def _check_interruption(self) -> None:
        if self.interruption is not None:
            raise self.interruption

    def _check_time(self, error: RuntimeError) -> None:
        """Raise what another thread gave up for. Take an error when the time-out is nearly over for that of another rank, which closed its connections."""
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
        """Start to exchange parts: messages of `split` [R] bytes, 0 for this rank, as they lie in `outgoing`."""
        self._check_interruption()
        if 1 in self._mask.values.tolist():  # ndarray.any takes 25 us when its code is cold
            raise DispatchError(
                "a rank is masked, and this wire was opened without mask_lost, by which gloo can do without it"
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
            PeerLost, DispatchTimeout: above two ranks, a time-out does not say whose.
        """
        try:
            self._work.wait()
        except RuntimeError as error:
            self._fail(error)

    def _cut(self, outgoing: Tensor, num_bytes: int) -> Tensor:
        """Return outgoing[:num_bytes]; to make it anew takes 20 us when torch's code is cold."""
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
        """Ask the connections: gloo refuses a receive from a peer whose connection is closed. Local."""
        self._probes = []  # what the others accept stays pending, for as long as this object lives
        for peer in self._peers:
            try:
                probe = torch.empty(1, dtype=torch.uint8)
                self._probes.append((probe, self._group.recv([probe], peer, _TAG_PROBE)))
            except RuntimeError:
                return peer
        return self._peers[0]


class PeerByPeer(_Sends):
    """A send and a receive per peer. A peer that is lost is masked; one that hangs is an error."""

    def start(self, outgoing: Tensor, split: list[int]) -> None:
        """See `Together.start`."""
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
        """Wait for every part of those that live.

        Raises:
            DispatchTimeout: a peer hangs; all connections are closed then.
        """
        for peer, work in self._works:
            self._finish(work, peer, suspect=peer)

    def _lose(self, peer: int, error: RuntimeError) -> None:
        self._check_time(error)
        log.warning("rank %d goes on without rank %d: %s", self._rank, peer, _first_line(error))
        self._mask.values[peer] = 1


def _first_line(error: RuntimeError) -> str:
    return str(error).split("\n")[0]


def _is_timeout(text: str) -> bool:
    return "imed out" in text or "imeout" in text
