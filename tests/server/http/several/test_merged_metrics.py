"""One scrape of several fronts."""

import asyncio
import errno
import os
from pathlib import Path

import httpx
import pytest

from server.front.several.board import Cell
from server.front.several.seat import Seat
from server.http.observability.metrics import Metrics
from server.http.several import merged_metrics
from server.http.several.merged_metrics import ServiceMetrics, merge
from tests.server.front.several.test_board import boards

NO_PID = (1 << 22) + 1  # above every process's number


def value_of(text: str, series: str) -> float:
    [line] = [each for each in text.splitlines() if each.startswith(f"{series} ")]
    return float(line.rsplit(" ", 1)[1])


def counted(num_requests: int, num_tokens: int) -> Metrics:
    metrics = Metrics("m", 2)
    for _ in range(num_requests):
        metrics.note_request(1, 5)
    metrics.note_tokens(1, num_tokens, {0.5: num_tokens})
    return metrics


def text_of(metrics: Metrics) -> str:
    return asyncio.run(metrics.text()).decode()


def test_counters_and_histograms_are_sums_and_every_series_stays() -> None:
    first, second = (text_of(counted(*numbers)) for numbers in ((2, 10), (3, 7)))
    merged = merge([first, second])
    assert value_of(merged, 'vllm:generation_tokens_total{engine="1",model_name="m"}') == 17
    assert value_of(merged, 'vllm:request_params_n_count{engine="0",model_name="m"}') == 5
    assert value_of(merged, 'vllm:inter_token_latency_seconds_sum{engine="1",model_name="m"}') == 8.5
    assert (
        value_of(merged, 'vllm:inter_token_latency_seconds_bucket{engine="1",le="0.5",model_name="m"}') == 17
    )

    def names(text: str) -> list[str]:
        return [line.rpartition(" ")[0] for line in text.splitlines()]

    assert names(merged) == names(first), "a single front's text has the same lines in the same order"


def test_one_text_is_returned_unchanged() -> None:
    text = text_of(counted(2, 10))
    assert merge([text]) == text


def test_gauges_of_ranks_are_the_leading_fronts_and_those_of_fronts_are_sums() -> None:
    def text(running: float, tasks: float) -> str:
        lines = (
            "# HELP vllm:num_requests_running R", "# TYPE vllm:num_requests_running gauge",
            f'vllm:num_requests_running{{engine="0"}} {running}',
            "# HELP wideep:front_tasks T", "# TYPE wideep:front_tasks gauge", f"wideep:front_tasks {tasks}",
        )  # fmt: skip
        return "\n".join(lines) + "\n"

    merged = merge([text(4.0, 2.0), text(0.0, 3.0)])
    assert value_of(merged, 'vllm:num_requests_running{engine="0"}') == 4
    assert value_of(merged, "wideep:front_tasks") == 5


def test_what_a_killed_front_counted_stays_and_a_silent_one_counts_as_before(tmp_path: Path) -> None:
    board, other = boards(tmp_path)
    seat = Seat(0, 2, tmp_path, tmp_path, board, 0, 0)
    tokens = 'vllm:generation_tokens_total{engine="1",model_name="m"}'
    answers: list[bytes | Exception] = []

    async def fetch(number: int) -> bytes:
        assert number == 1
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def scrape(own: Metrics) -> float:
        return value_of(asyncio.run(ServiceMetrics(own.text, seat, fetch).text()).decode(), tokens)

    own = counted(0, 100)
    answers.append(text_of(counted(0, 10)).encode())
    assert scrape(own) == 110
    answers.append(httpx.ConnectError("gone"))
    assert scrape(own) == 110, "it does not answer, and counts as it was last scraped"
    other.begin()
    other.set(Cell.PID, NO_PID)  # its replacement, which does not run
    assert scrape(own) == 110
    other.set(Cell.PID, os.getppid())  # another one, which runs
    answers.append(text_of(counted(0, 5)).encode())
    assert scrape(own) == 115
    board.set(Cell.PID, os.getpid() + 1)  # the leading front was replaced: it counts from 0
    answers.append(text_of(counted(0, 6)).encode())
    assert scrape(counted(0, 1)) == 100 + 10 + 1 + 6


def test_a_front_whose_node_did_not_answer_for_a_while_counts_once(tmp_path: Path) -> None:
    board, other = boards(tmp_path)
    other.set(Cell.PID, os.getppid())
    tokens = 'vllm:generation_tokens_total{engine="1",model_name="m"}'
    texts = [text_of(counted(0, num)) for num in (10, 10, 5)]
    # A process on another machine, with the same number.
    texts[2] = texts[2].replace("process_start_time_seconds 1", "process_start_time_seconds 2")
    assert texts[2] != text_of(counted(0, 5))

    async def fetch(_number: int) -> bytes:
        return texts.pop(0).encode()

    def scrape() -> float:
        metrics = ServiceMetrics(counted(0, 100).text, Seat(0, 2, tmp_path, tmp_path, board, 0, 0), fetch)
        return value_of(asyncio.run(metrics.text()).decode(), tokens)

    assert scrape() == 110
    row = board.rows_of(range(1, 2)).copy()
    board.clear(1)
    assert scrape() == scrape() == 110, "it counts as it was last scraped"
    board.rows_of(range(1, 2))[:] = row
    assert scrape() == 110, "the same process answers again"
    board.clear(1)
    assert scrape() == 110
    board.rows_of(range(1, 2))[:] = row
    assert scrape() == 100 + 10 + 5, "another process has the same number"


def test_a_full_disk_spoils_no_scrape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board, other = boards(tmp_path)
    tokens = 'vllm:generation_tokens_total{engine="1",model_name="m"}'
    texts = [text_of(counted(0, num)).encode() for num in (10, 20, 5)]

    async def fetch(_number: int) -> bytes:
        return texts.pop(0)

    def scrape() -> float:
        metrics = ServiceMetrics(counted(0, 100).text, Seat(0, 2, tmp_path, tmp_path, board, 0, 0), fetch)
        return value_of(asyncio.run(metrics.text()).decode(), tokens)

    def fail(_path: Path, _text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    assert scrape() == 110
    monkeypatch.setattr(merged_metrics, "replace_text", fail)
    assert scrape() == 120
    other.set(Cell.PID, os.getppid())  # a replacement
    assert scrape() == 100 + 10 + 5, "the killed process counts as it was last kept"


def test_counters_of_the_ranks_reports_are_not_kept(tmp_path: Path) -> None:
    name = 'vllm:num_preemptions_total{engine="0",model_name="m"}'
    head = "# HELP vllm:num_preemptions_total P\n# TYPE vllm:num_preemptions_total counter\n"
    assert value_of(merge([f"{head}{name} 4.0\n"], [f"{head}{name} 3.0\n"]), name) == 4
