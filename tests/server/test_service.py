"""The whole service with real engines: one command, the official client, bad input, and processes that die."""

import io
import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from dispatch.ports import free_port
from expert_placement.files import from_json, to_json
from expert_placement.moves import align
from tests.support.models.quantise import change_file, write_quantised
from tests.support.models.tiny_tokenizer import CHAT_TEMPLATE
from tests.support.placement.placements import held, random_placement
from tests.support.requests.timed_streams import stream_all
from tests.support.service.real_service import START_S, RealService, write_tiny_model
from tests.support.service.service_processes import has_ended, wait_until
from tests.support.service.torchruns import Torchrun


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    template = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}" + CHAT_TEMPLATE
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", chat_template=template)


@pytest.fixture(scope="module")
def service(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealService]:
    """`wideep serve` on two ranks, with slots for replicas of experts. Ctrl-C ends all its processes."""
    log = tmp_path_factory.mktemp("service") / "output.txt"
    with RealService.serve(model, log, "--eplb-config", '{"num_redundant_experts": 2}') as running:
        yield running.wait_ready()
        below = running.descendants()
        running.processes[0].send_signal(signal.SIGINT)
        assert running.wait_ended() == [0], running.output()
        assert all(has_ended(pid, 2) for pid in below)


@pytest.fixture(scope="module")
def client(service: RealService) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def complete(client: OpenAI, prompt: str, **options: object) -> str:
    """Return the text of a greedy completion."""
    options = {"max_tokens": 24, "temperature": 0, "extra_body": {"ignore_eos": True}, **options}
    return client.completions.create(model="tiny", prompt=prompt, **options).choices[0].text  # type: ignore[call-overload, no-any-return]


def test_a_streamed_answer_equals_the_whole_one(client: OpenAI) -> None:
    messages = [{"role": "user", "content": "hello"}]
    options = {"model": "tiny", "messages": messages, "max_tokens": 20, "temperature": 0}
    whole = client.chat.completions.create(**options)  # type: ignore[call-overload]
    stream = client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})  # type: ignore[call-overload]
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )


def test_no_library_warns_on_the_terminal(client: OpenAI, service: RealService) -> None:
    complete(client, "hello")
    assert not [line for line in service.output().splitlines() if "Warning" in line or "deprecated" in line]


def test_answers_are_the_same_alone_and_among_many(client: OpenAI) -> None:
    prompts = [f"{index} the cat sat " * (1 + index % 5) for index in range(16)]
    alone = [complete(client, prompt) for prompt in prompts]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(lambda prompt: complete(client, prompt), prompts)) == alone


def test_a_repeated_prompt_reports_its_cached_tokens(client: OpenAI) -> None:
    prompt = "the mat the cat " * 20
    for _ in range(2):
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=4, temperature=0)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    num_cached = answer.usage.prompt_tokens_details.cached_tokens
    assert num_cached is not None and num_cached >= 16


@pytest.mark.crossed("path", every=2)
@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/flush_cache"])
def test_what_is_cached_can_be_forgotten_on_all_ranks_while_requests_run(
    client: OpenAI, service: RealService, path: str
) -> None:
    prompt = "the cat on the mat " * 20

    def num_cached(count: int) -> int:
        answers = [
            client.completions.create(model="tiny", prompt=prompt, max_tokens=2, temperature=0)
            for _ in range(count)
        ]
        return max(answer.usage.prompt_tokens_details.cached_tokens for answer in answers)  # type: ignore[union-attr, type-var, return-value]

    for _ in range(2):  # twice, so that both ranks cache the prefix
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: num_cached(1), range(8)))
    assert num_cached(4) >= 16
    expected = complete(client, prompt, max_tokens=200)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(complete, client, prompt, max_tokens=200)
        for _ in range(20):
            assert service.post(path).status_code == 200
        assert running.result() == expected
    assert service.post(path).status_code == 200
    assert num_cached(1) == 0, "no earlier block is found"
    assert num_cached(4) >= 16, "later blocks are cached"


