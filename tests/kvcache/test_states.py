"""The state pool, rule by rule. `tests/scheduler/policy/test_any_history.py` covers any order of them."""

from kvcache.states import NO_STATE, Beginning, StatePool


def test_a_snapshot_is_found_by_the_longest_prefix_that_has_one() -> None:
    pool = StatePool(4)
    assert pool.begin(NO_STATE, 2)
    slot = pool.take()
    assert pool.publish(slot, b"two blocks")
    assert pool.find([b"one block", b"two blocks", b"three blocks"]) == Beginning(2, slot)
    assert pool.find([b"one block"]) == Beginning(0, NO_STATE)


def test_promised_slots_are_nobody_else_s() -> None:
    pool = StatePool(3)
    assert pool.begin(NO_STATE, 2)
    assert not pool.begin(NO_STATE, 2), "only one slot is left"
    assert pool.take_left_over() is not None
    assert pool.take_left_over() is None
    assert pool.take() != pool.take()
    assert pool.num_free == 0


def test_a_snapshot_that_is_held_needs_a_slot_beside_the_promised_ones() -> None:
    pool = StatePool(2)
    assert pool.begin(NO_STATE, 2)
    slot = pool.take()
    pool.publish(slot, b"a")
    pool.give(slot)
    pool.release_promises(1)
    assert pool.num_left_over == 2
    assert not pool.begin(slot, 2), "a slot cannot be both read and written"
    assert pool.begin(slot, 1)


def test_the_least_recently_held_snapshot_goes_first_and_held_ones_stay() -> None:
    pool = StatePool(3)
    keys = [b"a", b"b", b"c"]
    slots = []
    for key in keys:
        slot = pool.take_left_over()
        assert slot is not None
        pool.publish(slot, key)
        slots.append(slot)
    for slot in (slots[1], slots[0]):  # the third stays held
        pool.give(slot)
    assert pool.take_left_over() == slots[1]
    assert [pool.find([key]).slot for key in keys] == [slots[0], NO_STATE, slots[2]]


def test_avoided_slots_are_left_and_stay_snapshots() -> None:
    pool = StatePool(3)
    slots = [pool.take_left_over() for _ in range(3)]
    for slot, key in zip(slots, [b"a", b"b", b""], strict=True):
        assert slot is not None
        if key:
            pool.publish(slot, key)
        pool.give(slot)
    assert pool.take_left_over({slots[0], slots[2]}) == slots[1], "a free one would come first"
    assert pool.find([b"b"]).slot == NO_STATE and pool.find([b"a"]).slot == slots[0]
    assert pool.take_left_over({slots[0], slots[2]}) is None
    assert pool.take_left_over({slots[0]}) == slots[2] and pool.num_free == 1


def test_what_is_forgotten_is_free_once_nobody_holds_it() -> None:
    pool = StatePool(1)
    slot = pool.take_left_over()
    assert slot is not None
    pool.publish(slot, b"a")
    pool.forget(b"a")
    assert pool.find([b"a"]).slot == NO_STATE and pool.num_free == 0
    pool.give(slot)
    assert pool.num_free == 1
    pool.forget(b"never there")


def test_two_slots_with_one_key_are_one_snapshot() -> None:
    pool = StatePool(2)
    first, second = pool.take_left_over(), pool.take_left_over()
    assert first is not None and second is not None
    assert pool.publish(first, b"a") and not pool.publish(second, b"a")
    pool.give(second)
    pool.forget(b"a")
    pool.give(first)
    assert pool.num_free == pool.num_left_over == 2


def test_freed_snapshots_are_not_found_and_held_ones_stay() -> None:
    pool = StatePool(3)
    slots = []
    for key in (b"a", b"b"):
        slot = pool.take_left_over()
        assert slot is not None
        pool.publish(slot, key)
        slots.append(slot)
    pool.give(slots[0])
    pool.free_cached()
    assert pool.find([b"a"]).slot == NO_STATE and pool.find([b"b"]).slot == slots[1]
    pool.give(slots[1])
    pool.free_cached()
    assert pool.find([b"b"]).slot == NO_STATE and pool.num_left_over == 3
    assert [pool.take_left_over() is not None for _ in range(4)] == [True, True, True, False]
