"""Adapters of several fronts: the leading one gives the places, and no place changes while a request of any front uses it."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from scheduler.policy.request import AdapterOrder
from server.front.adapters.places import PATIENCE_S, PlaceState, RequestAdapters
from server.front.adapters.registry import NamedAdapter
from server.front.errors import ApiError
from server.front.several.adapter_needs import NeedsElsewhere
from server.front.several.board import Board
from server.front.several.followed_adapters import FollowedAdapters
from server.front.several.following import FollowingFront
from server.front.several.leading import LeadingFront
from server.front.several.service_state import ServiceState
from tests.server.front.adapters.test_adapters import FakeRanks, Service, in_loop
from tests.server.front.several.test_leading_and_following import READY, Streams
from tests.support.requests.desk import Desk


class Other:
    """A front that follows, with its requests."""

    def __init__(self, folder: Path, board: Board) -> None:
        board.begin()
        desk = Desk(shared=board)
        self.adapters = FollowedAdapters(folder, board, is_enabled=True)
        self.adapters.on_resident = self.on_resident
        self.adapters.on_failed = lambda digest, failure: self.failed.append((digest, failure.message))
        self.failed: list[tuple[str, str]] = []
        self.waiting: dict[str, str] = {}  # digests by request
        self.following = FollowingFront(
            board, folder, ranks=Streams(), router=desk.router, requests=desk.requests, moves=desk.moves,  # type: ignore[arg-type]
            adapters=self.adapters, on_level=lambda _level: None, on_size=lambda _now, _most: None,
        )  # fmt: skip

    def look(self) -> None:
        self.following.look()

    def admit(self, digest: str, request_id: str) -> int | None:
        self.adapters.accept(digest, request_id)
        place = self.adapters.admit(digest, request_id)
        if place is None:
            self.waiting[request_id] = digest
        return place

    def on_resident(self) -> None:
        for request_id, digest in list(self.waiting.items()):
            if self.adapters.admit(digest, request_id) is not None:
                del self.waiting[request_id]


class Fronts(Service):
    """The adapters of a leading front and of others."""

    def __init__(self, root: Path, num_places: int = 1, num_fronts: int = 2) -> None:
        super().__init__(root, num_places)
        self.folder = root / "fronts"
        self.folder.mkdir(exist_ok=True)
        self.boards = [
            Board(self.folder / "board", number=each, num_fronts=num_fronts, num_ranks=2)
            for each in range(num_fronts)
        ]
        self.boards[0].begin()
        requests = Desk(shared=self.boards[0]).requests
        self.leading = LeadingFront(requests, self.boards[0], self.folder, self.decisions)
        places = self.adapters.places
        places.others = self.needs = NeedsElsewhere(self.folder, self.boards[0], self.leading.all_follow)
        if self.leading.before is not None:
            places.restore(self.leading.before.places)
        self.others: list[Other] = []

    def begin(self) -> None:
        """Start the other fronts."""
        self.others = [Other(self.folder, board) for board in self.boards[1:]]

    def decisions(self) -> ServiceState:
        places = self.adapters.places
        return READY._replace(
            adapters=self.adapters.registered, places=places.given, failures=places.failures
        )

    def look(self) -> None:
        """Let the leading front look at the others."""
        self.leading.publish()
        self.adapters.places.look()

    async def follow(self) -> None:
        """Let all fronts look at each other until nothing changes."""
        for _ in range(4):
            for other in self.others:
                other.look()
            self.look()
            await self.settle()


async def two_fronts(root: Path, num_places: int = 1) -> tuple[Fronts, Other]:
    fronts = Fronts(root, num_places)
    fronts.begin()
    await fronts.follow()
    return fronts, fronts.others[0]


async def with_a_at_the_other(root: Path) -> tuple[Fronts, Other, str, str]:
    """Return two fronts and the digests of two adapters for one place, which a request "1" of the other front has."""
    fronts, other = await two_fronts(root)
    a, b = await fronts.load("a", "b")
    await fronts.follow()
    other.admit(a, "1")
    await fronts.follow()
    return fronts, other, a, b


@in_loop
async def test_names_may_be_missing_until_the_first_state_of_the_leading_front(tmp_path: Path) -> None:
    fronts = Fronts(tmp_path)
    fronts.begin()
    assert fronts.others[0].adapters.why_not_ready() == "waiting for the front that leads the service"
    await fronts.follow()
    assert fronts.others[0].adapters.why_not_ready() is None


@in_loop
async def test_a_request_of_another_front_gets_a_place_and_is_counted(tmp_path: Path) -> None:
    fronts, other = await two_fronts(tmp_path)
    [digest] = await fronts.load("a")
    assert other.adapters.find("a") is None
    await fronts.follow()
    named = other.adapters.find("a")
    assert named is not None and named.digest == digest and other.adapters.names_for("any") == ("a",)
    assert other.admit(digest, "1") is None
    await fronts.follow()
    assert not other.waiting and other.admit(digest, "2") == 0
    await fronts.follow()
    [use] = fronts.adapters.uses()
    assert (use.at_ranks.state, use.at_ranks.num_running) == (PlaceState.RESIDENT, 2)
    assert (use.at_ranks.num_requests, use.at_ranks.num_own_requests) == (2, 0)
    assert [each.at_ranks.num_own_requests for each in other.adapters.uses()] == [2]


@in_loop
async def test_a_place_that_another_front_uses_is_emptied_when_its_requests_have_ended(
    tmp_path: Path,
) -> None:
    fronts, other, a, b = await with_a_at_the_other(tmp_path)
    assert await fronts.admitted(b, "2") is None
    fronts.clock.now_s += PATIENCE_S
    fronts.adapters.places._schedule()
    await fronts.follow()
    assert other.admit(a, "3") is None, "the other adapter has waited for long"
    assert other.adapters.admit(a, "1") == 0, "a request that has begun keeps its place"
    assert not any(order.digest == b for _, order in fronts.ranks.orders if order.place >= 0)
    other.adapters.release(a, "1")
    await fronts.follow()
    assert "2" not in fronts.waiting and fronts.adapters.places.admit(b, "2") == 0
    fronts.adapters.places.release(b, "2")
    await fronts.follow()
    assert not other.waiting


@in_loop
async def test_an_unused_place_changes_only_when_every_front_knows_it(tmp_path: Path) -> None:
    fronts, other, a, b = await with_a_at_the_other(tmp_path)
    other.adapters.release(a, "1")
    await fronts.follow()
    assert await fronts.admitted(b, "2") is None
    fronts.look()
    assert other.admit(a, "3") == 0, "this front does not know yet that the place takes no new requests"
    await fronts.follow()
    assert "2" in fronts.waiting
    other.adapters.release(a, "3")
    await fronts.follow()
    assert "2" not in fronts.waiting


@in_loop
async def test_requests_of_another_front_outlive_the_name_of_their_adapter(tmp_path: Path) -> None:
    fronts, other = await two_fronts(tmp_path)
    [a] = await fronts.load("a")
    await fronts.follow()
    other.admit(a, "1")
    await fronts.follow()
    fronts.adapters.unload("a")
    await fronts.follow()
    assert other.adapters.find("a") is None and a in fronts.adapters.places._contents
    assert other.admit(a, "2") == 0, "its name was resolved before"
    for request_id in ("1", "2"):
        other.adapters.release(a, request_id)
    with pytest.raises(ApiError, match="was unloaded"):
        other.adapters.accept(a, "3")
    await fronts.follow()
    assert not fronts.adapters.places._contents and not other.adapters._requests


@in_loop
async def test_a_failure_reaches_the_requests_of_all_fronts_once(tmp_path: Path) -> None:
    fronts, other = await two_fronts(tmp_path)
    [a] = await fronts.load("a")
    await fronts.follow()
    fronts.ranks.refuses = lambda rank, order: "no memory" if rank == 1 and order.directory else ""
    other.admit(a, "1")
    await fronts.follow()
    assert other.failed == [(a, "The adapter could not be loaded: rank 1: no memory.")]
    other.adapters.release(a, "1")
    await fronts.follow()
    assert len(other.failed) == 1
    replacement = Other(fronts.folder, fronts.boards[1])
    replacement.look()
    assert not replacement.failed, "it is older than this front"


@in_loop
async def test_a_replacement_of_the_leading_front_continues_with_the_places(tmp_path: Path) -> None:
    _, other, a, b = await with_a_at_the_other(tmp_path)
    fronts = Fronts(tmp_path)
    fronts.others = [other]
    assert not fronts.leading.all_follow(), "it has published nothing yet"
    for rank in (0, 1):
        fronts.adapters.places.note_rank(rank)
    assert {order.digest for _, order in fronts.ranks.orders} == {a}
    assert await fronts.load("a", "b") == [a, b]
    assert await fronts.admitted(b, "2") is None
    await fronts.follow()
    assert not any(order.digest == b for _, order in fronts.ranks.orders if order.place >= 0)
    assert other.adapters.admit(a, "1") == 0
    other.adapters.release(a, "1")
    await fronts.follow()
    assert "2" not in fronts.waiting


@in_loop
async def test_requests_of_a_killed_front_hold_their_places_until_it_is_replaced(tmp_path: Path) -> None:
    fronts, _, _, b = await with_a_at_the_other(tmp_path)
    fronts.others = []
    await fronts.admitted(b, "2")
    fronts.clock.now_s += PATIENCE_S
    fronts.adapters.places._schedule()
    fronts.boards[1].begin()  # the replacement, before it has read anything
    await fronts.follow()
    assert "2" in fronts.waiting
    fronts.others = [Other(fronts.folder, fronts.boards[1])]
    await fronts.follow()
    assert "2" not in fronts.waiting


@in_loop
async def test_requests_of_a_front_that_is_lost_with_its_node_hold_no_place(tmp_path: Path) -> None:
    fronts, _, a, b = await with_a_at_the_other(tmp_path)
    fronts.others = []
    await fronts.admitted(b, "2")
    fronts.clock.now_s += PATIENCE_S
    fronts.adapters.places._schedule()
    fronts.boards[0].clear(1)
    await fronts.follow()
    assert "2" in fronts.waiting and fronts.needs.num_running(a) == 1, (
        "a killed one may have requests at ranks"
    )
    fronts.needs.forget([1])
    await fronts.follow()
    assert "2" not in fronts.waiting and fronts.needs.num_running(a) == 0


@in_loop
async def test_the_needs_of_a_lost_front_count_again_when_its_node_is_back(tmp_path: Path) -> None:
    fronts, _, a, _ = await with_a_at_the_other(tmp_path)
    rows = fronts.boards[0].rows_of(range(1, 2))
    row = rows.copy()
    fronts.boards[0].clear(1)
    fronts.needs.forget([1])
    assert fronts.needs.num_running(a) == 0
    rows[:] = row
    assert fronts.needs.num_running(a) == 1


class CheckedRanks(FakeRanks):
    """Ranks that follow orders late, and hold adapters at their places."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: list[tuple[int, AdapterOrder]] = []
        self.held: dict[tuple[int, int], str] = {}  # digests by rank and place
        self.running: dict[str, tuple[int, str]] = {}  # place and digest of each request

    def post(self, rank: int, message: Any) -> None:
        if message.directory or message.place >= 0:
            self.queue.append((rank, message))

    def follow_next(self, rank: int) -> None:
        """Let a rank follow its oldest order, and check that no running request loses its adapter."""
        at = next((at for at, (of, _) in enumerate(self.queue) if of == rank), None)
        if at is None:
            return
        _, order = self.queue.pop(at)
        if order.place >= 0:
            digest = order.digest if order.directory else ""
            users = {used for place, used in self.running.values() if place == order.place}
            assert users <= {digest}, f"place {order.place} becomes {digest!r} while requests use {users}"
            self.held[rank, order.place] = digest
        self.follow(rank, order)

    def begin(self, request_id: str, place: int, digest: str) -> None:
        assert all(self.held.get((rank, place)) == digest for rank in self.attached), "some rank lacks it"
        self.running[request_id] = place, digest


