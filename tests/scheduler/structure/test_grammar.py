"""Texts that a structure accepts, kind by kind."""

import json

import pytest

from scheduler.policy.request import Structure
from scheduler.structure.compiler import StructureError
from scheduler.structure.grammar import compile_structure
from tests.support.requests.structures import TOKENIZER, accepts

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def schema(content: object) -> Structure:
    """Return the structure of a schema."""
    return Structure("json_schema", json.dumps(content))


@pytest.mark.parametrize(
    ("text", "is_accepted"),
    [
        ('{"name": "Ada", "age": 36}', True),
        ('{"name":"Ada","age":36}', True),
        ('{\n  "name": "Ada",\n  "age": 36\n}', True),
        ('{"name": "Ada"}', False),
        ('{"name": "Ada Lovelace", "age": 36}', False),
        ('{"name": "Ada", "age": 151}', False),
        ('{"name": "Ada", "age": 36, "x": 1}', False),
        ('{"name": "Ada", "age": 36} ', False),
        ("", False),
    ],
)
def test_a_schema_takes_what_is_valid_under_it(text: str, is_accepted: bool) -> None:
    assert accepts(schema(PERSON), text) is is_accepted


GAPS = [
    ("", True),
    (" " * 4, True),
    (" " * 5, False),
    ("\t", True),
    ("\n\n" + " " * 64, True),
    ("\r\n  ", True),
    ("\n" * 3, False),
    ("\n" + " " * 65, False),
    (" \n", False),
]


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"x-guidance": {}},
        {"x-guidance": {"lenient": True}},
        {"x-guidance": {"whitespace_flexible": True}},
    ],
)
@pytest.mark.parametrize(("gap", "is_accepted"), GAPS)
def test_blanks_between_the_parts_of_json_are_bounded(
    said: dict[str, object], gap: str, is_accepted: bool
) -> None:
    text = f'{{"name":{gap}"Ada", "age": 36{gap}}}'
    assert accepts(schema(PERSON | said), text) is is_accepted


def test_a_schema_may_say_which_blanks_it_takes() -> None:
    wide = {"x-guidance": {"whitespace_pattern": " {0,9}"}}
    assert accepts(schema(PERSON | wide), '{"name":' + " " * 9 + '"Ada", "age": 36}')
    none = {"x-guidance": {"whitespace_flexible": False}}
    assert not accepts(schema(PERSON | none), '{"name": "Ada", "age": 36}')
    assert accepts(schema(PERSON | none), '{"name":"Ada","age":36}')


def test_json_object_takes_any_object_and_nothing_else() -> None:
    form = Structure("json_object")
    assert accepts(form, '{"a": [1, {"b": null}], "é": "\\u0001\\n"}') and accepts(form, "{}")
    assert not accepts(form, "[1]") and not accepts(form, "5") and not accepts(form, '{"a": }')


def test_a_recursive_schema_nests_as_deep_as_the_answer_likes() -> None:
    tree = {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"left": {"$ref": "#/$defs/node"}},
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    }
    for depth in (1, 2, 30):
        assert accepts(schema(tree), '{"left": ' * depth + "{}" + "}" * depth)


@pytest.mark.parametrize("regex", [r"[a-c]{2}\d+", r"^[a-c]{2}\d+$", r"^[a-c]{2}\d+"])
def test_a_regex_is_for_the_whole_answer_with_or_without_anchors(regex: str) -> None:
    form = Structure("regex", regex)
    assert accepts(form, "ab12") and accepts(form, "cc0")
    assert not accepts(form, "ab") and not accepts(form, "xab12") and not accepts(form, "ab12x")


def test_an_escaped_dollar_is_no_anchor() -> None:
    assert accepts(Structure("regex", r"\d+\$"), "5$") and accepts(Structure("regex", r"a\\$"), "a\\")


def test_a_choice_is_one_of_the_strings_exactly() -> None:
    form = Structure("choice", json.dumps(["yes", "no", 'say "é"\n', "yes, no", "a|b*"]))
    for text in ("yes", "no", 'say "é"\n', "yes, no", "a|b*"):
        assert accepts(form, text)
    for text in ("ye", "yess", "", "a", "say"):
        assert not accepts(form, text)


LARK = 'start: "(" start ")" | NUMBER\nNUMBER: /[0-9]+/\n'
GBNF = 'root ::= "(" root ")" | number\nnumber ::= [0-9]+\n'


@pytest.mark.parametrize("kind", ["grammar", "tool_calls"])
@pytest.mark.parametrize("grammar", [LARK, GBNF], ids=["lark", "gbnf"])
def test_a_grammar_is_lark_or_gbnf(kind: str, grammar: str) -> None:
    form = Structure(kind, grammar)
    assert accepts(form, "((12))") and accepts(form, "7")
    assert not accepts(form, "((12)") and not accepts(form, "()")


@pytest.mark.parametrize(
    "form",
    [schema(PERSON), Structure("regex", "x+"), Structure("choice", '["x"]'), Structure("grammar", LARK)],
)
def test_text_may_come_before_a_structure_up_to_its_mark(form: Structure) -> None:
    text = {"json_schema": '{"name": "Ada", "age": 1}', "grammar": "(1)"}.get(form.kind, "x")
    preceded = Structure(form.kind, form.text, after="</think>")
    assert accepts(preceded, f"let me see: {{1}} <b>\n</think>{text}")
    assert (
        not accepts(preceded, text)
        and not accepts(preceded, "hm</think>")
        and not accepts(preceded, "</think>y")
    )


@pytest.mark.parametrize(
    ("form", "word"),
    [
        (Structure("json_schema", "{"), "line 1"),
        (schema({"type": "strnig"}), "strnig"),
        (schema({"$ref": "#/$defs/none"}), "none"),
        (schema({"type": "string", "pattern": "("}), "("),
        (schema({"not": {"type": "string"}}), "not"),
        (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (Structure("regex", "(a"), "unclosed"),
        (Structure("regex", "(?=a)b"), "look"),
        (Structure("choice", "[]"), "list of choices is empty"),
        (Structure("grammar", "start: nothing\n"), "nothing"),
        (Structure("grammar", "not a grammar"), "::="),
        (Structure("grammar", "root ::= " + "(" * 5000), "nested"),
        (Structure("sonnet", ""), "sonnet"),
    ],
)
def test_what_cannot_be_compiled_is_an_error_that_says_why(form: Structure, word: str) -> None:
    with pytest.raises(StructureError) as caught:
        compile_structure(form, TOKENIZER)
    assert word in str(caught.value) and "\n" not in str(caught.value)
    assert 0 < len(str(caught.value)) <= 500
