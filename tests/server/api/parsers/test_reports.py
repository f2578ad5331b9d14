"""Public reports of errors in other servers' parsers, each with the right answer.

They concern values that quote tags, prose that shows the syntax, values and types, unparseable text, and blanks.
"""

import json

import pytest

from server.api.parsers.arguments import ArgumentTypes
from server.api.parsers.registry import Markup
from tests.server.api.parsers.reading import Said, read

SAVE = ArgumentTypes(
    {
        "save": {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "body": {"type": "string"},
                "n": {"type": "number"},
                "tags": {"type": "array", "items": {"type": "string"}},
                "more": {"$ref": "#/$defs/A%20B"},
                "v": {"const": "5"},
            },
            "$defs": {"A B": {"type": "object"}, "A%20B": {"type": "string"}},
        }
    }
)
FENCE = "`" * 3


def deepseek(text: str) -> str:
    """Spell special tokens as DeepSeek does."""
    for word in ("tool_calls_begin", "tool_calls_end", "tool_call_begin", "tool_call_end", "tool_sep"):
        text = text.replace(f"<|{word}|>", f"<\uff5c{word}\uff5c>".replace("_", "\u2581"))
    return text.replace("|DSML|", "\uff5cDSML\uff5c")


def qwen(body: str) -> str:
    return f"<tool_call>\n<function=save>\n{body}</function>\n</tool_call>"


def param(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>\n"


def minimax(body: str) -> str:
    return f'<minimax:tool_call>\n<invoke name="save">\n{body}</invoke>\n</minimax:tool_call>'


def glm(value: str, key: str = "body") -> str:
    return f"<tool_call>save\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"


def dsml(body: str) -> str:
    return deepseek(
        f'<|DSML|function_calls>\n<|DSML|invoke name="save">\n{body}</|DSML|invoke>\n</|DSML|function_calls>'
    )


def kimi(call_id: str, arguments: str = "{}", section: str = "tool_calls_section") -> str:
    return (
        f"<|{section}_begin|><|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
        f"<|{section}_end|>"
    )


def hermes(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "save", "arguments": {arguments}}}\n</tool_call>'


def answer(tools: str, text: str, prompt: str = "", reasoning: str = "none", continues: bool = False) -> Said:
    """Parse an answer whole and character by character."""
    markup = Markup(tools=tools, reasoning=reasoning, continues=continues)
    return read(lambda: markup.parser(prompt, SAVE), text)


QUOTES = [
    ("qwen3_coder", qwen(param("body", "echo '</parameter>' x") + param("path", "p")), {"body": "echo '</parameter>' x", "path": "p"}),
    ("qwen3_coder", qwen(param("body", "a </function> b\n</tool_call>\nc")), {"body": "a </function> b\n</tool_call>\nc"}),
    ("qwen3_coder", qwen(param("body", "use <parameter=path> here")), {"body": "use <parameter=path> here"}),
    ("qwen3_coder", qwen(param("body", "\n<parameter=KEY>\nx")), {"body": "\n<parameter=KEY>\nx"}),
    ("qwen3_coder", qwen(param("path", "p") + param("body", "\n<parameter=path>\nx")), {"path": "p", "body": "\n<parameter=path>\nx"}),
    ("qwen3_coder", qwen(param("tags", '["</parameter>", "<parameter=path>"]')), {"tags": ["</parameter>", "<parameter=path>"]}),
    ("minimax_m2", minimax('<parameter name="body">a </parameter> b </invoke> c</parameter>\n'), {"body": "a </parameter> b </invoke> c"}),
    ("deepseek_v32", dsml(deepseek('<|DSML|parameter name="body" string="true">a </|DSML|parameter> b</|DSML|parameter>\n')), {"body": deepseek("a </|DSML|parameter> b")}),
    ("glm45", glm("a </tool_call> b"), {"body": "a </tool_call> b"}),
    ("glm45", glm("a </arg_value> <arg_key> b"), {"body": "a </arg_value> <arg_key> b"}),
    ("gemma4", '<|tool_call>call:save{body:<|"|>a <|"|> b}<|"|>}<tool_call|>', {"body": 'a <|"|> b}'}),
    ("gemma4", '<|tool_call>call:save{body:<|"|><|"|>)<|"|>}<tool_call|>', {"body": '<|"|>)'}),
    ("lfm2", "<|tool_call_start|>[save(body='it's (a, b)')]<|tool_call_end|>", {"body": "it's (a, b)"}),
    ("hermes", hermes('{"body": "</tool_call> \\"}"}'), {"body": '</tool_call> "}'}),
]  # fmt: skip


