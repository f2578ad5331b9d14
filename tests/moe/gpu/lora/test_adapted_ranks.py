"""Two interpreted ranks with adapters: a row's adapter travels with it, to every slot of its experts, and follows moves."""

import queue
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

from expert_placement.config import EplbConfig
from scheduler.assembly import Assembled
from scheduler.moves.reports import MoveState
from tests.moe.lora.test_adapted_model import Case, make_case, place_all
from tests.support.engines.moves import targets
from tests.support.engines.serving import own_share, request, serve
from tests.support.gpu.interpreted import needs_triton
from tests.support.gpu.path import Part, build_interpreted, run_steps
from tests.support.models.adapters import merged
from tests.support.models.families import SHALLOW, VOCABULARY
from tests.support.models.greedy import greedy
from tests.support.ranks import RankPool

pytestmark = needs_triton

TOLERANCE = 1e-4
LENGTHS = (19, 8)
SHORT = [[Part(0, 0, 6), Part(1, 0, 3)], [Part(0, 6, 7), Part(1, 3, 4)]]  # prompts, then decodes
WAIT_S = 100.0
# Of two sequences of each rank. Both use the same places; only rank 0's rows have adapters; none has one.
MIXED, FIRST, PLAIN = ((0, -1), (-1, 1)), ((0, -1), (-1, -1)), ((-1, -1), (-1, -1))


class Found(NamedTuple):
    """One rank's logits of its two sequences, by the places of their adapters on both ranks."""

    mixed: list[np.ndarray]
    first: list[np.ndarray]
    plain: list[np.ndarray]
    moved: list[np.ndarray]  # as mixed, after experts have changed their slots


def sequences(rank: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(20 + rank)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]


def open_pair(directory: Path, paths: Sequence[Path], settings: dict[str, Any]) -> Assembled:
    """Build an engine with two redundant experts and adapters at the first places."""
    eplb = EplbConfig(num_redundant_experts=2, max_bytes_per_step=1 << 30)
    built = build_interpreted(
        directory, enable_lora=True, max_loras=2, eplb_config=eplb, num_spare=10, **settings
    )
    place_all(built, paths)
    return built


def move_experts(built: Assembled) -> None:
    """Give the slots of both ranks other experts, as between two steps."""
    relocation = built.relocation
    (target,) = targets(relocation.placement, 1)
    assert not np.array_equal(target.slot_expert, relocation.placement.slot_expert)
    reports: queue.Queue[MoveState] = queue.Queue()
    relocation.on_report = lambda report: reports.put(report.state)
    relocation.prepare(target)
    assert reports.get(timeout=WAIT_S) is MoveState.VERIFIED
    dist.barrier()
    relocation.switch(target.version, 1)


def answer(
    directory: Path,
    paths: Sequence[Path],
    steps: list[list[Part]],
    agreed_tokens: int,
    settings: dict[str, Any],
) -> Found:
    built, rank = open_pair(directory, paths, settings), dist.get_rank()
    run = partial(run_steps, built, sequences(rank), steps, agreed_tokens=agreed_tokens)
    mixed, first, plain = (run(adapters=places[rank]) for places in (MIXED, FIRST, PLAIN))
    move_experts(built)
    return Found(mixed, first, plain, run(adapters=MIXED[rank]))


def check(case: Case, found: Sequence[Found]) -> None:
    models = [case.model, *(merged(case.model, each) for each in case.adapters)]
    for rank, own in enumerate(found):
        for index, prompt in enumerate(sequences(rank)):
            rows = len(own.mixed[index])
            with torch.inference_mode():
                plain, wanted = (
                    models[place + 1](torch.tensor([prompt])).logits[0].numpy()[:rows]
                    for place in (-1, MIXED[rank][index])
                )
            assert np.abs(own.mixed[index] - wanted).max() < TOLERANCE, f"rank {rank}, sequence {index}"
            assert np.abs(own.plain[index] - plain).max() < TOLERANCE
            assert np.array_equal(own.moved[index], own.mixed[index]), "a move changes a row"
            if MIXED[rank][index] >= 0:
                assert np.abs(wanted - plain).max() > 10 * TOLERANCE, "the adapter changes something"
            else:
                assert np.array_equal(own.mixed[index], own.plain[index]), "a plain row has other bits"
            same = own.mixed if FIRST[rank][index] == MIXED[rank][index] else own.plain
            assert np.array_equal(own.first[index], same[index]), "another rank's adapter changes a row"


