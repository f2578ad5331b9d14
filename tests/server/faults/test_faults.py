"""Open streams and the service when engines are killed: real engines, real signals."""

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.requests.timed_streams import TimedStream, stream_all
from tests.support.service.real_service import START_S, RealService
from tests.support.service.service_processes import has_ended, wait_until

pytestmark = pytest.mark.slow

NUM_RANKS = 3
NUM_TOKENS = 160  # of most streams
PIECES = 20  # received by every stream before a rank is killed
KILLED_S, HUNG_S = 0.3, 2.0  # time limits for detecting the loss of a rank
END_S = 40.0


@pytest.fixture(scope="module")
def service(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealService]:
    log = tmp_path_factory.mktemp("service") / "output.txt"
    with RealService.serve(model, log, f"-dp={NUM_RANKS}", "--max-rank-restarts=20") as running:
        yield running.wait_ready()


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealService]:
    """A service of two ranks, which each test leaves whole."""
    log = tmp_path_factory.mktemp("pair") / "output.txt"
    with RealService.serve(model, log, "-dp=2", "--max-rank-restarts=20") as running:
        yield running.wait_ready()


def bodies(num_copies: int = 2) -> list[dict[str, Any]]:
    """Return requests with answers that depend on all earlier tokens. With two copies, each rank gets some of each kind."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 7},
        {"temperature": 0.8, "seed": 8, "presence_penalty": 0.7, "repetition_penalty": 1.2, "top_p": 0.9},
        {"temperature": 0, "logprobs": 2},
        {"temperature": 1.0, "seed": 9, "n": 2},
        {"temperature": 1.0, "seed": 10, "structured_outputs": {"regex": "[a-z ]{150}"}},
    ]
    return [
        {"model": "tiny", "prompt": f"{copy} the cat {kind}", "max_tokens": NUM_TOKENS, "ignore_eos": True}
        | options
        for copy in range(num_copies)
        for kind, options in enumerate(kinds)
    ]


def kill(service: RealService, *ranks: int) -> float:
    """Kill the engines of ranks and return the time.monotonic() afterwards."""
    engines = service.engines()
    for rank in ranks:
        os.kill(engines[rank], signal.SIGKILL)
    return time.monotonic()


def has_members(service: RealService, ranks: list[int]) -> bool:
    """Return whether these ranks serve. False while the front is down; an error if the whole service has ended."""
    try:
        now = service.status()
    except httpx.TransportError:
        service.check_any_runs()
        return False
    return (now["phase"], now["members"]) == ("serving", ranks)


def is_whole(service: RealService) -> bool:
    now = service.status()
    return (now["phase"], len(now["members"])) == ("serving", NUM_RANKS)


def wait_until_whole(service: RealService) -> None:
    wait_until(
        lambda: is_whole(service),
        lambda: f"a rank is away: {service.status()}\n{service.output()}",
        within_s=START_S,
    )


def tokens_of_ranks(service: RealService) -> dict[int, float]:
    """Return how many tokens each rank has generated."""
    name = "vllm:generation_tokens_total{"
    lines = [line for line in service.get("/metrics").text.splitlines() if line.startswith(name)]
    return {int(line.partition('engine="')[2].partition('"')[0]): float(line.split()[-1]) for line in lines}


def print_pauses(what: str, streams: list[TimedStream], killed_s: float) -> None:
    """Print how long streams paused. No test checks it."""
    times_s = sorted(stream.goes_on_after(killed_s) for stream in streams)
    print(f"{what}: streams go on after {times_s[0]:.2f} s (first) to {times_s[-1]:.2f} s (last)")


def test_streams_go_on_without_a_gap_and_the_rank_comes_back(service: RealService) -> None:
    expected = [each.said for each in stream_all(service.url, bodies())]
    killed_s: list[float] = []
    streams = stream_all(service.url, bodies(), pieces=PIECES, then=lambda: killed_s.append(kill(service, 1)))
    print_pauses("one of three ranks killed", streams, killed_s[0])
    assert [each.said for each in streams] == expected
    wait_until_whole(service)
    before = tokens_of_ranks(service)
    assert [each.said for each in stream_all(service.url, bodies())] == expected
    after = tokens_of_ranks(service)
    assert all(after[rank] > before[rank] for rank in range(NUM_RANKS)), "the restarted rank serves again"


def test_streams_go_on_when_a_rank_is_stopped_and_it_is_started_again(service: RealService) -> None:
    wait_until_whole(service)
    expected = [each.said for each in stream_all(service.url, bodies())]
    victim, stopped_s = service.engines()[1], []

    def stop() -> None:
        os.kill(victim, signal.SIGSTOP)
        stopped_s.append(time.monotonic())

    streams = stream_all(service.url, bodies(), pieces=PIECES, then=stop)
    print_pauses("one of three ranks stopped", streams, stopped_s[0])
    assert [each.said for each in streams] == expected
    assert has_ended(victim, END_S), "its supervisor kills it"
    wait_until_whole(service)
    assert said_hung(service, victim)[0] == "it is stopped"
    assert [each.said for each in stream_all(service.url, bodies())] == expected


def test_a_killed_rank_is_missed_at_once_and_a_stopped_one_after_two_seconds(service: RealService) -> None:
    """Measured by the service's own record. The fastest of up to four tries counts: other load on the machine delays the rest."""
    missed_s: list[float] = []
    while not missed_s or (min(missed_s) > KILLED_S and len(missed_s) < 4):
        wait_until_whole(service)
        killed_at = time.time()
        kill(service, 1)
        missed_s.append(first_missed(service) - killed_at)
    assert min(missed_s) <= KILLED_S
    wait_until_whole(service)
    returns = service.output().count(back := "rank 2 serves again")
    os.kill(victim := service.engines()[2], signal.SIGSTOP)
    assert has_ended(victim, END_S)
    assert HUNG_S <= float(said_hung(service, victim)[1]) <= 2 * HUNG_S
    wait_until(lambda: service.output().count(back) > returns, service.output, within_s=START_S)


