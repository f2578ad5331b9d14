"""Engines whose GPU path runs in Triton's interpreter. Build them only in a process of the `interpreter` fixture."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvcache.images import Image, axes_of, rows_in
from kvcache.states import NO_STATE, StatePiece
from kvcache.step import Span
from moe.long_rotary import limit_of
from scheduler.assembly import Assembled
from scheduler.step.runner import Forward
from tests.support.engines.serving import build

SETTINGS: dict[str, Any] = {"max_model_len": 64, "max_num_batched_tokens": 48, "max_num_seqs": 3}


class Part(NamedTuple):
    """Tokens [start, end) of a sequence, run in one step."""

    sequence: int
    start: int
    end: int


def build_interpreted(directory: Path, **settings: Any) -> Assembled:
    """Assemble an engine for the interpreter."""
    os.environ["TRITON_INTERPRET"] = "1"
    return build(directory, device="interpreter", **{**SETTINGS, **settings})


def run_steps(
    built: Assembled,
    sequences: Sequence[Sequence[int]],
    steps: Sequence[Sequence[Part]],
    *,
    forward: Forward | None = None,
    only_last: bool = False,
    agreed_tokens: int = 0,
    adapters: Sequence[int] = (),
    images: Sequence[Sequence[Image]] = (),
) -> list[np.ndarray]:
    """Run given tokens in given steps. Return the logits of every token, [tokens, V] per sequence.

    A part of one token that does not start its sequence is a decode. Decodes come first in their step.

    Args:
        forward: Runs the steps; by default the model.
        only_last: Return only the logits of each part's last token.
        agreed_tokens: Most tokens of any rank in steps of decodes only; 0: the ranks agree on none.
        adapters: Place of each sequence's adapter; empty: no sequence has one.
        images: Images of each sequence; empty: no sequence has one.
    """
    model, step, cache = built.model, built.runner.step, built.runner._cache
    forward = forward or model.forward
    per_sequence = -(-int(built.max_model_len) // step.block_tokens)
    found: list[list[np.ndarray]] = [[] for _ in sequences]
    slots = [NO_STATE] * len(sequences)
    limit = limit_of(model.net.config)
    for parts in steps:
        spans = []
        for sequence, start, end in parts:
            # From the end of the pool, backwards: kernels must follow block tables and cannot guess.
            blocks = built.num_blocks - 1 - sequence * per_sequence - np.arange(-(-end // step.block_tokens))
            read = slots[sequence] if start else NO_STATE
            slots[sequence] = 2 * sequence + (read % 2 == 0)  # the other one of two
            piece = StatePiece(read, slots[sequence], end - start)
            is_long = limit is not None and len(sequences[sequence]) > limit
            pieces = (piece,) if step.has_states else ()
            adapter = adapters[sequence] if adapters else -1
            span = Span(start, end - start, blocks.tolist(), pieces, is_long, adapter)
            if images:
                axes = axes_of(images[sequence], start, end - start)
                span = span._replace(axes=axes, images=rows_in(images[sequence], start, end - start))
            spans.append(span)
        decodes = sum(part.start > 0 and part.end == part.start + 1 for part in parts)
        step.fill(spans, decodes, agreed_tokens=agreed_tokens if decodes == len(parts) else 0)
        tokens = [token for part in parts for token in sequences[part.sequence][part.start : part.end]]
        ends = np.cumsum([part.end - part.start for part in parts])
        wanted = (ends - 1).tolist() if only_last else range(len(tokens))
        inputs = step.inputs(tokens, wanted)
        logits = forward(inputs.token_T, cache, inputs.row_R)[: len(wanted)].cpu().numpy().copy()
        ends = np.arange(1, len(parts) + 1) if only_last else ends
        for part, rows in zip(parts, np.split(logits, ends[:-1]), strict=True):
            found[part.sequence].append(rows)
    return [np.concatenate(rows) for rows in found]


def mixed_steps(lengths: Sequence[int]) -> list[list[Part]]:
    """Return steps of two sequences: chunks of one prompt, the other prompt next to its decodes, then decodes of both."""
    first, second = lengths
    steps = [[Part(0, 0, 5)], [Part(0, 5, first - 3)]]
    steps += [[Part(0, first - 3, first - 2), Part(1, 0, second - 2)]]
    steps += [
        [Part(0, first - 2 + index, first - 1 + index), Part(1, second - 2 + index, second - 1 + index)]
        for index in range(2)
    ]
    return steps
