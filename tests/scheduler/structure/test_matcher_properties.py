"""Whatever the schema, an answer of a model that knows nothing parses and is valid under it."""

import json
from typing import Any

import jsonschema
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.policy.request import FinishReason, Structure
from tests.support.structures import answer_of, generate

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
    assert sequence.finish_reason(1 << 20) is FinishReason.STOP, "every one of these forms is finite"
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
