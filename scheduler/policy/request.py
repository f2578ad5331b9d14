"""Requests and outputs: the vocabulary that front, scheduler and engine share.

Does not use torch or a wire format. A request is immutable; a rank's progress with it is kept in
`scheduler.policy.sequence.Sequence`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from kvcache.images import Image, keyed
from kvcache.tiers.figures import TierFigures


class FinishReason(Enum):
    """Why a request ended. Exactly one per accepted request."""

    STOP = "stop"  # an end-of-sequence or stop token
    LENGTH = "length"  # max_tokens or the model's length
    ABORT = "abort"  # the client left, or the front aborted it
    DEADLINE = "deadline"  # the request's own deadline passed
    ERROR = "error"  # the rank could not serve it; the message gives the reason

    @property
    def is_cut(self) -> bool:
        """Whether an answer with this end is shorter than the model would have made it."""
        return self in (FinishReason.LENGTH, FinishReason.ABORT)


STRUCTURE_KINDS = ("json_schema", "json_object", "regex", "choice", "grammar", "tool_calls")


@dataclass(frozen=True)
class Structure:
    """The form that an answer must have. The front checks it; a rank compiles it."""

    kind: str  # one of STRUCTURE_KINDS
    text: str = ""  # the schema as JSON; the regex; a JSON list of strings; a grammar in EBNF or Lark, as for "tool_calls"
    # Text that ends the part before the structure (such as a reasoning part). "" if the structure begins at once.
    after: str = ""


class TokenBias(NamedTuple):
    """A bias added to one token's logit."""

    token_id: int
    bias: float  # [-100, 100]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens. The front checks the ranges; a rank relies on them."""

    max_tokens: int  # at least 1
    min_tokens: int = 0  # stop tokens are not sampled before this many tokens
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0 is off
    min_p: float = 0.0  # [0, 1]
    presence_penalty: float = 0.0  # [-2, 2], as OpenAI defines it: over generated tokens
    frequency_penalty: float = 0.0  # [-2, 2], over generated tokens
    repetition_penalty: float = 1.0  # > 0, over prompt and generated tokens (CTRL)
    seed: int = 0  # 64 bits; the front draws one if the user gives none, so that replays are equal
    stop_token_ids: tuple[int, ...] = ()  # includes the model's end-of-sequence ids, unless they are ignored
    num_logprobs: int | None = None  # of the chosen token and the n >= 0 most likely; None disables them
    structure: Structure | None = None  # required form of the answer
    logprob_token_ids: tuple[int, ...] = ()  # return logprobs of these ids instead of the most likely ones
    num_prompt_logprobs: int | None = None  # as num_logprobs, for every prompt token except the first
    allowed_token_ids: tuple[int, ...] = ()  # only these are sampled; empty allows all
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not be completed
    logit_bias: tuple[TokenBias, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request, as a rank receives it."""

    request_id: str
    prompt_ids: tuple[int, ...]  # at least one
    params: SamplingParams
    arrival_s: float  # time.monotonic() on the receiving rank
    deadline_s: float | None = None  # on the same clock; None sets no deadline
    replayed_ids: tuple[int, ...] = ()  # tokens that an earlier attempt already delivered
    key_id: str = ""  # digest of the client's API key; keys share the service fairly
    cache_salt: str = ""  # requests with different ones share no cached prefix and no answer to draft from
    priority: int = 0  # lower runs first; for the order of equal ones see `scheduler.policy.roster`
    prefix_at: str = ""  # HOST:PORT of a rank of another node that probably has its prefix; "": none is known
    # The rank releases the request with its next token, unless that ends it: another rank generates the rest of the answer.
    hands_over: bool = False
    # Another rank, of this host or of the node of `prefix_at`, is saving the blocks of this many first tokens to the tiers. The rank
    # waits for them, for a bounded time.
    num_awaited_tokens: int = 0
    adapter: str = ""  # digest of the LoRA adapter that it uses; "": none
    adapter_place: int = -1  # where the ranks have it, once the request is at a rank
    images: tuple[Image, ...] = ()  # ranges of the prompt, in order

    @property
    def key_ids(self) -> Sequence[int]:
        """The prompt's tokens for keys of its prefixes: those of images contain the images' digests."""
        return keyed(self.prompt_ids, self.images)


class Logprobs(NamedTuple):
    """Natural-log probabilities at one position, before temperature and penalties."""

    token_id: int
    logprob: float
    top_ids: list[int]  # the n most likely ids, best first, or the requested ids
    top_logprobs: list[float]
    rank: int = 0  # of the token among all, 1 is the most likely; set for prompt tokens only


@dataclass(kw_only=True)  # not frozen: a step makes one per request, and frozen ones take three times as long
class RequestOutput:
    """What one step yielded for one request: 0 to n tokens, and perhaps the end. With neither, it has begun."""

    request_id: str
    token_ids: list[int]
    logprobs: list[Logprobs] = field(default_factory=list)  # one per token, if requested
    # One per prompt token except the first, if requested; all are sent with the first token.
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache; sent with the first token
    num_host_tokens: int = 0  # those of them that were loaded from host memory
    num_disk_tokens: int = 0  # those that were loaded from disk
    num_peer_tokens: int = 0  # those that were fetched from another node
    queued_s: float = 0.0  # from arrival until the rank first ran the request; sent with the first token
    finish_reason: FinishReason | None = None
    error: str = ""
    num_draft_tokens: int = 0  # drafts tried in the step; all `token_ids` except the last were drafts
    # The rank has released it and forgets it: after `Withdraw`, or with the token after which it hands the request over.
    is_returned: bool = False
    # First tokens of a returned request that are, or will be, in the tiers.
    num_saved_tokens: int = 0
    weights: int = 0  # number of the version of the weights that drew the last token; sent with the end

    @property
    def num_tier_tokens(self) -> int:
        """Cached prompt tokens that were not on the device."""
        return self.num_host_tokens + self.num_disk_tokens + self.num_peer_tokens


class DraftCounts(NamedTuple):
    """Counters of drafts since the engine's start."""

    num_drafts: int = 0  # steps in which a request had drafts
    num_draft_tokens: int = 0
    accepted_at: tuple[int, ...] = ()  # accepted drafts, by place after the newest token

    @property
    def num_accepted_tokens(self) -> int:
        """All accepted drafts."""
        return sum(self.accepted_at)


NO_DRAFTS = DraftCounts()


class Withdraw(NamedTuple):
    """Release a request for another rank. The output answers: returned, or no tokens if the request has begun and stays.

    There is no answer for a request that has ended: its end was already delivered.
    """

    request_id: str
    # Release it in any case. Tokens of steps in flight are dropped; the other rank samples the same ones.
    even_if_begun: bool = False
    # Its next rank runs in lock-step with this one and expects it. Only with `even_if_begun`.
    in_step: bool = False


class Expected(NamedTuple):
    """A request that another rank of this host will hand over or release: its blocks may be loaded meanwhile."""

    request_id: str
    request: Request | None  # None: the request stays elsewhere
    in_step: bool = False  # that rank runs in lock-step with this one


class ForgetPrefixes(NamedTuple):
    """Hide cached prefixes computed before this from requests that arrive after it."""

    # Above that of every earlier order and of the records in every attached rank's tiers. Equal on all ranks, also for those that
    # get the order later.
    generation: int


class AdapterOrder(NamedTuple):
    """Load an adapter to a place, equal on all ranks; or, without a directory, empty the place."""

    number: int  # grows with every order
    place: int  # -1: only check the adapter and keep it in memory, or forget it
    digest: str
    directory: str = ""


class AdapterReport(NamedTuple):
    """A rank has followed an adapter order, or could not."""

    number: int  # the order's
    place: int
    digest: str
    reason: str = ""  # why it could not; "" if it has
    num_bytes: int = 0  # of the adapter on the rank


class MemoryOrder(NamedTuple):
    """Which parts of its memory a rank keeps. A part that was released comes back without its content, or is read again."""

    number: int  # grows with every order, also over restarts of the front; 0 before the first
    has_cache: bool = True  # the memory of blocks and recurrent states
    has_experts: bool = True  # the weights of its experts


@dataclass(frozen=True, kw_only=True)
class RankStats:
    """A rank's state after a step. Counters run from the engine's start."""

    rank: int
    step: int
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    num_step_tokens: int  # tokens of the last step, prefill and decode
    num_preemptions: int  # counter
    prefix_query_tokens: int  # counter: prompt tokens looked up
    prefix_hit_tokens: int  # counter: those found
    drafts: DraftCounts = NO_DRAFTS
    tiers: TierFigures | None = None  # None without tiers
