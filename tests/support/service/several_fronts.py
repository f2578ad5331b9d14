"""Several real fronts of one service, each in its own process and on its own port, with scripted ranks.

A service's fronts share one port, and the kernel chooses; here a test chooses.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from expert_placement.placement import linear_placement
from scheduler.moves.reports import ExpertMap
from server.front.several.front_map import FrontMap
from server.link.messages import Served
from server.serve.child_messages import FrontAddresses, announcement
from tests.support.service.front_process import TIMEOUT_S, FrontProcess
from tests.support.service.service_processes import wait_until

HOME = linear_placement(2, 4, 2)


class SeveralFronts:
    """The fronts of one service. Rank r of front f is `fronts[f].ranks[r]`: a process has a link to each front."""

    def __init__(
        self, model: Path, kept: Path, *flags: str, num_fronts: int = 2, on_nodes: bool = False, **how: Any
    ) -> None:
        """Start them. With `on_nodes`, each has a separate folder, as on a separate node."""
        self._model, self._kept, self._on_nodes, self._how = model, kept, on_nodes, how
        self._flags = (f"--api-server-count={1 if on_nodes else num_fronts}", "--served-model-name=m", *flags)
        self._announced: dict[int, str] = {}
        self.fronts: list[FrontProcess] = []
        for number in range(num_fronts):
            self.fronts.append(self._start(number))
            addresses = [FrontAddresses(each.url, each.ranks_address, each.token) for each in self.fronts]
            self.leading = announcement(addresses[:1])
            if not on_nodes:
                all_fronts = self.leading if number < num_fronts - 1 else announcement(addresses)
                self._announced = dict.fromkeys(range(num_fronts), all_fronts)
        if on_nodes:
            self._announced = {each: announcement([addresses[each]]) for each in range(num_fronts)}
            for number in range(num_fronts):
                at = tuple(each.ranks_address for each in addresses)
                FrontMap(number, 1, at, addresses[0].token).write(self.kept_of(number))
                self.fronts[number].token = addresses[0].token
        self.attach_all()
        self.wait_ready()

    def kept_of(self, number: int) -> Path:
        """Return the folder that outlives a front."""
        return self._kept / f"node-{number}" if self._on_nodes else self._kept

    def _start(self, number: int, port: str = "0") -> FrontProcess:
        self.kept_of(number).mkdir(exist_ok=True)
        environment = {"WIDEEP_KEPT": str(self.kept_of(number))}
        flags = ["--has-other-nodes"] if self._on_nodes else [f"--front-number={number}"]
        if number in self._announced:
            environment["WIDEEP_FRONT"] = self._announced[number]
        return FrontProcess(
            self._model, *self._flags, *flags, f"--port={port}", environment=environment, **self._how
        )

    def attach_all(self) -> None:
        """Attach every rank to every front."""
        for front in self.fronts:
            for rank in range(front.num_ranks):
                front.attach(rank)

    def wait_ready(self) -> None:
        """Wait until every front accepts requests."""
        wait_until(
            lambda: all(front.get("/health").status_code == 200 for front in self.fronts),
            lambda: f"not ready: {[front.get('/health').text for front in self.fronts]}",
        )

    def script(self, word: str, *script: Any, **how: Any) -> None:
        """Let every rank answer prompts that hold `word`."""
        for front in self.fronts:
            front.script(word, *script, **how)

    def kill(self, number: int) -> None:
        """Kill a front."""
        self.fronts[number].process.send_signal(signal.SIGKILL)
        self.fronts[number].process.wait(TIMEOUT_S)

    def replace(self, number: int) -> FrontProcess:
        """Start a killed front's replacement with the same ports."""
        old = self.fronts[number]
        front = self.fronts[number] = self._start(number, old.url.rpartition(":")[2]).wait_listening()
        front._scripts, front.num_ranks, front.token = old._scripts, old.num_ranks, old.token
        return front

    def start_again(self, number: int) -> FrontProcess:
        """Start a killed front's replacement, to which its ranks return."""
        front = self.replace(number)
        experts = ExpertMap(HOME.version, 4, 2, (0, 1), 2, HOME.slot_expert)
        for rank in range(front.num_ranks):
            front.attach(rank, served=Served(0, HOME.version, HOME, 1000, experts))
        return front

    def close(self) -> None:
        """Stop the fronts at once."""
        for front in reversed(self.fronts):  # the leading one last
            front.close()


@contextlib.contextmanager
def several_fronts(model: Path, kept: Path, *flags: str, **how: Any) -> Iterator[SeveralFronts]:
    """Run fronts with two ranks by default."""
    os.makedirs(kept, exist_ok=True)
    fronts = SeveralFronts(model, kept, *flags, **how)
    try:
        yield fronts
    finally:
        fronts.close()
