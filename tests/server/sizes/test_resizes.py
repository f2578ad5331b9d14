"""`wideep serve` grows and shrinks under load: real engines, real signals, and answers that do not change."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from dispatch.ports import free_port
from tests.server.faults.test_faults import bodies, has_members, supervisor_of
from tests.support.requests.timed_streams import TimedStream, stream_all
from tests.support.service.process_figures import num_descriptors
from tests.support.service.real_service import START_S, RealService, write_tiny_model
from tests.support.service.service_processes import wait_until
from tests.support.service.torchruns import Torchrun

pytestmark = pytest.mark.slow

MOST_PAUSE_S = 10.0  # of a stream, on a machine with fewer cores than ranks; docs/resize.md has measured ones
DRAFTS = '{"method": "ngram", "num_speculative_tokens": 4}'


@pytest.fixture(scope="module")
def service(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealService]:
    """A service of two ranks with drafts. Each test leaves it with two."""
    log = tmp_path_factory.mktemp("service") / "output.txt"
    flags = ["-dp=2", "--max-rank-restarts=20", f"--speculative-config={DRAFTS}"]
    with RealService.serve(model, log, *flags) as running:
        yield running.wait_ready()


class Load:
    """Streams without a pause. On exit, all have ended, and each answer is the expected one."""

    def __init__(self, service: RealService) -> None:
        self._service, self._is_over = service, threading.Event()
        self.expected = [each.said for each in stream_all(service.url, bodies())]
        self.streams: list[TimedStream] = []

    def _run(self) -> None:
        while not self._is_over.is_set():
            streams = stream_all(self._service.url, bodies())
            assert [each.said for each in streams] == self.expected
            self.streams += streams

    def __enter__(self) -> "Load":
        self._threads = ThreadPoolExecutor(1)
        self._running = self._threads.submit(self._run)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        try:
            self._running.result(START_S)
        finally:
            self._threads.shutdown()

    def longest_pause_s(self) -> float:
        pauses = [after - before for each in self.streams for before, after in pairwise(each.arrivals_s)]
        return max(pauses, default=0.0)


def scale(service: RealService, num_ranks: int, **how: Any) -> httpx.Response:
    body = {"new_data_parallel_size": num_ranks, **how}
    return service.post("/scale_elastic_ep", json=body, timeout_s=START_S)


def check_serves(service: RealService, num_ranks: int) -> None:
    """Wait until a number of ranks serve, with as many engines."""
    ranks = list(range(num_ranks))
    wait_until(lambda: has_members(service, ranks), lambda: f"{service.output()}", within_s=START_S)
    wait_until(lambda: sorted(service.engines()) == ranks, service.output, within_s=START_S)


def resize(service: RealService) -> dict[str, Any]:
    return dict(service.get("/is_scaling_elastic_ep").json())


def wait_for_engine(service: RealService, rank: int) -> int:
    wait_until(lambda: rank in service.engines(), service.output, within_s=START_S)
    return service.engines()[rank]


def test_a_service_grows_and_shrinks_and_no_answer_changes(service: RealService) -> None:
    check_serves(service, 2)
    first = {rank: service.engines()[rank] for rank in range(2)}
    with Load(service) as load:
        for size in (4, 3, 2):
            begun_s = time.monotonic()
            response = scale(service, size)
            assert response.status_code == 200, f"{response.text}\n{service.output()}"
            print(f"{size} ranks serve after {time.monotonic() - begun_s:.1f} s")
            check_serves(service, size)
    print(f"longest pause of a stream: {load.longest_pause_s():.2f} s")
    assert load.longest_pause_s() < MOST_PAUSE_S
    assert {rank: service.engines()[rank] for rank in range(2)} == first, "no engine was restarted"
    now = service.status()
    assert (now["losses"], now["missing"], now["total_engines"]) == (0, [], 2)


def descriptors(service: RealService) -> list[int]:
    """Return the open descriptors of the front, the launcher and the engines."""
    pids = [service.find("front"), service.find("launcher"), *service.engines().values()]
    return [num_descriptors(pid) for pid in pids]


def test_descriptors_return_to_their_number(service: RealService) -> None:
    """The first cycle opens what stays open. Some connections to the store close a moment later."""
    counts = []
    for _ in range(2):
        for size in (3, 2):
            assert scale(service, size).status_code == 200
            check_serves(service, size)
        counts.append(descriptors(service))
    wait_until(
        lambda: all(now <= before for now, before in zip(descriptors(service), counts[0], strict=True)),
        lambda: f"{counts[0]} grew to {descriptors(service)}",
    )


def test_a_new_rank_that_is_killed_while_it_loads_leaves_two(service: RealService) -> None:
    check_serves(service, 2)
    with Load(service), ThreadPoolExecutor(1) as threads:
        asked = threads.submit(scale, service, 3)
        os.kill(wait_for_engine(service, 2), signal.SIGKILL)
        failed = asked.result(START_S)
        assert failed.status_code == 500 and "rank 2 is lost" in failed.text, failed.text
        check_serves(service, 2)
    assert scale(service, 2).status_code == 200, "nothing is in the way of the next one"


def test_an_old_rank_that_is_killed_while_a_new_one_loads_leaves_two(service: RealService) -> None:
    check_serves(service, 2)
    with Load(service), ThreadPoolExecutor(1) as threads:
        asked = threads.submit(scale, service, 3)
        wait_for_engine(service, 2)
        os.kill(service.engines()[1], signal.SIGKILL)
        failed = asked.result(START_S)
        assert failed.status_code == 500 and "rank 1 is lost" in failed.text, failed.text
        check_serves(service, 2)


@pytest.mark.parametrize(("before", "after", "victim"), [(2, 3, 2), (2, 3, 0), (3, 2, 1), (3, 2, 2)])
def test_a_rank_that_is_killed_when_ranks_meet_leaves_the_old_or_the_new_number(
    service: RealService, before: int, after: int, victim: int
) -> None:
    assert scale(service, before).status_code == 200
    check_serves(service, before)
    name = f"{before} to {after} without {victim}"

    def meet() -> bool:
        now = resize(service)
        return now.get("operation_id") == name and now["phase"] != "preparing"

    with Load(service), ThreadPoolExecutor(1) as threads:
        asked = threads.submit(scale, service, after, operation_id=name)
        wait_until(meet, service.output, within_s=START_S)
        with contextlib.suppress(KeyError, ProcessLookupError):  # it may have left
            os.kill(service.engines()[victim], signal.SIGKILL)
        size = after if asked.result(START_S).status_code == 200 else before
        assert resize(service)["effective_data_parallel_size"] == size
        check_serves(service, size)
    assert scale(service, 2).status_code == 200
    check_serves(service, 2)


@pytest.mark.parametrize("of", ["front", "supervisor"])
def test_a_front_that_is_killed_during_a_resize_leaves_the_former_ranks(
    service: RealService, of: str
) -> None:
    check_serves(service, 2)
    expected = [each.said for each in stream_all(service.url, bodies())]
    assert scale(service, 3, wait=False, operation_id=f"killed {of}").status_code == 202
    wait_for_engine(service, 2)
    front = service.find("front")
    os.kill(front if of == "front" else supervisor_of(front), signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{front}").exists(), service.output)
    check_serves(service, 2)
    assert resize(service)["error"] == "the front was restarted"
    assert [each.said for each in stream_all(service.url, bodies())] == expected


def test_a_front_and_an_engine_that_are_killed_afterwards_return_to_the_new_number(
    service: RealService,
) -> None:
    """test_resizes_with_changes kills the engine of a new rank."""
    expected = [each.said for each in stream_all(service.url, bodies())]
    assert scale(service, 3).status_code == 200
    check_serves(service, 3)
    for victim in (lambda: service.find("front"), lambda: service.engines()[0]):
        pid = victim()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda pid=pid: not Path(f"/proc/{pid}").exists(), service.output)  # type: ignore[misc]
        check_serves(service, 3)
        assert [each.said for each in stream_all(service.url, bodies())] == expected
    assert scale(service, 2).status_code == 200
    check_serves(service, 2)
    assert [each.said for each in stream_all(service.url, bodies())] == expected


def test_an_abort_leaves_two_and_the_next_resize_completes(service: RealService) -> None:
    check_serves(service, 2)
    with Load(service):
        assert scale(service, 3, wait=False).status_code == 202
        wait_for_engine(service, 2)
        aborted = service.post("/scale_elastic_ep/abort", json={}).json()
        assert aborted["error"] == "it was aborted"
        check_serves(service, 2)
        assert scale(service, 3).status_code == 200
        check_serves(service, 3)
        assert scale(service, 2).status_code == 200
        check_serves(service, 2)


@pytest.mark.parametrize("family", ["qwen3_next", "deepseek_v32"])
def test_recurrent_and_sparse_models_grow_and_shrink_and_stop_without_a_process_left(
    family: str, tmp_path: Path
) -> None:
    model = write_tiny_model(tmp_path / "tiny", family)
    with RealService.serve(model, tmp_path / "output.txt", "-dp=1") as service:
        service.wait_ready()
        with Load(service):
            for size in (3, 2):
                assert scale(service, size).status_code == 200, service.output()
                check_serves(service, size)
        below = service.descendants()
        service.processes[0].terminate()
        assert service.wait_ended() == [0], service.output()
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below), service.output)


def test_a_node_that_joins_adds_its_ranks_and_leaves_with_them(model: Path, tmp_path: Path) -> None:
    """Both torchruns are on this machine."""
    port, rendezvous = free_port(), free_port()
    torchrun = ["--nnodes=1", "--rdzv-backend=c10d"]
    worker = ["worker", str(model), f"--port={port}", "--kv-cache-memory=16M"]
    first = Torchrun([*torchrun, "--nproc-per-node=2", f"--rdzv-endpoint=127.0.0.1:{rendezvous}"], worker)
    second = Torchrun(
        [*torchrun, "--nproc-per-node=1", "--rdzv-endpoint=localhost:0"],
        [*worker, f"--join=127.0.0.1:{rendezvous}"],
    )
    with RealService(port, [first], tmp_path / "output.txt") as service:
        service.wait_ready()
        with Load(service):
            assert scale(service, 3, wait=False, operation_id="grow").status_code == 202
            with RealService(port, [second], tmp_path / "second.txt") as joined:
                grown = scale(service, 3, operation_id="grow")
                assert grown.status_code == 200, f"{grown.text}\n{service.output()}\n{joined.output()}"
                wait_until(lambda: has_members(service, [0, 1, 2]), service.output, within_s=START_S)
                assert scale(service, 2).status_code == 200
                assert joined.wait_ended() == [0], joined.output()
            wait_until(lambda: has_members(service, [0, 1]), service.output, within_s=START_S)
        assert service.status()["losses"] == 0
