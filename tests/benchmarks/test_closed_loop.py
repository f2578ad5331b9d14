import asyncio

import pytest

from benchmarks.closed_loop import RequestTiming, closed_loop, summarise


class Counter:
    """Completes at once, but not before the other clients have had their turn."""

    def __init__(self) -> None:
        self.running = self.most = 0
        self.seen: list[list[int]] = []

    async def complete(self, prompt: list[int]) -> RequestTiming:
        self.running += 1
        self.most = max(self.most, self.running)
        self.seen.append(prompt)
        await asyncio.sleep(0)
        self.running -= 1
        return RequestTiming(0.0, [1.0], 1)


@pytest.mark.parametrize(("concurrency", "most"), [(1, 1), (3, 3), (9, 5)])
def test_clients_send_every_prompt_once_and_never_more_at_once(concurrency: int, most: int) -> None:
    counter = Counter()
    prompts = [[number] for number in range(5)]
    timings = asyncio.run(closed_loop(counter.complete, prompts, concurrency))
    assert len(timings) == 5
    assert counter.most == most
    assert sorted(counter.seen) == prompts


def test_a_failure_is_raised_as_it_is() -> None:
    async def fail(_: list[int]) -> RequestTiming:
        raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"):
        asyncio.run(closed_loop(fail, [[1], [2]], 2))


def test_summary_has_rates_and_gaps_in_milliseconds() -> None:
    timings = [RequestTiming(0.0, [0.1, 0.2, 0.5], 3), RequestTiming(1.0, [1.3, 1.4, 2.0], 3)]
    latency = summarise(timings)
    assert latency.tokens_per_s == 3.0  # 6 tokens in 2 s
    assert latency.ttft_p50_ms == 200.0
    assert latency.ttft_p99_ms == 298.0  # 100 and 300, interpolated
    assert latency.itl_p50_ms == 200.0  # of 100, 300, 100, 600
    assert latency.itl_p99_ms == 591.0


def test_a_request_without_tokens_is_an_error() -> None:
    with pytest.raises(ValueError, match="no token"):
        summarise([RequestTiming(0.0, [], 0)])
