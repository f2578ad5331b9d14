"""A decoder as one program: between the embedding and the output projection Python runs only where tokens travel (D13).

Where every layer of a decoder runs as a program (`moe.cpu.layer_program`) their rows are put together, over one memory of
hidden values that they change in place: for a lone rank into a single program, for several into one from each wait for
the others to the next. What comes before the layers, the embedding and the rotary angles, is the decoder's own code. That this is all
that the decoder does is tried, to the bit, before it is used (`moe.cpu.adopt_layers`).

Legend: T rows, D hidden dim, E rotary dims.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from attention.cpu_attention import NUM_TILES, TILES
from attention.cpu_norm import norm_rows
from dispatch.team import Program, program_of, run_alone
from kvcache.paged_cache import PagedCache
from kvcache.step import Step
from moe.cpu.activations import Activations
from moe.cpu.layer_parts import Norm
from moe.cpu.layer_program import LayerProgram, LayerRows, give_rows
from moe.cpu.local_experts import ANSWERS, OUT
from moe.cpu.spread_experts import SpreadExperts


class _Segment(NamedTuple):
    """What runs without Python."""

    program: Program
    attention: dict[int, np.ndarray]  # its rows of attention, by the query tokens of a tile
    opens: SpreadExperts | None  # what its last rows are for
    then: Callable[[], Tensor | None] | None  # what comes after it; None: the step has ended
    answers: int  # the row that is told where the answers are that came before; -1: none


class _Written(NamedTuple):
    """What the segments were put together from."""

    layers: list[LayerRows]
    segments: list[_Segment]
    spread: SpreadExperts | None  # the last one
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
        self._run(written)
        return self._output(
            last_hidden_state=written.normed_TD[None, :rows], past_key_values=options["past_key_values"]
        )

    def _wants_sample(self, layer: LayerProgram) -> bool:
        # Rows with experts in them leave nothing of what those were given.
        return (layer.may_be_whole or layer.is_spread) and layer.wants_sample(self._step.num_tokens)

    def _run(self, written: _Written) -> None:
        step, answers = self._step, None
        for segment in written.segments:
            for tile_tokens, places in segment.attention.items():
                tiles = step.tiles(tile_tokens)
                segment.program[places, TILES] = tiles.ctypes.data
                segment.program[places, NUM_TILES] = len(tiles)
            if answers is not None:
                segment.program[segment.answers, ANSWERS] = answers.data_ptr()
            if segment.opens is not None:
                segment.opens.open()
            if step.team is None:
                run_alone(segment.program)
            else:
                step.team.run(segment.program)
            answers = None if segment.then is None else segment.then()  # kept until they have been read
        if written.spread is not None:
            written.spread.finish()
        for layer in self._layers:
            layer.note_times()

    def _written_for(self, pages: PagedCache, rotary_dim: int) -> _Written:
        self._activations.make_room(max(self._step.num_tokens, self._step.agreed_tokens))
        layers = [layer.rows(pages, rotary_dim, may_spread=True) for layer in self._layers]
        written = self._written
        if written is None or any(
            one.before is not other.before or one.after is not other.after or one.spread is not other.spread
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
        opens: SpreadExperts | None = None
        answers = -1

        def end(then: Callable[[], Tensor | None] | None) -> None:
            places = {tile_tokens: np.array(rows) for tile_tokens, rows in attention.items()}
            segments.append(_Segment(np.concatenate(parts), places, opens, then, answers))
            parts.clear()
            attention.clear()

        spread = None
        for layer, rows in zip(self._layers, layers, strict=True):
            before, after = rows.before.copy(), None if rows.after is None else rows.after.copy()
            give_rows(before, rows.places, hidden, cosines, sines)
            if layer.tile_tokens:
                place = sum(map(len, parts)) + rows.places.attention
                attention.setdefault(layer.tile_tokens, []).append(place)
            parts.append(before)
            if rows.spread is not None:
                opens = spread = rows.spread
                end(spread.meet_with_rows)
                opens, answers = None, -1
                parts.append(spread.answering)
                end(spread.meet_with_answers)
            elif after is not None and layer.parts.experts is not None:
                end(layer.ask_experts)
                answers = len(after) - 1
            if after is not None:
                parts.append(after)
            parts[-1][-1, OUT] = hidden.data_ptr()
        last = norm_rows(
            hidden.data_ptr(), self._norm.weight.data_ptr(), self._norm.eps, D, normed.data_ptr(),
            self._step.facts.data_ptr() + 8,
        )  # fmt: skip
        parts.append(program_of([last]))
        end(None)
        return _Written(layers, segments, spread, hidden, cosines, sines, normed)
