"""Drafts change no bit of an answer: tokens and logprobs, for any parameters and any other requests in the batch."""

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.models.foreseeing import foresee
from scheduler.assembly import Assembled
from scheduler.drafts.drafter import Drafter
from scheduler.drafts.pays import StepCosts
from scheduler.policy.batch import StepBatch
from scheduler.policy.config import DispatchMode
from scheduler.policy.sequence import Sequence
from scheduler.policy.speculative import parse_speculative_config
from scheduler.sampling.sampler import Sampled
from tests.fixtures import PoolOf
from tests.scheduler.test_invariance import Answers, answers_of, collect
from tests.support.engines.serving import build, occupy, request, serve
from tests.support.models.families import VOCABULARY, write_checkpoint
from tests.support.models.mtp import write_mtp_checkpoint

NGRAM = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}'
SUFFIX = '{"method": "suffix", "num_speculative_tokens": 5}'
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"preempts": True},
    {"max_num_batched_tokens": 23, "max_num_seqs": 8},
)
FAMILIES = (
    "qwen3_moe",
    "qwen3_next",
    *(
        pytest.param(family, marks=pytest.mark.slow)
        for family in ("deepseek_v3", "gpt_oss", "glm4_moe", "deepseek_v32", "nemotron_h")
    ),
)


class Foresight:
    """Drafts known answers, with mistakes. A `scheduler.drafts.drafter.Source`."""

    def __init__(self, answers: Answers) -> None:
        self._known = {key: [token for token, _ in rows] for key, rows in answers.items()}
        self._random = random.Random(5)

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        """Draft up to `most` tokens, most of them correct."""
        begin = sequence.num_output_tokens
        end = begin + self._random.randint(0, most)
        known = self._known[sequence.request.request_id][begin:end]
        return [
            each if self._random.random() < 0.85 else self._random.randrange(VOCABULARY) for each in known
        ]

    def forget(self, sequence: Sequence) -> None: ...


def drafter_of(built: Assembled) -> Drafter:
    drafter = built.scheduler._drafter
    assert isinstance(drafter, Drafter)
    return drafter


class NoCosts(StepCosts):
    """Makes rows and drafts free."""

    def note(self, rows: int, seconds: float) -> None: ...

    def note_passes(self, count: int, seconds: float) -> None: ...


def always_draft(answers: Answers | None, counts: list[int], built: Assembled) -> None:
    """Try drafts at any step cost, from known answers if given."""
    drafter = drafter_of(built)
    drafter.costs = NoCosts()
    if answers is not None:
        drafter._source = Foresight(answers)
    note = drafter.note

    def noted(sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        counts[0] += max(0, num_accepted)
        counts[1] += num_drafts
        note(sequence, num_drafts, num_accepted)

    drafter.note = noted  # type: ignore[method-assign]


def drafted(
    directory: Path, known: Answers | None, given: str, rounds: int = 2, **settings: Any
) -> tuple[Answers, list[int]]:
    """Serve with drafts. Return the answers and the numbers of accepted and proposed drafts."""
    counts = [0, 0]
    speculative = parse_speculative_config(given)
    prepare = partial(always_draft, known, counts)
    return answers_of(
        directory, False, rounds, prepare=prepare, speculative_config=speculative, **settings
    ), counts


@pytest.fixture(scope="module", params=FAMILIES)
def served_alone(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Answers]:
    """Return a checkpoint and the answers to every request served alone, without drafts."""
    directory = tmp_path_factory.mktemp(request.param)
    write_checkpoint(request.param, directory)
    return directory, answers_of(directory, True, 1, enable_prefix_caching=False)


@pytest.mark.paired("served_alone", "settings", of=2)
@pytest.mark.parametrize("settings", SETTINGS, ids=["full batch", "preemption", "chunks of 23"])
def test_drafts_change_no_bit(served_alone: tuple[Path, Answers], settings: dict[str, Any]) -> None:
    directory, alone = served_alone
    answers, (num_accepted, num_tried) = drafted(directory, alone, SUFFIX, **settings)
    assert answers == alone
    assert 50 < num_accepted < num_tried


@pytest.mark.paired("served_alone", "given", of=2)
@pytest.mark.parametrize("given", [NGRAM, SUFFIX])
def test_drafts_from_texts_change_no_bit(served_alone: tuple[Path, Answers], given: str) -> None:
    directory, alone = served_alone
    answers, (_, num_tried) = drafted(directory, None, given)
    assert answers == alone
    assert num_tried > 20


def check_on_ranks(served: tuple[Path, Answers], pool_of: PoolOf, world_size: int) -> None:
    directory, alone = served
    parts = pool_of(world_size).run(drafted, directory, alone, SUFFIX, 1)
    assert {key: value for answers, _ in parts for key, value in answers.items()} == alone
    assert all(num_accepted > 0 for _, (num_accepted, _) in parts)


def test_drafts_on_two_ranks_change_no_bit(served_alone: tuple[Path, Answers], pool_of: PoolOf) -> None:
    check_on_ranks(served_alone, pool_of, 2)


@pytest.mark.slow
@pytest.mark.parametrize("served_alone", ["qwen3_moe"], indirect=True, scope="module")
def test_drafts_on_four_ranks_change_no_bit(served_alone: tuple[Path, Answers], pool_of: PoolOf) -> None:
    check_on_ranks(served_alone, pool_of, 4)


@pytest.mark.parametrize("served_alone", ["qwen3_moe"], indirect=True, scope="module")
def test_a_wrong_draft_that_is_accepted_is_seen(served_alone: tuple[Path, Answers]) -> None:
    directory, alone = served_alone
    speculative = parse_speculative_config(SUFFIX)
    num_wrong = 0

    def accept_one(built: Assembled) -> None:
        always_draft(alone, [0, 0], built)
        run = built.runner.run

        def wrong(batch: StepBatch, agreed_tokens: int = 0, **how: Any) -> Sampled:
            nonlocal num_wrong
            sampled = run(batch, agreed_tokens, **how)
            row = 0
            for item in batch.items:
                if item.drafts and sampled.token_ids[row] != item.drafts[0] and not num_wrong:
                    sampled.token_ids[row] = item.drafts[0]
                    num_wrong += 1
                row += item.num_samples
            return sampled

        built.runner.run = wrong  # type: ignore[method-assign, assignment]

    assert answers_of(directory, False, 1, prepare=accept_one, speculative_config=speculative) != alone
    assert num_wrong == 1


MTP = '{"method": "mtp", "num_speculative_tokens": 3}'
MTP_FAMILIES = (
    "deepseek_v3",
    *(pytest.param(family, marks=pytest.mark.slow) for family in ("glm4_moe", "qwen3_next", "mimo_v2_flash")),
)
SHARE = 0.02  # scale of the output of layers: drafts are right about half of the time


@pytest.fixture(scope="module", params=MTP_FAMILIES)
def served_without_drafts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Answers]:
    """Return a checkpoint with multi-token-prediction layers and every request served alone, without drafts."""
    directory = tmp_path_factory.mktemp(request.param)
    num_layers = 3 if request.param == "mimo_v2_flash" else 1
    write_mtp_checkpoint(
        request.param, directory, num_layers=num_layers, change=partial(foresee, share=SHARE)
    )
    return directory, answers_of(directory, True, 1, enable_prefix_caching=False)


