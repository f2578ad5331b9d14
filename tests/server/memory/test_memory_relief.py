"""A rank that is short of blocks gives its newest streams to another rank, between real processes: answers stay the same."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.faults.test_faults import kill
from tests.server.faults.test_moves_between_ranks import SESSION, metric, said, wait_until_nothing_is_open
from tests.support.requests.timed_streams import TimedStream, stream_all
from tests.support.service.real_service import START_S, RealService, write_tiny_model
from tests.support.service.service_processes import wait_until

pytestmark = pytest.mark.slow

NUM_STREAMS, NUM_TOKENS = 7, 200
# Two thirds of what the streams need: all begin on one rank, and it runs out of blocks while they grow.
CACHE_TOKENS = NUM_STREAMS * NUM_TOKENS * 2 // 3
TOKEN_BYTES = 768  # of the tiny models' keys and values


@pytest.fixture(scope="module", params=["qwen3_moe with a tier", "qwen3_next"])
def service(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealService]:
    """`wideep serve` on two ranks with few blocks."""
    family, _, tier = request.param.partition(" ")
    model = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", family)
    log = tmp_path_factory.mktemp("service") / "output.txt"
    flags = [
        "-dp=2", "--max-num-seqs=8", "--max-model-len=256", "--max-rank-restarts=20",
        f"--kv-cache-memory={cache_bytes(family)}B", *(["--kv-offloading-size=64M"] if tier else []),
    ]  # fmt: skip
    with RealService.serve(model, log, *flags) as running:
        yield running.wait_ready()


def cache_bytes(family: str) -> int:
    """Return the memory for CACHE_TOKENS. Fewer layers of qwen3_next keep keys and values; its states share the memory."""
    return CACHE_TOKENS * TOKEN_BYTES * 2 // (3 if family == "qwen3_next" else 2)


def bodies() -> list[dict[str, Any]]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 7, "presence_penalty": 0.5},
        {"temperature": 0, "logprobs": 2},
        {"temperature": 1.0, "seed": 10, "structured_outputs": {"regex": f"[a-z ]{{{NUM_TOKENS - 9}}}"}},
    ]
    return [
        {"model": "tiny", "prompt": f"{number} the cat", "max_tokens": NUM_TOKENS, "ignore_eos": True}
        | kinds[number % len(kinds)]
        for number in range(NUM_STREAMS)
    ]


@pytest.fixture(scope="module")
def undisturbed(service: RealService) -> list[tuple[object, ...]]:
    """The answers to the requests when they are sent one after the other."""
    return [stream_all(service.url, [body])[0].said for body in bodies()]


def num_relieved(service: RealService) -> float:
    lines = service.get("/metrics").text.splitlines()
    return sum(
        float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith("wideep:request_moves_total{") and 'cause="memory"' in line
    )


def test_the_newest_streams_move_and_all_answers_stay_the_same(
    service: RealService, undisturbed: list[tuple[object, ...]]
) -> None:
    before = num_relieved(service)
    for _ in range(10):  # on a busy machine, streams may run one after the other
        assert said(stream_all(service.url, bodies(), headers=SESSION)) == undisturbed
        if num_relieved(service) > before:
            break
    assert num_relieved(service) > before, "no stream moved for lack of blocks"
    wait_until_nothing_is_open(service)
    assert metric(service, "vllm:kv_cache_usage_perc") == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_while_streams_move_for_lack_of_blocks_costs_no_answer(
    service: RealService, undisturbed: list[tuple[object, ...]], rank: int
) -> None:
    before = num_relieved(service)

    def kill_when_one_moves() -> None:
        wait_until(
            lambda: num_relieved(service) > before or is_quiet(service), service.output, within_s=START_S
        )
        kill(service, rank)

    streams: list[TimedStream] = stream_all(
        service.url, bodies(), pieces=3, then=kill_when_one_moves, headers=SESSION
    )
    assert said(streams) == undisturbed
    wait_until_nothing_is_open(service)
    wait_until(lambda: service.status()["members"] == [0, 1], service.output, within_s=START_S)


def is_quiet(service: RealService) -> bool:
    return metric(service, "wideep:front_open_choices") == 0
