"""A causal language model as one program: from token ids to logits (D13).

Where the decoder is one (`moe.cpu.step_program`), the embedding, the rotary angles and the output projection are put at its
ends. Angles are read from a table, which the model's own code writes as positions come. That the model does nothing else is
tried, to the bit, before it is used (`moe.cpu.adopt_layers`): what scales or caps logits keeps its own code.

Legend: T rows, R rows whose logits are wanted, D hidden dim, E rotary dims, P positions, V vocabulary.
"""

import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attention.cpu_tiles import LANES, TILES_VERSION
from dispatch.native import copy, int32s, uint16s, words
from dispatch.team import WORDS, Kernel
from kvcache.step import Step
from moe.cpu.activations import Activations
from moe.cpu.layer_parts import Norm
from moe.cpu.layer_program import LayerProgram
from moe.cpu.packed_weight import PackedWeight
from moe.cpu.products import gather_row, linear_row
from moe.cpu.step_program import Ends, StepProgram
from moe.text_part import body_of

_TILE_VALUES = 1 << 12
_FEWEST_POSITIONS = 1024
_BY_POSITION_ALONE = {"default", "linear", "llama3", "yarn", "proportional"}  # kinds of rotary angles


def _embed(at, tile):  # type: ignore[no-untyped-def]
    # A token's weights are a column of its panel.
    w = words(at, WORDS)
    panels, value_bytes, dim, out, rows, vocabulary = w[1], w[2], w[3], w[4], words(w[5], 2)[1], w[6]
    at_once = max(1, _TILE_VALUES // dim)
    if tile < 0:
        return (rows + at_once - 1) // at_once
    last = min((tile + 1) * at_once, rows)
    ids = words(w[0], last)
    for row in range(tile * at_once, last):
        made = int32s(out + row * dim * 4, dim)
        if ids[row] < 0 or ids[row] >= vocabulary:
            made[:] = 0
            continue
        panel, lane = panels + (ids[row] // LANES) * dim * LANES * value_bytes, ids[row] % LANES
        if value_bytes == 4:
            full = int32s(panel, dim * LANES)
            for index in range(dim):
                made[index] = full[index * LANES + lane]
        else:
            half = uint16s(panel, dim * LANES)
            for index in range(dim):
                made[index] = half[index * LANES + lane] << 16
    return 0


def _angles(at, tile):  # type: ignore[no-untyped-def]
    w = words(at, WORDS)
    if tile < 0:
        return 1
    cosines, sines, row_bytes, rows = w[1], w[2], w[3], words(w[6], 2)[1]
    positions = words(w[0], rows)
    for row in range(rows):
        copy(w[4] + row * row_bytes, cosines + positions[row] * row_bytes, row_bytes)
        copy(w[5] + row * row_bytes, sines + positions[row] * row_bytes, row_bytes)
    return 0


EMBED, ANGLES = Kernel(_embed, TILES_VERSION), Kernel(_angles, TILES_VERSION)
# Words of rows that steps tell, the kernel's address being 0.
_IDS, _COSINES, _SINES, _ROW_OF, _LOGITS = 1, 2, 3, 3, 11
_ANSWERED = {"position_ids", "past_key_values", "use_cache"}  # options that are the step's, or always so


class NetProgram:
    """Runs a model in its module's place."""

    def __init__(
        self, net: Any, layers: Sequence[LayerProgram], norm: Norm, step: Step, activations: Activations
    ) -> None:  # fmt: skip
        """Take all layers of a model whose ends `are_fit`; `net` answers what the program does not take."""
        self._net, self._step, self._activations = weakref.ref(net), step, activations
        decoder: Any = body_of(net)
        self._rotary: Any = decoder.rotary_emb
        self._table = torch.empty(2, 0, 0)
        self._make_table(_FEWEST_POSITIONS)
        self._num_logits = np.zeros(1, np.int64)
        self._head: PackedWeight = net.get_output_embeddings().weight
        self._program = StepProgram(layers, norm, step, activations, self._ends(decoder.embed_tokens.weight))

    def forward(
        self, *more: Any, input_ids: Any = None, logits_to_keep: Any = None, pages: Any = None, **options: Any
    ) -> Any:  # fmt: skip
        """See the module's; returns what has `logits`, [1, R, V], new, and `hidden_TD`, which stays until the next call.

        Collective.
        """
        program, step = self._program, self._step
        is_known = not more and pages is not None and not options.keys() - _ANSWERED
        if not is_known or not isinstance(logits_to_keep, Tensor) or program.wants_samples:
            net: Any = self._net()
            return type(net).forward(
                net, *more, input_ids=input_ids, logits_to_keep=logits_to_keep, pages=pages, **options
            )
        if step.num_sequences:
            self._make_table(int(step.context_S[: step.num_sequences].max()))
        rows, head = len(logits_to_keep), self._head
        ids, row_of = input_ids.contiguous(), logits_to_keep.contiguous()
        logits_RV = torch.empty(rows, head.format.panels * LANES)
        self._num_logits[0] = rows
        cosines, sines = self._table
        program.run(
            pages, self._table.shape[2],
            [
                (0, _IDS, ids.data_ptr()), (1, _COSINES, cosines.data_ptr()), (1, _SINES, sines.data_ptr()),
                (self._gathers, _ROW_OF, row_of.data_ptr()), (-1, _LOGITS, logits_RV.data_ptr()),
            ],
        )  # fmt: skip
        if logits_RV.shape[1] != head.out_dim:
            logits_RV = logits_RV[:, : head.out_dim].contiguous()
        return SimpleNamespace(logits=logits_RV[None], hidden_TD=program.normed_TD[: step.num_padded])

    def _ends(self, embedding: PackedWeight) -> Ends:
        step, room, head = self._step, self._activations.room, self._head
        D, E, facts = embedding.in_dim, self._table.shape[2], step.facts.data_ptr() + 8
        hidden, normed, asked = (room(name, D) for name in ("hidden", "final", "asked"))
        cosines, sines = room("cosines", E), room("sines", E)
        count = self._num_logits.ctypes.data
        quantised, given = self._activations.taken(head.format, asked, count)
        self._gathers = -2 - len(quantised)
        scales = 0 if head.scales is None else head.scales.data_ptr()
        value_bytes = embedding.panels.element_size()
        return Ends(
            [
                EMBED.row(0, embedding.panels.data_ptr(), value_bytes, D, hidden.data_ptr(), facts, embedding.out_dim),
                ANGLES.row(step.position_T.data_ptr(), 0, 0, E * 4, cosines.data_ptr(), sines.data_ptr(), facts),
            ],
            [
                gather_row(normed.data_ptr(), D * 4, 0, count, asked.data_ptr()),
                *quantised,
                linear_row(
                    given, head.format.row_bytes, head.panels.data_ptr(), scales, head.format, 0,
                    head.format.panels * LANES * 4, count,
                ),
            ],
        )  # fmt: skip

    def _make_table(self, num_positions: int) -> None:
        """Have the angles of so many positions, [2, P, E], P doubling: full vectors, so that a row's bits are those of any batch."""
        made = self._table.shape[1]
        if made >= num_positions:
            return
        while made < num_positions:
            made = max(_FEWEST_POSITIONS, 2 * made)
        x = torch.empty(1, 1, 1)
        self._table = torch.stack([each[0] for each in self._rotary(x, torch.arange(made)[None])])


def are_fit(net: Any) -> bool:
    """Whether a model's ends are such that a program may try them."""
    decoder, head = body_of(net), net.get_output_embeddings()
    embedding, rotary = getattr(decoder, "embed_tokens", None), getattr(decoder, "rotary_emb", None)
    if head is None or embedding is None or getattr(rotary, "rope_type", None) not in _BY_POSITION_ALONE:
        return False
    weights = (head.weight, embedding.weight)
    return (
        all(isinstance(weight, PackedWeight) for weight in weights)
        and embedding.weight.scales is None
        and getattr(head, "bias", None) is None
        and len({weight.in_dim for weight in weights}) == 1
    )
