"""A decoder as one program: between the embedding and the output projection Python runs only where tokens travel (D13).

Where every layer of a decoder runs as a program (`moe.cpu.layer_program`) their rows are put together, over one memory of
hidden values that they change in place: for a lone rank into a single program, for several into one from each exchange to
the next. What comes before the layers, the embedding and the rotary angles, is the decoder's own code. That this is all
that the decoder does is tried, to the bit, before it is used (`moe.cpu.adopt_layers`).

Legend: T rows, D hidden dim, E rotary dims.
"""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from attention.cpu_attention import NUM_TILES, TILES
from attention.cpu_norm import norm_rows
from dispatch.team import Program, program_of, run_alone
from kvcache.paged_cache import PagedCache
from kvcache.step import Step
from moe.cpu.layer_parts import Norm
from moe.cpu.layer_program import Activations, LayerProgram, LayerRows, give_rows
from moe.cpu.local_experts import ANSWERS, OUT


class _Segment(NamedTuple):
    """What runs without Python."""

    program: Program
    attention: dict[int, np.ndarray]  # its rows of attention, by the query tokens of a tile
    asks: LayerProgram | None  # whose experts are asked after it; None: the step has ended
    answers: int  # the row that is told where their answers are, of the next segment


class _Written(NamedTuple):
    """What the segments were put together from."""

    layers: list[LayerRows]
    segments: list[_Segment]
    hidden_TD: Tensor
    cosines_TE: Tensor
    sines_TE: Tensor
    normed_TD: Tensor


class StepProgram:
    """Runs a decoder in its module's place."""

    def __init__(
        self, decoder: nn.Module, layers: Sequence[LayerProgram], norm: Norm, step: Step, activations: Activations
    ) -> None:  # fmt: skip
        """Take all layers of a decoder and the norm after them; `decoder` answers what the program does not take."""
        self._decoder = weakref.ref(decoder)
        self._layers, self._norm, self._step, self._activations = list(layers), norm, step, activations
        self._output: Any = None  # the type of what the decoder returns
        self._written: _Written | None = None

    def returns(self, output: Any) -> None:
        """Learn from what the decoder itself returned."""
        self._output = type(output)

    def forward(self, *more: Any, pages: Any = None, **options: Any) -> Any:
        """See the module's; returns its output with [1, T, D] that stay until the next call. Collective."""
        decoder: Any = self._decoder()
        if more or pages is None or any(map(self._wants_sample, self._layers)):
            return type(decoder).forward(decoder, *more, pages=pages, **options)
        embedded: Tensor = decoder.embed_tokens(options["input_ids"])
        cosines, sines = decoder.rotary_emb(embedded, options["position_ids"])
        written, rows = self._written_for(pages, cosines.shape[-1]), embedded.shape[1]
        for room, value in (
            (written.hidden_TD, embedded), (written.cosines_TE, cosines), (written.sines_TE, sines)
        ):  # fmt: skip
            room[:rows] = value[0]
        self._run(written.segments)
        return self._output(
            last_hidden_state=written.normed_TD[None, :rows], past_key_values=options["past_key_values"]
        )

    def _wants_sample(self, layer: LayerProgram) -> bool:
        # Whole layers leave nothing of what their experts were given.
        return layer.may_be_whole and layer.wants_sample(self._step.num_tokens)

    def _run(self, segments: Sequence[_Segment]) -> None:
        step, answers = self._step, 0
        for index, segment in enumerate(segments):
            for tile_tokens, places in segment.attention.items():
                tiles = step.tiles(tile_tokens)
                segment.program[places, TILES] = tiles.ctypes.data
                segment.program[places, NUM_TILES] = len(tiles)
            if index:
                segment.program[segments[index - 1].answers, ANSWERS] = answers
            if step.team is None:
                run_alone(segment.program)
            else:
                step.team.run(segment.program)
            if segment.asks is not None:
                found = segment.asks.ask_experts()  # kept until it has been read
                answers = found.data_ptr()
        for layer in self._layers:
            layer.note_times()

    def _written_for(self, pages: PagedCache, rotary_dim: int) -> _Written:
        layers = [layer.rows(pages, rotary_dim) for layer in self._layers]
        written = self._written
        if written is None or any(
            one.before is not other.before or one.after is not other.after
            for one, other in zip(layers, written.layers, strict=True)
        ):
            written = self._written = self._write(layers, rotary_dim)
        return written

    def _write(self, layers: list[LayerRows], rotary_dim: int) -> _Written:
        D = self._norm.weight.numel()
        room = self._activations.room
        hidden, normed = room("hidden", D), room("final", D)
        cosines, sines = room("cosines", rotary_dim), room("sines", rotary_dim)
        segments: list[_Segment] = []
        parts: list[Program] = []
        attention: dict[int, list[int]] = {}

        def end(asks: LayerProgram | None, answers: int) -> None:
            places = {tile_tokens: np.array(rows) for tile_tokens, rows in attention.items()}
            segments.append(_Segment(np.concatenate(parts), places, asks, answers))
            parts.clear()
            attention.clear()

        for layer, rows in zip(self._layers, layers, strict=True):
            before, after = rows.before.copy(), None if rows.after is None else rows.after.copy()
            give_rows(before, rows.places, hidden, cosines, sines)
            if layer.tile_tokens:
                place = sum(map(len, parts)) + rows.places.attention
                attention.setdefault(layer.tile_tokens, []).append(place)
            parts.append(before)
            if after is not None:
                if layer.parts.experts is not None:
                    end(layer, len(after) - 1)
                parts.append(after)
            parts[-1][-1, OUT] = hidden.data_ptr()
        last = norm_rows(
            hidden.data_ptr(), self._norm.weight.data_ptr(), self._norm.eps, D, normed.data_ptr(),
            self._step.facts.data_ptr() + 8,
        )  # fmt: skip
        parts.append(program_of([last]))
        end(None, 0)
        return _Written(layers, segments, hidden, cosines, sines, normed)
