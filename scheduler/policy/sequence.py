"""A sequence: what a rank knows about one request while it serves it.

`num_planned` runs ahead of `num_computed` while batches are in flight, so the next batch can be planned before the
last one's tokens are known. A pending token is one that an in-flight batch will sample: its position is planned
for already, its id is not known yet.

Only `scheduler.policy.scheduler` and what it is made of write here; the runner reads. Knows nothing of blocks, budgets
and batches, and no grammar: a `StructureMatcher` is what holds an answer to its structure.

Legend: V vocabulary.
"""

from collections.abc import Sequence as Series
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import numpy as np

from kvcache.prefix import LONG_ROOT_KEY, ROOT_KEY
from scheduler.policy.request import FinishReason, Logprobs, Request
from scheduler.policy.token_rules import TokenRules

Row = np.ndarray[tuple[int], np.dtype[np.float32]]


class StructureMatcher(Protocol):
    """One request's place in its form. It follows the request's tokens, never the batch's."""

    @property
    def has_ended(self) -> bool:
        """Whether the form is complete and nothing can follow."""

    @property
    def failure(self) -> str | None:
        """Why the request cannot go on; None while it can."""

    @property
    def is_ready(self) -> bool:
        """Whether what may come next is known, so that `mask` does not wait."""

    @property
    def is_late(self) -> bool:
        """Whether a `mask` since `begin_step` left its row because what may come next was not known in time."""

    def begin_step(self) -> None:
        """Note that a step is planned that will call `mask`."""

    def mask(self, logits_V: Row, after: Series[int] = ()) -> None:
        """Set what may not come next to -inf, in place. A matcher that fails, or is late, leaves the row and says so.

        Args:
            after: drafts that come before it: the first of those that `look_ahead` allowed.
        """

    def look_ahead(self, drafts: Series[int]) -> int:
        """How many of these tokens may come next, one behind the other, and let something follow; it fails at none."""

    def advance(self, token_id: int) -> None:
        """Follow a token that was sampled; one that the form does not allow is a failure."""


class TokenContext(Protocol):
    """What a request's next token is chosen by: a `Sequence`, or one as it would stand behind drafts."""

    @property
    def request(self) -> Request:
        """Whose parameters say how."""

    @property
    def token_ids(self) -> list[int]:
        """All tokens before it, prompt and generated."""

    @property
    def num_prompt_tokens(self) -> int:
        """Of those, the first."""

    @property
    def num_output_tokens(self) -> int:
        """The others."""

    @property
    def rules(self) -> TokenRules | None:
        """What the parameters say about single tokens."""

    @property
    def has_structure(self) -> bool:
        """Whether `mask` may forbid anything."""

    def mask(self, logits_V: Row) -> None:
        """Set what the structure forbids to -inf, in place."""


