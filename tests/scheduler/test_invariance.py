"""A request gets the same bits in any batch, with any chunks, and on any number of ranks.

Tokens and the float bits of their logprobs are compared, for greedy and seeded requests, with one rank that
serves each request alone in one chunk.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from expert_placement.files import save_placement
from moe.model import Skeleton
from scheduler.assembly import Assembled
from scheduler.policy.config import DispatchMode
from scheduler.policy.request import Request, RequestOutput, TokenBias
from tests.fixtures import PoolOf
from tests.support.engines.serving import build, occupy, own_share, request, serve
from tests.support.models.families import VOCABULARY, write_checkpoint
from tests.support.placement.placements import random_placement


def with_slow(*families: str) -> tuple[Any, ...]:
    """Return families with full, windowed, latent and recurrent layers, and some that are slow tests."""
    slow = (pytest.param(family, marks=pytest.mark.slow) for family in families)
    return ("qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next", *slow)


FAMILIES = with_slow("nemotron_h", "kimi_linear", "deepseek_v32", "hy_v4", "glm5_next", "llama4")
# For what saves and loads blocks: each kind of block and of state once. Those of nemotron_h are as in qwen3_next, those of hy_v4
# as in deepseek_v32.
SAVED_FAMILIES = with_slow("kimi_linear", "deepseek_v32", "glm5_next", "llama4")
one_family_first = pytest.mark.parametrize(
    "served_alone",
    ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.slow)],
    indirect=True,
    scope="module",
)
"""For what lies below the model. In `make test-all` also experts with biases."""
Answers = dict[str, list[tuple[int, float]]]  # request id to (token, logprob) of every position


def requests() -> list[Request]:
    """Return greedy and seeded requests of many lengths. Some share long prefixes."""
    generator = torch.Generator().manual_seed(3)
    shared = torch.randint(3, VOCABULARY, (40,), generator=generator).tolist()
    made = []
    for index, length in enumerate((1, 5, 16, 17, 33, 50, 7, 64)):
        tail = torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
        prompt = shared + tail if index % 2 else tail
        params = {"temperature": 0.9, "seed": index, "top_p": 0.95} if index % 3 else {"temperature": 0.0}
        made.append(request(f"{index}", prompt, max_tokens=20, num_logprobs=0, **params, **EXTRAS[index]))
    return made


# Further parameters, each in two requests: greedy and seeded, or with and without a shared prefix.
EXTRAS: tuple[dict[str, Any], ...] = (
    {"logit_bias": (TokenBias(7, 3.5), TokenBias(9, -100.0))},
    {"allowed_token_ids": tuple(range(5, 200, 3)), "num_prompt_logprobs": 2, "repetition_penalty": 1.2},
    {"bad_words": tuple((token,) for token in range(0, 120, 2)), "num_prompt_logprobs": 0},
    {
        "frequency_penalty": 0.5,
        "presence_penalty": 0.3,
        "num_prompt_logprobs": 1,
        "logprob_token_ids": (5, 6),
    },
    {
        "min_p": 0.02,
        "top_k": 30,
        "bad_words": tuple((each, other) for each in range(9) for other in range(9)),
    },
    {"num_prompt_logprobs": 0},
    {"min_tokens": 12, "stop_token_ids": tuple(range(0, 256, 2)), "allowed_token_ids": tuple(range(40))},
    {"logit_bias": tuple(TokenBias(token, token / 100) for token in range(200))},
)


def answers_of(
    directory: Path,
    alone: bool,
    rounds: int,
    *,
    preempts: bool = False,
    prepare: Callable[[Assembled], None] = lambda _built: None,
    **settings: Any,
) -> Answers:
    """Serve this rank's share of the requests. `rounds` > 1 repeats them, which hits the prefix cache."""
    built = build(directory, **{"max_model_len": 160, **settings})
    prepare(built)
    occupied = (
        occupy(built, leaving=12) if preempts else 0
    )  # fits one request of the longest length and little more
    share = own_share(requests())
    waves = [[one] for one in share] if alone else [share] * rounds
    answers = collect(serve(built, *waves).outputs)
    if rounds > 1:
        assert built.scheduler.stats.prefix_hit_tokens > 0
    assert (built.scheduler.stats.num_preemptions > 0) == preempts
    assert built.scheduler.stats.num_free_blocks == built.scheduler.stats.num_blocks - occupied
    return answers


