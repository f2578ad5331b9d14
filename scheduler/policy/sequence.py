"""A sequence: a rank's state of one request while it serves it.

`num_planned` runs ahead of `num_computed` while batches are in flight, so that the next batch can be planned before
the last one's tokens are known. A pending token is one that an in-flight batch will sample: its position is planned,
but its id is not known yet.

Only `scheduler.policy.scheduler` and its parts write here; the runner reads. Does not know blocks, budgets, batches or
grammars. A `StructureMatcher` keeps an answer to its structure.

Legend: V vocabulary.
"""

from collections.abc import Sequence as Series
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import numpy as np

from kvcache.prefix import LONG_ROOT_KEY, ROOT_KEY, adapted, salted, with_weights
from kvcache.tiers.jobs import FetchJob
from scheduler.policy.request import FinishReason, Logprobs, Request
from scheduler.policy.token_rules import TokenRules

Row = np.ndarray[tuple[int], np.dtype[np.float32]]


class StructureMatcher(Protocol):
    """One request's position in its structure. Follows the request's tokens, not the batch's."""

    @property
    def has_ended(self) -> bool:
        """Whether the structure is complete and nothing can follow."""

    @property
    def failure(self) -> str | None:
        """Why the request cannot continue, or None if it can."""

    @property
    def is_ready(self) -> bool:
        """Whether the next mask is computed, so that `mask` does not wait."""

    @property
    def is_late(self) -> bool:
        """Whether a `mask` since `begin_step` left its row unchanged because the mask was not ready in time."""

    def begin_step(self) -> None:
        """Note that a planned step will call `mask`."""

    def mask(self, logits_V: Row, after: Series[int] = ()) -> None:
        """Set forbidden tokens to -inf, in place. If the matcher fails or is late, the row stays unchanged.

        Args:
            after: Drafts before this position: the first of those that `look_ahead` allowed.
        """

    def look_ahead(self, drafts: Series[int]) -> int:
        """Return how many of these tokens, in order, are allowed and do not complete the structure. Never fails."""

    def advance(self, token_id: int) -> None:
        """Follow a sampled token. A token that the structure forbids sets `failure`."""


class TokenContext(Protocol):
    """The context in which a request's next token is chosen: a `Sequence`, or one extended by drafts."""

    @property
    def request(self) -> Request:
        """The request with the sampling parameters."""

    @property
    def token_ids(self) -> list[int]:
        """All earlier tokens, prompt and generated."""

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens, which come first."""

    @property
    def num_output_tokens(self) -> int:
        """Number of generated tokens."""

    @property
    def rules(self) -> TokenRules | None:
        """The parameters' rules for single tokens."""

    @property
    def has_structure(self) -> bool:
        """Whether `mask` may forbid tokens."""

    def mask(self, logits_V: Row) -> None:
        """Set tokens that the structure forbids to -inf, in place."""


