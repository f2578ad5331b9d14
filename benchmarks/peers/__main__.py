"""How fast does the service serve, compared with vLLM, llama.cpp and transformers on the same machine and checkpoint?

A closed loop at several concurrencies: prompts of 128 and answers of 64 tokens, greedy, streamed over HTTP. transformers'
continuous batching runs in a separate process without HTTP. The programs of one set are loaded together and take turns round by
round with the same prompts. There are three sets: `exact`, each program with its best setting that computes in float32 (ours and
llama.cpp's also with the checkpoint's bfloat16 weights), `int8` against q8_0, and `int4` against q4_0. llama.cpp may round rows
to bfloat16 for bfloat16 weights on machines that multiply bfloat16; our service never does.

A row in which other processes used more than 0.1 core is measured again, and dropped if it stays noisy. Missing peers are reported.
Peers are installed once, into $WIDEEP_PEERS or the cache folder; with vLLM's first start, this takes half an hour.

Expected bound: as in `benchmarks.serve`.

Run: `make bench-peers` or `python -m benchmarks.peers [--shapes qwen3-moe,deepseek-v3] [--sets exact,int8,int4]
[--concurrency 1,4,16,32] [--rounds 3] [--threads 2] [--without vllm,...] [--quick] [--save]`.
"""

import argparse
import contextlib
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from benchmarks.card import environment_card, print_card, print_tail, save_result
from benchmarks.models.random_model import SHAPES, ensure_random_model
from benchmarks.peers import llama_cpp, vllm
from benchmarks.peers.folder import MissingPeerError
from benchmarks.serving.closed_loop import ExactPrompts, summarise
from benchmarks.serving.processes import ProcessWatch
from benchmarks.serving.service import BenchServiceError, Server, Service
from benchmarks.serving.transformers_peer import PeerError, PeerSetting, TransformersPeer
from dispatch.ports import free_port
from server.front.tokenizer import Tokenizer

PROMPT_TOKENS, OUTPUT_TOKENS = 128, 64
MODEL_LENGTH = 1024
OURS = "wideep"
_SHAPES = [shape for shape in SHAPES if shape != "deepseek-v3-deep"]  # it lacks tokens that occur in texts
_ATTEMPTS = 3  # to measure a row without noise
_METRICS = ("tokens_per_s", "ttft_p50_ms", "itl_p50_ms", "itl_p99_ms")
_HEAD = ("tok/s", "TTFT p50", "ITL p50", "p99", "PSS MiB", "start s")


class PeerOptions(NamedTuple):
    """Settings of the benchmark."""

    shapes: list[str]
    sets: list[str]
    concurrency: list[int]
    rounds: int
    threads: int
    without: set[str]
    save: bool


class Program(NamedTuple):
    """A program in the comparison."""

    name: str  # the first word names the project
    start: Callable[[Path, PeerOptions, IO[bytes]], Any]  # a context with `process`, `run` and `start_s`


def _service(*arguments: str) -> Callable[[Path, PeerOptions, IO[bytes]], Any]:
    def start(model: Path, options: PeerOptions, log: IO[bytes]) -> Service:
        limits = [f"--max-model-len={MODEL_LENGTH}", f"--max-num-seqs={max(options.concurrency)}"]
        threads = str(options.threads)
        return Service(str(model), [*limits, *(each.replace("THREADS", threads) for each in arguments)], log)

    return start


def _vllm(dtype: str) -> Callable[[Path, PeerOptions, IO[bytes]], Any]:
    def start(model: Path, options: PeerOptions, log: IO[bytes]) -> Server:
        python, port = vllm.install(), free_port()
        command = vllm.command(
            python, model, port, dtype, max_model_len=MODEL_LENGTH, max_num_seqs=max(options.concurrency)
        )
        variables = vllm.variables(python, options.threads)
        return Server(
            command, port, log, environment=variables, fields={"model": "m"}, timeout_s=vllm.START_TIMEOUT_S
        )

    return start


def _llama_cpp(form: str) -> Callable[[Path, PeerOptions, IO[bytes]], Any]:
    def start(model: Path, options: PeerOptions, log: IO[bytes]) -> Server:
        installed, port = llama_cpp.install(), free_port()
        file = llama_cpp.converted(installed, model, form)
        command = llama_cpp.command(
            installed, file, port, threads=options.threads, max_num_seqs=max(options.concurrency)
        )
        return Server(command, port, log, fields={"cache_prompt": False})

    return start


