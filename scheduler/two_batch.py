"""A step in two halves that take turns: while one's rows travel between ranks, the other computes.

The step's rows are cut in two of equally many tokens (a prompt may be cut like any chunk), in order, and the model's
forward runs once for each, on two threads that hand over to each other where rows or answers travel (`turns`,
`dispatch.alternating`). All ranks cut the same steps, because they agreed to (`lockstep`); a rank with one row or none
runs padding in its second half, and so does one whose prompts are scored, as these rows' hidden states are asked for later.
The first half leads in every layer, so the second one finds the keys and values that it wrote.

No row's bits depend on the rows beside it (I2), so tokens are those of the step in one piece. Each half has a step of its
own and the same pages. CUDA graphs are not replayed for such steps, so the two do not go together.
Idea: dual-batch overlap of vLLM and two-batch overlap of SGLang and DeepSeek-V3's serving.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from kvcache.paged_cache import PagedCache
from kvcache.step import Step
from moe.model import Model
from scheduler.policy.scheduler import Batch, Scheduled
from scheduler.step.batch_step import fill_step
from scheduler.turns import Turns


class TwoBatch:
    """Runs batches of one rank's model in halves.

    Attributes:
        num_halved: counter of steps.
    """

    def __init__(self, model: Model, cache: PagedCache, turns: Turns, steps: tuple[Step, Step]) -> None:
        """Take a model whose dispatcher alternates by `turns`, and two steps, of which the model has the first."""
        other = copy.copy(cache)  # the same pages
        self._model, self._caches, self._turns, self._steps = model, (cache, other), turns, steps
        self.num_halved = 0
        turns.on_turn = self._enter

    def run(self, batch: Batch, agreed_tokens: int, *, keeps_hidden: bool) -> Tensor:
        """Return the logits of the rows that are sampled from: [R, V]. Collective.

        Args:
            batch: as the scheduler planned it.
            agreed_tokens: see `lockstep.Agreement`.
            keeps_hidden: the first half is the whole batch, and `Model.logits_of` may be asked for its rows.
        """
        halves = (batch, _batch_of([], 0)) if keeps_hidden else halve(batch)
        programs = [
            self._program(index, half, agreed_tokens, keeps_hidden and index == 0)
            for index, half in enumerate(halves)
        ]
        logits = self._turns.run(*programs)
        self.num_halved += 1
        parts = [
            part[: sum(item.samples for item in half.items)]
            for part, half in zip(logits, halves, strict=True)
        ]
        return torch.cat(parts)

    def _enter(self, index: int) -> None:
        self._model.current.step = self._steps[index]

    def _program(
        self, index: int, half: Batch, agreed_tokens: int, keeps_hidden: bool
    ) -> Callable[[], Tensor]:
        inputs = fill_step(self._steps[index], half, agreed_tokens)

        def forward() -> Tensor:
            cache = self._caches[index]
            return self._model.forward(inputs.token_T, cache, inputs.row_R, keeps_hidden=keeps_hidden)

        return forward


def halve(batch: Batch) -> tuple[Batch, Batch]:
    """Cut a batch in two, in order; the first has as many tokens as the second, or one more."""
    first: list[Scheduled] = []
    second: list[Scheduled] = []
    room = half = -(-batch.num_tokens // 2)
    for item in batch.items:
        part = min(item.num_tokens, room)
        room -= part
        if part == item.num_tokens:
            first.append(item)
        elif part == 0:
            second.append(item)
        else:
            first.append(item._replace(num_tokens=part, samples=False))
            second.append(item._replace(start=item.start + part, num_tokens=item.num_tokens - part))
    num_decodes = batch.num_tokens - batch.num_prefill_tokens
    of_first = min(num_decodes, half)
    return _batch_of(first, of_first), _batch_of(second, num_decodes - of_first)


def _batch_of(items: list[Scheduled], num_decodes: int) -> Batch:
    num_tokens = sum(item.num_tokens for item in items)
    return Batch(items, num_tokens, num_tokens - num_decodes)
