"""A request that moves to another rank at every step of its answer gets the bits that it gets without a move.

Two ranks run in lock-step. Before a step they exchange what moves: the rank that released a request passes it with its
delivered tokens, and the other rank submits it. With tiers, a rank also announces what it will release. A control passes a wrong
token.
"""

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from benchmarks.models.foreseeing import foresee
from dispatch.dispatcher import Dispatcher
from scheduler.assembly import Assembled
from scheduler.policy import scheduler as policy
from scheduler.policy import tier_tables
from scheduler.policy.batch import StepBatch
from scheduler.policy.request import Expected, RankStats, Request, RequestOutput, Structure, Withdraw
from scheduler.policy.speculative import parse_speculative_config
from scheduler.step.lockstep import Agreement
from tests.fixtures import PoolOf
from tests.scheduler.drafts.test_served_drafts import MTP, SHARE, SUFFIX, always_draft
from tests.scheduler.test_overlapped_steps import BYTES, DRAWN, END, STOPS, Answer
from tests.support.engines.serving import PATIENCE_S, build, occupy, request, serve
from tests.support.models.families import write_checkpoint
from tests.support.models.mtp import write_mtp_checkpoint

LIMITS = {"max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 40}


def requests(rank: int) -> list[Request]:
    """Return requests of every kind for a rank. All but the last move."""
    prompt = [3 + (7 * each + rank) % 90 for each in range(21)]
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {},
        "seeded": {**DRAWN, "seed": 11 + rank, "top_p": 0.9, "stop_token_ids": STOPS},
        "logprobs": {"num_logprobs": 2, "num_prompt_logprobs": 1, "presence_penalty": 1.0},
        "penalties": {**DRAWN, "repetition_penalty": 1.4, "frequency_penalty": 0.6, "num_logprobs": 0},
        "structured": {
            **DRAWN, "structure": Structure("regex", "[a-f]{9}-[0-9]{1,9}"), "stop_token_ids": (END,), "min_tokens": 2,
        },
        "stays": {**DRAWN, "seed": 3},
    }  # fmt: skip
    return [
        request(f"{kind} {rank}", prompt[: 9 + 2 * number], max_tokens=18, **params)
        for number, (kind, params) in enumerate(kinds.items())
    ]


RequestsOf = Callable[[int], list[Request]]


class Pace(NamedTuple):
    """A request moves whenever it has this number of new tokens at its rank; 0 moves none."""

    of_rank_0: int  # of requests that begin at rank 0
    of_rank_1: int


STAY, BOTH_PACES = Pace(0, 0), Pace(1, 5)