def said_hung(service: RealService, victim: int) -> tuple[str, str]:
    """Return the reason and the silence that the service logs for a hung engine. It logs them just after killing the engine."""
    pattern = rf"\(pid {victim}\) hung and was killed: (.*) and sent no heartbeat for ([\d.]+) s"
    wait_until(lambda: re.search(pattern, service.output()) is not None, service.output)
    ((why, silent_s),) = re.findall(pattern, service.output())
    return why, silent_s


def first_missed(service: RealService) -> float:
    """Wait until a rank is missing and return the time since when it is."""
    seen: list[dict[str, Any]] = []  # the rank may be back at the next look

    def is_missed() -> bool:
        seen.extend(service.status()["missing"])
        return bool(seen)

    wait_until(is_missed, service.output)
    return float(seen[0]["since"])


def test_streams_go_on_when_two_ranks_die_at_once(service: RealService) -> None:
    wait_until_whole(service)
    expected = [each.said for each in stream_all(service.url, bodies())]
    killed_s: list[float] = []
    streams = stream_all(
        service.url, bodies(), pieces=PIECES, then=lambda: killed_s.append(kill(service, 0, 2))
    )
    print_pauses("two of three ranks killed", streams, killed_s[0])
    assert [each.said for each in streams] == expected
    wait_until_whole(service)
    assert [each.said for each in stream_all(service.url, bodies())] == expected


def test_streams_go_on_while_a_rank_returns(service: RealService) -> None:
    """A join ends an epoch as a loss does. Streams that run across it lose and repeat nothing."""
    wait_until_whole(service)
    expected = [each.said for each in stream_all(service.url, bodies())]
    kill(service, 2)
    deadline_s = time.monotonic() + START_S
    wait_until(lambda: not is_whole(service), service.output)
    while not is_whole(service):
        assert time.monotonic() < deadline_s, service.output()
        assert [each.said for each in stream_all(service.url, bodies())] == expected