@pytest.mark.parametrize(("tools", "text", "arguments"), QUOTES)
def test_a_value_may_quote_tags(tools: str, text: str, arguments: dict[str, object]) -> None:
    said = answer(tools, text)
    assert (said.content, [(name, json.loads(value)) for name, value in said.calls]) == (
        "",
        [("save", arguments)],
    )


UNCLOSED = [
    ("qwen3_coder", "<tool_call>\n<function=save>\n<parameter=path>\nA\n</tool_call>\n" + qwen(param("path", "B")), ["A", "B"]),
    ("qwen3_coder", qwen("<parameter=path>\nA\n") + qwen(param("path", "B")), ["A", "B"]),
    ("qwen3_coder", "<tool_call>\n<function=save>\n" + param("path", "A").rstrip("\n"), ["A"]),
    ("minimax_m2", '<minimax:tool_call><invoke name="save"><parameter name="path">A</minimax:tool_call>\n' + minimax('<parameter name="path">B</parameter>'), ["A", "B"]),
    ("glm45", "<tool_call>save\n<arg_key>path</arg_key>\n<arg_value>A\n</tool_call>\n" + glm("B", "path"), ["A\n", "B"]),
    ("glm45", "<tool_call>save\n<arg_key>path\n<arg_value>A</arg_value>\n</tool_call>", ["A"]),
]  # fmt: skip


@pytest.mark.parametrize(("tools", "text", "paths"), UNCLOSED)
def test_a_value_that_nobody_closed_ends_with_its_call(tools: str, text: str, paths: list[str]) -> None:
    assert [json.loads(arguments)["path"] for _, arguments in answer(tools, text).calls] == paths


PROSE = [
    ("qwen3_coder", "Write `<function=NAME>` first, then <parameter=KEY> for each.\nThat is all."),
    ("qwen3_coder", "Write <function=save> and so on."),
    ("qwen3_coder", "<tool_call>\n<function=other>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"),
    ("minimax_m2", 'Use <invoke name="x"> tags please'),
    ("llama3_json", '{"name": "Ada", "age": 36}'),
    ("llama3_json", '{"name": "save", "age": 36}'),
    ("llama4_pythonic", "[other(a=1)]"),
    ("llama4_pythonic", "[save(the file)] is what I do"),
    ("hermes", '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>'),
    ("hermes", "<tool_call>\n{\"name\": \"save\", \"arguments\": {'path': 1}}\n</tool_call>"),
    ("mistral", '[TOOL_CALLS]other[ARGS]{"a": 1}'),
    ("kimi_k2", kimi("call_abc")),
    ("kimi_k2", kimi("functions.save:0", "path: a")),
    ("kimi_k2", kimi("functions.save:0word")),
    ("gemma4", "<|tool_call>call:other{a:1}<tool_call|>"),
    ("openai", "Say to=functions.save, please."),
]  # fmt: skip


@pytest.mark.parametrize(("tools", "text"), PROSE)
def test_what_calls_no_offered_function_is_content(tools: str, text: str) -> None:
    assert answer(tools, text, reasoning="openai" if tools == "openai" else "none") == Said(text)


