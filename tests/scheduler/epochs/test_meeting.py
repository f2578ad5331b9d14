"""How members meet: one that dies while groups are created is not waited for after a newer order."""

import pytest
from torch.distributed import HashStore

from scheduler.epochs.meeting import MeetingStore, meet, part
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
