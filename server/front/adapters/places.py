"""Places of adapters on the ranks: which adapter has which, for which requests, and when it must give its place up.

Many adapters may be registered; ranks have as many places as --max-loras. A request waits at the front until its adapter is at a place
on every rank. If no place is free, the least recently used adapter without requests loses its place. If all are
in use, an adapter that has waited for PATIENCE_S stops new requests of the adapter with the oldest place, and gets the place when
its open requests have ended. Adapters get places in the order in which they began to wait, so none starves.

A place changes in two rounds, see `scheduler.moves.adapters`: every rank reports it empty before any gets the next adapter, and every rank
reports that one before requests use it. A rank that attaches gets the adapters of all places before it joins the others. While it waits
for them, it follows no orders, and none waits for it: it follows them before its first step.

Here adapters are known by the digest of their content. The registry has their names. Of several fronts, the leading one gives the
places. A place that requests of the others may use becomes free in two steps: it takes no new requests, and then, when all fronts
know that and no request is left, it is emptied.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from scheduler.policy.request import AdapterOrder, AdapterReport
from server.front.errors import ApiError, bad_request
from server.front.ordering import RanksToOrder

PATIENCE_S = 1.0
LOAD_TIMEOUT_S = 600.0  # for all ranks to read an adapter
_CHECK = -1  # place of orders that only check an adapter
_MOST_FAILURES = 16  # that other fronts may still have to learn


class PlaceState(StrEnum):
    """State of a place."""

    EMPTY = "empty"
    LOADING = "loading"
    RESIDENT = "resident"
    EMPTYING = "emptying"


@dataclass(eq=False)
class _Content:
    """An adapter, under any of its names."""

    digest: str
    directory: str
    names: dict[str, bool] = field(default_factory=dict)  # whether each is pinned
    num_bytes: int = 0  # on the rank with the most
    place: "_Place | None" = None
    open: set[str] = field(default_factory=set)  # accepted requests, which keep it without a name
    users: set[str] = field(default_factory=set)  # those at ranks
    waiting_since_s: float | None = None
    last_used_s: float = 0.0
    is_draining: bool = False  # new requests wait, so that its place becomes free
    num_requests: int = 0  # counter: that began to use it


@dataclass(eq=False)
class _Place:
    """An index that all ranks use for the same adapter."""

    index: int
    state: PlaceState = PlaceState.EMPTY
    content: _Content | None = None
    number: int = 0  # of the order that it follows
    pending: set[int] = field(default_factory=set)  # ranks that have not reported
    reason: str = ""  # why a rank could not load it
    is_broken: bool = False  # a rank has lost the adapter: rows are wrong until the place is empty
    loaded_s: float = 0.0


@dataclass(eq=False)
class _Check:
    """An adapter that the ranks check."""

    pending: set[int]
    done: "asyncio.Future[None]"
    reason: str = ""
    num_bytes: int = 0


class RanksWithAdapters(RanksToOrder, Protocol):
    """Ranks, implemented by `server.link.ranks.Ranks`."""

    @property
    def attached(self) -> Mapping[int, Any]:
        """The attached ranks."""


class RequestAdapters(Protocol):
    """The adapters of requests: `AdapterPlaces`, or `server.front.several.followed_adapters.FollowedAdapters`."""

    # Called when requests of some adapter may be submitted, and when those of a digest cannot be.
    on_resident: Callable[[], None]
    on_failed: Callable[[str, ApiError], None]

    def accept(self, digest: str, request_id: str) -> None:
        """Keep an adapter, also without a name, until `release` is called for this request.

        Raises:
            ApiError: 404 if the adapter was removed meanwhile.
        """

    def admit(self, digest: str, request_id: str) -> int | None:
        """Return the place of an accepted request's adapter, or None if it must wait. A request that has a place keeps it."""

    def release(self, digest: str, request_id: str) -> None:
        """Note that a request has ended."""


