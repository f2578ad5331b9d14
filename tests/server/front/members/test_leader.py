"""The leader: its actions on decisions, their order, and its own timer."""

import asyncio
from collections.abc import Collection

import pytest

from expert_placement.placement import Placement, linear_placement
from expert_placement.survivors import surviving
from scheduler.epochs.orders import Order
from server.front.events import MOST_EVENTS, EventLog
from server.front.members.leader import READ_BYTES_PER_S, Leader
from server.front.members.membership import REGROUP_TIMEOUT_S, Epochs, Phase
from server.link.messages import Fault

HOME = linear_placement(2, 6, 3)


class Service:
    """Everything around a leader. It records the calls in order."""

    def __init__(
        self,
        *,
        has_home: bool = True,
        recovery_timeout_s: float = 600.0,
        first_rank: int = 0,
        pool: str = "",
        is_again: bool = False,
    ) -> None:
        """Args: is_again: The front replaces one that has served, so that the ranks return."""
        self.told: list[tuple[object, ...]] = []
        self.home: Placement | None = HOME if has_home else None
        self.current = self.home
        self.is_changing = False
        self.version, self.now_s, self.expert_bytes = HOME.version, 0.0, 0
        self.events = EventLog(calendar=lambda: 1_000.0 + self.now_s)
        self.epochs = Epochs(3, recovery_timeout_s=recovery_timeout_s, first_rank=first_rank)
        self.leader = Leader(
            self.epochs,
            self,
            self,
            self,
            surviving=surviving,
            on_order=lambda order: self.told.append(("load", order.epoch)),
            on_failure=lambda reason: self.told.append(("failed", reason)),
            on_no_home=lambda: self.told.append(("no home",)),
            clock=lambda: self.now_s,
            events=self.events,
            pool=pool,
        )
        self.orders: list[Order] = []
        if is_again:
            self.leader.resume()
        for rank in self.epochs.ranks:
            self.leader.attach(rank)

    def next_version(self) -> int:
        self.version += 1
        return self.version

    def resize(self, home: Placement) -> None:
        self.home = home

    def regroup(self, order: Order, reason: str | None = None) -> None:
        if reason is None:
            self.orders.append(order)
            self.told.append(("ranks", order.epoch, order.members))
        else:
            self.current = order.placement
            self.told.append(("placement", order.placement.version, reason))

    def give_up(self, rank: int, reason: str) -> None:
        self.told.append(("stopped waiting", rank))
        self.leader.lose(rank, reason)

    def enter(self, rank: int) -> None:
        self.told.append(("enter", rank))

    def leave(self, ranks: Collection[int]) -> None:
        self.told.append(("leave", *sorted(ranks)))


def test_a_lost_rank_s_requests_are_given_to_others_when_those_have_their_order() -> None:
    async def test() -> None:
        service = Service()
        assert service.told == [], "a start changes nothing"
        service.leader.lose(1, "killed")
        assert service.told == [
            ("placement", 1, "rank 1 is lost: killed"),
            ("load", 1),
            ("ranks", 1, (0, 2)),
            ("leave", 1),
        ]
        placement = service.orders[-1].placement
        assert placement.digest() == surviving(HOME, (0, 2)).digest() and placement.version == 1
        service.told.clear()
        for rank in (0, 2):
            service.leader.take_regrouped(rank, 1)
        service.leader.attach(1)
        assert service.told == [("placement", 2, ""), ("load", 2), ("ranks", 2, (0, 1, 2))]
        assert service.orders[-1].placement.digest() == HOME.digest()
        service.leader.take_regrouped(1, 2)
        assert service.told[-1] == ("enter", 1)
        service.leader.close()

    asyncio.run(test())


def test_events_have_the_cause_and_how_long_it_took() -> None:
    async def test() -> None:
        service = Service()
        for rank in range(3):
            service.leader.take_regrouped(rank, 0)
        assert service.events.to_json() == []
        service.now_s = 5.0
        service.leader.lose(1, "killed")
        service.now_s = 5.5
        for rank in (0, 2):
            service.leader.take_regrouped(rank, 1)
        service.now_s = 9.0
        service.leader.attach(1)
        for rank in range(3):
            service.leader.take_regrouped(rank, 2)
        service.leader.close()
        assert [
            (each["time"], each["kind"], each["rank"], each["seconds"]) for each in service.events.to_json()
        ] == [
            (1_005.0, "rank_lost", 1, None),
            (1_005.5, "regrouped", None, 0.5),
            (1_009.0, "rank_back", 1, 4.0),
            (1_009.0, "regrouped", None, 0.0),
        ]
        assert service.events.to_json()[0]["text"] == "rank 1 is lost: killed"

    asyncio.run(test())


def test_a_pool_is_named_and_its_ranks_have_the_numbers_of_the_service() -> None:
    async def test() -> None:
        service = Service(first_rank=4, pool="decode")
        service.leader.lose(5, "killed")
        for rank in (4, 6):
            service.leader.take_regrouped(rank, 1)
        service.leader.close()
        assert ("ranks", 1, (4, 6)) in service.told and ("leave", 5) in service.told
        assert service.orders[-1].placement.digest() == surviving(HOME, (0, 2)).digest()
        assert [each["text"] for each in service.events.to_json()] == [
            "rank 5 of pool decode is lost: killed",
            "epoch 1 of pool decode: ranks 4 6 serve",
        ]

    asyncio.run(test())


