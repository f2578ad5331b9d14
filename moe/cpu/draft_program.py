"""A multi-token-prediction layer as one program: from a token's id and a hidden state to a draft's logits (D13).

As `moe.cpu.net_program` puts a decoder between its ends, this puts the layer's decoder layers between theirs: the embedding
and the two norms, which write side by side what the projection takes, and the norm and the output projection behind. That
it gives the bits that the modules give is tried before it is used (`moe.cpu.adopt_layers`).

Legend: T rows, R rows whose logits are wanted, D hidden dim, E rotary dims, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from attention.cpu_norm import norm_rows
from attention.cpu_tiles import LANES
from kvcache.step import Step
from moe.adopt.norms import epsilon, weight_of
from moe.cpu.activations import Activations, Rows
from moe.cpu.layer_parts import Norm
from moe.cpu.layer_program import LayerProgram
from moe.cpu.net_program import IDS, ROW_OF, ROWS_FROM, Angles, Projection, embed_row
from moe.cpu.packed_weight import PackedWeight
from moe.cpu.products import gather_row, linear_row
from moe.cpu.step_program import Ends, StepProgram
from moe.mtp.layers import Drafted, Origin
from moe.text_part import body_of

_ROOM = "drafted"  # where the last norm writes, and where a deeper draft reads from before
_EMBEDS, _GATHERS = 0, 2  # rows


class DraftProgram:
    """Runs a layer in its modules' place; `moe.mtp.layers.Program`."""

    def __init__(
        self, net: Any, head: Any, layers: Sequence[LayerProgram], step: Step, activations: Activations
    ) -> None:
        """Take an MTP layer's head that `is_fit`, and all of its decoder layers, of a model whose ends are."""
        self._step = step
        decoder: Any = body_of(net)
        self._angles, room = Angles(decoder.rotary_emb), activations.room
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
        """See `Drafting.draft`."""
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
        """From ids and hidden states to what the first decoder layer takes."""
        room, D, facts = activations.room, embedding.in_dim, self._step.facts.data_ptr() + 8
        embedded, given, joined = room("embedded", D), room("given", D), room("joined", 2 * D)
        halves = joined.data_ptr(), joined.data_ptr() + D * 4
        rows = [embed_row(embedding, embedded, self._step)]
        rows.append(_norm_row(head.enorm, embedded, halves[0], facts))
        rows.append(gather_row(0, D * 4, 0, facts, given.data_ptr()))
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
    """Whether an MTP layer's head is such that a program may try it."""
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
    assert eps is not None, "a norm that is not fit"
    return Norm(weight_of(module), eps)


def _norm_row(module: Any, x: Tensor, out: int, rows_at: int) -> list[int]:
    """A norm's row, into one half of rows that are twice as wide."""
    norm, dim = _norm(module), x.shape[1]
    return norm_rows(
        x.data_ptr(), norm.weight.data_ptr(), norm.eps, dim, out, rows_at, out_stride=2 * dim * 4
    )
