"""A service on two nodes of this machine: each is a torchrun with another host name, so the ranks of both share no memory."""

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from benchmarks.faults.hook import HOST_VARIABLE
from benchmarks.serving.processes import tree
from benchmarks.serving.service import HOST, STOP_TIMEOUT_S, Server
from dispatch.ports import free_port
from server.machine.parent_death import die_with_parent

_ROOT = Path(__file__).parents[2]


class TwoNodes(Server):
    """A running service of two nodes with as many ranks each."""

    def __init__(
        self,
        model: str,
        num_ranks: int,
        flags: Sequence[Sequence[str]],
        log: IO[bytes],
        *,
        environment: Mapping[str, str],
    ) -> None:
        """Start both nodes and wait until the service is healthy.

        Args:
            num_ranks: Of each node.
            flags: Flags of each node.
            environment: Variables for both nodes, which include those of `orders.FaultOrders`.

        Raises:
            BenchServiceError: It did not start.
        """
        port, meeting = free_port(), free_port()
        first, second = (
            [
                *("env", f"{HOST_VARIABLE}=node-{node}", "GLOO_SOCKET_IFNAME=lo"),
                *(
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    "--nnodes=2",
                    f"--nproc-per-node={num_ranks}",
                ),
                *("--rdzv-backend=c10d", f"--rdzv-endpoint={HOST}:{meeting}", f"--local-addr={HOST}"),
                *(
                    "--no-python",
                    sys.executable,
                    "-P",
                    str(_ROOT / "server" / "__main__.py"),
                    "worker",
                    model,
                ),
                *(f"--port={port}", *own),
            ]
            for node, own in enumerate(flags)
        )
        self._second = subprocess.Popen(
            second,
            cwd=_ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=0,
            preexec_fn=functools.partial(die_with_parent, signal.SIGTERM, parent_pid=os.getpid()),
        )
        super().__init__(first, port, log, environment=environment)

    def pids(self) -> list[int]:
        return [*super().pids(), *tree(self._second.pid)]

    def close(self) -> None:
        """Stop both nodes."""
        self._second.send_signal(signal.SIGINT)
        super().close()
        try:
            self._second.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._second.kill()
            self._second.wait()