@pytest.mark.parametrize("tools", ["hermes", "qwen3_coder", "glm45", "kimi_k2", "deepseek_v3", "deepseek_v32", "minimax_m2", "mistral", "granite", "gemma4", "lfm2", "hy_v3", "cohere_command4"])  # fmt: skip
def test_blanks_before_a_mark_that_begins_no_call_stay(tools: str) -> None:
    for mark in Markup(tools=tools).markers(with_tools=True)[:1]:
        text = f"Use  {mark} here.\n\n  {mark}"
        assert answer(tools, text) == Said(text)


def test_real_calls_behind_prose_are_found() -> None:
    prose = "Write `<tool_call>` and <function=NAME>, then: "
    assert answer("qwen3_coder", prose + "\n" + qwen(param("path", "p"))) == Said(
        prose.rstrip(), "", [("save", '{"path": "p"}')]
    )


THINKING = [
    ("qwen3_coder", "qwen3", qwen(param("path", "."))),
    ("hermes", "qwen3", hermes('{"path": "."}')),
    ("minimax_m2", "minimax_m2", minimax('<parameter name="path">.</parameter>\n')),
    ("deepseek_v32", "deepseek_v3", dsml(deepseek('<|DSML|parameter name="path" string="true">.</|DSML|parameter>\n'))),
    ("kimi_k2", "kimi_k2", kimi("functions.save:0", '{"path": "."}')),
    ("glm45", "glm45", glm(".", "path")),
]  # fmt: skip


@pytest.mark.parametrize(("tools", "reasoning", "call"), THINKING)
def test_a_call_in_reasoning_that_is_never_closed_is_one(tools: str, reasoning: str, call: str) -> None:
    said = answer(tools, "I list.\n" + call, "<think>\n", reasoning)
    assert said == Said("", "I list.", [("save", '{"path": "."}')])
    twice = answer(tools, f"I list.\n{call}\n{call}", "<think>\n", reasoning)
    assert len(twice.calls) == 2 and twice.reasoning == "I list."


@pytest.mark.parametrize(("tools", "reasoning", "call"), THINKING[:4])
def test_a_draft_in_reasoning_is_reasoning(tools: str, reasoning: str, call: str) -> None:
    draft = f"I could {call} but\nno."
    said = answer(tools, f"{draft}</think>\n{call}", "<think>\n", reasoning)
    assert said == Said("", draft, [("save", '{"path": "."}')])
    assert answer(tools, draft, "<think>\n", reasoning) == Said("", draft)
    assert answer(tools, f"{call}</think>\nOk.", "<think>\n", reasoning) == Said("Ok.", call)


@pytest.mark.parametrize(("tools", "reasoning", "call"), THINKING)
def test_prose_about_calls_does_not_end_reasoning(tools: str, reasoning: str, call: str) -> None:
    mark = call[: call.index(">") + 1]
    said = answer(tools, f"The mark is {mark} I think.</think>\nYes.", "<think>\n", reasoning)
    assert said == Said("Yes.", f"The mark is {mark} I think.")


@pytest.mark.parametrize(
    "call_id",
    [
        "functions.save:0",
        "functions_save_1",
        "functionssave5",
        "save",
        "save:3",
        "functions.save",
        "functions-save-2",
    ],
)
def test_an_id_of_kimi_names_the_offered_function(call_id: str) -> None:
    assert answer("kimi_k2", kimi(call_id)).calls == [("save", "{}")]


def test_ids_tell_functions_apart_whose_names_begin_alike() -> None:
    types = ArgumentTypes({"get": {}, "get_2": {}, "a.b-c": {}})
    named = [
        types.of_call_id(each)
        for each in ("functions_get_2_0", "functions.get_2:1", "functions_get_7", "functions_a_b_c_0")
    ]
    assert named == ["get_2", "get_2", "get", "a.b-c"]