def test_seeded_samples_repeat_and_seeds_differ(client: OpenAI) -> None:
    first, again, other = (complete(client, "hello", temperature=1.0, seed=seed) for seed in (5, 5, 6))
    assert first == again != other


def test_nonsense_is_refused_by_name_and_costs_nobody_else_anything(
    client: OpenAI, service: RealService
) -> None:
    expected = complete(client, "the cat")
    with pytest.raises(NotFoundError):
        client.completions.create(model="nobody", prompt="x")
    with pytest.raises(BadRequestError, match="maximum context length"):
        client.completions.create(model="tiny", prompt="x" * 3000)
    for body in (b"{", b"[]", b'{"model": "tiny"}', b'{"model": "tiny", "prompt": "x", "temperature": -1}'):
        answer = service.post("/v1/completions", content=body)
        assert answer.status_code in (400, 422)
        assert answer.json()["error"]["message"]
    assert complete(client, "the cat") == expected


def test_a_client_that_leaves_frees_its_blocks(client: OpenAI, service: RealService) -> None:
    stream = client.completions.create(
        model="tiny", prompt="hello", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    complete(client, "the cat", max_tokens=8)  # a few steps later
    metrics = service.get("/metrics").text
    running = [line for line in metrics.splitlines() if line.startswith("vllm:num_requests_running")]
    assert running
    assert all(float(line.split()[-1]) == 0 for line in running)


def test_the_recorded_load_is_every_token_of_every_layer(client: OpenAI, service: RealService) -> None:
    assert service.post("/start_expert_distribution_record").status_code == 200
    answers = [
        client.completions.create(model="tiny", prompt=f"{index} on the mat", max_tokens=9, temperature=0)
        for index in range(4)
    ]
    assert service.post("/stop_expert_distribution_record").status_code == 200
    used = [answer.usage for answer in answers if answer.usage is not None]
    cached = sum(
        usage.prompt_tokens_details.cached_tokens or 0 for usage in used if usage.prompt_tokens_details
    )
    prefilled = sum(usage.prompt_tokens for usage in used) - cached
    # The prefill of a prompt's last token yields the first token.
    decoded = sum(usage.completion_tokens - 1 for usage in used)
    record = io.BytesIO(service.get("/experts/record").content)
    with np.load(record, allow_pickle=False) as arrays:
        found = {phase: arrays[phase].sum(axis=(0, 2)) for phase in ("prefill", "decode")}
        served = arrays["rank_tokens"].sum(axis=(0, 2, 3))
    choices = int(found["prefill"][0]) // prefilled
    assert choices > 1
    assert found["prefill"].tolist() == [choices * prefilled] * len(served)
    assert found["decode"].tolist() == [choices * decoded] * len(served)
    assert served.tolist() == (found["prefill"] + found["decode"]).tolist()
    ranks = service.get("/experts/load").json()["ranks"]
    assert all(rank["experts_s"] > 0 and rank["step_s"] > rank["dispatch_wait_s"] > 0 for rank in ranks)
    assert all(rank["dispatch_bytes"][1 - rank["rank"]] > 0 for rank in ranks)


# The README's main promise: answers stay the same through a rebalance, a kill and a return. The slow tests check it
# with more ranks, more kinds of requests and more faults (test_faults, test_live_rebalance).
PIECES = 10  # received by every stream before an event
OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "logprobs": 2},
    {"temperature": 1.0, "seed": 7, "n": 2, "presence_penalty": 0.7},
    {"temperature": 1.0, "seed": 10, "structured_outputs": {"regex": "[a-z ]{50}"}},
)
BODIES: list[dict[str, Any]] = [
    {"prompt": f"{copy} the cat {kind}", "max_tokens": 60, "ignore_eos": True, "model": "tiny", **options}
    for copy in range(2)
    for kind, options in enumerate(OPTIONS)
]


@pytest.fixture(scope="module")
def expected(service: RealService) -> list[tuple[object, ...]]:
    """The answers to all requests without any fault."""
    return [stream.said for stream in stream_all(service.url, BODIES)]


