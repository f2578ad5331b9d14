"""The routing benchmark: a trace's requests are scaled to a machine and sent to both services."""

import json
import statistics
from pathlib import Path

import pytest

from benchmarks import routing
from server.tools.bench.prompts import RequestLengths
from tests.support.service.real_service import write_tiny_model


def write_trace(path: Path, num_requests: int) -> Path:
    """Write a trace in Mooncake's format: one request per second, every fifth long, from two conversations."""
    lines = []
    for number in range(num_requests):
        blocks = 18 if number % 5 == 4 else 2
        ids = [number % 2, *range(100 * number + 2, 100 * number + 1 + blocks)]
        line = {"timestamp": 1000 * number, "input_length": 512 * blocks, "output_length": 100 + number}
        lines.append({**line, "hash_ids": ids})
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


class Taken:
    """Records the requested prompts."""

    def __init__(self) -> None:
        self.lengths: list[RequestLengths] = []

    def take(self, lengths: RequestLengths) -> str:
        self.lengths.append(lengths)
        return "text"


def test_lengths_and_gaps_are_a_trace_s_scaled_to_the_wanted_means(tmp_path: Path) -> None:
    words = "--rate 4 --duration 5 --prompt-tokens 90 --output-tokens 11"
    trace = write_trace(tmp_path / "trace.jsonl", 20)
    args, taken = routing._parser().parse_args([str(trace), *words.split()]), Taken()
    bodies = routing.bodies_of(args, trace, taken, "tiny")  # type: ignore[arg-type]
    assert [at_s for at_s, _ in bodies[:3]] == pytest.approx([0, 1 / 3.8, 2 / 3.8]), "20 requests in 19 s"
    assert statistics.fmean(body["max_tokens"] for _, body in bodies) == pytest.approx(11, abs=0.5)
    prompts = [each.prompt_tokens for each in taken.lengths]
    assert set(prompts) == {35, 312}, "lengths with a mean of 90"
    assert [each.hash_ids[0] for each in taken.lengths[:3]] == [0, 1, 0]
    assert taken.lengths[0].block_tokens == pytest.approx(90 / 5.2)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_services")
def test_both_services_answer_every_request_and_round_robin_moves_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, trace = write_tiny_model(tmp_path / "tiny"), write_trace(tmp_path / "trace.jsonl", 40)
    words = "--seats 1 --rate 20 --duration 2 --prompt-tokens 30 --output-tokens 6 --rounds 1"
    assert routing.main([str(trace), "--model", str(model), *words.split()]) == 0
    said = capsys.readouterr().out
    by_policy = {
        policy: next(line for line in said.splitlines() if f", {policy}: " in line)
        for policy in routing.POLICIES
    }
    for line in by_policy.values():
        assert " requests, 0 failed; " in line
        assert "; waits " in line
    assert "; 0 moved; " in by_policy["round-robin"]
