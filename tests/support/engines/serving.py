"""Engines in tests: the real step loop on every rank of a pool, fed with prompts and run until all are served."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from attention.sparse import index as sparse_index
from attention.sparse import pools as pooled_index
from expert_placement.choose import ReplicaChoice
from kvcache.paged_cache import PagedCache
from kvcache.step import Span
from moe.long_rotary import limit_of
from moe.model import Model
from moe.slot_choice import SlotChoice
from scheduler.assembly import Assembled, assemble
from scheduler.engine import Engine
from scheduler.policy.config import EngineConfig
from scheduler.policy.request import Logprobs, RankStats, Request, RequestOutput, SamplingParams
from scheduler.structure.compiler import LoadVocabulary, no_vocabulary

COMPILE_TIMEOUT_S = 60.0
PATIENCE_S = 100.0  # of collectives, below the pools': a machine that is busy with others loses no rank


class WaveDoorbell:
    """Where all ranks would sleep, each submits its next wave of requests instead, and stops after the last."""

    engine: Engine
    waves: deque[list[Request]]

    def ring(self, step: int) -> None:
        """Nobody sleeps."""

    def wait(self, step: int) -> None:
        """Submit or stop instead of sleeping."""
        if not self.waves:
            self.engine.stop()
            return
        for request in self.waves.popleft():
            self.engine.submit(request)
        # Requests with forms come back from threads; without them the engine would find nothing to do, and stop.
        until_s = time.monotonic() + COMPILE_TIMEOUT_S
        while self.engine._structures._waiting:
            assert time.monotonic() < until_s, "structures are not compiled"
            time.sleep(0.0005)


@dataclass
class Served:
    """What one rank delivered, by request id."""

    token_ids: dict[str, list[int]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[Logprobs]] = field(default_factory=dict)
    outputs: list[RequestOutput] = field(default_factory=list)
    stats: list[RankStats] = field(default_factory=list)


def build(directory: Path, *, load_vocabulary: LoadVocabulary = no_vocabulary, **settings: Any) -> Assembled:
    """Assemble this rank's engine; alone unless `torch.distributed` is up in a pool."""
    if dist.is_initialized():
        settings = {"rank": dist.get_rank(), "world_size": dist.get_world_size(), **settings}
    doorbell = WaveDoorbell()
    built = assemble(
        EngineConfig(
            **{
                "directory": directory,
                "kv_cache_bytes": 8 << 20,
                "distributed_timeout_s": PATIENCE_S,
                **settings,
            }
        ),
        doorbell,
        load_vocabulary=load_vocabulary,
    )
    doorbell.engine = built.engine
    built.engine.waves = doorbell.waves = deque()  # type: ignore[attr-defined]
    return built


def serve(built: Assembled, *waves: Sequence[Request]) -> Served:
    """Run this rank's requests to their ends, wave after wave, and end the engine; collective.

    All ranks must have the same number of waves.
    """
    served = Served()

    def on_step(outputs: list[RequestOutput], stats: RankStats) -> None:
        served.outputs += outputs
        served.stats.append(stats)
        for output in outputs:
            served.token_ids.setdefault(output.request_id, []).extend(output.token_ids)
            served.prompt_logprobs.setdefault(output.request_id, []).extend(output.prompt_logprobs)

    built.engine.waves.extend(list(wave) for wave in waves)  # type: ignore[attr-defined]
    built.engine.run(on_step)
    return served


def occupy(built: Assembled, *, leaving: int) -> int:
    """Take KV blocks until so many are free; returns how many were taken."""
    pool = built.scheduler._pool
    return len(pool.acquire(pool.num_free - leaving))


def request(request_id: str, prompt_ids: Sequence[int], **params: Any) -> Request:
    """A greedy request unless `params` say otherwise."""
    values = {"temperature": 0.0, "max_tokens": 48, **params}
    return Request(
        request_id=request_id, prompt_ids=tuple(prompt_ids), params=SamplingParams(**values), arrival_s=0.0
    )


def own_share(items: Sequence[Any]) -> list[Any]:
    """This rank's items of a list that is dealt out in turn."""
    if not dist.is_initialized():
        return list(items)
    return list(items[dist.get_rank() :: dist.get_world_size()])


def teacher_forced(built: Assembled, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Run whole sequences in one step and return every row's logits, [tokens, V] each; collective."""
    step, cache = built.runner.step, PagedCache(built.model.skeleton.cache_shapes, 64)
    spans, used, limit = [], 0, limit_of(built.model.net.config)
    for sequence in sequences:
        blocks = -(-len(sequence) // step.block_tokens)
        is_long = limit is not None and len(sequence) > limit
        spans.append(Span(0, len(sequence), range(used, used + blocks), is_long=is_long))
        used += blocks
    step.fill(spans)
    tokens = torch.zeros(step.num_padded, dtype=torch.int64)
    tokens[: step.num_tokens] = torch.tensor([token for sequence in sequences for token in sequence])
    logits = built.model.forward(tokens, cache, torch.arange(step.num_tokens)).numpy()
    ends = np.cumsum([len(sequence) for sequence in sequences])
    return np.split(logits, ends[:-1]) if sequences else []


class _Misrouted(ReplicaChoice):
    """Sends every choice to another expert's slot."""

    def __init__(self, choice: ReplicaChoice) -> None:
        """Take the placement of another choice."""
        super().__init__(choice.placement, rank=0)
        self._tables = [table._replace(slot=np.roll(table.slot, -1)) for table in self._tables]


def misroute(model: Model) -> None:
    """Spoil a model: a control for tests that compare its outputs."""
    for layer in model.layers:
        choice = layer.choice
        layer.choice = SlotChoice(_Misrouted(choice.replicas), choice.layer)


def misindex(model: Model) -> bool:
    """Let every row attend to the tokens that another row's index chose, where there is one: likewise a control."""
    found = sparse_index.indexers(model.net) + pooled_index.modules(model.net)

    def exchanged(chosen: torch.Tensor) -> torch.Tensor:
        return torch.cat((chosen[:, 1:2], chosen[:, :-1]), 1)

    for module in found:
        choose = module.forward
        module.forward = lambda *inputs, choose=choose, **options: exchanged(choose(*inputs, **options))
    return bool(found)
