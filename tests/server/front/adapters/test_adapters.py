"""The front's adapters: names, places, rotation without starvation, and ranks that attach, refuse or vanish."""

import asyncio
import functools
import json
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scheduler.policy.request import AdapterOrder, AdapterReport, FinishReason
from server.front.adapters.places import PATIENCE_S, PlaceState
from server.front.adapters.registry import Adapters
from server.front.errors import ApiError
from server.front.events import EventLog
from server.front.generations import Asker
from tests.support.clock import Clock
from tests.support.models.fake_checkpoint import write_safetensors
from tests.support.requests.desk import Desk

LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


def write(directory: Path, *, alpha: int = 8, **fields: Any) -> str:
    """Write an adapter. Different alphas give different digests."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": alpha, **fields}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    shapes = {f"{LAYER}.lora_A.weight": [4, 8], f"{LAYER}.lora_B.weight": [6, 4]}
    write_safetensors(directory / "adapter_model.safetensors", shapes)
    return str(directory)


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test, with its fixtures, in an event loop."""

    @functools.wraps(test)
    def run(*fixtures: Any, **parameters: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*fixtures, **parameters), 20))

    return run


class FakeRanks:
    """Ranks that follow orders at once, or when a test lets them."""

    def __init__(self, *ranks: int) -> None:
        self.attached: dict[int, None] = dict.fromkeys(ranks or (0, 1))
        self.adapters: Adapters
        self.follows = True
        self.silent = set[int]()  # ranks that follow no orders
        self.refuses: Callable[[int, AdapterOrder], str] = lambda _rank, _order: ""
        self.orders: list[tuple[int, AdapterOrder]] = []

    def post(self, rank: int, message: Any) -> None:
        self.orders.append((rank, message))
        if self.follows and rank not in self.silent and (message.directory or message.place >= 0):
            asyncio.get_running_loop().call_soon(self.follow, rank, message)

    def post_all(self, message: Any) -> None:
        for rank in self.attached:
            self.post(rank, message)

    def follow(self, rank: int, order: AdapterOrder) -> None:
        reason = self.refuses(rank, order)
        self.adapters.places.take_report(
            rank, AdapterReport(order.number, order.place, order.digest, reason, 0 if reason else 100)
        )


class Service:
    """Adapters over fake ranks."""

    def __init__(self, root: Path, num_places: int = 2, **how: Any) -> None:
        self.root, self.ranks, self.clock = root, FakeRanks(), Clock()
        self.adapters = Adapters(
            self.ranks, num_places=num_places, max_rank=8, base_names=("base",), clock=self.clock, **how
        )  # fmt: skip
        self.ranks.adapters = self.adapters
        self.resident: list[int] = []
        self.failures: list[str] = []
        self.waiting: dict[str, str] = {}  # digests by request
        self.adapters.places.on_resident = self.on_resident
        self.adapters.places.on_failed = lambda digest, failure: self.failures.append(failure.message)

    def on_resident(self) -> None:
        """Admit the requests that wait, as the front does."""
        self.resident.append(1)
        for request_id, digest in list(self.waiting.items()):
            if self.adapters.places.admit(digest, request_id) is not None:
                del self.waiting[request_id]

    async def load(self, *names: str) -> list[str]:
        """Load an adapter under each name. Return their digests."""
        digests = []
        for name in names:
            path = write(self.root / name, alpha=sum(map(ord, name)))
            digests.append((await self.adapters.load(name, path)).digest)
        return digests

    async def settle(self) -> None:
        """Let the event loop run for a while."""
        for _ in range(8):
            await asyncio.sleep(0.001)

    def admit(self, digest: str, request_id: str) -> int | None:
        """Accept a request, and ask for a place."""
        self.adapters.places.accept(digest, request_id)
        return self.adapters.places.admit(digest, request_id)

    async def admitted(self, digest: str, request_id: str) -> int | None:
        """Ask for a place, and wait for a while."""
        if (place := self.admit(digest, request_id)) is None:
            self.waiting[request_id] = digest
            await self.settle()
            if request_id not in self.waiting:
                place = self.admit(digest, request_id)
        return place


def orders_to_empty(service: Service) -> list[tuple[int, AdapterOrder]]:
    """Return the ranks that were to empty place 0, each with its order."""
    return [each for each in service.ranks.orders if each[1].place == 0 and not each[1].directory]


