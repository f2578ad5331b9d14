"""Every supported family returns transformers' own tokens, at 1, 2 and 4 ranks, with prompts of all lengths together."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from scheduler.assembly import Assembled
from scheduler.policy.request import Logprobs
from tests.fixtures import PoolOf
from tests.support.engines.serving import (
    build,
    misindex,
    misroute,
    occupy,
    own_share,
    request,
    serve,
    teacher_forced,
)
from tests.support.models.families import (
    FAMILIES,
    RECURRENT_FAMILIES,
    SPARSE_FAMILIES,
    VOCABULARY,
    WRAPPED_FAMILIES,
    write_checkpoint,
)
from tests.support.models.greedy import greedy

STEPS = 24
TOLERANCE = 1e-4
PROMPT_LENGTHS = (3, 17, 40, 9, 26)
# The code between ranks is the same for all families. These represent them; two ranks of the others are slow tests.
ON_TWO_RANKS = ("deepseek_v3", "deepseek_v32", "gpt_oss", "mixtral", "qwen3_moe", "qwen3_next")
# Recurrent, sparse and wrapped families that neither list represents are slow tests on any number of ranks.
ON_ONE_RANK = (*FAMILIES, "nemotron_h", "lfm2_moe", "mistral_large4", "gemma4", "llama4")


def most_ranks(family: str) -> int:
    """Return the largest number of ranks on which `make test` tests a family."""
    return 2 if family in ON_TWO_RANKS else int(family in ON_ONE_RANK)


CASES = [
    pytest.param(family, size, marks=pytest.mark.slow if size > most_ranks(family) else ())
    for family in (*FAMILIES, *RECURRENT_FAMILIES, *SPARSE_FAMILIES, *WRAPPED_FAMILIES)
    for size in (1, 2, 4)
]


class Oracle(NamedTuple):
    """Results of transformers in eager float32."""

    directory: Path
    prompts: list[list[int]]
    sequences: list[list[int]]  # prompt and greedy tokens
    logits: list[np.ndarray]  # [tokens, V] each, teacher-forced
    alone: Assembled  # our engine, which has served all prompts alone
    guesses: list[list[int]]  # its tokens


class RankAnswer(NamedTuple):
    """One rank's share, in the order in which prompts were dealt."""

    sequences: list[list[int]]
    logits: list[np.ndarray]
    prompt_logprobs: list[list[Logprobs]]  # of the teacher-forced sequences, sent as prompts
    # The control, on one rank: permuted top-k ids of experts, or of the tokens of an index.
    permuted_logits: list[np.ndarray]


@pytest.fixture(scope="module")
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """Return a family's checkpoint on disk and transformers' greedy continuations. Our own are the guesses."""
    directory = tmp_path_factory.mktemp(request.param)
    model = write_checkpoint(request.param, directory)
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]
    alone = build_one(directory)
    guesses = tokens_of(alone, list(enumerate(prompts)))
    answers = [greedy(model, *each, STEPS) for each in zip(prompts, guesses, strict=True)]
    sequences, logits = [tokens for tokens, _ in answers], [each.numpy() for _, each in answers]
    return Oracle(directory, prompts, sequences, logits, alone, guesses)


def tokens_of(built: Assembled, prompts: list[tuple[int, list[int]]]) -> list[list[int]]:
    """Serve prompts together. Return the tokens of each."""
    asked = [request(str(index), prompt, max_tokens=STEPS) for index, prompt in prompts]
    found = serve(built, asked).token_ids
    built.engine._is_stopping = False  # it serves again
    return [found[each.request_id] for each in asked]


def build_one(directory: Path) -> Assembled:
    """Build an engine with room for all prompts and sequences."""
    return build(directory, max_model_len=128, max_num_batched_tokens=512)


def answer(directory: Path, prompts: list[list[int]], sequences: list[list[int]]) -> RankAnswer:
    """Serve this rank's prompts, then run its teacher-forced sequences."""
    built = build_one(directory)
    own = own_share(list(enumerate(prompts)))
    made = [prompt + tokens for (_, prompt), tokens in zip(own, tokens_of(built, own), strict=True)]
    return RankAnswer(made, *scored(built, own_share(sequences)), [])


def answer_alone(oracle: Oracle) -> RankAnswer:
    """Run the teacher-forced sequences on one rank, with correct and with permuted routing."""
    built, sequences = oracle.alone, oracle.sequences
    made = [prompt + tokens for prompt, tokens in zip(oracle.prompts, oracle.guesses, strict=True)]
    logits, of_prompt = scored(built, sequences)
    if not misindex(built.model):
        misroute(built.model)
    return RankAnswer(made, logits, of_prompt, teacher_forced(built, sequences))