TYPES = [
    ("tags", "['x', 'y']", ["x", "y"]),
    ("tags", "('x', \"it's\",)", ["x", "it's"]),
    ("more", "{'a': None, 'b': [True, 1.5]}", {"a": None, "b": [True, 1.5]}),
    ("more", "{'a': 1e999}", "{'a': 1e999}"),
    ("more", '{"a": [1e999]}', '{"a": [1e999]}'),
    ("more", "{'a': open('x')}", "{'a': open('x')}"),
    ("n", "1e999", "1e999"),
    ("n", "NaN", "NaN"),
    ("v", "5", "5"),
]  # fmt: skip


@pytest.mark.parametrize(("argument", "text", "value"), TYPES)
def test_values_are_what_the_schema_says(argument: str, text: str, value: object) -> None:
    for tools, call in (
        ("qwen3_coder", qwen(param(argument, text))),
        ("glm45", glm(text, argument)),
        ("minimax_m2", minimax(f'<parameter name="{argument}">{text}</parameter>\n')),
    ):
        [(_, arguments)] = answer(tools, call).calls
        assert json.loads(arguments, parse_constant=pytest.fail) == {argument: value}


def test_arguments_in_json_are_strict_json() -> None:
    written = '{"n": NaN, "a": [-Infinity, 1e999, True, None, 1,], "s": "a\nb\\d", "t": 0x1F}'
    meant = {"n": "NaN", "a": ["-Infinity", "1e999", True, None, 1], "s": "a\nb\\d", "t": "0x1F"}
    for tools, text in (
        ("hermes", hermes(written)),
        ("kimi_k2", kimi("functions.save:0", written)),
        ("mistral", f"[TOOL_CALLS]save[ARGS]{written}"),
        ("llama3_json", f'{{"name": "save", "parameters": {written}}}'),
    ):
        [(_, arguments)] = answer(tools, text).calls
        assert json.loads(arguments, parse_constant=pytest.fail) == meant


WHOLE = [
    ("deepseek_v31", deepseek(f'<|tool_calls_begin|><|tool_call_begin|>save<|tool_sep|>{FENCE}json\n{{"path":"a"}}\n{FENCE}<|tool_call_end|><|tool_calls_end|>')),
    ("deepseek_v32", dsml('{"path":"a"}\n')),
    ("deepseek_v4", dsml('{"path":"a"}\n')),
    ("qwen3_coder", qwen('{"path":"a"}\n')),
    ("minimax_m2", minimax('{"path":"a"}\n')),
    ("glm45", '<tool_call>save\n{"path":"a"}\n</tool_call>'),
    ("kimi_k2", kimi("functions.save:0", '{"path":"a"}', "tool_call_section")),
]  # fmt: skip


@pytest.mark.parametrize(("tools", "text"), WHOLE)
def test_arguments_in_another_form_are_whole(tools: str, text: str) -> None:
    assert answer(tools, text) == Said("", "", [("save", '{"path":"a"}')])


BROKEN = [
    ("hermes", hermes('{"path": "a"} or so') + " Bye.", "or so}\n</tool_call> Bye."),
    ("hermes", '<tool_call>{"name": "save", "arguments": {"path": "a"}} {"name": "other"}</tool_call>', '{"name": "other"}</tool_call>'),
    ("kimi_k2", kimi("functions.save:0", '{"path": "a"} and more'), "and more<|tool_call_end|><|tool_calls_section_end|>"),
    ("lfm2", "<|tool_call_start|>[save(path='a', body=<b>)]<|tool_call_end|>", "body=<b>)]<|tool_call_end|>"),
    ("mistral", '[TOOL_CALLS]save[ARGS]{"path": "a"} and [1]', "and [1]"),
    ("openai", '<|channel|>commentary to=functions.save<|message|>{"path": "a"} and more<|call|>', "and more"),
]  # fmt: skip


@pytest.mark.parametrize(("tools", "text", "rest"), BROKEN)
def test_what_is_not_understood_behind_a_call_is_content(tools: str, text: str, rest: str) -> None:
    said = answer(tools, text, "<|start|>assistant", "openai" if tools == "openai" else "none")
    assert (said.content, [(name, arguments.rstrip("}")) for name, arguments in said.calls]) == (
        rest,
        [("save", '{"path": "a"')],
    )


