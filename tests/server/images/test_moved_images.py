"""Streams about images continue on other ranks, unchanged. No image is fetched or encoded again."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("PIL", reason="needs Pillow: pip install 'wideep[images]'")

from server.cli import main
from tests.server.images.test_images import STEPS, Oracle, Parts, Stream, chat, counter, tokens_of
from tests.support.models.seeing import write_seeing_model
from tests.support.requests.pictures import png
from tests.support.requests.web_pictures import WebPictures
from tests.support.service.real_service import START_S, RealService
from tests.support.service.service_processes import wait_until

pytestmark = pytest.mark.slow

NUM_STREAMS, NUM_TOKENS = 4, 440
MOVED = 'wideep:request_moves_total{cause="drain"'
ENCODED = 'wideep:images_total{outcome="encoded"}'


def picture(number: int) -> bytes:
    return png(56, 84, 41 + number)


@pytest.fixture(scope="module")
def web() -> Iterator[WebPictures]:
    with WebPictures() as web:
        yield web


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Oracle]:
    directory = tmp_path_factory.mktemp("tiny")
    return directory, Oracle(directory, write_seeing_model(directory))


@pytest.fixture(scope="module")
def service(model: tuple[Path, Oracle], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealService]:
    log = tmp_path_factory.mktemp("log") / "log"
    flags = ("-dp", "2", "--served-model-name", "tiny", "--max-model-len", "512", "--max-num-seqs", "16")
    with RealService.serve(model[0], log, *flags, "--allowed-media-domains", "127.0.0.1") as service:
        yield service.wait_ready()


@pytest.fixture(scope="module")
def wanted(service: RealService, model: tuple[Path, Oracle]) -> list[list[int]]:
    """The answers of a service that does not change."""
    answers = [
        tokens_of(chat(service, [picture(number), "the mat"], max_tokens=NUM_TOKENS))
        for number in range(NUM_STREAMS)
    ]
    assert answers[0][:STEPS] == model[1].answer([picture(0), "the mat"])
    return answers


def check_streams(
    service: RealService, web: WebPictures, wanted: list[list[int]], change: Callable[[], None]
) -> float:
    """Change the ranks while streams run, and check that all are as before. Return the number of moves."""
    before = counter(service, MOVED)
    chats: list[Parts] = [[web.url_of(picture(number)), "the mat"] for number in range(NUM_STREAMS)]
    fetched = web.num_fetches
    streams = [Stream(service, parts, NUM_TOKENS) for parts in chats]
    wait_until(lambda: all(len(each.token_ids) >= 3 for each in streams), service.output)
    assert web.num_fetches == fetched + NUM_STREAMS
    encoded = counter(service, ENCODED)
    change()
    for stream, token_ids in zip(streams, wanted, strict=True):
        stream.join(START_S)
        assert stream.token_ids == token_ids
    assert counter(service, ENCODED) == encoded
    assert web.num_fetches == fetched + NUM_STREAMS
    return counter(service, MOVED) - before


def test_streams_of_a_drained_rank_continue(
    service: RealService, web: WebPictures, wanted: list[list[int]]
) -> None:
    def drain() -> None:
        assert main(["drain", "1", service.url, "--timeout", "60"]) == 0

    assert check_streams(service, web, wanted, drain) > 0
    assert main(["drain", "1", service.url, "--undo"]) == 0


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_streams_of_a_service_that_is_resized_continue(
    num_ranks: int, service: RealService, web: WebPictures, wanted: list[list[int]]
) -> None:
    def resize() -> None:
        body = {"new_data_parallel_size": num_ranks}
        answer = service.post("/scale_elastic_ep", json=body, timeout_s=START_S)
        assert answer.status_code == 200, answer.text

    num_moves = check_streams(service, web, wanted, resize)
    assert num_moves > 0 or num_ranks == 2, "the streams of a rank that leaves move"
    assert service.status()["members"] == list(range(num_ranks))
