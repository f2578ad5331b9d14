"""Shares of bounded resources: a flood of one owner causes no loss or refusal for others."""

from server.http.shares import Shares


def test_one_owner_alone_has_all() -> None:
    shares = Shares(10)
    assert shares.has_room("a", 10) and not shares.has_room("a", 11)
    shares.take("a", 10)
    assert not shares.has_room("a", 1) and not shares.is_over


def test_of_several_each_may_take_as_much_as_is_left_free_after_it() -> None:
    shares = Shares(64, lambda: True)
    taken = []
    for owner in "abcd":
        taken.append(next(n for n in range(65) if not shares.has_room(owner, n + 1)))
        shares.take(owner, taken[-1])
    assert taken == [32, 16, 8, 4] and shares.held == 60
    shares.give_back("a", 32)
    assert shares.has_room("d", 12) and not shares.has_room("d", 17)


def test_what_is_taken_back_is_the_largest_owner_s() -> None:
    shares = Shares(10)
    for owner, amount in (("a", 2), ("b", 6), ("c", 3)):
        shares.take(owner, amount)
    assert shares.is_over and shares.largest == "b"
    shares.give_back("b", 5)
    assert not shares.is_over and shares.largest == "c" and shares.held_by("b") == 1
    shares.give_back("b", 1)
    assert shares.held_by("b") == 0 and shares.held == 5


def test_an_equal_part_is_an_owner_s_whatever_others_hold() -> None:
    shares = Shares(12, lambda: True)
    shares.take("a", 6)
    assert shares.has_part("a") and shares.has_part("b")
    shares.take("a", 1)
    assert not shares.has_part("a"), "half, because another owner may come"
    for owner in "bc":
        shares.take(owner, 4)
    assert not shares.has_room("b", 0) and shares.has_part("b") and not shares.has_part("a")
    shares.take("b", 1)
    assert not shares.has_part("b")
    shares.take("d", 0)
    assert shares.largest == "a" and shares.held_by("d") == 0
