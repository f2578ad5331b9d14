"""Steps in two halves: equal tokens, all ranks alike, and not a bit of any answer differs."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dispatch.errors import DispatchError
from scheduler.policy.config import ConfigError, DispatchMode, HalfThresholds
from scheduler.policy.scheduler import Batch, Scheduled
from scheduler.two_batch import halve
from tests.conftest import PoolOf
from tests.scheduler.test_invariance import Answers, answers_of, collect, requests
from tests.support.families import write_checkpoint
from tests.support.gpu_path import build_interpreted
from tests.support.interpreted import interpret
from tests.support.ranks import RankPool
from tests.support.serving import build, own_share, request, serve

ALWAYS = HalfThresholds(decode_tokens=0, prefill_tokens=0)


def batch_of(num_decodes: int, prompts: list[tuple[int, bool]]) -> Batch:
    """Decodes, then prompts of (tokens, whether the last of them samples); sequences are known by number."""
    items = [Scheduled(index, 7, 1, True) for index in range(num_decodes)]  # type: ignore[arg-type]
    for index, (length, samples) in enumerate(prompts):
        items.append(Scheduled(100 + index, 3, length, samples))  # type: ignore[arg-type]
    num_prefill = sum(length for length, _ in prompts)
    return Batch(items, num_decodes + num_prefill, num_prefill)


@given(st.integers(0, 9), st.lists(st.tuples(st.integers(1, 20), st.booleans()), max_size=4))
def test_halves_have_all_tokens_once_in_order_and_equally_many(
    num_decodes: int, prompts: list[tuple[int, bool]]
) -> None:
    whole = batch_of(num_decodes, prompts)
    halves = halve(whole)
    assert 0 <= halves[0].num_tokens - halves[1].num_tokens <= 1
    tokens = [
        (item.sequence, at) for half in halves for item in half.items for at in range(item.start, item.end)
    ]
    assert tokens == [(item.sequence, at) for item in whole.items for at in range(item.start, item.end)]
    sampled = [(item.sequence, item.end) for half in halves for item in half.items if item.samples]
    assert sampled == [(item.sequence, item.end) for item in whole.items if item.samples]
    for half in halves:
        decodes = half.num_tokens - half.num_prefill_tokens
        assert all(item.num_tokens == 1 and int(item.sequence) < 100 for item in half.items[:decodes])  # type: ignore[call-overload]
        assert all(int(item.sequence) >= 100 for item in half.items[decodes:])  # type: ignore[call-overload]


def test_a_prompt_is_cut_like_any_chunk() -> None:
    first, second = halve(batch_of(1, [(6, True)]))
    assert first.items[1][1:] == (3, 3, False) and second.items[0][1:] == (6, 3, True)
    assert (first.num_prefill_tokens, second.num_prefill_tokens) == (3, 3)


def answers_in_halves(directory: Path, settings: dict[str, Any]) -> tuple[Answers, int, int]:
    """Serve this rank's share of the requests; how many steps there were, and in halves."""
    built = build(directory, max_model_len=160, halves=ALWAYS, **settings)
    answers = collect(serve(built, own_share(requests())).outputs)
    assert built.scheduler.stats.num_free_blocks == built.scheduler.stats.num_blocks
    halves: Any = built.runner._halves
    return answers, built.runner.num_steps, halves.num_halved


@pytest.fixture(
    scope="module",
    params=[
        "deepseek_v3",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("qwen2_moe", "gpt_oss")),
    ],
)
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Answers]:
    """A checkpoint, and every request served alone by one rank: prompts with and without scores, greedy and seeded."""
    directory = tmp_path_factory.mktemp(request.param)
    write_checkpoint(request.param, directory)
    return directory, answers_of(directory, True, 1, enable_prefix_caching=False)


@pytest.mark.parametrize(
    "settings",
    [
        {"all2all_backend": "gloo", "max_num_batched_tokens": 23, "max_num_seqs": 4},
        {"all2all_backend": "shm"},
        pytest.param({"all2all_backend": "shm", "threads": 2}, marks=pytest.mark.slow),
        pytest.param({"all2all_backend": "gloo", "dispatch_node_size": 1}, marks=pytest.mark.slow),
        pytest.param({"dispatch_mode": DispatchMode.LOW_LATENCY}, marks=pytest.mark.slow),
    ],
    ids=["gloo, small chunks", "shm", "two threads", "by node", "low latency"],
)
def test_halves_change_no_bit(alone: tuple[Path, Answers], settings: dict[str, Any], pool_of: PoolOf) -> None:
    directory, wanted = alone
    parts = pool_of(2).run(answers_in_halves, directory, settings)
    assert {key: value for answers, _, _ in parts for key, value in answers.items()} == wanted
    assert [halved for _, _, halved in parts] == [steps for _, steps, _ in parts], "every step"


