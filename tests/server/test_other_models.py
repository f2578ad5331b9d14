"""Recurrent models, and models with an index: streams continue unchanged while ranks die and sleep.

tests/server/memory/test_moved_state has drains of both. What does not depend on the kind of model is tested with one kind (test_drains, test_faults, test_sleep).
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest

from tests.server.faults.test_drains import PIECES
from tests.server.faults.test_faults import NUM_RANKS, bodies, kill, wait_until_whole
from tests.server.memory.test_kv_tiers import PROMPTS, ask
from tests.server.memory.test_sleep import serves_the_same, sleep, sleeps, wake
from tests.support.requests.timed_streams import stream_all
from tests.support.service.real_service import RealService, write_tiny_model

pytestmark = pytest.mark.slow

Said = list[tuple[object, ...]]


class Served(NamedTuple):
    """A model's service. Each test leaves all ranks serving."""

    service: RealService
    family: str
    has_tier: bool


def asked() -> list[dict[str, Any]]:
    """Return one request of every kind."""
    return bodies(1)


@pytest.fixture(
    scope="module", params=[("qwen3_next", True), ("deepseek_v32", False)], ids=lambda each: each[0]
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`wideep serve` on three ranks with seats for all requests, and one family with a tier in host memory."""
    family, has_tier = request.param
    directory = tmp_path_factory.mktemp(family)
    model = write_tiny_model(directory / "tiny", family)
    flags = [f"-dp={NUM_RANKS}", "--max-num-seqs=32", "--max-rank-restarts=20"]
    flags += ["--kv-offloading-size=64M"] if has_tier else []
    with RealService.serve(model, directory / "output.txt", *flags) as service:
        yield Served(service.wait_ready(), family, has_tier)


@pytest.fixture(scope="module")
def expected(served: Served) -> Said:
    """The answers of a service that nothing happens to."""
    return [each.said for each in stream_all(served.service.url, asked())]


def test_only_recurrent_models_have_states(served: Served) -> None:
    assert ("States: " in served.service.output()) == (served.family == "qwen3_next")


def test_streams_continue_when_a_rank_dies_and_it_serves_again(served: Served, expected: Said) -> None:
    service = served.service
    streams = stream_all(service.url, asked(), pieces=PIECES, then=lambda: kill(service, 1))
    assert [each.said for each in streams] == expected
    wait_until_whole(service)
    assert [each.said for each in stream_all(service.url, asked())] == expected


@pytest.mark.paired("served", "level", of=2)
@pytest.mark.parametrize(("level", "count"), [(1, 2), (2, 1)])
def test_streams_that_are_kept_continue_after_a_sleep(
    served: Served, expected: Said, level: int, count: int
) -> None:
    wait_until_whole(served.service)
    streams = stream_all(
        served.service.url, asked(), pieces=PIECES, then=sleeps(served.service, level, count)
    )
    assert [each.said for each in streams] == expected


def test_after_a_sleep_prompts_are_loaded_from_a_tier_if_there_is_one(served: Served) -> None:
    service = served.service
    httpx.post(f"{service.url}/flush_cache", timeout=30).raise_for_status()
    first = [ask(service, prompt)[0] for prompt in PROMPTS]
    sleep(service, 2)
    wake(service)
    found = serves_the_same(service, first)
    assert all((details["cached_tokens"] > 0) == served.has_tier for details in found)
    if served.has_tier:
        assert all(details["cached_tokens_details"]["device"] == 0 for details in found)
