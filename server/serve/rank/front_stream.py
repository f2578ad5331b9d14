"""This rank's connection to the front: pass its commands to the engine and results back, over successive links.

If the connection breaks, the rank drops its open requests, because their clients are disconnected too. It retries for up to
`front_recovery_timeout_s` until the supervisor has restarted the front, then sends the new front the state that it needs.
If the front closes the stream, it has dropped this rank, and the process ends. `link.rank_link` implements the connection.

With a standby (`--standby`), the rank tries both fronts in turn. The one on the standby's node accepts ranks only after it has taken
over; from then on it is this rank's only front.
"""

import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple, assert_never

from expert_placement.placement import Placement
from moe.expert_weights import read_slot
from scheduler.assembly import Assembled
from scheduler.epochs.orders import Order
from scheduler.moves.reports import ExpertMap, MoveState, PlacementReport
from scheduler.policy.config import EngineConfig
from scheduler.policy.request import (
    AdapterOrder,
    Expected,
    ForgetPrefixes,
    MemoryOrder,
    RankStats,
    RequestOutput,
    Withdraw,
)
from scheduler.weights.versions import WeightOrder
from server.link.messages import (
    Abort,
    DropPlacement,
    Expect,
    ExpertsRead,
    MemorySwitched,
    MemoryUse,
    PlacementUpdate,
    Prepare,
    RankFacts,
    ReadExperts,
    Served,
    StepOutput,
    Stop,
    Submit,
    ToRank,
)
from server.link.rank_link import RETRY_S, FrontLost, LinkError, RankLink, RefusedError, reach
from server.machine.lines import say
from server.options.pools import Pool
from server.serve.children import FRONT_IS_GONE
from server.serve.store.rendezvous import NODE_VARIABLE


def num_restarts_of(environment: Mapping[str, str]) -> int:
    """Return how often the supervisor has restarted this rank's engine."""
    return int(environment.get("WIDEEP_RESTARTS", "0"))


# Seconds for the port of one of two fronts to accept a connection, and for the front there to accept this rank.
_REACH_S, _FIRST_S, _STANDBY_S = 0.3, 5.0, 1.0


class StandbyFront(NamedTuple):
    """The front on the standby's node."""

    addresses: dict[str, str]  # as those of the leading front
    on_taken_over: Callable[[], None]  # called when this rank attaches to it, before its first order


