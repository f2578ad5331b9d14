"""`wideep serve` on one GPU, over HTTP: rates, prompts that arrive during streams, and equal bits with --batch-invariant.

The model has the layers of Qwen3-30B-A3B, but 8 of them and 64 experts, with random weights (5.5 GB on the disk), and a tokenizer
of single bytes. Two layers are enough to compare bits. The unit `qwen3` has all 48 layers and 128 experts, drawn on the device by
`--load-format dummy`. `of engine` is the rate over that of the same engine without HTTP (`benchmarks.serving.engine_alone`).
`streams + prompts`: 8 streams decode, and a prompt of 128 tokens arrives every second. TTFT is that of the prompts, ITL that
of the streams; the goals are in the project's issues: TTFT of 18 ms for a model of 48 layers, an ITL p99 of twice the p50.
The client is one process. It took 24 us of CPU per token against a server that only sends chunks (2 cores, Intel Xeon, 2026-11-29),
a sixth of a core at 7,000 tokens/s.
`alone = together` compares the tokens and the bits of their logprobs of requests that run alone and at the same time.
"""

import asyncio
import functools
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedConfig, Qwen3MoeConfig

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.ranks.models import config_of, transformers_model
from benchmarks.gpu.results import Figure, Row, Setting
from benchmarks.serving.closed_loop import Latency, RequestTiming, summarise
from benchmarks.serving.engine_alone import EngineAlone
from benchmarks.serving.processes import command_of, tree
from benchmarks.serving.service import HOST, Service, stream_completion
from scheduler.policy.config import EngineConfig
from server.http.client import ServiceClient

_DEFAULT, _INVARIANT, _QWEN3 = "default", "batch-invariant", "qwen3"
_MANY_CLIENTS, _MANY_SEQUENCES = 128, 256  # of the unit qwen3
_LAYERS, _FEW_LAYERS = 8, 2  # few where only bits count: the engine starts twice
_LONG_ANSWER = 1024  # still running when the engine is killed
_MOST_LEN = 2048
_STREAMS = 8
_TIMES_ITL = 2.0
_FEW_BLOCKS = ["--kv-cache-memory", "256M"]


class _Load(NamedTuple):
    """What clients send."""

    clients: tuple[int, ...] = (1, 32, 128)
    prompt: int = 128  # tokens
    output: int = 64
    many_output: int = 128  # of the unit qwen3
    arrivals: int = 8  # prompts during streams
    every_s: float = 1.0  # between them
    compared: int = 24  # requests
    compared_tokens: int = 32


_TINY_LOAD = _Load((2,), 20, 6, 6, 3, 0.2, 7, 8)


def units(setting: Setting) -> list[str]:
    """Return one unit per mode of the service."""
    return [_DEFAULT, _INVARIANT, _QWEN3]


def run(setting: Setting, unit: str) -> Iterator[Row]:
    """Start a service and measure it."""
    if unit == _QWEN3:
        yield from _whole_model(setting)
        return
    load = _load(setting)
    options = ["--batch-invariant", "--max-num-seqs", str(load.compared)] if unit == _INVARIANT else []
    if unit == _INVARIANT and not setting.is_interpreted:  # leaves memory for other units at the same time
        options += _FEW_BLOCKS
    common = _flags(setting)
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("wb") as log:
        model = Path(folder) / "model"
        config = write_model(
            setting, model, _FEW_LAYERS if unit == _INVARIANT or setting.is_tiny else _LAYERS
        )
        engine_rates = (
            {} if unit == _INVARIANT else _engine_rates(setting, model, config, load.clients, load.output)
        )
        with Service(str(model), [*common, *options], log) as service:
            yield Row(name=f"{unit}: start", figures={"seconds": service.start_s})
            if unit == _INVARIANT:
                yield _compared(service, config, load)
                yield _killed(service, config, load)
                return
            service.run(_prompts(config, 8, load.prompt, 0), load.output, 8)
            for count in load.clients:
                prompts = _prompts(config, max(2 * count, 8), load.prompt, count)
                timings = service.run(prompts, load.output, count)
                yield _rate_row(count, summarise(timings), engine_rates[count])
            yield asyncio.run(_arrivals(service, config, load))