def test_forms_that_models_of_dsml_write_are_calls() -> None:
    """A missing section, missing closing tags, and a self-closing tag."""
    argument = deepseek('<|DSML|parameter name="path" string="true">x 2>&1</|DSML|parameter>')
    head = deepseek('<|DSML|invoke name="save">')
    for text in (head + argument, dsml(argument), f"{head}\n{argument}\n" + deepseek("</|DSML|invoke>")):
        assert answer("deepseek_v32", text) == Said("", "", [("save", '{"path": "x 2>&1"}')])
    closed = deepseek('<|DSML|invoke name="save"/>')
    assert answer("deepseek_v32", closed) == Said("", "", [("save", "{}")])
    assert len(answer("deepseek_v32", closed + dsml(argument)).calls) == 2


HEADERS = [
    ("<|channel|>commentary to=functions.save<|end|><|start|>assistant<|channel|>final<|message|>Done.<|return|>", Said("Done.")),
    ("<|channel|>commentary to=functions.save<|start|>assistant<|channel|>final<|message|>Done.<|return|>", Said("Done.")),
    ("<|channel|>analysis<|channel|>final<|message|>Hi", Said("Hi")),
    ("<|channel|>analysis<|message|>Hm.<|end|> Out of place. <|start|>assistant<|channel|>final<|message|>Hi", Said("Out of place.\n\nHi", "Hm.")),
    ("<|channel|>commentary to=functions.save<|message|>All done.<|call|>", Said("All done.")),
    ("<|channel|>commentary to=functions.other<|message|>{}<|call|>", Said("{}")),
]  # fmt: skip


@pytest.mark.parametrize(("text", "said"), HEADERS)
def test_a_broken_header_of_harmony_makes_no_call(text: str, said: Said) -> None:
    prompt = "<|start|>user<|message|>hi<|end|><|start|>assistant"
    assert answer("openai", text, prompt, "openai") == said


PREFILLS = [
    ("qwen3", "<|im_start|>assistant\n<think>\nLet me go", "Yes.", "on."),
    ("deepseek_r1", "<\uff5cAssistant\uff5c><think>\nLet me go", "Yes.", "on."),
    ("glm45", "<|assistant|>\n<think>Let me go", "Yes.", "on."),
    ("kimi_k2", "<|im_middle|><think>Let me go", "Yes.", "on."),
    ("minimax_m2", "]~b]ai\n<think>\nLet me go", "Yes.", "on."),
    ("qwen3", "What is <think>?<|im_end|>\n<|im_start|>assistant\nIt goes", "on.\n</think>\n\nYes.", ""),
    ("qwen3", "<|im_start|>assistant\n<think>\nHm.\n</think>\n\nIt goes", "on.\n</think>\n\nYes.", ""),
]  # fmt: skip


@pytest.mark.parametrize(("reasoning", "prompt", "content", "thought"), PREFILLS)
def test_a_prefill_within_reasoning_goes_on_with_it(
    reasoning: str, prompt: str, content: str, thought: str
) -> None:
    said = answer("hermes", " on.\n</think>\n\nYes.", prompt, reasoning, continues=True)
    assert (said.content.strip(), said.reasoning.strip()) == (content, thought)
    markup = Markup(tools="hermes", reasoning=reasoning, continues=True)
    assert markup.bound(prompt).after == ("</think>" if thought else "")


def test_a_section_of_the_other_version_of_dsml_leaves_no_tags() -> None:
    call = dsml(deepseek('<|DSML|parameter name="path" string="true">a</|DSML|parameter>\n'))
    assert (
        answer("deepseek_v4", call)
        == answer("deepseek_v32", call)
        == Said("", "", [("save", '{"path": "a"}')])
    )