class FrontStream:
    """This rank's connection to the front: one link at a time, replaced when a killed front is back."""

    def __init__(
        self,
        built: Assembled,
        config: EngineConfig,
        front: dict[str, str],
        environment: Mapping[str, str],
        *,
        pool: Pool,
        num_ranks: int,
        cluster_key: bytes | None = None,
        standby: StandbyFront | None = None,
        newest_epoch: int = 0,
        leads: bool = True,
    ) -> None:
        """Prepare the link; `link.open` attaches.

        Args:
            front: The front's addresses and its token.
            pool: This rank's pool. `num_ranks`: Number of ranks of all pools.
            environment: The environment from the supervisor, with the number of restarts.
            standby: The front that takes over if the node of this one is lost.
            newest_epoch: Of the pool, before this engine was restarted.
            leads: Whether this front orders epochs and memory. Of several fronts, one does.
        """
        self._built, self._config, self._front, self._cluster_key = built, config, front, cluster_key
        self.standby, self._leads = standby, leads  # the former until it has taken over
        self._epoch = self._sent_bytes = 0
        self._home = None if num_restarts_of(environment) else built.relocation.placement
        self._lock = threading.Lock()  # between the step loop's thread and the link's
        self._open_ids: set[str] = set()  # requests of the current link
        self._cut_off = Counter[str]()  # requests of broken links, until the engine has ended them
        self._pool, self._num_ranks = pool.ranks, config.world_size
        self._facts = RankFacts(
            rank=pool.ranks[config.rank],
            world_size=num_ranks,
            host=socket.gethostname(),
            pid=os.getpid(),
            max_model_len=built.max_model_len,
            num_blocks=built.num_blocks,
            block_tokens=built.runner.step.block_tokens,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            device=config.device,
            num_restarts=num_restarts_of(environment),
            restartable_in_s=float(environment.get("WIDEEP_RESTARTABLE_IN_S", "0")),
            node=environment.get(NODE_VARIABLE, ""),
            kv_peer=built.kv_peer,
            kv_generation=built.engine.kv_generation,
        )
        if self._facts.num_restarts:
            loaded = self._served()._replace(epoch=newest_epoch, home=built.relocation.placement)
            self._facts = replace(self._facts, loaded=loaded)
        self.link = self._make_link(self._facts)
        if leads:
            built.read_ahead.on_read = lambda version, problem: self.link.send(ExpertsRead(version, problem))
            built.engine.memory.on_switched = lambda number: self.link.send(MemorySwitched(number))
            built.engine.weights.on_report = lambda report: self.link.send(report)
            if built.engine.adapters is not None:
                built.engine.adapters.on_report = lambda report: self.link.send(report)

    def _make_link(self, facts: RankFacts, front: dict[str, str] | None = None) -> RankLink:
        front = front or self._front
        return RankLink(
            front["ranks_address"],
            front["token"],
            facts,
            self.receive,
            pool=self._pool,
            cluster_key=self._cluster_key,
        )

    def attach(self, timeout_s: float, *, is_restart: bool = False) -> None:
        """Attach to the front, within `timeout_s`.

        Args:
            is_restart: Whether the service ran before this engine.

        Raises:
            LinkError: No front answered, or it refused this rank.
        """
        self.link.open(timeout_s)

    def close(self, reason: str = "") -> None:
        """Send what is queued and a goodbye with `reason` (empty after a requested stop), and disconnect."""
        self.link.close(reason)

    def send_start(self) -> None:
        """Send the experts and the placement at the start."""
        placement = self._built.relocation.placement
        report = PlacementReport(
            rank=0, version=placement.version, state=MoveState.SERVING, digest=placement.digest()
        )
        self.link.send(self._built.experts)
        self.link.send(PlacementUpdate(report, placement, self._expert_bytes()))

    def send(self, outputs: list[RequestOutput], stats: RankStats) -> None:
        """Send a step's outputs, except those for requests of a broken link: the front has since assigned these to other
        ranks, or to this rank again under the same ids."""
        with self._lock:
            self.link.send(StepOutput([output for output in outputs if self._is_told(output)], stats))

    def _note_open(self, request_id: str) -> None:
        self._open_ids.add(request_id)

    def _is_told(self, output: RequestOutput) -> bool:
        """Return whether the front waits for this output, and record ends. The engine ends each request exactly once."""
        request_id = output.request_id
        is_end = output.finish_reason is not None or output.is_returned
        is_told = not self._cut_off[request_id]
        if is_end and is_told:
            self._open_ids.discard(request_id)
        elif is_end:
            self._cut_off[request_id] -= 1
            self._cut_off += Counter()  # removes zero counts
        return is_told

    def report(self, report: PlacementReport) -> None:
        """Send the outcome of a placement change; rank 0 also sends the experts' new slots."""
        placement = self._built.relocation.placement
        if report.state is MoveState.SERVING:
            self._note_home(placement, placement.num_ranks)
            if report.rank == 0:
                self.link.send(_experts_now(self._built))
        self.link.send(PlacementUpdate(report))

    def send_memory(self, resident_bytes: int) -> None:
        """Send the process's memory if the front does not have about the same figure already."""
        if abs(resident_bytes - self._sent_bytes) > resident_bytes / 100:
            self._sent_bytes = resident_bytes
            self.link.send(MemoryUse(resident_bytes))

    def receive(self, message: ToRank | FrontLost) -> None:
        """Handle a message of the front, on the reader thread of the link."""
        engine, relocation = self._built.engine, self._built.relocation
        match message:
            case Submit(request):
                self._note_open(request.request_id)
                engine.submit(message.request_at(time.monotonic()))
            case Expect(request_id, submit, in_step):
                comes = None if submit is None else submit.request_at(time.monotonic())
                engine.expect(Expected(request_id, comes, in_step))
            case Abort(request_id):
                engine.abort(request_id)
            case Withdraw():
                engine.withdraw(message)
            case Stop():
                engine.stop()
            case Prepare(placement):
                relocation.prepare(placement)
            case ReadExperts(placement):
                self._built.read_ahead.begin(placement, self._config.rank)
            case DropPlacement(version):
                relocation.drop(version)
                self._built.read_ahead.drop(version)
            case Order(epoch, members, placement):
                self._epoch = max(self._epoch, epoch)
                self._num_ranks = message.num_ranks or self._num_ranks
                self._note_home(placement, len(members))
                engine.regroup(message)
            case ForgetPrefixes(generation):
                engine.forget_prefixes(generation)
            case MemoryOrder():
                engine.memory.order(message)
            case WeightOrder():
                engine.weights.order(message)
            case AdapterOrder():
                assert engine.adapters is not None, "the front and its ranks have the same options"
                engine.adapters.order(message)
            case FrontLost(reason, is_broken):
                self._lose_front(reason, is_broken=is_broken)
            case _:
                assert_never(message)

    def _lose_front(self, reason: str, *, is_broken: bool) -> None:
        """Reconnect to the front, or end this process, because the step loop may be waiting for other ranks."""
        rank = self._facts.rank
        say(f"rank {rank}: {reason}", error=True)
        if not is_broken:  # the front has dropped this rank
            os._exit(1)
        with self._lock:
            cut_off, self._open_ids = self._open_ids, set()
            self._cut_off.update(cut_off)
        for request_id in cut_off:  # their clients were disconnected with the front
            self._built.engine.abort(request_id)
        if self._leads:  # another front has staged no weights
            self._built.engine.weights.forget_staged()
        status = self._come_back(time.monotonic() + self._config.front_recovery_timeout_s)
        if status:
            os._exit(status)
        say(f"rank {rank}: the front is back", error=True, level="info")

    def _come_back(self, until_s: float) -> int:
        """Attach to the restarted front. Returns the exit status if this fails for good, otherwise 0."""
        while (left_s := until_s - time.monotonic()) > 0:
            # Assigned before `open`: the front's first order may arrive before `open` returns.
            loaded = (
                None if self._epoch else self._facts.loaded
            )  # a pool that has not met has no other placement
            facts = replace(
                self._facts,
                served=self._served(),
                loaded=loaded,
                memory=self._built.engine.memory.ordered,
                weights=self._built.engine.weights.newest,
                forgotten=self._built.engine.forgotten,
                kv_generation=self._built.engine.kv_generation,
            )
            self._sent_bytes = 0
            try:
                self._open_link(facts, left_s)
            except RefusedError as error:
                say(f"rank {self._facts.rank}: {error}", error=True)
                return 1
            except LinkError:
                time.sleep(min(left_s, RETRY_S))
                continue
            return 0
        return FRONT_IS_GONE

    def _open_link(self, facts: RankFacts, left_s: float) -> None:
        """Attach to the front, or to that of the standby if the first one cannot be reached.

        Raises:
            LinkError: Neither has accepted this rank, or one refused it.
        """
        standby = self.standby
        if standby is None:
            self.link = self._make_link(facts)
            self.link.open(left_s)
            return
        try:
            reach(self._front["ranks_address"], _REACH_S)
        except LinkError:
            reach(standby.addresses["ranks_address"], _REACH_S)
            self.link = self._make_link(facts, standby.addresses)
            self.link.on_welcome = standby.on_taken_over
            self.link.open(min(left_s, _STANDBY_S))
            self._front, self.standby = standby.addresses, None
            if self._leads:
                say(f"rank {self._facts.rank}: the standby has taken over", error=True, level="info")
            return
        self.link = self._make_link(facts)
        self.link.open(min(left_s, _FIRST_S))

    def _served(self) -> Served:
        built = self._built
        return Served(
            self._epoch,
            built.relocation.placement.version,
            self._home,
            self._expert_bytes(),
            _experts_now(built),
        )

    def _expert_bytes(self) -> int:
        """Return the size of one expert of one layer."""
        return read_slot(self._built.model.layers[0], 0).num_bytes

    def _note_home(self, placement: Placement, num_members: int) -> None:
        if num_members == self._num_ranks:
            self._home = placement


def _experts_now(built: Assembled) -> ExpertMap:
    placement = built.relocation.placement
    return built.experts._replace(
        version=placement.version, num_ranks=placement.num_ranks, slot_expert=placement.slot_expert
    )
