"""What joins an engine to the front: who is called for what, and what is said of placements."""

import os
import socket
import sys

from moe.expert_weights import read_slot
from scheduler.assembly import Assembled
from scheduler.moves.reports import MoveState, PlacementReport
from scheduler.policy.config import EngineConfig
from server.link.rank_link import RankLink
from server.link.wire import RankFacts
from server.process.front_probe import FRONT_IS_GONE, front_answers


def make_link(built: Assembled, config: EngineConfig, front: dict[str, str], num_restarts: int) -> RankLink:
    """Return what will join this rank to the front, not opened yet.

    Args:
        front: its addresses and its token.
        num_restarts: how often this rank's engine was started again.
    """
    address = front["ranks_address"]

    def on_lost(reason: str) -> None:
        # The step loop may be waiting for other ranks; this thread ends the process all the same.
        print(f"rank {config.rank}: {reason}", file=sys.stderr, flush=True)
        os._exit(1 if front_answers(address) else FRONT_IS_GONE)

    facts = RankFacts(
        rank=config.rank,
        world_size=config.world_size,
        host=socket.gethostname(),
        pid=os.getpid(),
        max_model_len=built.max_model_len,
        num_blocks=built.num_blocks,
        block_tokens=built.runner.step.block_tokens,
        max_num_seqs=config.max_num_seqs,
        num_restarts=num_restarts,
    )
    return RankLink(
        address,
        front["token"],
        facts,
        on_submit=built.engine.submit,
        on_abort=built.engine.abort,
        on_stop=built.engine.stop,
        on_lost=on_lost,
        on_prepare=built.relocation.prepare,
        on_drop=built.relocation.drop,
        on_regroup=built.engine.regroup,
    )


def send_start(built: Assembled, link: RankLink) -> None:
    """Say what serves at the start."""
    placement = built.relocation.placement
    report = PlacementReport(
        rank=0, version=placement.version, state=MoveState.SERVING, digest=placement.digest()
    )
    link.send_experts(built.experts)
    link.send_placement(report, placement, read_slot(built.model.layers[0], 0).num_bytes)


def send_report(report: PlacementReport, built: Assembled, link: RankLink) -> None:
    """Say what became of a placement, and rank 0 also where experts are now."""
    if report.state is MoveState.SERVING and report.rank == 0:
        slots = built.relocation.placement.slot_expert
        link.send_experts(built.experts._replace(version=report.version, slot_expert=slots))
    link.send_placement(report)