def _transformers(model: Path, options: PeerOptions, log: IO[bytes]) -> TransformersPeer:
    peer = TransformersPeer(
        model, threads=options.threads, max_num_seqs=max(options.concurrency), max_model_len=MODEL_LENGTH, log=log
    )  # fmt: skip
    peer.configure(PeerSetting(attention="sdpa", experts="grouped_mm", batch_tokens=512))
    return peer


_LONE, _TWO = ("--data-parallel-size=1", "--threads=THREADS"), ("--data-parallel-size=2", "--threads=1")
SETS = {
    "exact": [
        Program(f"{OURS} 1 rank", _service(*_LONE)),
        Program(f"{OURS} 2 ranks", _service(*_TWO)),
        Program(f"{OURS} 1 rank float32", _service(*_LONE, "--dtype=float32")),
        Program("vllm float32", _vllm("float32")),
        Program("llama.cpp bf16", _llama_cpp("bf16")),
        Program("llama.cpp f32", _llama_cpp("f32")),
        Program("transformers", _transformers),
    ],
    "int8": [
        Program(f"{OURS} int8", _service(*_LONE, "--quantization=int8")),
        Program("llama.cpp q8_0", _llama_cpp("q8_0")),
    ],
    "int4": [
        Program(f"{OURS} int4", _service(*_LONE, "--quantization=int4")),
        Program("llama.cpp q4_0", _llama_cpp("q4_0")),
    ],
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    options = _options(arguments)
    card = environment_card()
    print_card(card)
    # SIGTERM unwinds like Ctrl-C, so that started processes are stopped.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        shapes = {shape: _measure_shape(shape, options) for shape in options.shapes}
    except (BenchServiceError, PeerError) as error:
        print(f"benchmarks.peers: {error}", file=sys.stderr)
        return 1
    settings = {**options._asdict(), "without": sorted(options.without)}
    result = {"benchmark": "peers", "environment": card, "options": settings, "shapes": shapes}
    if options.save:
        print(f"written to {save_result('peers', result).relative_to(Path(__file__).parents[2])}")
    print_tail(result)
    return 0


def _options(arguments: Sequence[str] | None) -> PeerOptions:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description="Compare WideEP with vLLM, llama.cpp and transformers."
    )

    def of(allowed: Sequence[str]) -> Callable[[str], list[str]]:
        def names(text: str) -> list[str]:
            found = [name for name in text.split(",") if name]
            if not set(found) <= set(allowed):
                raise argparse.ArgumentTypeError(f"give names of {', '.join(allowed)}, separated by commas")
            return found

        return names

    def numbers(text: str) -> list[int]:
        parts = text.split(",")
        if not all(part.isdecimal() and int(part) > 0 for part in parts):
            raise argparse.ArgumentTypeError("give whole numbers above 0, separated by commas")
        return [int(part) for part in parts]

    add = parser.add_argument
    add("--shapes", type=of(_SHAPES), default=_SHAPES, metavar="NAMES", help="(default: all)")
    add("--sets", type=of([*SETS]), default=[*SETS], metavar="NAMES", help="(default: all)")
    add("--concurrency", type=numbers, metavar="NUMBERS", help="concurrent clients (default: 1,4,16,32)")
    add("--rounds", type=int, metavar="N", help="rounds per program and level (default: 3)")
    add("--threads", type=int, default=2, metavar="N", help="threads per program (default: %(default)s)")
    add(
        "--without", type=of(["vllm", "llama.cpp", "transformers"]), default=[], metavar="NAMES",
        help="peers to leave out",
    )  # fmt: skip
    add("--quick", action="store_true", help="smoke test: one round at 1 and 4 clients")
    add("--save", action="store_true", help="write benchmarks/results/peers-<date>-<cpu>.json")
    args = parser.parse_args(arguments)
    concurrency = args.concurrency or ([1, 4] if args.quick else [1, 4, 16, 32])
    rounds = args.rounds or (1 if args.quick else 3)
    return PeerOptions(
        args.shapes, args.sets, concurrency, rounds, args.threads, set(args.without), args.save
    )


def _measure_shape(shape: str, options: PeerOptions) -> dict[str, Any]:
    model = ensure_random_model(shape=shape, dtype=torch.bfloat16)
    encode = Tokenizer(str(model)).encode
    prompts = ExactPrompts(lambda text: encode(text, add_special_tokens=False), PROMPT_TOKENS)
    found = {}
    for name in options.sets:
        print(f"== {shape}, {name}", flush=True)
        with contextlib.ExitStack() as stack:
            running, missing = _start(stack, SETS[name], model, options)
            _drop_those_that_fail(running, missing, prompts)
            levels = [_measure_level(running, prompts, each, options) for each in options.concurrency]
        starts = {program: round(started.start_s, 1) for program, started in running.items()}
        found[name] = {"missing": missing, "start_s": starts, "levels": levels}
        _print_table(shape, name, found[name])
    return found


