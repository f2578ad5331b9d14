"""This rank's way to the front: what the front says goes to the engine, and back, over as many links as it takes.

An engine whose connection to the front breaks drops its requests, whose clients are cut off as well, and asks for a while for
the front that its supervisor starts again; it tells that one what it has to know. One whose stream the front has closed was given
up, and ends. The connection itself is `link.rank_link`'s.
"""

import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from expert_placement.placement import Placement
from moe.expert_weights import read_slot
from scheduler.assembly import Assembled
from scheduler.epochs.orders import Order
from scheduler.moves.reports import ExpertMap, MoveState, PlacementReport
from scheduler.policy.config import EngineConfig
from scheduler.policy.request import RankStats, Request, RequestOutput
from server.lines import say
from server.link.messages import RankFacts, Served
from server.link.rank_link import RETRY_S, LinkError, RankLink, RefusedError
from server.process.children import FRONT_IS_GONE
from server.process.store.rendezvous import NODE_VARIABLE

FRONT_RETURN_S = 60.0  # that a front may take to be back, or a cable


def num_restarts_of(environment: Mapping[str, str]) -> int:
    """Return how often the supervisor has started this rank's engine again."""
    return int(environment.get("WIDEEP_RESTARTS", "0"))


class FrontStream:
    """This rank's way to the front: one link, and the next one when a front that was killed is back.

    Told by the link, on its reader thread, what the front says.
    """

    def __init__(
        self,
        built: Assembled,
        config: EngineConfig,
        front: dict[str, str],
        environment: Mapping[str, str],
        *,
        cluster_key: bytes | None = None,
    ) -> None:
        """Prepare; `open` attaches.

        Args:
            front: its addresses and its token.
            environment: in which the supervisor says how often it started this rank's engine again.
        """
        self._built, self._config, self._front, self._cluster_key = built, config, front, cluster_key
        self._epoch = 0
        self._home = None if num_restarts_of(environment) else built.relocation.placement
        self._lock = threading.Lock()  # of the step loop's thread and the link's
        self._open_ids: set[str] = set()  # requests that the front waits for
        self._cut_off = Counter[str]()  # requests of links that broke, until the engine has ended them
        self._facts = RankFacts(
            rank=config.rank,
            world_size=config.world_size,
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
        )
        self.link = self._make_link(self._facts)

    def _make_link(self, facts: RankFacts) -> RankLink:
        return RankLink(
            self._front["ranks_address"], self._front["token"], facts, self, cluster_key=self._cluster_key
        )

    def send_start(self) -> None:
        """Tell what serves at the start."""
        placement = self._built.relocation.placement
        report = PlacementReport(
            rank=0, version=placement.version, state=MoveState.SERVING, digest=placement.digest()
        )
        self.link.send_experts(self._built.experts)
        self.link.send_placement(report, placement, self._expert_bytes())

    def send(self, outputs: list[RequestOutput], stats: RankStats) -> None:
        """Tell what a step yielded, but for requests of a link that broke: the front has given those to others, or to this
        rank anew under the same ids."""
        with self._lock:
            self.link.send([output for output in outputs if self._is_told(output)], stats)

    def _is_told(self, output: RequestOutput) -> bool:
        """Note what an output ends; return whether the front waits for it. The engine ends each request it is given once."""
        request_id = output.request_id
        is_end = output.finish_reason is not None or output.is_returned
        is_told = not self._cut_off[request_id]
        if is_end and is_told:
            self._open_ids.discard(request_id)
        elif is_end:
            self._cut_off[request_id] -= 1
            self._cut_off += Counter()  # forgets those that are 0
        return is_told

    def report(self, report: PlacementReport) -> None:
        """Tell what became of a placement, and rank 0 also where experts are now."""
        placement = self._built.relocation.placement
        if report.state is MoveState.SERVING:
            self._note_home(placement, placement.num_ranks)
            if report.rank == 0:
                self.link.send_experts(_experts_now(self._built))
        self.link.send_placement(report)

    def submit(self, request: Request) -> None:
        """Serve a request."""
        self._open_ids.add(request.request_id)
        self._built.engine.submit(request)

    def abort(self, request_id: str) -> None:
        """Drop a request."""
        self._built.engine.abort(request_id)

    def withdraw(self, request_id: str) -> None:
        """Give a request back if it has not begun."""
        self._built.engine.withdraw(request_id)

    def stop(self) -> None:
        """End in an orderly way."""
        self._built.engine.stop()

    def prepare(self, placement: Placement) -> None:
        """Move experts."""
        self._built.relocation.prepare(placement)

    def drop(self, version: int) -> None:
        """Give up a placement that does not serve yet."""
        self._built.relocation.drop(version)

    def regroup(self, order: Order) -> None:
        """Follow an order."""
        self._epoch = max(self._epoch, order.epoch)
        self._note_home(order.placement, len(order.members))
        self._built.engine.regroup(order)

    def forget_prefixes(self) -> None:
        """Let no later request find what is cached."""
        self._built.engine.forget_prefixes()

    def lost(self, reason: str, *, is_broken: bool) -> None:
        """Come back to the front, or end this process: the step loop may be waiting for other ranks."""
        rank = self._config.rank
        say(f"rank {rank}: {reason}", error=True)
        if not is_broken:  # the front has given this rank up
            os._exit(1)
        with self._lock:
            cut_off, self._open_ids = self._open_ids, set()
            self._cut_off.update(cut_off)
        for request_id in cut_off:  # whoever asked for them has been cut off with the front
            self._built.engine.abort(request_id)
        status = self._come_back(time.monotonic() + FRONT_RETURN_S)
        if status:
            os._exit(status)
        say(f"rank {rank}: the front is back", error=True)

    def _come_back(self, until_s: float) -> int:
        """Attach to the front that has been started again; returns this process' status if that is of no use, else 0."""
        while (left_s := until_s - time.monotonic()) > 0:
            # Before it is open: the front's first order may be answered before `open` has returned.
            self.link = self._make_link(replace(self._facts, served=self._served()))
            try:
                self.link.open(left_s)
            except RefusedError as error:
                say(f"rank {self._config.rank}: {error}", error=True)
                return 1
            except LinkError:
                time.sleep(min(left_s, RETRY_S))
                continue
            return 0
        return FRONT_IS_GONE

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
        """Of one expert of one layer."""
        return read_slot(self._built.model.layers[0], 0).num_bytes

    def _note_home(self, placement: Placement, num_members: int) -> None:
        if num_members == self._config.world_size:
            self._home = placement


def _experts_now(built: Assembled) -> ExpertMap:
    placement = built.relocation.placement
    return built.experts._replace(version=placement.version, slot_expert=placement.slot_expert)