@pytest.mark.slow  # fast tests: labels arrive (dispatch/gpu/test_labels), engines on CPUs (moe/lora/test_adapted_model)
@pytest.mark.parametrize(
    ("family", "num_layers", "agreed_tokens", "settings"),
    [("qwen3_moe", 1, 8, {}), ("qwen3_moe", 2, 0, {"all2all_backend": "gloo"}), ("gpt_oss", 2, 8, {})],
)
def test_the_adapter_travels_with_the_row(
    interpreting_pair: RankPool, family: str, num_layers: int, agreed_tokens: int, settings: dict[str, Any], tmp_path: Path
) -> None:  # fmt: skip
    """The second step is dispatched in low-latency mode, if tokens are agreed on."""
    case = make_case(family, tmp_path, of_model={**SHALLOW[family], "num_hidden_layers": num_layers})
    found = interpreting_pair.run(
        answer, case.directory, case.paths, SHORT, agreed_tokens, settings, timeout_s=500.0
    )
    check(case, found)


def bits(directory: Path, paths: Sequence[Path], world_size: int) -> list[list[np.ndarray]]:
    """Return the logits of the sequences of one rank of two, or of all one after the other."""
    settings = {"dispatch_dtype": "fp8", "batch_invariant": True}
    if world_size == 2:
        built, ranks = open_pair(directory, paths, settings), [dist.get_rank()]
    else:
        built, ranks = build_interpreted(directory, enable_lora=True, max_loras=2, **settings), [0, 1]
        place_all(built, paths)
    agreed = 8 if world_size == 2 else 0
    return [
        run_steps(built, sequences(rank), SHORT, adapters=MIXED[rank], agreed_tokens=agreed) for rank in ranks
    ]


@pytest.mark.slow
def test_rows_that_travel_in_fp8_get_the_same_bits_on_one_and_two_ranks(
    interpreter: RankPool, interpreting_pair: RankPool, tmp_path: Path
) -> None:
    case = make_case("qwen3_moe", tmp_path, of_model=SHALLOW["qwen3_moe"])
    [alone] = interpreter.run(bits, case.directory, case.paths, 1, timeout_s=400.0)
    pair = interpreting_pair.run(bits, case.directory, case.paths, 2, timeout_s=400.0)
    for wanted, (found,) in zip(alone, pair, strict=True):
        for ours, same in zip(found, wanted, strict=True):
            assert np.array_equal(ours, same)


def generate(
    directory: Path, paths: Sequence[Path], prompts: list[list[int]], steps: int
) -> dict[str, list[int]]:
    built = build_interpreted(directory, enable_lora=True, max_loras=2)
    digests = ["", *place_all(built, paths)]
    requests = [
        replace(
            request(str(index), prompt, max_tokens=steps), adapter=digests[index], adapter_place=index - 1
        )
        for index, prompt in enumerate(prompts)
    ]
    return serve(built, own_share(requests)).token_ids


@pytest.mark.slow
def test_engines_generate_the_merged_models_tokens(interpreting_pair: RankPool, tmp_path: Path) -> None:
    case, steps = make_case("qwen3_moe", tmp_path, of_model=SHALLOW["qwen3_moe"]), 4
    prompts = [each[:8] for rank in range(2) for each in sequences(rank)][:3]
    parts = interpreting_pair.run(generate, case.directory, case.paths, prompts, steps, timeout_s=400.0)
    found = {name: ids for tokens in parts for name, ids in tokens.items()}
    for index, model in enumerate([case.model, *(merged(case.model, each) for each in case.adapters)]):
        tokens, _ = greedy(model, prompts[index], found[str(index)], steps)
        assert [*prompts[index], *found[str(index)]] == tokens
