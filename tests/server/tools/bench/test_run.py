"""`wideep bench` against a front with scripted ranks, and once against a whole service."""

import functools
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from server.cli import build_parser, main
from server.http.client import ServiceError
from server.machine.roots import WIDEEP_COMMAND
from server.tools.bench import run
from server.tools.bench.figures import figures_of
from server.tools.bench.flags import BenchOptions, Load, bench_options_from
from server.tools.bench.report import LevelResult, json_of, level_lines, summary_lines
from server.tools.bench.run import run_bench
from server.tools.bench.stream import StreamedAnswer
from tests.support.models.tiny_tokenizer import MAX_LEN
from tests.support.service.front_process import TIMEOUT_S, FrontProcess
from tests.support.service.real_service import RealService, write_tiny_model
from tests.support.service.service_processes import HEARS_CTRL_C

MOONCAKE = [
    {"timestamp": 0, "input_length": 600, "output_length": 4, "hash_ids": [1, 2]},
    {"timestamp": 20, "input_length": 700, "output_length": 4, "hash_ids": [1, 3]},
    {"timestamp": 40, "input_length": 100, "output_length": 2, "hash_ids": [4]},
]


TEXTS = [f"passage {number} of a text" for number in range(200)]  # source of generated prompts

parser = functools.cache(build_parser)  # of all commands


def options_of(*words: str) -> BenchOptions:
    return bench_options_from(parser().parse_args(["bench", *words]))


def prompts_in(directory: Path, *texts: str) -> list[str]:
    """Write prompts, and return the flags that send them whole."""
    path = directory / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return ["--prompts", str(path)]


def trace_in(directory: Path, lines: list[dict[str, Any]]) -> str:
    path = directory / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def bench(*words: str) -> int:
    return run_bench(parser().parse_args(["bench", *words]), environment={})


def asked(front: FrontProcess, word: str) -> list[Any]:
    """Return the ranks' requests with a word in their prompt."""
    requests = [request for rank in front.ranks for request in rank.requests]
    return [request for request in requests if word in front.decode(request.prompt_ids)]


