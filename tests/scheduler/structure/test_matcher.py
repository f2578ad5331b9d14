"""Which tokens may come next, when an answer ends, and which of two conflicting parameters wins. Answers sampled under
any schema are valid."""

import json
from typing import Any

import jsonschema
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.policy.request import FinishReason, Structure
from scheduler.structure.compiler import Vocabulary, vocabulary_from_json, vocabulary_to_json
from scheduler.structure.grammar import GrammarMatcher, compile_structure, open_tokenizer
from tests.support.requests.structures import (
    END,
    LONGER,
    NUM_TOKENS,
    OTHER_END,
    ROLE,
    TOKENIZER,
    VOCABULARY,
    allowed_by,
    answer_of,
    generate,
    ids_of,
    matcher_of,
)


def longer(token: bytes) -> int:
    """Return the id of a longer token."""
    return 259 + LONGER.index(token)


def follow(matcher: GrammarMatcher, text: str) -> GrammarMatcher:
    for token_id in ids_of(text):
        matcher.advance(token_id)
    assert not matcher.failure
    return matcher


def test_every_spelling_of_what_may_come_is_allowed() -> None:
    allowed = allowed_by(matcher_of(Structure("choice", '["abc", "axe"]')))
    assert allowed == {ord("a"), longer(b"ab"), NUM_TOKENS - 1}, "duplicates of a token must all be allowed"


def test_a_token_may_cross_from_one_part_into_the_next() -> None:
    matcher = follow(matcher_of(Structure("json_schema", '{"enum": [{"ab": true}]}')), "{")
    assert longer(b'": ') not in allowed_by(matcher)
    follow(matcher, '"ab')
    assert {ord('"'), longer(b'":'), longer(b'": ')} <= allowed_by(matcher)


def test_the_end_is_allowed_where_the_form_may_end_and_special_tokens_never_are() -> None:
    matcher = matcher_of(Structure("regex", "ab*"))
    assert allowed_by(matcher) == {ord("a"), longer(b"ab"), NUM_TOKENS - 1}
    matcher = follow(matcher, "a")
    assert allowed_by(matcher) == {ord("b"), END, OTHER_END}
    assert ROLE not in allowed_by(matcher_of(Structure("regex", "(?s:.*)")))


def test_the_name_of_a_special_token_may_be_spelled_in_bytes_only() -> None:
    matcher = matcher_of(Structure("choice", '["<end>", "<role>"]'))
    assert allowed_by(matcher) == {ord("<")}


def test_a_form_that_cannot_go_on_has_ended_with_its_last_token() -> None:
    for form, text in (
        (Structure("choice", '["ab", "b"]'), "ab"),
        (Structure("json_schema", '{"type": "object", "additionalProperties": false}'), "{}"),
        (Structure("regex", "a{3}"), "aaa"),
        (Structure("grammar", 'start: "(" start ")" | "x"\n'), "(x)"),
    ):
        matcher = follow(matcher_of(form), text[:-1])
        assert not matcher.has_ended
        assert follow(matcher, text[-1]).has_ended


def test_with_ignore_eos_the_end_is_never_allowed_and_a_complete_form_ends_all_the_same() -> None:
    assert allowed_by(follow(matcher_of(Structure("regex", "ab*"), ignore_eos=True), "ab")) == {ord("b")}
    sequence = generate(Structure("choice", '["abc", "axe"]'), ignore_eos=True)
    assert sequence.finish_reason(100) is FinishReason.STOP
    assert answer_of(sequence) in ("abc", "axe")
    assert generate(Structure("regex", "ab*"), ignore_eos=True, max_tokens=9).num_output_tokens == 9
    nothing = generate(Structure("regex", ""), ignore_eos=True)
    assert (answer_of(nothing), nothing.finish_reason(100)) == ("", FinishReason.STOP)


def test_min_tokens_keeps_a_form_going_while_it_can_and_no_longer() -> None:
    assert generate(Structure("regex", "x*"), min_tokens=30).num_output_tokens > 30
    sequence = generate(Structure("choice", '["no"]'), min_tokens=30)
    assert (answer_of(sequence), sequence.finish_reason(100)) == ("no", FinishReason.STOP)