class Mover:
    """Serves a rank's requests and passes those that move to the other rank. Both ranks exchange before every step."""

    def __init__(
        self, built: Assembled, every: Pace, *, falsifies: bool, requests_of: RequestsOf = requests
    ) -> None:
        """`falsifies`: pass a wrong last token. `requests_of`: returns the requests of a rank."""
        self.found: dict[str, Answer] = {}
        self.num_released = 0
        self._engine, self._every, self._falsifies = built.engine, every, falsifies
        self._here = {each.request_id: each for each in requests_of(dist.get_rank())}
        self._num_before = dict.fromkeys(self._here, 0)  # tokens that a request had when it came here
        self._withdrawn = set[str]()
        self._leaving: list[tuple[Request, Answer]] = []
        self._announced: list[Expected] = []
        self._announces = built.engine._tiers is not None
        lockstep = built.engine._lockstep
        assert lockstep is not None, "it serves from the start"
        self._agree = lockstep.agree
        lockstep.agree = self._exchange_and_agree  # type: ignore[method-assign]
        self._engine._doorbell = self

    def run(self) -> None:
        """Serve all requests. Collective."""
        for each in self._here.values():
            self._engine.submit(each)
        self._engine.run(self._on_step)
        self._engine.close()

    def ring(self, step: int) -> None:
        """Do nothing: no rank sleeps."""

    def wait(self, step: int) -> None:
        """Go on: the next exchange may bring a request."""

    def _on_step(self, outputs: list[RequestOutput], _stats: RankStats) -> None:
        for output in outputs:
            name = output.request_id
            own = self.found.setdefault(name, Answer([], [], [], []))
            own.token_ids.extend(output.token_ids)
            own.logprobs.extend(output.logprobs)
            own.prompt_logprobs.extend(output.prompt_logprobs)
            own.ends.extend([output.finish_reason] if output.finish_reason else [])
            if output.is_returned:
                self._release(output)
            elif own.ends:
                assert name in self._here, "an output came after the release"
                del self._here[name]
                if name in self._withdrawn and self._announces:
                    self._announced.append(Expected(name, None))
            elif self._is_due(name):
                self._withdrawn.add(name)
                self._engine.withdraw(Withdraw(name, even_if_begun=True, in_step=True))
                if self._announces:
                    tokens = tuple(self.found[name].token_ids)
                    comes = replace(self._here[name], replayed_ids=tokens)
                    self._announced.append(Expected(name, comes, in_step=True))

    def _is_due(self, name: str) -> bool:
        num_new = len(self.found[name].token_ids) - self._num_before[name]
        every = self._every[int(name[-1])]
        may_move = every and not name.startswith("stays") and name not in self._withdrawn
        return bool(may_move) and num_new >= every

    def _release(self, output: RequestOutput) -> None:
        name = output.request_id
        self.num_released += 1
        self._withdrawn.discard(name)
        answer = self.found.pop(name)
        tokens = answer.token_ids
        if self._falsifies and tokens:
            tokens = [*tokens[:-1], tokens[-1] ^ 1]
        moved = replace(
            self._here.pop(name), replayed_ids=tuple(tokens), num_awaited_tokens=output.num_saved_tokens
        )
        self._leaving.append((moved, answer))

    def _exchange_and_agree(self) -> Agreement:
        everything: list[Any] = [None, None]
        dist.all_gather_object(everything, (self._leaving, self._announced, len(self._here)))
        self._leaving, self._announced = [], []
        if not any(leaving or num_here for leaving, _, num_here in everything):
            self._engine.stop()
        coming, announced, _ = everything[1 - dist.get_rank()]
        for each in announced:
            self._engine.expect(each)
        for moved, answer in coming:
            name = moved.request_id
            self._here[name], self.found[name] = moved, answer
            self._num_before[name] = len(answer.token_ids)
            self._engine.submit(moved)
        return self._agree()


def serve_moving(
    directory: Path,
    every: Pace,
    settings: dict[str, Any],
    falsifies: bool = False,
    known: dict[str, list[int]] | None = None,
    requests_of: RequestsOf = requests,
) -> tuple[dict[str, Answer], int]:
    """Serve both ranks' requests as `Mover` does. Return the answers that ended here, and the number of moves from here.

    `known`: drafts, by request. None: the model drafts, if the settings have drafts. `settings` may have "leaving": the number of
    KV blocks that are left to requests.
    """
    Dispatcher.is_replayable = bool(settings.get("overlaps_steps"))  # as on GPUs
    try:
        drafts = settings.get("speculative_config")
        given = {"speculative_config": parse_speculative_config(drafts)} if drafts else {}
        known_settings = {name: value for name, value in settings.items() if name != "leaving"}
        built = build(directory, load_vocabulary=lambda: BYTES, **{**LIMITS, **known_settings, **given})
        if "leaving" in settings:
            occupy(built, leaving=settings["leaving"])
        num_drafts = [0, 0]
        if drafts:
            rows = {name: [(token, None) for token in tokens] for name, tokens in (known or {}).items()}
            always_draft(rows or None, num_drafts, built)
        free = built.scheduler.stats.num_free_blocks
        mover = Mover(built, every, falsifies=falsifies, requests_of=requests_of)
        mover.run()
        built.engine.close()  # after all jobs of the tiers
        built.scheduler.collect(0.0)
        stats = built.scheduler.stats
        assert stats.num_free_blocks == free, "blocks leaked"
        if stats.tiers is not None and any(every) and not built.num_states:
            assert stats.tiers.disk_load_bytes > 0, "nothing came from the tier"
        assert bool(num_drafts[0]) == bool(drafts), "no draft was right"
        return mover.found, mover.num_released
    finally:
        Dispatcher.is_replayable = False


