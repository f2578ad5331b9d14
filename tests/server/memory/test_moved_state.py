"""One table: services that hand requests over, move them and evict their blocks give the answers of a plain service, bit for bit.

Each case compares pools with tiers with a plain service of one rank. There, streams are handed over, and move again while
ranks drain. tests/scheduler has the same comparisons after every single step (test_moved_requests, test_tiered_answers and
test_fetched_prefixes).
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks.models.foreseeing import foresee
from tests.server.faults import test_faults
from tests.server.faults.test_drains import NGRAM, drain
from tests.server.faults.test_moves_between_ranks import metric, wait_until_nothing_is_open
from tests.server.pools.test_hand_overs import computed_again, handed_over
from tests.server.test_drafts import MTP, SHARE
from tests.support.models.mtp import write_mtp_checkpoint
from tests.support.requests.timed_streams import stream_all
from tests.support.service.real_service import RealService, write_tiny_model

pytestmark = pytest.mark.slow

NUM_TOKENS = 200  # of an answer, so that it runs through several drains
PIECES = 3  # received by every stream before the first drain
TEXT = "the cat sat on the mat and looked at the dog " * 5
BOTH = ("--max-num-seqs=32", "--max-model-len=512")  # flags of both services
TIERS = ("--kv-offloading-size=64M",)
TOKEN_BYTES = 768  # of the tiny models' keys and values
FEW_BLOCKS = f"--kv-cache-memory={TOKEN_BYTES * 900}B"  # per rank: for three of the streams


Answers = list[tuple[object, ...]]


class Case(NamedTuple):
    """A service with pools."""

    family: str = "qwen3_moe"
    pools: str = "prefill:2,decode:2"
    flags: tuple[str, ...] = ()
    form: tuple[str, ...] = ()  # flags of both services, because they change bits
    has_mtp: bool = False

    @property
    def copies(self) -> int:
        """Copies of each request: enough that each rank of a pool gets some of each kind."""
        return 1 if self.pools.endswith(":1") else 2


DRAFTS = ("--speculative-config", NGRAM)
# The tests named above compare each kind of model and each type of blocks alone.
CASES = {
    "drafts of the model": Case("deepseek_v3", flags=("--speculative-config", json.dumps(MTP)), has_mtp=True),
    "recurrent with drafts": Case("qwen3_next", flags=DRAFTS),
    "windows, one rank per pool": Case("gpt_oss", "prefill:1,decode:1"),
    "constant eviction with drafts, one rank per pool": Case(
        pools="prefill:1,decode:1", flags=(FEW_BLOCKS, *DRAFTS)
    ),
    "fp8, sparse, drafts, one rank per pool": Case(
        "deepseek_v32", "prefill:1,decode:1", DRAFTS, ("--kv-cache-dtype=fp8",)
    ),
    "replicas": Case(pools="both:2,both:2"),
}


def write_model(case: Case, directory: Path) -> Path:
    model = write_tiny_model(directory, case.family)
    if case.has_mtp:
        write_mtp_checkpoint(case.family, model, change=partial(foresee, share=SHARE), vocab_size=320)
    return model


def bodies(case: Case) -> list[dict[str, Any]]:
    """Return requests of every kind with long prompts and long answers."""
    form = {"structured_outputs": {"regex": f"[a-z ]{{{NUM_TOKENS - 9}}}"}}
    return [
        each
        | {"prompt": f"{each['prompt']} {TEXT}", "max_tokens": NUM_TOKENS}
        | (form if "structured_outputs" in each else {})
        for each in test_faults.bodies(case.copies)
    ]


def drains(service: RealService, ranks: list[int]) -> Callable[[], None]:
    """Return a function that drains one rank after the other."""

    def run() -> None:
        for rank in ranks:
            drain(service, rank)
            drain(service, rank, undo=True)

    return run


def answers(case: Case, service: RealService, ranks: list[int]) -> Answers:
    """Return the answers of streams while these ranks are drained."""
    streams = stream_all(service.url, bodies(case), pieces=PIECES, then=drains(service, ranks))
    return [each.said for each in streams]


@pytest.fixture(scope="module")
def plain_answers() -> dict[tuple[object, ...], Answers]:
    """The answers of plain services, by what changes them."""
    return {}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_answers_are_those_of_a_plain_service(
    case: Case, plain_answers: dict[tuple[object, ...], Answers], tmp_path: Path
) -> None:
    model, kind = write_model(case, tmp_path / "tiny"), (case.family, case.has_mtp, case.form, case.copies)
    if kind not in plain_answers:
        with RealService.serve(model, tmp_path / "plain.txt", *BOTH, *case.form) as service:
            plain_answers[kind] = answers(case, service.wait_ready(), [])
    expected = plain_answers[kind]
    flags = (f"--pools={case.pools}", *BOTH, *TIERS, *case.form, *case.flags)
    with RealService.serve(model, tmp_path / "output.txt", *flags) as service:
        assert answers(case, service.wait_ready(), []) == expected
        if "prefill" in case.pools:
            num_choices = sum(each.get("n", 1) for each in bodies(case))
            has_room = (
                FEW_BLOCKS not in case.flags
            )  # otherwise some stay, and evicted blocks are computed again
            assert handed_over(service) == num_choices if has_room else handed_over(service) > 0
            assert computed_again(service)[1] < 17 * num_choices or not has_room
        for _ in range(10):  # on a busy machine, all answers may end before the first drain begins
            before = metric(service, "wideep:request_moves_total") - handed_over(service)
            assert answers(case, service, [2, 3, 2] if case.pools.endswith(":2") else [1]) == expected
            if metric(service, "wideep:request_moves_total") - handed_over(service) > before:
                break
        else:
            raise AssertionError("no stream moved")
        assert metric(service, "wideep:kv_tier_faults_total") == 0
        wait_until_nothing_is_open(service)
        assert metric(service, "vllm:kv_cache_usage_perc") == 0
