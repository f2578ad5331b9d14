"""Which of a service's fronts run on a node, if every node has some (`--fronts per-node`).

A node that returns after a loss (`--join`) at the same address starts the fronts that it had, with the same ports, because ranks and
other fronts look for them there. A node at another address has none.
"""

import socket
from collections.abc import Mapping

from server.front.several.front_map import LEADING_NODE, FrontMap
from server.serve.child_messages import num_per_node, ranks_addresses

_ANSWER_S = 0.5  # for a front that still runs to accept a connection


def map_of(announced: Mapping[str, str], node: int) -> FrontMap:
    """Return the announced fronts of all nodes, for those of one node."""
    addresses = tuple(ranks_addresses(announced))
    return FrontMap(node, num_per_node(announced) or len(addresses), addresses, announced["token"])


def returning_fronts(announced: Mapping[str, str], address: str) -> FrontMap | None:
    """Return the fronts for a node that returns, or None if none were lost at its address.

    Args:
        announced: The fronts of the running service.
        address: That of the node.
    """
    known = map_of(announced, LEADING_NODE)
    for node in known.other_nodes:
        host, _, port = known.first_address(node).rpartition(":")
        if host.strip("[]") == address and not _answers(address, int(port)):
            return known._replace(node=node)
    return None


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_ANSWER_S).close()
    except OSError:
        return False
    return True
