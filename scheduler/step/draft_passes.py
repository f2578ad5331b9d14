"""Drafting after a step: the model's layers for multi-token prediction run over its rows and draft the next tokens.

Each pass runs one layer and is collective, because its experts are on all ranks. All ranks run the same number of
passes; ranks with nothing to draft use padded rows. The first pass runs over all rows that the step computed, prompts
included, because the layer attends to its own keys and values of all earlier tokens. With one layer, each deeper pass
runs it again on the newest draft of each sequence; its cache entry for that place is overwritten when the real token is
known. With several layers, each runs over all of the step's rows, with tokens shifted one place further. After a
rejected draft, the entries of the second and later layers stay in the cache, so a later draft may be worse. Rows of
images are shifted like the tokens that they replace, and positions are those of the step, as in vLLM.

Rows of requests that end with the step, or continue on another rank, run too: other requests may use their blocks, from the cache
or a tier. Nothing takes these blocks before the next step is planned. The second and later layers leave out their last rows, because
the tokens of these are not known yet.

A draft is sampled as its token will be: with the request's rules, penalties and structure, and the random number of its
place. So if layer and model agree on the probabilities, they draw the same token.
"""

from collections.abc import Sequence as Series
from dataclasses import dataclass, field

import torch

from kvcache.images import axes_of, rows_in
from kvcache.paged_cache import PagedCache
from kvcache.step import Span
from moe.model import Model
from scheduler.drafts.drafter import Drafter, MadeDrafts
from scheduler.policy.batch import StepBatch
from scheduler.policy.sequence import DraftedContext, Sequence, SequenceStatus, TokenContext
from scheduler.sampling.sampler import Sampler


@dataclass
class _Line:
    """The rows of one sequence that the step computed, and the drafts after them."""

    sequence: Sequence
    block_ids: Series[int]  # also of a sequence that has ended
    start: int
    num_rows: int
    row: int  # index of the first one in the newest pass
    most: int = 0  # number of drafts to make
    drafts: list[int] = field(default_factory=list)

    @property
    def context(self) -> TokenContext:
        """Context in which the next draft is chosen."""
        return DraftedContext(self.sequence, tuple(self.drafts)) if self.drafts else self.sequence

    def span(self, start: int, length: int, ahead: int) -> Span:
        """Return the span of rows from position `start` on. Each takes the token `ahead` positions later."""
        sequence, images = self.sequence, self.sequence.request.images
        return Span(
            start,
            length,
            self.block_ids,
            is_long=sequence.is_long,
            axes=axes_of(images, start, length),
            images=rows_in(images, start + ahead, length),
        )

    def take(self, token_id: int) -> None:
        """Add a draft. Stop drafting after one that ends the answer or completes the structure."""
        self.drafts.append(token_id)
        sequence = self.sequence
        is_last = token_id in sequence.request.params.stop_token_ids
        if sequence.matcher is not None:
            is_last = is_last or sequence.matcher.look_ahead(self.drafts) < len(self.drafts)
        if is_last:
            self.most = len(self.drafts)


