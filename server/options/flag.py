"""An option: one field of a dataclass that declares its flag, type, default, help and accepted values.

`table` declares the options with `flag` and `switch`, and with `row` the flags of fields that the scheduler declares. These
produce the command line's parser, the check of every value, the keywords of `LLM(...)`, the options that child processes
receive, and docs/options.md. A flag may have several names; messages use the first.
"""

import argparse
import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

# A flag's name and the given value (a text, or a keyword's value) -> the option's value.
Reader = Callable[[str, Any], Any]
_METADATA = "flag"


class OptionsError(ValueError):
    """An option has an unsupported value. The message has the value and the allowed values."""


class Group(NamedTuple):
    """Related options, shown together by --help and docs/options.md."""

    title: str
    heeded_by: str  # the processes that use them


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One option on the command line."""

    group: Group
    # Such as ("--threads",): WideEP's name, then its aliases; MODEL has no dashes.
    names: tuple[str, ...]
    off_names: tuple[str, ...] = ()  # flags that turn a switch off
    help: str
    off_help: str = ""  # help of `off_names`
    read: Reader
    default: Any
    default_text: str | None = None  # the default as --help shows it; None shows the value itself
    metavar: str | None = None
    action: str = "store"  # argparse's, or "switch"
    nargs: str | None = None  # argparse's
    keyword: str = ""  # name in scripts; if empty, the first name with underscores
    taken_as: Mapping[str, str] = dataclasses.field(default_factory=dict)  # values of other programs -> ours
    taken_because: str = ""  # the reason, for the log line about such a value

    @property
    def name(self) -> str:
        """Return the name that messages use."""
        return (*self.names, *self.off_names)[0]

    @property
    def is_switch(self) -> bool:
        """Return whether the flag takes no value."""
        return self.action == "switch"


class Option(NamedTuple):
    """A flag and the field that its value goes to."""

    keyword: str  # its name in scripts
    path: tuple[str, ...]  # names of the fields, from the outermost dataclass inward
    flag: Flag


def flag(
    group: Group,
    *names: str,
    read: Reader,
    help: str,
    default: Any = None,
    default_text: str | None = None,
    metavar: str | None = None,
    action: str = "store",
    nargs: str | None = None,
    taken_as: Mapping[str, str] | None = None,
    taken_because: str = "",
) -> Any:
    """Declare a field whose flag takes a value."""
    declared = Flag(
        group=group, names=names, help=help, read=read, default=default, default_text=default_text,
        metavar=metavar, action=action, nargs=nargs, taken_as=taken_as or {}, taken_because=taken_because,
    )  # fmt: skip
    return dataclasses.field(default=default, metadata={_METADATA: declared})


def switch(
    group: Group,
    *on: str,
    off: Sequence[str] = (),
    help: str = "",
    off_help: str = "",
    default: bool = False,
    keyword: str = "",
) -> Any:
    """Declare a field whose flags take no value; flags in `on` turn it on, flags in `off` turn it off."""
    declared = Flag(
        group=group, names=on, off_names=tuple(off), help=help, off_help=off_help, read=_read_switch,
        default=default, action="switch", keyword=keyword,
    )  # fmt: skip
    return dataclasses.field(default=default, metadata={_METADATA: declared})


def row(declared: Any) -> Flag:
    """Declare the flag of a field in a nested record that cannot name flags itself.

    The row is the class attribute RECORD_FIELD, such as `engine_dtype`. Its place orders the flags; its default is the field's.
    """
    found: Flag = declared.metadata[_METADATA]
    return found


def options_of(kind: type[Any], path: tuple[str, ...] = ()) -> Iterator[Option]:
    """Yield the options of a dataclass in the order of its body, including rows and those of nested dataclasses."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name, value in vars(kind).items():
        if isinstance(value, Flag):
            record, _, inner = name.partition("_")
            declared = dataclasses.replace(value, default=getattr(fields[record].default, inner))
            yield _option((*path, record, inner), declared)
        elif name in fields and _METADATA in fields[name].metadata:
            yield _option((*path, name), fields[name].metadata[_METADATA])
        elif name in fields and dataclasses.is_dataclass(fields[name].type):
            yield from options_of(fields[name].type, (*path, name))  # type: ignore[arg-type]  # a class, not an instance


