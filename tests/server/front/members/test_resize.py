"""A resize from its beginning to its end, with a real leader: phases, ids, refusals, and what failures leave."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from expert_placement.placement import Placement, linear_placement
from expert_placement.survivors import surviving
from scheduler.epochs.orders import Order
from server.front.errors import ApiError, bad_request
from server.front.events import EventLog
from server.front.members.leader import READ_BYTES_PER_S, Leader
from server.front.members.membership import REGROUP_TIMEOUT_S, Epochs
from server.front.members.resize import POLL_S, Resize
from server.front.members.resize_operation import Operation, ResizePhase, ResizeRecord
from server.http.operators.resize_routes import resize_routes
from server.link.messages import Fault, ReadExperts, ToRank
from tests.support.requests.asgi import client_of

TIMEOUT_S = 30.0


class PlayedService:
    """Everything around a resize. Ranks read and meet at once by default. It records the calls."""

    def __init__(self, folder: Path, num_ranks: int = 2, **how: Any) -> None:
        self.told: list[tuple[object, ...]] = []
        self.home: Placement | None = linear_placement(2, 8, num_ranks)
        self.current = self.home
        self.is_changing = False
        self.version = self.expert_bytes = 0
        self.events = EventLog()
        self.epochs = Epochs(num_ranks, recovery_timeout_s=600.0)
        self.leader = Leader(
            self.epochs, self, self, self, surviving=surviving, on_order=lambda _order: None,
            on_failure=lambda reason: self.told.append(("failed", reason)), events=self.events,
        )  # fmt: skip
        self.attached: set[int] = set()
        self.open: dict[int, int] = {}  # requests by rank
        self.problem = ""  # of reading experts
        self.reads = self.meets = self.comes = True
        for rank in range(num_ranks):
            self.attach(rank)
        self.file = folder / "resize.json"
        self.resize_of: Resize = Resize(
            self, self, self, ResizeRecord(self.file),  # type: ignore[arg-type]
            **{"timeout_s": TIMEOUT_S, "why_not": lambda _now, _wanted: None, "events": self.events, **how},
        )  # fmt: skip
        self.resize_of.processes = self

    def attach(self, rank: int) -> None:
        self.attached.add(rank)
        self.leader.attach(rank)

    def kill(self, rank: int) -> None:
        """End a rank as a kill does."""
        self.attached.discard(rank)
        self.resize_of.take_end(rank, "killed")
        self.leader.lose(rank, "killed")

    async def plan(self, num_ranks: int) -> Placement:
        return linear_placement(2, 8, num_ranks).with_version(self.next_version())

    def next_version(self) -> int:
        self.version += 1
        return self.version

    def post(self, rank: int, message: ToRank) -> None:
        self.told.append((type(message).__name__, rank))
        if isinstance(message, ReadExperts) and self.reads:
            self.resize_of.take_read(rank, message.placement.version, self.problem if rank == 1 else "")

    def resize(self, home: Any, next_num: int | None = None) -> None:
        """Play `PlacementControl.resize`, or `Ranks.resize`."""
        if next_num is None:
            self.home = home

    def regroup(self, order: Order, reason: str | None = None) -> None:
        if reason is not None:
            self.current = order.placement
            return
        self.told.append(("order", order.members, order.leaving, order.num_ranks))
        if self.meets:
            for rank in order.members:
                asyncio.get_running_loop().call_soon(self.leader.take_regrouped, rank, order.epoch)

    def give_up(self, rank: int, reason: str) -> None:
        self.kill(rank)

    def retire(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self.told.append(("retire", rank))
            self.attached.discard(rank)

    def enter(self, rank: int) -> None:
        self.told.append(("enter", rank))

    def leave(self, ranks: Collection[int]) -> None:
        self.told.append(("leave", *sorted(ranks)))

    def start(self, num_ranks: int) -> None:
        self.told.append(("start", num_ranks))
        for rank in range(self.epochs.num_ranks, num_ranks):
            if self.comes:
                self.attach(rank)

    def keep(self, num_ranks: int) -> None:
        self.told.append(("keep", num_ranks))

    def drain(self, rank: int) -> None:
        self.told.append(("drain", rank))

    def undo(self, rank: int) -> None:
        self.told.append(("undo", rank))

    def num_open(self, rank: int) -> int:
        return self.open.get(rank, 0)

    async def scale(self, num_ranks: int, **how: Any) -> Operation:
        operation = self.resize_of.begin(num_ranks, **how)
        await self.resize_of.wait(operation)
        return operation

    def kinds(self) -> list[str]:
        return [event["kind"] for event in self.events.to_json()]


@contextlib.asynccontextmanager
async def running(folder: Path, num_ranks: int = 2, **how: Any) -> AsyncIterator[PlayedService]:
    service = PlayedService(folder, num_ranks, **how)
    yield service
    service.leader.close()
    assert not any(each[0] == "failed" for each in service.told)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), TIMEOUT_S))


async def until(is_true: Callable[[], bool]) -> None:
    while not is_true():
        await asyncio.sleep(0.002)


def check_as_before(service: PlayedService, operation: Operation, num_ranks: int, reason: str) -> None:
    """Check that a failed operation has left nothing. The members of the next epoch may meet before its end or afterwards."""
    assert (operation.phase, service.epochs.num_ranks, service.resize_of.num_ranks) == (
        ResizePhase.FAILED,
        num_ranks,
        num_ranks,
    )
    assert reason in (operation.error or "")
    assert service.home is not None and service.home.num_ranks == num_ranks
    assert [each for each in service.told if each[0] in ("start", "keep")][-1] == ("keep", num_ranks)
    assert json.loads(service.file.read_text())["num_ranks"] == num_ranks
    assert service.resize_of.why_paused() is None
    assert [kind for kind in service.kinds() if kind.startswith("resize")][-1] == "resize_failed"


def test_a_service_grows(tmp_path: Path) -> None:
    async def test() -> None:
        async with running(tmp_path) as service:
            operation = await service.scale(4)
            assert (operation.phase, operation.error) == (ResizePhase.COMPLETED, None)
            assert service.epochs.is_whole and service.epochs.num_ranks == service.resize_of.num_ranks == 4
            assert service.home is not None and service.home.num_ranks == 4
            assert service.told == [
                ("start", 4), ("ReadExperts", 0), ("ReadExperts", 1), ("order", (0, 1, 2, 3), (), 4),
                ("enter", 2), ("enter", 3), ("keep", 4),
            ]  # fmt: skip
            state = service.resize_of.to_json()
            assert (
                state["phase"],
                state["is_scaling_elastic_ep"],
                state["effective_data_parallel_size"],
            ) == ("completed", False, 4)
            assert [kind for kind in service.kinds() if kind.startswith("res")] == ["resizing", "resized"]
            assert ResizeRecord(service.file).num_ranks == 4

    run(test)


def test_the_standby_has_the_number_before_ranks_meet_and_losses_meanwhile_end_the_operation(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        async with running(tmp_path) as service:
            numbers: list[tuple[int, bool]] = []

            async def note() -> None:
                is_met = any(each[0] == "order" for each in service.told)
                numbers.append((json.loads(service.file.read_text())["operation"]["wanted"], is_met))

            async def note_and_lose() -> None:
                await note()
                service.kill(3)

            service.resize_of.until_copied = note
            assert (await service.scale(4)).phase is ResizePhase.COMPLETED
            assert numbers == [(4, False)]
            await service.scale(2)
            service.resize_of.until_copied = note_and_lose
            check_as_before(service, await service.scale(4), 2, "killed")

    run(test)


def test_a_service_shrinks_when_the_requests_have_moved(tmp_path: Path) -> None:
    async def test() -> None:
        async with running(tmp_path, 3) as service:
            service.open = {2: 5}
            operation = service.resize_of.begin(2)
            await until(lambda: operation.stage == "requests of leaving ranks to move")
            assert service.resize_of.to_json()["phase"] == "preparing"
            service.open = {}
            await service.resize_of.wait(operation)
            assert operation.phase is ResizePhase.COMPLETED and service.epochs.num_ranks == 2
            assert service.told == [
                ("ReadExperts", 0), ("ReadExperts", 1), ("drain", 2), ("order", (0, 1), (2,), 2), ("leave", 2),
                ("retire", 2), ("keep", 2),
            ]  # fmt: skip

    run(test)


def test_new_ranks_start_when_all_fronts_expect_them(tmp_path: Path) -> None:
    async def test() -> None:
        follows = False
        async with running(tmp_path, all_follow=lambda: follows) as service:
            operation = service.resize_of.begin(3)
            await until(lambda: operation.stage == "other fronts to expect the new ranks")
            assert service.told == [] and service.resize_of.placement_for(2) is None
            follows = True
            await service.resize_of.wait(operation)
            assert operation.phase is ResizePhase.COMPLETED and service.told[0] == ("start", 3)
            follows = False
            failed = await service.scale(4, timeout_s=0.05)
            assert "waited for other fronts to expect the new ranks" in (failed.error or "")
            assert service.told[-1] == ("keep", 3) and ("start", 4) not in service.told

    run(test)


def test_ranks_leave_when_no_front_can_give_them_requests(tmp_path: Path) -> None:
    async def test() -> None:
        follows = False
        async with running(tmp_path, 3, all_follow=lambda: follows) as service:
            operation = service.resize_of.begin(2)
            await until(lambda: operation.stage == "requests of leaving ranks to move")
            await asyncio.sleep(0.05)
            assert ("drain", 2) in service.told and not service.resize_of.num_ended
            follows = True
            await service.resize_of.wait(operation)
            assert operation.phase is ResizePhase.COMPLETED

    run(test)


def test_requests_that_do_not_move_in_time_are_computed_again(tmp_path: Path) -> None:
    async def test() -> None:
        async with running(tmp_path, 3) as service:
            service.open = {2: 5}
            operation = await service.scale(2, drain_timeout_s=0.05)
            assert operation.phase is ResizePhase.COMPLETED and ("leave", 2) in service.told

    run(test)


def test_an_id_is_one_operation_and_another_one_is_refused_meanwhile(tmp_path: Path) -> None:
    async def test() -> None:
        async with running(tmp_path) as service:
            service.comes = False
            first = service.resize_of.begin(3, operation_id="a")
            assert service.resize_of.begin(3, operation_id="a") is first
            for size, name, text in (
                (4, "a", "Operation a resizes to 3 ranks, not to 4"),
                (4, "b", "Operation a resizes the service to 3"),
            ):
                with pytest.raises(ApiError, match=text) as refused:
                    service.resize_of.begin(size, operation_id=name)
                assert refused.value.status == 409
            await until(lambda: ("start", 3) in service.told)
            service.attach(2)
            await service.resize_of.wait(first)
            assert service.resize_of.begin(3, operation_id="a") is first, "a retry after its end"

    run(test)


def test_the_present_number_is_no_operation(tmp_path: Path) -> None:
    async def test() -> None:
        async with running(tmp_path) as service:
            assert (await service.scale(2)).phase is ResizePhase.COMPLETED and service.told == []

    run(test)


def test_an_operation_is_aborted_while_it_prepares_only(tmp_path: Path) -> None:
    async def test() -> None:
        async with running(tmp_path) as service:
            with pytest.raises(ApiError, match="No operation can be aborted"):
                service.resize_of.abort()
            service.comes = False
            operation = service.resize_of.begin(4)
            await until(lambda: ("start", 4) in service.told)
            with pytest.raises(ApiError, match="Operation other does not run"):
                service.resize_of.abort("other")
            assert service.resize_of.abort(operation.id) is operation
            await service.resize_of.wait(operation)
            check_as_before(service, operation, 2, "it was aborted")
            service.comes, service.meets = True, False
            operation = service.resize_of.begin(3)
            await until(lambda: service.epochs.is_resizing)
            with pytest.raises(ApiError, match="is committing"):
                service.resize_of.abort()
            assert service.resize_of.to_json()["effective_data_parallel_size"] == 2
            for rank in range(3):
                service.leader.take_regrouped(rank, service.epochs.number)
            await service.resize_of.wait(operation)
            assert operation.phase is ResizePhase.COMPLETED

    run(test)


def test_a_deadline_ends_the_preparations(tmp_path: Path) -> None:
    async def test() -> None:
        async with running(tmp_path) as service:
            service.comes = False
            operation = await service.scale(3, timeout_s=0.05)
            check_as_before(
                service,
                operation,
                2,
                "it waited for new ranks to load and to warm up until its deadline of 0.05 s",
            )
            assert ("DropPlacement", 0) in service.told

    run(test)


def test_a_rank_that_cannot_read_its_experts_ends_the_operation(tmp_path: Path) -> None:
    async def test() -> None:
        async with running(tmp_path, 3) as service:
            service.problem = "1.0 MiB are available"
            operation = await service.scale(2)
            check_as_before(service, operation, 3, "rank 1: 1.0 MiB are available")
            assert ("undo", 2) in service.told

    run(test)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_is_lost_during_preparations_ends_the_operation(tmp_path: Path, victim: int) -> None:
    async def test() -> None:
        async with running(tmp_path) as service:
            service.reads = False
            operation = service.resize_of.begin(3)
            await until(lambda: 2 in service.epochs.came)
            service.kill(victim)
            await service.resize_of.wait(operation)
            check_as_before(service, operation, 2, f"rank {victim} is lost: killed")
            assert {*service.epochs.missing} == {victim} & {0, 1}

    run(test)


def test_a_loss_is_named_if_another_rank_reports_its_failed_step_first(tmp_path: Path) -> None:
    async def test() -> None:
        async with running(tmp_path) as service:
            service.reads = service.meets = False
            operation = service.resize_of.begin(3)
            await until(lambda: 2 in service.epochs.came)
            before = service.epochs.number
            service.leader.take_fault(0, Fault(before, "its peer closed the connection"))
            await until(lambda: service.epochs.number > before)
            for _ in range(5):  # the operation sees the meeting
                await asyncio.sleep(POLL_S)
            service.kill(1)
            await service.resize_of.wait(operation)
            check_as_before(service, operation, 2, "rank 1 is lost: killed")

    run(test)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_that_is_lost_while_ranks_meet_leaves_the_former_ranks(
    tmp_path: Path, before: int, after: int, victim: int
) -> None:
    async def test() -> None:
        async with running(tmp_path, before) as service:
            service.meets = False
            operation = service.resize_of.begin(after)
            await until(lambda: service.epochs.is_resizing)
            service.meets = True
            service.kill(victim)
            if victim in range(after):
                await service.resize_of.wait(operation)
                check_as_before(service, operation, before, f"rank {victim} is lost: killed")
                return
            for rank in range(after):  # the rank was to leave anyway
                service.leader.take_regrouped(rank, service.epochs.number)
            await service.resize_of.wait(operation)
            assert operation.phase is ResizePhase.COMPLETED and service.epochs.is_whole

    run(test)


def test_impossible_sizes_and_services_are_refused(tmp_path: Path) -> None:
    async def test() -> None:
        async with running(tmp_path, why_not=lambda now, wanted: f"{now} to {wanted}") as service:
            with pytest.raises(ApiError, match=r"9 ranks are impossible: 2 to 9\.") as refused:
                service.resize_of.begin(9)
            assert refused.value.status == 400
            service.kill(1)
            with pytest.raises(ApiError, match="rank 1 is lost: killed") as refused:
                service.resize_of.begin(3)
            assert refused.value.status == 409
        async with running(tmp_path, impossible=bad_request("It has several pools.")) as service:
            with pytest.raises(ApiError, match="several pools"):
                service.resize_of.begin(3)
            service.resize_of.recover()
            assert not any(call[0] == "keep" for call in service.told), "ranks of other pools go on"
        async with running(tmp_path, why_not_now=lambda: "it sleeps") as service:
            with pytest.raises(ApiError, match="it sleeps"):
                service.resize_of.begin(3)

    run(test)


def test_a_dry_run_checks_a_size_and_begins_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        why_not = lambda _now, wanted: "it has 4 experts" if wanted > 4 else None  # noqa: E731
        async with running(tmp_path, why_not=why_not) as service:
            app = FastAPI()
            app.include_router(resize_routes(service.resize_of))
            async with client_of(app) as client:
                form = {"new_data_parallel_size": 4, "dry_run": True}
                answer = await client.post("/scale_elastic_ep", json=form)
            assert (answer.status_code, answer.json()["message"]) == (200, "The service can have 4 ranks.")
            assert answer.json()["operation_id"] is None and service.told == []
            with pytest.raises(ApiError, match="5 ranks are impossible: it has 4 experts") as refused:
                service.resize_of.check(5)
            assert refused.value.status == 400

    run(test)


def test_the_files_for_a_resize_are_read_in_a_thread(tmp_path: Path) -> None:
    async def test() -> None:
        threads: list[threading.Thread] = []

        def why_not(_now: int, _wanted: int) -> None:
            threads.append(threading.current_thread())

        async with running(tmp_path, why_not=why_not) as service:
            app = FastAPI()
            app.include_router(resize_routes(service.resize_of))
            async with client_of(app) as client:
                form = {"new_data_parallel_size": 3, "operation_id": "a"}
                for _ in range(2):  # also a retry
                    answer = await client.post("/scale_elastic_ep", json=form)
                    assert (answer.status_code, answer.json()["message"]) == (200, "The service has 3 ranks.")
            [thread] = threads
            assert thread is not threading.current_thread()
            await service.scale(4, checked_from=2)
            assert len(threads) == 2, "the number of ranks has changed since it was checked"

    run(test)


@pytest.mark.parametrize("before", [1, 2])
def test_if_all_former_ranks_die_while_ranks_meet_they_return_with_their_placement(
    tmp_path: Path, before: int
) -> None:
    async def test() -> None:
        async with running(tmp_path, before) as service:
            service.meets = False
            operation = service.resize_of.begin(before + 1)
            await until(lambda: service.epochs.is_resizing)
            for rank in range(before):
                service.kill(rank)
            found = service.resize_of.placement_for(0)
            assert found is not None and found[0] == before
            assert found[1] is not None and found[1].num_ranks == before
            await service.resize_of.wait(operation)

    run(test)


def test_former_ranks_get_time_to_read_the_experts_that_a_failed_growth_took(tmp_path: Path) -> None:
    async def test() -> None:
        async with running(tmp_path) as service:
            service.expert_bytes = int(READ_BYTES_PER_S * 60)
            service.meets = False
            operation = service.resize_of.begin(4)
            await until(lambda: service.epochs.is_resizing)
            assert left_s(service) < REGROUP_TIMEOUT_S, "the experts of a resize are read ahead"
            service.kill(3)  # rank 1 had experts 4 to 7 of two layers, and was to have 2 and 3
            assert left_s(service) == pytest.approx(REGROUP_TIMEOUT_S + 8 * 60, abs=2.0)
            service.kill(1)  # rank 0 kept experts 0 and 1, and serves all now
            assert left_s(service) == pytest.approx(REGROUP_TIMEOUT_S + 12 * 60, abs=2.0)
            await service.resize_of.wait(operation)

    run(test)


def left_s(service: PlayedService) -> float:
    """Return the time until the stream of a silent member is closed."""
    due_s = service.epochs.next_due_s()
    assert due_s is not None
    return due_s - time.monotonic()


def test_a_front_that_is_restarted_while_ranks_meet_returns_to_the_former_ranks(tmp_path: Path) -> None:
    async def test() -> None:
        async with running(tmp_path) as service:
            service.meets = False
            before, operation = service.home, service.resize_of.begin(3, operation_id="mine")
            await until(lambda: service.epochs.is_resizing)
            record = ResizeRecord(service.file)
            assert record.num_ranks == 2 and record.home is not None and before is not None
            assert record.home.digest() == before.digest()
            again = PlayedService(tmp_path)
            again.resize_of.recover()
            assert again.told[-1] == ("keep", 2)
            found = again.resize_of.find("mine")
            assert found is not None and (found.phase, found.error) == (
                ResizePhase.FAILED,
                "the front was restarted",
            )
            again.leader.close()
            assert not operation.has_ended
            for rank in range(3):
                service.leader.take_regrouped(rank, 1)
            await service.resize_of.wait(operation)
            again = PlayedService(tmp_path, 3)
            again.resize_of.recover()
            found = again.resize_of.find("mine")
            assert (
                found is not None and found.phase is ResizePhase.COMPLETED and again.told[-1] == ("keep", 3)
            )
            again.leader.close()

    run(test)
