"""Ranks fail, rejoin, sleep and move experts while drafts are proposed and verified. No bit of any answer changes."""

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.models.foreseeing import foresee
from scheduler.moves.reports import MoveState
from scheduler.policy.request import FinishReason, Request
from scheduler.policy.speculative import parse_speculative_config
from scheduler.sampling.sampler import Sampled
from tests.fixtures import PoolOf
from tests.scheduler.drafts.test_served_drafts import MTP, NGRAM, SHARE, SUFFIX, always_draft
from tests.scheduler.epochs.test_regrouping import check_left, serving
from tests.scheduler.moves.test_relocation import Alone, Held, held_by, slot_digests
from tests.scheduler.test_invariance import Answers, collect
from tests.support.engines.crew import Crew, Doom
from tests.support.engines.moves import MovedRank, Moves, build_with_copies, targets
from tests.support.engines.serving import build, own_share, request, serve
from tests.support.models.families import VOCABULARY, write_checkpoint
from tests.support.models.mtp import write_mtp_checkpoint

PASSES = "scheduler.step.draft_passes.DraftPasses"
OWN_LAYER = -1  # the multi-token-prediction layer's experts come last in the model
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 7, "top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"temperature": 1.1, "seed": 8, "repetition_penalty": 1.2},
)


def requests(count: int, max_tokens: int = 60) -> list[Request]:
    """Return requests with several lengths and sampling parameters."""
    lengths = (3, 40, 17, 90, 26, 1)
    return [
        request(
            str(number),
            [
                3 + (7 * number + 5 * place + place * place) % (VOCABULARY - 3)
                for place in range(lengths[number % 6])
            ],
            max_tokens=max_tokens,
            num_logprobs=0,
            **WAYS[number % len(WAYS)],
        )
        for number in range(count)
    ]


def plain(directory: Path, wanted: list[Request], **settings: Any) -> Answers:
    """Return the answers of one rank without drafts."""
    return collect(serve(build(directory, max_model_len=320, **settings), wanted).outputs)


@pytest.fixture(scope="module")
def foreseen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint with a multi-token-prediction layer that is right about half of the time."""
    directory = tmp_path_factory.mktemp("foreseen")
    write_mtp_checkpoint("deepseek_v3", directory, change=partial(foresee, share=SHARE))
    return directory


def num_accepted(crew: Crew) -> int:
    """Return the number of accepted drafts on the ranks that serve at the end."""
    return sum(crew.stats[rank].drafts.num_accepted_tokens for rank in crew.members)


def lose_and_regain(
    directory: Path, given: str, doom: Doom, known: Answers | None, expected: Answers, **settings: Any
) -> None:
    """Serve on three ranks with drafts on all of them. One rank dies and rejoins."""
    wanted = requests(12)
    with serving(
        directory,
        3,
        wanted,
        at_first=9,
        dooms={1: doom},
        speculative_config=parse_speculative_config(given),
        prepare=partial(always_draft, known, [0, 0]),
        **settings,
    ) as crew:
        crew.until(lambda: crew.lost == [1])
        crew.order([0, 2])
        crew.replay(1, to=2)
        crew.until(lambda: crew.serve_in(1))
        crew.bring_back(1)
        crew.submit(0, wanted[9:10])
        crew.order([0, 1, 2])
        crew.until(lambda: crew.serve_in(2))
        crew.submit(1, wanted[10:])
    assert crew.logprobs == expected
    assert num_accepted(crew) > 20


# Over gloo every exchange runs in Python, so that a rank can be killed during one.
DOOMS: dict[str, tuple[str, Doom]] = {
    "during the step that tries drafts": ("gloo", Doom(12)),
    "before the step's tokens are taken": (
        "shm",
        Doom(function="scheduler.policy.scheduler.Scheduler.commit", calls=12),
    ),
    "during the first pass": ("gloo", Doom(12, layer=OWN_LAYER)),
    "between two passes": ("shm", Doom(function=f"{PASSES}._run_newest", calls=15)),
    "once the drafts are made": ("shm", Doom(function="scheduler.drafts.drafter.MadeDrafts.put", calls=14)),
}


@pytest.fixture(scope="module")
def plain_foreseen(foreseen: Path) -> Answers:
    return plain(foreseen, requests(12))


def first_tokens(answers: Answers, count: int, max_tokens: int) -> Answers:
    """Return the answers of `requests(count, max_tokens)`: the first requests' first tokens."""
    return {str(number): answers[str(number)][:max_tokens] for number in range(count)}