class OtherRequests(Protocol):
    """The requests of other fronts, implemented by `server.front.several.adapter_needs.NeedsElsewhere`."""

    def may_use(self, digest: str) -> bool:
        """Return whether other fronts have requests with an adapter at ranks, or may submit some."""

    def may_keep(self, digest: str) -> bool:
        """Return whether other fronts have accepted requests with an adapter, or may accept some."""

    def num_running(self, digest: str) -> int:
        """Return the number of other fronts' requests at ranks with an adapter."""

    def num_requests(self, digest: str) -> int:
        """Return how many requests of other fronts have begun to use an adapter."""

    def waiting(self) -> Iterable[str]:
        """Return the adapters for which requests of other fronts wait."""


class NoOtherRequests:
    """Stands in if this front is the only one."""

    def may_use(self, _digest: str) -> bool:
        return False

    def may_keep(self, _digest: str) -> bool:
        return False

    def num_running(self, _digest: str) -> int:
        return 0

    def num_requests(self, _digest: str) -> int:
        return 0

    def waiting(self) -> Iterable[str]:
        return ()


class PlaceUse(NamedTuple):
    """What is visible of an adapter at the ranks."""

    state: PlaceState
    num_running: int  # requests at ranks
    is_waiting: bool
    num_own_requests: int  # counter, of this front
    num_bytes: int  # on the rank with the most
    num_requests: int  # counter


class GivenPlace(NamedTuple):
    """A place with an adapter that all ranks have."""

    number: int  # of the place
    digest: str
    directory: str
    takes_new: bool  # requests; otherwise it becomes free when those that use it have ended


class AdapterFailure(NamedTuple):
    """Why requests with an adapter cannot be served."""

    number: int  # grows
    digest: str
    message: str

    @property
    def error(self) -> ApiError:
        """The error with which these requests end."""
        return ApiError(500, self.message)


