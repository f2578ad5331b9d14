"""Between `scheduler.moves.reports` and the messages Load and Experts of ranks.proto: pure functions, both ways.

Matrices cross as their bytes: decoding 30,000 counts one by one would take the front milliseconds a rank.
"""

import numpy as np

from scheduler.moves.reports import ExpertMap, LoadReport
from server.link import ranks_pb2 as pb

_SAME = (
    "rank", "step", "num_steps", "prefill_tokens", "decode_tokens", "placement_version", "dispatch_wait_s",
    "combine_wait_s", "experts_s", "step_s", "wire_s", "prefill_steps", "prefill_experts_s", "prefill_step_s",
    "epoch",
)  # fmt: skip
_PHASES = 2


def load_to_wire(load: LoadReport) -> pb.Load:
    """Encode a rank's counters."""
    return pb.Load(
        **{name: getattr(load, name) for name in _SAME},
        counts=load.counts.astype("<u4", copy=False).tobytes(),
        num_layers=len(load.counts),
        dispatch_bytes=load.dispatch_bytes,
        combine_bytes=load.combine_bytes,
    )


def load_from(wire: pb.Load) -> LoadReport:
    """Decode a rank's counters; `counts` is read-only."""
    return LoadReport(
        **{name: getattr(wire, name) for name in _SAME},
        counts=np.frombuffer(wire.counts, "<u4").reshape(wire.num_layers, _PHASES, -1),
        dispatch_bytes=tuple(wire.dispatch_bytes),
        combine_bytes=tuple(wire.combine_bytes),
    )


def experts_to_wire(experts: ExpertMap) -> pb.Experts:
    """Encode which experts there are and where."""
    return pb.Experts(
        version=experts.version,
        num_experts=experts.num_experts,
        num_ranks=experts.num_ranks,
        layers=experts.layers,
        num_hidden_layers=experts.num_hidden_layers,
        slot_expert=experts.slot_expert.astype("<i4").tobytes(),
    )


def experts_from(wire: pb.Experts) -> ExpertMap:
    """Decode which experts there are and where."""
    return ExpertMap(
        version=wire.version,
        num_experts=wire.num_experts,
        num_ranks=wire.num_ranks,
        layers=tuple(wire.layers),
        num_hidden_layers=wire.num_hidden_layers,
        slot_expert=np.frombuffer(wire.slot_expert, "<i4").reshape(len(wire.layers), -1).astype(np.int64),
    )