def test_all_ranks_die_at_once_and_streams_go_on_when_they_are_back(service: RealService) -> None:
    wait_until_whole(service)
    expected = [each.said for each in stream_all(service.url, bodies())]
    killed_s: list[float] = []
    streams = stream_all(
        service.url, bodies(), pieces=PIECES, then=lambda: killed_s.append(kill(service, 0, 1, 2))
    )
    print_pauses("all three ranks killed", streams, killed_s[0])
    assert [each.said for each in streams] == expected
    wait_until_whole(service)


def test_a_rank_that_dies_too_often_stays_away_and_the_service_stays_up(model: Path, tmp_path: Path) -> None:
    with RealService.serve(model, tmp_path / "output.txt", "-dp=2", "--max-rank-restarts=1") as service:
        service.wait_ready()
        expected = [each.said for each in stream_all(service.url, bodies())]
        kill(service, 1)
        wait_until(lambda: "rank 1 serves again" in service.output(), service.output, within_s=START_S)
        kill(service, 1)
        wait_until(lambda: "the service continues without rank 1" in service.output(), service.output)
        assert [each.said for each in stream_all(service.url, bodies())] == expected
        assert service.status()["members"] == [0]
        assert service.processes[0].poll() is None


def test_the_only_engine_of_a_service_comes_back_to_its_streams(model: Path, tmp_path: Path) -> None:
    with RealService.serve(model, tmp_path / "output.txt", "-dp=1") as service:
        service.wait_ready()
        expected = [each.said for each in stream_all(service.url, bodies())]
        killed_s: list[float] = []
        streams = stream_all(
            service.url, bodies(), pieces=PIECES, then=lambda: killed_s.append(kill(service, 0))
        )
        print_pauses("the only rank killed", streams, killed_s[0])
        assert [each.said for each in streams] == expected


def test_sigterm_while_a_rank_is_away_lets_streams_end(model: Path, tmp_path: Path) -> None:
    with RealService.serve(model, tmp_path / "output.txt", "-dp=2") as service:
        service.wait_ready()
        below = service.descendants()
        expected = [each.said for each in stream_all(service.url, bodies())]

        def kill_and_stop() -> None:
            kill(service, 1)
            service.processes[0].terminate()

        streams = stream_all(service.url, bodies(), pieces=PIECES, then=kill_and_stop)
        assert [each.said for each in streams] == expected
        assert service.processes[0].wait(END_S) == 0, service.output()
        assert all(has_ended(pid, 2) for pid in below)


def test_a_killed_front_is_back_soon_and_its_ranks_serve_on(pair: RealService) -> None:
    expected = [each.said for each in stream_all(pair.url, bodies())]
    engines, victim, spare = pair.engines(), pair.find("front"), pair.find("spare")

    def kill_front() -> None:
        os.kill(victim, signal.SIGKILL)

    with pytest.raises(ExceptionGroup) as cut:
        # On a busy machine a piece holds many tokens.
        stream_all(pair.url, bodies(), pieces=1, then=kill_front)
    assert cut.group_contains(httpx.TransportError), "its open answers are cut off"
    wait_until(lambda: has_members(pair, [0, 1]), pair.output, within_s=START_S)
    assert [each.said for each in stream_all(pair.url, bodies())] == expected
    assert pair.engines() == engines, "the engines are the same"
    assert pair.find("front") == spare, "no process has started"
    cut_off_and_asked_again_with_keys(pair)
    kill(pair, 1)
    wait_until(lambda: not has_members(pair, [0, 1]), pair.output)
    wait_until(lambda: has_members(pair, [0, 1]), pair.output, within_s=START_S)
    assert [each.said for each in stream_all(pair.url, bodies())] == expected


