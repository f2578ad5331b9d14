"""Overlapped steps serve the same answers as steps one after another, and plan a step before the one before is read.

Engines on the CPU compute a step at its launch. They replace a device, which queues work in the same order.
"""

import operator
import random
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from scheduler.assembly import Assembled, assemble
from scheduler.epochs.orders import Order
from scheduler.policy.batch import StepBatch
from scheduler.policy.config import EngineConfig
from scheduler.policy.request import FinishReason, RankStats, Request, RequestOutput, Structure, TokenBias
from scheduler.sampling.device_sampler import DeviceSampler
from scheduler.step.overlap import OverlappedSteps
from scheduler.step.plan_time import PlanTime
from scheduler.step.runner import Underway
from scheduler.structure.compiler import Vocabulary
from tests.support.engines.serving import WaveDoorbell, build, occupy, request, serve
from tests.support.gpu.path import build_interpreted
from tests.support.models.families import VOCABULARY, make_model, write_checkpoint
from tests.support.models.no_reads import NoReads
from tests.support.ranks import RankPool
from tests.support.requests.logprobs import close

END = 2
BYTES = Vocabulary(
    tokens=(b"<pad>", b"<begin>", b"<end>", *(bytes([byte]) for byte in range(3, VOCABULARY))),
    special_ids=frozenset({0, 1, END}),
    end_ids=frozenset({END}),
)
STOPS = tuple(range(0, VOCABULARY, 9))  # a request with these ends after some ten tokens
DRAWN: dict[str, Any] = {"temperature": 1.0}
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"stop_token_ids": STOPS},
    {**DRAWN, "stop_token_ids": STOPS, "top_p": 0.9},
    {**DRAWN, "top_k": 20, "min_p": 0.01, "num_logprobs": 1},
    {**DRAWN, "repetition_penalty": 1.4, "frequency_penalty": 0.6, "presence_penalty": 0.4},
    {"frequency_penalty": 1.5, "logit_bias": (TokenBias(9, 50.0), TokenBias(10, 50.0))},
    {"num_logprobs": 2, "num_prompt_logprobs": 1, "presence_penalty": 1.0},
    {**DRAWN, "min_tokens": 4, "stop_token_ids": STOPS, "num_logprobs": 0},
    {"bad_words": tuple((one, two) for one in range(0, 200, 3) for two in range(0, 200, 2)), **DRAWN},
    {**DRAWN, "structure": Structure("regex", "[a-f]{2}-[0-9]{1,9}"), "stop_token_ids": (END,)},
)


class Workload(NamedTuple):
    """Requests by the number of steps after which they arrive, and the requests that are aborted after a number of steps."""

    arrivals: deque[tuple[int, Request]]
    aborts: dict[int, str]


