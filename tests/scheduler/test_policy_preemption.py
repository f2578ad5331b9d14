"""The local scheduler when blocks are short: who is preempted, who comes back, and that nobody starves."""

from dataclasses import replace
from itertools import count, islice

from tests.support.fake_model import serve_alone
from tests.support.policy_cases import rank_of, request_of, step


def test_a_preempted_request_says_how_long_it_waited_the_first_time() -> None:
    rank = rank_of(num_blocks=6, seqs=2, length=16, caching=False)
    for name in ("a", "b"):
        rank.scheduler.add(replace(request_of(name, 8, max_tokens=8), arrival_s=1.0))
    rank.plan(now_s=2.0)
    rank.finish()
    rank.drain()
    assert rank.scheduler.stats.num_preemptions > 0
    assert rank.outputs["b"][0].queued_s == 1.0
    assert not any(output.queued_s for output in rank.outputs["b"][1:])


def test_out_of_blocks_preempts_the_latest_arrival_and_delivers_nothing_twice() -> None:
    rank = rank_of(6, length=20, batched=16)
    requests = [request_of(request_id, 6, max_tokens=12) for request_id in "ab"]
    for request in requests:
        rank.scheduler.add(request)
    while not rank.scheduler.stats.num_preemptions:
        step(rank)
    assert [item[0] for item in step(rank)] == ["a"]
    assert rank.scheduler.stats.num_waiting == 1
    rank.drain()
    for request in requests:
        assert (rank.tokens_of(request.request_id), rank.end_of(request.request_id)) == serve_alone(
            request, 20
        )


def test_a_preempted_sequence_goes_before_those_that_never_ran_and_reuses_its_cached_blocks() -> None:
    rank = rank_of(6, length=20)
    for request_id in "abc":
        rank.scheduler.add(request_of(request_id, 6, max_tokens=12))
    admitted: list[str] = []
    starts: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    while rank.scheduler.has_work:
        running_before = set(admitted)
        for request_id, start, num_tokens, _ in step(rank):
            admitted += [request_id] if request_id not in running_before else []
            starts[request_id] += [start] if num_tokens > 1 else []
    assert rank.scheduler.stats.num_preemptions > 0
    assert admitted == ["a", "b", "c"]
    assert starts["b"][1] > 0, "its prefix was still cached when it came back"


def test_admission_leaves_a_block_free_for_every_running_sequence() -> None:
    rank = rank_of(6, length=24)
    rank.scheduler.add(request_of("a", 11))  # three blocks, one row to spare
    rank.scheduler.add(request_of("b", 11))  # three blocks are left, but one is a's
    rank.scheduler.add(request_of("c", 4))  # would fit, but came later
    assert step(rank) == [("a", 0, 11, True)]
    rank.scheduler.abort("b")
    assert step(rank) == [("a", 11, 1, True), ("c", 0, 4, True)]


def test_a_sequence_of_max_model_len_runs_alone_in_the_smallest_pool() -> None:
    rank = rank_of(5, length=20, seqs=4)
    requests = [request_of(request_id, 10, max_tokens=99) for request_id in "abc"]
    for request in requests:
        rank.scheduler.add(request)
    rank.drain()
    for request in requests:
        assert (rank.tokens_of(request.request_id), rank.end_of(request.request_id)) == serve_alone(
            request, 20
        )
        assert len(rank.tokens_of(request.request_id)) == 10


def test_a_newcomer_is_not_starved_by_a_steady_stream_of_others() -> None:
    rank = rank_of(12, seqs=4, length=40)
    names = (f"{letter}{number}" for number in count() for letter in "abcdef")
    for name in islice(names, 12):
        rank.scheduler.add(request_of(name, 5, max_tokens=20))
    rank.scheduler.add(request_of("late", 30, max_tokens=5))
    for name in islice(names, 200):
        rank.scheduler.add(request_of(name, 5, max_tokens=20))
        step(rank)
        if rank.outputs.get("late"):
            return
    raise AssertionError("a long prompt waited for ever behind short ones that arrived later")