def test_a_front_and_all_engines_die_at_once_after_earlier_epochs_and_are_back_soon(
    pair: RealService,
) -> None:
    expected = [each.said for each in stream_all(pair.url, bodies())]
    before = pair.find("front")
    os.kill(before, signal.SIGKILL)  # the ranks meet again
    wait_until(lambda: has_members(pair, [0, 1]), pair.output, within_s=START_S)
    epoch, front = pair.status()["epoch"], pair.find("front")
    for pid in (front, *pair.engines().values()):
        os.kill(pid, signal.SIGKILL)
    killed_s = time.monotonic()
    wait_until(lambda: has_members(pair, [0, 1]), pair.output, within_s=START_S)
    assert time.monotonic() - killed_s < 30
    now = pair.status()
    assert now["epoch"] > epoch and "stopped" not in [each["kind"] for each in now["events"]]
    assert [each.said for each in stream_all(pair.url, bodies())] == expected


def test_a_killed_supervisor_is_started_again_and_the_others_serve_on(pair: RealService) -> None:
    expected = [each.said for each in stream_all(pair.url, bodies())]
    first = pair.engines()

    def kill_supervisor() -> None:
        os.kill(supervisor_of(first[1]), signal.SIGKILL)

    streams = stream_all(pair.url, bodies(), pieces=PIECES, then=kill_supervisor)
    assert [each.said for each in streams] == expected, "the other rank continues all of them"
    # If rank 1 has no tokens left to send, the streams may end before its loss is detected. Wait for its new engine.
    wait_until(lambda: pair.engines().get(1, first[1]) != first[1], pair.output, within_s=START_S)
    wait_until(lambda: has_members(pair, [0, 1]), pair.output, within_s=START_S)
    second = pair.engines()
    assert second[0] == first[0]
    os.kill(supervisor_of(first[0]), signal.SIGKILL)  # runs the front as well
    assert has_ended(first[0], END_S)
    wait_until(lambda: has_members(pair, [0, 1]), pair.output, within_s=START_S)
    assert [each.said for each in stream_all(pair.url, bodies())] == expected
    assert pair.engines()[1] == second[1], "the other engine is the same"


def supervisor_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def cut_off_and_asked_again_with_keys(service: RealService) -> None:
    """Kill the front during requests with an Idempotency-Key and no seed. A retry gets the rest of an answer that had begun."""
    asked = {
        f"key-{number}": {
            "model": "tiny",
            "prompt": f"the cat {number}",
            "max_tokens": NUM_TOKENS,
            "temperature": 1.0,
            "ignore_eos": True,
            "stream": number % 2 == 0,
        }
        for number in range(6)
    }
    seen = {key: "" for key, body in asked.items() if body["stream"]}

    def read(key: str) -> None:
        with contextlib.suppress(httpx.TransportError), send(service, key, asked[key]) as response:
            for line in response.iter_lines():
                if key in seen:
                    seen[key] += text_of(line)

    with ThreadPoolExecutor(len(asked)) as threads:
        waiting = [threads.submit(read, key) for key in asked]
        wait_until(lambda: all(len(text) > PIECES for text in seen.values()), service.output)
        os.kill(service.find("front"), signal.SIGKILL)
        for each in waiting:
            each.result(END_S)
    wait_until(lambda: has_members(service, [0, 1]), service.output, within_s=START_S)
    cut = 0  # on a busy machine, single streams may end before the front does
    for key, body in asked.items():
        with send(service, key, body) as response:
            first = response.read()
        with send(service, key, body) as response:
            again = response.read()
            assert response.headers["idempotent-replayed"] == "true"
        assert first == again and response.status_code == 200
        whole = "".join(text_of(line) for line in first.decode().splitlines())
        if key in seen:
            assert whole.startswith(seen[key])
            cut += len(whole) > len(seen[key])
    assert cut, "no stream was cut off"


def send(
    service: RealService, key: str, body: dict[str, Any]
) -> contextlib.AbstractContextManager[httpx.Response]:
    url = f"{service.url}/v1/completions"
    return httpx.stream("POST", url, json=body, headers={"Idempotency-Key": key}, timeout=END_S)


def text_of(line: str) -> str:
    """Return the text of an event or of a whole answer."""
    content = line.removeprefix("data: ")
    return str(json.loads(content)["choices"][0]["text"]) if content.startswith("{") else ""