@pytest.mark.slow
@pytest.mark.parametrize("when", DOOMS)
def test_a_rank_lost_while_own_layers_draft_changes_no_bit(
    foreseen: Path, plain_foreseen: Answers, when: str
) -> None:
    backend, doom = DOOMS[when]
    lose_and_regain(foreseen, MTP, doom, None, plain_foreseen, all2all_backend=backend)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_next", "deepseek_v32"])
def test_a_rank_lost_between_draft_and_verification_changes_no_bit(family: str, tmp_path: Path) -> None:
    """Also with a recurrent model: its states return to the last accepted token."""
    write_checkpoint(family, tmp_path)
    expected = plain(tmp_path, requests(12))
    backend, doom = DOOMS["during the step that tries drafts"]
    lose_and_regain(tmp_path, SUFFIX, doom, expected, expected, all2all_backend=backend)


@pytest.mark.slow
def test_a_rank_that_is_stuck_in_a_pass_is_found_by_its_heartbeats(foreseen: Path) -> None:
    settings: dict[str, Any] = {
        "distributed_timeout_s": 500.0,
        "heartbeat_timeout_s": 0.4,
        "all2all_backend": "gloo",
    }
    wanted = requests(3, max_tokens=220)
    with serving(
        foreseen,
        3,
        wanted,
        dooms={1: Doom(is_stuck=True, layer=OWN_LAYER)},
        speculative_config=parse_speculative_config(MTP),
        prepare=partial(always_draft, None, [0, 0]),
        **settings,
    ) as crew:
        crew.until(lambda: bool(crew.suspects()), timeout_s=400.0)
        (suspect,) = crew.suspects()
        assert suspect.rank == 1 and not crew.faults
        crew.kill(1)
        crew.order([0, 2])
        crew.replay(1, to=0)
    assert crew.logprobs == plain(foreseen, wanted)


def moving(directory: Path, given: str, known: Answers | None, count: int) -> tuple[MovedRank, Held, int]:
    """Serve with drafts while experts move, also those of drafting layers. Return also what the slots hold at the end."""
    speculative = parse_speculative_config(given)
    built = build_with_copies(directory, 6, speculative_config=speculative)
    counts = [0, 0]
    always_draft(known, counts, built)
    start = built.relocation.placement
    wanted = targets(start, count)
    assert all((each.local(dist.get_rank())[-1] != start.local(dist.get_rank())[-1]).any() for each in wanted)
    moved = Moves(built, wanted).serve(own_share(requests(8, 40)), own_share(requests(8, 40)))
    return moved, held_by(built), counts[0]


@pytest.mark.crossed("method", every=2)
@pytest.mark.parametrize("method", ["mtp", "suffix"])
def test_drafts_while_experts_move_change_no_bit(
    foreseen: Path, plain_foreseen: Answers, method: str, pool_of: PoolOf
) -> None:
    expected = first_tokens(plain_foreseen, 8, 40)
    given, known = (MTP, None) if method == "mtp" else (SUFFIX, expected)
    drafting = build(foreseen, max_model_len=160, speculative_config=parse_speculative_config(given))
    alone = Alone({}, slot_digests(drafting))
    parts = pool_of(2).run(moving, foreseen, given, known, 2)
    found = {key: rows for moved, *_ in parts for key, rows in collect(moved.served.outputs).items()}
    assert found == expected
    for moved, held, num_right in parts:
        assert moved.states() == [
            (version, state) for version in (1, 2) for state in (MoveState.VERIFIED, MoveState.SERVING)
        ]
        assert not alone.has_changed(held) and num_right > 20


def waking(directory: Path, given: str) -> tuple[Answers, int]:
    """Serve waves of requests. Ranks sleep between waves, and one has no request in two of them."""
    built = build(directory, max_model_len=320, speculative_config=parse_speculative_config(given))
    counts = [0, 0]
    always_draft(None, counts, built)
    wanted, rank = requests(9, 30), dist.get_rank()
    waves = [
        wanted[:3] if rank == 0 else [],
        wanted[3:6] if rank == 1 else [],
        [],
        wanted[6:7] if rank == 0 else wanted[7:9],
    ]
    return collect(serve(built, *waves).outputs), counts[0]


