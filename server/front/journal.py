"""Every accepted request, the tokens delivered so far, and its one outcome.

Open entries hold all that a replay on another rank needs: the prompt, the parameters with the drawn seed, and the
delivered tokens. Closed entries shrink to an outcome; a bounded history of outcomes is kept. In memory only: if the front
is killed, its answers are cut off. A retry with the same Idempotency-Key gets the same answer (`http.retries.idempotency`).
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from scheduler.policy.request import FinishReason, Request
from server.front.routing.loads import MoveCause

HISTORY = 4096  # outcomes kept
MAX_INCIDENTS = 3  # without a token in between: a request that kills its ranks must not do so forever
INCIDENT_S = 1.0  # ranks lost within this time (by a node's failure) are one incident


@dataclass(slots=True, kw_only=True)
class Entry:
    """An accepted request that has not ended."""

    request: Request
    rank: int
    accepted_s: float  # time.monotonic()
    num_incidents: int = 0  # losses of its rank since its last token; simultaneous ones count once
    incident_s: float = float("-inf")  # start of the last incident
    delivered_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a request ended."""

    request_id: str
    rank: int
    reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    accepted_s: float
    ended_s: float
    error: str


class Journal:
    """The record of accepted requests."""

    def __init__(self, history: int = HISTORY) -> None:
        self._open: dict[str, Entry] = {}
        self._outcomes: deque[Outcome] = deque(maxlen=history)
        self._num_accepted = 0
        self._num_replayed = 0
        self._num_moved: Counter[MoveCause] = Counter()
        self._ended: Counter[FinishReason] = Counter()

    @property
    def open_entries(self) -> dict[str, Entry]:
        """The requests without an outcome, by id. Do not change it."""
        return self._open

    @property
    def outcomes(self) -> list[Outcome]:
        """The latest outcomes, oldest first."""
        return list(self._outcomes)

    @property
    def num_accepted(self) -> int:
        """Requests accepted since the start."""
        return self._num_accepted

    @property
    def num_replayed(self) -> int:
        """Number of times since the start that a request was taken from a lost rank."""
        return self._num_replayed

    @property
    def num_moved(self) -> Counter[MoveCause]:
        """Number of times since the start that a rank released a request for another rank, by cause."""
        return Counter(self._num_moved)

    @property
    def num_ended(self) -> Counter[FinishReason]:
        """Outcomes since the start, by reason. `num_accepted` is their sum plus the open entries."""
        return Counter(self._ended)

    def accept(self, request: Request, rank: int, *, now_s: float) -> None:
        """Open an entry. From now on the request is owed an outcome."""
        assert request.request_id not in self._open, f"request {request.request_id} is in the journal already"
        self._open[request.request_id] = Entry(request=request, rank=rank, accepted_s=now_s)
        self._num_accepted += 1

    def cut_off(self, num: int) -> None:
        """Record requests that an earlier process of this front had accepted when it was killed: they end as errors."""
        self._num_accepted += num
        self._ended[FinishReason.ERROR] += num

    def replay(self, request_id: str, *, now_s: float) -> bool:
        """Record that a request's rank is lost. Returns False if the request had too many incidents to continue."""
        entry = self._open[request_id]
        if now_s - entry.incident_s >= INCIDENT_S:
            entry.num_incidents, entry.incident_s = entry.num_incidents + 1, now_s
        if entry.num_incidents > MAX_INCIDENTS:
            return False
        self._num_replayed += 1
        return True

    def take_back(self, request_id: str, cause: MoveCause) -> None:
        """Record that a rank released a request."""
        assert request_id in self._open, f"request {request_id} is released after its end"
        self._num_moved[cause] += 1

    def request_so_far(self, request_id: str) -> Request:
        """Return the request with its delivered tokens, so that another rank can continue it."""
        entry = self._open[request_id]
        return replace(entry.request, replayed_ids=tuple(entry.delivered_ids))

    def move(self, request_id: str, rank: int) -> None:
        """Record that a request is at another rank."""
        self._open[request_id].rank = rank

    def deliver(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Record tokens from the rank that are being sent to the client."""
        entry = self._open[request_id]
        entry.delivered_ids.extend(token_ids)
        entry.num_incidents = 0

    def close(self, request_id: str, reason: FinishReason, *, now_s: float, error: str = "") -> None:
        """Record the request's one outcome."""
        entry = self._open.pop(request_id, None)
        assert entry is not None, f"request {request_id} gets a second outcome: {reason}"
        self._ended[reason] += 1
        self._outcomes.append(
            Outcome(
                request_id=request_id,
                rank=entry.rank,
                reason=reason,
                num_prompt_tokens=len(entry.request.prompt_ids),
                num_output_tokens=len(entry.delivered_ids),
                accepted_s=entry.accepted_s,
                ended_s=now_s,
                error=error,
            )
        )
