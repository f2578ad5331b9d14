"""Order of starts and preemptions, and absence of starvation."""

import random
from collections import Counter

from scheduler.policy.request import FinishReason
from scheduler.policy.roster import OUTPUT_WEIGHT
from tests.support.engines.policy_cases import rank_of, request_of, step
from tests.support.models.fake_model import PlannedRank


def begun_in(rank: PlannedRank, *, most_steps: int = 2000) -> list[str]:
    """Run to the end. Return the requests in the order of their start."""
    begun: dict[str, None] = {}
    for _ in range(most_steps):
        if not rank.scheduler.has_work:
            return list(begun)
        begun |= dict.fromkeys(name for name, start, *_ in step(rank) if start == 0)
    raise AssertionError("the scheduler does not finish")


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
    assert rank.scheduler.stats.num_preemptions == 1, "blocks must run out exactly once"
    without = next(place for place, names in enumerate(seen) if "a" not in names)
    assert set(seen[without]) == {"b", "c"}, "the preempted one must be the least urgent"
    returned = next(place for place, names in enumerate(seen) if place > without and "a" in names)
    assert not any("d" in names for names in seen[:returned]), "an interrupted answer comes first"
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
    assert begun[0] == "L" and len(begun) == 31, "small requests that came later must wait for it"


def test_a_key_s_flood_leaves_another_key_the_next_place() -> None:
    rank = rank_of(seqs=2)
    for number in range(40):
        rank.scheduler.add(request_of(f"f{number}", 4, key_id="flood"))
    step(rank)
    rank.scheduler.add(request_of("b", 4, key_id="other"))
    begun = begun_in(rank)
    assert begun.index("b") <= 2, "running requests must not be stopped for it"


def test_a_key_that_was_away_has_no_credit_for_it() -> None:
    rank = rank_of(seqs=1, caching=False)
    for number in range(10):
        rank.scheduler.add(request_of(f"a{number}", 4, key_id="a"))
    rank.drain()
    for number in range(10, 20):
        rank.scheduler.add(request_of(f"a{number}", 4, key_id="a"))
        rank.scheduler.add(request_of(f"b{number}", 4, key_id="b"))
    keys = [name[0] for name in begun_in(rank)]
    assert all(abs(keys[:end].count("a") - keys[:end].count("b")) <= 1 for end in range(len(keys)))


def test_a_less_urgent_request_that_waits_gives_no_key_credit() -> None:
    rank = rank_of(seqs=1, caching=False)
    rank.scheduler.add(request_of("low", 4, key_id="c", priority=5))
    for number in range(20):
        rank.scheduler.add(request_of(f"a{number}", 4, key_id="a"))
    for _ in range(60):
        step(rank)
    for number in range(6):
        rank.scheduler.add(request_of(f"d{number}", 4, key_id="d"))
        rank.scheduler.add(request_of(f"e{number}", 4, key_id="c"))
    begun = begun_in(rank)[:9]
    assert Counter(name[0] for name in begun) == {"a": 3, "d": 3, "e": 3}, begun


def test_an_answer_that_a_lost_rank_began_goes_before_those_that_never_did() -> None:
    rank = rank_of(seqs=1)
    for name in ("a", "b", "c"):
        rank.scheduler.add(request_of(name, 4))
    step(rank)
    rank.scheduler.add(request_of("r", 4, replayed_ids=(1, 2)))
    assert begun_in(rank) == ["r", "b", "c"]


def test_lower_priorities_go_before_keys_that_were_served_less() -> None:
    rank = rank_of(seqs=1)
    for name, key_id, priority in (("a", "x", 0), ("b", "x", -1), ("c", "y", 0), ("d", "x", -1)):
        rank.scheduler.add(request_of(name, 4, key_id=key_id, priority=priority))
    assert begun_in(rank) == ["b", "d", "c", "a"]


def test_of_two_keys_that_wait_none_is_ahead_by_more_than_twice_what_a_batch_takes() -> None:
    """The paper's bound, for the total of all requests that run at once: resumed ones are not charged to the counters."""
    widest = 0
    for seed in range(6):
        rng = random.Random(seed)
        seqs, longest, most_output = 4, 30, 12
        rank = rank_of(24, seqs=seqs, batched=16, length=48, caching=False)
        most = seqs * (longest + OUTPUT_WEIGHT * most_output)
        sizes = {key: (rng.randint(1, longest), rng.randint(1, most_output)) for key in "pq"}
        prompts, served, added = dict[str, int](), Counter[str](), Counter[str]()
        for _ in range(200):
            for key, (prompt, output) in sizes.items():
                while sum(name[0] == key for name in prompts) <= seqs:  # both always have waiting ones
                    name = f"{key}{added[key]}"
                    prompts[name] = rng.randint(1, prompt)
                    rank.scheduler.add(
                        request_of(name, prompts[name], max_tokens=rng.randint(1, output), key_id=key)
                    )
                    added[key] += 1
            for name, start, _, samples in step(rank):
                begins = start == 0  # first start only: rerun prompts after a preemption are not charged
                served[name[0]] += (prompts.pop(name, 0) if begins else 0) + OUTPUT_WEIGHT * samples
            widest = max(widest, abs(served["p"] - served["q"]))
            assert abs(served["p"] - served["q"]) <= 2 * most
    assert widest > 20, "the schedules are even without the rule"


def test_nobody_starves_whatever_comes_later() -> None:
    for seed in range(4):
        rng = random.Random(seed)
        rank = rank_of(16, seqs=3, batched=16, length=40, caching=False)
        added_at: dict[str, int] = {}
        begun_at: dict[str, int] = {}
        for time in range(300):
            for key in "abc":
                if rng.random() < (1.0 if key == "a" else 0.05) and time < 250:
                    name = f"{key}{len(added_at)}"
                    rank.scheduler.add(
                        request_of(name, rng.randint(1, 36), max_tokens=rng.randint(1, 4), key_id=key)
                    )
                    added_at[name] = time
            for name, *_ in step(rank):
                begun_at.setdefault(name, time)
        waits = {
            key: [begun_at[n] - at for n, at in added_at.items() if n[0] == key and n in begun_at]
            for key in "abc"
        }
        assert max(waits["a"]) > 100, "one key must request more than the capacity"
        assert max(waits["b"] + waits["c"]) < 60, "the others must wait for their turn only"
        rank.drain()
        assert all(rank.end_of(name) is FinishReason.LENGTH for name in added_at)