@pytest.mark.crossed("given", every=2)
@pytest.mark.parametrize("given", [MTP, NGRAM])
def test_ranks_that_sleep_wake_or_have_nothing_to_draft_change_no_bit(
    foreseen: Path, plain_foreseen: Answers, given: str, pool_of: PoolOf
) -> None:
    parts = pool_of(2).run(waking, foreseen, given)
    found = {key: rows for answers, _ in parts for key, rows in answers.items()}
    assert found == first_tokens(plain_foreseen, 9, 30)
    assert given == NGRAM or all(num_right > 5 for _, num_right in parts)


@pytest.mark.slow
def test_an_abort_while_a_step_with_drafts_is_broken_off_ends_that_request_alone(
    foreseen: Path, plain_foreseen: Answers
) -> None:
    """The drafts of all others run again in the next epoch. Results of the aborted request are discarded."""
    doom = Doom(function="scheduler.policy.scheduler.Scheduler.commit", calls=6)
    wanted = requests(9)
    with Crew(
        foreseen,
        3,
        dooms={1: doom},
        speculative_config=parse_speculative_config(MTP),
        prepare=partial(always_draft, None, [0, 0]),
    ) as crew:
        for rank in range(3):
            crew.submit(rank, wanted[rank::3])
        crew.until(lambda: {rank for rank, _ in crew.faults} == {0, 2})
        crew.abort("0")
        crew.order([0, 2])
        crew.replay(1, to=2)
        crew.until(crew.is_done)
        check_left(crew)
    assert crew.ends["0"] == "abort" and 0 < len(crew.logprobs["0"]) < 60
    assert crew.logprobs["0"] == plain_foreseen["0"][: len(crew.logprobs["0"])]
    for each in wanted[1:]:
        assert crew.logprobs[each.request_id] == plain_foreseen[each.request_id]


def test_a_deadline_or_an_abort_amid_drafts_leaves_what_was_delivered(
    foreseen: Path, plain_foreseen: Answers
) -> None:
    built = build(foreseen, max_model_len=320, speculative_config=parse_speculative_config(MTP))
    always_draft(None, [0, 0], built)
    steps = itertools.count()
    built.engine._clock = lambda: float(next(steps))
    wanted = [
        Request(**{**vars(each), "deadline_s": 4.0 + 2 * at} if at < 4 else vars(each))
        for at, each in enumerate(requests(6))
    ]
    run = built.runner.run

    def abort_one(*arguments: Any, **options: Any) -> Sampled:
        if built.engine.step == 5:
            built.engine.abort("4")
        return run(*arguments, **options)

    built.runner.run = abort_one  # type: ignore[method-assign]
    served = serve(built, wanted)
    ends = {output.request_id: output.finish_reason for output in served.outputs if output.finish_reason}
    assert ends == {
        **dict.fromkeys("0123", FinishReason.DEADLINE), "4": FinishReason.ABORT, "5": FinishReason.LENGTH,
    }  # fmt: skip
    for name, rows in collect(served.outputs).items():
        assert rows == plain_foreseen[name][: len(rows)] and len(rows) > 3
    assert built.scheduler.stats.num_free_blocks == built.scheduler.stats.num_blocks


@pytest.mark.crossed("max_model_len", every=2)
@pytest.mark.parametrize(
    "max_model_len", [43, 50, *(pytest.param(length, marks=pytest.mark.slow) for length in (44, 48, 100))]
)
def test_drafts_end_where_the_context_or_max_tokens_does(foreseen: Path, max_model_len: int) -> None:
    """At every position within a step and within a block."""
    wanted = [each for each in requests(6, 60) if len(each.prompt_ids) < max_model_len - 1]
    wanted += [
        request(f"few {count}", range(3, 20), max_tokens=count, num_logprobs=0, num_prompt_logprobs=0)
        for count in (1, 2, 3, 4, 5)
    ]
    expected = collect(serve(build(foreseen, max_model_len=max_model_len), wanted).outputs)
    for given, known in ((MTP, None), (SUFFIX, expected), (NGRAM, None)):
        built = build(
            foreseen, max_model_len=max_model_len, speculative_config=parse_speculative_config(given)
        )
        always_draft(known, [0, 0], built)
        assert collect(serve(built, wanted).outputs) == expected
        assert built.scheduler.stats.num_free_blocks == built.scheduler.stats.num_blocks
