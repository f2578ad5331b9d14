"""How members meet: one that dies while groups are created is not waited for after a newer order."""

import pytest
from torch.distributed import HashStore, Store

from scheduler.epochs.meeting import MeetingStore, meet, newest_epoch, part
from scheduler.epochs.orders import OvertakenError


def test_a_member_that_dies_before_its_address_is_there_is_not_waited_for_after_a_newer_order() -> None:
    store = HashStore()
    store.set("epoch/3/here/1", "1")
    waits_s: list[float] = []

    def is_over(wait_s: float = 0.0) -> bool:
        has_met = store.check(["epoch/3/fate"])
        if has_met:  # the members create a group
            waits_s.append(wait_s)
        return len(waits_s) > 3

    meeting = MeetingStore(store)
    meeting.is_over = is_over
    try:
        with pytest.raises(OvertakenError):
            meet(meeting, 3, (0, 1), 0, is_over)
    finally:
        part()
    assert store.get("epoch/3/fate") == b"meets" and len(waits_s) == 4


def meets_too_late(store: Store, epoch: int) -> None:
    """Follow an order that is obsolete already."""
    with pytest.raises(OvertakenError):
        meet(store, epoch, (0, 1), 0, lambda _wait_s=0.0: True)


def test_the_store_has_the_number_of_the_newest_epoch() -> None:
    store = HashStore()
    assert newest_epoch(store) == 0
    for epoch, newest in ((9, 9), (10, 10), (3, 10)):
        meets_too_late(store, epoch)
        assert newest_epoch(store) == newest


def test_the_number_of_the_newest_epoch_may_be_lost_with_a_store() -> None:
    class OtherStore(HashStore):
        def compare_set(self, key: str, expected: str, value: str) -> bytes:
            if expected:  # as if another store, without entries, were in use from now on
                self.delete_key(key)
            return super().compare_set(key, expected, value)

    store = OtherStore()
    store.set("newest_epoch", "4")
    meets_too_late(store, 5)
    assert newest_epoch(store) == 5
