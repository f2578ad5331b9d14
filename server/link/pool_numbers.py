"""Translate the numbers of ranks in messages: engines count the ranks of their pool from 0, the front those of the service.

A rank's end of the link does this, so neither the engine nor the front knows both numbers.
"""

from dataclasses import replace
from typing import assert_never

from scheduler.epochs.heartbeat import Heartbeat
from scheduler.epochs.orders import Order, by_rank
from scheduler.moves.reports import ExpertMap, LoadReport
from scheduler.policy.request import AdapterReport
from scheduler.weights.versions import WeightReport
from server.link.messages import (
    ExpertsRead,
    Fault,
    FromRank,
    MemorySwitched,
    MemoryUse,
    PlacementUpdate,
    Regrouped,
    StepOutput,
    ToRank,
)


def to_service(message: FromRank, pool: range) -> FromRank:
    """Return an engine's message with the numbers of the service.

    Args:
        pool: The numbers in the service of the ranks of the engine's pool.
    """
    if pool.start == 0:
        return message
    match message:
        case StepOutput(outputs, stats):
            return StepOutput(outputs, stats and replace(stats, rank=pool[stats.rank]))
        case Heartbeat(rank):
            return message._replace(rank=pool[rank])
        case LoadReport() | WeightReport():
            return replace(message, rank=pool[message.rank])
        case PlacementUpdate(report):
            reason = by_rank(report.reason, pool)
            return message._replace(report=replace(report, rank=pool[report.rank], reason=reason))
        case Fault(_, reason):
            return message._replace(reason=by_rank(reason, pool))
        case ExpertsRead(_, problem):
            return message._replace(problem=by_rank(problem, pool))
        # These name no rank.
        case ExpertMap() | Regrouped() | MemoryUse() | MemorySwitched() | AdapterReport():
            return message
        case _:
            assert_never(message)


def to_pool(message: ToRank, pool: range) -> ToRank:
    """Return a message of the front with the numbers of the engine's pool. `pool` is as for `to_service`."""
    if isinstance(message, Order) and pool.start:
        named = message.members, message.leaving, message.stopped
        members, leaving, stopped = (tuple(map(pool.index, ranks)) for ranks in named)
        return message._replace(members=members, leaving=leaving, stopped=stopped)
    return message
