"""The adapters of the service at a front that does not lead: it knows the names and places that the leading front publishes, and
writes what its own requests need (`adapter_needs`). Its requests wait until their adapter has a place.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from server.front.adapters.places import GivenPlace, PlaceState, PlaceUse
from server.front.adapters.registry import AdapterUse, KnownAdapters
from server.front.errors import ApiError
from server.front.several.adapter_needs import AdapterNeed, write_needs
from server.front.several.board import Board
from server.front.several.service_state import ServiceState


@dataclass(eq=False)
class _Requests:
    """The requests of this front with one adapter."""

    open: set[str] = field(default_factory=set)  # accepted
    running: set[str] = field(default_factory=set)  # those at ranks
    is_waiting: bool = False
    num_requests: int = 0  # counter: that began to use it


class FollowedAdapters(KnownAdapters):
    """The names and places of adapters, as the leading front gives them. Runs in the front's event loop."""

    def __init__(self, folder: Path, board: Board, *, is_enabled: bool) -> None:
        """Begin without requests.

        Raises:
            OSError: The file with the needs of requests cannot be written.
        """
        super().__init__(is_enabled=is_enabled)
        self._folder, self._board = folder, board
        self._digests: set[str] = set()  # of adapters with names
        self._places: dict[str, GivenPlace] = {}  # by digest
        self._requests: dict[str, _Requests] = {}  # by digest
        self._num_seen = -1  # the newest failure that was handled; -1 before the first state
        self._has_changed = True  # since the last `publish`
        self.on_resident: Callable[[], None] = lambda: None
        self.on_failed: Callable[[str, ApiError], None] = lambda _digest, _failure: None
        self.publish()

    def uses(self) -> Iterator[AdapterUse]:
        """Yield what is visible of each registered adapter at this front."""
        for named in self._names.values():
            requests = self._requests.get(named.digest) or _Requests()
            state = PlaceState.RESIDENT if named.digest in self._places else PlaceState.EMPTY
            count = requests.num_requests
            yield AdapterUse(
                named, PlaceUse(state, len(requests.running), requests.is_waiting, count, 0, count)
            )

    def why_not_ready(self) -> str | None:
        return "waiting for the front that leads the service" if self._num_seen < 0 else None

    def accept(self, digest: str, request_id: str) -> None:
        """Keep an adapter until `release` is called for this request.

        Raises:
            ApiError: 404 if the adapter was removed meanwhile.
        """
        requests = self._requests.get(digest) or _Requests()
        if digest not in self._digests and not requests.open:
            raise ApiError(404, "The adapter was unloaded.", param="model")
        requests.open.add(request_id)
        self._requests[digest] = requests
        self._has_changed = True

    def admit(self, digest: str, request_id: str) -> int | None:
        """Return the place of an accepted request's adapter, or None if it must wait. A request that has a place keeps it."""
        requests, place = self._requests[digest], self._places.get(digest)
        self._has_changed = True
        if place is None or not (place.takes_new or request_id in requests.running):
            requests.is_waiting = True
            return None
        requests.num_requests += request_id not in requests.running
        requests.running.add(request_id)
        return place.number

    def release(self, digest: str, request_id: str) -> None:
        """Note that a request has ended."""
        requests = self._requests[digest]
        requests.open.discard(request_id)
        requests.running.discard(request_id)
        requests.is_waiting = requests.is_waiting and bool(requests.open)
        self._has_changed = True

    def follow(self, state: ServiceState) -> None:
        """Apply the names, places and failures that the leading front has published."""
        self._names = {named.name: named for named in state.adapters}
        before, self._places = self._places, {place.digest: place for place in state.places}
        self._digests = {named.digest for named in state.adapters}
        self._requests = {
            digest: requests
            for digest, requests in self._requests.items()
            if requests.open or digest in self._digests
        }
        for failure in state.failures if self._num_seen >= 0 else ():
            if failure.number > self._num_seen and failure.digest in self._requests:
                self._requests[failure.digest].is_waiting = False
                self._has_changed = True
                self.on_failed(failure.digest, failure.error)
        self._num_seen = max((failure.number for failure in state.failures), default=max(0, self._num_seen))
        if self._places != before:
            for digest, place in self._places.items():
                if digest in self._requests and place.takes_new:
                    self._requests[digest].is_waiting = False
            self._has_changed = True
            self.on_resident()

    def publish(self) -> None:
        """Write what this front's requests need, if it has changed.

        Raises:
            OSError: The file cannot be written.
        """
        if not self._has_changed:
            return
        needs = {
            digest: AdapterNeed(len(each.open), len(each.running), each.is_waiting, each.num_requests)
            for digest, each in self._requests.items()
        }
        write_needs(self._folder, self._board, needs)
        self._has_changed = False
