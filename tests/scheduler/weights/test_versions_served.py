"""A rank changes its base weights while it serves: answers equal those of a rank that starts with them, and failures change nothing."""

import gc
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe.cpu.weights.slots import PackedSlots
from scheduler.assembly import Assembled
from scheduler.policy.request import RankStats, Request, RequestOutput
from scheduler.policy.speculative import parse_speculative_config
from scheduler.weights.versions import WeightAction, WeightOrder, WeightReport, WeightState
from tests.support.engines.serving import PATIENCE_S, build, request, serve
from tests.support.engines.versions import (
    digests_of,
    serve_version,
    some_names,
    stage,
    tensors_of,
    version,
    write_merged,
    write_other,
    write_tensors,
)
from tests.support.models.families import VOCABULARY, write_checkpoint
from tests.support.models.quantise import write_quantised

LENGTH = 160
FAMILIES = [
    "qwen3_moe",
    pytest.param("qwen3_next", marks=pytest.mark.slow),
    pytest.param("deepseek_v3", marks=pytest.mark.slow),
    pytest.param("gpt_oss", marks=pytest.mark.slow),
]
WAYS: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.9, "seed": 7})


def requests(name: str, count: int = 4, max_tokens: int = 20, **how: Any) -> list[Request]:
    prompts = [[(7 * number + 3 * place) % VOCABULARY for place in range(60)] for number in range(count)]
    return [
        request(f"{name} {number}", prompt, **{"max_tokens": max_tokens, **WAYS[number % 2], **how})
        for number, prompt in enumerate(prompts)
    ]


class Script:
    """Replaces the doorbell: whenever the rank would sleep and has nothing to load, takes the next act."""

    def __init__(self, built: Assembled, *acts: Callable[[], None]) -> None:
        self._weights, self._acts = built.engine.weights, deque((*acts, built.engine.stop))
        self._until_s = time.monotonic() + PATIENCE_S
        built.engine._doorbell = self

    def ring(self, step: int) -> None:
        """Do nothing: no rank sleeps."""

    def wait(self, step: int) -> None:
        assert time.monotonic() < self._until_s, "the weights are not loaded"
        if self._weights._worker is None and not self._weights.has_news:
            self._acts.popleft()()
        else:
            threading.Event().wait(0.001)


class Run:
    """A rank alone, its reports and its outputs."""

    def __init__(self, directory: Path, *, make: Callable[..., Assembled] = build, **how: Any) -> None:
        self.built = make(directory, **{"max_model_len": LENGTH, **how})
        self.reports: list[WeightReport] = []
        self.outputs: list[RequestOutput] = []
        self.stats: list[RankStats] = []
        self.on_output: Callable[[RequestOutput], None] = lambda _output: None
        self.installed_after: list[dict[str, list[int]]] = []  # tokens of all requests at each switch
        weights = self.built.engine.weights
        weights.on_report = self.reports.append
        on_installed = weights.on_installed

        def note(one: Any) -> None:
            self.installed_after.append(self.tokens)
            on_installed(one)

        weights.on_installed = note

    def order(self, order: WeightOrder) -> Callable[[], None]:
        return lambda: self.built.engine.weights.order(order)

    def submit(self, wanted: list[Request]) -> Callable[[], None]:
        def act() -> None:
            for each in wanted:
                self.built.engine.submit(each)

        return act

    def through(self, *acts: Callable[[], None]) -> "Run":
        def on_step(outputs: list[RequestOutput], stats: RankStats) -> None:
            self.outputs += outputs
            self.stats.append(stats)
            for output in outputs:
                self.on_output(output)

        Script(self.built, *acts)
        self.built.engine.run(on_step)
        self.built.engine.close()
        return self

    @property
    def tokens(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for output in self.outputs:
            found.setdefault(output.request_id, []).extend(output.token_ids)
        return found

    def of(self, name: str) -> list[list[int]]:
        return [tokens for key, tokens in sorted(self.tokens.items()) if key.startswith(name)]

    def cached(self, name: str) -> int:
        return sum(each.num_cached_tokens for each in self.outputs if each.request_id.startswith(name))

    @property
    def states(self) -> list[WeightState]:
        return [report.state for report in self.reports]


def fresh(directory: Path, wanted: list[Request], **how: Any) -> list[list[int]]:
    """Return the answers of a rank that starts with these weights."""
    served = serve(build(directory, max_model_len=LENGTH, **how), wanted)
    return [served.token_ids[each.request_id] for each in wanted]


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_after_an_update_are_those_of_a_fresh_rank(family: str, tmp_path: Path) -> None:
    write_checkpoint(family, tmp_path / "a")
    other = write_other(family, tmp_path / "b")
    new = version(1, other)
    run = Run(tmp_path / "a")
    run.through(
        run.submit(requests("before")),
        run.order(stage(new)),
        run.submit(requests("staged")),
        run.order(serve_version(new)),
        run.submit(requests("after")),
        run.submit(requests("again")),
    )
    assert run.states == [WeightState.STAGED, WeightState.SERVING]
    assert run.of("staged") == run.of("before") == fresh(tmp_path / "a", requests("before"))
    assert run.of("after") == run.of("again") == fresh(other, requests("after")) != run.of("before")
    assert run.cached("staged") > 0 and run.cached("after") == 0 and run.cached("again") > 0
    ends = {each.request_id.split()[0]: each.weights for each in run.outputs if each.finish_reason}
    assert ends == {"before": 0, "staged": 0, "after": 1, "again": 1}
    stats = run.built.scheduler.stats
    assert stats.num_free_blocks == stats.num_blocks


NGRAM = parse_speculative_config(
    '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}'
)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "how",
    [
        {},
        pytest.param({"speculative_config": NGRAM}, marks=pytest.mark.slow, id="drafts"),
        pytest.param({"overlaps_steps": True}, marks=pytest.mark.slow, id="overlapped"),
    ],
)
def test_open_requests_continue_with_the_new_weights_from_the_tokens_that_they_have(
    family: str, how: dict[str, Any], tmp_path: Path
) -> None:
    write_checkpoint(family, tmp_path / "a")
    other = write_other(family, tmp_path / "b")
    new, wanted = version(1, other), requests("open", max_tokens=40)
    run = Run(tmp_path / "a", **how)

    def serve_soon(output: RequestOutput) -> None:
        if len(run.tokens.get("open 3", ())) >= 12 and run.built.engine.weights.newest is None:
            run.built.engine.weights.order(serve_version(new))

    run.on_output = serve_soon
    run.through(run.order(stage(new)), run.submit(wanted))
    [before] = run.installed_after
    assert all(len(tokens) >= 4 for tokens in before.values()) and len(before) == 4
    assert len(before["open 3"]) >= 12
    again = [
        Request(**{**vars(each), "replayed_ids": tuple(before[each.request_id])})
        for each in wanted
        if len(before[each.request_id]) < 40
    ]
    rest = dict(zip((each.request_id for each in again), fresh(other, again), strict=True))
    assert rest, "all requests had ended"
    assert run.tokens == {key: tokens + rest.get(key, []) for key, tokens in before.items()}
    stats = run.built.scheduler.stats
    assert stats.num_free_blocks == stats.num_blocks