def _whole_model(setting: Setting) -> Iterator[Row]:
    """Measure the model in full size, with weights that each process draws itself."""
    load = _load(setting)
    count = load.clients[0] if setting.is_tiny else _MANY_CLIENTS
    flags = [*_flags(setting), "--load-format", "dummy", "--max-num-seqs", str(_MANY_SEQUENCES)]
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("wb") as log:
        model = Path(folder) / "model"
        config = config_of("qwen3", setting)
        if setting.is_tiny:
            config.vocab_size, config.max_position_embeddings = 512, 2 * _MOST_LEN
        config.save_pretrained(model)
        _write_tokenizer(model, config.vocab_size)
        engine_rates = _engine_rates(
            setting,
            model,
            config,
            [count],
            load.many_output,
            max_num_seqs=_MANY_SEQUENCES,
            load_format="dummy",
        )
        with Service(str(model), flags, log) as service:
            yield Row(name=f"{_QWEN3}: start", figures={"seconds": service.start_s})
            service.run(_prompts(config, 8, load.prompt, 0), load.many_output, 8)
            prompts = _prompts(config, max(2 * count, 8), load.prompt, count)
            timings = service.run(prompts, load.many_output, count)
            yield _rate_row(count, summarise(timings), engine_rates[count], f"{_QWEN3}: ")
            yield asyncio.run(_arrivals(service, config, load, f"{_QWEN3}: "))


def _load(setting: Setting) -> _Load:
    return _TINY_LOAD if setting.is_tiny else _Load()


def _flags(setting: Setting) -> list[str]:
    flags = ["-dp", "1", "--max-model-len", str(_MOST_LEN), "--served-model-name", "m"]
    device = ["--device", "cpu", *_FEW_BLOCKS] if setting.is_interpreted else ["--device", "cuda"]
    return [*flags, *device]


