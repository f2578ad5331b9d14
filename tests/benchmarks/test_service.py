"""The load of a benchmark: prompts, clients in a closed loop, streams of a stub server, and statistics of their times."""

import asyncio

import pytest

from benchmarks.serving.closed_loop import ExactPrompts, RequestTiming, closed_loop, summarise
from benchmarks.serving.live_answers import CutOffError, LiveAnswer, LostAnswerError, longest_pause_s
from benchmarks.serving.service import BenchServiceError, stream_completion
from tests.support.requests.stub_service import OK, chunk, event, stub_service, usage


class Counter:
    """Completes at once, but only after the other clients had their turn."""

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


def _stream(pieces: int, tokens: int) -> bytes:
    piece = chunk(event({"choices": [{"text": "data: {\n"}], "usage": None}))
    end = event({"choices": [], "usage": usage(2, tokens)})
    return OK + piece * pieces + chunk(end + b"data: [DONE]\n\n") + b"0\r\n\r\n"


def _ask(answer: bytes, num_tokens: int) -> tuple[RequestTiming, dict[str, object]]:
    """Let a stub answer one request. Return the timing and the request's body."""

    async def run() -> tuple[RequestTiming, dict[str, object]]:
        async with stub_service([answer], closes_after=lambda _: True) as service, asyncio.timeout(10):
            return await stream_completion(service.port, [5, 6], num_tokens=num_tokens), service.bodies[0]

    return asyncio.run(run())


def test_a_stream_is_timed_piece_by_piece_and_counted_by_its_usage() -> None:
    timing, body = _ask(_stream(pieces=3, tokens=4), num_tokens=4)
    assert timing.num_tokens == 4
    assert len(timing.arrivals_s) == 3  # one piece had two tokens
    assert timing.start_s <= timing.arrivals_s[0] <= timing.arrivals_s[-1]
    assert body["prompt"] == [5, 6]
    assert (body["max_tokens"], body["temperature"], body["ignore_eos"]) == (4, 0, True)


def test_fewer_tokens_than_asked_for_are_an_error() -> None:
    with pytest.raises(BenchServiceError, match="a stream of 4 tokens ended with 2 tokens"):
        _ask(_stream(pieces=2, tokens=2), num_tokens=4)


def test_an_error_inside_a_stream_is_quoted() -> None:
    answer = OK + chunk(event({"error": {"message": "rank 1 is gone"}}) + b"data: [DONE]\n\n") + b"0\r\n\r\n"
    with pytest.raises(BenchServiceError, match="rank 1 is gone"):
        _ask(answer, num_tokens=4)


def test_a_refusal_is_quoted() -> None:
    with pytest.raises(BenchServiceError, match=r"refused \(400\): too long"):
        _ask(b"HTTP/1.1 400 Bad Request\r\n\r\ntoo long", num_tokens=4)


STOPS = [0.0, 0.1, 0.2, 0.21, 0.9, 1.0, 1.1, 3.0]


def test_the_longest_pause_counts_where_it_overlaps_the_time() -> None:
    assert longest_pause_s(STOPS, 1.5, 2.0) == 3.0 - 1.1
    assert longest_pause_s(STOPS, 0.0, 1.05) == 0.9 - 0.21
    assert longest_pause_s(STOPS, 4.0, 5.0) is None
    assert longest_pause_s([], 0.0, 1.0) is None


def test_prompts_have_the_exact_length_and_distinct_beginnings() -> None:
    prompts = ExactPrompts(str.split, 128)  # words are the tokens
    taken = prompts.take(1000)
    assert {len(prompt) for prompt in taken} == {128}
    assert len({tuple(prompt[:16]) for prompt in taken}) > 990  # the text sometimes repeats itself


BUSY = b"HTTP/1.1 503 Service Unavailable\r\n\r\n"
BROKEN = b"HTTP/1.1 500 Internal Server Error\r\n\r\n{}"


def _read(answers: list[bytes], *, may_ask_again: bool) -> LiveAnswer:
    """Let a stub answer the tries of one request."""

    async def run() -> LiveAnswer:
        async with stub_service(answers, closes_after=lambda _: True) as service, asyncio.timeout(10):
            answer = LiveAnswer(
                port=service.port, body={}, is_streamed=True, may_ask_again=lambda: may_ask_again
            )
            await answer.read()
            return answer

    return asyncio.run(run())


def _answer(finish_reason: str | None) -> bytes:
    choice = {"index": 0, "text": "word", "finish_reason": finish_reason}
    return OK + chunk(event({"choices": [choice]}) + event({"choices": [], "usage": usage(1, 1)}))


def test_an_answer_that_is_cut_off_is_requested_again_if_that_is_allowed() -> None:
    answer = _read([BUSY, _answer(None), _answer("length")], may_ask_again=True)
    assert (answer.num_refused, answer.num_cut_off, len(answer.arrivals_s)) == (1, 1, 2)
    with pytest.raises(CutOffError, match="incomplete after 4 characters"):
        _read([_answer(None)], may_ask_again=False)


def test_an_answer_with_an_error_is_lost_and_not_requested_again() -> None:
    with pytest.raises(LostAnswerError, match="status 500"):
        _read([BROKEN, _answer("length")], may_ask_again=True)