def test_answers_stay_the_same_while_experts_move(
    service: RealService, expected: list[tuple[object, ...]]
) -> None:
    now = from_json(service.get("/experts/history").json()["serving"])
    target = align(random_placement(now.num_layers, now.num_experts, 2, now.slots_per_rank, seed=3), now)
    applied: list[httpx.Response] = []

    def apply() -> None:
        applied.append(service.post("/experts/apply", json={"placement": to_json(target)}, timeout_s=120))

    moving = threading.Thread(target=apply)
    streams = stream_all(service.url, BODIES, pieces=PIECES, then=moving.start)
    moving.join()
    assert [stream.said for stream in streams] == expected
    assert applied[0].status_code == 200 and applied[0].json()["moves"] > 0, applied[0].text
    serving = from_json(service.get("/experts/history").json()["serving"])
    assert held(serving) == held(target)
    assert [stream.said for stream in stream_all(service.url, BODIES)] == expected


def test_streams_go_on_with_the_same_tokens_when_an_engine_is_killed_and_it_comes_back(
    service: RealService, expected: list[tuple[object, ...]]
) -> None:
    engine = service.engines()[1]
    streams = stream_all(service.url, BODIES, pieces=PIECES, then=lambda: os.kill(engine, signal.SIGKILL))
    assert [stream.said for stream in streams] == expected
    for is_so in (lambda status: status["losses"] == 1, lambda status: status["members"] == [0, 1]):
        wait_until(lambda: is_so(service.status()), service.output, within_s=START_S)  # noqa: B023
    assert [stream.said for stream in stream_all(service.url, BODIES)] == expected


# Calls that must hold even though a model with random weights would write something else.
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["red", "blue"]},
    },
    "required": ["count", "kind"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("pick", "drop")
]


def check(name: str, arguments: str) -> None:
    assert name in ("pick", "drop")
    values = json.loads(arguments)
    assert (
        set(values) == {"count", "kind"} and 0 <= values["count"] <= 99 and values["kind"] in ("red", "blue")
    )


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "drop"}}])
def test_a_call_that_must_be_is_made_and_fits_its_schema(client: OpenAI, choice: Any) -> None:
    for seed in range(4):
        answer = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hello"}],
            tools=TOOLS,
            tool_choice=choice,
            parallel_tool_calls=False,
            seed=seed,
            temperature=1.5,
        )
        calls = answer.choices[0].message.tool_calls
        assert calls is not None and len(calls) == 1
        check(calls[0].function.name, calls[0].function.arguments)  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "drop"}}])
def test_a_call_that_must_be_made_streams(client: OpenAI, choice: Any) -> None:
    stream = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hello"}],
        tools=TOOLS,
        tool_choice=choice,
        parallel_tool_calls=False,
        seed=0,
        temperature=1.5,
        stream=True,
    )
    calls = [call for chunk in stream for c in chunk.choices for call in c.delta.tool_calls or []]
    names = [call.function.name for call in calls if call.function and call.function.name]
    assert len(names) == 1 and len([call for call in calls if call.id]) == 1
    check(names[0], "".join(call.function.arguments or "" for call in calls if call.function))


def is_leaving(service: RealService) -> bool:
    """Return whether /health is 503. On a busy machine, the stream and the service may end before the first look."""
    try:
        return service.get("/health").status_code == 503
    except httpx.ConnectError:
        return True


PATIENT = ("--shutdown-timeout-seconds", "600")  # a busy machine may need more than 25 s for 300 tokens
END_S = 120.0  # after the last open request; engines of an idle machine take a second or two