def write_model(setting: Setting, folder: Path, layers: int) -> Qwen3MoeConfig:
    """Write a checkpoint with random weights and a tokenizer."""
    config = config_of("qwen3", setting, layers=layers)
    config.vocab_size = 512 if setting.is_tiny else 49152
    config.num_experts = min(config.num_experts, 64)
    config.max_position_embeddings = 2 * _MOST_LEN
    transformers_model(config, Bench.of(setting), torch.bfloat16).save_pretrained(folder)
    if not setting.is_interpreted:
        torch.cuda.empty_cache()
    _write_tokenizer(folder, config.vocab_size)
    return config


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(f"word{at}" for at in range(vocab_size - len(alphabet)))]
    tokenizer = Tokenizer(models.BPE(vocab={word: at for at, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": _MOST_LEN}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def _engine_rates(
    setting: Setting,
    model: Path,
    config: PreTrainedConfig,
    clients: Sequence[int],
    num_tokens: int,
    *,
    max_num_seqs: int = 0,
    load_format: str = "auto",
) -> dict[int, float]:
    """Return the engine's output tokens/s without HTTP, by number of clients."""
    settings = EngineConfig(
        directory=model,
        device="cpu" if setting.is_interpreted else "cuda",
        kv_cache_bytes=(1 << 28) if setting.is_interpreted else (16 << 30),
        load_format=load_format,
        max_num_seqs=max_num_seqs or max(clients),
        max_model_len=_MOST_LEN,
        max_num_batched_tokens=512 if setting.is_interpreted else 8192,
    )
    with EngineAlone(settings) as engine:
        length = _load(setting).prompt
        engine.run(_prompts(config, 2, length, 0), num_tokens, 2)
        return {
            count: summarise(
                engine.run(_prompts(config, max(2 * count, 8), length, count), num_tokens, count)
            ).tokens_per_s
            for count in clients
        }


def _rate_row(count: int, latency: Latency, engine_rate: float, prefix: str = "") -> Row:
    figures: dict[str, Figure] = {
        "tokens/s": latency.tokens_per_s,
        "of engine": latency.tokens_per_s / engine_rate,
        "TTFT p50 ms": latency.ttft_p50_ms,
        "ITL p50 ms": latency.itl_p50_ms,
        "ITL p99 ms": latency.itl_p99_ms,
    }
    return Row(name=f"{prefix}{count} clients", figures=figures)


async def _arrivals(service: Service, config: PreTrainedConfig, load: _Load, prefix: str = "") -> Row:
    """Stream from 8 clients while a prompt arrives every second."""
    complete = functools.partial(stream_completion, service.port)
    streams_ended = asyncio.Event()

    async def stream(seed: int) -> list[RequestTiming]:
        timings = []
        while not streams_ended.is_set():
            (prompt,) = _prompts(config, 1, load.prompt, 1000 + seed)
            timings.append(await complete(prompt, num_tokens=load.output * 4))
        return timings

    streams = [asyncio.create_task(stream(seed)) for seed in range(_STREAMS)]
    arrivals = []
    for number in range(load.arrivals):
        await asyncio.sleep(load.every_s)
        (prompt,) = _prompts(config, 1, load.prompt, 2000 + number)
        arrivals.append(await complete(prompt, num_tokens=2))
    streams_ended.set()
    streamed = summarise([timing for each in await asyncio.gather(*streams) for timing in each])
    figures: dict[str, Figure] = {
        "TTFT p50 ms": summarise(arrivals).ttft_p50_ms,
        "ITL p50 ms": streamed.itl_p50_ms,
        "ITL p99 ms": streamed.itl_p99_ms,
        "p50 x 2 / p99": _TIMES_ITL * streamed.itl_p50_ms / streamed.itl_p99_ms,
    }
    return Row(name=f"{prefix}8 streams + prompts", figures=figures, goals={"p50 x 2 / p99": 1.0})


def _compared(service: Service, config: Qwen3MoeConfig, load: _Load) -> Row:
    """Compare requests alone, together, and again (with prefix hits)."""
    prompts = [
        _prompts(config, 1, 20 + 37 * (number % 7), 3000 + number)[0] for number in range(load.compared)
    ]
    ask = functools.partial(_tokens, service.port, num_tokens=load.compared_tokens)
    alone = [ask(prompt) for prompt in prompts]
    with ThreadPoolExecutor(load.compared) as pool:
        together = list(pool.map(ask, prompts))
    again = [ask(prompt) for prompt in prompts]
    equal_together, equal_again = (
        sum(one == other for one, other in zip(alone, each, strict=True)) for each in (together, again)
    )
    figures: dict[str, Figure] = {
        "requests": len(prompts),
        "alone = together": equal_together,
        "alone = again": equal_again,
        "same tokens": sum(one[0] == other[0] for one, other in zip(alone, together, strict=True)),
    }
    is_right = (equal_together, equal_again) == (len(prompts), len(prompts))
    return Row(name="bits", figures=figures, is_right=is_right)


def _killed(service: Service, config: Qwen3MoeConfig, load: _Load) -> Row:
    """Kill the engine while a request runs, and compare its answer with that of an undisturbed one."""
    (prompt,) = _prompts(config, 1, load.prompt, 4000)
    ask = functools.partial(_tokens, service.port, prompt, num_tokens=_LONG_ANSWER)
    wanted = ask()
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(ask)
        time.sleep(0.3)  # some tokens are done
        for pid in tree(service.process.pid):
            if "engine" in command_of(pid):
                os.kill(pid, signal.SIGKILL)
        begun_s = time.perf_counter()
        found = coming.result()
    figures: dict[str, Figure] = {
        "seconds": time.perf_counter() - begun_s,
        "same tokens": int(found[0] == wanted[0]),
    }
    return Row(name="killed engine", figures=figures, is_right=found[0] == wanted[0])


def _tokens(port: int, prompt: list[int], *, num_tokens: int) -> tuple[list[str], list[float]]:
    """Return the greedy tokens after a prompt, and their logprobs."""
    body: dict[str, Any] = {
        "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "logprobs": 0,
        "return_tokens_as_token_ids": True,
    }  # fmt: skip
    with ServiceClient(f"http://{HOST}:{port}") as service:
        found = service.post("/v1/completions", body).json()["choices"][0]["logprobs"]
    return found["tokens"], found["token_logprobs"]


def _prompts(config: PreTrainedConfig, count: int, length: int, seed: int) -> list[list[int]]:
    drawn = torch.randint(
        0, config.vocab_size, (count, length), generator=torch.Generator().manual_seed(seed)
    )
    prompts: list[list[int]] = drawn.tolist()
    return prompts
