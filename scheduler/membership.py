"""Who serves together: an order of the front, as ranks follow it. Knows no torch and no wire format.

A rank's number is its for ever; its place in an epoch is its index among that epoch's members. Process groups,
dispatchers and placements have places.
"""

from typing import NamedTuple

from expert_placement.placement import Placement


class Order(NamedTuple):
    """The epoch so far is over: meet these members in that one, with this placement."""

    epoch: int
    members: tuple[int, ...]  # ranks, ascending
    placement: Placement  # over their places
