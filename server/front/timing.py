"""How a request's time divides into queue, prefill and decode, as in vLLM."""

from dataclasses import dataclass

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