@pytest.mark.crossed("settings", every=2)
@pytest.mark.parametrize(
    "settings", [SETTINGS[0], SETTINGS[2], {"threads": 2}], ids=["full batch", "chunks of 23", "two threads"]
)
def test_drafts_of_the_model_s_own_layers_change_no_bit(
    served_without_drafts: tuple[Path, Answers], settings: dict[str, Any]
) -> None:
    directory, alone = served_without_drafts
    answers, (num_accepted, num_tried) = drafted(directory, None, MTP, **settings)
    assert answers == alone
    assert 50 < num_accepted < num_tried


def check_own_layers_on_ranks(served: tuple[Path, Answers], pool_of: PoolOf, world_size: int) -> None:
    directory, alone = served
    parts = pool_of(world_size).run(drafted, directory, None, MTP, 1)
    assert {key: value for answers, _ in parts for key, value in answers.items()} == alone
    assert sum(num_accepted for _, (num_accepted, _) in parts) > 20


def test_drafts_of_own_layers_on_two_ranks_change_no_bit(
    served_without_drafts: tuple[Path, Answers], pool_of: PoolOf
) -> None:
    """Ranks draft different numbers of tokens, or finish their requests while others draft."""
    check_own_layers_on_ranks(served_without_drafts, pool_of, 2)


@pytest.mark.slow
@pytest.mark.parametrize("served_without_drafts", ["deepseek_v3"], indirect=True, scope="module")
def test_drafts_of_own_layers_on_four_ranks_change_no_bit(
    served_without_drafts: tuple[Path, Answers], pool_of: PoolOf
) -> None:
    check_own_layers_on_ranks(served_without_drafts, pool_of, 4)


def test_drafts_of_own_layers_survive_preemption(served_without_drafts: tuple[Path, Answers]) -> None:
    """Answers are longer than in the other tests, so that blocks run out in every family."""
    directory, _ = served_without_drafts
    wanted = [
        request(str(at), range(3, 12 + 5 * at), max_tokens=60, num_logprobs=0, temperature=at / 4, seed=at)
        for at in range(5)
    ]
    alone = collect(serve(build(directory, max_model_len=160), *[[each] for each in wanted]).outputs)
    built = build(directory, max_model_len=160, speculative_config=parse_speculative_config(MTP))
    always_draft(None, counts := [0, 0], built)
    occupied = occupy(built, leaving=12)
    assert collect(serve(built, wanted).outputs) == alone
    stats = built.scheduler.stats
    assert stats.num_preemptions > 0 and stats.num_free_blocks == stats.num_blocks - occupied
    assert 20 < counts[0] < counts[1]


@pytest.mark.parametrize("served_without_drafts", ["deepseek_v3"], indirect=True, scope="module")
@pytest.mark.parametrize("given", [MTP, SUFFIX])
@pytest.mark.parametrize(
    "mode", [DispatchMode.LOW_LATENCY, pytest.param(DispatchMode.NORMAL, marks=pytest.mark.slow)]
)
def test_drafts_change_no_bit_however_rows_travel(
    served_without_drafts: tuple[Path, Answers], given: str, mode: DispatchMode, pool_of: PoolOf
) -> None:
    """Steps have few rows, so that drafts fill the space left by decodes."""
    directory, alone = served_without_drafts
    run = partial(drafted, dispatch_mode=mode, max_num_batched_tokens=20, max_num_seqs=3)
    parts = pool_of(2).run(run, directory, None if given == MTP else alone, given, 1)
    assert {key: value for answers, _ in parts for key, value in answers.items()} == alone
    assert sum(num_accepted for _, (num_accepted, _) in parts) > 20
