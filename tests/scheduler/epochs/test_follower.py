"""From epoch to epoch: reports of faults, and orders that are followed to their end."""

from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed import HashStore

from dispatch.errors import RanksDisagree, WireUnavailable
from dispatch.wires.mailbox import open_mailbox
from expert_placement.placement import linear_placement
from scheduler.assembly import assemble
from scheduler.epochs.follower import EpochFollower
from scheduler.epochs.orders import CannotHoldError, IsOver, MembershipError, Order, Orders, OvertakenError
from scheduler.policy.config import EngineConfig
from scheduler.step.lockstep import Header, LockStep
from tests.support.engines.serving import WaveDoorbell
from tests.support.models.families import write_checkpoint

PLACEMENT = linear_placement(1, 4, 2)


def lockstep_of(epoch: int, step: int) -> LockStep:
    return LockStep(
        open_mailbox("local", None, width=len(Header._fields)), epoch=epoch, timeout_s=1.0, step=step
    )


class FakeRegrouping:
    """Follows orders with the outcomes of its plan. None means success."""

    members: tuple[int, ...] = (0, 1)

    def __init__(self, *plan: Exception | Callable[[], Exception] | None) -> None:
        self.plan, self.done = list(plan), list[str]()

    def part(self) -> None:
        self.done.append("part")

    def close(self) -> None:
        self.done.append("close")

    def follow(self, order: Order, step: int, is_over: IsOver) -> LockStep:
        self.done.append(f"follow {order.epoch} after {step} steps")
        problem = self.plan.pop(0)
        if problem is not None:
            raise problem if isinstance(problem, Exception) else problem()
        return lockstep_of(order.epoch, step)


class Told:
    """Reports to a front, and the orders that it gives in return."""

    def __init__(self, regrouping: FakeRegrouping, *, answers: bool = True) -> None:
        self.epochs = EpochFollower(regrouping, timeout_s=0.01)  # type: ignore[arg-type]
        self.epochs.on_fault, self.epochs.on_regrouped = self._fault, self._regrouped
        self.words, self._answers = list[tuple[object, ...]](), answers

    def give(self, epoch: int) -> None:
        self.epochs.orders.give(Order(epoch, (0, 1), PLACEMENT))

    def _fault(self, epoch: int, reason: str, *, is_final: bool = False) -> None:
        self.words.append((epoch, reason, is_final))
        if self._answers:
            self.give(epoch + 1)

    def _regrouped(self, epoch: int) -> None:
        self.words.append((epoch,))


def test_a_fault_is_told_after_parting_and_answered_by_an_order() -> None:
    regrouping = FakeRegrouping(None)
    told = Told(regrouping)
    told.epochs.end(lockstep_of(4, 17), "PeerLost: rank 1 is lost")
    served = told.epochs.follow()
    assert served is not None and (served.epoch, served.step) == (5, 17)
    assert told.words == [(4, "PeerLost: rank 1 is lost", False), (5,)]
    assert regrouping.done == ["part", "follow 5 after 17 steps"]


def test_no_fault_is_told_where_the_order_is_there_already_or_all_have_agreed_to_follow() -> None:
    told = Told(FakeRegrouping(None, None))
    told.give(1)
    told.epochs.end(lockstep_of(0, 3), "PeerLost: rank 1 is lost")
    assert told.epochs.follow() is not None
    told.give(2)
    told.epochs.end(lockstep_of(1, 5), "")
    assert told.epochs.follow() is not None
    assert told.words == [(1,), (2,)]


@pytest.mark.parametrize("problem", [WireUnavailable("no member came")])
def test_a_member_that_is_lost_on_the_way_is_one_more_fault(problem: Exception) -> None:
    regrouping = FakeRegrouping(problem, None)
    told = Told(regrouping)
    told.give(1)
    assert told.epochs.follow() is not None
    assert told.words == [(1, f"{type(problem).__name__}: {problem}", False), (2,)]
    assert regrouping.done == ["follow 1 after 0 steps", "part", "follow 2 after 0 steps"]


def test_a_rank_without_room_says_that_it_is_final_and_follows_another_order() -> None:
    told = Told(FakeRegrouping(CannotHoldError("8 MiB are needed"), None))
    told.give(3)
    assert told.epochs.follow() is not None
    assert told.words == [(3, "8 MiB are needed", True), (4,)]


def test_an_order_that_another_one_overtook_is_no_fault() -> None:
    told = Told(FakeRegrouping(OvertakenError(), None))

    def overtake() -> Exception:
        told.give(2)
        return OvertakenError()

    told = Told(FakeRegrouping(overtake, None))
    told.give(1)
    assert told.epochs.follow() is not None
    assert told.words == [(2,)]


def test_an_error_that_is_no_loss_ends_the_engine() -> None:
    told = Told(FakeRegrouping(RanksDisagree("a bug")))
    told.give(1)
    with pytest.raises(RanksDisagree):
        told.epochs.follow()


def test_without_an_order_the_engine_ends_with_its_name_and_when_all_stop_it_just_ends() -> None:
    told = Told(FakeRegrouping(), answers=False)
    told.epochs.end(lockstep_of(2, 1), "PeerLost: rank 1 is lost")
    with pytest.raises(MembershipError, match="epoch 2 ended"):
        told.epochs.follow()
    told.epochs.orders.stop()
    assert told.epochs.follow() is None


def test_a_fault_names_ranks_where_groups_know_places() -> None:
    regrouping = FakeRegrouping(None)
    regrouping.members = (0, 2, 5)
    told = Told(regrouping)
    told.epochs.end(
        lockstep_of(4, 17), "DispatchTimeout: rank 1 sent nothing for 30 s; rank 2 gave rank 0 up"
    )
    assert told.words == [(4, "DispatchTimeout: rank 2 sent nothing for 30 s; rank 5 gave rank 0 up", False)]


@pytest.mark.parametrize("recovery_timeout_s", [30.0, 7200.0])
def test_an_engine_waits_longer_for_an_order_than_the_front_does_for_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recovery_timeout_s: float
) -> None:
    asked_s: list[float | None] = []

    def wait(_orders: Orders, _epoch: int, timeout_s: float | None) -> Order | None:
        asked_s.append(timeout_s)
        raise MembershipError("no order came")

    monkeypatch.setattr(Orders, "wait", wait)
    write_checkpoint("mixtral", tmp_path)
    config = EngineConfig(
        directory=tmp_path, kv_cache_bytes=8 << 20, rank_recovery_timeout_s=recovery_timeout_s
    )
    engine = assemble(config, WaveDoorbell(), store=HashStore(), is_joining=True).engine
    with pytest.raises(MembershipError):
        engine.run(lambda _outputs, _stats: None)
    epochs = engine._epochs
    assert epochs is not None
    epochs.end(lockstep_of(0, 1), "")
    with pytest.raises(MembershipError):
        epochs.follow()
    engine.close()
    first_s, then_s = asked_s
    assert first_s is None, "the other ranks of a resize or a pool may take longer to start"
    assert then_s is not None and then_s > recovery_timeout_s