def workload(seed: int, *, count: int, longest: int = 24, with_structures: bool = True) -> Workload:
    """Draw requests of all kinds; several of a prompt with their own seeds; some with a long shared prefix."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, VOCABULARY) for _ in range(40)]
    arrivals, at = list[tuple[int, Request]](), 0
    kinds = KINDS if with_structures else KINDS[:-1]
    while len(arrivals) < count:
        tail = [rng.randrange(3, VOCABULARY) for _ in range(rng.choice([1, 3, 16, 17, 45]))]
        prompt = shared + tail if rng.random() < 0.4 else tail
        fields = rng.choice(kinds)
        for _ in range(rng.choice([1, 1, 2])):
            name = f"{len(arrivals)}"
            made = request(name, prompt, max_tokens=rng.randint(1, longest), seed=rng.randrange(99), **fields)
            arrivals.append((at, made))
        at += rng.choice([0, 0, 1, 3, 9])
    aborts = {rng.randrange(1, at + 9): f"{rng.randrange(count)}" for _ in range(count // 6)}
    return Workload(deque(arrivals), aborts)


class Answer(NamedTuple):
    """What a request got."""

    token_ids: list[int]
    logprobs: list[Any]
    prompt_logprobs: list[Any]
    ends: list[FinishReason]


def on_all_ranks(count: int) -> int:
    """Return the sum over all ranks. Collective."""
    if not dist.is_initialized():
        return count
    dist.all_reduce(total := torch.tensor(count))
    return int(total)


def answers(built: Assembled, given: Workload) -> dict[str, Answer]:
    """Serve a workload to its end. Requests arrive and are aborted between steps. Collective; ranks have their own workloads."""
    found: dict[str, Answer] = {}
    arrivals, engine, steps = deque(given.arrivals), built.engine, 0

    def submit_due() -> None:
        while arrivals and arrivals[0][0] <= steps:
            engine.submit(arrivals.popleft()[1])

    def on_step(outputs: list[RequestOutput], _stats: RankStats) -> None:
        nonlocal steps
        steps += 1
        for output in outputs:
            own = found.setdefault(output.request_id, Answer([], [], [], []))
            assert not own.ends, "an output came after the end"
            own.token_ids.extend(output.token_ids)
            own.logprobs.extend(output.logprobs)
            own.prompt_logprobs.extend(output.prompt_logprobs)
            own.ends.extend([output.finish_reason] if output.finish_reason else [])
        submit_due()
        if steps in given.aborts:
            engine.abort(given.aborts[steps])

    class Doorbell:
        """Goes on to the next arrival instead of sleeping."""

        def ring(self, step: int) -> None: ...

        def wait(self, step: int) -> None:
            nonlocal steps
            has_own = bool(built.structures._waiting or engine._inbox)
            if not on_all_ranks(len(arrivals) + has_own):
                engine.stop()
                return
            if arrivals and not has_own:
                steps = max(steps, arrivals[0][0])
                submit_due()
            until_s = time.monotonic() + 60
            while built.structures._waiting:
                assert time.monotonic() < until_s, "the structures were not compiled in time"
                time.sleep(0.0005)

    engine._doorbell = Doorbell()
    free = built.scheduler.stats.num_free_blocks
    engine.run(on_step)
    assert built.scheduler.stats.num_free_blocks == free, "blocks leaked"
    assert engine._overlapped is None or not engine._overlapped.is_running
    assert not built.scheduler.has_work
    return found


def check_same(
    found: dict[str, Answer], wanted: dict[str, Answer], same: Callable[[Any, Any], bool] = operator.eq
) -> None:
    """Compare answers, and logprobs with `same`. An aborted request may end sooner or later, so one answer begins with the other."""
    assert found.keys() == wanted.keys()
    for name, ours in found.items():
        theirs = wanted[name]
        assert len(ours.ends) == len(theirs.ends) == 1
        if FinishReason.ABORT in (*ours.ends, *theirs.ends):
            count = min(len(ours.token_ids), len(theirs.token_ids))
            assert ours.token_ids[:count] == theirs.token_ids[:count]
            ours, theirs = (each._replace(logprobs=each.logprobs[:count]) for each in (ours, theirs))
        else:
            assert (ours.token_ids, ours.ends) == (theirs.token_ids, theirs.ends)
            assert len(ours.logprobs) == len(theirs.logprobs)
            assert len(ours.prompt_logprobs) == len(theirs.prompt_logprobs)
            assert all(map(same, ours.prompt_logprobs, theirs.prompt_logprobs))
        for one, other in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert same(one, other), (name, one, other)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint."""
    made: Path = tmp_path_factory.mktemp("overlapped")
    make_model("qwen3_moe", num_hidden_layers=2).save_pretrained(made)
    return made


def engine_of(directory: Path, *, overlaps: bool, **settings: Any) -> Assembled:
    limits = {"max_model_len": 128, "max_num_seqs": 6, "max_num_batched_tokens": 40, **settings}
    return build(directory, load_vocabulary=lambda: BYTES, overlaps_steps=overlaps, **limits)


