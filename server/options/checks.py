"""What the checks of command-line values share: the error, sizes, lists."""

import json


class OptionsError(ValueError):
    """A command-line value that cannot be served; the message says what was wrong and what is allowed."""


def parse_bytes(text: str, flag: str = "--kv-cache-memory") -> int:
    """Read a size such as `512M`, `2GiB` or `1073741824`; units are powers of 1024.

    Raises:
        OptionsError: the text is not a positive size.
    """
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
    digits = text.strip().upper().removesuffix("IB").removesuffix("B")
    unit = units.get(digits[-1:], 1)
    try:
        size = int(float(digits[:-1] if unit > 1 else digits) * unit)
    except (ValueError, OverflowError):
        size = 0
    if size <= 0:
        raise OptionsError(f"{flag} is {text!r}; give a size such as 512M or 2G")
    return size


def parse_strings(text: str, flag: str) -> tuple[str, ...]:
    """Read a JSON list of strings, the form in which vLLM takes lists.

    Raises:
        OptionsError: it is something else.
    """
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
        raise OptionsError(f"""{flag} is {text!r}; give a JSON list of strings such as '["*"]'""")
    return tuple(value)
