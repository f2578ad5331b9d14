"""Decoder layers as programs: everything between two exchanges with other ranks is one call without the interpreter.

A layer's parts become a list of kernels over activations that are allocated once. With one rank, the list includes the
experts; otherwise it is cut where tokens are sent. The modules run the same kernels one by one, so a row's bits
are the same, with or without the experts in the program. `step` joins all layers.

Legend: T rows, R rows at most, D hidden dim, H query heads, G KV heads, K choices, I intermediate dim, S slots.
"""

import weakref
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from attention.cpu.attention import ATTEND, NUM_TILES, TILES, tile_tokens
from attention.cpu.heads import COSINES, HEADS, SINES
from attention.cpu.latents import PLACE
from attention.cpu.norm import NORM, NORMED, norm_rows
from attention.cpu.tiles import LANES
from dispatch.compiled.team import Program, program_of, run_alone
from dispatch.row_formats import PlainRows
from kvcache.paged_cache import PagedCache
from kvcache.step import Step
from moe.cpu.experts import PackedExpertLayer
from moe.cpu.kernels.local_experts import ANSWERS, OUT, SORT_PAIRS, add_row
from moe.cpu.kernels.routing import route_row
from moe.cpu.program.activations import Activations, Rows
from moe.cpu.program.expert_rows import ExpertsClock, RoutedRows, expert_rows
from moe.cpu.program.layer_parts import Attention, LayerParts
from moe.cpu.program.part_rows import PartRows
from moe.cpu.program.spread_experts import Chosen, SpreadExperts, exchange_of
from moe.expert_weights import grown_sample, is_grown


class Places(NamedTuple):
    """Indexes of a layer's rows into which every step writes addresses; empty if the layer has no such row."""

    norms: np.ndarray  # take the residual
    heads: np.ndarray  # take angles
    attention: np.ndarray  # take the step's tiles

    @classmethod
    def of(cls, program: Program, dtype: torch.dtype) -> "Places":
        """Find them by their kernels, before anything was written into them. The layer has pages of this type."""
        kernel = program[:, 0]
        is_norm = (kernel == NORM.address) & (program[:, NORMED] == 0)
        is_heads = (kernel == HEADS[dtype].address) | (kernel == PLACE[dtype].address)
        return cls(*map(np.flatnonzero, (is_norm, is_heads, kernel == ATTEND[dtype].address)))


class _Programs(NamedTuple):
    """Programs for certain pages."""

    pages: PagedCache
    rotary_dim: int
    before: Program  # up to the experts
    places: Places
    shared: Rows  # the shared expert, or the feed-forward of a dense layer
    after: Program  # from the experts' output
    chosen: Chosen  # input of the experts; without choices in a dense layer
    sums: int  # address of the residual that the output is added to
    shared_out: int  # address of the shared expert's output; 0 if there is none


class LayerRows(NamedTuple):
    """A layer's rows in a step's program. The objects stay the same until something else must run."""

    places: Places
    before: Program  # rows up to the exchange of experts, or all rows
    spread: SpreadExperts | None  # runs the exchange; None leaves it to `LayerProgram.ask_experts`
    after: Program | None  # rows from the experts' output, or a dense layer's whole feed-forward


class _Asked(NamedTuple):
    """Rows that include the experts, or are cut at the exchange, and the objects they were written for."""

    program: Program
    spread: SpreadExperts | None
    after: Program | None
    written_for: tuple[Any, ...]
    kept: Tensor | None  # memory that rows read, kept alive