def test_a_sweep_asks_each_level_and_writes_what_it_came_to(
    front: FrontProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    front.script("load-sweep", "one two three", num_cached_tokens=16)
    words = prompts_in(tmp_path, *(f"load-sweep {number} " + "pad " * 30 for number in range(40)))
    words += ["--concurrency", "1,3", "--num-requests", "6", "--warmup", "2", "--output-tokens", "9"]
    words += ["--slo", "ttft:60000,e2e:60000", "--extra-body", '{"temperature": 0.5}', "--ignore-eos"]
    assert bench(front.url, *words, "--json", str(tmp_path / "out.json")) == 0
    requests = asked(front, "load-sweep")
    assert len(requests) == 2 * (6 + 2)
    assert {request.params.temperature for request in requests} == {0.5}
    assert {request.params.max_tokens for request in requests} == {9}
    written = json.loads((tmp_path / "out.json").read_text())
    assert (written["model"], written["endpoint"]) == ("tiny", "/v1/chat/completions")
    for level, concurrency in zip(written["levels"], (1, 3), strict=True):
        assert level["concurrency"] == concurrency and level["is_whole"]
        assert (level["num_requests"], level["num_failed"]) == (6, 0)
        assert level["output_tokens"] == 6 * 9
        assert level["cached_tokens"] == 6 * 16
        assert 0 < level["ttft_ms"]["p50"] <= level["e2e_ms"]["p50"]
        assert level["goodput_per_s"] == level["requests_per_s"] > 0
        assert len(level["requests"]) == 6
    said = capsys.readouterr()
    assert "concurrency 3: 6 requests in" in said.out and "written to" in said.out
    assert len([line for line in said.out.splitlines() if line.split()[:1] in (["1"], ["3"])]) == 2, said.out


def test_json_on_stdout_is_alone_there(
    front: FrontProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*prompts_in(tmp_path, "load-json"), "--concurrency", "2", "--num-requests", "3"]
    assert main(["bench", front.url, "--json", "--endpoint", "completions", *words]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["endpoint"] == "/v1/completions"
    assert "concurrency 2: 3 requests in" in said.err


def test_prompts_are_cut_to_the_tokens_that_were_asked_for(front: FrontProcess, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    words = [
        *prompts_in(tmp_path, *TEXTS),
        "--prompt-tokens",
        "40",
        "--output-tokens",
        "2",
        "--concurrency",
        "1",
        "--num-requests",
        "4",
    ]
    for endpoint in ("completions", "chat"):
        front.forget()
        assert bench(front.url, *words, "--endpoint", endpoint, "--json", str(out)) == 0
        lengths = [len(request.prompt_ids) for rank in front.ranks for request in rank.requests]
        assert len(lengths) == 4
        if endpoint == "completions":
            assert lengths == [40] * 4
        else:
            assert all(abs(each - 40) <= 3 for each in lengths), "cutting a text may change its tokens"


def test_a_trace_is_replayed_with_its_lengths_and_shared_prefixes(
    front: FrontProcess, tmp_path: Path
) -> None:
    front.forget()
    flags = [
        "--trace",
        trace_in(tmp_path, MOONCAKE),
        "--endpoint",
        "completions",
        *prompts_in(tmp_path, *TEXTS),
    ]
    assert bench(front.url, *flags, "--token-scale", "0.125", "--trace-scale", "0.5,4") == 0
    prompts = [request.prompt_ids for rank in front.ranks for request in rank.requests]
    assert sorted(len(each) for each in prompts) == sorted(2 * [75, 88, 12])
    beginnings = [tuple(each[:64]) for each in prompts if len(each) > 64]
    assert len(set(beginnings)) == 2, "a level's first two begin alike, and levels differ"
    assert {request.params.max_tokens for rank in front.ranks for request in rank.requests} == {1}


def test_a_trace_begins_again_where_more_requests_are_wanted(front: FrontProcess, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    words = ["--trace", trace_in(tmp_path, MOONCAKE), "--token-scale", "0.125", "--endpoint", "completions"]
    words += [*prompts_in(tmp_path, *TEXTS), "--num-requests", "7", "--json", str(out)]
    for load in ([], ["--concurrency", "2"], ["--rate", "100"]):
        assert bench(front.url, *words, *load) == 0
        [level] = json.loads(out.read_text())["levels"]
        assert level["num_requests"] == 7


def test_a_level_without_an_arrival_is_said_and_the_next_one_is_measured(
    front: FrontProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*prompts_in(tmp_path, "load-rare"), "--duration", "0.2", "--rate", "0.001,50"]
    assert bench(front.url, *words) == 0
    said = capsys.readouterr().out
    assert "rate 0.001: no request arrived within the duration" in said and "rate 50: " in said


def test_what_was_measured_is_written_though_the_next_level_cannot_be(
    front: FrontProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def warm_up(_bench: object, value: float, _client: object) -> None:
        if value > 1:
            raise ServiceError("the warm-up failed: gone")

    monkeypatch.setattr(run, "_warm_up", warm_up)
    out = tmp_path / "out.json"
    words = [
        *prompts_in(tmp_path, "load-gone"),
        "--concurrency",
        "1,2,4",
        "--num-requests",
        "2",
        "--warmup",
        "1",
    ]
    assert bench(front.url, *words, "--json", str(out)) == 1
    assert [level["concurrency"] for level in json.loads(out.read_text())["levels"]] == [1]
    assert "concurrency 2 was not measured: the warm-up failed: gone" in capsys.readouterr().err


def test_a_rate_ends_with_its_duration_and_a_closed_loop_too(front: FrontProcess, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    words = [*prompts_in(tmp_path, "load-while"), "--duration", "0.4", "--json", str(out)]
    assert bench(front.url, *words, "--rate", "20,40") == 0
    rates = json.loads(out.read_text())["levels"]
    assert [level["rate"] for level in rates] == [20, 40]
    assert all(level["num_requests"] > 0 == level["num_failed"] for level in rates)
    assert bench(front.url, *words, "--concurrency", "2") == 0
    assert json.loads(out.read_text())["levels"][0]["num_requests"] >= 2


def test_refusals_are_counted_by_reason_and_end_the_sweep(
    front: FrontProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        *prompts_in(tmp_path, "load-long " + "x " * 2 * MAX_LEN),
        "--concurrency",
        "2,4",
        "--num-requests",
        "3",
    ]
    assert bench(front.url, *words) == 1
    said = capsys.readouterr().out
    assert "3 of 3 requests failed:" in said
    assert "3 x the service refused (400): This model's maximum context length" in said
    assert "concurrency 4" not in said


def test_a_warm_up_that_fails_ends_it(
    front: FrontProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(front.url, *prompts_in(tmp_path, "x " * 2 * MAX_LEN), "--warmup", "2") == 1
    assert "the warm-up failed: the service refused (400)" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_stop_says_what_was_measured_so_far_and_hangs_up(
    front: FrontProcess, tmp_path: Path, number: signal.Signals
) -> None:
    word = f"load-stop-{number.name}"
    front.script(f"{word} quick", "soon")
    front.script(f"{word} held", "late", gates={1: threading.Event()})
    out = tmp_path / "out.json"
    words = [*prompts_in(tmp_path, f"{word} quick", f"{word} held"), "--concurrency", "1", "--json", str(out)]
    running = subprocess.Popen(
        [*HEARS_CTRL_C, *WIDEEP_COMMAND, "bench", front.url, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    held = front.served(f"{word} held")
    request = front.asked(f"{word} held")
    running.send_signal(number)
    told, complained = running.communicate(timeout=TIMEOUT_S)
    assert running.returncode == 130, complained
    assert "concurrency 1: 1 requests in" in told and ", stopped; " in told
    assert "wideep bench: stopped; the results above were measured before" in complained
    [level] = json.loads(out.read_text())["levels"]
    assert (level["num_requests"], level["is_whole"]) == (1, False)
    held.wait_for(lambda rank: request.request_id in rank.aborted)


BROKEN_TRACE = (
    '{"timestamp": 0, "input_length": 5, "output_length": 4}\n{"timestamp": 1, "input_length": 5}\n'
)


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["http://127.0.0.1:1"], 1, "no service answers at http://127.0.0.1:1 ("),
        (["ftp://x"], 1, "is not a URL of a service"),
        (["FRONT", "--model", "gpt-7"], 1, "--model is 'gpt-7'; FRONT serves tiny, org/tiny-alias"),
        (["FRONT", "--trace", "TRACE"], 2, "TRACE, line 2: output_length is missing"),
        (["FRONT", "--trace", "nowhere.csv"], 2, "--trace nowhere.csv is not a file"),
        (["FRONT", "--prompts", "nowhere.txt"], 2, "--prompts nowhere.txt is not a file"),
        (["--slo", "speed:4"], 2, "'speed' is not an objective; use ttft, tpot, e2e, such as ttft:2000"),
        (["--slo", "ttft:0"], 2, "'ttft:0' must be a name and milliseconds above 0"),
        (["--slo", "ttft"], 2, "'ttft' must be a name and milliseconds above 0"),
        (["--rate", "0"], 2, "--rate is '0'; give numbers above 0, separated by commas"),
        (["--rate", "1,fast"], 2, "--rate is '1,fast'; give numbers above 0"),
        (["--concurrency", "1.5"], 2, "--concurrency has 1.5; give whole numbers from 1 to 16384"),
        (["--concurrency", "1", "--rate", "1"], 2, "--concurrency and --rate are different loads"),
        (["--trace-scale", "2"], 2, "--trace-scale scales a trace's own arrival times"),
        (["--token-scale", "2"], 2, "--token-scale scales the lengths in a trace"),
        (
            ["--trace", "TRACE", "--output-tokens", "4"],
            2,
            "--output-tokens applies to a load without a trace",
        ),
        (["--num-requests", "0"], 2, "'0' must be a whole number above 0"),
        (["--duration", "nan"], 2, "'nan' must be a number above 0"),
        (["--warmup", "-1"], 2, "'-1' must be a whole number, 0 or more"),
        (["--extra-body", "[1]"], 2, "'[1]' must be an object"),
        (["--extra-body", "{"], 2, "'{' is not JSON"),
        (
            ["--extra-body", '{"max_tokens": 5}'],
            2,
            "--extra-body has max_tokens, which other flags set",
        ),
        (["--concurrency", ""], 2, "--concurrency is ''; give numbers above 0"),
        (["--slo", "ttft:1,ttft:2"], 2, "ttft is given twice"),
        (
            ["--prompts", "TRACE", "--tokenizer", "x"],
            2,
            "--tokenizer cuts prompts, but without --prompt-tokens",
        ),
        (["http://me:secret@127.0.0.1:1"], 2, "user names and passwords in the URL are not sent"),
        (["http://a..b:8000"], 1, "is not a URL of a service"),
        (
            ["FRONT", "--trace", "TRACE", "--concurrency", "1", "--num-requests", "1"],
            2,
            "TRACE, line 2: output",
        ),
        (["--json", "nowhere/out.json"], 2, "--json nowhere/out.json is in a folder that does not exist"),
        (["--plot", "nowhere/out.png"], 2, "--plot nowhere/out.png is in a folder that does not exist"),
        (["--json", "localhost:9000"], 2, "put the URL first: wideep bench URL --json"),
        (["--json", "http://127.0.0.1:1"], 2, "put the URL first: wideep bench URL --json"),
        (
            ["--plot", "x.bmp"],
            2,
            "--plot x.bmp has an unknown format; the name must end in .png, .svg or .pdf",
        ),
    ],
)
def test_what_cannot_be_measured_is_a_sentence(
    front: FrontProcess,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    status: int,
    says: str,
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(BROKEN_TRACE)
    shown = {"FRONT": front.url, "TRACE": str(trace)}
    try:
        ended = bench(*(shown.get(word, word) for word in words))
    except SystemExit as end:  # raised by argparse
        ended = int(end.code or 0)
    for name, text in shown.items():
        says = says.replace(name, text)
    said = capsys.readouterr().err
    assert ended == status
    assert says in said and said.startswith("wideep bench: ") and said.count("\n") == 1


def test_a_picture_without_matplotlib_names_the_package(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert bench("http://127.0.0.1:1", "--plot", "x.png") == 2
    assert "--plot needs matplotlib: pip install 'wideep[bench]'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["out.png", "out.svg"])
def test_a_picture_is_drawn(front: FrontProcess, tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'wideep[bench]'")
    path = tmp_path / name
    words = [*prompts_in(tmp_path, "load-plot"), "--concurrency", "1,2", "--num-requests", "3"]
    assert bench(front.url, *words, "--plot", str(path)) == 0
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n" if name.endswith("png") else b"<?xml")


def test_defaults_follow_from_what_is_given(tmp_path: Path) -> None:
    trace = trace_in(tmp_path, MOONCAKE)
    closed = options_of()
    assert (closed.load, closed.levels, closed.prompt_tokens) == (Load.CONCURRENCY, (1.0, 4.0, 16.0), 128)
    assert closed.duration_s is None and closed.is_cut
    assert options_of("--rate", "0.5").duration_s == 60.0
    assert options_of("--rate", "0.5", "--num-requests", "3").duration_s is None
    replayed = options_of("--trace", trace)
    assert (replayed.load, replayed.levels, replayed.duration_s) == (Load.TRACE, (1.0,), None)
    assert options_of("--trace", trace, "--rate", "3").load is Load.RATE
    assert not options_of(*prompts_in(tmp_path, "a")).is_cut
    assert options_of(*prompts_in(tmp_path, "a"), "--prompt-tokens", "7").prompt_tokens == 7
    assert options_of("--slo", "ttft:2000,tpot:50").objectives == {"ttft": 2000.0, "tpot": 50.0}


def test_the_table_says_what_was_late_stopped_and_drafted() -> None:
    answers = [
        StreamedAnswer(
            start_s=0.0, arrivals_s=[1.0, 2.0], end_s=2.0, output_tokens=6, prompt_tokens=8, late_s=0.5
        ),
        StreamedAnswer(start_s=0.0, end_s=1.0, failure="gone"),
    ]
    figures = figures_of(answers, {"ttft": 500.0})
    result = LevelResult(load=Load.RATE, value=2.0, figures=figures, answers=answers, is_whole=False)
    said = "\n".join(level_lines(result))
    assert (
        "rate 2: 2 requests in 2.0 s, stopped; 0.50 requests/s, 3.0 output tokens/s, 7.0 total tokens/s"
        in said
    )
    assert "3.00 tokens per chunk" in said and "goodput 0.00 requests/s (0% of all)" in said
    assert "ms late (p99): this machine is too busy for this load" in said
    assert "1 of 2 requests failed:\n    1 x gone" in said
    assert "TPOT" in said and "200.0" in said  # 1 s for 5 tokens
    rows = json.loads(json_of({}, [result]))["levels"][0]["requests"]
    assert [(row["start_s"], row["late_s"]) for row in rows] == [(0.0, 0.5), (0.0, 0.0)]
    table = list(summary_lines([result]))
    assert len(table) == 2 and table[1].split()[:3] == ["2", "0.50", "3.0"]


@pytest.mark.slow
def test_a_whole_service_is_measured_closed_open_and_by_a_trace(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    out = tmp_path / "out.json"
    with RealService.serve(model, tmp_path / "log", "-dp", "1") as service:
        service.wait_ready()
        words = ["--ignore-eos", "--output-tokens", "8", "--prompt-tokens", "24", "--json", str(out)]
        assert bench(service.url, *words, "--concurrency", "1,4", "--num-requests", "8", "--warmup", "1") == 0
        closed = json.loads(out.read_text())["levels"]
        assert [level["output_tokens"] for level in closed] == [64, 64]
        assert all(level["ttft_ms"]["p50"] > 0 for level in closed)
        assert bench(service.url, *words, "--rate", "20", "--num-requests", "8", "--count-chunks") == 0
        [opened] = json.loads(out.read_text())["levels"]
        assert opened["output_tokens"] == 64
        trace = trace_in(tmp_path, [{**line, "timestamp": 500 * at} for at, line in enumerate(MOONCAKE)])
        flags = ["--endpoint", "completions", "--token-scale", "0.125", "--json", str(out)]
        assert bench(service.url, "--trace", trace, *flags, "--ignore-eos") == 0
        [replayed] = json.loads(out.read_text())["levels"]
        assert replayed["prompt_tokens"] == 75 + 88 + 12
        assert replayed["cached_tokens"] in (0, 64), "0 if the first request was not computed yet"