def answers_of_large_steps(directory: Path) -> tuple[Answers, int, int]:
    built = build(directory, max_model_len=160, halves=HalfThresholds(3, 24), max_num_seqs=8)
    answers = collect(serve(built, own_share(requests())).outputs)
    halves: Any = built.runner._halves
    return answers, built.runner.num_steps, halves.num_halved


def test_steps_below_the_threshold_run_whole_on_all_ranks(
    alone: tuple[Path, Answers], pool_of: PoolOf
) -> None:
    directory, wanted = alone
    parts = pool_of(2).run(answers_of_large_steps, directory)
    assert {key: value for answers, _, _ in parts for key, value in answers.items()} == wanted
    (_, steps, halved), (_, _, others) = parts
    assert 0 < halved == others < steps


def fail_in_the_second_half(directory: Path) -> str:
    """Rank 1's third layer fails in the second half of a step; what each rank is told."""
    built = build(directory, max_model_len=160, halves=ALWAYS, all2all_backend="gloo")
    halves: Any = built.runner._halves
    layer, own = built.model.layers[-1], built.model.layers[-1].run
    asked = own_share([request(str(index), range(3, 9), max_tokens=3) for index in range(2)])

    def run(*arguments: Any) -> Any:
        if halves._turns.current == 1:
            raise ValueError("broken for a test")
        return own(*arguments)

    if asked[0].request_id == "1":
        layer.run = run  # type: ignore[method-assign]
    try:
        serve(built, asked)
    except (DispatchError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        built.runner._model.layers[0].dispatcher.close()  # type: ignore[attr-defined]
    return "no error"


def test_an_error_in_one_half_ends_the_step_on_its_rank_by_name(tmp_path: Path) -> None:
    write_checkpoint("qwen3_moe", tmp_path)
    with RankPool(2, timeout_s=90.0) as pool:
        pool.start(fail_in_the_second_half, tmp_path)
        (told,) = pool.collect(ranks=[1])
    assert told == "ValueError: broken for a test"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, "there is one rank: leave it out"),
        ({"world_size": 2, "device": "cuda"}, "give --enforce-eager with it"),
        ({"world_size": 2, "all2all_backend": "deep_ep"}, "give another --all2all-backend"),
    ],
)
def test_halves_are_refused_by_name_before_anything_is_read(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"--enable-dbo .*{sentence}"):
        build(Path("nowhere"), halves=ALWAYS, **settings)


def served_interpreted(directory: Path, prompts: list[list[int]]) -> tuple[dict[str, list[int]], int]:
    built = build_interpreted(directory, halves=ALWAYS)
    asked = [request(str(index), prompt, max_tokens=3) for index, prompt in enumerate(prompts)]
    served = serve(built, own_share(asked)).token_ids
    halves: Any = built.runner._halves
    return served, halves.num_halved


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton: pip install -r requirements-dev.txt")
@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3"])
def test_interpreted_ranks_serve_transformers_tokens_in_halves(family: str, tmp_path: Path) -> None:
    """With a shared expert beside dispatch too: asked before the experts in one family, after them in the other."""
    oracle = write_checkpoint(family, tmp_path)
    generator = torch.Generator().manual_seed(6)
    prompts = [torch.randint(3, 256, (n,), generator=generator).tolist() for n in (3, 11, 6)]
    with RankPool(2, timeout_s=400.0) as pool:
        pool.run(interpret)
        parts = pool.run(served_interpreted, tmp_path, prompts)
    served = {name: ids for tokens, _ in parts for name, ids in tokens.items()}
    for index, prompt in enumerate(prompts):
        made = oracle.generate(torch.tensor([prompt]), max_new_tokens=3, do_sample=False, eos_token_id=None)
        assert served[str(index)] == made[0, len(prompt) :].tolist()
    assert all(halved > 0 for _, halved in parts)