def stream_across_sigterm(service: RealService) -> int:
    """Send SIGTERM in the middle of a stream and return the number of its tokens."""
    with OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        stream = client.completions.create(
            model="tiny",
            prompt="hello",
            max_tokens=300,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        chunks = iter(stream)
        next(chunks)
        service.processes[0].terminate()
        wait_until(lambda: is_leaving(service), lambda: "SIGTERM had no effect")
        usage = [chunk.usage for chunk in chunks][-1]
    assert usage is not None
    return usage.completion_tokens


@pytest.mark.slow
def test_as_json_every_line_is_an_object_and_sigterm_lets_a_stream_end(model: Path, tmp_path: Path) -> None:
    """The lines include the loss and return of a rank, the end, and a line of throughput during traffic."""
    flags = ("--log-format", "json", "--data-parallel-size", "2", "--enable-eplb", *PATIENT)
    with RealService.serve(model, tmp_path / "output.txt", *flags) as service:
        service.wait_ready()
        os.kill(service.engines()[1], signal.SIGKILL)
        for whole in (False, True):
            wait_until(
                lambda whole=whole: (service.status()["members"] == [0, 1]) == whole,
                service.output,
                within_s=START_S,
            )
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 20}

        def has_line() -> bool:
            assert service.post("/v1/completions", json=body).status_code == 200
            return '"wideep.throughput"' in service.output()

        wait_until(has_line, service.output, within_s=60)
        service.get("/metrics")
        below = service.descendants()
        assert stream_across_sigterm(service) == 300
        assert service.processes[0].wait(END_S) == 0, service.output()
        assert all(has_ended(pid, 2) for pid in below)
        said = [json.loads(line) for line in service.output().splitlines()]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in said)
    messages = "\n".join(line["message"] for line in said)
    for words in (
        "wideep: starting tiny",
        "wideep: loading torch and transformers",
        "Loading kernels",
        "KV cache: ",
        "was killed by SIGKILL",
        "rank 1 serves again",
        "finishing open requests",
        "wideep: stopped",
    ):
        assert words in messages, words


@pytest.mark.slow
def test_sigterm_to_torchrun_lets_a_stream_end_too(model: Path, tmp_path: Path) -> None:
    port = free_port()
    torchrun = Torchrun(
        ["--standalone", "--nproc-per-node=2", "--shutdown-timeout=630"],
        ["worker", str(model), f"--port={port}", "--kv-cache-memory=16M", *PATIENT],
    )
    with RealService(port, [torchrun], tmp_path / "output.txt") as service:
        service.wait_ready()
        below = service.descendants()
        assert stream_across_sigterm(service) == 300
        service.processes[0].wait(END_S)  # exits with torchrun's own status, which is 1 after any signal
        assert all(has_ended(pid, 2) for pid in below)
        assert "the front" in service.output() and "exited with status 0" in service.output()


@pytest.mark.slow
def test_two_torchrun_agents_serve_together_and_both_print_the_address(model: Path, tmp_path: Path) -> None:
    port, rendezvous = free_port(), free_port()
    torchrun = Torchrun(
        [
            *("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d"),
            f"--rdzv-endpoint=127.0.0.1:{rendezvous}",
        ],
        ["worker", str(model), f"--port={port}", "--kv-cache-memory=16M"],
    )
    with RealService(port, [torchrun, torchrun], tmp_path / "output.txt") as service:
        service.wait_ready()
        with OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
            assert complete(client, "the cat") == complete(client, "the cat")
    assert service.output().count(service.url) >= 2


@pytest.mark.slow
def test_a_damaged_scale_ends_the_start_with_its_name(tmp_path: Path) -> None:
    """The expert is on the second rank. The start fails before that rank has read a weight."""
    model, scale = (
        write_tiny_model(tmp_path / "tiny"),
        "model.layers.1.mlp.experts.6.down_proj.weight_scale_inv",
    )
    write_quantised("qwen3_moe", model, block=(32, 32), vocab_size=320)
    change_file(model, lambda tensors: tensors.update({scale: tensors[scale] * float("nan")}))
    with RealService.serve(model, tmp_path / "output.txt") as service:
        wait_until(lambda: service.processes[0].poll() is not None, service.output, within_s=START_S)
        assert service.processes[0].returncode == 1
        said = f"rank 1: QuantisedWeightError: {scale} has a scale of nan; scales must be numbers below 256: "
        assert service.output().count(said) == 1
        assert "Traceback" not in service.output()
