"""`wideep simulate` from its arguments to its table, and its measurements of a running service."""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from expert_placement.config import EplbConfig
from server.cli import main
from server.http.client import ServiceClient
from server.options.table import ROUTER_NAMES
from server.tools.simulate.flags import PLACEMENT_NAMES, SIMULATE, SimulateOptions
from server.tools.simulate.subject import CalibrationError, Look, fit, from_service, look_of, redundant
from server.tools.size.costs.step_times import RankRows
from tests.support.models.family_sweep import tiny_config

TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:17:{second:02}.5,{20 + second},{1 + second % 9}\n" for second in range(30)
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("simulate")
    (path / "trace.csv").write_text(TRACE)
    tiny_config("qwen3_moe").save_pretrained(path)
    return path


def _words(folder: Path, *more: str) -> list[str]:
    return [
        "simulate",
        str(folder / "trace.csv"),
        "--model",
        str(folder),
        "--device",
        "h100",
        "-dp",
        "2",
        *more,
    ]


def test_routers_and_placements_are_compared_side_by_side(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = _words(folder, "--routers", "all", "--placements", "all", "--kv-cache-memory", "64M")
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(run["router"], run["placement"]) for run in found["runs"]] == [
        (router, placement) for placement in PLACEMENT_NAMES for router in ROUTER_NAMES
    ]
    assert all(run["num_requests"] == 30 and run["num_refused"] == 0 for run in found["runs"])
    assert all(0 < run["good_share"] <= 1 for run in found["runs"])
    decides_often = json.dumps({"step_interval": 20, "window_size": 10})
    assert main([*words, "--eplb-config", decides_often]) == 0
    table, error_text = capsys.readouterr()
    assert "simulated, not measured" in table
    assert re.search(r"prefix, repair: last decision about experts: .* \d+ moves", error_text), error_text
    line = next(line for line in table.splitlines() if line.startswith("router"))
    assert line.split()[1:] == list(ROUTER_NAMES) * len(PLACEMENT_NAMES)