@pytest.mark.slow
def test_a_partial_update_changes_only_its_tensors(tmp_path: Path) -> None:
    write_checkpoint("qwen3_moe", tmp_path / "a")
    other = write_other("qwen3_moe", tmp_path / "b")
    parts = (
        some_names(other, lambda name: ".layers.1." in name and ".experts.3." in name),
        some_names(other, lambda name: "self_attn" in name or "norm" in name),
    )
    folders = [write_tensors(part, tmp_path / f"part{place}") for place, part in enumerate(parts)]
    first, second = version(1, folders[0], hides=False), version(2, *folders, hides=False)
    run = Run(tmp_path / "a")
    run.through(
        run.order(serve_version(first)),
        run.submit(requests("first")),
        run.order(serve_version(second)),
        run.submit(requests("second")),
    )
    one = write_merged(tmp_path / "a", folders[0], tmp_path / "one")
    both = write_merged(one, folders[1], tmp_path / "both")
    assert run.of("first") == fresh(one, requests("first"))
    assert run.of("second") == fresh(both, requests("second"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_new_weights_are_quantised_as_the_service_is(kind: str, tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        if kind == "fp8":
            write_quantised("qwen3_moe", tmp_path / name, block=(32, 32), seed=seed)
        else:
            write_checkpoint("qwen3_moe", tmp_path / name, seed=seed)
    how = {"quantization": "int8"} if kind == "int8" else {}
    run = Run(tmp_path / "a", **how)
    run.through(run.order(serve_version(version(1, tmp_path / "b"))), run.submit(requests("after")))
    assert run.states == [WeightState.STAGED, WeightState.SERVING]
    assert run.of("after") == fresh(tmp_path / "b", requests("after"), **how)


@pytest.mark.slow
def test_a_tier_never_gives_blocks_of_other_weights(tmp_path: Path) -> None:
    write_checkpoint("qwen3_moe", tmp_path / "a")
    new = version(1, write_other("qwen3_moe", tmp_path / "b"))
    run = Run(tmp_path / "a", kv_offloading_bytes=64 << 20)
    run.through(run.submit(requests("before")), run.order(serve_version(new)), run.submit(requests("after")))
    assert run.cached("after") == 0
    assert run.of("after") == fresh(tmp_path / "b", requests("after"))


def wrong_shape(tensors: dict[str, Any]) -> dict[str, Any]:
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    return {**tensors, name: tensors[name][:, :8]}


def unknown_name(tensors: dict[str, Any]) -> dict[str, Any]:
    return {**tensors, "model.layers.0.self_attn.z_proj.weight": torch.zeros(4, 4)}


def missing_expert(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor for name, tensor in tensors.items() if ".experts.5." not in name}


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (wrong_shape, "q_proj.weight: [64, 8] instead of [64, 64]"),
        (unknown_name, "unexpected: model.layers.0.self_attn.z_proj.weight"),
        (missing_expert, "of expert 5"),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_the_old_ones_serve(
    damage: Callable[[dict[str, Any]], dict[str, Any]], named: str, tmp_path: Path
) -> None:
    write_checkpoint("qwen3_moe", tmp_path / "a")
    other = write_other("qwen3_moe", tmp_path / "b")
    bad = write_tensors(damage(tensors_of(other)), tmp_path / "bad")
    run = Run(tmp_path / "a")
    run.through(
        run.submit(requests("before")), run.order(stage(version(1, bad))), run.submit(requests("after"))
    )
    [report] = run.reports
    assert report.state is WeightState.REFUSED and named in report.reason
    assert run.of("after") == run.of("before") and run.cached("after") > 0
    assert run.built.engine.weights.serving.number == 0


@pytest.mark.slow
def test_a_file_that_changed_since_the_update_began_is_refused(tmp_path: Path) -> None:
    write_checkpoint("qwen3_moe", tmp_path / "a")
    other = write_other("qwen3_moe", tmp_path / "b")
    new = version(1, other)
    write_other("qwen3_moe", tmp_path / "b", seed=2)
    run = Run(tmp_path / "a")
    run.through(run.order(stage(new)))
    [report] = run.reports
    assert report.state is WeightState.REFUSED and "has changed since the update began" in report.reason


@pytest.mark.slow
def test_too_little_memory_is_refused(tmp_path: Path) -> None:
    write_checkpoint("qwen3_moe", tmp_path / "a")
    run = Run(tmp_path / "a")
    parts = run.built.engine.weights._parts
    assert parts is not None
    parts.load.__self__._available = lambda: 1 << 10  # type: ignore[attr-defined]
    run.through(run.order(stage(version(1, write_other("qwen3_moe", tmp_path / "b")))))
    [report] = run.reports
    assert report.state is WeightState.NO_ROOM and "a second copy of the weights" in report.reason


@pytest.mark.slow
def test_a_dropped_version_does_not_serve_and_a_later_one_does(tmp_path: Path) -> None:
    write_checkpoint("qwen3_moe", tmp_path / "a")
    new, newer = (
        version(number, write_other("qwen3_moe", tmp_path / f"b{number}", seed=number)) for number in (1, 2)
    )
    run = Run(tmp_path / "a")
    run.through(
        run.order(stage(new)),
        run.order(WeightOrder(action=WeightAction.DROP, version=new)),
        run.submit(requests("old")),
        run.order(stage(newer)),
        run.order(serve_version(newer)),
        run.submit(requests("new")),
    )
    assert run.of("old") == fresh(tmp_path / "a", requests("old"))
    assert run.of("new") == fresh(tmp_path / "b2", requests("new"))
    assert [report.number for report in run.reports] == [1, 2, 2]


@pytest.mark.slow
def test_check_sums_in_memory_are_those_of_loading_and_show_a_changed_byte(tmp_path: Path) -> None:
    write_checkpoint("qwen3_moe", tmp_path / "a")
    new = version(1, write_other("qwen3_moe", tmp_path / "b"))
    check = WeightOrder(action=WeightAction.CHECK, version=new)
    run = Run(tmp_path / "a")

    def falsify() -> None:
        run.built.model.layers[1].up.at(2).tensors()[""].view(torch.uint8).view(-1)[0] ^= 1
        run.built.engine.weights.order(check)

    run.through(run.order(serve_version(new)), run.order(check), falsify)
    reports = [report for report in run.reports if report.state is not WeightState.SERVING]
    assert [report.state for report in reports[:2]] == [WeightState.STAGED, WeightState.CHECKED]
    staged, checked, false = map(digests_of, reports)
    assert staged.plain == checked.plain
    assert np.array_equal(staged.experts_LE, checked.experts_LE) and (staged.experts_LE != 0).all()
    assert np.argwhere(false.experts_LE != staged.experts_LE).tolist() == [[1, 2]]


@pytest.mark.slow
def test_equal_weights_have_equal_check_sums_and_others_differ(tmp_path: Path) -> None:
    write_checkpoint("qwen3_moe", tmp_path / "a")
    other = write_other("qwen3_moe", tmp_path / "b")
    run = Run(tmp_path / "a")
    run.through(
        *(
            run.order(stage(version(number, folder)))
            for number, folder in enumerate((other, tmp_path / "a", other), 1)
        )
    )
    first, same, last = map(digests_of, run.reports)
    assert first.plain == last.plain != same.plain
    assert np.array_equal(first.experts_LE, last.experts_LE)
    assert (first.experts_LE != same.experts_LE).all()


@pytest.mark.slow
def test_the_memory_of_old_weights_is_freed(tmp_path: Path) -> None:
    write_checkpoint("qwen3_moe", tmp_path / "a")
    orders = [
        serve_version(version(number, write_other("qwen3_moe", tmp_path / f"b{number}", seed=number)))
        for number in (1, 2, 3)
    ]
    run = Run(tmp_path / "a")
    alive: list[int] = []

    def note() -> None:
        alive.append(sum(isinstance(each, PackedSlots) for each in gc.get_objects()))

    gc.collect()  # what earlier tests have left
    run.through(*(act for order in orders for act in (run.order(order), note)))
    assert len(set(alive)) == 1, alive
