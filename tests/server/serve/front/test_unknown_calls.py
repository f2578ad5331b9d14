"""A template with calls that no parser reads is reported at the start."""

import logging

import pytest

from server.front.tokenizer import facts_of
from server.options.reading import options_from_keywords
from server.serve.front.served_model import warn_of_unknown_calls

ODD = "{% for tool in tools %}{{ tool }}{% endfor %}{{ messages }}<<CALL>>"


@pytest.mark.parametrize(
    ("template", "chosen", "warns"),
    [
        (ODD, {}, True),
        (ODD, {"tool_call_parser": "hermes"}, False),
        (ODD.replace("<<CALL>>", "<tool_call>"), {}, False),
        ("{{ messages }}", {}, False),
        ("", {}, False),
    ],
)
def test_a_template_with_tools_and_no_known_calls_is_reported(
    caplog: pytest.LogCaptureFixture, template: str, chosen: dict[str, str], warns: bool
) -> None:
    options = options_from_keywords("some/model", chosen)
    with caplog.at_level(logging.WARNING):
        warn_of_unknown_calls(options, facts_of(template))
    assert ("chat template of some/model" in caplog.text and "--tool-call-parser" in caplog.text) == warns
