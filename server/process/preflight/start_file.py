"""The file of `--expert-placement`, looked into before any rank starts.

A file that is no placement, or one of another model or service, would else be told by every rank at once, after the
seconds that a rank takes to get there. numpy is imported where a file was given: supervisors live as long as the
service, and those without a file do without its 25 MB.
"""
# ruff: noqa: PLC0415

from pathlib import Path


def slots_in(file: str) -> int:
    """How many slots of a layer the file gives a rank; 0 where it is no placement."""
    from expert_placement.placement_file import PlacementFileError, load_placement

    try:
        return load_placement(Path(file)).slots_per_rank
    except PlacementFileError:
        return 0


def why_unfit(file: str, *, num_layers: int, num_experts: int, num_ranks: int) -> str | None:
    """Say why a service cannot start with the file; None where it can.

    Args:
        num_layers: MoE layers of the model. num_experts: of each.
    """
    from expert_placement.placement_file import PlacementFileError, load_placement

    try:
        placement = load_placement(Path(file))
    except PlacementFileError as error:
        return str(error)
    found = (placement.num_layers, placement.num_experts, placement.num_ranks)
    if found == (num_layers, num_experts, num_ranks):
        return None
    return (
        f"{file} is a placement of {found[0]} layers of {found[1]} experts on {found[2]} ranks; this service has "
        f"{num_layers} layers of {num_experts} experts on {num_ranks} ranks. Plan one for it (wideep experts plan), "
        "or leave it out"
    )