@in_loop
async def test_a_request_waits_until_every_rank_has_its_adapter(tmp_path: Path) -> None:
    service = Service(tmp_path)
    [digest] = await service.load("a")
    service.ranks.follows = False
    assert service.admit(digest, "r") is None
    await service.settle()
    placed = [(rank, order) for rank, order in service.ranks.orders if order.place >= 0]
    assert [(rank, order.place, order.directory) for rank, order in placed] == [
        (rank, 0, str(tmp_path / "a")) for rank in (0, 1)
    ]
    service.ranks.follow(*placed[0])
    assert service.admit(digest, "r") is None and not service.resident
    service.ranks.follow(*placed[1])
    assert service.resident and service.admit(digest, "r") == 0
    assert [use.at_ranks.state for use in service.adapters.uses()] == [PlaceState.RESIDENT]


@in_loop
async def test_the_adapter_unused_for_longest_gives_up_its_place(tmp_path: Path) -> None:
    service = Service(tmp_path)
    a, b, c = await service.load("a", "b", "c")
    assert await service.admitted(a, "1") == 0 and await service.admitted(b, "2") == 1
    service.clock.now_s += 1
    service.adapters.places.release(b, "2")
    service.clock.now_s += 1
    service.adapters.places.release(a, "1")
    assert await service.admitted(c, "3") == 1
    emptied = [order for rank, order in service.ranks.orders if order.place == 1 and not order.directory]
    assert emptied and emptied[0].digest == b
    assert service.admit(a, "4") == 0, "the other one has kept its place"


@in_loop
async def test_a_place_gets_its_next_adapter_only_after_every_rank_has_emptied_it(tmp_path: Path) -> None:
    service = Service(tmp_path, num_places=1)
    a, b = await service.load("a", "b")
    assert await service.admitted(a, "1") == 0
    service.adapters.places.release(a, "1")
    service.ranks.follows = False
    assert service.admit(b, "2") is None
    await service.settle()
    emptying = orders_to_empty(service)
    assert len(emptying) == 2
    service.ranks.follow(*emptying[0])
    await service.settle()
    assert not any(order.digest == b and order.place == 0 for _, order in service.ranks.orders)
    service.ranks.follow(*emptying[1])
    await service.settle()
    assert any(order.digest == b and order.place == 0 for _, order in service.ranks.orders)


@in_loop
async def test_no_adapter_starves_behind_one_that_is_always_in_use(tmp_path: Path) -> None:
    service = Service(tmp_path, num_places=1)
    a, b = await service.load("a", "b")
    assert await service.admitted(a, "1") == 0
    assert await service.admitted(b, "2") is None
    assert service.admit(a, "3") == 0, "new requests of the resident adapter may begin for a while"
    service.clock.now_s += PATIENCE_S
    service.adapters.places._schedule()
    assert service.admit(a, "4") is None, "then they wait, behind the other adapter"
    assert service.admit(a, "1") == 0, "those that have begun keep their place"
    service.adapters.places.release(a, "1")
    service.adapters.places.release(a, "3")
    assert await service.admitted(b, "2") == 0
    service.adapters.places.release(b, "2")
    assert await service.admitted(a, "4") == 0


@in_loop
async def test_many_adapters_rotate_over_eight_places(tmp_path: Path) -> None:
    service = Service(tmp_path, num_places=8)
    names = [f"{number:03}" for number in range(400)]
    for name in names:  # a file for each would take seconds
        service.adapters.places.add_name(name, "/adapter", 0, name, is_pinned=False)
    waiting = list(np.random.default_rng(0).permutation(names))
    served: list[str] = []
    while waiting:
        begun = [name for name in waiting if service.admit(name, f"r{name}") is not None]
        for name in begun:
            service.adapters.places.release(name, f"r{name}")
        served += begun
        waiting = [name for name in waiting if name not in begun]
        await asyncio.sleep(0)
    assert sorted(served) == names
    assert sum(content.place is not None for content in service.adapters.places._contents.values()) <= 8


@in_loop
async def test_a_pinned_adapter_keeps_its_place_and_one_place_stays_free(tmp_path: Path) -> None:
    service = Service(tmp_path)
    pinned = await service.adapters.load("p", write(tmp_path / "p", alpha=1), is_pinned=True)
    with pytest.raises(ApiError, match="one of 2 adapter slots must stay free"):
        await service.adapters.load("q", write(tmp_path / "q", alpha=2), is_pinned=True)
    a, b = await service.load("a", "b")
    for digest, request_id in ((pinned.digest, "1"), (a, "2")):
        assert await service.admitted(digest, request_id) is not None
        service.adapters.places.release(digest, request_id)
        service.clock.now_s += 1
    assert await service.admitted(b, "3") == 1
    assert service.admit(pinned.digest, "4") == 0