def both(pool_of: PoolOf, *arguments: Any) -> tuple[dict[str, Answer], int]:
    """Return the answers of both ranks, and how often requests moved."""
    shares = pool_of(2).run(serve_moving, *arguments)
    assert not shares[0][0].keys() & shares[1][0].keys(), "a request has one outcome"
    return shares[0][0] | shares[1][0], shares[0][1] + shares[1][1]


def unmoved(pool_of: PoolOf, directory: Path, settings: dict[str, Any]) -> dict[str, Answer]:
    """Return the answers of requests that do not move."""
    wanted, num_moves = both(pool_of, directory, STAY, settings)
    assert num_moves == 0 and len(wanted) == 12
    return wanted


def check(
    pool_of: PoolOf, directory: Path, settings: dict[str, Any], wanted: dict[str, Answer], *, least: int = 36
) -> None:
    """Compare with no move: requests that begin at rank 0 move after every token, the others after several ones."""
    found, num_moves = both(pool_of, directory, BOTH_PACES, settings)
    assert found == wanted
    assert num_moves >= least, "requests moved after every few tokens"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint."""
    made: Path = tmp_path_factory.mktemp("moved")
    write_checkpoint("qwen3_moe", made)
    return made


Served = Callable[[str], tuple[Path, dict[str, Answer]]]


@pytest.fixture(scope="module")
def made() -> dict[str, tuple[Path, dict[str, Answer]]]:
    """Return what `served` has made, by family."""
    return {}


@pytest.fixture
def served(
    pool_of: PoolOf, tmp_path_factory: pytest.TempPathFactory, made: dict[str, tuple[Path, dict[str, Answer]]]
) -> Served:
    """Return `served(family)`: a checkpoint and the answers of requests that do not move, made once."""

    def serve_once(family: str) -> tuple[Path, dict[str, Answer]]:
        if family not in made:
            directory = tmp_path_factory.mktemp(family)
            write_checkpoint(family, directory)
            made[family] = directory, unmoved(pool_of, directory, {})
        return made[family]

    return serve_once


@pytest.mark.crossed("settings", every=2)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"overlaps_steps": True},
        pytest.param({"enable_prefix_caching": False}, marks=pytest.mark.slow),
        pytest.param({"max_num_seqs": 3, "max_num_batched_tokens": 9}, marks=pytest.mark.slow),
    ],
)
def test_requests_of_every_kind_move_at_every_step(
    pool_of: PoolOf, served: Served, settings: dict[str, Any]
) -> None:
    directory, wanted = served("qwen3_moe")
    check(pool_of, directory, settings, wanted)


@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_drafted_requests_move_at_every_step(pool_of: PoolOf, served: Served, family: str) -> None:
    """Most drafts are right, so a step yields several tokens of a request."""
    directory, wanted = served(family)
    known = {name: answer.token_ids for name, answer in wanted.items()}
    found, num_moves = both(pool_of, directory, BOTH_PACES, {"speculative_config": SUFFIX}, False, known)
    assert found == wanted and num_moves >= 18


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v3", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_requests_with_drafts_of_the_model_move_at_every_step(
    pool_of: PoolOf, tmp_path: Path, family: str
) -> None:
    write_mtp_checkpoint(family, tmp_path, num_layers=1, change=partial(foresee, share=SHARE))
    check(pool_of, tmp_path, {"speculative_config": MTP}, unmoved(pool_of, tmp_path, {}), least=18)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3_next", {}),
        pytest.param("qwen3_next", {"overlaps_steps": True}, marks=pytest.mark.slow),
        pytest.param("nemotron_h", {"enable_prefix_caching": False}, marks=pytest.mark.slow),
        pytest.param("deepseek_v32", {}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", {}, marks=pytest.mark.slow),
    ],
)
def test_requests_of_recurrent_and_sparse_models_move_at_every_step(
    pool_of: PoolOf, served: Served, family: str, settings: dict[str, Any]
) -> None:
    directory, wanted = served(family)
    check(pool_of, directory, settings, wanted)


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_moe",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_next", "deepseek_v32", "gpt_oss")),
    ],
)
def test_requests_that_move_find_their_blocks_in_a_tier_under_constant_eviction(
    pool_of: PoolOf, served: Served, tmp_path: Path, family: str
) -> None:
    """Both ranks share a folder. Each has blocks for a third of its requests, so most are evicted before they return."""
    directory, wanted = served(family)
    disk = {"kv_offloading_dir": str(tmp_path / "kv"), "kv_offloading_disk_bytes": 64 << 20, "leaving": 9}
    found, num_moves = both(pool_of, directory, Pace(5, 5), disk)
    assert found == wanted and num_moves >= 12


@pytest.mark.slow
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_drafted_requests_that_move_find_their_blocks_in_a_tier_under_constant_eviction(
    pool_of: PoolOf, served: Served, tmp_path: Path, family: str, kv_cache_dtype: str
) -> None:
    directory, wanted = served(family)
    coded = {"kv_cache_dtype": kv_cache_dtype}
    if kv_cache_dtype != "auto":
        wanted = unmoved(pool_of, directory, coded)
    known = {name: answer.token_ids for name, answer in wanted.items()}
    disk = {"kv_offloading_dir": str(tmp_path / "kv"), "kv_offloading_disk_bytes": 64 << 20, "leaving": 9}
    settings = {"speculative_config": SUFFIX, **disk, **coded}
    found, num_moves = both(pool_of, directory, Pace(3, 3), settings, False, known)
    assert found == wanted and num_moves >= 10


@pytest.mark.slow
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])
def test_requests_with_a_cache_in_8_bits_move_at_every_step(
    pool_of: PoolOf, served: Served, kv_cache_dtype: str
) -> None:
    directory, _ = served("qwen3_moe")
    coded = {"kv_cache_dtype": kv_cache_dtype}
    check(pool_of, directory, coded, unmoved(pool_of, directory, coded))


@pytest.mark.parametrize("in_step", [True, False], ids=["the same pool", "another pool"])
def test_a_step_waits_for_a_request_that_another_rank_is_releasing(
    directory: Path, monkeypatch: pytest.MonkeyPatch, in_step: bool
) -> None:
    """One rank plays both parts. The request comes while its step waits, and continues in it without a token computed again."""
    monkeypatch.setattr(policy, "MOST_HOLD_S", PATIENCE_S)
    monkeypatch.setattr(tier_tables, "MOST_AWAIT_S", PATIENCE_S)
    moves = request("moves", range(3, 12), max_tokens=30)
    stays = request("stays", range(30, 40), max_tokens=40)
    wanted = serve(build(directory, **LIMITS), [moves, stays]).token_ids
    built = build(directory, **LIMITS, kv_offloading_bytes=64 << 20)
    engine, run, leaving = built.engine, built.runner.run, list[Request]()
    found: dict[str, list[int]] = {"moves": [], "stays": []}
    num_computed: dict[str, list[int]] = {"moves": [], "stays": []}  # in each step

    class News(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if leaving:
                engine.submit(leaving.pop())
            return super().wait(timeout)

    def recorded(batch: StepBatch, *arguments: Any, **options: Any) -> Any:
        for item in batch.items:
            num_computed[item.sequence.request.request_id].append(item.num_tokens)
        return run(batch, *arguments, **options)

    def on_step(outputs: list[RequestOutput], _stats: RankStats) -> None:
        for output in outputs:
            found[output.request_id] += output.token_ids
        so_far = replace(moves, replayed_ids=tuple(found["moves"]))
        if any(output.is_returned for output in outputs):
            leaving.append(replace(so_far, num_awaited_tokens=outputs[0].num_saved_tokens))
        elif outputs and len(found["moves"]) in (1, 6, 7, 8, 9, 22):
            engine.expect(Expected("moves", so_far, in_step))
            engine.withdraw(Withdraw("moves", even_if_begun=True, in_step=in_step))

    built.runner.run = recorded  # type: ignore[method-assign]
    engine._has_news = News()
    engine.waves.append([moves, stays])  # type: ignore[attr-defined]
    engine.run(on_step)
    engine.close()
    assert found == wanted
    assert num_computed == {"moves": [9, *[1] * 29], "stays": [10, *[1] * 39]}
    built.scheduler.collect(0.0)
    assert built.scheduler.stats.num_free_blocks == built.scheduler.stats.num_blocks


def test_a_step_waits_only_a_moment_for_a_request_that_does_not_come(directory: Path) -> None:
    built = build(directory, **LIMITS, kv_offloading_bytes=64 << 20)
    never = replace(request("never", range(3, 12)), replayed_ids=(4, 5))
    stays = request("stays", range(30, 40), max_tokens=20)
    built.engine.expect(Expected("never", never))
    assert len(serve(built, [stays]).token_ids["stays"]) == 20
    built.scheduler.expect(Expected("never", never, in_step=True), 1.0)
    waits = partial(built.scheduler.receive_moved, begun_s=1.0)
    assert waits(1.01, is_releasing=True) == pytest.approx(policy.MOST_HOLD_S - 0.01)
    assert waits(1.0 + policy.MOST_HOLD_S, is_releasing=True) == waits(1.01, is_releasing=False) == 0.0
    assert waits(1.01, begun_s=0.99, is_releasing=True) == 0.0, (
        "it was announced while the step waited for another one"
    )
    built.scheduler.expect(Expected("never", never), 1.0)
    assert waits(1.01, is_releasing=False) > 0.0, "ranks of different pools agree on no step"
    built.scheduler.expect(Expected("never", None), 1.0)
    assert waits(1.01, is_releasing=True) == 0.0
    built.engine.close()


def test_a_wrong_token_in_a_move_is_seen(pool_of: PoolOf, served: Served) -> None:
    directory, wanted = served("qwen3_moe")
    found, _ = both(pool_of, directory, Pace(5, 5), {}, True)
    assert found != wanted


def test_a_release_is_delivered_before_the_next_step_runs(directory: Path) -> None:
    """So the other rank can begin the request a step earlier. The step's own outputs follow it."""
    built, events = build(directory, **LIMITS), list[str]()
    run = built.runner.run

    def recorded(*arguments: Any, **options: Any) -> Any:
        events.append("run")
        return run(*arguments, **options)

    def on_step(outputs: list[RequestOutput], stats: RankStats) -> None:
        for output in outputs:
            events.append(f"{output.request_id} {'returned' if output.is_returned else stats.num_running}")
        if events[-2:] == ["moves 2", "stays 2"] and "moves returned" not in events:
            built.engine.withdraw(Withdraw("moves", even_if_begun=True))

    built.runner.run = recorded  # type: ignore[method-assign]
    wave = [request("moves", range(3, 12), max_tokens=9), request("stays", range(30, 40), max_tokens=3)]
    built.engine.waves.append(wave)  # type: ignore[attr-defined]
    built.engine.run(on_step)
    assert events[:6] == ["run", "moves 2", "stays 2", "moves returned", "run", "stays 1"]
    assert built.scheduler.stats.num_free_blocks == built.scheduler.stats.num_blocks