class SequenceStatus(Enum):
    """Where a sequence is. It waits again when it is preempted."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True)
class SequenceStates:
    """Which state slots a sequence holds; of models that keep states (`scheduler.policy.state_tables`)."""

    slots: list[int] = field(default_factory=list)  # of the states between its steps, the oldest first
    is_first_shared: bool = False  # the first of them is a snapshot, which was not promised
    num_promised: int = 0  # slots that it may still take
    snapshot_ends: set[int] = field(default_factory=set)  # positions where prompts leave a snapshot
    snapshots: list[tuple[int, int]] = field(default_factory=list)  # position and slot, of steps in flight
    newest_key: bytes | None = None  # of the snapshot that generated tokens left


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """A request being served: tokens [0, num_computed) have their KV in `block_ids`."""

    request: Request
    token_ids: list[int]  # prompt, replayed, generated; grows at commit only
    num_prompt_tokens: int
    number: int = 0  # in order of arrival at the rank
    block_ids: list[int] = field(default_factory=list)  # only grows while num_admissions stays the same
    states: SequenceStates = field(default_factory=SequenceStates)
    held_keys: list[bytes] = field(default_factory=list)  # `BlockPool.count_held`'s, while it waits
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed: int = 0  # tokens whose KV a committed batch wrote, or the prefix cache had
    num_planned: int = 0  # tokens in committed and in-flight batches
    num_prefill_tokens: int = 0  # tokens known at admission; planning those is prefill, the rest is decode
    num_pending: int = 0  # tokens that in-flight batches will sample
    has_drafts_in_flight: bool = False  # how many tokens the batch in flight will sample is not known
    is_long: bool = False  # it runs as the model runs sequences that are: see `Scheduler.rotary_limit`
    num_in_flight: int = (
        0  # uncommitted batches that hold this sequence; its blocks stay held while there are any
    )
    num_admissions: int = 0  # 2 and more after preemption
    num_cached_tokens: int = 0  # prompt tokens that the first admission found in the prefix cache
    queued_s: float = 0.0  # from arrival to the first admission
    rules: TokenRules | None = None
    # Of prompt tokens 1 and on, while they are wanted and not delivered.
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    matcher: StructureMatcher | None = None  # has followed all generated tokens; None: any text will do

    @classmethod
    def from_request(cls, request: Request, matcher: StructureMatcher | None = None) -> "Sequence":
        """Make a waiting sequence; replayed tokens count as generated and are recomputed, not delivered.

        Args:
            matcher: of the request's structure; has followed the replayed tokens.
        """
        token_ids = [*request.prompt_ids, *request.replayed_ids]
        return cls(
            request=request,
            token_ids=token_ids,
            num_prompt_tokens=len(request.prompt_ids),
            rules=TokenRules.of(request.params),
            matcher=matcher,
        )

    @property
    def root_key(self) -> bytes:
        """What keys of its blocks begin with: what was computed otherwise is another prefix."""
        return LONG_ROOT_KEY if self.is_long else ROOT_KEY

    @property
    def has_structure(self) -> bool:
        """See `TokenContext`."""
        return self.matcher is not None

    def mask(self, logits_V: Row) -> None:
        """See `TokenContext`."""
        if self.matcher is not None:
            self.matcher.mask(logits_V)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far, replayed ones included, pending ones not."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_delivered_tokens(self) -> int:
        """Tokens that this rank has handed out for the request."""
        return self.num_output_tokens - len(self.request.replayed_ids)

    @property
    def is_prefilling(self) -> bool:
        """Whether tokens known at admission are still to be planned."""
        return self.num_planned < self.num_prefill_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether logprobs of the prompt's tokens are asked for and not delivered: they go with the first token."""
        asked = self.request.params.num_prompt_logprobs is not None
        return asked and self.num_output_tokens == 0

    def unscored(self, start: int, end: int) -> range:
        """Positions among [start, end) whose logits say how likely the next prompt token was, where that is wanted
        and not known yet: what ran before a preemption is."""
        if not self.wants_prompt_logprobs:
            return range(0)
        return range(max(start, len(self.prompt_logprobs)), min(end, self.num_prompt_tokens - 1))

    def ends_within(self, num_more_tokens: int, max_model_len: int) -> bool:
        """Whether that many more tokens reach max_tokens or the model's length."""
        return self.num_left(max_model_len) <= num_more_tokens

    def num_left(self, max_model_len: int) -> int:
        """Tokens that may still be generated before max_tokens or the model's length is reached.

        A prompt may fill the model's length: its one token follows from what is there, and is never run itself.
        """
        most_tokens = max(max_model_len, self.num_prompt_tokens + 1)
        return min(self.request.params.max_tokens - self.num_output_tokens, most_tokens - len(self.token_ids))

    def finish_reason(self, max_model_len: int) -> FinishReason | None:
        """Say whether the last token ended the sequence, and why.

        A stop token among the first min_tokens outputs is an ordinary token. A structure that is complete ends it
        whatever min_tokens says: there is nothing left to say.
        """
        params = self.request.params
        if self.matcher is not None and self.matcher.has_ended:
            return FinishReason.STOP
        if self.num_output_tokens > params.min_tokens and self.token_ids[-1] in params.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.ends_within(0, max_model_len) else None


class DraftedContext:
    """A sequence as it would stand if its first drafts were its tokens; a `TokenContext`."""

    def __init__(self, sequence: Sequence, drafts: Series[int]) -> None:
        self._sequence, self._drafts = sequence, drafts

    @property
    def request(self) -> Request:
        """See `TokenContext`, as of all that follows."""
        return self._sequence.request

    @property
    def token_ids(self) -> list[int]:
        """New."""
        return [*self._sequence.token_ids, *self._drafts]

    @property
    def num_prompt_tokens(self) -> int:
        """The sequence's."""
        return self._sequence.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        """The sequence's and the drafts."""
        return self._sequence.num_output_tokens + len(self._drafts)

    @property
    def rules(self) -> TokenRules | None:
        """The sequence's."""
        return self._sequence.rules

    @property
    def has_structure(self) -> bool:
        """The sequence's."""
        return self._sequence.has_structure

    def mask(self, logits_V: Row) -> None:
        """Behind the drafts."""
        if self._sequence.matcher is not None:
            self._sequence.matcher.mask(logits_V, self._drafts)
