"""Who begins first, who is preempted first, and that nobody is forgotten."""

from scheduler.policy.request import FinishReason
from tests.support.engines.policy_cases import rank_of, request_of, step
from tests.support.models.fake_model import FakeRank


def begun_in(rank: FakeRank, *, most_steps: int = 2000) -> list[str]:
    """Run to the end; returns who began, in order."""
    begun: dict[str, None] = {}
    for _ in range(most_steps):
        if not rank.scheduler.has_work:
            return list(begun)
        begun |= dict.fromkeys(name for name, start, *_ in step(rank) if start == 0)
    raise AssertionError("it does not come to an end")


def test_requests_of_one_priority_begin_in_order_of_arrival() -> None:
    rank = rank_of(seqs=1)
    for name in "cab":
        rank.scheduler.add(request_of(name, 4))
    assert begun_in(rank) == ["c", "a", "b"]


def test_lower_priorities_begin_first_and_equal_ones_in_order_of_arrival() -> None:
    rank = rank_of(seqs=1)
    for name, priority in (("a", 0), ("b", 5), ("c", -1), ("d", 5), ("e", -1), ("f", 0)):
        rank.scheduler.add(request_of(name, 4, priority=priority))
    assert begun_in(rank) == ["c", "e", "a", "f", "b", "d"]


def test_who_waits_takes_no_place_from_who_runs_whatever_the_priorities() -> None:
    rank = rank_of(seqs=1)
    rank.scheduler.add(request_of("a", 4, priority=9))
    step(rank)
    rank.scheduler.add(request_of("b", 4, priority=-9))
    while rank.end_of("a") is None:
        assert [name for name, *_ in step(rank)] == ["a"]
    rank.drain()
    assert rank.end_of("b") is FinishReason.LENGTH and rank.scheduler.stats.num_preemptions == 0


def test_the_least_urgent_is_preempted_though_it_began_first_and_comes_back_before_new_ones() -> None:
    rank = rank_of(9, seqs=3, length=36, caching=False)
    for name, priority in (("a", 1), ("b", 0), ("c", 0)):
        rank.scheduler.add(request_of(name, 8, max_tokens=12, priority=priority))
        step(rank)
    rank.scheduler.add(request_of("d", 4, priority=1))
    seen: list[list[str]] = []
    while rank.scheduler.has_work:
        seen.append([name for name, *_ in step(rank)])
    assert rank.scheduler.stats.num_preemptions == 1, "blocks ran out once"
    without = next(place for place, names in enumerate(seen) if "a" not in names)
    assert set(seen[without]) == {"b", "c"}, "the one that began first is the least urgent"
    returned = next(place for place, names in enumerate(seen) if place > without and "a" in names)
    assert not any("d" in names for names in seen[:returned]), "its client is in the middle of an answer"
    assert all(rank.end_of(name) is FinishReason.LENGTH for name in "abcd")


def test_one_that_wants_many_blocks_is_not_passed_by_small_ones_for_ever() -> None:
    rank = rank_of(8, seqs=4, length=32, caching=False)
    for name in "abc":
        rank.scheduler.add(request_of(name, 4, max_tokens=8))
    step(rank)
    rank.scheduler.add(request_of("L", 28, max_tokens=4))
    for number in range(30):
        rank.scheduler.add(request_of(f"s{number}", 2, max_tokens=2))
    begun = [name for name in begun_in(rank) if name not in "abc"]
    assert begun[0] == "L" and len(begun) == 31, "small ones that came later wait for it"