def test_pools_are_simulated_with_their_roles(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = _words(
        folder, "--pools", "prefill:1,decode:1", "--prefill-threshold", "30", "--kv-cache-memory", "64M"
    )
    assert main([*words, "--json", "--transfer-rate", "1e6"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ranks"] == 2
    assert found["pools"] == [
        {"name": "prefill", "role": "prefill", "ranks": 1},
        {"name": "decode", "role": "decode", "ranks": 1},
    ]
    (run,) = found["runs"]
    assert run["num_requests"] == 30 and 0 < run["num_hand_overs"] < 30, "short prompts stay"
    assert 0 <= run["hand_over_computed_tokens"] < 16 and run["hand_over_ms"]["p50"] > 0
    assert main(words) == 0
    table = capsys.readouterr().out
    assert "2 ranks (prefill 1, decode 1)" in table and "requests handed over" in table


@pytest.mark.crossed("more", every=2)
@pytest.mark.parametrize(
    ("more", "error_text"),
    [
        (
            ["--routers", "prefx"],
            "--routers: 'prefx' is unknown (did you mean prefix?); give some of prefix, fewest,",
        ),
        (
            ["--placements", "eplb"],
            "--placements: 'eplb' is unknown; give some of linear, even, repair, or all",
        ),
        (["--hours", "1", "--duration", "5"], "--duration and --hours set the same value; give one of them"),
        (["--rate-scale", "0"], "--rate-scale is 0.0; it must be above 0"),
        (
            ["--calibrate", "http://127.0.0.1:9"],
            "give --model, for step times from a roofline, or --calibrate",
        ),
        (["--device", "abacus"], "--device is 'abacus'; known devices are"),
        (
            ["--max-num-batched-tokens", "100"],
            "--max-num-batched-tokens is 100; it must be at least --max-num-seqs",
        ),
        (["--quantization", "fp8"], "--quantization is fp8, but the weights of"),
        (["--expert-skew", "1000"], "--expert-skew is 1000.0; it must be 0 to 10"),
        (["--pools", "prefill:2"], "invalid --pools 'prefill:2': no pool has the role decode or both"),
        (["--transfer-rate", "0"], "--transfer-rate is 0.0; it must be above 0"),
        (["--load-window", "1e-320"], "--load-window is 1e-320; it must be 1 to 1000000"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], more: list[str], error_text: str
) -> None:
    assert main(_words(folder, *more)) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"wideep simulate: {error_text}")
    assert error.count("\n") == 1


def test_a_model_without_experts_is_refused_by_name(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}'
    )
    words = ["simulate", str(folder / "trace.csv"), "--model", str(tmp_path), "--device", "h100", "-dp", "2"]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("wideep simulate: ") and "is not a Mixture-of-Experts model" in error
    assert error.count("\n") == 1


def test_an_slo_is_read_as_bench_reads_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(_words(folder, "--slo", "speed:3"))
    assert "--slo: 'speed' is not an objective; use ttft, tpot, e2e" in capsys.readouterr().err


def test_a_broken_line_of_a_trace_is_named_by_its_number(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.csv"
    broken.write_text(TRACE.replace(",25,", ",-25,"))
    assert main(["simulate", str(broken), *_words(folder)[2:], "--kv-cache-memory", "64M"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"{broken}, line 7: ContextTokens is '-25'; it must be a whole number from 1 to 100000000" in error


def test_a_service_that_is_not_there_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(folder / "trace.csv"), "--calibrate", "http://127.0.0.1:9"]) == 1
    assert "no service answers at http://127.0.0.1:9" in capsys.readouterr().err


class _Ranks:
    """Two ranks. A step takes 10 ms, plus 2 ms per row and 0.1 ms per prompt token, and 1 ms before the next step."""

    def __init__(self) -> None:
        self.decodes = [0, 0]
        self.steps = self.prompts = 0

    def load(self, steps: int, decode_rows: int, prompt_tokens: int) -> dict[str, Any]:
        """Return /experts/load after more steps, with this many rows per step on the second rank, and this many prompt tokens."""
        self.steps += steps
        self.prompts += prompt_tokens
        self.decodes[0] += steps * decode_rows // 2
        self.decodes[1] += steps * decode_rows
        counted = {
            "steps": self.steps,
            "step_s": 0.010 * self.steps + 0.002 * self.decodes[1] + 0.0001 * self.prompts,
            "between_steps_s": 0.001 * self.steps,
        }
        ranks = [
            {
                "rank": 0,
                "since_start": {**counted, "decode_tokens": self.decodes[0], "prefill_tokens": self.prompts},
            },
            {"rank": 1, "since_start": {**counted, "decode_tokens": self.decodes[1], "prefill_tokens": 0}},
        ]
        return {"num_layers": 2, "num_experts": 8, "ranks": ranks}


def _service(loads: list[dict[str, Any]], max_running: int = 16) -> ServiceClient:
    info = {
        "served_model_name": "m", "dp_size": 2, "context_length": 512, "page_size": 16,
        "max_total_num_tokens": 4096, "max_running_requests": max_running,
        "chunked_prefill_size": 96, "device": "cpu",
    }  # fmt: skip

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/server_info":
            return httpx.Response(200, json=info)
        return httpx.Response(200, json=loads.pop(0))

    return ServiceClient("http://service", http=httpx.Client(transport=httpx.MockTransport(answer)))


def _parsed(folder: Path, *more: str) -> SimulateOptions:
    parser = argparse.ArgumentParser()
    SIMULATE.add_flags(parser)
    words = [str(folder / "trace.csv"), "--calibrate", "http://service"]
    return SimulateOptions.of(parser.parse_args([*words, *more]))


def _asked(folder: Path, seconds: int) -> SimulateOptions:
    return _parsed(folder, "--calibrate-seconds", str(seconds))


def test_step_times_and_limits_are_read_off_a_running_service(folder: Path) -> None:
    ranks = _Ranks()
    loads = [ranks.load(5000, 7, 99), ranks.load(80, 2, 30), ranks.load(60, 4, 2000), ranks.load(50, 8, 900)]
    slept: list[float] = []
    subject = from_service(_asked(folder, 3), _service(loads), sleep=slept.append)
    cost = subject.times.step([_rows(100, 3), _rows(0, 5)], 1.0)
    assert cost.total_s == pytest.approx(0.011 + 3 * 0.002 + 100 * 0.0001), (
        "steps before the measurement do not count"
    )
    limits = subject.limits
    assert (subject.num_ranks, limits.num_blocks, limits.max_num_seqs) == (2, 128, 8)
    assert (limits.max_num_batched_tokens, limits.is_paced) == (96, True)
    assert len(slept) == 3


def _rows(prefill: int, decode: int) -> RankRows:
    return RankRows(prefill, decode, 0)


def test_what_a_running_service_says_itself_is_not_taken_from_flags(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["simulate", str(folder / "trace.csv"), "--calibrate", "http://service", "--dtype", "bfloat16"]
    assert main(words) == 2
    assert "--dtype is for a roofline; with --calibrate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("placement", "config", "redundancy"),
    [
        ("linear", {}, 0),
        ("repair", {}, 4),
        ("repair", {"num_redundant_experts": 0}, 0),
        ("even", {"num_redundant_experts": 8}, 8),
    ],
)
def test_every_placement_has_its_own_redundant_experts(
    folder: Path, placement: str, config: dict[str, int], redundancy: int
) -> None:
    given = ["--eplb-config", json.dumps(config)] if config else []
    asked = _parsed(folder, *given)
    found = redundant(asked, EplbConfig(**config), 4, placement)
    assert found.num_redundant_experts == redundancy


def test_a_fit_takes_no_time_off_for_work() -> None:
    times = fit([Look(100, 400, 5000, 0.9), Look(100, 800, 1000, 1.1)])
    assert min(times.step_s, times.decode_row_s, times.prefill_token_s) >= 0


def test_a_service_without_work_or_ranks_cannot_be_calibrated_by(folder: Path) -> None:
    idle = [_Ranks().load(3, 1, 0)] * 2
    with pytest.raises(CalibrationError, match="ran fewer than 20 steps during the measurement"):
        from_service(_asked(folder, 1), _service([*idle]), sleep=lambda _: None)
    with pytest.raises(CalibrationError, match="has no serving rank"):
        from_service(_asked(folder, 1), _service([*idle], max_running=0))


def test_a_rank_that_comes_or_goes_amid_a_look_is_left_out() -> None:
    ranks = _Ranks()
    before, after = ranks.load(10, 2, 0), ranks.load(10, 2, 0)
    before["ranks"].pop(0)
    assert look_of(before, after).decode_rows == 20
    before["ranks"].pop(0)
    assert look_of(before, after) == Look(0, 0, 0, 0)