class AdapterPlaces:
    """The places, and the adapters that have them or wait for them. Runs in the front's event loop."""

    def __init__(
        self,
        ranks: RanksWithAdapters,
        num_places: int,
        clock: Callable[[], float] = time.monotonic,
        in_epochs: Callable[[], Collection[int]] | None = None,
    ) -> None:
        """Begin with empty places. `in_epochs` returns the ranks that may run steps; by default all attached ones."""
        self._ranks, self._clock = ranks, clock
        self._in_epochs = in_epochs or (lambda: ranks.attached)
        self._places = [_Place(index) for index in range(num_places)]
        self._contents: dict[str, _Content] = {}
        self._checks: dict[int, _Check] = {}  # by the order's number
        self._number = time.time_ns()  # above those of an earlier front, to which ranks may still report
        self._timer: asyncio.TimerHandle | None = None  # of the next `_schedule`
        # Called when requests of some adapter may be submitted, and when those of a digest cannot be.
        self.on_resident: Callable[[], None] = lambda: None
        self.on_failed: Callable[[str, ApiError], None] = lambda _digest, _failure: None
        # Called with the names of an adapter that a rank has lost, and why: ranks may have cached wrong prefixes.
        self.on_broken: Callable[[list[str], str], None] = lambda _names, _reason: None
        # Called when all ranks have emptied the place of such an adapter, so that none caches such prefixes any longer.
        self.on_cleared: Callable[[], None] = lambda: None
        self.others: OtherRequests = NoOtherRequests()
        self._failures: deque[AdapterFailure] = deque(maxlen=_MOST_FAILURES)

    def __len__(self) -> int:
        """Return the number of places."""
        return len(self._places)

    def use_of(self, digest: str) -> PlaceUse:
        """Return what is visible of an adapter that has a name."""
        content = self._contents[digest]
        state = PlaceState.EMPTY if content.place is None else content.place.state
        return PlaceUse(
            state, self._num_users(content), content.waiting_since_s is not None, content.num_requests,
            content.num_bytes, content.num_requests + self.others.num_requests(digest),
        )  # fmt: skip

    @property
    def given(self) -> tuple[GivenPlace, ...]:
        """The places with adapters that all ranks have."""
        resident = (place for place in self._places if place.state is PlaceState.RESIDENT)
        return tuple(
            GivenPlace(place.index, each.digest, each.directory, not each.is_draining)
            for place in resident
            if (each := place.content) is not None
        )

    @property
    def failures(self) -> tuple[AdapterFailure, ...]:
        """The last failures."""
        return tuple(self._failures)

    def restore(self, given: Iterable[GivenPlace]) -> None:
        """Continue with the places that an earlier process of this front has given, which requests of other fronts use."""
        for each in given:
            content = self._contents.setdefault(each.digest, _Content(each.digest, each.directory))
            place = self._places[each.number]
            self._begin_round(place, PlaceState.RESIDENT)
            place.content, content.place, place.loaded_s = content, place, self._clock()

    def look(self) -> None:
        """Follow the requests of other fronts. To be called periodically if there are any."""
        for digest in self.others.waiting():
            content = self._contents.get(digest)
            if content is None or content.waiting_since_s is not None:
                continue
            if content.place is None or content.is_draining:
                content.waiting_since_s = self._clock()
        for content in list(self._contents.values()):
            if content.is_draining:
                self._empty_if_unused(content)
            elif content.waiting_since_s is not None and content.place is None:
                self._schedule_soon()  # requests of other fronts may have ended
            self._drop_unused(content.digest)

    def add_name(self, digest: str, directory: str, num_bytes: int, name: str, *, is_pinned: bool) -> None:
        """Keep an adapter under one more name. A pinned one never loses its place to another."""
        content = self._contents.setdefault(digest, _Content(digest, directory))
        content.num_bytes = max(content.num_bytes, num_bytes)
        content.names[name] = is_pinned

    def drop_name(self, digest: str, name: str) -> None:
        """Forget a name of an adapter, and the adapter if it was the last and no accepted request uses it."""
        del self._contents[digest].names[name]
        self._drop_unused(digest)

    async def check(self, digest: str, directory: str) -> int:
        """Let all ranks load an adapter into memory. Returns its bytes on the rank with the most.

        Raises:
            ApiError: 400 if a rank refuses it; 503 or 504 if the ranks do not answer.
        """
        if not self._ranks.attached:
            raise ApiError(
                503, "The service is not ready: no rank is attached.", headers={"Retry-After": "1"}
            )
        self._number += 1
        number = self._number
        check = _Check(set(self._ranks.attached), asyncio.get_running_loop().create_future())
        self._checks[number] = check
        self._ranks.post_all(AdapterOrder(number, _CHECK, digest, directory))
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                await check.done
        except TimeoutError:
            raise ApiError(504, f"The ranks did not load the adapter within {LOAD_TIMEOUT_S:g} s.") from None
        finally:
            self._checks.pop(number, None)
        if check.reason:
            if digest not in self._contents:
                self._ranks.post_all(AdapterOrder(number, _CHECK, digest))
            raise bad_request(f"The adapter is not supported: {check.reason}.", "lora_path")
        return check.num_bytes

    def accept(self, digest: str, request_id: str) -> None:
        """Keep an adapter, also without a name, until `release` is called for this request.

        Raises:
            ApiError: 404 if the adapter was removed meanwhile.
        """
        content = self._contents.get(digest)
        if content is None:
            raise ApiError(404, "The adapter was unloaded.", param="model")
        content.open.add(request_id)

    def admit(self, digest: str, request_id: str) -> int | None:
        """Return the place of an accepted request's adapter, or None if it must wait. A request that has a place keeps it."""
        content = self._contents[digest]
        place, is_known = content.place, request_id in content.users
        if place is not None and place.state is PlaceState.RESIDENT and (is_known or not content.is_draining):
            content.num_requests += not is_known
            content.users.add(request_id)
            content.last_used_s = self._clock()
            return place.index
        if content.waiting_since_s is None:
            content.waiting_since_s = self._clock()
        self._schedule_soon()
        return None

    def release(self, digest: str, request_id: str) -> None:
        """Note that a request has ended."""
        content = self._contents[digest]
        content.open.discard(request_id)
        if request_id in content.users:
            content.users.discard(request_id)
            content.last_used_s = self._clock()
            if not content.users:
                if content.is_draining:
                    self._empty_if_unused(content)
                self._schedule_soon()
        self._drop_unused(digest)

    def take_report(self, rank: int, report: AdapterReport) -> None:
        """Record a rank's report."""
        if report.place == _CHECK:
            check = self._checks.get(report.number)
            if check is not None:
                check.reason = check.reason or _on_rank(rank, report.reason)
                check.num_bytes = max(check.num_bytes, report.num_bytes)
                self._note_checked(check, rank)
            return
        place = self._places[report.place]
        if report.number != place.number:
            is_lost = bool(report.reason) and place.state is PlaceState.EMPTYING
            if is_lost and place.content is not None and place.content.digest == report.digest:
                place.is_broken = True  # perhaps before the rank has ended the last requests
            return
        # The rank has attached since, or holds other experts since.
        if report.reason and place.state is PlaceState.RESIDENT:
            self._break(place, _on_rank(rank, report.reason))
            return
        if place.content is not None:
            place.content.num_bytes = max(place.content.num_bytes, report.num_bytes)
        place.reason = place.reason or _on_rank(rank, report.reason)
        place.pending.discard(rank)
        self._end_round(place)

    def _break(self, place: _Place, reason: str) -> None:
        """Remove an adapter that a rank has lost: its requests end with an error, and its cached prefixes are not used.

        Ranks and other fronts learn of it later. Until then, ranks may cache more prefixes from wrong rows. So all prefixes are
        forgotten now, and again when no rank uses the place. No other place gets this adapter before.
        """
        content = place.content
        assert content is not None, "a resident place has an adapter"
        names = list(content.names)
        content.names.clear()
        place.is_broken = content.is_draining = True
        content.waiting_since_s = None
        self._fail(content.digest, f"The adapter was removed: {reason}.")
        self.on_broken(names, reason)
        self._drop_unused(content.digest)

    def note_rank(self, rank: int) -> None:
        """Give a rank that attaches the adapters of all places."""
        for place in self._places:
            if place.content is not None and place.state in (PlaceState.LOADING, PlaceState.RESIDENT):
                content = place.content
                self._ranks.post(
                    rank, AdapterOrder(place.number, place.index, content.digest, content.directory)
                )
                if place.state is PlaceState.LOADING:
                    place.pending.add(rank)

    def note_lost(self, rank: int) -> None:
        """Stop waiting for a lost rank."""
        for check in list(self._checks.values()):
            self._note_checked(check, rank)
        for place in self._places:
            if rank in place.pending:
                place.pending.discard(rank)
                self._end_round(place)

    def note_epochs(self) -> None:
        """Stop waiting for ranks that no longer run steps. To be called when ranks have met or have stopped."""
        for place in self._places:
            self._end_round(place)

    def _note_checked(self, check: _Check, rank: int) -> None:
        check.pending.discard(rank)
        if not check.pending and not check.done.done():
            check.done.set_result(None)

    def _end_round(self, place: _Place) -> None:
        """Go on if every rank that may run steps has reported."""
        if place.state not in (PlaceState.LOADING, PlaceState.EMPTYING):
            return
        if not place.pending.isdisjoint(self._in_epochs()):
            return
        content = place.content
        if place.state is PlaceState.EMPTYING:
            place.state, place.content = PlaceState.EMPTY, None
            if place.is_broken:
                place.is_broken = False
                self.on_cleared()
        elif content is not None and place.reason:
            message = f"The adapter could not be loaded: {place.reason}."
            content.waiting_since_s = None
            self._empty(place)
            self._fail(content.digest, message)
            return
        elif content is not None:
            place.state, place.loaded_s = PlaceState.RESIDENT, self._clock()
            content.waiting_since_s = None
            self.on_resident()
            self._drop_unused(content.digest)
        self._schedule_soon()

    def _schedule_soon(self, delay_s: float = 0.0) -> None:
        """Give places to waiting adapters in a later turn of the event loop."""
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            if self._timer.when() <= loop.time() + delay_s:
                return
            self._timer.cancel()
        self._timer = loop.call_later(delay_s, self._schedule)

    def _schedule(self) -> None:
        """Give free places to waiting adapters, and make places free for the others."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        broken = {each.content.digest for each in self._places if each.is_broken and each.content is not None}
        waiting = [
            each
            for each in self._contents.values()
            if each.waiting_since_s is not None and each.place is None and each.digest not in broken
        ]
        waiting.sort(key=lambda each: each.waiting_since_s or 0.0)
        free = [place for place in self._places if place.state is PlaceState.EMPTY]
        for content, place in zip(waiting, free, strict=False):
            self._fill(place, content)
        left = waiting[len(free) :]
        num_coming = sum(place.state is PlaceState.EMPTYING for place in self._places)
        num_coming += sum(content.is_draining for content in self._contents.values())
        num_urgent = sum(self._clock() - (each.waiting_since_s or 0.0) >= PATIENCE_S for each in left)
        for content in list(self._victims()):
            if num_coming >= len(left):
                return
            if not self._num_users(content):
                content.is_draining = True
                self._empty_if_unused(content)
            elif num_coming < num_urgent:
                content.is_draining = True
            else:
                break
            num_coming += 1
        if num_urgent < len(left):
            self._schedule_soon(PATIENCE_S / 4)

    def _victims(self) -> Iterator[_Content]:
        """Yield the adapters that may lose their places, those without requests first."""
        resident = [place.content for place in self._places if place.state is PlaceState.RESIDENT]
        contents = [
            each for each in resident
            if each is not None and not each.is_draining and not any(each.names.values())
        ]  # fmt: skip
        idle = [each for each in contents if not self._num_users(each)]
        yield from sorted(idle, key=lambda each: each.last_used_s)
        used = [each for each in contents if each not in idle]
        yield from sorted(used, key=lambda each: each.place.loaded_s if each.place is not None else 0.0)

    def _num_users(self, content: _Content) -> int:
        """Return the number of requests at ranks that use an adapter."""
        return len(content.users) + self.others.num_running(content.digest)

    def _empty_if_unused(self, content: _Content) -> None:
        """Take the place of a draining adapter away, if no request uses it and no front may submit one."""
        assert content.is_draining, "requests may be submitted"
        if content.place is not None and not content.users and not self.others.may_use(content.digest):
            self._empty(content.place)

    def _fail(self, digest: str, message: str) -> None:
        failure = AdapterFailure(time.time_ns(), digest, message)
        self._failures.append(failure)
        self.on_failed(digest, failure.error)

    def _fill(self, place: _Place, content: _Content) -> None:
        self._begin_round(place, PlaceState.LOADING)
        place.content, content.place, content.is_draining = content, place, False
        self._ranks.post_all(AdapterOrder(place.number, place.index, content.digest, content.directory))
        self._end_round(place)

    def _empty(self, place: _Place) -> None:
        assert place.content is not None, "an empty place has no adapter"
        digest = place.content.digest
        place.content.place, place.content.is_draining = None, False
        self._begin_round(place, PlaceState.EMPTYING)
        self._ranks.post_all(AdapterOrder(place.number, place.index, digest))
        self._end_round(place)

    def _begin_round(self, place: _Place, state: PlaceState) -> None:
        self._number += 1
        place.state, place.number, place.reason = state, self._number, ""
        place.pending = set(self._ranks.attached)

    def _drop_unused(self, digest: str) -> None:
        """Forget an adapter without names, once no accepted request uses it."""
        content = self._contents.get(digest)
        if content is None or content.open or content.names or self.others.may_keep(digest):
            return
        if content.place is not None:
            if content.place.state is not PlaceState.RESIDENT:
                return
            self._empty(content.place)
        del self._contents[digest]
        self._number += 1
        self._ranks.post_all(AdapterOrder(self._number, _CHECK, digest))


def _on_rank(rank: int, reason: str) -> str:
    return f"rank {rank}: {reason}" if reason else ""
