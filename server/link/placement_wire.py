"""Between placements, reports about them, and the messages of ranks.proto: pure functions, both ways."""

import json
from dataclasses import asdict
from typing import NamedTuple

from expert_placement.files import from_json, to_json
from expert_placement.placement import Placement
from scheduler.moves.reports import Cause, MoveState, PlacementReport
from server.link import ranks_pb2 as pb


class PlacementWord(NamedTuple):
    """What a rank says: a report, and at the start what serves."""

    report: PlacementReport
    placement: Placement | None
    expert_bytes: int  # of one expert of one layer; 0: not said


def placement_to_wire(placement: Placement) -> bytes:
    """Encode a placement; floats keep their bits."""
    return json.dumps(to_json(placement)).encode()


def placement_from(content: bytes) -> Placement:
    """Decode a placement; its digest is checked."""
    return from_json(json.loads(content))


def report_to_wire(
    report: PlacementReport, placement: Placement | None, expert_bytes: int
) -> pb.PlacementReport:
    """Encode a rank's word."""
    values = {**asdict(report), "state": report.state.value, "cause": report.cause.value}
    content = b"" if placement is None else placement_to_wire(placement)
    return pb.PlacementReport(**values, placement=content, expert_bytes=expert_bytes)


def word_from(wire: pb.PlacementReport) -> PlacementWord:
    """Decode a rank's word."""
    report = PlacementReport(
        rank=wire.rank,
        version=wire.version,
        state=MoveState(wire.state),
        reason=wire.reason,
        cause=Cause(wire.cause),
        digest=wire.digest,
        step=wire.step,
        num_moves=wire.num_moves,
        num_bytes=wire.num_bytes,
        seconds=wire.seconds,
    )
    return PlacementWord(
        report, placement_from(wire.placement) if wire.placement else None, wire.expert_bytes
    )