@in_loop
async def test_what_one_rank_refuses_is_not_registered(tmp_path: Path) -> None:
    service = Service(tmp_path)
    service.ranks.refuses = lambda rank, order: "this model has no such module" if rank == 1 else ""
    with pytest.raises(ApiError, match="rank 1: this model has no such module") as caught:
        await service.adapters.load("a", write(tmp_path / "a"))
    assert caught.value.status == 400 and service.adapters.names == ()
    number = service.ranks.orders[0][1].number
    forgotten = [(rank, order.number) for rank, order in service.ranks.orders if not order.directory]
    assert forgotten == [(0, number), (1, number)]


@pytest.mark.parametrize(
    ("name", "fields", "says"),
    [
        ("base", {}, "'base' is a name of the base model"),
        ("", {}, "1 to 256 printable characters"),
        ("x" * 257, {}, "1 to 256 printable characters"),
        ("a\n", {}, "1 to 256 printable characters"),
        ("a", {}, "'a' is loaded already"),
        ("b", {"use_dora": True}, "DoRA is not supported"),
        ("b", {"r": 16}, "has rank 4; its configuration has 16"),
    ],
)
@in_loop
async def test_bad_names_and_adapters_are_named(
    tmp_path: Path, name: str, fields: dict[str, Any], says: str
) -> None:
    service = Service(tmp_path)
    await service.load("a")
    with pytest.raises(ApiError) as caught:
        await service.adapters.load(name, write(tmp_path / "new", **fields))
    assert says in caught.value.message and caught.value.status == 400
    assert service.adapters.names == ("a",)


@in_loop
async def test_an_adapter_on_other_modules_than_the_allowed_ones_is_refused(tmp_path: Path) -> None:
    service = Service(tmp_path, modules=("experts", "k_proj"))
    with pytest.raises(ApiError, match="--lora-target-modules allows only experts, k_proj") as caught:
        await service.load("a")
    assert caught.value.status == 400 and service.adapters.names == ()


@in_loop
async def test_a_service_without_places_loads_nothing(tmp_path: Path) -> None:
    with pytest.raises(ApiError, match="started without --enable-lora"):
        await Service(tmp_path, num_places=0).adapters.load("a", "b")


@in_loop
async def test_a_name_that_is_loaded_in_place_gets_another_content(tmp_path: Path) -> None:
    service = Service(tmp_path)
    [old] = await service.load("a")
    assert await service.admitted(old, "1") == 0
    new = await service.adapters.load("a", write(tmp_path / "a", alpha=77), replaces=True)
    assert new.digest != old and service.adapters.find("a") == new
    assert service.admit(old, "1") == 0, "a request that has begun keeps its content"
    service.adapters.places.release(old, "1")
    await service.settle()
    with pytest.raises(ApiError, match="was unloaded"):
        service.adapters.places.accept(old, "2")


@in_loop
async def test_an_adapter_that_is_replaced_keeps_its_keys_and_its_pin(tmp_path: Path) -> None:
    service = Service(tmp_path)
    await service.adapters.load("r", write(tmp_path / "r"), is_pinned=True, owners=("0f",))
    other = write(tmp_path / "other", alpha=77)
    named = await service.adapters.load("r", other, replaces=True)
    assert (
        named.is_pinned
        and service.adapters.names_for("") == ()
        and service.adapters.names_for("0f") == ("r",)
    )
    named = await service.adapters.load("r", other, replaces=True, is_pinned=False, owners=("1f",))
    assert not named.is_pinned and service.adapters.names_for("0f") == ()
    service.adapters.unload("r")
    assert not (await service.adapters.load("r", other, replaces=True)).owners, "it is a new one"


@in_loop
async def test_an_unloaded_name_is_gone_and_its_requests_end_as_usual(tmp_path: Path) -> None:
    service = Service(tmp_path)
    [digest] = await service.load("a")
    assert await service.admitted(digest, "1") == 0
    service.adapters.unload("a")
    assert service.adapters.find("a") is None and service.admit(digest, "1") == 0
    service.adapters.places.release(digest, "1")
    await service.settle()
    assert not service.adapters.places._contents
    with pytest.raises(ApiError, match="'a' is not loaded"):
        service.adapters.unload("a")


