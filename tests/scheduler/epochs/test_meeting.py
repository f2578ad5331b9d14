"""Members wait for each other in the store, and no longer than there is use in it."""

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore

from dispatch.errors import WireUnavailable
from scheduler.epochs.meeting import ARRIVAL_TIMEOUT_S, meet
from scheduler.epochs.orders import OvertakenError


class Clock:
    """Goes on by what is waited."""

    def __init__(self, over_at_s: float = float("inf")) -> None:
        self.now_s, self._over_at_s = 0.0, over_at_s

    def __call__(self) -> float:
        return self.now_s

    def is_over(self, wait_s: float = 0.0) -> bool:
        """Let time pass."""
        self.now_s += wait_s
        return self.now_s >= self._over_at_s


def test_one_member_meets_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: pytest.fail("it met somebody"))
    meet(HashStore(), 3, (2,), 2, Clock().is_over)


def test_who_waits_in_vain_names_those_that_did_not_come() -> None:
    store, clock = HashStore(), Clock()
    PrefixStore("epoch/4", store).set("here/2", "1")
    with pytest.raises(WireUnavailable, match=r"ranks \[3, 5\] did not come to epoch 4 within 29\.5 s"):
        meet(store, 4, (0, 2, 3, 5), 0, clock.is_over, clock=clock)
    assert ARRIVAL_TIMEOUT_S <= clock.now_s < ARRIVAL_TIMEOUT_S + 0.1
    assert store.check(["epoch/4/here/0"])


def test_an_order_that_is_over_is_given_up_at_once_also_when_all_came() -> None:
    store, clock = HashStore(), Clock(over_at_s=1.0)
    with pytest.raises(OvertakenError):
        meet(store, 4, (0, 1), 0, clock.is_over, clock=clock)
    assert clock.now_s < 1.1
    PrefixStore("epoch/4", store).set("here/1", "1")
    with pytest.raises(OvertakenError):
        meet(store, 4, (0, 1), 0, clock.is_over, clock=clock)


def test_who_came_to_another_epoch_did_not_come_to_this_one() -> None:
    store, clock = HashStore(), Clock()
    PrefixStore("epoch/4", store).set("here/1", "1")
    with pytest.raises(WireUnavailable, match=r"ranks \[1\] did not come to epoch 5"):
        meet(store, 5, (0, 1), 0, clock.is_over, clock=clock)
