"""Changes of placement in tests: engines that serve while experts move, on every rank of a pool."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from expert_placement.config import EplbConfig
from expert_placement.moves import align
from expert_placement.placement import Placement
from scheduler.assembly import Assembled
from scheduler.moves.channel import PeerChannel
from scheduler.moves.reports import MoveState, PlacementReport
from scheduler.policy.request import RankStats, Request, RequestOutput
from tests.support.engines.serving import Served, build
from tests.support.placement.placements import random_placement

WAIT_S = 100.0
LOOK_EVERY_S = 0.05


@dataclass
class MovedRank:
    """What one rank delivered while experts moved."""

    served: Served = field(default_factory=Served)
    reports: list[PlacementReport] = field(default_factory=list)
    digest: str = ""  # of the last placement that served

    def states(self) -> list[tuple[int, MoveState]]:
        """Return versions and their states, in order."""
        return [(report.version, report.state) for report in self.reports]


class Intercepted:
    """A channel between movers. A test changes the data it sends, or acts before it receives."""

    def __init__(
        self,
        channel: PeerChannel,
        *,
        sending: Callable[[Tensor], Tensor] = lambda data: data,
        receiving: Callable[[], None] = lambda: None,
    ) -> None:
        self.channel, self._sending, self._receiving = channel, sending, receiving

    def send(self, data: Tensor, peer: int) -> None:
        self.channel.send(self._sending(data), peer)

    def receive(self, data: Tensor, peer: int) -> None:
        self._receiving()
        self.channel.receive(data, peer)

    def close(self) -> None:
        self.channel.close()


def targets(placement: Placement, count: int) -> list[Placement]:
    """Return placements to move through in turn."""
    made, before = [], placement
    for index in range(count):
        new = random_placement(
            before.num_layers, before.num_experts, before.num_ranks, before.slots_per_rank, seed=50 + index
        )
        made.append(align(new, before).with_version(before.version + 1))
        before = made[-1]
    return made


def build_with_copies(directory: Path, slots_per_rank: int, **settings: Any) -> Assembled:
    """Assemble an engine of ranks with spare slots. `max_bytes_per_step` is a field of --eplb-config."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    redundant = slots_per_rank * world_size - 8  # all tiny families of these tests have 8 experts
    eplb = EplbConfig(
        num_redundant_experts=redundant, max_bytes_per_step=settings.pop("max_bytes_per_step", 1 << 20)
    )
    return build(directory, eplb_config=eplb, max_model_len=160, **settings)


class Moves:
    """Moves through placements while an engine serves. Each move starts some steps after the end of the previous one.

    It replaces the doorbell: ranks that would sleep take the next wave of requests, or wait for experts.
    """

    def __init__(
        self, built: Assembled, wanted: Sequence[Placement], *, every: int = 3, doomed: Sequence[int] = ()
    ) -> None:
        """`doomed` are versions that the test makes fail on some rank, so that all ranks must drop them."""
        self.moved = MovedRank()
        self._built, self._every, self._doomed = built, every, set(doomed)
        self._coming, self._steps = list(wanted), 0
        self._open: int | None = None  # version in progress
        self._news = threading.Event()  # set when a report arrives
        built.relocation.on_report = self._take_report

    def serve(self, *waves: Sequence[Request]) -> MovedRank:
        """Serve waves of requests until they and the moves are done. Collective."""
        engine: Any = self._built.engine
        engine.waves.extend(list(wave) for wave in waves)
        engine._doorbell = self
        engine.run(self._on_step)
        self.moved.digest = self._built.relocation.placement.digest()
        return self.moved

    def wait_for_end(self, version: int) -> None:
        """Wait until this rank has reported the end of a move. Poll for it like the rank's next header."""

        def has_ended() -> bool:
            self._built.relocation.version_to_post()
            return any(v == version and state is not MoveState.VERIFIED for v, state in self.moved.states())

        self._until(has_ended, f"placement {version} has no end")

    def ring(self, step: int) -> None:
        """Do nothing: no rank sleeps."""

    def wait(self, step: int) -> None:
        """Start the next wave, or wait until this rank has something to report."""
        engine: Any = self._built.engine
        if engine.waves:
            for request in engine.waves.popleft():
                engine.submit(request)
        elif self._open is not None or self._coming:
            self._until(self._has_something_to_say, f"placement {self._open} does not come")
        else:
            engine.stop()

    def _until(self, condition: Callable[[], bool], problem: str) -> None:
        """Wait until a report makes the condition true. Hold no lock: the condition takes the relocation's, under which
        reports are made."""
        until_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < until_s, f"{problem}; states: {self.moved.states()}"
            self._news.wait(LOOK_EVERY_S)
            self._news.clear()

    def _has_something_to_say(self) -> bool:
        """Return True also for a report already made: other ranks may be ready now, and no doorbell rings here."""
        relocation: Any = self._built.relocation
        return self._open is None or relocation.has_news or relocation._posted_version == self._open

    def _take_report(self, report: PlacementReport) -> None:
        self.moved.reports.append(report)
        if report.version in self._doomed and report.state is MoveState.VERIFIED:
            threading.Thread(target=self._built.relocation.drop, args=(report.version,)).start()
        if report.state is not MoveState.VERIFIED:
            self._open = None
        self._news.set()

    def _on_step(self, outputs: list[RequestOutput], stats: RankStats) -> None:
        served = self.moved.served
        served.outputs += outputs
        served.stats.append(stats)
        for output in outputs:
            served.token_ids.setdefault(output.request_id, []).extend(output.token_ids)
        self._steps += 1
        if self._coming and self._open is None and (self._steps >= self._every or not self._has_waves):
            self._steps, target = 0, self._coming.pop(0)
            self._open = target.version
            self._built.relocation.prepare(target)

    @property
    def _has_waves(self) -> bool:
        engine: Any = self._built.engine
        return bool(engine.waves)
