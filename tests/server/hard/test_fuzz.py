"""Thousands of hostile requests: no 5xx, no hang, no leak, and valid requests are still answered."""

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from benchmarks.serving.paced_rank import NUM_BLOCKS
from tests.support.requests.mutations import Mutator, RawRequest
from tests.support.requests.raw_http import RawAnswer, RawClient
from tests.support.requests.valid_bodies import BODIES, EXEMPT_FROM_200, NEVER, RARE, SLEEPS
from tests.support.service.paced_front import PacedFront
from tests.support.service.process_figures import num_descriptors, num_threads, rss_bytes
from tests.support.service.service_processes import wait_until

NUM_CLIENTS = 8
TIMEOUT_S = 60.0  # per request, on a loaded machine
FAST, SLOW = 500, 8_000
LOT = 100  # requests between two valid ones
GROWTH_BYTES = 48 << 20  # growth allowed after 12,000 requests: allocators do not return all memory
GOOD = RawRequest(
    path="/v1/completions", body=json.dumps({"prompt": "hello world", "max_tokens": 2}).encode()
)


def hostile_requests(seed: int, count: int) -> Iterator[RawRequest]:
    """Yield mutations of every endpoint's valid bodies, reproducible by seed."""
    mutator, choice = Mutator(seed), random.Random(seed)
    paths = sorted(set(BODIES) - set(NEVER))
    weights = [1 if path in RARE else 40 for path in paths]
    for _ in range(count):
        (path,) = choice.choices(paths, weights)
        yield mutator.request(path, choice.choice(BODIES[path]))


def wrong_with(request: RawRequest, answer: RawAnswer) -> str | None:
    """Return what is wrong with an answer, or None."""
    if answer.status == 0:
        return "hung up without an answer" if request.is_http else None
    if answer.status >= 500:
        return f"answered {answer.status}: {answer.body[:300]!r}"
    if answer.status >= 400 and request.is_http and request.method != "HEAD":
        return _wrong_with_error(answer, is_text=request.path.startswith("/api/"))
    if "event-stream" in answer.content_type:
        return None if b'"code":5' not in answer.body else f"an event says {answer.body[-300:]!r}"
    return None


def _wrong_with_error(answer: RawAnswer, *, is_text: bool) -> str | None:
    """Return what is wrong with an error. If `is_text`, it may be a plain text, as Ollama's are."""
    try:
        error = json.loads(answer.body)["error"]
    except (ValueError, KeyError, TypeError):
        return f"{answer.status} is not in the shape of an error: {answer.body[:300]!r}"
    if is_text and isinstance(error, str) and error:
        return None
    if not isinstance(error, dict) or not error.get("message") or not error.get("type"):
        return f"an error without message or type: {answer.body[:300]!r}"
    return None if len(answer.body) < 8192 else f"an error of {len(answer.body)} bytes"


def attack(front: PacedFront, requests: Sequence[RawRequest]) -> tuple[list[str], Counter[int]]:
    """Send requests over several connections. Return the failures and the counts of statuses."""

    def send_share(client: int) -> tuple[list[str], Counter[int]]:
        connection, wrong, statuses = RawClient(front.url, timeout_s=TIMEOUT_S), [], Counter[int]()
        for request in requests[client::NUM_CLIENTS]:
            try:
                answer = connection.send(request)
            except TimeoutError:
                wrong.append(f"{request.path}, {request.what}: no answer within {TIMEOUT_S} s")
                connection.close()
                continue
            statuses[answer.status] += 1
            if problem := wrong_with(request, answer):
                wrong.append(f"{request.path}, {request.what}: {problem}; sent {request.body[:300]!r}")
        connection.close()
        return wrong, statuses

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        shares = list(pool.map(send_share, range(NUM_CLIENTS)))
    return [each for wrong, _ in shares for each in wrong], sum((each for _, each in shares), Counter())


def check_good(front: PacedFront) -> None:
    """Check that a valid request is still answered."""
    connection = RawClient(front.url, timeout_s=TIMEOUT_S)
    answer = connection.send(GOOD)
    connection.close()
    assert answer.status == 200, answer
    assert json.loads(answer.body)["choices"][0]["text"] == front.decode(front.encode("hello world")[:2])


@pytest.mark.parametrize("path", sorted(BODIES))
def test_what_is_mutated_is_valid(hard_front: PacedFront, path: str) -> None:
    for body in BODIES[path]:
        response = hard_front.post(path, json=body)
        assert response.status_code == 200 or path in EXEMPT_FROM_200, response.text
        if path in SLEEPS:
            assert hard_front.post(SLEEPS[path]).status_code == 200


def test_every_endpoint_that_takes_a_body_is_fuzzed(hard_front: PacedFront) -> None:
    described: dict[str, Any] = hard_front.get("/openapi.json").json()["paths"]
    posts = {path for path, operations in described.items() if "post" in operations}
    missing = sorted(posts - set(BODIES))
    assert not missing, f"add valid bodies to tests/support/requests/valid_bodies.py for {missing}"


def test_hundreds_of_hostile_requests_do_no_harm(hard_front: PacedFront) -> None:
    wrong, statuses = attack(hard_front, list(hostile_requests(1, FAST)))
    assert not wrong, "\n".join(wrong[:10])
    assert statuses[200] > FAST // 20 and statuses[400] > FAST // 4, statuses
    check_good(hard_front)


def test_the_same_seed_makes_the_same_requests() -> None:
    first, again = list(hostile_requests(5, 200)), list(hostile_requests(5, 200))
    assert first == again
    assert len({request.bytes() for request in first}) > 150


@pytest.mark.slow
def test_a_few_hostile_dumps_and_sleeps(hard_front: PacedFront) -> None:
    mutator = Mutator(7)
    requests = [mutator.request(path, body) for path in NEVER for body in BODIES[path] for _ in range(10)]
    wrong, _ = attack(hard_front, requests)
    for path in sorted(set(SLEEPS.values())):
        assert hard_front.post(path).status_code == 200
    assert not wrong, wrong
    check_good(hard_front)


@pytest.mark.slow
def test_thousands_of_hostile_requests_leave_nothing_behind(hard_front: PacedFront) -> None:
    pid = hard_front.process.pid
    warm, _ = attack(hard_front, list(hostile_requests(2, 2000)))  # fill caches and allocators
    assert not warm, "\n".join(warm[:10])
    hard_front.wait_settled(num_tasks=1000)
    before = {
        "rss": rss_bytes(pid),
        "descriptors": num_descriptors(pid),
        "tasks": hard_front.held["wideep:front_tasks"],
    }
    requests = list(hostile_requests(3, SLOW))
    for start in range(0, SLOW, LOT):
        wrong, _ = attack(hard_front, requests[start : start + LOT])
        assert not wrong, "\n".join(wrong[:10])
        check_good(hard_front)
    hard_front.wait_settled(num_tasks=before["tasks"] + 2)
    wait_until(
        lambda: num_descriptors(pid) <= before["descriptors"] + 2,
        lambda: f"{num_descriptors(pid)} descriptors, {before['descriptors']} before",
    )
    assert num_threads(pid) < 100
    assert rss_bytes(pid) - before["rss"] < GROWTH_BYTES, (
        f"{int(before['rss']) >> 20} MiB became {rss_bytes(pid) >> 20}"
    )
    assert [rank.num_free_blocks for rank in hard_front.ranks] == [NUM_BLOCKS] * len(hard_front.ranks)
