"""How a request's time divides into queue, prefill and decode, as in vLLM, and the measurement of its tokens and end.

Tokens are counted once per step, for all choices together.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from scheduler.policy.request import FinishReason, RequestOutput
from server.front.generations import Generation


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds; queue, prefill and decode add up to the time from arrival to the last token."""

    e2e_s: float  # from arrival to the end
    first_token_s: float | None = None  # from arrival; None if there was no token, and the rest is 0
    queue_s: float = 0.0  # from arrival until its rank first ran it
    prefill_s: float = 0.0  # from then to its first token
    decode_s: float = 0.0  # from then to its last token

    @property
    def inference_s(self) -> float:
        """From first run to last token."""
        return self.prefill_s + self.decode_s


def timing_of(generation: Generation, *, now_s: float) -> Timing:
    """Return the timing of a choice that ends at `now_s`, time.monotonic()."""
    arrival_s, first_s = generation.ask.request.arrival_s, generation.first_token_s
    if first_s is None:
        return Timing(e2e_s=now_s - arrival_s)
    waited_s = first_s - arrival_s
    queue_s = min(generation.queued_s, waited_s)
    return Timing(
        e2e_s=now_s - arrival_s,
        first_token_s=waited_s,
        queue_s=queue_s,
        prefill_s=waited_s - queue_s,
        decode_s=generation.last_token_s - first_s,
    )


class RequestCounts(Protocol):
    """Counts and times requests, implemented by `server.http.observability.metrics` for Prometheus."""

    def note_request(self, n: int, max_tokens: int) -> None:
        """Record a client's request with `n` choices in all."""

    def note_first_token(
        self,
        rank: int,
        ttft_s: float,
        *,
        num_prompt_tokens: int,
        num_cached_tokens: int,
        num_tier_tokens: int,
    ) -> None:
        """Record a choice's first token. `num_tier_tokens`: those of the cached tokens that were not on the device."""

    def note_tokens(self, rank: int, num_tokens: int, gaps_s: Mapping[float, int]) -> None:
        """Record the tokens of a step.

        Args:
            gaps_s: Times between a choice's tokens, and how many tokens came after each. First tokens have none. Of several
                tokens at once, each counts with its share of their time.
        """

    def note_pause(self, rank: int, seconds: float) -> None:
        """Record the time between the tokens before and after a move to `rank`."""

    def note_hand_over(self, rank: int, seconds: float, num_computed_tokens: int) -> None:
        """Record the time between the token of the rank that ran a prompt and the first one of `rank`, which computed some
        tokens of the prompt again."""

    def note_end(
        self,
        rank: int,
        reason: FinishReason,
        timing: Timing,
        *,
        num_prompt_tokens: int,
        num_cached_tokens: int,
        num_tokens: int,
    ) -> None:
        """Record a choice's end."""

    def note_longest(self, num_tokens: int) -> None:
        """Record the length of the longest choice of a client's request."""


class TokenTimes:
    """Measures choices: the times between their tokens, pauses by moves, and ends."""

    def __init__(self, metrics: RequestCounts) -> None:
        self._metrics = metrics
        self._num_tokens = 0  # of the step being delivered
        self._gaps_s: dict[float, int] = {}  # of the step being delivered, as in `RequestCounts.note_tokens`

    def note_tokens(self, generation: Generation, output: RequestOutput, now_s: float) -> None:
        """Record a choice's new tokens. `end_step` must follow."""
        is_first = generation.first_token_s is None
        gap_s, num_tokens = now_s - generation.last_token_s, len(output.token_ids)
        self._num_tokens += num_tokens
        if not is_first:
            share_s = gap_s / num_tokens
            self._gaps_s[share_s] = self._gaps_s.get(share_s, 0) + num_tokens
        if generation.is_resuming:
            generation.is_resuming = False
            self._metrics.note_pause(generation.rank, gap_s)
        if generation.is_handed_over:
            generation.is_handed_over = False
            num_computed = len(generation.ask.request.prompt_ids) - output.num_cached_tokens
            self._metrics.note_hand_over(generation.rank, gap_s, num_computed)
        if is_first:
            generation.first_token_s = now_s
            self._metrics.note_first_token(
                generation.rank,
                gap_s,
                num_prompt_tokens=len(generation.ask.request.prompt_ids),
                num_cached_tokens=output.num_cached_tokens,
                # Loaded blocks may be evicted before their request starts.
                num_tier_tokens=min(output.num_cached_tokens, output.num_tier_tokens),
            )
        generation.last_token_s = now_s

    def end_step(self, rank: int) -> None:
        """Count the tokens of a step, once for all choices."""
        if self._num_tokens:
            self._metrics.note_tokens(rank, self._num_tokens, self._gaps_s)
            self._num_tokens, self._gaps_s = 0, {}

    def note_end(self, generation: Generation, reason: FinishReason, now_s: float) -> None:
        """Record a choice's end."""
        self._metrics.note_end(
            generation.rank,
            reason,
            timing_of(generation, now_s=now_s),
            num_prompt_tokens=len(generation.ask.request.prompt_ids),
            num_cached_tokens=generation.num_cached_tokens,
            num_tokens=generation.num_tokens,
        )
