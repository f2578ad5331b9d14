"""Drafts under a structure: which may be tried, what a row after a draft may sample, and answers equal to plain decoding."""

import json
import random
from collections.abc import Sequence as Series
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from llguidance import LLParserLimits

from benchmarks.models.foreseeing import foresee
from scheduler.policy.request import FinishReason, Request, Structure
from scheduler.policy.sequence import Sequence
from scheduler.policy.speculative import parse_speculative_config
from scheduler.structure import grammar
from scheduler.structure.grammar import Forms, GrammarMatcher
from tests.fixtures import PoolOf
from tests.scheduler.drafts.test_served_drafts import MTP, NGRAM, SHARE, SUFFIX, NoCosts, drafter_of
from tests.scheduler.structure.test_serving import BYTES, FORMS, requests
from tests.scheduler.structure.test_serving import END as END_ID
from tests.support.engines.serving import Served, build, own_share, request, serve
from tests.support.models.families import VOCABULARY as NUM_TOKENS
from tests.support.models.mtp import write_mtp_checkpoint
from tests.support.requests.structures import END, OTHER_END, VOCABULARY, ids_of, matcher_of
from tests.support.requests.structures import NUM_TOKENS as NUM_MATCHED

SCHEMA = Structure(
    "json_schema",
    json.dumps({"type": "array", "items": {"enum": ["ab", 12, None]}, "maxItems": 5}),
)
FORMS_TO_FOLLOW = {
    "choice": (Structure("choice", '["abc", "axe"]'), "axe"),
    "regex": (Structure("regex", "[a-c]{2,9}-x*"), "abc-xxx"),
    "schema": (SCHEMA, '["ab",12]'),
    "grammar": (Structure("grammar", 'start: "(" start ")" | "x"\n'), "((x))"),
    "after": (Structure("choice", '["yes"]', after="</think>"), "x</think>yes"),
}


def allowed(matcher: GrammarMatcher, after: Series[int] = ()) -> set[int]:
    """Return the tokens allowed after drafts."""
    row = np.zeros(NUM_MATCHED, dtype=np.float32)
    matcher.mask(row, after)
    assert not matcher.failure
    return set(np.flatnonzero(row == 0).tolist())


@pytest.mark.parametrize("name", FORMS_TO_FOLLOW)
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_mask_behind_drafts_is_that_of_a_matcher_that_has_followed_them(
    name: str, ignore_eos: bool
) -> None:
    form, text = FORMS_TO_FOLLOW[name]
    drafts = ids_of(text)
    for begin in range(len(drafts)):
        matcher, plain = matcher_of(form, ignore_eos=ignore_eos), matcher_of(form, ignore_eos=ignore_eos)
        for token_id in drafts[:begin]:
            allowed(matcher)
            matcher.advance(token_id)
            plain.advance(token_id)
        count = matcher.look_ahead(drafts[begin:])
        assert count >= len(drafts) - begin - 1, "only drafts that complete the structure cannot be tried"
        for place in range(count):
            plain.advance(drafts[begin + place])
            assert allowed(matcher, drafts[begin : begin + place + 1]) == allowed(plain)
        fresh = matcher_of(form, ignore_eos=ignore_eos)
        for token_id in drafts[:begin]:
            fresh.advance(token_id)
        assert allowed(matcher) == allowed(fresh), "a look-ahead must not move the matcher"


@pytest.mark.parametrize("end", [END, OTHER_END])
def test_drafts_are_cut_before_one_that_the_form_forbids_ends_it_or_completes_it(end: int) -> None:
    matcher = matcher_of(Structure("regex", "ab*c{2}"))
    for drafts, count in (
        ("", 0),
        ("b", 0),
        ("abba", 3),
        ("abcc", 3),
        ("abccc", 3),
    ):
        assert matcher.look_ahead(ids_of(drafts)) == count, drafts
        assert not matcher.failure and not matcher.has_ended
    open_end = matcher_of(Structure("regex", "ab*"))
    assert open_end.look_ahead([*ids_of("ab"), end, *ids_of("b")]) == 2
    assert open_end.look_ahead([end]) == 0
    assert matcher.look_ahead([NUM_MATCHED + 5]) == 0, "a row may be wider than the vocabulary"


def test_a_matcher_that_failed_or_ended_has_nothing_ahead() -> None:
    matcher = matcher_of(Structure("regex", "ab"))
    matcher.advance(ord("b"))
    assert matcher.failure and matcher.look_ahead(ids_of("ab")) == 0
    done = matcher_of(Structure("regex", "ab*"))
    done.advance(ord("a"))
    done.advance(END)
    assert done.has_ended and done.look_ahead(ids_of("b")) == 0


TWO_WAYS = Structure(
    "grammar",
    'start: "x" A | "y" B\nA: /[ab]/\nB: /([a-z]{0,60}[0-9]|[a-m]{1,50}z|[k-z]+q){1,40}/\n',
)
TIGHT = {"step_lexer_fuel": 100, "max_lexer_states": 30}  # the second way exceeds both


