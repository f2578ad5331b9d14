"""A link between two ranks of a pool is cut without a sign to either: streams continue on another pool."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import httpx
import pytest

from tests.server.nodes.test_nodes import ENDPOINT, HTTP_PORT, NUM_STREAMS, STREAMS_S, torchruns
from tests.support.service.namespaces import ask, cut_link, made_namespaces, threads_inside
from tests.support.service.real_service import START_S, RealService, write_tiny_model
from tests.support.service.service_processes import wait_until

pytestmark = pytest.mark.slow

# The first node has the store, the front and the rank of the first pool. The second pool has a rank on each of the others.
HEAD, CUT, HEAD_HOST = 0, (1, 2), "10.213.7.1"
URL = f"http://{HEAD_HOST}:{HTTP_PORT}"
MOST_WAIT_S = 3.0
ALLOWED_S = 2 * MOST_WAIT_S  # on a busy machine


class Stream(NamedTuple):
    """An answer, and the longest time between two of its pieces."""

    text: str
    longest_wait_s: float


def read_all(namespace: str, then: Callable[[], object] = lambda: None) -> list[Stream]:
    """Read streams from inside a namespace. Call `then` when each has its first piece."""
    begun = threading.Barrier(NUM_STREAMS + 1)
    fields = {"model": "tiny", "max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True}

    def read(prompt: str) -> Stream:
        text, arrivals_s = "", [0.0] * 0
        sent = httpx.stream(
            "POST", f"{URL}/v1/completions", json={**fields, "prompt": prompt}, timeout=STREAMS_S
        )
        with sent as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event: dict[str, Any] = json.loads(line[6:])
                assert "error" not in event, event
                text += event["choices"][0]["text"]
                arrivals_s.append(time.monotonic())
                if len(arrivals_s) == 1:
                    begun.wait(STREAMS_S)
        waits_s = [after - before for before, after in pairwise(arrivals_s)]
        return Stream(text, max(waits_s))

    with threads_inside(namespace, NUM_STREAMS) as readers:
        readings = [readers.submit(read, f"{number} the cat") for number in range(NUM_STREAMS)]
        try:
            begun.wait(STREAMS_S)
            then()
            return [reading.result(STREAMS_S) for reading in readings]
        finally:
            begun.abort()


class Service(NamedTuple):
    """A service of two pools on three nodes."""

    names: list[str]  # of the namespaces
    processes: RealService

    def read(self, then: Callable[[], object] = lambda: None) -> list[Stream]:
        return read_all(self.names[HEAD], then)

    def is_whole(self) -> bool:
        answer = ask(self.names[HEAD], "GET", f"{URL}/v1/fault_tolerance/status")
        pools = json.loads(answer)["pools"] if answer else []
        return [each["members"] for each in pools if each["phase"] == "serving"] == [[0], [1, 2]]

    def wait_until_whole(self) -> None:
        wait_until(self.is_whole, self.processes.output, within_s=START_S)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Return a service that each test leaves whole."""
    directory = tmp_path_factory.mktemp("cut")
    model = write_tiny_model(directory / "tiny")
    with made_namespaces(3) as names:
        host = ENDPOINT.partition(":")[0]
        flags = ("--pools=both:1,both:2", "--max-rank-restarts=20")
        commands = [
            torchrun._replace(
                flags=[
                    f"--rdzv-conf=is_host={int(node == HEAD)}"
                    if word.startswith("--rdzv-conf")
                    else word
                    if word.startswith("--local-addr")
                    else word.replace(host, HEAD_HOST)
                    for word in torchrun.flags
                ],
                worker=[word.replace(host, HEAD_HOST) for word in torchrun.worker],
            )
            for node, torchrun in enumerate(torchruns(names, model, *flags))
        ]
        with RealService(HTTP_PORT, commands, directory / "output.txt") as processes:
            service = Service(names, processes)
            service.wait_until_whole()
            yield service


def check_waits(kind: str, streams: Sequence[Stream]) -> None:
    waits_s = sorted(round(stream.longest_wait_s, 2) for stream in streams)
    print(f"longest waits after {kind}: {waits_s} s")
    assert waits_s[-1] < ALLOWED_S


def test_a_silently_cut_link_inside_a_pool_delays_no_stream_for_long(service: Service) -> None:
    expected = [stream.text for stream in service.read()]
    told = service.read(then=lambda: cut_link(service.names, CUT))
    assert [stream.text for stream in told] == expected
    check_waits("a cut", told)
    assert [stream.text for stream in service.read()] == expected
    cut_link(service.names, CUT, is_cut=False)
    service.wait_until_whole()
    assert [stream.text for stream in service.read()] == expected


def test_a_link_that_stumbles_for_two_seconds_loses_no_rank(service: Service) -> None:
    expected = [stream.text for stream in service.read()]
    before = num_losses(service)

    def stumble() -> None:
        cut_link(service.names, CUT)
        time.sleep(2.0)  # the fault itself
        cut_link(service.names, CUT, is_cut=False)

    told = service.read(then=stumble)
    assert [stream.text for stream in told] == expected
    check_waits("two seconds", told)
    service.wait_until_whole()
    assert num_losses(service) == before


def num_losses(service: Service) -> int:
    answer = ask(service.names[HEAD], "GET", f"{URL}/v1/fault_tolerance/status")
    return int(json.loads(answer or "{}")["losses"])