def collect(outputs: list[RequestOutput]) -> Answers:
    """Return every request's positions, from the second answer if a request ran twice."""
    answers: Answers = {}
    ended: set[str] = set()
    for output in outputs:
        if output.request_id in ended:
            ended.discard(output.request_id)
            answers[output.request_id] = []
        rows = [(entry.token_id, entry.logprob) for entry in output.logprobs]
        answers.setdefault(output.request_id, []).extend(rows)
        if output.prompt_logprobs:
            of_prompt = [(entry.token_id, entry.logprob) for entry in output.prompt_logprobs]
            answers[f"{output.request_id} prompt"] = of_prompt
        if output.finish_reason is not None:
            ended.add(output.request_id)
    return answers


def answers_on_rank(directory: Path, rounds: int, settings: dict[str, Any]) -> Answers:
    """Serve a share in a pool's process."""
    return answers_of(directory, False, rounds, **settings)


@pytest.fixture(scope="module", params=FAMILIES)
def served_alone(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Answers]:
    """Return a checkpoint and every request served alone on one rank without a prefix cache."""
    directory = tmp_path_factory.mktemp(request.param)
    write_checkpoint(request.param, directory)
    return directory, answers_of(directory, True, 1, enable_prefix_caching=False)


@pytest.mark.crossed("served_alone", "settings", every=3)
@pytest.mark.paired("served_alone", "settings", of=3)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 16, "max_num_seqs": 4},
        {"preempts": True},
        pytest.param({"max_num_batched_tokens": 23, "max_num_seqs": 8, "threads": 2}, marks=pytest.mark.slow),
    ],
    ids=["full batch", "chunks of 16", "preemption", "chunks of 23, two threads"],
)
def test_batch_chunks_prefix_hits_preemption_and_threads_change_no_bit(
    served_alone: tuple[Path, Answers], settings: dict[str, Any]
) -> None:
    directory, alone = served_alone
    assert answers_of(directory, False, 2, **settings) == alone


@pytest.mark.crossed("served_alone", "backend", every=4)  # test_parity has others on two ranks
@pytest.mark.paired("served_alone", "backend", of=2)
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_two_ranks_and_wires_change_no_bit(
    served_alone: tuple[Path, Answers], backend: str, pool_of: PoolOf
) -> None:
    directory, alone = served_alone
    parts = pool_of(2).run(answers_on_rank, directory, 1, {"all2all_backend": backend})
    assert {key: value for part in parts for key, value in part.items()} == alone


@pytest.mark.slow
@pytest.mark.parametrize(
    ("served_alone", "backend"),
    [("qwen3_moe", "gloo"), ("gpt_oss", "shm"), ("deepseek_v3", "shm"), ("qwen3_next", "gloo")],
    indirect=["served_alone"],
    scope="module",
)
def test_four_ranks_change_no_bit(served_alone: tuple[Path, Answers], backend: str, pool_of: PoolOf) -> None:
    """tests/moe/test_parity.py has all families on four ranks."""
    directory, alone = served_alone
    parts = pool_of(4).run(answers_on_rank, directory, 1, {"all2all_backend": backend})
    assert {key: value for part in parts for key, value in part.items()} == alone


@pytest.mark.crossed("backend", "mode", every=2)
@one_family_first
@pytest.mark.parametrize("mode", list(DispatchMode))
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_dispatch_modes_change_no_bit(
    served_alone: tuple[Path, Answers], backend: str, mode: DispatchMode, pool_of: PoolOf
) -> None:
    directory, alone = served_alone
    settings = {
        "all2all_backend": backend,
        "dispatch_mode": mode,
        "max_num_batched_tokens": 40,
        "max_num_seqs": 3,
    }
    parts = pool_of(2).run(answers_on_rank, directory, 1, settings)
    assert {key: value for part in parts for key, value in part.items()} == alone


@one_family_first
@pytest.mark.parametrize(
    ("world_size", "slots"), [(1, 12), (2, 6), pytest.param(4, 4, marks=pytest.mark.slow)]
)
def test_copies_shares_and_empty_slots_change_no_bit(
    served_alone: tuple[Path, Answers], world_size: int, slots: int, pool_of: PoolOf, tmp_path: Path
) -> None:
    directory, alone = served_alone
    skeleton = Skeleton(directory)
    placement = random_placement(
        len(skeleton.experts), skeleton.num_experts, world_size, slots, seed=world_size
    )
    save_placement(placement, tmp_path / "placement.json")
    settings = {"expert_placement": str(tmp_path / "placement.json")}
    parts = pool_of(world_size).run(answers_on_rank, directory, 1, settings)
    assert {key: value for part in parts for key, value in part.items()} == alone


