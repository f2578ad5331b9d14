"""A causal language model as one program: from token ids to logits.

If the decoder is one program (`step`), the embedding, the rotary angles and the output projection are added
to it. AngleTable are read from a table, which the model's own code fills as positions grow. A bit-for-bit trial before use
checks that the model does nothing else (`moe.cpu.adopt_layers`): models that scale or cap logits keep their own code.

Legend: T rows, R rows that need logits, D hidden dim, E rotary dims, P positions, V vocabulary.
"""

import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attention.cpu.tiles import LANES, TILES_VERSION
from attention.transformers_names import CACHE
from dispatch.compiled.native import copy, int32s, uint16s, words
from dispatch.compiled.team import Kernel
from kvcache.step import Step
from moe.cpu.kernels.products import GATHER, LINEAR, linear_row
from moe.cpu.program.activations import Activations, Rows
from moe.cpu.program.layer import LayerProgram
from moe.cpu.program.layer_parts import Norm
from moe.cpu.program.step import Ends, StepProgram, Told
from moe.cpu.weights.packed_weight import PackedWeight
from moe.text_part import body_of

_TILE_VALUES = 1 << 12
_FEWEST_POSITIONS = 1024
_BY_POSITION_ALONE = {"default", "linear", "llama3", "yarn", "proportional"}  # rotary types


