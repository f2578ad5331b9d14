"""Where the fronts of all nodes are, if every node has some (`--fronts per-node`).

The first engine of each node writes the map for the fronts of its node, because fronts do not reach the job's store. A front is
known by its number: those of the leading node have the first numbers, and every node has as many.
"""

import json
from pathlib import Path
from typing import NamedTuple, Self

from server.machine.whole_files import replace_text

LEADING_NODE = 0
# Without a message of the leading node, a front ends its requests after FENCE_S; the leading front counts it as lost after
# LOST_S, and then decides without regard to these requests.
FENCE_S, LOST_S = 5.0, 12.0
_NAME = "front_map.json"  # in the folder that outlives a front


class FrontMap(NamedTuple):
    """The fronts of a service on several nodes."""

    node: int  # this node, among those with fronts; 0 leads
    num_per_node: int
    addresses: tuple[str, ...]  # of each front, for ranks and other fronts, as HOST:PORT
    token: str  # of all fronts

    @classmethod
    def read(cls, kept: Path) -> Self | None:
        """Return the map in the folder that outlives a front, or None if it was not written yet."""
        try:
            fields = json.loads((kept / _NAME).read_text())
        except FileNotFoundError:
            return None
        fields["addresses"] = tuple(fields["addresses"])
        return cls(**fields)

    def write(self, kept: Path) -> None:
        """Write the map for the fronts of this node."""
        replace_text(kept / _NAME, json.dumps(self._asdict()))

    @property
    def num_fronts(self) -> int:
        """The number of fronts on all nodes."""
        return len(self.addresses)

    @property
    def nodes(self) -> range:
        """The nodes with fronts."""
        return range(self.num_fronts // self.num_per_node)

    @property
    def other_nodes(self) -> list[int]:
        """The nodes with fronts, without this one."""
        return [node for node in self.nodes if node != self.node]

    @property
    def near(self) -> range:
        """The numbers of the fronts on this node."""
        return self.fronts_of(self.node)

    def fronts_of(self, node: int) -> range:
        """Return the numbers of a node's fronts."""
        return range(node * self.num_per_node, (node + 1) * self.num_per_node)

    def first_address(self, node: int) -> str:
        """Return the address of a node's first front, which exchanges the boards of the two nodes."""
        return self.addresses[self.fronts_of(node).start]
