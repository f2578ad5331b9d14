"""Run planned batches: fill the step, call the model, sample. Does not know the policy or the state of requests.

`run` does all of it. `launch`, `sample` and `read` are its three parts, so that on a GPU a step may be launched while the
one before still runs: its rows take that step's tokens on the device. Nothing else of a step depends on these tokens
before `sample`, which comes after the earlier step was read. So penalties, seeds and rules see every token.
"""

from collections.abc import Sequence as Series
from dataclasses import dataclass, replace
from time import perf_counter, perf_counter_ns, sleep
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from dispatch.dispatched import Check, TokenDispatcher, no_errors
from expert_placement.load import WAIT_CAUSES, LoadFigures
from kvcache.images import ImageRowsError, axes_of, read_rows, rows_in
from kvcache.paged_cache import PagedCache
from kvcache.step import Drawn, Inputs, Span, Step
from moe.model import Model
from scheduler.policy.batch import Scheduled, StepBatch
from scheduler.policy.request import Logprobs, Request
from scheduler.policy.sequence import DraftedContext, Sequence, TokenContext
from scheduler.sampling.sampler import Drawing, Sampled, Sampler
from scheduler.step.draft_passes import DraftPasses


class Forward(Protocol):
    """Runs a step, as `moe.model.Model.forward`."""

    def __call__(
        self, token_T: Tensor, cache: PagedCache, logits_R: Tensor, *, keeps_hidden: bool = False
    ) -> Tensor:
        """Return logits [R, V]."""


SETTLE_S = 5.0  # interrupted waits end within milliseconds
SCORED_ROWS = 64  # prompt rows scored together; their logits take 64 x vocabulary x 4 bytes, 38 MB at 150,000