def test_ranks_get_requests_of_a_restarted_front_when_they_serve_again() -> None:
    async def test() -> None:
        service = Service(is_again=True)
        assert service.told[0] == ("leave", 0, 1, 2), "another pool may serve before they are back"
        for rank in range(3):
            service.leader.take_regrouped(rank, 1)
        service.leader.close()
        assert service.told[-3:] == [("enter", 0), ("enter", 1), ("enter", 2)]

    asyncio.run(test())


def test_without_a_home_placement_the_ranks_get_another_one_or_the_pool_fails() -> None:
    async def test() -> None:
        service = Service(has_home=False, is_again=True)
        assert service.told[1:] == [
            ("no home",),
            ("failed", "no rank that returned to the front has the home placement of the experts"),
        ]
        service.leader._on_no_home = lambda: setattr(service, "home", HOME)
        service.leader._carry_out(service.epochs.lose(1, "killed", 0.0))
        service.leader.close()
        assert service.orders[-1].placement.digest() == surviving(HOME, (0, 2)).digest()

    asyncio.run(test())


def test_only_the_newest_events_are_kept() -> None:
    events = EventLog(calendar=lambda: 0.0)
    for number in range(2 * MOST_EVENTS):
        events.note("stopped", str(number))
    assert [each["text"] for each in events.to_json()] == [
        str(n) for n in range(MOST_EVENTS, 2 * MOST_EVENTS)
    ]


@pytest.mark.parametrize("has_home", [True, False])
def test_without_knowing_where_experts_are_a_loss_ends_the_service(has_home: bool) -> None:
    async def test() -> None:
        service = Service(has_home=has_home)
        service.leader.lose(1, "killed")
        assert (("failed", "rank 1 is lost: killed") in service.told) is not has_home
        service.leader.close()

    asyncio.run(test())


def test_a_silent_rank_is_given_up_by_the_timer_and_the_others_get_another_order() -> None:
    async def test() -> None:
        service = Service()
        service.leader.lose(1, "killed")
        service.leader.take_regrouped(0, 1)
        service.told.clear()
        service.now_s = REGROUP_TIMEOUT_S
        service.leader._tick()
        assert [each for each in service.told if each[0] != "load"] == [
            ("stopped waiting", 2),
            ("placement", 2, service.told[1][2]),
            ("ranks", 2, (0,)),
            ("leave", 2),
        ]
        service.leader.close()

    asyncio.run(test())


def test_what_members_must_read_gives_them_time() -> None:
    async def test() -> None:
        service = Service()
        service.expert_bytes = int(READ_BYTES_PER_S)  # a second each: one expert in each of two layers
        service.leader.lose(1, "killed")
        assert service.epochs.next_due_s() == REGROUP_TIMEOUT_S + 2.0
        service.leader.close()

    asyncio.run(test())


def test_members_that_hold_other_experts_get_time_to_read_them() -> None:
    async def test() -> None:
        service = Service()
        service.expert_bytes = int(READ_BYTES_PER_S)
        service.is_changing = True
        service.leader.lose(1, "killed")
        assert service.epochs.next_due_s() == REGROUP_TIMEOUT_S + 2.0 + 3.0, (
            "a stage may have moved three more"
        )
        service.is_changing = False
        for rank in (0, 2):
            service.leader.take_regrouped(rank, 1)
        moved = Placement(HOME.slot_expert[:, ::-1], 6, 3)
        service.home, service.current = moved, surviving(moved, (0, 2))
        service.leader.attach(1)
        due_s = service.epochs.next_due_s()
        service.leader.close()
        assert due_s == REGROUP_TIMEOUT_S, "they hold their experts of the placement after a change"

    asyncio.run(test())


def test_the_timer_comes_by_itself() -> None:
    async def test() -> None:
        service = Service(recovery_timeout_s=0.01)
        service.leader._clock = asyncio.get_running_loop().time
        for rank in range(3):
            service.leader.lose(rank, "killed")
        assert service.epochs.phase is Phase.WAITING
        while service.told[-1][0] != "failed":
            await asyncio.sleep(0.005)
        assert str(service.told[-1][1]).startswith("no rank came back for 0.01 s: rank 0 is lost: killed;")

    asyncio.run(asyncio.wait_for(test(), 20))


def test_a_fault_is_told_to_the_epochs() -> None:
    async def test() -> None:
        service = Service()
        service.leader.take_fault(0, Fault(0, "a time-out", is_final=False))
        assert service.epochs.faults == {0: "a time-out"} and service.told == []
        service.leader.close()

    asyncio.run(test())


def test_a_resize_is_one_order_and_a_loss_before_all_meet_restores_the_placement() -> None:
    async def test() -> None:
        service = Service()
        service.leader.resize(linear_placement(2, 6, 2))
        [order] = service.orders
        assert (order.members, order.leaving, order.num_ranks) == ((0, 1), (2,), 2)
        assert order.placement.num_ranks == 2 and service.told[-1] == ("leave", 2)
        service.leader.take_regrouped(0, 1)
        service.leader.lose(1, "killed")
        order = service.orders[-1]
        assert (order.members, order.leaving, order.num_ranks) == ((0, 2), (), 3)
        assert order.placement.digest() == surviving(HOME, (0, 2)).digest() and service.home is HOME
        for rank in (0, 2):
            service.leader.take_regrouped(rank, 2)
        assert ("enter", 2) in service.told
        service.leader.close()

    asyncio.run(test())
