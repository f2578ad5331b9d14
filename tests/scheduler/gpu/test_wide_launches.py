"""What a decode step of two ranks launches per layer, and that the host reads nothing before the tokens.

The exchange runs as on a GPU: the host checks nothing. The bounds may only fall.
"""

import importlib
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from scheduler.policy.batch import StepBatch
from tests.support.engines.serving import own_share, request, serve
from tests.support.gpu.interpreted import needs_triton
from tests.support.gpu.launches import counting_launches
from tests.support.gpu.path import build_interpreted
from tests.support.models.families import make_model
from tests.support.models.no_reads import CountedReads, NoReads
from tests.support.ranks import RankPool

pytestmark = [pytest.mark.slow, needs_triton]

# Per layer with experts, in bfloat16: those of one rank, less the order and the sum of pairs, and the choice of slots and
# seven launches of the exchange.
MOST = {"qwen3_moe": 18, "deepseek_v3": 28}
LEAST_LAYERS = {"qwen3_moe": 1, "deepseek_v3": 2}  # with one layer with experts
EXCHANGE = (
    "send_rows",
    "wait_flags",
    "order_pairs",
    "deliver_rows",
    "send_answers",
    "wait_flags",
    "sum_answers",
)


class Step(NamedTuple):
    """What a step of decodes did."""

    launches: list[str]
    reads: list[str]  # of the host, when it waited for the tokens


def decode_steps(directory: Path) -> list[Step]:
    """Serve two requests, one of them on each rank. Every read before a step's tokens is an error."""
    opening: Any = importlib.import_module("dispatch.gpu.open")  # now that the interpreter is chosen
    unwatched, steps = partial(opening.LowLatencyPairs, is_blocking=False), list[Step]()
    with mock.patch.object(opening, "LowLatencyPairs", unwatched):
        built = build_interpreted(directory, dtype="bfloat16", overlaps_steps=True)
    launch, sample, read = built.runner.launch, built.runner.sample, built.runner.read
    names: dict[int, list[str]] = {}

    def launched(batch: StepBatch, *arguments: Any, **options: Any) -> Any:
        if options["has_prefill"] or not batch.items:
            return launch(batch, *arguments, **options)
        with NoReads(), counting_launches() as names[id(batch)]:
            return launch(batch, *arguments, **options)

    def sampled(underway: Any) -> None:
        with NoReads():
            sample(underway)

    def was_read(underway: Any) -> Any:
        with CountedReads() as counted:
            found = read(underway)
        if id(underway.batch) in names:
            steps.append(Step(names.pop(id(underway.batch)), counted.reads))
        return found

    built.runner.launch, built.runner.sample, built.runner.read = launched, sampled, was_read  # type: ignore[method-assign]
    serve(
        built, own_share([request("0", range(3, 8), max_tokens=3), request("1", range(13, 19), max_tokens=3)])
    )
    return steps


@pytest.mark.parametrize("family", list(MOST))
def test_a_layer_of_two_ranks_launches_no_more_than_before_and_the_host_reads_once(
    interpreting_pair: RankPool, family: str, tmp_path: Path
) -> None:
    found = []
    for layers in (LEAST_LAYERS[family], LEAST_LAYERS[family] + 1):
        make_model(family, num_hidden_layers=layers).save_pretrained(tmp_path / f"{layers}")
        found.append(interpreting_pair.run(decode_steps, tmp_path / f"{layers}", timeout_s=300.0))
    for fewer, more in zip(*found, strict=True):
        assert len(fewer) == len(more) == 2
        for less, most in zip(fewer, more, strict=True):
            count = len(most.launches) - len(less.launches)
            assert count <= MOST[family], (count, most.launches)
            kernels = [name for name in most.launches if name in EXCHANGE]
            assert kernels[-len(EXCHANGE) :] == [*EXCHANGE]
            first, last = most.launches.index("send_rows"), most.launches.index("wait_flags")
            between = most.launches[first + 1 : last]
            assert bool(between) == (family != "qwen3_moe"), "shared experts run while rows travel"
            assert most.reads == less.reads == ["numpy of a tensor"] * 2, "tokens; errors and waits"
