"""Engines in tests: the real step loop on every rank of a pool, run on given prompts until all are served."""

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
from kvcache.images import Image, axes_of, rows_in
from kvcache.paged_cache import PagedCache
from kvcache.step import Span
from kvcache.tiers.peers import PeerNetwork
from moe.long_rotary import limit_of
from moe.model import Model
from moe.slot_choice import SlotChoice
from scheduler.assembly import Assembled, assemble
from scheduler.engine import Engine
from scheduler.policy.config import EngineConfig
from scheduler.policy.request import Logprobs, RankStats, Request, RequestOutput, SamplingParams
from scheduler.structure.compiler import LoadVocabulary, no_vocabulary

COMPILE_TIMEOUT_S = 60.0
PATIENCE_S = 100.0  # timeout of collectives, below the pools': a busy machine loses no rank


class WaveDoorbell:
    """Replaces the doorbell: when all ranks would sleep, each submits its next wave of requests. Stops after the last."""

    engine: Engine
    waves: deque[list[Request]]

    def ring(self, step: int) -> None:
        """Do nothing: no rank sleeps."""

    def wait(self, step: int) -> None:
        if not self.waves:
            self.engine.stop()
            return
        for request in self.waves.popleft():
            self.engine.submit(request)
        # Structured requests return from threads. Without them the engine would find no work, and stop.
        until_s = time.monotonic() + COMPILE_TIMEOUT_S
        while self.engine._structures._waiting:
            assert time.monotonic() < until_s, "the structures were not compiled in time"
            time.sleep(0.0005)


@dataclass
class Served:
    """What one rank delivered, by request id."""

    token_ids: dict[str, list[int]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[Logprobs]] = field(default_factory=dict)
    outputs: list[RequestOutput] = field(default_factory=list)
    stats: list[RankStats] = field(default_factory=list)


def build(
    directory: Path,
    *,
    load_vocabulary: LoadVocabulary = no_vocabulary,
    network: PeerNetwork | None = None,
    **settings: Any,
) -> Assembled:
    """Assemble this rank's engine. It runs alone unless `torch.distributed` is up in a pool.

    Args:
        network: As for `assemble`.
    """
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
        network=network,
    )
    doorbell.engine = built.engine
    built.engine.waves = doorbell.waves = deque()  # type: ignore[attr-defined]
    return built


def serve(built: Assembled, *waves: Sequence[Request]) -> Served:
    """Run this rank's requests to their ends, wave after wave, then stop the engine. Collective.

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
    """Take KV blocks until `leaving` are free. Return the number of blocks taken."""
    pool = built.scheduler._pool
    return len(pool.acquire(pool.num_free - leaving))


def request(
    request_id: str, prompt_ids: Sequence[int], *, images: Sequence[Image] = (), **params: Any
) -> Request:
    """Return a request, greedy unless `params` override it."""
    values = {"temperature": 0.0, "max_tokens": 48, **params}
    return Request(
        request_id=request_id,
        prompt_ids=tuple(prompt_ids),
        params=SamplingParams(**values),
        arrival_s=0.0,
        images=tuple(images),
    )


def own_share(items: Sequence[Any]) -> list[Any]:
    """Return this rank's items of a list that is dealt to the ranks in turn."""
    if not dist.is_initialized():
        return list(items)
    return list(items[dist.get_rank() :: dist.get_world_size()])


def teacher_forced(
    built: Assembled,
    sequences: Sequence[Sequence[int]],
    places: Sequence[int] | None = None,
    *,
    images: Sequence[Sequence[Image]] = (),
) -> list[np.ndarray]:
    """Run whole sequences in one step. Return the logits of every row, [tokens, V] per sequence. Collective.

    Args:
        places: Places of the sequences' adapters. None: no sequence has one.
        images: Of each sequence; empty: none has any.
    """
    step, cache = built.runner.step, PagedCache(built.model.skeleton.cache_shapes, 64)
    spans, used, limit = [], 0, limit_of(built.model.net.config)
    places, images = places or [-1] * len(sequences), images or [()] * len(sequences)
    for sequence, place, seen in zip(sequences, places, images, strict=True):
        blocks, length = -(-len(sequence) // step.block_tokens), len(sequence)
        is_long = limit is not None and length > limit
        axes, rows = axes_of(seen, 0, length), rows_in(seen, 0, length)
        span = Span(
            0, length, range(used, used + blocks), is_long=is_long, adapter=place, axes=axes, images=rows
        )
        spans.append(span)
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
        """Copy the placement of another choice."""
        super().__init__(choice.placement, rank=0)
        self._tables = [table._replace(slot=np.roll(table.slot, -1)) for table in self._tables]


def misroute(model: Model) -> None:
    """Corrupt a model's routing, as a control for tests that compare outputs."""
    for layer in model.layers:
        choice = layer.choice
        layer.choice = SlotChoice(_Misrouted(choice.replicas), choice.layer)


def misindex(model: Model) -> bool:
    """Let each row attend to the tokens that the index chose for another row, as a control. Return False without an index."""
    found = sparse_index.indexers(model.net) + pooled_index.modules(model.net)

    def exchanged(chosen: torch.Tensor) -> torch.Tensor:
        return torch.cat((chosen[:, 1:2], chosen[:, :-1]), 1)

    for module in found:
        choose = module.forward
        module.forward = lambda *inputs, choose=choose, **options: exchanged(choose(*inputs, **options))
    return bool(found)
