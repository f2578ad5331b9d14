"""Explain why requests are refused or placements cannot change."""

from collections.abc import Mapping

from server.front.members.membership import Epochs, Phase


def why_service_not_ready(pools: Mapping[str, Epochs]) -> str | None:
    """Return what a service waits for, or None if a pool serves or soon will. At the start, all pools must be ready.

    Args:
        pools: The membership of each pool, by name.
    """
    reasons = {name: why_not_ready(epochs) for name, epochs in pools.items()}
    is_starting = any(epochs.phase is Phase.STARTING and not epochs.is_resuming for epochs in pools.values())
    if None in reasons.values() and not is_starting:
        return None
    if len(pools) == 1:
        return next(iter(reasons.values()))
    return "; ".join(f"pool {name}: {reason}" for name, reason in reasons.items() if reason is not None)


def why_not_ready(epochs: Epochs) -> str | None:
    """Return what a pool waits for, or None if a rank serves or soon will."""
    if epochs.phase is Phase.STARTING:
        of_all = "" if epochs.ranks.start else f" of {epochs.num_ranks}"  # numbers of later pools exceed it
        return f"waiting for {_ranks(epochs.absent)}{of_all}"
    if epochs.is_gathering:
        return f"waiting for {_ranks(epochs.absent)} to join"
    if epochs.phase is Phase.WAITING:
        return f"waiting for a rank to come back; {epochs.describe()}"
    if not epochs.settled:
        return f"{_ranks(list(epochs.members))} came back and will serve soon"
    return None


def why_no_change(epochs: Epochs) -> str | None:
    """Return why the placement cannot change now, or None if all ranks serve."""
    if epochs.is_whole:
        return None
    if epochs.missing:
        return epochs.describe()
    return why_not_ready(epochs) or f"the ranks are meeting in epoch {epochs.number}"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