class SequenceStatus(Enum):
    """State of a sequence. A preempted one waits again."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True)
class SequenceStates:
    """The state slots of a sequence, for models that keep states (`scheduler.policy.state_tables`)."""

    slots: list[int] = field(default_factory=list)  # of the states between its steps, oldest first
    is_first_shared: bool = False  # the first slot is a shared snapshot and was not promised
    has_released: bool = False  # the oldest step in flight needs its first slot no longer
    num_promised: int = 0  # slots that it may still take
    snapshot_ends: set[int] = field(default_factory=set)  # prompt positions where snapshots are taken
    snapshots: list[tuple[int, int]] = field(default_factory=list)  # position and slot, of steps in flight
    newest_key: bytes | None = None  # of the newest snapshot within generated tokens


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """A request being served. The KV of tokens [0, num_computed) is in `block_ids`."""

    request: Request
    token_ids: list[int]  # prompt, replayed, generated; only `commit` appends
    num_prompt_tokens: int
    number: int = 0  # in order of arrival at the rank
    block_ids: list[int] = field(default_factory=list)  # only grows while num_admissions stays the same
    key_tokens: list[int] = field(default_factory=list)  # cache of `key_ids` with images
    states: SequenceStates = field(default_factory=SequenceStates)
    held_keys: list[bytes] = field(default_factory=list)  # cache of `BlockPool.count_held` while it waits
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed: int = 0  # tokens whose KV a committed batch wrote, or the prefix cache had
    num_planned: int = 0  # tokens in committed and in-flight batches
    num_prefill_tokens: int = 0  # `num_prefillable` at admission: planning these is prefill
    num_pending: int = 0  # tokens that in-flight batches will sample
    has_drafts_in_flight: bool = False  # the batch in flight will sample an unknown number of tokens
    weights: str = ""  # digest of the weights that compute it; "" for the checkpoint's
    repeats_decodes: bool = False  # see `num_prefillable`
    is_long: bool = False  # computed in the model's way for long sequences: see `SchedulerLimits`
    num_in_flight: int = 0  # uncommitted batches that hold this sequence; until then its blocks stay held
    num_admissions: int = 0  # 2 and more after preemption
    num_looked: int = 0  # number of admissions before which its prefix was looked up in the tiers
    num_offered: int = 0  # of its first blocks, given to the tiers since its last admission
    offers_all: bool = False  # its cached prefix may not be in the tiers: the weights changed since it came
    is_loading: bool = False  # its prefix is on the way from a tier or another node, or to a tier
    num_holds_left: int = 0  # steps that may still wait for it to move here
    fetch: FetchJob | None = None  # of its prefix from another node
    num_awaited_tokens: int = 0  # as in its request, until it has waited for them
    num_cached_tokens: int = 0  # prompt tokens that the first admission found in the prefix cache
    num_host_tokens: int = 0  # prompt tokens loaded from host memory before the first admission
    num_disk_tokens: int = 0
    num_peer_tokens: int = 0  # fetched from another node
    queued_s: float = 0.0  # from arrival to the first admission
    rules: TokenRules | None = None
    # Of prompt tokens from the second on, if requested, until they are delivered.
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    matcher: StructureMatcher | None = None  # has followed all generated tokens; None without a structure

    @classmethod
    def from_request(cls, request: Request, matcher: StructureMatcher | None = None) -> "Sequence":
        """Create a waiting sequence. Replayed tokens count as generated; they are recomputed but not delivered.

        Args:
            matcher: Matcher of the request's structure, advanced over the replayed tokens.
        """
        token_ids = [*request.prompt_ids, *request.replayed_ids]
        return cls(
            request=request,
            token_ids=token_ids,
            num_prompt_tokens=len(request.prompt_ids),
            key_tokens=list(request.key_ids) if request.images else [],
            num_awaited_tokens=request.num_awaited_tokens,
            rules=TokenRules.of(request.params),
            matcher=matcher,
        )

    @property
    def key_ids(self) -> list[int]:
        """Its tokens for the keys of its blocks: those of images contain the images' digests."""
        if not self.request.images:
            return self.token_ids
        self.key_tokens += self.token_ids[len(self.key_tokens) :]
        return self.key_tokens

    @property
    def root_key(self) -> bytes:
        """Root of its block keys. Sequences share no prefix if one is long, or if their weights, adapters or salts differ."""
        root, salt = LONG_ROOT_KEY if self.is_long else ROOT_KEY, self.request.cache_salt
        if self.request.adapter:
            root = adapted(root, self.request.adapter)
        if self.weights:
            return with_weights(root, self.weights, salt)
        return salted(root, salt) if salt else root

    @property
    def has_structure(self) -> bool:
        return self.matcher is not None

    def mask(self, logits_V: Row) -> None:
        if self.matcher is not None:
            self.matcher.mask(logits_V)

    @property
    def num_output_tokens(self) -> int:
        """Number of generated tokens, with replayed and without pending ones."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_delivered_tokens(self) -> int:
        """Number of tokens that this rank has delivered for the request."""
        return self.num_output_tokens - len(self.request.replayed_ids)

    @property
    def has_begun(self) -> bool:
        """Whether it has run before, here or on another rank."""
        return bool(self.num_admissions or self.request.replayed_ids)

    @property
    def num_prefillable(self) -> int:
        """Number of its first tokens that may run as a prompt and have shared blocks: all, or those of its prompt.

        With `repeats_decodes` generated tokens run as decodes, also if they are computed again.
        """
        return self.num_prompt_tokens if self.repeats_decodes else len(self.token_ids)

    @property
    def num_unplanned(self) -> int:
        """Number of known and pending tokens that are not planned. Before a decode it is 1, or more if it computes tokens again."""
        return len(self.token_ids) + self.num_pending - self.num_planned

    @property
    def is_prefilling(self) -> bool:
        """Whether tokens of its prefill are not all planned yet."""
        return self.num_planned < self.num_prefill_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt logprobs are requested and not delivered yet. They go with the first token."""
        asked = self.request.params.num_prompt_logprobs is not None
        return asked and self.num_output_tokens == 0

    def unscored(self, start: int, end: int) -> range:
        """Return the positions in [start, end) with logits that score the next prompt token, if prompt logprobs are
        requested and this one is unknown. Those of a run before a preemption are known."""
        if not self.wants_prompt_logprobs:
            return range(0)
        return range(max(start, len(self.prompt_logprobs)), min(end, self.num_prompt_tokens - 1))

    def ends_within(self, num_more_tokens: int, max_model_len: int) -> bool:
        """Whether the sequence leaves the rank within `num_more_tokens` more tokens, unless a stop token comes."""
        is_handed_over = self.request.hands_over and num_more_tokens > 0
        return is_handed_over or self.num_left(max_model_len) <= num_more_tokens

    def num_left(self, max_model_len: int) -> int:
        """Return how many more tokens may be generated before max_tokens or the model's length is reached.

        A prompt may fill the model's length. Its single output token is sampled, but never run.
        """
        length, num_prompt = len(self.token_ids), self.num_prompt_tokens
        of_model = (max_model_len if max_model_len > num_prompt else num_prompt + 1) - length
        of_request = self.request.params.max_tokens + num_prompt - length
        return of_request if of_request < of_model else of_model

    def finish_reason(self, max_model_len: int) -> FinishReason | None:
        """Return why the last token ended the sequence, or None if it did not.

        A stop token among the first min_tokens outputs is an ordinary token. A complete structure ends the sequence
        regardless of min_tokens, because no token can follow.
        """
        params, token_ids = self.request.params, self.token_ids
        if self.matcher is not None and self.matcher.has_ended:
            return FinishReason.STOP
        num_outputs = len(token_ids) - self.num_prompt_tokens
        if num_outputs > params.min_tokens and token_ids[-1] in params.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_left(max_model_len) <= 0 else None


class DraftedContext:
    """A sequence extended by its first drafts; a `TokenContext`."""

    def __init__(self, sequence: Sequence, drafts: Series[int]) -> None:
        self._sequence, self._drafts = sequence, drafts

    @property
    def request(self) -> Request:
        return self._sequence.request

    @property
    def token_ids(self) -> list[int]:
        return [*self._sequence.token_ids, *self._drafts]

    @property
    def num_prompt_tokens(self) -> int:
        return self._sequence.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        return self._sequence.num_output_tokens + len(self._drafts)

    @property
    def rules(self) -> TokenRules | None:
        return self._sequence.rules

    @property
    def has_structure(self) -> bool:
        return self._sequence.has_structure

    def mask(self, logits_V: Row) -> None:
        if self._sequence.matcher is not None:
            self._sequence.matcher.mask(logits_V, self._drafts)
