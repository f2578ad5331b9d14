"""The open choices that are at no rank, each for one of three reasons.

Parked: no rank or no place of its adapter is there, or the service pauses. They are submitted together when that ends.
Queued: submitting all prompt tokens of its answer at once would stall the event loop.
Held: its client limits the number of an answer's choices at ranks, so it follows another one of its answer.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable

from server.front.generations import Generation

# Prompt tokens submitted to ranks in one go: 128 choices of a prompt of 100,000 tokens would take 1.5 s.
TOKENS_AT_ONCE = 200_000


class WaitingChoices:
    """Keeps choices until they go to a rank, and submits them then."""

    def __init__(self, submit: Callable[[Generation, float], None]) -> None:
        """Args: submit takes a choice and the time to a rank, or parks it here."""
        self._submit = submit
        self._parked: dict[str, Generation] = {}  # queued ones too
        # Parked choices that only wait for the event loop's next turn.
        self._queued: dict[str, None] = {}
        self._held: dict[str, Generation] = {}
        # By a choice at a rank: the held choices of its answer that follow it.
        self._followers: dict[str, deque[Generation]] = {}

    def __len__(self) -> int:
        return len(self._parked) + len(self._held)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._parked or request_id in self._held

    @property
    def num_parked(self) -> int:
        """Choices that wait for a rank to return."""
        return len(self._parked.keys() - self._queued.keys())

    def park(self, generation: Generation) -> None:
        """Keep a choice until `submit_parked`."""
        self._parked[generation.ask.request.request_id] = generation

    def submit_parked(self) -> None:
        """Submit the parked choices. Those that cannot go to a rank yet are parked again."""
        for request_id in list(self._parked):  # a loss meanwhile may end them or park them again
            generation = self._parked.pop(request_id, None)
            if generation is not None:
                self._submit(generation, time.monotonic())

    def queue(self, generation: Generation) -> None:
        """Submit a choice in a later turn of the event loop."""
        self.park(generation)
        if not self._queued:
            asyncio.get_running_loop().call_soon(self._submit_queued)
        self._queued[generation.ask.request.request_id] = None

    def _submit_queued(self) -> None:
        """Submit some queued choices, and leave the rest to a later turn. Choices may have ended meanwhile."""
        num_tokens = 0
        while self._queued and num_tokens <= TOKENS_AT_ONCE:
            request_id = next(iter(self._queued))
            del self._queued[request_id]
            generation = self._parked.pop(request_id, None)
            if generation is not None:
                num_tokens += len(generation.ask.request.prompt_ids)
                self._submit(generation, time.monotonic())
        if self._queued:
            asyncio.get_running_loop().call_soon(self._submit_queued)

    def hold(self, generation: Generation, followers: deque[Generation]) -> None:
        """Keep a choice until one that `lead`s the same followers has ended."""
        followers.append(generation)
        self._held[generation.ask.request.request_id] = generation

    def lead(self, generation: Generation, followers: deque[Generation]) -> None:
        """Let the next of the followers, which may be added later, follow a choice."""
        self._followers[generation.ask.request.request_id] = followers

    def submit_follower(self, request_id: str, now_s: float) -> None:
        """Submit the next held choice after one has ended."""
        followers = self._followers.pop(request_id, None)
        while followers:
            generation = followers.popleft()
            if self._held.pop(generation.ask.request.request_id, None) is not None:
                self.lead(generation, followers)
                self._submit(generation, now_s)
                return

    def remove(self, request_id: str) -> None:
        """Forget a choice that has ended, if it waits here."""
        self._parked.pop(request_id, None)
        self._held.pop(request_id, None)
