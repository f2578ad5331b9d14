"""A torchrun of `wideep worker` in tests: on this machine, or on a node that is a namespace of a network."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tests.support.service.forked import TORCHRUN, WIDEEP


class Torchrun(NamedTuple):
    """One torchrun, which `RealService` starts."""

    flags: Sequence[str]  # of torchrun
    worker: Sequence[str]  # the words after `wideep`
    network: str = ""  # name of the node's network namespace; empty: this process's
    host_name: str = (
        ""  # in a namespace for it alone, so that such nodes share no memory; empty: this machine's
    )
    environment: Mapping[str, str] = {}  # changes
    program: Sequence[str] = WIDEEP  # `wideep`, if not that of this checkout

    def command(self) -> list[str]:
        """Return the command to run in the namespaces."""
        return [*TORCHRUN, *self.flags, "--no-python", *self.program, *self.worker]

    def command_with_namespaces(self) -> list[str]:
        """Return the command that enters the namespaces, too."""
        network = ["ip", "netns", "exec", self.network] if self.network else []
        host = ["unshare", "--uts", "sh", "-c", f'hostname {self.host_name} && exec "$@"', "sh"]
        return [*network, *(host if self.host_name else []), *self.command()]
