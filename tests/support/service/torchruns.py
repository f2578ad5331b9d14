"""A torchrun of `wideep worker` in tests: on this machine, or on a node that is a namespace of a network."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tests.support.service.forked import TORCHRUN, WIDEEP


class Torchrun(NamedTuple):
    """One torchrun, which `RealService` starts."""

    flags: Sequence[str]  # of torchrun
    worker: Sequence[str]  # the words after `wideep`
    network: str = ""  # name of the node's network namespace; empty: this process's
    # In a namespace for it alone. Nodes with different names share no memory. Empty: this machine's.
    host_name: str = ""
    environment: Mapping[str, str] = {}  # what differs from this process's
    program: Sequence[str] = WIDEEP  # `wideep`; that of another checkout is not forked

    def command(self) -> list[str]:
        """Return the command to run in the namespaces."""
        return [*TORCHRUN, *self.flags, "--no-python", *self.program, *self.worker]

    def command_with_namespaces(self) -> list[str]:
        """Return the command that enters the namespaces, too."""
        network = ["ip", "netns", "exec", self.network] if self.network else []
        host = ["unshare", "--uts", "sh", "-c", f'hostname {self.host_name} && exec "$@"', "sh"]
        return [*network, *(host if self.host_name else []), *self.command()]
