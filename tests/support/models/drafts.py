"""Run a model's forwards and drafts without an engine: whole texts first, then drafts of some of their rows."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from kvcache.paged_cache import BLOCK_TOKENS, PagedCache
from kvcache.step import Span
from moe.model import Model, Skeleton
from scheduler.moves.start_placement import start_placement
from scheduler.policy.config import EngineConfig
from scheduler.step.groups import hosts_of, open_groups
from scheduler.step.parts import backend_of, open_dispatcher
from tests.support.placement.placements import random_placement

BLOCKS = 4  # of one text


class Rows(NamedTuple):
    """Consecutive rows of one text in a draft.

    Attributes:
        text: Index of the text. first: Position of the first row. tokens: Those after each row. hidden: Row of the previous call.
    """

    text: int
    first: int
    tokens: list[int]
    hidden: list[int]


class DraftingModel(NamedTuple):
    """A rank's model and its cache."""

    model: Model
    cache: PagedCache

    def forward(
        self, texts: Sequence[list[int]], firsts: Sequence[int] = (), *, keeps_hidden: bool = False
    ) -> np.ndarray:
        """Run these tokens of texts, from the positions `firsts` (default 0) on. Return logits [rows, V]. Collective."""
        firsts = firsts or [0] * len(texts)
        parts = [
            Rows(at, first, text, []) for at, (text, first) in enumerate(zip(texts, firsts, strict=True))
        ]
        self._fill(parts)
        inputs = self.model.step.inputs(
            [token for text in texts for token in text], range(sum(map(len, texts)))
        )
        logits = self.model.forward(inputs.token_T, self.cache, inputs.row_R, keeps_hidden=keeps_hidden)
        return logits.cpu().numpy()

    def draft(self, depth: int, parts: Sequence[Rows]) -> list[np.ndarray]:
        """Run drafts of rows. Return logits [rows, V] for each part. Collective."""
        step = self.model.step
        self._fill(parts)
        tokens = [token for part in parts for token in part.tokens]
        inputs = step.inputs(tokens, range(len(tokens)))
        hidden = torch.zeros(step.num_padded, dtype=torch.int64)
        hidden[: len(tokens)] = torch.tensor(
            [row for part in parts for row in part.hidden], dtype=torch.int64
        )
        logits = self.model.draft(
            depth, inputs.token_T, self.cache, inputs.row_R, hidden.to(self.model.device)
        )
        ends = np.cumsum([len(part.tokens) for part in parts])
        return np.split(logits.cpu().numpy(), ends[:-1]) if parts else []

    def _fill(self, parts: Sequence[Rows]) -> None:
        spans = [
            Span(part.first, len(part.tokens), range(part.text * BLOCKS, (part.text + 1) * BLOCKS))
            for part in parts
        ]
        self.model.step.fill(spans)


def rows_of(first: int, tokens: list[int], row: int = 0) -> list[Rows]:
    """Return rows of the only text that continue from row `row` of the previous call."""
    return [Rows(0, first, tokens, list(range(row, row + len(tokens))))]


def open_drafting(directory: Path, *, device: str = "cpu", slots: int = 0) -> DraftingModel:
    """Load this rank's share of a model with its multi-token-prediction layers. It runs alone unless in a pool.

    Args:
        slots: Slots per layer on each rank, with experts placed at random. 0 places them evenly.
    """
    if device == "interpreter":
        os.environ["TRITON_INTERPRET"] = "1"
    world = {"rank": dist.get_rank(), "world_size": dist.get_world_size()} if dist.is_initialized() else {}
    config = EngineConfig(directory=directory, kv_cache_bytes=1 << 20, device=device, **world)
    backend = backend_of(config)
    skeleton = Skeleton(directory, backend, has_mtp=True)
    group, _ = open_groups(config)
    placement = start_placement(
        len(skeleton.experts), skeleton.num_experts, config.world_size, eplb=config.eplb_config, hosts=hosts_of(group), file=None
    )  # fmt: skip
    if slots:
        placement = random_placement(
            placement.num_layers, placement.num_experts, config.world_size, slots, seed=5
        )
    step = backend.make_step(
        max_tokens=96, max_sequences=4, max_blocks=BLOCKS, block_tokens=BLOCK_TOKENS, threads=1,
        num_ranks=config.world_size,
    )  # fmt: skip
    model = Model(
        skeleton, dispatcher=open_dispatcher(config, backend, group, placement.slots_per_rank), placement=placement,
        rank=config.rank, step=step,
    )  # fmt: skip
    return DraftingModel(model, backend.make_cache(skeleton.cache_shapes, 4 * BLOCKS, 4, step))