@in_loop
async def test_accepted_choices_that_reach_no_rank_yet_outlive_their_adapter_s_name(tmp_path: Path) -> None:
    service = Service(tmp_path)
    await service.load("a", "b")
    desk = Desk(adapters=service.adapters.places)
    a, b = (service.adapters.find(name) for name in "ab")
    assert a is not None and b is not None
    desk.requests.leave([0, 1])
    desk.open("parked", adapter=a.digest)
    service.adapters.unload("a")
    for rank in range(2):
        desk.requests.enter(rank)
    await service.settle()
    desk.asker = Asker(most_choices=1)
    desk.open("first", "held", adapter=b.digest)
    await service.settle()
    service.adapters.unload("b")
    for name in ("parked", "first"):
        desk.deliver(name, "x", FinishReason.STOP)
    await service.settle()
    desk.deliver("held", "x", FinishReason.STOP)
    await service.settle()
    assert desk.reasons() == [FinishReason.STOP] * 3 and not service.adapters.places._contents
    with pytest.raises(ApiError, match="The adapter was unloaded"):
        desk.open("late", adapter=b.digest)
    assert len(desk.reasons()) == 3


@in_loop
async def test_nothing_is_left_of_an_unloaded_adapter_that_a_rank_could_not_load(tmp_path: Path) -> None:
    service = Service(tmp_path)
    [digest] = await service.load("a")
    desk = Desk(adapters=service.adapters.places)
    service.ranks.refuses = lambda _rank, order: "its file has changed" if order.directory else ""
    desk.open("waits", adapter=digest)
    service.adapters.unload("a")
    await service.settle()
    assert desk.reasons() == [FinishReason.ERROR] and not service.adapters.places._contents


@in_loop
async def test_a_rank_that_attaches_gets_every_place_first(tmp_path: Path) -> None:
    service = Service(tmp_path)
    [digest] = await service.load("a")
    assert await service.admitted(digest, "1") == 0
    service.ranks.orders.clear()
    service.ranks.attached[2] = None
    service.adapters.places.note_rank(2)
    [(rank, order)] = service.ranks.orders
    assert (rank, order.place, order.digest) == (2, 0, digest)


async def with_a_in_use(folder: Path) -> tuple[Service, str, list[PlaceState]]:
    """Return a service with a request of an adapter in place 0, the adapter's digest, and the states of the place when prefixes
    are forgotten."""
    service = Service(folder)
    [digest] = await service.load("a")
    assert await service.admitted(digest, "1") == 0
    forgotten: list[PlaceState] = []
    service.adapters.on_broken = lambda: forgotten.append(service.adapters.places._places[0].state)
    return service, digest, forgotten


@in_loop
async def test_an_adapter_that_a_rank_loses_is_removed_and_its_requests_fail(tmp_path: Path) -> None:
    service = Service(tmp_path)
    a, b = await service.load("a", "b")
    assert await service.admitted(a, "1") == 0 and await service.admitted(b, "2") == 1
    places = service.adapters.places
    place = places._places[0]
    told: list[str] = []
    service.adapters.on_broken = lambda: told.append(f"forget, {place.state.value}")
    places.on_failed = lambda _digest, failure: told.append(failure.message)
    places.take_report(1, AdapterReport(place.number, 0, a, "its file has changed"))
    assert told == ["The adapter was removed: rank 1: its file has changed.", "forget, resident"]
    assert service.adapters.names == ("b",)
    service.ranks.follows = False
    places.release(a, "1")
    await service.settle()
    empties = orders_to_empty(service)
    service.ranks.follow(*empties[0])
    assert len(told) == 2, "requests of the other rank may still use the place"
    service.ranks.follow(*empties[1])
    assert told[2:] == ["forget, empty"] and a not in places._contents
    service.ranks.follow(*empties[1])
    assert len(told) == 3
    service.ranks.follows = True
    assert service.admit(b, "2") == 1
    [again] = await service.load("a")
    assert again == a and await service.admitted(a, "3") == 0 and len(told) == 3