def _start(
    stack: contextlib.ExitStack, programs: Sequence[Program], model: Path, options: PeerOptions
) -> tuple[dict[str, Any], dict[str, str]]:
    """Start the available programs. Return them, and the reasons why the others are missing."""
    running, missing = {}, {}
    for program in programs:
        whose = program.name.split()[0]
        if whose in options.without:
            continue
        log = stack.enter_context(_log())
        try:
            running[program.name] = stack.enter_context(program.start(model, options, log))
        except (MissingPeerError, BenchServiceError, PeerError) as error:
            if whose == OURS:
                raise
            missing[program.name] = str(error)[-1000:]
            print(f"   {program.name} is missing: {error}", flush=True)
    return running, missing


def _drop_those_that_fail(running: dict[str, Any], missing: dict[str, str], prompts: ExactPrompts) -> None:
    """Request an answer from each: a peer may start with a model that it cannot run."""
    for name, program in list(running.items()):
        try:
            program.run(prompts.take(1), 4, 1)
        except (BenchServiceError, PeerError) as error:
            if name.split()[0] == OURS:
                raise
            del running[name]
            missing[name] = str(error)[-1000:]
            print(f"   {name} is missing: {str(error).strip().splitlines()[-1]}", flush=True)


def _log() -> Any:
    return tempfile.NamedTemporaryFile(prefix="wideep_bench_", suffix=".log")


def _measure_level(
    running: dict[str, Any], prompts: ExactPrompts, concurrency: int, options: PeerOptions
) -> dict[str, Any]:
    lot = prompts.take(concurrency)
    for program in running.values():
        program.run(lot, OUTPUT_TOKENS // 4, concurrency)
    rows: list[dict[str, Any]] = []
    names = [*running]
    for round_number in range(options.rounds):
        prompts_of_round = prompts.take(max(6, 2 * concurrency))
        turn = round_number % len(names)  # changes the order, so that no program always follows the same one
        for name in names[turn:] + names[:turn]:
            for _ in range(_ATTEMPTS):
                row = _measure_row(running[name], prompts_of_round, concurrency)
                print(
                    f"   {concurrency:>3} clients, round {round_number + 1}  {name:<22} {row['tokens_per_s']:8.1f} tok/s"
                    f"   {row['own_cores']:.2f} cores, others {row['other_cores']:.2f}{' ~' if row['noisy'] else ''}",
                    flush=True,
                )
                if not row["noisy"]:
                    rows.append({"round": round_number, "program": name, **row})
                    break
    return {"clients": concurrency, "rows": rows, "programs": _medians(names, rows)}


def _measure_row(program: Any, prompts: Sequence[list[int]], concurrency: int) -> dict[str, Any]:
    with ProcessWatch(program.process.pid) as watch:
        timings = program.run(prompts, OUTPUT_TOKENS, concurrency)
    usage = watch.usage
    return {
        **asdict(summarise(timings)),
        "peak_pss_mib": round(usage.peak_pss_bytes / 2**20),
        "own_cores": usage.own_cores,
        "other_cores": usage.other_cores,
        "noisy": usage.is_noisy,
    }


def _medians(names: Sequence[str], rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return medians of each program's quiet rows, if there are any."""
    found = {}
    for name in names:
        own = [row for row in rows if row["program"] == name]
        if own:
            found[name] = {
                **{metric: round(statistics.median(row[metric] for row in own), 1) for metric in _METRICS},
                "peak_pss_mib": max(row["peak_pss_mib"] for row in own),
                "rounds": len(own),
            }
    return found


def _print_table(shape: str, name: str, found: dict[str, Any]) -> None:
    """Print a set's medians, and each program's tokens/s over those of the best peer at the same level."""
    print(f"\n{shape}, {name}: medians of quiet rows; times in ms\n{'clients':>7}  {'':<22}", end="")
    print("".join(f"{column:>10}" for column in _HEAD) + "  x best peer")
    for level in found["levels"]:
        best = max(
            (row["tokens_per_s"] for each, row in level["programs"].items() if not each.startswith(OURS)),
            default=None,
        )
        for program, row in level["programs"].items():
            values = [*(row[metric] for metric in _METRICS), row["peak_pss_mib"], found["start_s"][program]]
            ratio = "" if best is None else f"{row['tokens_per_s'] / best:.2f}"
            print(
                f"{level['clients']:>7}  {program:<22}{''.join(f'{value:>10}' for value in values)}  {ratio:>6}"
            )
    print(flush=True)


if __name__ == "__main__":
    sys.exit(main())