def _option(path: tuple[str, ...], declared: Flag) -> Option:
    return Option(declared.keyword or _as_keyword(declared.name), path, declared)


def _as_keyword(name: str) -> str:
    return name.lstrip("-").replace("-", "_").lower()


def off_names_of(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return vLLM's names for turning a switch off: --no-enable-x and --disable-x for --enable-x."""
    found = []
    for name in names:
        if name.startswith("--"):
            found.append(f"--no-{name[2:]}")
        if name.startswith("--enable-"):
            found.append(name.replace("--enable-", "--disable-", 1))
    return tuple(found)


def add_flags(
    parser: argparse.ArgumentParser, options: Sequence[Option], defaults: Mapping[str, Any]
) -> None:
    """Add flags to a parser, in groups. Flags that are not given are absent from the parsed arguments.

    Args:
        defaults: Defaults to show instead of the table's, by keyword.
    """
    groups: dict[Group, argparse._ArgumentGroup] = {}
    for option in options:
        group = option.flag.group
        if group not in groups:
            groups[group] = parser.add_argument_group(group.title)
        for names, settings in _arguments(option, defaults.get(option.keyword, option.flag.default)):
            groups[group].add_argument(*names, default=argparse.SUPPRESS, **settings)


def _arguments(option: Option, default: Any) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yield argparse's names and settings for an option. A switch may have separate flags for on and off."""
    declared = option.flag
    if declared.is_switch:
        others = [name for name in off_names_of(declared.names) if name not in declared.off_names]
        for names, help, value in (
            (declared.names, _escaped(declared.help), True),
            (declared.off_names, _escaped(declared.off_help), False),
            (tuple(others), argparse.SUPPRESS, False),
        ):
            if names:
                settings = {"action": "store_const", "const": value, "help": help}
                yield names, {"dest": option.keyword, **settings}
        return
    settings = {"metavar": declared.metavar, "help": _escaped(help_text(declared, default))}
    if declared.nargs is not None:
        settings["nargs"] = declared.nargs
    if declared.name.startswith("-"):
        yield declared.names, {"dest": option.keyword, "action": declared.action, **settings}
    else:
        yield (option.keyword,), settings


def words_of(option: Option) -> tuple[str, ...]:
    """Return every name of an option on the command line, including those that --help omits."""
    declared = option.flag
    return (
        *declared.names,
        *declared.off_names,
        *(off_names_of(declared.names) if declared.is_switch else ()),
    )


def _escaped(text: str) -> str:
    return text.replace("%", "%%")


def help_text(declared: Flag, default: Any) -> str:
    """Return a flag's help with its default."""
    shown = default_text(declared, default)
    return f"{declared.help} (default: {shown})" if shown else declared.help


def default_text(declared: Flag, default: Any) -> str:
    """Return a default as text. Returns an empty text if there is no default to show."""
    if default == declared.default and declared.default_text is not None:
        return declared.default_text
    return (
        ""
        if default is None or default == ()
        else f"{default:g}"
        if isinstance(default, float)
        else str(default)
    )


def _read_switch(name: str, given: Any) -> bool:
    if not isinstance(given, bool):
        raise OptionsError(f"{name} is {given!r}; it must be True or False")
    return given


def text(name: str, given: Any) -> str:
    """Read a text unchanged."""
    if isinstance(given, bool):
        raise OptionsError(f"{name} is {given!r}; it needs a value")
    return str(given)


def texts(name: str, given: Any) -> tuple[str, ...]:
    """Read one text or a list of texts."""
    return tuple(text(name, each) for each in (given if isinstance(given, list | tuple) else [given]))


def one_of(*choices: str) -> Reader:
    """Return a reader that accepts only these words."""

    def read(name: str, given: Any) -> str:
        if given not in choices:
            raise OptionsError(f"{name} is {given!r}; it must be one of {', '.join(choices)}")
        return str(given)

    return read


def whole(least: int, most: int | None = None) -> Reader:
    """Return a reader of whole numbers within bounds."""

    def read(name: str, given: Any) -> int:
        try:
            value = int(text(name, given))
        except ValueError as error:
            if isinstance(error, OptionsError):
                raise
            raise OptionsError(f"{name} is {given!r}; it must be a whole number") from None
        if value < least or (most is not None and value > most):
            allowed = f"at least {least}" if most is None else f"{least} to {most}"
            raise OptionsError(f"{name} is {value}; it must be {allowed}")
        return value

    return read


_SUFFIXES = {"k": 1_000, "m": 1_000_000, "g": 1_000_000_000, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def tokens(least: int) -> Reader:
    """Return a reader of token counts, with vLLM's suffixes: 8k is 8,000, 8K is 8,192, 1.5k is 1,500."""
    read_whole = whole(least)

    def read(name: str, given: Any) -> int:
        digits = text(name, given).strip()
        unit = _SUFFIXES.get(digits[-1:])
        if unit is None:
            return int(read_whole(name, given))
        try:
            value = float(digits[:-1]) * unit
        except ValueError:
            value = math.nan
        if not value.is_integer():  # also true of nan
            raise OptionsError(
                f"{name} is {given!r}; give a number of tokens such as 8192, 8k (8000) or 8K (8192)"
            )
        return int(read_whole(name, int(value)))

    return read


def number(fits: Callable[[float], bool], allowed: str) -> Reader:
    """Return a reader of numbers for which `fits` is true; `allowed` describes them. Comparisons with nan are false."""

    def read(name: str, given: Any) -> float:
        try:
            value = float(text(name, given))
        except ValueError as error:
            if isinstance(error, OptionsError):
                raise
            raise OptionsError(f"{name} is {given!r}; it must be a number") from None
        if not fits(value):
            raise OptionsError(f"{name} is {value}; it must be {allowed}")
        return value

    return read


def size(name: str, given: Any) -> int:
    """Read a size such as `512M`, `2GiB` or `1073741824`; units are powers of 1024."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
    digits = text(name, given).strip().upper().removesuffix("IB").removesuffix("B")
    unit = units.get(digits[-1:], 1)
    try:
        num_bytes = int(float(digits[:-1] if unit > 1 else digits) * unit)
    except (ValueError, OverflowError):
        num_bytes = 0
    if num_bytes <= 0:
        raise OptionsError(f"{name} is {given!r}; give a size such as 512M or 2G")
    return num_bytes


_MOST_GIB = 1 << 20  # above it, a plain number was meant as bytes


def size_in_gib(name: str, given: Any) -> int:
    """Read the size of a cache as vLLM does: a plain number counts GiB, and 0 disables it. With a unit, it is read as by `size`."""
    try:
        num_gib = float(text(name, given))
    except ValueError as error:
        if isinstance(error, OptionsError):
            raise
        return size(name, given)
    if not 0 <= num_gib <= _MOST_GIB:
        raise OptionsError(
            f"{name} is {given!r}; a plain number counts GiB, as in vLLM: give a size such as 20 or 20G, or 0 for none"
        )
    return int(num_gib * (1 << 30))


def json_texts(name: str, given: Any) -> tuple[str, ...]:
    """Read a JSON list of strings (vLLM's form of lists), or a Python list from a script."""
    value = given
    if isinstance(given, str):
        try:
            value = json.loads(given)
        except ValueError:
            value = None
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) and each for each in value):
        raise OptionsError(f"""{name} is {given!r}; give a JSON list of strings such as '["*"]'""")
    return tuple(value)