def test_max_tokens_cuts_and_says_length_unless_the_form_is_complete() -> None:
    cut = generate(Structure("regex", "x{50}"), max_tokens=9)
    assert (answer_of(cut), cut.finish_reason(100)) == ("x" * 9, FinishReason.LENGTH)
    whole = generate(Structure("regex", "x{9}"), max_tokens=9)
    assert (answer_of(whole), whole.finish_reason(100)) == ("x" * 9, FinishReason.STOP)


def test_a_token_that_is_not_allowed_is_a_failure_that_stays() -> None:
    matcher = matcher_of(Structure("regex", "ab"))
    matcher.advance(ord("b"))
    assert "98" in (matcher.failure or "")
    matcher.advance(ord("a"))
    row = np.zeros(NUM_TOKENS, dtype=np.float32)
    matcher.mask(row)
    assert "98" in (matcher.failure or "") and not row.any(), "the row must stay unchanged"


def test_a_form_that_no_token_can_go_on_with_is_a_failure() -> None:
    tokens = (b"a", b"<end>")
    small = Vocabulary(tokens=tokens, special_ids=frozenset({1}), end_ids=frozenset({1}))
    compiled = compile_structure(Structure("regex", "ab"), open_tokenizer(small))
    matcher = GrammarMatcher(compiled, small, ignore_eos=False)
    matcher.advance(0)
    row = np.zeros(2, dtype=np.float32)
    matcher.mask(row)
    assert "no token" in (matcher.failure or "") and not row.any()


def test_rows_wider_than_the_vocabulary_are_masked_to_their_end() -> None:
    allowed = allowed_by(matcher_of(Structure("regex", ".")), NUM_TOKENS + 100)
    assert allowed and max(allowed) < NUM_TOKENS


def test_a_vocabulary_survives_json() -> None:
    assert vocabulary_from_json(vocabulary_to_json(VOCABULARY)) == VOCABULARY
    assert TOKENIZER.vocab_size == NUM_TOKENS + 1


NAMES = st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF), max_size=4)
VALUES = st.one_of(st.none(), st.booleans(), st.integers(-999, 999), NAMES)


def _object(properties: dict[str, Any], num_required: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties)[:num_required],
        "additionalProperties": False,
    }


def _bounded(low: int, span: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": low, "maximum": low + span}


LEAVES = st.one_of(
    st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"const": {"a": [1, "x"]}}]),
    st.builds(_bounded, st.integers(-300, 300), st.integers(0, 500)),
    st.builds(lambda values: {"enum": values}, st.lists(VALUES, min_size=1, max_size=4)),
    st.builds(lambda size: {"type": "string", "maxLength": size}, st.integers(0, 6)),
    st.sampled_from(
        [
            {"type": "string", "pattern": "^[a-c]{1,4}$"},
            {"type": "string", "format": "date"},
            {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
        ]
    ),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(_object, st.dictionaries(NAMES, inner, max_size=3), st.integers(0, 3)),
        st.builds(lambda item: {"type": "array", "items": item, "maxItems": 3}, inner),
        st.builds(lambda one, other: {"anyOf": [one, other]}, inner, inner),
    ),
    max_leaves=5,
)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(SCHEMAS, st.integers(0, 1 << 30), st.sampled_from([0.0, 0.7, 1.5]))
def test_what_is_sampled_under_a_schema_is_valid_under_it(
    schema: dict[str, Any], seed: int, temperature: float
) -> None:
    sequence = generate(
        Structure("json_schema", json.dumps(schema)), seed=seed, temperature=temperature, top_p=0.95, top_k=40
    )
    assert sequence.matcher is not None and not sequence.matcher.failure
    assert sequence.finish_reason(1 << 20) is FinishReason.STOP, "all these structures are finite"
    jsonschema.validate(json.loads(answer_of(sequence)), schema)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=5), st.integers(0, 1 << 30))
def test_what_is_sampled_under_a_choice_is_one_of_it(choices: list[str], seed: int) -> None:
    form = Structure("choice", json.dumps(choices))
    assert answer_of(generate(form, seed=seed)) in choices


@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.integers(0, 1 << 30), st.integers(1, 60))
def test_what_is_cut_is_the_head_of_something_valid(seed: int, max_tokens: int) -> None:
    """The rest is sampled again after the cut, as after a replay."""
    form = Structure(
        "json_schema", json.dumps({"type": "array", "items": {"enum": ["a", 12, None]}, "maxItems": 9})
    )
    cut = generate(form, seed=seed, max_tokens=max_tokens)
    whole = generate(form, seed=seed)
    assert answer_of(whole).startswith(answer_of(cut))
