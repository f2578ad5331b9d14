"""A decoder as one program. Python runs only to wait for other ranks.

If every layer of a decoder runs as a program (`layer`), their rows are joined, over one memory of
hidden values that they change in place: into a single program for a lone rank, otherwise into one from each wait for
other ranks to the next. A bit-for-bit trial before use checks that the decoder does nothing else
(`moe.cpu.adopt_layers`). `net` adds the embedding and the output projection.

Legend: T rows, D hidden dim, E rotary dims.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from attention.cpu.attention import NUM_TILES, TILES
from attention.cpu.norm import norm_rows
from attention.transformers_names import CACHE
from dispatch.compiled.native import load, store
from dispatch.compiled.team import Kernel, Program, program_of, run_alone
from kvcache.paged_cache import PagedCache
from kvcache.progress import WORD_BYTES
from kvcache.step import Step
from moe.cpu.kernels.local_experts import ANSWERS, OUT
from moe.cpu.program.activations import Activations, Rows
from moe.cpu.program.layer import LayerProgram, LayerRows, give_rows
from moe.cpu.program.layer_parts import Norm
from moe.cpu.program.spread_experts import SpreadExperts


def _note_layers(tile, at, num_layers):  # type: ignore[no-untyped-def]
    # It has no tiles, so threads need not meet for it. `kvcache.progress` describes the two words.
    if tile < 0:
        store(at, load(at + WORD_BYTES) + num_layers)
    return 0


NOTE_LAYERS = Kernel(_note_layers, 1)


class _Segment(NamedTuple):
    """Rows that run without Python."""

    program: Program
    attention: dict[int, np.ndarray]  # indexes of attention rows, by query tokens per tile
    opens: SpreadExperts | None  # exchange that its last rows begin
    then: Callable[[], Tensor | None] | None  # runs after it; None at the end of the step
    answers: int  # row that takes the address of the previous segment's answers; -1: none


class _Written(NamedTuple):
    """Segments and the rows that they were built from."""

    layers: list[LayerRows]
    segments: list[_Segment]
    spread: SpreadExperts | None  # the last one


class Ends(NamedTuple):
    """Rows before the first layer, on hidden values and angles, and after the last one's norm."""

    before: Rows
    after: Rows


# A word to write before a program runs: its row in the step, counted from the first or (negative) from the last; its
# index in the row, 0 being the kernel's address; its value.
Told = tuple[int, int, int]


class StepProgram:
    """All layers of a decoder, and the norm after them.

    Attributes:
        hidden_TD, normed_TD: Input of the first layer and output of the norm, with the most rows that a step can have.
    """

    def __init__(
        self, layers: Sequence[LayerProgram], norm: Norm, step: Step, activations: Activations, ends: Ends | None = None,
        *, final: str = "final",
    ) -> None:  # fmt: skip
        """`final` is the name of the norm's output buffer."""
        self._layers, self._norm, self._step, self._activations = list(layers), norm, step, activations
        self._ends = Ends([], []) if ends is None else ends
        D = norm.weight.numel()
        self.hidden_TD, self.normed_TD = activations.room("hidden", D), activations.room(final, D)
        self._written: list[_Written | None] = [None, None]  # by whether rows of the step have adapters

    def angles(self, rotary_dim: int) -> tuple[Tensor, Tensor]:
        """Return the memory for cosines and sines of a step's angles: [R, E]."""
        room = self._activations.room
        return room("cosines", rotary_dim), room("sines", rotary_dim)

    @property
    def wants_samples(self) -> bool:
        """Whether a layer needs a sample of its experts' input, which programs that include experts overwrite."""
        return any(map(self._wants_sample, self._layers))

    def run(self, pages: PagedCache, rotary_dim: int, told: Sequence[Told] = ()) -> None:
        """Run a step. Collective.

        Args:
            told: Words to write first.
        """
        written = self._written_for(pages, rotary_dim)
        for row, word, value in told:
            written.segments[-1 if row < 0 else 0].program[row, word] = value
        self._run(written)

    def _wants_sample(self, layer: LayerProgram) -> bool:
        # Rows that include experts do not keep the experts' input.
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
            answers = None if segment.then is None else segment.then()  # alive until they have been read
        if written.spread is not None:
            written.spread.finish()
        for layer in self._layers:
            layer.note_times()

    def _written_for(self, pages: PagedCache, rotary_dim: int) -> _Written:
        self._activations.make_room(max(self._step.num_tokens, self._step.agreed_tokens))
        layers = [layer.rows(pages, rotary_dim, may_spread=True) for layer in self._layers]
        kind = self._step.has_adapters
        written = self._written[kind]
        if written is None or any(
            one.before is not other.before or one.after is not other.after or one.spread is not other.spread
            for one, other in zip(layers, written.layers, strict=True)
        ):
            written = self._written[kind] = self._write(layers, pages, rotary_dim)
        return written

    def _write(self, layers: list[LayerRows], pages: PagedCache, rotary_dim: int) -> _Written:
        hidden, normed, (cosines, sines) = self.hidden_TD, self.normed_TD, self.angles(rotary_dim)
        segments: list[_Segment] = []
        parts: list[Program] = [program_of(self._ends.before)]
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
                places = sum(map(len, parts)) + rows.places.attention
                attention.setdefault(layer.tile_tokens, []).extend(places)
            layers_done = NOTE_LAYERS.row(pages.progress.address, layer.parts.attention.layer + 1)
            parts += [before, program_of([layers_done])]
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
            (before if after is None else after)[-1, OUT] = hidden.data_ptr()
        last = norm_rows(
            hidden.data_ptr(), self._norm.weight.data_ptr(), self._norm.eps, hidden.shape[1], normed.data_ptr(),
            self._step.facts.data_ptr() + 8,
        )  # fmt: skip
        parts.append(program_of([last, *self._ends.after]))
        end(None)
        return _Written(layers, segments, spread)


class DecoderProgram:
    """Runs a decoder instead of its module. Embedding and rotary angles are the decoder's own code."""

    def __init__(self, decoder: nn.Module, program: StepProgram) -> None:
        """`decoder` runs calls that the program does not support."""
        self._decoder, self._program = weakref.ref(decoder), program
        self._output: Any = None  # type of the decoder's output

    def returns(self, output: Any) -> None:
        """Record the type of the decoder's own output."""
        self._output = type(output)

    def forward(self, *more: Any, pages: Any = None, **options: Any) -> Any:
        """Run the decoder. Return its output with [1, T, D], valid until the next call. Collective."""
        decoder: Any = self._decoder()
        program = self._program
        if more or pages is None or program.wants_samples:
            return type(decoder).forward(decoder, *more, pages=pages, **options)
        embedded: Tensor = decoder.embed_tokens(options["input_ids"])
        cosines, sines = decoder.rotary_emb(embedded, options["position_ids"])
        rows, rotary_dim = embedded.shape[1], cosines.shape[-1]
        for room, value in zip(
            (program.hidden_TD, *program.angles(rotary_dim)), (embedded, cosines, sines), strict=True
        ):
            room[:rows] = value[0]
        program.run(pages, rotary_dim)
        return self._output(last_hidden_state=program.normed_TD[None, :rows], **{CACHE: options[CACHE]})