@pytest.mark.slow
@pytest.mark.parametrize("served_alone", ["qwen3_moe"], indirect=True, scope="module")
@pytest.mark.parametrize(("node_size", "backend"), [(2, "auto"), (2, "gloo"), (1, "gloo")])
def test_node_limited_dispatch_changes_no_bit(
    served_alone: tuple[Path, Answers], node_size: int, backend: str, pool_of: PoolOf
) -> None:
    directory, alone = served_alone
    settings = {"dispatch_node_size": node_size, "all2all_backend": backend}
    parts = pool_of(4).run(answers_on_rank, directory, 1, settings)
    assert {key: value for part in parts for key, value in part.items()} == alone


@one_family_first
@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (2, {}),
        pytest.param(
            4,
            {"all2all_backend": "gloo", "max_num_batched_tokens": 23, "max_num_seqs": 8},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_fp8_dispatch_gives_the_same_bits_on_any_ranks_and_close_answers(
    served_alone: tuple[Path, Answers], world_size: int, settings: dict[str, Any], pool_of: PoolOf
) -> None:
    """FP8 rounds the inputs of experts, so the answers differ from those of `alone`, but they are equal on any ranks."""
    directory, alone = served_alone
    fp8 = {"dispatch_dtype": "fp8"}
    wanted = answers_of(directory, True, 1, enable_prefix_caching=False, **fp8)
    assert wanted != alone
    firsts = [
        abs(mine[0][1] - wanted[key][0][1]) for key, mine in alone.items() if mine[0][0] == wanted[key][0][0]
    ]
    assert 0 < max(firsts) < 0.5
    parts = pool_of(world_size).run(answers_on_rank, directory, 1, {**settings, **fp8})
    assert {key: value for part in parts for key, value in part.items()} == wanted


@pytest.fixture(scope="module")
def coded_alone() -> Callable[[Path, str], Answers]:
    """Return `coded_alone(directory, kv_cache_dtype)`: every request served alone on one rank with a cache in 8 bits."""

    @cache
    def answers(directory: Path, kv_cache_dtype: str) -> Answers:
        return answers_of(directory, True, 1, enable_prefix_caching=False, kv_cache_dtype=kv_cache_dtype)

    return answers


@pytest.mark.crossed("served_alone", "settings", every=4)
@pytest.mark.paired("served_alone", "settings", of=2)
@pytest.mark.parametrize(
    ("settings", "kv_cache_dtype"),
    [
        ({"max_num_batched_tokens": 16, "max_num_seqs": 4}, "fp8"),
        ({"preempts": True}, "int8"),
        pytest.param(
            {"max_num_batched_tokens": 23, "max_num_seqs": 8, "threads": 2}, "fp8", marks=pytest.mark.slow
        ),
    ],
    ids=["chunks of 16, fp8", "preemption, int8", "two threads, fp8"],
)
def test_a_cache_in_8_bits_gives_the_same_bits_in_any_batch_and_close_answers(
    served_alone: tuple[Path, Answers],
    coded_alone: Callable[[Path, str], Answers],
    settings: dict[str, Any],
    kv_cache_dtype: str,
) -> None:
    directory, plain = served_alone
    wanted = coded_alone(directory, kv_cache_dtype)
    assert wanted != plain
    firsts = [
        abs(mine[0][1] - wanted[key][0][1]) for key, mine in plain.items() if mine[0][0] == wanted[key][0][0]
    ]
    assert 0 < max(firsts) < 0.5
    assert answers_of(directory, False, 2, **settings, kv_cache_dtype=kv_cache_dtype) == wanted


@pytest.mark.crossed("kv_cache_dtype", every=2)
@one_family_first
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])
def test_a_cache_in_8_bits_gives_the_same_bits_on_two_ranks(
    served_alone: tuple[Path, Answers],
    coded_alone: Callable[[Path, str], Answers],
    kv_cache_dtype: str,
    pool_of: PoolOf,
) -> None:
    directory, _ = served_alone
    settings = {"kv_cache_dtype": kv_cache_dtype, "max_num_batched_tokens": 40, "max_num_seqs": 8}
    parts = pool_of(2).run(answers_on_rank, directory, 1, settings)
    found = {key: value for part in parts for key, value in part.items()}
    assert found == coded_alone(directory, kv_cache_dtype)


@pytest.mark.parametrize("served_alone", ["qwen3_moe"], indirect=True, scope="module")
def test_the_comparison_sees_a_single_changed_weight(served_alone: tuple[Path, Answers]) -> None:
    directory, alone = served_alone
    built = build(directory, max_model_len=160)
    expert = built.model.layers[0].down.at(0).tensors()[""]
    expert.view(-1)[0] += 0.01
    assert collect(serve(built, requests()).outputs) != alone
