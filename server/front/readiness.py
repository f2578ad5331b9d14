"""Explain why requests are refused or placements cannot change."""

from server.front.membership import Epochs, Phase


def why_not_ready(epochs: Epochs) -> str | None:
    """Return what the service waits for, or None if a rank serves or soon will."""
    if epochs.phase is Phase.STARTING:
        return f"waiting for {_ranks(epochs.absent)} of {epochs.num_ranks}"
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