@in_loop
async def test_an_adapter_that_a_rank_lost_gets_no_place_until_no_rank_uses_its_last_one(
    tmp_path: Path,
) -> None:
    service, a, forgotten = await with_a_in_use(tmp_path)
    places = service.adapters.places
    places.take_report(1, AdapterReport(places._places[0].number, 0, a, "its file has changed"))
    [again] = await service.load("a")
    assert again == a and await service.admitted(a, "2") is None, "the first request is still at a rank"
    service.ranks.follows = False
    places.release(a, "1")
    await service.settle()
    assert places._places[1].content is None
    service.ranks.follows = True
    for order in orders_to_empty(service):
        service.ranks.follow(*order)
    assert forgotten == [PlaceState.RESIDENT, PlaceState.EMPTY]
    await service.settle()
    assert places.admit(a, "2") is not None


@in_loop
async def test_an_adapter_that_a_rank_loses_while_its_place_becomes_free_leaves_no_prefixes(
    tmp_path: Path,
) -> None:
    service, a, forgotten = await with_a_in_use(tmp_path)
    places = service.adapters.places
    number, service.ranks.follows = places._places[0].number, False
    service.adapters.unload("a")
    places.release(a, "1")
    places.take_report(1, AdapterReport(number, 0, a, "its file has changed"))
    assert not forgotten and places._places[0].state is PlaceState.EMPTYING
    for order in orders_to_empty(service):
        service.ranks.follow(*order)
    assert forgotten == [PlaceState.EMPTY]


@in_loop
async def test_a_lost_rank_is_not_waited_for(tmp_path: Path) -> None:
    service = Service(tmp_path)
    service.ranks.follows = False
    loading = asyncio.create_task(service.adapters.load("a", write(tmp_path / "a")))
    while not service.ranks.orders:
        await asyncio.sleep(0.001)
    [check, _] = service.ranks.orders
    service.ranks.follow(*check)
    del service.ranks.attached[1]
    service.adapters.places.note_lost(1)
    digest = (await loading).digest
    assert service.admit(digest, "1") is None
    await service.settle()
    assert [rank for rank, order in service.ranks.orders if order.place == 0] == [0]


@in_loop
async def test_places_change_while_a_rank_waits_for_an_epoch(tmp_path: Path) -> None:
    in_epochs = {0, 1}
    service = Service(tmp_path, num_places=1, in_epochs=lambda: in_epochs)
    a, b = await service.load("a", "b")
    service.ranks.attached[4] = None
    service.adapters.places.note_rank(4)
    service.ranks.silent.add(4)
    assert await service.admitted(a, "1") == 0
    service.adapters.places.release(a, "1")
    assert await service.admitted(b, "2") == 0
    got = [order.digest for rank, order in service.ranks.orders if rank == 4 and order.place == 0]
    assert got == [a, a, b], "it follows all orders before its first step"
    service.adapters.places.release(b, "2")
    in_epochs.add(4)
    assert await service.admitted(a, "3") is None, "a rank that runs steps is waited for"
    in_epochs.remove(4)
    service.adapters.places.note_epochs()
    await service.settle()
    assert service.admit(a, "3") == 0, "a rank that a resize has let go is not"


@in_loop
async def test_requests_of_an_adapter_that_cannot_be_loaded_fail(tmp_path: Path) -> None:
    service = Service(tmp_path)
    [digest] = await service.load("a")
    service.ranks.refuses = lambda _rank, order: "its file has changed" if order.directory else ""
    assert await service.admitted(digest, "1") is None
    assert service.failures == ["The adapter could not be loaded: rank 0: its file has changed."]


