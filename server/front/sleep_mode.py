"""Sleep mode: free the memory of idle ranks, while processes, links, epochs, the journal and KV tiers stay.

`sleep` refuses new requests at once. Open ones end as aborted, or end in their own time, or are taken from their ranks and kept.
A change of the placement ends first, because its later stages would move experts that are gone. Then all ranks are ordered to
release memory, and do so at one step (`scheduler.step.memory_switch`). `wake_up` orders the opposite. When every member has
followed, requests are accepted again, and kept ones continue with the same tokens.

A rank that attaches gets the present order, so a returned rank sleeps or wakes with the others. Each rank also reports the newest
order that it got, from which a restarted front continues. Levels, modes and tags are vLLM's.
"""

import time
from collections.abc import Callable, Collection
from enum import Enum
from typing import NamedTuple, Protocol

from scheduler.policy.request import MemoryOrder
from server.front import errors
from server.front.errors import ApiError
from server.front.events import EventLog
from server.front.ordering import RanksToOrder, wait_until

KV_CACHE, WEIGHTS = "kv_cache", "weights"
TAGS = frozenset((KV_CACHE, WEIGHTS))  # parts that may be woken one after the other
CACHE_LEVEL, EXPERTS_LEVEL = 1, 2  # releases the KV cache; releases experts too


class SleepWay(Enum):
    """What becomes of open requests."""

    ABORT = "abort"  # they end with what was generated so far
    WAIT = "wait"  # they end as usual before the ranks sleep
    KEEP = "keep"  # they continue after waking


class SleepState(NamedTuple):
    """What is visible of sleep mode."""

    level: int  # 0: awake, which means that requests are accepted
    is_waking: bool
    seconds: float  # since requests were refused; 0.0 if awake