class LayerProgram:
    """Runs one layer instead of its module.

    Attributes:
        may_be_whole: True if a trial has shown that a lone rank's experts can be part of the program.
        tile_tokens: Tokens per tile of its attention, see `Step.tiles`; 0 if it takes no tiles.
    """

    def __init__(self, module: nn.Module, parts: LayerParts, step: Step, activations: Activations) -> None:
        """`module` is the layer. It owns the program and runs calls that the program does not support."""
        self.parts, self.may_be_whole = parts, False
        attention, self.tile_tokens = parts.attention, 0
        if isinstance(attention, Attention):
            self.tile_tokens = tile_tokens(attention.heads, attention.kv_heads)
        self._module = weakref.ref(module)
        self._step, self._activations = step, activations
        # By whether any row of a step has an adapter.
        self._part_rows = [
            PartRows(parts.hidden, step, activations, has_adapters=each) for each in (False, True)
        ]
        self._programs: list[_Programs | None] = [None, None]
        self._asked: list[_Asked | None] = [None, None]
        self._clock = ExpertsClock()

    def forward(
        self, hidden_states: Tensor, *more: Any, position_embeddings: Any = None, pages: Any = None, **options: Any
    ) -> Any:  # fmt: skip
        """Run the layer: [1, T, D] to [1, T, D], new, padding rows zero. Collective unless the program is whole."""
        if more or pages is None or not self.takes(hidden_states, position_embeddings):
            module: Any = self._module()
            return type(module).forward(
                module, hidden_states, *more, position_embeddings=position_embeddings, pages=pages, **options
            )
        cosines, sines = position_embeddings
        pages.progress.note(self.parts.attention.layer)  # layers run in order
        places, first, _, after = self.rows(pages, cosines.shape[2])
        out = torch.empty_like(hidden_states)
        give_rows(first, places, hidden_states, cosines, sines)
        if self.tile_tokens:
            tiles = self._step.tiles(self.tile_tokens)
            first[places.attention, TILES] = tiles.ctypes.data
            first[places.attention, NUM_TILES] = len(tiles)
        if after is None:
            first[-1, OUT] = out.data_ptr()
            self._run(first)
            self.note()
            return out
        self._run(first)
        if self.parts.experts is not None:
            answers = self.ask_experts()  # alive until it has been read
            after[-1, ANSWERS] = answers.data_ptr()
        after[-1, OUT] = out.data_ptr()
        self._run(after)
        return out

    def rows(self, pages: PagedCache, rotary_dim: int, *, may_spread: bool = False) -> LayerRows:
        """Return the layer's rows for these pages and this number of rotary dims.

        `may_spread` allows rows with an exchange by `SpreadExperts` between them.
        """
        programs, experts = self._programs_for(pages, rotary_dim), self.parts.experts
        if self.may_be_whole and _is_alone(experts.expert_layer):
            asked = self._asked_in(programs, experts.expert_layer)
            return LayerRows(programs.places, asked.program, None, None)
        if may_spread and self.is_spread:
            asked = self._asked_in(programs, experts.expert_layer)
            return LayerRows(programs.places, asked.program, asked.spread, asked.after)
        return LayerRows(programs.places, programs.before, None, programs.after)

    @property
    def is_spread(self) -> bool:
        """Whether programs can exchange the experts' rows with other ranks."""
        if self.parts.experts is None:
            return False
        layer = self.parts.experts.expert_layer
        return exchange_of(layer) is not None and why_not_whole(layer, self.parts.hidden) is None

    def ask_experts(self) -> Tensor:
        """Run the layer's experts on the output of the rows before them: [T, D], new. Collective."""
        programs, experts, padded = self._current, self.parts.experts, self._step.num_padded
        given = (each[:padded] for each in programs.chosen)
        answers: Tensor = experts.expert_layer.run(experts, *given)
        return answers

    def takes(self, x: Tensor, angles: Any) -> bool:
        """Return whether the program supports these rows and these cosines and sines of their angles."""
        rows = self._step.num_padded
        return (
            x.shape == (1, rows, self.parts.hidden)
            and x.dtype is torch.float32
            and x.is_contiguous()
            and isinstance(angles, tuple)
            and len(angles) == 2
            and all(
                each.dtype is torch.float32 and each.is_contiguous() and each.shape[:2] == (1, rows)
                for each in angles
            )
        )

    def _run(self, program: Program) -> None:
        if self._step.team is None:
            run_alone(program)
        else:
            self._step.team.run(program)

    def note(self) -> None:
        """After the rows of a whole layer, record what `PackedExpertLayer.run` records of a step."""
        self.note_times()
        if self.wants_sample(self._step.num_tokens):
            expert_layer = self.parts.experts.expert_layer
            served_TD = self._current.chosen.x_TD[: self._step.num_tokens]
            expert_layer.sample_TD = grown_sample(expert_layer.sample_TD, served_TD)

    def note_times(self) -> None:
        """Record the time of experts that are part of the rows."""
        if self.parts.experts is not None:
            self._clock.note(self.parts.experts.expert_layer)

    def wants_sample(self, num_rows: int) -> bool:
        """Return whether the input of a whole layer's experts must be sampled, before the next layer overwrites it."""
        return is_grown(self.parts.experts.expert_layer.sample_TD, num_rows)

    @property
    def _current(self) -> _Programs:
        """The programs for the present step, which `rows` has returned."""
        programs = self._programs[self._step.has_adapters]
        assert programs is not None, "no rows were written for such a step"
        return programs

    def _programs_for(self, pages: PagedCache, rotary_dim: int) -> _Programs:
        kind = self._step.has_adapters
        programs = self._programs[kind]
        if programs is None or programs.pages is not pages or programs.rotary_dim != rotary_dim:
            programs = self._programs[kind] = self._write(pages, rotary_dim, self._part_rows[kind])
            self._asked[kind] = None
        return programs

    def _write(self, pages: PagedCache, rotary_dim: int, part_rows: PartRows) -> _Programs:
        parts, room, linear = self.parts, self._activations.room, part_rows.linear
        attention, D, facts = parts.attention, parts.hidden, part_rows.facts
        normed, projected, sums = room("normed", D), room("projected", D), room("sums", D)
        attended, rows = part_rows.mixer(attention, pages, rotary_dim)
        first = norm_rows(
            0, parts.input_norm.weight.data_ptr(), parts.input_norm.eps, D, normed.data_ptr(), facts
        )
        rows = [first, *rows, *linear(attention.output, attended, projected, attention.output_bias)]
        rows.append(
            norm_rows(
                0, parts.post_norm.weight.data_ptr(), parts.post_norm.eps, D, normed.data_ptr(), facts,
                added=projected.data_ptr(), sums=sums.data_ptr(),
            )
        )  # fmt: skip
        router, ids, weights = parts.router, torch.empty(0), torch.empty(0)
        if router is not None:
            columns, rule = router.weight.format.panels * LANES, router.rule
            logits = room("logits", columns)
            ids, weights = room("ids", rule.choices, torch.int64), room("weights", rule.choices)
            rows += [
                *linear(router.weight, normed, logits, router.bias),
                route_row(
                    logits.data_ptr(), columns * 4, int(parts.experts.num_experts), rule,
                    0 if router.correction_E is None else router.correction_E.data_ptr(), ids.data_ptr(),
                    weights.data_ptr(), facts,
                ),
            ]  # fmt: skip
        shared_out = room("shared", D)
        shared = [] if parts.mlp is None else part_rows.mlp(parts.mlp, normed, shared_out)
        of_all = {"shared": shared_out.data_ptr()} if router is not None and parts.mlp is not None else {}
        after = [*shared, add_row(shared_out.data_ptr(), sums.data_ptr(), D, facts, **of_all)]
        before, dtype = program_of(rows), pages.keys[attention.layer].dtype
        return _Programs(
            pages, rotary_dim, before, Places.of(before, dtype), shared, program_of(after), Chosen(normed, ids, weights),
            sums.data_ptr(), shared_out.data_ptr() if shared else 0,
        )  # fmt: skip

    def _asked_in(self, programs: _Programs, layer: PackedExpertLayer) -> _Asked:
        """Return rows that include the experts, or are cut at the exchange."""
        written_for = (
            programs.before, layer.up.address_S, layer.down.address_S, layer.choice, layer.counts, layer.dispatcher,
            self._activations.tokens_per_rank, None if layer.adapters is None else layer.adapters.up,
        )  # fmt: skip
        kind = self._step.has_adapters
        asked = self._asked[kind]
        if asked is None or any(
            one is not other for one, other in zip(asked.written_for, written_for, strict=True)
        ):
            write = self._write_whole if _is_alone(layer) else self._write_spread
            asked = self._asked[kind] = write(programs, layer, written_for)
        return asked

    def _write_spread(
        self, programs: _Programs, layer: PackedExpertLayer, written_for: tuple[Any, ...]
    ) -> _Asked:
        spread = SpreadExperts(
            self.parts.experts, layer, programs.chosen, self._step, self._activations, self._clock
        )
        add = add_row(
            spread.sums_TD.data_ptr(),
            programs.sums,
            self.parts.hidden,
            self._part_rows[0].facts,
            shared=programs.shared_out,
        )
        # The shared expert runs while other ranks' rows arrive.
        before = np.concatenate((programs.before, program_of([*spread.sending, *programs.shared])))
        return _Asked(before, spread, program_of([*spread.summing, add]), written_for, None)

    def _write_whole(
        self, programs: _Programs, layer: PackedExpertLayer, written_for: tuple[Any, ...]
    ) -> _Asked:
        activations, (x_TD, ids_TK, weights_TK), facts = (
            self._activations,
            programs.chosen,
            self._part_rows[0].facts,
        )
        num_slots, choices = layer.up.num_slots, ids_TK.shape[1]
        slot_of_E = layer.choice.slots(torch.arange(layer.num_experts)[:, None])  # it has one copy of each
        pairs = activations.rows * choices
        has_adapters = self._step.has_adapters and layer.adapters is not None
        num_groups = layer.num_groups if has_adapters else num_slots
        offsets = activations.room("offsets", num_groups + 1, torch.int64, rows=1).data_ptr()
        row_of, pair_of = (
            activations.room(name, 1, torch.int64, rows=pairs).data_ptr() for name in ("row_of", "pair_of")
        )
        asked = RoutedRows(x_TD, facts, row_of, offsets, pairs, num_groups)
        products, answers_PD = expert_rows(layer, asked, activations, self._clock)
        rows = [
            SORT_PAIRS.row(
                ids_TK.data_ptr(), choices, slot_of_E.data_ptr(), layer.num_experts, num_slots, offsets, row_of, pair_of,
                facts, 0 if layer.counts is None else layer.counts.address,
                self._step.adapter_T.data_ptr() if has_adapters else 0, num_groups,
            ),
            *products,
            *programs.shared,
            add_row(
                answers_PD.data_ptr(), programs.sums, self.parts.hidden, facts, choices=choices, pair_of=pair_of,
                weights=weights_TK.data_ptr(), shared=programs.shared_out,
            ),
        ]  # fmt: skip
        program = np.concatenate((programs.before, program_of(rows)))
        return _Asked(program, None, None, written_for, slot_of_E)


def give_rows(before: Program, places: Places, x: Tensor, cosines: Tensor, sines: Tensor) -> None:
    """Write a layer's inputs into its rows: x [1, T, D], and the cosines and sines of angles [1, T, E]."""
    before[places.norms, NORMED] = x.data_ptr()
    before[places.heads, COSINES], before[places.heads, SINES] = cosines.data_ptr(), sines.data_ptr()


def _is_alone(layer: PackedExpertLayer) -> bool:
    """Return whether rows stay on this rank, unchanged."""
    return layer.dispatcher.world_size == 1 and layer.dispatcher.row_format == PlainRows.name


def why_not_whole(layer: PackedExpertLayer, hidden: int) -> str | None:
    """Return why a lone rank's experts cannot be part of a program, or None if they can."""
    if not layer.has_silu:
        return "a gate that the kernels do not have"
    if layer.up.has_bias or layer.down.has_bias:
        return "biases"
    if layer.has_norm:
        return "a norm after each expert"
    if layer.down.width != hidden or layer.up.in_dim != hidden:
        return f"rows with a width other than {hidden}"
    return None