@in_loop
async def test_a_restarted_front_loads_the_same_names(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    first = Service(tmp_path, kept=kept)
    await first.load("a")
    await first.adapters.load("b", write(tmp_path / "b"), is_pinned=True, owners=("0f",))
    again = Service(tmp_path, kept=kept)
    await again.adapters.start({}, lambda: True)
    assert again.adapters.names == ("a", "b") and again.adapters.why_not_ready() is None
    b = again.adapters.find("b")
    assert b is not None and b.is_pinned and again.adapters.names_for("") == ("a",)
    assert again.adapters.names_for("0f") == ("a", "b")
    wrong = Service(tmp_path)
    with pytest.raises(ApiError, match="The adapter 'x' cannot be served"):
        await wrong.adapters.start({"x": str(tmp_path / "missing")}, lambda: True)


@in_loop
async def test_a_restarted_front_leaves_out_an_adapter_that_is_gone(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    await Service(tmp_path, kept=kept).load("a", "b", "c")
    shutil.rmtree(tmp_path / "b")
    again = Service(tmp_path, kept=kept)
    await again.adapters.start({"c": str(tmp_path / "c")}, lambda: True)
    assert again.adapters.names == ("a", "c") and again.adapters.why_not_ready() is None
    assert sorted(name for name, *_ in json.loads(kept.read_text())) == ["a", "c"]


@in_loop
async def test_a_restarted_front_leaves_out_unloaded_adapters_of_the_start(tmp_path: Path) -> None:
    kept, modules = tmp_path / "kept.json", {name: write(tmp_path / name) for name in "abc"}
    first = Service(tmp_path, kept=kept)
    await first.adapters.start(modules, lambda: True)
    first.adapters.unload("a")
    again = Service(tmp_path, kept=kept)
    await again.adapters.start(modules, lambda: True)
    assert again.adapters.names == ("b", "c")
    shutil.rmtree(tmp_path / "b")
    events = EventLog()
    again = Service(tmp_path, kept=kept, events=events)
    await again.adapters.start(modules, lambda: True)
    assert again.adapters.names == ("c",) and again.adapters.why_not_ready() is None
    assert [event["kind"] for event in events.to_json()] == ["adapter_refused", "adapter_loaded"]
    again.adapters.unload("c")
    again = Service(tmp_path, kept=kept)
    await again.adapters.start(modules, lambda: True)
    assert again.adapters.names == ()


@in_loop
async def test_a_start_waits_for_ranks_that_are_lost_meanwhile(tmp_path: Path) -> None:
    service = Service(tmp_path)
    attached, service.ranks.attached = service.ranks.attached, {}
    starting = asyncio.create_task(service.adapters.start({"a": write(tmp_path / "a")}, lambda: True))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(starting), 0.2)
    assert service.adapters.why_not_ready() is not None
    service.ranks.attached = attached
    await starting
    assert service.adapters.names == ("a",)


@in_loop
async def test_a_start_follows_clients_that_load_and_unload_meanwhile(tmp_path: Path) -> None:
    kept, is_ready = tmp_path / "kept.json", False
    first = Service(tmp_path, kept=kept)
    await first.load("a", "b")
    await first.adapters.load("c", write(tmp_path / "c"), is_pinned=True, owners=("0f",))
    again = Service(tmp_path, kept=kept)
    starting = asyncio.create_task(again.adapters.start({}, lambda: is_ready))
    await again.settle()
    again.adapters.unload("a")
    named = await again.adapters.load("c", write(tmp_path / "c", alpha=9), replaces=True)
    assert named.is_pinned and named.owners == ("0f",), "as before the restart"
    is_ready = True
    await starting
    assert sorted(again.adapters.names) == ["b", "c"] and again.adapters.find("c") == named
    assert sorted(name for name, *_ in json.loads(kept.read_text())) == ["b", "c"]


@in_loop
async def test_an_adapter_that_is_unloaded_while_a_start_checks_it_stays_away(tmp_path: Path) -> None:
    service = Service(tmp_path)
    service.ranks.follows = False
    starting = asyncio.create_task(service.adapters.start({"a": write(tmp_path / "a")}, lambda: True))
    while not service.ranks.orders:
        await asyncio.sleep(0.001)
    service.adapters.unload("a")
    for rank, order in service.ranks.orders.copy():
        service.ranks.follow(rank, order)
    await starting
    assert service.adapters.names == ()


@in_loop
async def test_a_front_that_ends_while_it_starts_keeps_all_names(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    await Service(tmp_path, kept=kept).load("a", "b")
    again = Service(tmp_path, kept=kept)
    again.ranks.follows = False
    starting = asyncio.create_task(again.adapters.start({}, lambda: True))
    while not again.ranks.orders:
        await asyncio.sleep(0.001)
    for rank, order in again.ranks.orders.copy():
        again.ranks.follow(rank, order)
    while len(again.ranks.orders) < 4:  # the second is being checked
        await asyncio.sleep(0.001)
    starting.cancel()
    assert [name for name, *_ in json.loads(kept.read_text())] == ["a", "b"]


@in_loop
async def test_names_that_cannot_be_written_are_logged_and_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = tmp_path / "kept.json"
    service = Service(tmp_path, kept=kept)
    kept.mkdir()
    await service.load("a", "b")
    service.adapters.unload("a")
    assert service.adapters.names == ("b",) and "are not kept for a restart of the front" in caplog.text
    kept.rmdir()
    await service.load("c")
    assert [name for name, *_ in json.loads(kept.read_text())] == ["b", "c"]