def scored(built: Assembled, sequences: list[list[int]]) -> tuple[list[np.ndarray], list[list[Logprobs]]]:
    """Return the logits of teacher-forced sequences, and the log-probabilities of sequences sent as prompts."""
    asked = [
        request(f"whole {index}", sequence, max_tokens=1, num_prompt_logprobs=2)
        for index, sequence in enumerate(sequences)
    ]
    found = serve(built, asked).prompt_logprobs
    return teacher_forced(built, sequences), [found[each.request_id] for each in asked]


def worst(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    """Return the largest difference of any logit."""
    return max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.crossed("oracle", "world_size", every=2)
@pytest.mark.parametrize(("oracle", "world_size"), CASES, indirect=["oracle"], scope="module")
def test_greedy_tokens_and_logits_equal_transformers(
    oracle: Oracle, world_size: int, pool_of: PoolOf
) -> None:
    if world_size == 1:
        answers = [answer_alone(oracle)]
    else:
        answers = pool_of(world_size).run(answer, oracle.directory, oracle.prompts, oracle.sequences)
    for rank, found in enumerate(answers):
        share = slice(rank, None, world_size)
        if not oracle.prompts[share]:
            continue
        assert worst(found.logits, oracle.logits[share]) < TOLERANCE
        if world_size == 1:
            assert worst(found.permuted_logits, oracle.logits) > 100 * TOLERANCE, "the control did not fail"
        for ours, theirs, logits in zip(
            found.sequences, oracle.sequences[share], oracle.logits[share], strict=True
        ):
            assert_equal_tokens(ours, theirs, logits)
        for entries, sequence, logits in zip(
            found.prompt_logprobs, oracle.sequences[share], oracle.logits[share], strict=True
        ):
            assert_equal_logprobs(entries, sequence, logits)


@pytest.mark.parametrize(
    "oracle",
    [
        pytest.param(family, marks=() if family in ON_TWO_RANKS else pytest.mark.slow)
        for family in (
            *RECURRENT_FAMILIES,
            *SPARSE_FAMILIES,
            "qwen3_5_moe",
            "mistral_large4",
            "glm5_next",
            "llama4",
            "gemma4",
        )
    ],
    indirect=True,
    scope="module",
)
def test_cuts_hits_and_preemption_change_no_token(oracle: Oracle) -> None:
    """Prompts in chunks of 11 run together, twice, so that the second run continues from snapshots."""
    built = build(oracle.directory, max_model_len=128, max_num_batched_tokens=15, max_num_seqs=4)
    occupy(built, leaving=10)
    waves = [
        [request(f"{wave} {index}", prompt, max_tokens=STEPS) for index, prompt in enumerate(oracle.prompts)]
        for wave in range(2)
    ]
    served = serve(built, *waves)
    assert built.scheduler.stats.num_preemptions > 0
    cached = {each.request_id: each.num_cached_tokens for each in served.outputs if each.num_cached_tokens}
    assert cached and cached.items() <= {"1 1": 16, "1 2": 32, "1 4": 16}.items(), "too few cached tokens"
    for request_id, tokens in served.token_ids.items():
        index = int(request_id.split()[1])
        assert_equal_tokens(oracle.prompts[index] + tokens, oracle.sequences[index], oracle.logits[index])


def assert_equal_logprobs(entries: list[Logprobs], sequence: list[int], logits: np.ndarray) -> None:
    """Check that all tokens but the first have the oracle's log-probability, together with its two likeliest tokens."""
    wanted = torch.from_numpy(logits).double().log_softmax(-1).numpy()
    assert [entry.token_id for entry in entries] == sequence[1:]
    for entry, row in zip(entries, wanted, strict=False):
        assert abs(entry.logprob - row[entry.token_id]) < TOLERANCE
        assert np.abs(np.array(entry.top_logprobs) - np.sort(row)[:-3:-1]).max() < TOLERANCE
        rivals = np.abs(row - row[entry.token_id]) < TOLERANCE  # includes the token itself
        assert abs(entry.rank - 1 - np.count_nonzero(row > row[entry.token_id])) < rivals.sum()


def assert_equal_tokens(ours: list[int], theirs: list[int], logits: np.ndarray) -> None:
    """Check that tokens are equal up to a position where the oracle's two best are closer than the tolerance."""
    assert len(ours) == len(theirs)
    differing = [position for position, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
    if differing:
        second, first = np.sort(logits[differing[0] - 1])[-2:]
        assert first - second < TOLERANCE, (
            f"token {differing[0]} is {ours[differing[0]]}, not {theirs[differing[0]]}"
        )