class DraftPasses:
    """Drafts with the layers of one model."""

    def __init__(
        self, model: Model, cache: PagedCache, sampler: Sampler, drafter: Drafter, made: MadeDrafts
    ) -> None:
        """`made`: receives the drafts; the drafter's source."""
        self._model, self._cache, self._sampler = model, cache, sampler
        self._drafter, self._made = drafter, made

    @torch.inference_mode()
    def run(self, batch: StepBatch, tables: Series[Series[int]], depth: int, agreed_tokens: int) -> None:
        """Draft after a step that was just committed. Collective. Writes only to the cache of the draft layers.

        Args:
            batch: Batch of the step.
            tables: The blocks of each item's sequence before the commit, which takes those of ended ones.
            depth: Most drafts per sequence; equal on all ranks, as is `agreed_tokens`.
            agreed_tokens: Agreed tokens of the step.
        """
        lines = _lines_of(batch, tables)
        drafting = [line for line in lines if _can_draft(line.sequence)]
        limits = self._drafter.limits([line.sequence for line in drafting])
        for line, limit in zip(drafting, limits, strict=True):
            left = line.sequence.num_left(self._drafter.max_model_len) - 1
            line.most = min(limit, depth, left)
        num_decodes = batch.num_tokens - batch.num_prefill_tokens
        num_layers = self._model.skeleton.num_mtp_layers
        for pass_ in range(max(depth, 1)):
            if pass_ < num_layers:
                self._run_all_rows(pass_, lines, num_decodes, agreed_tokens)
            else:
                self._run_newest(pass_, lines, agreed_tokens)
        for line in drafting:
            self._made.put(line.sequence, line.drafts)

    def _run_all_rows(self, pass_: int, lines: list[_Line], num_decodes: int, agreed_tokens: int) -> None:
        """Run a layer over all rows, each with the token `pass_ + 1` places ahead. Rows without one are left out."""
        spans, tokens, hidden, wanted, decodes = [], list[int](), list[int](), [], 0
        for line in lines:
            begin = line.start + 1 + pass_
            text = [*line.sequence.token_ids[begin : begin + line.num_rows]]
            # The number of drafts that come before the first row's token.
            unknown = max(0, begin - len(line.sequence.token_ids))
            text += line.drafts[unknown : unknown + line.num_rows - len(text)]
            rows = len(text)
            if rows:
                spans.append(line.span(line.start, rows, 1 + pass_))
                hidden += range(line.row, line.row + rows)
            is_decode = line.start >= line.sequence.num_prefill_tokens
            decodes += rows * is_decode
            line.row, line.num_rows = len(tokens), rows
            tokens += text
            if len(line.drafts) == pass_ < line.most:
                wanted.append(line)
        self._draft(pass_, spans, tokens, hidden, wanted, decodes, agreed_tokens)

    def _run_newest(self, pass_: int, lines: list[_Line], agreed_tokens: int) -> None:
        """Run the layer on each sequence's newest draft, at the draft's place."""
        spans, tokens, hidden, wanted = [], list[int](), list[int](), []
        block_tokens = self._model.step.block_tokens
        for line in lines:
            place = line.start + line.num_rows
            is_held = place < len(line.block_ids) * block_tokens
            if len(line.drafts) == pass_ < line.most and is_held:
                spans.append(line.span(place, 1, 1))
                hidden.append(line.row + line.num_rows - 1)
                line.start, line.num_rows, line.row = place, 1, len(tokens)
                tokens.append(line.drafts[-1])
                wanted.append(line)
        self._draft(pass_, spans, tokens, hidden, wanted, len(tokens), agreed_tokens)

    def _draft(
        self,
        pass_: int,
        spans: list[Span],
        tokens: list[int],
        hidden: list[int],
        wanted: list[_Line],
        num_decodes: int,
        agreed_tokens: int,
    ) -> None:
        """Run a layer and give each sequence in `wanted` its draft."""
        step = self._model.step
        step.fill(spans, num_decodes, agreed_tokens=agreed_tokens)
        inputs = step.inputs(tokens, [line.row + line.num_rows - 1 for line in wanted])
        hidden += [0] * (step.num_padded - len(hidden))
        hidden_T = torch.tensor(hidden, dtype=torch.int64).to(self._model.device)
        logits_RV = self._model.draft(pass_, inputs.token_T, self._cache, inputs.row_R, hidden_T)
        sampled = self._sampler.sample(logits_RV[: len(wanted)], [line.context for line in wanted])
        for line, token_id in zip(wanted, sampled.token_ids, strict=True):
            line.take(token_id)


def _lines_of(batch: StepBatch, tables: Series[Series[int]]) -> list[_Line]:
    """Return the rows before a known token, so without those of rejected drafts."""
    lines, row = [], 0
    for item, block_ids in zip(batch.items, tables, strict=True):
        kept = min(item.num_tokens, len(item.sequence.token_ids) - 1 - item.start)
        if kept > 0:
            lines.append(_Line(item.sequence, block_ids, item.start, kept, row))
        row += item.num_tokens
    return lines


def _can_draft(sequence: Sequence) -> bool:
    """Whether it runs, the newest token is known, and all tokens before it have run."""
    is_running = sequence.status is SequenceStatus.RUNNING
    return is_running and len(sequence.token_ids) == sequence.num_computed + 1