@pytest.fixture(params=TIGHT)
def forms(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Forms:
    """Compile structures under a limit that one of two continuations exceeds."""
    limits = {name: getattr(grammar.LIMITS, name) for name in LIMITS} | {request.param: TIGHT[request.param]}
    monkeypatch.setattr(grammar, "LIMITS", LLParserLimits(**limits, verbose_errors=False))
    return Forms(VOCABULARY)


LIMITS = (
    "max_items_in_row", "initial_lexer_fuel", "step_lexer_fuel", "step_max_items", "max_lexer_states", "max_grammar_size",
)  # fmt: skip


def asking(name: str) -> Request:
    """Return a request that allows both continuations."""
    return request(name, (3, 4), structure=TWO_WAYS, stop_token_ids=(END,))


@pytest.mark.parametrize("masks_first", [True, False])
def test_a_limit_that_only_a_wrong_draft_reaches_cuts_drafts_and_fails_nothing(
    forms: Forms, masks_first: bool
) -> None:
    matcher, plain = forms.matcher_for(asking("1")), forms.matcher_for(asking("2"))
    if masks_first:
        allowed(matcher)
    assert matcher.look_ahead(ids_of("xa")) == 1, "the second token completes the structure"
    assert matcher.look_ahead(ids_of("yz")) == 0
    assert allowed(matcher) == {ord("x"), ord("y")}
    matcher.advance(ord("x"))
    assert matcher.look_ahead(ids_of("a")) == 0, "it must not draft any more"
    assert allowed(matcher) == {ord("a"), ord("b")}
    matcher.advance(ord("b"))
    assert matcher.has_ended and not matcher.failure
    plain.advance(ord("x"))
    assert allowed(plain) == {ord("a"), ord("b")}, "another request with the structure is unaffected"


def test_a_request_that_reaches_a_limit_fails_alone(forms: Forms) -> None:
    """Also while another with the same structure is in progress, and for later ones."""
    failing, other = forms.matcher_for(asking("1")), forms.matcher_for(asking("2"))
    other.advance(ord("x"))
    failing.advance(ord("y"))
    row = np.zeros(NUM_MATCHED, dtype=np.float32)
    failing.mask(row)
    assert "lexer error" in (failing.failure or "") and not row.any()
    later = forms.matcher_for(asking("3"))
    later.advance(ord("x"))
    for each in (other, later):
        assert allowed(each) == {ord("a"), ord("b")}
        each.advance(ord("a"))
        assert each.has_ended and not each.failure


@settings(max_examples=60, deadline=None, derandomize=True)
@drawn(st.sampled_from(sorted(FORMS_TO_FOLLOW)), st.integers(0, 1 << 30))
def test_any_drafts_leave_an_answer_what_it_is(name: str, seed: int) -> None:
    """A random walk with the walk's own tokens as drafts, damaged at random."""
    form, _ = FORMS_TO_FOLLOW[name]
    generator = random.Random(seed)
    plain, tried = matcher_of(form), matcher_of(form)
    for _ in range(40):
        drafts = _walk(plain, generator, 6)
        if drafts and generator.random() < 0.5:
            drafts[generator.randrange(len(drafts))] = generator.randrange(NUM_MATCHED)
        count = tried.look_ahead(drafts)
        for place in range(count + 1):
            mine, theirs = allowed(tried, drafts[:place]), allowed(plain)
            assert mine == theirs
            ends = {END, OTHER_END}
            right = place < count and generator.random() < 0.8
            token = drafts[place] if right else generator.choice(sorted(theirs - ends) or sorted(theirs))
            plain.advance(token)
            tried.advance(token)
            assert (tried.has_ended, tried.failure) == (plain.has_ended, plain.failure)
            if plain.has_ended or not right:
                break
        if plain.has_ended:
            return


def _walk(matcher: GrammarMatcher, generator: random.Random, most: int) -> list[int]:
    """Return tokens that may come next, found without changing the matcher."""
    drafts: list[int] = []
    while len(drafts) < most and matcher.look_ahead(drafts) == len(drafts):
        drafts.append(generator.choice(sorted(allowed(matcher, drafts))))
    return drafts


Tokens = dict[str, tuple[list[int], FinishReason | None]]
MORE = {
    "after": Structure("regex", "[a-f]{2}-[0-9]{9}", after="ab"),
    "schema of many": Structure(
        "json_schema", json.dumps({"type": "array", "items": {"type": "integer"}, "minItems": 9})
    ),
}


def structured() -> list[Request]:
    """Return requests with and without structures, some with further end conditions or a minimum length."""
    made = requests(num_logprobs=0)
    for at, (name, form) in enumerate(MORE.items()):
        made.append(request(name, (7, 9, 11), structure=form, max_tokens=60, stop_token_ids=(END_ID,)))
        made.append(request(f"{name} drawn", (7, 9), structure=form, max_tokens=60, temperature=1.0, seed=at))
    for count in (1, 2, 3):
        form = FORMS["regex"]
        made.append(
            request(f"cut at {count}", (5, 6), structure=form, max_tokens=count, stop_token_ids=(END_ID,))
        )
    patient: dict[str, Any] = {
        "structure": Structure("regex", "x*"),
        "stop_token_ids": (END_ID,),
        "min_tokens": 9,
    }
    made.append(request("patient", (8, 9), max_tokens=40, temperature=1.0, seed=3, **patient))
    bytes_ = tuple(range(3, 250, 5))  # one of them ends the answer
    made.append(
        request(
            "stopped", (8, 8), max_tokens=40, stop_token_ids=bytes_, temperature=1.0, seed=4, min_tokens=5
        )
    )
    return made


def tokens_of(served: Served) -> Tokens:
    """Return every answer with the bits of its logprobs and its finish reason."""
    ends = {output.request_id: output.finish_reason for output in served.outputs if output.finish_reason}
    return {name: (token_ids, ends.get(name)) for name, token_ids in served.token_ids.items()}


class Damaged:
    """Drafts the known answer, damaged at random and beyond its end. A `Source`."""

    def __init__(self, known: Tokens) -> None:
        self._known, self._random = known, random.Random(7)

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        """Draft as many tokens as allowed."""
        begin = sequence.num_output_tokens
        drafts = [*self._known[sequence.request.request_id][0][begin:], END_ID, ord("x"), ord("1")][:most]
        if self._random.random() < 0.4:
            drafts[self._random.randrange(len(drafts))] = self._random.randrange(NUM_TOKENS)
        return drafts

    def forget(self, sequence: Sequence) -> None: ...


def served_with(
    directory: Path,
    config: str | None,
    known: Tokens | None,
    wanted: list[Request] | None = None,
    **settings: Any,
) -> tuple[Tokens, int]:
    """Serve this rank's share. Return the answers and the number of accepted drafts."""
    speculative = parse_speculative_config(config) if config else None
    built = build(
        directory,
        load_vocabulary=lambda: BYTES,
        max_model_len=160,
        speculative_config=speculative,
        **settings,
    )
    if speculative is not None:
        drafter = drafter_of(built)
        drafter.costs = NoCosts()
        if known is not None:
            drafter._source = Damaged(known)
    found = tokens_of(serve(built, own_share(structured()) if wanted is None else wanted))
    stats = built.scheduler.stats
    assert stats.num_free_blocks == stats.num_blocks
    return found, drafter_of(built).counts.num_accepted_tokens if speculative else 0


@pytest.fixture(scope="module")
def foreseen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint with a multi-token-prediction layer that is right about half of the time."""
    directory = tmp_path_factory.mktemp("foreseen")
    write_mtp_checkpoint("deepseek_v3", directory, change=partial(foresee, share=SHARE))
    return directory


@pytest.fixture(scope="module")
def plain(foreseen: Path) -> Tokens:
    return served_with(foreseen, None, None)[0]


def test_the_cases_end_in_all_ways(plain: Tokens) -> None:
    assert {end for _, end in plain.values()} == {FinishReason.STOP, FinishReason.LENGTH}
    assert len(plain["patient"][0]) > 9 and 5 < len(plain["stopped"][0]) < 40
    assert [len(plain[f"cut at {count}"][0]) for count in (1, 2, 3)] == [1, 2, 3]


@pytest.mark.crossed("config", every=2)
@pytest.mark.parametrize("config", [MTP, NGRAM, SUFFIX])
def test_drafts_change_no_structured_answer(foreseen: Path, plain: Tokens, config: str) -> None:
    found, num_right = served_with(foreseen, config, None)
    assert found == plain
    assert num_right > 5


@pytest.mark.crossed("options", every=2)
@pytest.mark.parametrize(
    "options", [{}, {"max_num_batched_tokens": 31, "max_num_seqs": 6}, {"kv_cache_bytes": 16 * 12 * 768}]
)
def test_damaged_drafts_change_no_structured_answer(
    foreseen: Path, plain: Tokens, options: dict[str, Any]
) -> None:
    found, num_right = served_with(foreseen, SUFFIX, plain, **options)
    assert found == plain
    assert num_right > 50


@pytest.mark.parametrize("config", [pytest.param(MTP, marks=pytest.mark.slow), SUFFIX])
def test_structured_answers_on_two_ranks(foreseen: Path, plain: Tokens, config: str, pool_of: PoolOf) -> None:
    parts = pool_of(2).run(served_with, foreseen, config, None if config == MTP else plain)
    assert {key: value for part, _ in parts for key, value in part.items()} == plain


def test_a_replay_with_drafts_goes_on_where_the_answer_was_cut(foreseen: Path, plain: Tokens) -> None:
    replays = [
        Request(
            **{
                **vars(asked),
                "replayed_ids": tuple(plain[asked.request_id][0][: len(plain[asked.request_id][0]) // 2]),
            }
        )
        for asked in structured()
    ]
    for config, known in ((MTP, None), (SUFFIX, plain)):
        for name, (rest, end) in served_with(foreseen, config, known, replays)[0].items():
            whole, wanted_end = plain[name]
            assert (whole[: len(whole) // 2] + rest, end) == (whole, wanted_end), name
