"""A request and what a rank says about it: the vocabulary that front, scheduler and engine share.

Knows no torch and no wire format. A request is immutable; what a rank learns while it serves one lives in
`scheduler.policy.sequence.Sequence`.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class FinishReason(Enum):
    """Why a request ended. Exactly one per accepted request."""

    STOP = "stop"  # an end-of-sequence or stop token
    LENGTH = "length"  # max_tokens or the model's length
    ABORT = "abort"  # the client left, or the front asked
    DEADLINE = "deadline"  # the request's own deadline passed
    ERROR = "error"  # the rank could not serve it; the message says why


STRUCTURE_KINDS = ("json_schema", "json_object", "regex", "choice", "grammar", "tool_calls")


@dataclass(frozen=True)
class Structure:
    """A form that an answer must have. Checked where a request enters (the front); a rank compiles it."""

    kind: str  # one of STRUCTURE_KINDS
    text: str = ""  # the schema as JSON; the regex; a JSON list of strings; a grammar in EBNF or Lark, as "tool_calls"
    after: str = (
        ""  # text that ends what comes before the structure (a reasoning part's end); "": nothing does
    )


class TokenBias(NamedTuple):
    """What is added to one token's logit."""

    token_id: int
    bias: float  # [-100, 100]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens. Ranges are checked where a request enters (the front); a rank trusts them."""

    max_tokens: int  # at least 1
    min_tokens: int = 0  # stop tokens are not sampled before this many
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0 is off
    min_p: float = 0.0  # [0, 1]
    presence_penalty: float = 0.0  # [-2, 2], as OpenAI defines it: over generated tokens
    frequency_penalty: float = 0.0  # [-2, 2], likewise
    repetition_penalty: float = 1.0  # > 0, over prompt and generated tokens (CTRL)
    seed: int = 0  # 64 bits; the front draws one when the user gives none, so that a replay is equal
    stop_token_ids: tuple[int, ...] = ()  # the model's end-of-sequence ids are among them, unless ignored
    num_logprobs: int | None = None  # None: none; n >= 0: the chosen token's and those of the n likeliest
    structure: Structure | None = None  # the form that the answer must have
    logprob_token_ids: tuple[int, ...] = ()  # logprobs are of these instead of the likeliest
    num_prompt_logprobs: int | None = None  # likewise for every prompt token but the first
    allowed_token_ids: tuple[int, ...] = ()  # no others are sampled; empty is all
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences whose last token may not complete them
    logit_bias: tuple[TokenBias, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a rank is asked to serve."""

    request_id: str
    prompt_ids: tuple[int, ...]  # at least one
    params: SamplingParams
    arrival_s: float  # time.monotonic() on the rank that got it
    deadline_s: float | None = None  # likewise; None is never
    replayed_ids: tuple[int, ...] = ()  # tokens that an earlier attempt already delivered
    key_id: str = ""  # whose it is: a digest of the API key; places are shared out fairly between them
    priority: int = 0  # lower ones go first; of equal ones, whoever came first


class Logprobs(NamedTuple):
    """Natural-log probabilities at one position, before temperature and penalties."""

    token_id: int
    logprob: float
    top_ids: list[int]  # the n likeliest, best first, or those asked for by id
    top_logprobs: list[float]
    rank: int = 0  # of the token among all, 1 is the likeliest; told for prompt tokens only


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """What one step yielded for one request: 0 to n tokens, and the end if it came. Without either: it has begun."""

    request_id: str
    token_ids: list[int]
    logprobs: list[Logprobs] = field(default_factory=list)  # one per token where asked for
    # One per prompt token but the first, where asked for; all come with the first token.
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    num_cached_tokens: int = 0  # prompt tokens that came from the prefix cache; sent with the first token
    queued_s: float = 0.0  # from arrival until the rank first ran the request; sent with the first token
    finish_reason: FinishReason | None = None
    error: str = ""
    num_draft_tokens: int = 0  # that were tried beside; of the tokens all but the last were
    is_returned: bool = False  # the rank has done nothing for it and forgets it, as `Withdraw` asks


class DraftCounts(NamedTuple):
    """Counters of drafts, from the engine's start."""

    num_drafts: int = 0  # times that a step tried any of a request
    num_draft_tokens: int = 0
    accepted_at: tuple[int, ...] = ()  # of those, the right ones, by place behind the newest token

    @property
    def num_accepted_tokens(self) -> int:
        """The right ones."""
        return sum(self.accepted_at)


NO_DRAFTS = DraftCounts()


class Withdraw(NamedTuple):
    """Give a request back if it has not begun. Answered by an output: returned, or without tokens: it has begun.

    No answer comes for one that has ended: its end has been told.
    """

    request_id: str


class ForgetPrefixes(NamedTuple):
    """Let no request that comes after this find what was computed before it."""


@dataclass(frozen=True, kw_only=True)
class RankStats:
    """A rank's state after a step. Counters run from the engine's start."""

    rank: int
    step: int
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    num_step_tokens: int  # tokens the last step ran, prefill and decode
    num_preemptions: int  # counter
    prefix_query_tokens: int  # counter: prompt tokens looked up
    prefix_hit_tokens: int  # counter: of those, found
    drafts: DraftCounts = NO_DRAFTS
