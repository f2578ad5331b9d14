"""A multi-token-prediction layer as one program, from a token's id and a hidden state to a draft's logits.

Like `net` for a decoder, it adds both ends to the layer's decoder layers. Before them: the embedding and
two norms, which write the halves of the projection's input. After them: a norm and the output projection. The
program must give the bits of the modules; `moe.cpu.adopt_layers` tries this before use.

Legend: T rows, R rows that need logits, D hidden dim, E rotary dims, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from attention.cpu.norm import norm_rows
from attention.cpu.tiles import LANES
from kvcache.step import Step
from moe.adopt.norms import epsilon, weight_of
from moe.cpu.kernels.products import GATHER, linear_row
from moe.cpu.program.activations import Activations, Rows
from moe.cpu.program.layer import LayerProgram
from moe.cpu.program.layer_parts import Norm
from moe.cpu.program.net import IDS, ROW_OF, ROWS_FROM, AngleTable, Projection, embed_row
from moe.cpu.program.step import Ends, StepProgram
from moe.cpu.weights.packed_weight import PackedWeight
from moe.mtp.layers import Drafted, Origin
from moe.text_part import body_of

_ROOM = "drafted"  # buffer of the last norm, and input of a deeper draft
_EMBEDS, _GATHERS = 0, 2  # indexes of program rows


class DraftProgram:
    """Runs a layer instead of its modules; a `moe.mtp.layers.DraftRunner`."""

    def __init__(
        self, net: Any, head: Any, layers: Sequence[LayerProgram], step: Step, activations: Activations
    ) -> None:
        """Take an MTP layer's head and all its decoder layers. Head and model must pass `is_fit` and `are_fit`."""
        self._step = step
        decoder: Any = body_of(net)
        self._angles, room = AngleTable(decoder.rotary_emb), activations.room
        embedding: PackedWeight = decoder.embed_tokens.weight
        before = self._joining(embedding, head, activations)
        E = self._angles.dims
        self._angles_at = len(before)
        before.append(self._angles.row(step, room("cosines", E), room("sines", E)))
        self._projection = Projection(
            net.get_output_embeddings().weight, room(_ROOM, embedding.in_dim), activations
        )
        ends = Ends(before, self._projection.rows)
        self._program = StepProgram(layers, _norm(head.norm), step, activations, ends, final=_ROOM)

    def draft(self, token_T: Tensor, origin: Origin, pages: Any, logits_R: Tensor) -> Drafted | None:
        """Draft as `Drafting.draft`. Return None in steps that need samples of experts' rows."""
        program, (hidden_TD, row_T) = self._program, origin
        if program.wants_samples:
            return None
        ids, row_of, from_T = token_T.contiguous(), logits_R.contiguous(), row_T.contiguous()
        logits_RV, told = self._projection.told(row_of)
        told += [
            (_EMBEDS, IDS, ids.data_ptr()),
            (_GATHERS, ROWS_FROM, hidden_TD.data_ptr()),
            (_GATHERS, ROW_OF, from_T.data_ptr()),
            *self._angles.told(self._angles_at, self._step),
        ]
        program.run(pages, self._angles.dims, told)
        return Drafted(self._projection.of(logits_RV), program.normed_TD[: self._step.num_padded])

    def _joining(self, embedding: PackedWeight, head: Any, activations: Activations) -> Rows:
        """Return rows from ids and hidden states to the input of the first decoder layer."""
        room, D, facts = activations.room, embedding.in_dim, self._step.facts.data_ptr() + 8
        embedded, given, joined = room("embedded", D), room("given", D), room("joined", 2 * D)
        halves = joined.data_ptr(), joined.data_ptr() + D * 4
        rows = [embed_row(embedding, embedded, self._step)]
        rows.append(_norm_row(head.enorm, embedded, halves[0], facts))
        rows.append(GATHER.row(0, D * 4, 0, facts, given.data_ptr()))
        rows.append(_norm_row(head.hnorm, given, halves[1], facts))
        weight: PackedWeight = head.eh_proj.weight
        quantised, taken = activations.taken(weight.format, joined, facts)
        scales = 0 if weight.scales is None else weight.scales.data_ptr()
        return [
            *rows,
            *quantised,
            linear_row(
                taken, weight.format.row_bytes, weight.panels.data_ptr(), scales, weight.format,
                room("hidden", D).data_ptr(), D * 4, facts,
            ),
        ]  # fmt: skip


def is_fit(head: Any, hidden: int) -> bool:
    """Return whether a program can be tried for an MTP layer's head."""
    norms = (head.enorm, head.hnorm, head.norm)
    weight = head.eh_proj.weight
    return (
        all(hasattr(norm, "multiplied") and epsilon(norm) is not None for norm in norms)
        and isinstance(weight, PackedWeight)
        and (weight.in_dim, weight.out_dim) == (2 * hidden, hidden)
        and hidden % LANES == 0
    )


def _norm(module: Any) -> Norm:
    eps = epsilon(module)
    assert eps is not None, "the norm has no epsilon"
    return Norm(weight_of(module), eps)


def _norm_row(module: Any, x: Tensor, out: int, rows_at: int) -> list[int]:
    """Return a norm's row that writes into one half of rows of twice the width."""
    norm, dim = _norm(module), x.shape[1]
    return norm_rows(
        x.data_ptr(), norm.weight.data_ptr(), norm.eps, dim, out, rows_at, out_stride=2 * dim * 4
    )