class Runner:
    """A rank's model, its cache, and the step that they share."""

    def __init__(
        self,
        model: Model,
        cache: PagedCache,
        dispatcher: TokenDispatcher,
        forward: Forward,
        sampler: Sampler,
        passes: DraftPasses | None = None,
    ) -> None:
        """Take a model and a cache with the blocks of the scheduler's pool.

        Args:
            dispatcher: The model's dispatcher of this epoch.
            forward: The model's forward, or a function that replays it.
            passes: Drafts with the model's own layers. None disables this.
        """
        self._model, self._cache, self._sampler = model, cache, sampler
        self._passes = passes
        self.begin_epoch(dispatcher, forward)

    def begin_epoch(self, dispatcher: TokenDispatcher, forward: Forward) -> None:
        """Continue with the ranks of another epoch and reset the counters. The arguments are those of the constructor."""
        self.dispatcher, self._forward, self._waits = dispatcher, forward, dispatcher.waits
        self.figures = LoadFigures()  # of the epoch, without those that dispatcher and model count
        self._ended_ns: int | None = None

    @property
    def cache(self) -> PagedCache:
        """The cache that steps write."""
        return self._cache

    @property
    def forward(self) -> Forward:
        """The function that runs steps: the model's forward, or one that replays it."""
        return self._forward

    def with_rows(self, request: Request) -> Request:
        """Return a request with the rows of its images, mapped from their files.

        Raises:
            ImageRowsError: They cannot be used.
        """
        if request.images and not self._model.skeleton.takes_images:
            raise ImageRowsError("images of this model are not supported with --enable-torch-compile")
        return replace(request, images=read_rows(request.images, self._model.hidden_dim))

    @property
    def step(self) -> Step:
        """The step that the model reads."""
        return self._model.step

    @torch.inference_mode()
    def run(
        self,
        batch: StepBatch,
        agreed_tokens: int = 0,
        *,
        has_prefill: bool = False,
        wait_cause: str = "other",
    ) -> Sampled:
        """Run a batch, or padded rows if it is empty. Collective over the model's group.

        Args:
            batch: Batch to run.
            agreed_tokens: `lockstep.Agreement.agreed_tokens`; equal on all ranks.
            has_prefill: `lockstep.Agreement.has_prefill`; counts the step as one with prompts.
            wait_cause: Why this rank waits in dispatches, if it waits for ranks.

        Returns:
            The items' samples, in order, and the logprobs of prompt tokens if requested.
        """
        underway = self.launch(batch, agreed_tokens, has_prefill=has_prefill, wait_cause=wait_cause)
        self.sample(underway)
        return self.read(underway)

    @torch.inference_mode()
    def launch(
        self,
        batch: StepBatch,
        agreed_tokens: int = 0,
        *,
        has_prefill: bool = False,
        wait_cause: str = "other",
        before: "Underway | None" = None,
    ) -> "Underway":
        """Run the model on a batch. On a GPU this only launches it. The arguments are those of `run`.

        Args:
            before: The step before, if it was not read yet. It must have been sampled.
        """
        begun_ns = perf_counter_ns()
        experts_s = self._model.load_counts.experts_s if has_prefill else 0.0
        scored = _scored(batch)
        inputs = fill_step(self.step, batch, agreed_tokens, before)
        with self._cache.progress.running():
            logits_RV = self._forward(inputs.token_T, self._cache, inputs.row_R, keeps_hidden=bool(scored))
        if has_prefill:
            experts_s = self._model.load_counts.experts_s - experts_s
        return Underway(
            batch=batch, logits_RV=logits_RV, scored=scored, begun_ns=begun_ns, wait_cause=wait_cause,
            has_prefill=has_prefill, experts_s=experts_s,
        )  # fmt: skip

    @torch.inference_mode()
    def sample(self, underway: "Underway") -> None:
        """Choose a launched step's tokens. On a GPU this only launches the choice. All earlier tokens must be known."""
        batch = underway.batch
        sampling = [context for item in batch.items for context in _contexts(item)]
        underway.drawing = self._sampler.begin(underway.logits_RV[: len(sampling)], sampling)
        underway.check = self.dispatcher.begin_check()

    @torch.inference_mode()
    def read(self, underway: "Underway") -> Sampled:
        """Wait for a step's tokens, and count the step. Steps are read in the order of their launches."""
        batch, scored = underway.batch, underway.scored
        assert underway.drawing is not None, "a step is sampled before it is read"
        sampled = underway.drawing.read()
        underway.check()
        if scored:
            sampled = sampled._replace(
                prompt_logprobs={part.request_id: self._score(part) for part in scored}
            )
        figures = self._times(underway.begun_ns, underway.wait_cause)._replace(
            steps=1,
            prefill_tokens=batch.num_prefill_tokens,
            decode_tokens=batch.num_tokens - batch.num_prefill_tokens,
            draft_tokens=sum(len(item.drafts) for item in batch.items),
        )
        underway.seconds = figures.step_s
        if underway.has_prefill:
            figures = figures._replace(
                prefill_steps=1, prefill_step_s=figures.step_s, prefill_experts_s=underway.experts_s
            )
        self.figures = self.figures.plus(figures)
        return sampled

    @torch.inference_mode()
    def fill_cache(self, model: Model, batch: StepBatch, agreed_tokens: int) -> None:
        """Run a batch with another model of the same ranks, only to write the cache. Collective. No figure counts it.

        Args:
            model: Its dispatcher is this epoch's.
            batch: An empty one runs padded rows.
            agreed_tokens: As for `run`.
        """
        inputs = fill_step(model.step, batch, agreed_tokens)
        with self._cache.progress.running():
            model.forward(inputs.token_T, self._cache, inputs.row_R[:0])
        self.dispatcher.begin_check()()
        self._waits = self.dispatcher.waits
        self.rest()

    def settle(self) -> None:
        """Wait until the device has ended all launched steps, at most some seconds: a collective may never end."""
        if self._model.device.type != "cuda":
            return
        ended: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        until_s = perf_counter() + SETTLE_S
        ended.record()
        while not ended.query() and perf_counter() < until_s:
            sleep(1e-3)

    def rest(self) -> None:
        """Note that the rank sleeps, so that the time until the next step is not counted as overhead."""
        self._ended_ns = None

    def _times(self, begun_ns: int, cause: str) -> LoadFigures:
        """End a step and return its times. It waits for ranks at dispatches for their attention, at combines for their experts.

        Half of the wire time is subtracted from each, because no rank causes it. A step that was launched behind another
        begins when that one ends.
        """
        before, waits = self._waits, self.dispatcher.waits
        self._waits = waits
        wire_ns = waits.wire_ns - before.wire_ns
        waited_ns = dict.fromkeys(WAIT_CAUSES, 0)
        waited_ns[cause] += max(0, waits.dispatch_ns - before.dispatch_ns - wire_ns // 2)
        waited_ns["experts"] += max(0, waits.combine_ns - before.combine_ns - wire_ns // 2)
        last_ns = begun_ns if self._ended_ns is None else self._ended_ns
        begun_ns = max(begun_ns, last_ns)
        self._ended_ns = perf_counter_ns()
        return LoadFigures(
            step_s=(self._ended_ns - begun_ns) * 1e-9,
            between_steps_s=(begun_ns - last_ns) * 1e-9,
            wait_causes_s=np.array([*waited_ns.values()]) * 1e-9,
        )

    @property
    def makes_drafts(self) -> bool:
        """Whether `make_drafts` must be called after every step, on all ranks."""
        return self._passes is not None

    def make_drafts(
        self,
        batch: StepBatch,
        tables: Series[Series[int]],
        depth: int,
        agreed_tokens: int,
        *,
        wait_cause: str,
    ) -> None:
        """Run the draft passes after a step; see `DraftPasses.run`. `wait_cause` is the step's."""
        assert self._passes is not None, "the model's layers for multi-token prediction were not loaded"
        begun_ns = perf_counter_ns()
        self._passes.run(batch, tables, depth, agreed_tokens)
        self.dispatcher.begin_check()()
        self.figures = self.figures.plus(self._times(begun_ns, wait_cause))

    def _score(self, scored: "_Scored") -> list[Logprobs]:
        """Return the logprobs of the prompt tokens after the rows. Scores a bounded number of rows at a time."""
        found: list[Logprobs] = []
        for first in range(0, len(scored.rows), SCORED_ROWS):
            rows = scored.rows[first : first + SCORED_ROWS]
            logits_CV = self._model.logits_of(torch.arange(rows.start, rows.stop, device=self._model.device))
            next_ids = scored.next_ids[first : first + SCORED_ROWS]
            found += self._sampler.score(logits_CV, next_ids, scored.num_top)
        return found


@dataclass(kw_only=True)
class Underway:
    """A launched step, until its tokens were read. `Runner` fills it."""

    batch: StepBatch
    logits_RV: Tensor
    scored: "list[_Scored]"
    begun_ns: int
    wait_cause: str
    has_prefill: bool
    experts_s: float
    drawing: Drawing | None = None  # its tokens, once they are sampled
    check: Check = no_errors  # of its dispatches
    seconds: float = 0.0  # from its launch, or the end of the step before, until its tokens were read

    @property
    def may_run_on(self) -> bool:
        """Whether the next step may be planned and launched before this one is read.

        It may not if the CPU may choose tokens again (a structure or a rule masks a row), if prompt tokens are scored from
        states that the next step overwrites, or if the next step needs the number of accepted drafts.
        """
        assert self.drawing is not None, "a step is sampled before the next one is launched"
        needs_host = any(item.drafts or item.sequence.has_structure for item in self.batch.items)
        return self.drawing.is_settled and not (self.scored or needs_host)

    def places(self) -> dict[Sequence, int]:
        """Return where the sampled sequences' tokens are in `drawing.token_R`. Of steps without drafts."""
        sampling = [item.sequence for item in self.batch.items if item.samples]
        return {sequence: place for place, sequence in enumerate(sampling)}


def _contexts(item: Scheduled) -> list[TokenContext]:
    """Return the context of each of an item's samples."""
    sequence = item.sequence
    drafted = (DraftedContext(sequence, item.drafts[:count]) for count in range(1, len(item.drafts) + 1))
    return [sequence, *drafted] if item.samples else []


class _Scored(NamedTuple):
    """Rows of a sequence with logits that score the next prompt token."""

    request_id: str
    rows: range  # of the step
    next_ids: list[int]
    num_top: int


def _scored(batch: StepBatch) -> list[_Scored]:
    scored, row = [], 0
    for sequence, start, length, *_ in batch.items:
        positions = sequence.unscored(start, start + length)
        if positions:
            rows = range(row + positions.start - start, row + positions.stop - start)
            next_ids = sequence.token_ids[positions.start + 1 : positions.stop + 1]
            request = sequence.request
            scored.append(
                _Scored(request.request_id, rows, next_ids, request.params.num_prompt_logprobs or 0)
            )
        row += length
    return scored


def fill_step(step: Step, batch: StepBatch, agreed_tokens: int, before: Underway | None = None) -> Inputs:
    """Put a batch into a step. Logits are computed for the rows that are sampled.

    Args:
        agreed_tokens: `lockstep.Agreement.agreed_tokens`.
        before: The step that samples the tokens that are still unknown.
    """
    spans: list[Span] = []
    tokens: list[int] = []
    rows: list[int] = []
    unknown: list[tuple[int, Sequence]] = []
    row = 0
    for item in batch.items:
        sequence, start, length = item.sequence, item.start, item.num_tokens
        place = sequence.request.adapter_place
        span = Span(start, length, sequence.block_ids, item.pieces, sequence.is_long, place)
        if images := sequence.request.images:
            span = span._replace(axes=axes_of(images, start, length), images=rows_in(images, start, length))
        spans.append(span)
        tokens += sequence.token_ids[start : start + length - len(item.drafts)]
        tokens += item.drafts
        row += length
        if len(tokens) < row:
            tokens.append(0)
            unknown.append((row - 1, sequence))
        rows += range(row - item.num_samples, row)
    step.fill(spans, batch.num_tokens - batch.num_prefill_tokens, agreed_tokens=agreed_tokens)
    return step.inputs(tokens, rows, _drawn(unknown, before))


def _drawn(unknown: list[tuple[int, Sequence]], before: Underway | None) -> Drawn | None:
    """Return the places of the tokens that the step before samples. None if all tokens are known."""
    if not unknown:
        return None
    assert before is not None and before.drawing is not None, "a token is unknown, and no step samples it"
    places = before.places()
    return Drawn(
        before.drawing.token_R, [row for row, _ in unknown], [places[sequence] for _, sequence in unknown]
    )