@pytest.mark.crossed("seed", every=3)
@pytest.mark.parametrize("seed", range(6))
def test_no_place_changes_under_a_request_whatever_the_fronts_do(tmp_path: Path, seed: int) -> None:
    """Three fronts, five adapters at two places, and everything in any order."""
    drawn = random.Random(seed)

    async def test() -> None:
        fronts = Fronts(tmp_path, num_places=2, num_fronts=3)
        fronts.ranks = ranks = CheckedRanks()
        fronts.adapters.places._ranks = ranks
        ranks.adapters = fronts.adapters
        fronts.begin()
        digests = [f"digest {number}" for number in range(5)]
        for digest in digests:
            fronts.adapters.places.add_name(digest, "/adapter", 0, digest, is_pinned=False)
            fronts.adapters._names[digest] = NamedAdapter(digest, "/adapter", digest, 0)
        sides: list[RequestAdapters] = [fronts.adapters.places, *(other.adapters for other in fronts.others)]
        for side in sides[1:]:
            side.on_resident = lambda: None
        open_at: dict[str, tuple[int, str]] = {}  # front and digest by request
        for step in range(1500):
            kind = drawn.randrange(7)
            if kind == 0 and len(open_at) < 8:
                front, digest = drawn.randrange(3), drawn.choice(digests)
                if front and fronts.others[front - 1].adapters.find(digest) is None:
                    continue
                sides[front].accept(digest, f"r{step}")
                open_at[f"r{step}"] = front, digest
            elif kind == 1 and open_at:
                request_id = drawn.choice(list(open_at))
                front, digest = open_at.pop(request_id)
                ranks.running.pop(request_id, None)
                sides[front].release(digest, request_id)
            elif kind == 2:
                fronts.look()
            elif kind in (3, 4):
                drawn.choice(fronts.others).look()
            elif kind == 5:
                ranks.follow_next(drawn.randrange(2))
            else:
                fronts.clock.now_s += 0.2
                fronts.adapters.places._schedule()
            await asyncio.sleep(0)
            for request_id, (front, digest) in open_at.items():
                place = sides[front].admit(digest, request_id)
                if place is not None:
                    ranks.begin(request_id, place, digest)
                else:
                    assert request_id not in ranks.running, "a request that has a place keeps it"
        for request_id, (front, digest) in open_at.items():
            ranks.running.pop(request_id, None)
            sides[front].release(digest, request_id)
        for digest in digests:  # each gets a place, at any front
            for front, side in enumerate(sides):
                side.accept(digest, f"last {front}")
                for _ in range(50):
                    place = side.admit(digest, f"last {front}")
                    if place is not None:
                        break
                    for look in (fronts.look, *(other.look for other in fronts.others)):
                        look()
                    for rank in (0, 1) * 4:
                        ranks.follow_next(rank)
                    fronts.clock.now_s += 0.2
                    await asyncio.sleep(0)
                assert place is not None, f"front {front} does not get {digest}"
                ranks.begin(f"last {front}", place, digest)
                del ranks.running[f"last {front}"]
                side.release(digest, f"last {front}")

    asyncio.run(asyncio.wait_for(test(), 300))
