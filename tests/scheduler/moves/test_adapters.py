"""A rank's part in loading adapters, without a model: which orders it follows, and whether all have been read."""

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from expert_placement.placement import linear_placement
from scheduler.epochs import follower
from scheduler.epochs.follower import Regrouping
from scheduler.epochs.orders import CannotHoldError, Order
from scheduler.moves.adapters import AdapterLoads
from scheduler.policy.request import AdapterOrder, AdapterReport

TIMEOUT_S = 20.0


class Bank:
    """Adapters, which take until `gate` to read."""

    def __init__(self) -> None:
        self.gate, self.placed = threading.Event(), list[tuple[int, Any]]()

    def load(self, directory: Path, digest: str, *, max_rank: int) -> Any:
        assert self.gate.wait(TIMEOUT_S)
        return SimpleNamespace(digest=digest, num_bytes=max_rank)

    def place(self, place: int, adapter: Any) -> None:
        self.placed.append((place, None if adapter is None else adapter.digest))


@pytest.fixture
def loads() -> Iterator[AdapterLoads]:
    made = AdapterLoads(0, Bank(), max_rank=8)  # type: ignore[arg-type]
    yield made
    made.close()


def test_a_rank_without_an_epoch_keeps_only_the_newest_order_of_each_place(loads: AdapterLoads) -> None:
    bank: Any = loads._bank
    reports: list[AdapterReport] = []
    loads.on_report = reports.append
    orders = [(1, 0, "a"), (2, 1, "b"), (3, 0, ""), (4, 0, "c")]
    for number, place, digest in orders:
        loads.order(AdapterOrder(number, place, digest, digest))
    assert not loads.wait_for_places(0.0), "they have not been read"
    bank.gate.set()
    assert loads.wait_for_places(TIMEOUT_S)
    loads.take(lambda _place: False)
    assert bank.placed == [(1, "b"), (0, "c")] and [each.number for each in reports] == [2, 4]


def test_a_rank_that_joins_others_does_not_wait_for_adapters_without_a_place(loads: AdapterLoads) -> None:
    bank: Any = loads._bank
    loads.order(AdapterOrder(1, -1, "a", "a"))
    assert loads.wait_for_places(TIMEOUT_S)
    loads.order(AdapterOrder(2, 0, "b", "b"))
    assert not loads.wait_for_places(0.0)
    bank.gate.set()
    assert loads.wait_for_places(TIMEOUT_S)


def test_a_rank_that_has_not_read_the_adapters_of_the_others_does_not_join_them(
    loads: AdapterLoads, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank: Any = loads._bank
    monkeypatch.setattr(follower, "ADAPTERS_TIMEOUT_S", 0.01)
    placement = linear_placement(1, 4, 2)
    model = SimpleNamespace(placement=placement, hold=lambda *_: None, slot_bytes=lambda _: 0)
    parts: Any = SimpleNamespace(
        config=SimpleNamespace(device="cpu", rank=0, world_size=2, threads=1, num_local_ranks=2),
        model=model, store=None, adapters=loads, available=lambda: 1,
        weights=SimpleNamespace(settle=lambda _: None),
        read_ahead=SimpleNamespace(take=dict),
        relocation=SimpleNamespace(spare=None),
    )  # fmt: skip
    regrouping = Regrouping(parts, None)
    loads.order(AdapterOrder(1, 0, "a", "a"))
    order = Order(1, (0, 1), placement)
    with pytest.raises(CannotHoldError, match="rank 0 could not read the adapters"):
        regrouping._hold(order)
    bank.gate.set()
    assert loads.wait_for_places(TIMEOUT_S)
    regrouping._hold(order)
