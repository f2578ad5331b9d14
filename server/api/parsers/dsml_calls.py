"""DSML, the markup in which DeepSeek writes calls from V3.2 on: tags whose arguments say whether they are text.

Documented in the model repositories (encoding/): V3.2 has function_calls as the section's name, V4 tool_calls.

    <|DSML|function_calls>\\n<|DSML|invoke name="NAME">\\n<|DSML|parameter name="KEY" string="true">VALUE</|DSML|parameter>\\n
    </|DSML|invoke>\\n</|DSML|function_calls>

(The bars are U+FF5C.) What string="false" marks is JSON; where the attribute is missing, the function's schema decides.
"""

import re

from server.api.parsers.reader import Reading
from server.api.parsers.tag_calls import NamedTagParser, Tags
from server.api.parsers.values import ArgumentTypes

TOKEN = "\uff5cDSML\uff5c"
_IS_TEXT = re.compile(r"""\sstring=["'](true|false)["']""")
_ANY_JSON = ArgumentTypes({})  # knows no function: what is JSON is taken as such


def dsml_tags(section: str) -> Tags:
    """Return the tags of a version.

    Args:
        section: "function_calls" or "tool_calls".
    """
    return Tags(
        section=(f"<{TOKEN}{section}>", f"</{TOKEN}{section}>"),
        call=(f"<{TOKEN}invoke name=", f"</{TOKEN}invoke>"),
        argument=(f"<{TOKEN}parameter name=", f"</{TOKEN}parameter>"),
    )


class DsmlParser(NamedTagParser):
    """Named tags with one more attribute."""

    def __init__(self, section: str, types: ArgumentTypes) -> None:
        super().__init__(dsml_tags(section), types)
        self.markers = (TOKEN,)

    def read_argument(self) -> Reading[bool]:
        """Read one argument; tell whether it was whole. Its text is raw: no line end is left out."""
        found = yield from self.until(">")
        key = self.name_in(found)
        if not key:
            return False
        said = _IS_TEXT.search(found.text)
        types = None if said is None else _ANY_TEXT if said[1] == "true" else _ANY_JSON
        return (yield from self.read_value(key, trim=_unchanged, types=types))


class _AnyText(ArgumentTypes):
    def is_text(self, function: str, argument: str) -> bool:
        """Say that everything is."""
        return True


_ANY_TEXT = _AnyText({})


def _unchanged(text: str) -> str:
    return text