class OpenRequests(Protocol):
    """The open requests, implemented by `server.front.requests.Requests`, which explains the methods."""

    @property
    def num_open(self) -> int: ...

    @property
    def num_at_ranks(self) -> int: ...

    def abort_all(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def forget_prefixes(self) -> None: ...


class SleepMode:
    """Whether the service sleeps, and its way there and back. Runs in the front's event loop."""

    def __init__(
        self,
        requests: OpenRequests,
        ranks: RanksToOrder,
        *,
        members: Callable[[], Collection[int] | None],
        why_impossible: str | None = None,
        why_not_now: Callable[[], str | None] = lambda: None,
        is_moving: Callable[[], bool] = lambda: False,
        on_level: Callable[[int], None] = lambda _level: None,
        events: EventLog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin awake.

        Args:
            members: Returns the ranks that serve together, or None while they do not.
            why_impossible: Why this service cannot sleep, or None if it can.
            why_not_now: Returns why it must not fall asleep now, or None if it may.
            is_moving: Returns whether a change of the experts' placement is in progress. None begins while requests are refused.
            on_level: Called with the level whenever it changes.
        """
        self._requests, self._ranks, self._members = requests, ranks, members
        self._why_impossible, self._why_not_now, self._on_level = why_impossible, why_not_now, on_level
        self._is_moving = is_moving
        self._events, self._clock = events or EventLog(), clock
        self._order = MemoryOrder(0)
        self._followed: dict[int, int] = {}  # by rank: the number of the last order that it followed
        self._level = 0
        self._asleep: frozenset[str] = frozenset()  # tags
        self._begun_s = 0.0
        self._is_keeping = False  # open requests are kept
        self._num_wakes = self._num_sleeps = 0  # calls

    @property
    def state(self) -> SleepState:
        """The present state."""
        if not self._level:
            return SleepState(0, False, 0.0)
        return SleepState(self._level, not self._asleep, self._clock() - self._begun_s)

    def why_not_ready(self) -> str | None:
        """Return why requests are refused now, or None if sleep mode does not refuse them."""
        self._open_if_awake()  # the last rank to wait for may be lost
        level, is_waking, _ = self.state
        if not level:
            return None
        return "it is waking up" if is_waking else f"it sleeps (level {level}); POST /wake_up wakes it"

    async def sleep(self, level: int, way: SleepWay, timeout_s: float) -> None:
        """Fall asleep, and return when all ranks have released their memory. A deeper sleep may follow a lighter one.

        Args:
            level: 1 releases the KV cache, 2 also the experts' weights.
            way: What becomes of open requests.
            timeout_s: Time limit. If requests are still open or experts still move then, the service stays awake.

        Raises:
            ApiError: The service cannot sleep, was woken meanwhile, or the time was up.
        """
        self._check()
        if (reason := self._why_not_now()) is not None:
            raise ApiError(409, f"The service cannot sleep now: {reason}. Try again later.")
        if self._members() is None:
            raise errors.not_ready("its ranks do not serve together now")
        until_s = self._clock() + timeout_s
        self._num_sleeps += 1
        num_sleeps, num_wakes = self._num_sleeps, self._num_wakes
        self._asleep = TAGS
        self._enter(max(self._level, level))
        if way is SleepWay.ABORT:
            self._requests.abort_all()
        elif way is SleepWay.KEEP:
            self._is_keeping = True
            self._requests.pause()
        if not await wait_until(
            lambda: self._num_wakes != num_wakes or self._is_calm(), until_s, self._clock
        ):
            num_open = self._requests.num_open
            is_unused = self._is_unused()
            if self._num_sleeps == num_sleeps and self._order.has_cache:
                self._asleep = frozenset()
                self._open_if_awake()
            what = "Experts still move" if is_unused else "Requests are still open"
            count = "" if is_unused else f" ({num_open})"
            raise ApiError(504, f"{what} after {timeout_s:g} s{count}, so the service does not sleep.")
        if self._num_wakes == num_wakes:
            self._command()
            if not await wait_until(
                lambda: self._num_wakes != num_wakes or self._is_followed(), until_s, self._clock
            ):
                raise self._too_slow("released", timeout_s)
        if self._num_wakes != num_wakes:
            raise ApiError(409, "The service was woken up meanwhile, by POST /wake_up.")

    async def wake_up(self, tags: Collection[str], timeout_s: float) -> None:
        """Wake up, and return when all ranks have their memory again. Does nothing if awake.

        Args:
            tags: Parts to bring back. Requests are accepted again when no part is missing.

        Raises:
            ApiError: The service cannot sleep, was put to sleep meanwhile, or the time was up. It wakes up later then.
        """
        self._check()
        if not self._level:
            return
        self._num_wakes += 1
        num_sleeps = self._num_sleeps
        self._asleep -= set(tags)
        self._command()
        is_over = await wait_until(
            lambda: self._num_sleeps != num_sleeps or self._is_followed(),
            self._clock() + timeout_s,
            self._clock,
        )
        if not is_over:
            raise self._too_slow("brought back", timeout_s)
        if self._num_sleeps != num_sleeps:
            raise ApiError(409, "The service was put to sleep meanwhile, by POST /sleep.")
        self._open_if_awake()

    def note_rank(self, rank: int, memory: MemoryOrder | None) -> None:
        """Give a rank that attaches the present order.

        Args:
            memory: The newest order that it got from an earlier front.
        """
        self._followed.pop(rank, None)
        if memory is not None and memory.number > self._order.number:
            missing = {KV_CACHE: not memory.has_cache, WEIGHTS: not memory.has_experts}
            self._order, self._asleep = memory, frozenset(tag for tag in TAGS if missing[tag])
            self._enter(CACHE_LEVEL if memory.has_experts else EXPERTS_LEVEL)
            self._ranks.post_all(memory)
        elif self._order.number:
            self._ranks.post(rank, self._order)

    def take_switched(self, rank: int, number: int) -> None:
        """Record that a rank has followed an order."""
        self._followed[rank] = number
        self._open_if_awake()

    def _check(self) -> None:
        if self._why_impossible is not None:
            raise ApiError(501, self._why_impossible)

    def _command(self) -> None:
        """Order the ranks to have the parts of memory that are awake, unless they were ordered to already."""
        has_cache = KV_CACHE not in self._asleep
        has_experts = WEIGHTS not in self._asleep or self._level < EXPERTS_LEVEL
        order = MemoryOrder(self._order.number + 1, has_cache, has_experts)
        if order[1:] == self._order[1:]:
            return
        self._order = order
        self._ranks.post_all(order)
        if not has_cache:
            self._requests.forget_prefixes()
            self._events.note("asleep", f"the service sleeps (level {self._level})")

    def _is_unused(self) -> bool:
        """Whether ranks have no request, and will get none."""
        return not (self._requests.num_at_ranks if self._is_keeping else self._requests.num_open)

    def _is_calm(self) -> bool:
        """Whether ranks may release their memory."""
        return self._is_unused() and not self._is_moving()

    def _is_followed(self) -> bool:
        members = self._members()
        return members is not None and all(
            self._followed.get(rank, 0) == self._order.number for rank in members
        )

    def _open_if_awake(self) -> None:
        """Accept requests again if all ranks have all their memory, and continue those that were kept."""
        if not self._level or self._asleep or not self._is_followed():
            return
        self._events.note("awake", "the service is awake", seconds=self._clock() - self._begun_s)
        self._is_keeping = False
        self._enter(0)
        self._requests.resume()

    def _enter(self, level: int) -> None:
        if not self._level:
            self._begun_s = self._clock()
        self._level = level
        self._on_level(level)

    def _too_slow(self, done: str, timeout_s: float) -> ApiError:
        behind = sorted(
            rank for rank in self._members() or () if self._followed.get(rank) != self._order.number
        )
        ranks = f"ranks {', '.join(map(str, behind))} have" if behind else "the ranks have"
        return ApiError(
            504,
            f"After {timeout_s:g} s {ranks} not {done} the memory yet. They continue; call again to wait for them.",
        )
