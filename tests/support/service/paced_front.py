"""A real front with model-free ranks that answer everything, and its figures: for fuzzing and soaking."""

from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.serving.paced_rank import PacedRank
from expert_placement.placement import Placement, linear_placement
from scheduler.moves.reports import MoveState, PlacementReport
from server.link.messages import PlacementUpdate
from tests.support.placement.load_reports import EXPERTS, LAYERS, RANKS, counts, expert_map, report
from tests.support.service.fake_rank import FakeRank
from tests.support.service.front_process import FrontProcess
from tests.support.service.service_processes import wait_until

MODEL = "tiny"
EXPERT_BYTES = 1000
SETTLE_S = 20.0
COMPILE_S = 600.0


class PacedFront(FrontProcess):
    """`wideep front` with ranks that give each request a token per step and report experts and placements."""

    def __init__(self, model: Path, *flags: str, **how: Any) -> None:
        how = {"repeats": True, "after_step": _report_load, "on_prepare": _switch, **how}
        super().__init__(model, "--served-model-name", MODEL, *flags, num_ranks=RANKS, **how)

    def attach(self, rank: int, **how: Any) -> FakeRank:
        """Attach one rank. Rank 0 reports the experts."""
        fake = super().attach(rank, **how)
        if rank == 0:
            fake.link.send(expert_map())
            serving = linear_placement(LAYERS, EXPERTS, RANKS)
            fake.link.send(PlacementUpdate(_serving(0, serving), serving, EXPERT_BYTES))
        return fake

    def figures(self) -> dict[str, float]:
        """Return the figures of /metrics, summed over labels."""
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(self.get("/metrics").text):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found

    def serve_some(self) -> None:
        """Serve a request, and wait until its load is known, so that a plan is possible."""
        assert self.post("/v1/completions", json={"prompt": "hello"}).status_code == 200
        wait_until(
            lambda: self.get("/experts/load").json()["window"]["steps"] > 0, lambda: "no load was reported"
        )

    def warm_planner(self) -> None:
        """Plan once in every way: in a fresh checkout this compiles a planner, which takes minutes on a busy machine."""
        for policy in ("shares", "repair", "plan"):
            response = httpx.post(f"{self.url}/experts/plan", json={"policy": policy}, timeout=COMPILE_S)
            assert response.status_code == 200, response.text

    def wait_settled(self, num_tasks: float) -> None:
        """Wait until nothing is open anywhere, and the front has at most `num_tasks` tasks."""
        for rank in self.ranks:
            assert rank.wait_idle(SETTLE_S), f"rank {rank.rank} still has {rank.num_open} requests"

        def is_settled() -> bool:
            self.held = self.figures()
            return not (
                self.held["wideep:front_open_choices"] or self.held["wideep:router_outstanding_tokens"]
            ) and (self.held["wideep:front_tasks"] <= num_tasks)

        wait_until(is_settled, lambda: f"the front holds on to {self._leaks()}", within_s=SETTLE_S)

    def _leaks(self) -> dict[str, float]:
        return {
            name: value
            for name, value in self.held.items()
            if name.startswith(("wideep:front", "wideep:router"))
        }


def _serving(rank: int, placement: Placement) -> PlacementReport:
    return PlacementReport(
        rank=rank, version=placement.version, state=MoveState.SERVING, digest=placement.digest()
    )


def _switch(rank: PacedRank, placement: Placement) -> None:
    """Report the front's target placement as served, at once."""
    rank.link.send(PlacementUpdate(_serving(rank.rank, placement)))


def _report_load(rank: PacedRank, step: int) -> None:
    """Report the step's load at once, so that waiting callers continue soon."""
    rank.link.send(report(rank.rank, step, counts(rank.rank) * step))