def _embed(tile, ids_at, panels, value_bytes, dim, out, facts, vocabulary):  # type: ignore[no-untyped-def]
    # A token's weights are one column of a panel.
    rows = words(facts, 2)[1]
    at_once = max(1, _TILE_VALUES // dim)
    if tile < 0:
        return (rows + at_once - 1) // at_once
    last = min((tile + 1) * at_once, rows)
    ids = words(ids_at, last)
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


def _angles(  # type: ignore[no-untyped-def]
    tile, positions_at, cosines, sines, row_bytes, cosines_out, sines_out, facts,
):  # fmt: skip
    if tile < 0:
        return 1
    rows = words(facts, 2)[1]
    positions = words(positions_at, rows)
    for row in range(rows):
        copy(cosines_out + row * row_bytes, cosines + positions[row] * row_bytes, row_bytes)
        copy(sines_out + row * row_bytes, sines + positions[row] * row_bytes, row_bytes)
    return 0


EMBED, ANGLES = Kernel(_embed, TILES_VERSION), Kernel(_angles, TILES_VERSION)
# Places in rows that steps write to.
IDS, ROWS_FROM, ROW_OF = EMBED.place("ids_at"), GATHER.place("x"), GATHER.place("sources")
_COSINES, _SINES, _LOGITS = ANGLES.place("cosines"), ANGLES.place("sines"), LINEAR.place("out")
_ANSWERED = {"position_ids", CACHE, "use_cache"}  # options that the step determines, or constant ones


class AngleTable:
    """Cosines and sines of rotary angles by position, computed by the model's own code as positions grow."""

    def __init__(self, rotary: Any) -> None:
        self._rotary = rotary
        self._table = torch.empty(2, 0, 0)
        self.make(_FEWEST_POSITIONS)

    @property
    def dims(self) -> int:
        """Number of rotary dims E."""
        return self._table.shape[2]

    def make(self, num_positions: int) -> None:
        """Provide angles of this many positions, [2, P, E]. P doubles: with full vectors, a row has the bits of any batch."""
        made = self._table.shape[1]
        if made >= num_positions:
            return
        while made < num_positions:
            made = max(_FEWEST_POSITIONS, 2 * made)
        x = torch.empty(1, 1, 1)
        self._table = torch.stack([each[0] for each in self._rotary(x, torch.arange(made)[None])])

    def row(self, step: Step, cosines: Tensor, sines: Tensor) -> list[int]:
        """Return a program row that copies a step's angles to [R, E] each, from the addresses that `told` returns."""
        return ANGLES.row(
            step.position_T.data_ptr(), 0, 0, self.dims * 4, cosines.data_ptr(), sines.data_ptr(),
            step.facts.data_ptr() + 8,
        )  # fmt: skip

    def told(self, at: int, step: Step) -> list[Told]:
        """Provide the angles of a step's positions. Return the words that give their addresses to row `at`."""
        if step.num_sequences:
            self.make(int(step.context_S[: step.num_sequences].max()))
        cosines, sines = self._table
        return [(at, _COSINES, cosines.data_ptr()), (at, _SINES, sines.data_ptr())]


class Projection:
    """The output projection of selected rows, at the end of a program.

    Attributes:
        rows: The program's last rows.
    """

    def __init__(self, head: PackedWeight, normed: Tensor, activations: Activations) -> None:
        """`normed` is the input, [R, D]."""
        self._head, self._num_logits = head, np.zeros(1, np.int64)
        asked, count = activations.room("asked", head.in_dim), self._num_logits.ctypes.data
        quantised, given = activations.taken(head.format, asked, count)
        scales = 0 if head.scales is None else head.scales.data_ptr()
        self.rows: Rows = [
            GATHER.row(normed.data_ptr(), head.in_dim * 4, 0, count, asked.data_ptr()),
            *quantised,
            linear_row(
                given, head.format.row_bytes, head.panels.data_ptr(), scales, head.format, 0,
                head.format.panels * LANES * 4, count,
            ),
        ]  # fmt: skip

    def told(self, row_of: Tensor) -> tuple[Tensor, list[Told]]:
        """Return memory for these rows' logits, and the words that make the program write them there."""
        self._num_logits[0] = len(row_of)
        logits_RV = torch.empty(len(row_of), self._head.format.panels * LANES)
        return logits_RV, [(-len(self.rows), ROW_OF, row_of.data_ptr()), (-1, _LOGITS, logits_RV.data_ptr())]

    def of(self, logits_RV: Tensor) -> Tensor:
        """Remove the padding of the vocabulary."""
        num_tokens = self._head.out_dim
        return logits_RV if logits_RV.shape[1] == num_tokens else logits_RV[:, :num_tokens].contiguous()


def embed_row(embedding: PackedWeight, out: Tensor, step: Step) -> list[int]:
    """Return a program row that copies the weights of a step's tokens to [R, D]. A step writes the ids' address (`IDS`)."""
    return EMBED.row(
        0, embedding.panels.data_ptr(), embedding.panels.element_size(), embedding.in_dim, out.data_ptr(),
        step.facts.data_ptr() + 8, embedding.out_dim,
    )  # fmt: skip


class NetProgram:
    """Runs a model instead of its module."""

    def __init__(
        self, net: Any, layers: Sequence[LayerProgram], norm: Norm, step: Step, activations: Activations
    ) -> None:  # fmt: skip
        """Take all layers of a model that `are_fit` accepts. `net` runs calls that the program does not support."""
        self._net, self._step = weakref.ref(net), step
        decoder: Any = body_of(net)
        self._angles, embedding = AngleTable(decoder.rotary_emb), decoder.embed_tokens.weight
        room, D, E = activations.room, embedding.in_dim, self._angles.dims
        head = net.get_output_embeddings().weight
        self._adapters_of_ends = embedding.embedded_adapters, head.adapters
        self._projection = Projection(head, room("final", D), activations)
        before = [
            embed_row(embedding, room("hidden", D), step),
            self._angles.row(step, room("cosines", E), room("sines", E)),
        ]
        self._program = StepProgram(layers, norm, step, activations, Ends(before, self._projection.rows))

    def _adapts_ends(self) -> bool:
        """Return whether adapters may change the embedding or the output projection: modules apply these, no program does."""
        return self._step.has_adapters and not all(
            each is None or each.is_empty for each in self._adapters_of_ends
        )

    def forward(
        self, *more: Any, input_ids: Any = None, logits_to_keep: Any = None, pages: Any = None, **options: Any
    ) -> Any:  # fmt: skip
        """Run the model. Return an object with `logits`, [1, R, V], new, and `hidden_TD`, valid until the next call.

        Collective.
        """
        program, step = self._program, self._step
        is_known = (
            not more and pages is not None and not options.keys() - _ANSWERED and not self._adapts_ends()
        )
        if not is_known or not isinstance(logits_to_keep, Tensor) or program.wants_samples:
            net: Any = self._net()
            return type(net).forward(
                net, *more, input_ids=input_ids, logits_to_keep=logits_to_keep, pages=pages, **options
            )
        ids, row_of = input_ids.contiguous(), logits_to_keep.contiguous()
        logits_RV, told = self._projection.told(row_of)
        told += [(0, IDS, ids.data_ptr()), *self._angles.told(1, step)]
        program.run(pages, self._angles.dims, told)
        logits = self._projection.of(logits_RV)[None]
        return SimpleNamespace(logits=logits, hidden_TD=program.normed_TD[: step.num_padded])


def are_fit(net: Any) -> bool:
    """Return whether a program can be tried for a model's embedding, rotary angles and output projection."""
    decoder, head = body_of(net), net.get_output_embeddings()
    embedding, rotary = getattr(decoder, "embed_tokens", None), getattr(decoder, "rotary_emb", None)
    kind = getattr(rotary, "rope_type", None)  # a dict in models with one per kind of layer
    if head is None or embedding is None or not isinstance(kind, str) or kind not in _BY_POSITION_ALONE:
        return False
    weights = (head.weight, embedding.weight)
    return (
        all(isinstance(weight, PackedWeight) for weight in weights)
        and embedding.weight.scales is None
        and getattr(head, "bias", None) is None
        and len({weight.in_dim for weight in weights}) == 1
    )