@pytest.mark.crossed("seed", every=2)
@pytest.mark.parametrize(
    ("seed", "settings", "leaving"),
    [
        (0, {}, None),
        (1, {"max_num_seqs": 3, "max_num_batched_tokens": 9}, None),
        (5, {}, 9),  # a small cache preempts
        (6, {"enable_prefix_caching": False}, 9),
    ],
)
def test_overlapped_steps_give_every_request_the_same_bits(
    directory: Path, seed: int, settings: dict[str, Any], leaving: int | None
) -> None:
    both = []
    for overlaps in (False, True):
        built = engine_of(directory, overlaps=overlaps, **settings)
        if leaving is not None:
            occupy(built, leaving=leaving)
        log = log_of(built)
        longest = 24 if leaving is None else 80
        both.append(answers(built, workload(seed, count=18, longest=longest)))
        assert (num_behind(log) > 9) == overlaps
        if leaving is not None:
            assert built.scheduler.stats.num_preemptions > 0
    check_same(both[1], both[0])


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3_next", {}),
        pytest.param("qwen3_next", {"enable_prefix_caching": False}, marks=pytest.mark.slow),
        pytest.param("nemotron_h", {"max_num_seqs": 3, "max_num_batched_tokens": 9}, marks=pytest.mark.slow),
        pytest.param("minimax", {}, marks=pytest.mark.slow),
    ],
)
def test_overlapped_steps_of_recurrent_models_give_every_request_the_same_bits(
    tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    """A step writes the state that the one before it reads: the device runs them in order."""
    write_checkpoint(family, tmp_path)
    both = []
    for overlaps in (False, True):
        built = engine_of(tmp_path, overlaps=overlaps, **settings)
        log = log_of(built)
        both.append(answers(built, workload(7, count=12)))
        assert (num_behind(log) > 9) == overlaps and built.num_states > 0
    check_same(both[1], both[0])


def overlapped_of(built: Assembled) -> OverlappedSteps:
    assert built.engine._overlapped is not None
    return built.engine._overlapped


def log_of(built: Assembled) -> list[tuple[str, StepBatch]]:
    """Record launches and reads of an engine's steps, in order."""
    log: list[tuple[str, StepBatch]] = []
    launch, read = built.runner.launch, built.runner.read

    def launched(batch: StepBatch, *arguments: Any, **options: Any) -> Any:
        log.append(("launch", batch))
        return launch(batch, *arguments, **options)

    def was_read(underway: Any) -> Any:
        log.append(("read", underway.batch))
        return read(underway)

    built.runner.launch, built.runner.read = launched, was_read  # type: ignore[method-assign]
    return log


def num_behind(log: list[tuple[str, StepBatch]]) -> int:
    """Count the steps that were launched before the one before was read."""
    count = unread = 0
    for event, _ in log:
        count += event == "launch" and unread > 0
        unread += 1 if event == "launch" else -1
        assert unread <= 2, "more than one step runs behind another"
    return count


def test_a_stop_token_is_found_a_step_late_and_no_token_follows_it(directory: Path) -> None:
    """The row behind it runs and is dropped. Another request goes on, and the blocks return."""
    asked = [
        request("stops", range(3, 20), max_tokens=40, stop_token_ids=tuple(range(0, VOCABULARY, 3))),
        request("goes on", range(30, 35), max_tokens=40),
    ]
    served, rows = [], []
    for overlaps in (False, True):
        built = engine_of(directory, overlaps=overlaps)
        served.append(serve(built, asked))
        figures = built.runner.figures
        rows.append((figures.prefill_tokens, figures.decode_tokens))
        assert built.scheduler.stats.num_free_blocks == built.scheduler.stats.num_blocks
    alone, behind = served
    assert behind.token_ids == alone.token_ids
    assert 1 < len(behind.token_ids["stops"]) < 40 == len(behind.token_ids["goes on"])
    assert rows[1] == (rows[0][0], rows[0][1] + 1), "the step that was launched too early has one row more"


def test_a_request_alone_runs_no_step_after_its_last_one(directory: Path) -> None:
    """Lengths are known ahead. The tokens of the last step are read at once."""
    built = engine_of(directory, overlaps=True)
    log = log_of(built)
    served = serve(built, [request("0", range(3, 9), max_tokens=5)])
    assert len(served.token_ids["0"]) == 5
    assert [event for event, _ in log] == ["launch", *["launch", "read"] * 4, "read"]


def test_a_structure_makes_steps_wait_only_while_it_is_served(directory: Path) -> None:
    built = engine_of(directory, overlaps=True)
    log = log_of(built)
    form = Structure("choice", '["red", "green"]')
    served = serve(
        built,
        [
            request("formed", range(3, 9), structure=form, stop_token_ids=(END,)),
            request("free", range(30, 36), max_tokens=30),
        ],
    )
    assert bytes(served.token_ids["formed"]).rstrip(bytes([END])) in (b"red", b"green")
    waits = [
        any(item.sequence.has_structure for item in batch.items) for event, batch in log if event == "launch"
    ]
    unread, behind = 0, []
    for event, _ in log:
        if event == "launch":
            behind.append(unread > 0)
        unread += 1 if event == "launch" else -1
    assert 3 <= sum(waits) <= 8
    for number, is_behind in enumerate(behind[1:], 1):
        assert is_behind == (not waits[number - 1]), (
            "only a step with a structure is read before the next launch"
        )


class Device:
    """A device and a host on one clock: launches are queued, reads wait for them, and the host's work takes time."""

    def __init__(self, built: Assembled, step_ms: float, host_ms: dict[str, float]) -> None:
        self.now_ms = self.free_ms = self.idle_ms = 0.0
        self.events: list[str] = []
        self._ends: deque[float] = deque()
        self._step_ms, self._host_ms = step_ms, host_ms
        for owner, name in (
            (built.scheduler, "schedule"), (built.runner, "launch"), (built.runner, "read"), (built.scheduler, "commit"),
        ):  # fmt: skip
            setattr(owner, name, self._timed(name, getattr(owner, name)))

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            self.events.append(name)
            self.now_ms += self._host_ms.get(name, 0.0)
            if name == "launch":
                self.idle_ms += max(0.0, self.now_ms - self.free_ms)
                self.free_ms = max(self.now_ms, self.free_ms) + self._step_ms
                self._ends.append(self.free_ms)
            if name == "read":
                self.now_ms = max(self.now_ms, self._ends.popleft())
            return call(*arguments, **options)

        return timed


def test_the_gpu_s_sampler_gives_every_request_the_same_bits(directory: Path) -> None:
    """Its reads come after the next launch. A row that a rule masks is read before, as the CPU may choose it again."""
    both = []
    for overlaps in (False, True):
        built = engine_of(directory, overlaps=overlaps)
        built.runner._sampler = DeviceSampler(built.model.device)
        log = log_of(built)
        both.append(answers(built, workload(4, count=18)))
        assert (num_behind(log) > 5) == overlaps
    check_same(both[1], both[0])


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_step_is_planned_and_launched_before_the_one_before_is_read(
    directory: Path, overlaps: bool
) -> None:
    """Then the device is never idle, as long as a step takes longer than the host's work for it."""
    built = engine_of(directory, overlaps=overlaps)
    device = Device(built, 10.0, {"schedule": 1.0, "launch": 2.0, "commit": 4.0})
    serve(built, [request("0", range(3, 9), max_tokens=20), request("1", range(40, 49), max_tokens=20)])
    in_turn = ["schedule", "launch", "read", "commit"]
    if overlaps:
        # The first step, 19 behind another, then nothing to launch; and a plan when all have ended.
        assert device.events == [*in_turn[:2], *in_turn * 19, "schedule", *in_turn[2:], "schedule"]
    else:
        assert device.events == in_turn * 21, "the last one is a step of padded rows"
    assert device.idle_ms == (3.0 if overlaps else 3.0 + 20 * 7.0)


def test_an_arrival_waits_for_one_step_at_most_and_the_device_stays_busy(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans are late: 10 ms a step, less 1.25 times the 3 ms from plan to launch, less the margin. The next step has the
    whole prompt of a request that arrives before, although it was not announced."""
    built = engine_of(directory, overlaps=True)
    device = Device(built, 10.0, {"schedule": 1.0, "launch": 2.0, "commit": 0.5})
    monkeypatch.setattr("scheduler.step.runner.perf_counter_ns", lambda: int(device.now_ms * 1e6))
    slept_ms: list[float] = []
    log = log_of(built)
    num_launched = 0

    def sleep(seconds: float) -> None:
        nonlocal num_launched
        slept_ms.append(seconds * 1e3)
        device.now_ms += seconds * 1e3
        if len(slept_ms) == 5:
            built.engine.submit(request("1", range(40, 60), max_tokens=1))
            num_launched = sum(event == "launch" for event, _ in log)

    overlapped_of(built).plan_time = PlanTime(clock=lambda: device.now_ms / 1e3, sleep=sleep)
    serve(built, [request("0", range(3, 9), max_tokens=30)])
    assert device.idle_ms == 3.0, "only before the first step"
    # The commit comes after a step's begin and before the wait.
    assert slept_ms == [pytest.approx(10.0 - 0.5 - 1.25 * 3.0 - 1.0)] * len(slept_ms) and len(slept_ms) > 15
    launched = [batch for event, batch in log if event == "launch"]
    assert [each.num_prefill_tokens for each in launched[num_launched - 1 : num_launched + 2]] == [0, 20, 0]


def test_a_stop_delivers_the_running_step_s_tokens(directory: Path) -> None:
    built = engine_of(directory, overlaps=True)
    tokens: list[int] = []
    steps = 0

    def on_step(outputs: list[RequestOutput], _stats: RankStats) -> None:
        nonlocal steps
        steps += 1
        for output in outputs:
            tokens.extend(output.token_ids)
        if steps == 5:
            assert overlapped_of(built).is_running
            built.engine.stop()

    built.engine.submit(request("0", range(3, 9), max_tokens=40))
    built.engine.run(on_step)
    log = [len(built.scheduler.running[0].token_ids) - 6, len(tokens)]
    assert not overlapped_of(built).is_running and log[0] == log[1] > 4


def test_an_order_commits_the_running_step_and_changes_no_token(directory: Path) -> None:
    """The next epoch continues with the step that follows it."""
    asked = request("0", range(3, 9), max_tokens=20)
    wanted = serve(engine_of(directory, overlaps=False), [asked]).token_ids["0"]
    config = EngineConfig(
        directory=directory, kv_cache_bytes=8 << 20, max_model_len=128, max_num_seqs=6, overlaps_steps=True
    )
    built = assemble(config, WaveDoorbell(), store=HashStore(), is_joining=True)
    engine, tokens, epochs, steps = built.engine, list[int](), list[int](), 0

    def on_step(outputs: list[RequestOutput], _stats: RankStats) -> None:
        nonlocal steps
        steps += 1
        for output in outputs:
            tokens.extend(output.token_ids)
            if output.finish_reason is not None:
                engine.stop()
        if steps in (5, 9):
            assert overlapped_of(built).is_running
            engine.regroup(Order(len(epochs) + 1, (0,), built.relocation.placement))

    engine.tell_membership(lambda *_, **__: None, epochs.append)
    engine.regroup(Order(1, (0,), built.relocation.placement))
    engine.submit(asked)
    engine.run(on_step)
    engine.close()
    assert epochs == [1, 2, 3] and tokens == wanted


def forbid_reads(built: Assembled) -> None:
    """Raise an error if the host reads from the device while it launches or samples a step of decodes."""
    launch, sample = built.runner.launch, built.runner.sample

    def launched(batch: StepBatch, *arguments: Any, **options: Any) -> Underway:
        with nullcontext() if batch.num_prefill_tokens else NoReads():
            return launch(batch, *arguments, **options)

    def sampled(underway: Underway) -> None:
        with NoReads():
            sample(underway)

    built.runner.launch, built.runner.sample = launched, sampled  # type: ignore[method-assign]


def overlapped_and_not(directory: Path, seed: int) -> tuple[dict[str, Answer], dict[str, Answer], int]:
    """Serve a workload twice on the GPU path. No launch waits for the device. Return also how many steps were launched behind another."""
    found = []
    for overlaps in (False, True):
        built = build_interpreted(
            directory, load_vocabulary=lambda: BYTES, batch_invariant=True, overlaps_steps=overlaps
        )
        forbid_reads(built)
        log = log_of(built)
        found.append(answers(built, workload(seed, count=8, longest=8)))
    return found[0], found[1], num_behind(log)


@pytest.mark.slow
def test_the_gpu_path_gives_the_same_answers(interpreter: RankPool, directory: Path) -> None:
    # The logprobs of the two ways of sampling differ by up to 3e-7 here: `close` allows the rounding of their sums.
    wanted, found, count = interpreter.run(overlapped_and_not, directory, 0, timeout_s=400.0)[0]
    assert count >= 5
    check_same(found, wanted, close)
