"""Layers that a step has noted as written are written: what is copied of them during the step is what the step leaves.

Programs and modules of real models run with a stop after each note. A control notes every layer too early.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dispatch.compiled import team
from dispatch.compiled.team import Program, Team
from kvcache.progress import Progress
from kvcache.unit import block_parts, parts_after
from moe.cpu.program import step as step_program
from scheduler.assembly import Assembled
from scheduler.policy.request import Request
from tests.fixtures import PoolOf
from tests.scheduler.test_invariance import FAMILIES
from tests.support.engines.serving import build, request, serve
from tests.support.models.families import write_checkpoint

SETTINGS: dict[str, Any] = {
    "max_model_len": 160, "max_num_batched_tokens": 48, "max_num_seqs": 8, "kv_offloading_bytes": 64 << 20,
}  # fmt: skip


def prompts(rank: int = 0) -> list[Request]:
    """Return requests that hand over, with prompts of several steps. Some begin within a block."""
    made = []
    for number, length in enumerate((120, 33, 64)):
        prompt = [3 + (7 * each + 5 * number + rank) % 90 for each in range(length)]
        made.append(replace(request(f"{rank} {number}", prompt, max_tokens=4), hands_over=True))
    return made


class Watch:
    """Copies the blocks that a step fills, of the noted layers, at every note, and compares them after the step."""

    def __init__(self, built: Assembled, *, too_many: int = 0) -> None:
        """`too_many`: number of layers to add to every note."""
        cache, tiers = built.runner.cache, built.engine._tiers
        assert tiers is not None
        self.most_layers = self.num_wrong = 0
        self._progress, self._too_many = cache.progress, too_many
        self._ends, self._parts = parts_after(cache), [each for each in block_parts(cache) if each.numel()]
        self._blocks: list[int] = []
        self._seen: list[tuple[int, list[torch.Tensor]]] = []
        tiers.save_early = self._begin  # type: ignore[method-assign]

    def look(self) -> None:
        """Copy what is written by now."""
        run = self._progress.run
        num_layers = self._progress.layers_of(run) if run % 2 else 0
        if num_layers and self._blocks:
            self.most_layers = max(self.most_layers, num_layers)
            end = self._ends[min(num_layers + self._too_many, len(self._ends) - 1)]
            self._seen.append((end, [part[self._blocks].clone() for part in self._parts[:end]]))

    def compare(self) -> None:
        """Compare with what the last step has left."""
        for end, copies in self._seen:
            pairs = zip(copies, self._parts[:end], strict=True)
            self.num_wrong += not all(torch.equal(copy, part[self._blocks]) for copy, part in pairs)
        self._seen.clear()

    def _begin(self, blocks: Iterable[tuple[int, bytes]]) -> None:
        self.compare()
        self._blocks = [index for index, _ in blocks]


def by_layer(run: Callable[[Program], None], look: Callable[[], None]) -> Callable[[Program], None]:
    """Return a function that runs a program with a stop after each note."""

    def run_by_layer(program: Program) -> None:
        begin = 0
        for row in np.flatnonzero(program[:, 0] == step_program.NOTE_LAYERS.address).tolist():
            run(program[begin : row + 1])
            look()
            begin = row + 1
        run(program[begin:])

    return run_by_layer


def watched(directory: Path, *, too_many: int = 0, **settings: Any) -> tuple[int, int, int]:
    """Serve prompts. Return the number of layers with rows that were noted during a step, of all such layers, and of wrong copies."""
    built = build(directory, **SETTINGS | settings)
    watch = Watch(built, too_many=too_many)
    run_alone, run_team, note = team.run_alone, Team.run, Progress.note

    def noted(progress: Progress, num_layers: int) -> None:
        note(progress, num_layers)
        watch.look()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_program, "run_alone", by_layer(run_alone, watch.look))
        patch.setattr(
            Team, "run", lambda self, program: by_layer(lambda p: run_team(self, p), watch.look)(program)
        )
        patch.setattr(Progress, "note", noted)
        outputs = serve(built, prompts(dist.get_rank() if dist.is_initialized() else 0)).outputs
    watch.compare()
    built.engine.close()
    assert sum(output.is_returned for output in outputs) == len(prompts())
    has_rows = [bool(before < after) for before, after in pairwise(parts_after(built.runner.cache))]
    return sum(has_rows[: watch.most_layers]), sum(has_rows), watch.num_wrong


@pytest.mark.crossed("name", every=2)
@pytest.mark.parametrize("name", FAMILIES)
def test_noted_layers_are_written(name: str, tmp_path: Path) -> None:
    write_checkpoint(name, tmp_path)
    num_noted, num_layers, num_wrong = watched(tmp_path)
    assert num_wrong == 0 and num_noted >= num_layers - 1


def test_the_comparison_sees_a_layer_that_is_noted_too_early(tmp_path: Path) -> None:
    write_checkpoint("qwen3_moe", tmp_path)
    assert watched(tmp_path, too_many=1)[2] > 0


def test_noted_layers_are_written_if_experts_are_on_other_ranks(tmp_path: Path, pool_of: PoolOf) -> None:
    write_checkpoint("qwen3_moe", tmp_path)
    for num_noted, num_layers, num_wrong in pool_of(2).run(watched, tmp_path):
        assert num_wrong == 0 and num_noted >= num_layers - 1


def test_blocks_of_a_prompt_are_in_host_memory_before_their_step_ends(tmp_path: Path) -> None:
    write_checkpoint("qwen3_moe", tmp_path)
    built = build(tmp_path, **SETTINGS)
    tiers, forward = built.engine._tiers, built.runner.forward
    assert tiers is not None and tiers._host is not None
    store, save_early = tiers._host.blocks, tiers.save_early
    coming: list[bytes] = []
    found: set[bytes] = set()

    def begin(blocks: Iterable[tuple[int, bytes]]) -> None:
        listed = list(blocks)
        coming[:] = [key for _, key in listed]
        save_early(listed)

    def forward_and_wait(*given: Any, **options: Any) -> Any:
        logits, until_s = forward(*given, **options), time.monotonic() + 30
        while not all((part := store.part_of(key)) and part.num_bytes for key in coming):
            assert time.monotonic() < until_s, "the step's blocks are not copied while it runs"
            time.sleep(1e-3)
        found.update(coming)
        return logits

    tiers.save_early = begin  # type: ignore[method-assign]
    built.runner._forward = forward_and_wait
    serve(built, prompts())
    built.engine.close()
    assert len(found) == sum(-(-len(each.prompt_ids) // 16) for each in prompts()), (
        "also those that are not full"
    )
    assert all(store.has(key) and store.part_of(key) is None for key in found) and not store._open
