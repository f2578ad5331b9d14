"""gpt-oss' channels."""

from server.api.parsers.harmony import HarmonyParser
from tests.server.api.parsers.reading import Said, read
from tests.server.api.parsers.texts import TYPES

ANSWER = "<|channel|>analysis<|message|>User asks.<|end|><|start|>assistant<|channel|>final<|message|>It is 5.<|return|>"
TWO = (
    "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>Two.<|end|>"
    "<|start|>assistant<|channel|>commentary<|message|>Looking.<|end|><|start|>assistant"
    "<|channel|>final<|message|>Done."
)
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'


def harmony(
    text: str, prompt: str = "<|start|>user<|message|>x<|end|><|start|>assistant", calls: bool = True
) -> Said:
    return read(lambda: HarmonyParser(prompt=prompt, types=TYPES if calls else None), text)


def test_analysis_is_reasoning_and_final_is_content() -> None:
    assert harmony(ANSWER) == Said("It is 5.", "User asks.")


def test_messages_of_one_kind_are_paragraphs() -> None:
    assert harmony(TWO) == Said("Looking.\n\nDone.", "One.\n\nTwo.")


def test_a_call_may_stand_in_any_channel_and_have_no_arguments() -> None:
    assert harmony(CALL.replace("commentary", "analysis")).calls == [("f", '{"a": 1}')]
    assert harmony("<|channel|>commentary to=functions.f<|message|><|call|>").calls == [("f", "{}")]


def test_without_tools_a_call_is_content() -> None:
    assert harmony(CALL, calls=False) == Said('{"a": 1}')


def test_a_prompt_may_end_inside_a_message() -> None:
    assert harmony("It is 5.<|return|>", "<|start|>assistant<|channel|>final<|message|>") == Said("It is 5.")
    assert harmony("Hm.<|end|>", "<|start|>assistant<|channel|>analysis<|message|>So. ") == Said("", "Hm.")


def test_text_without_channels_is_content() -> None:
    assert harmony("Hello <|x|> there") == Said("Hello <|x|> there")
    assert harmony(" Hello", prompt="no harmony at all") == Said(" Hello")
    assert harmony("<|channel|>final") == Said(), "a truncated header does not count as content"
