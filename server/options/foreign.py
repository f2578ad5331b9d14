"""Flags of other programs: what becomes of each, so that a command line from vLLM or SGLang is taken or answered by a sentence.

`vllm_flags` and `sglang_flags` declare them with `refused`, `harmless` and `alias`; a flag that means the same here
under the same name stands in `table`, once. From these come the parser (it must know how many values a flag has), the
lines at the start, the refusals, docs/from_vllm.md and docs/from_sglang.md. Rejected: to ignore what is not known, as
a service that starts without what was asked for is found out about in production.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from server.options.flag import OptionsError, off_names_of

GIVEN = "{given}"  # in `otherwise`: the value
Said = Mapping[str, Any]  # by keyword of ours, or by the name of a flag of another program


@dataclass(frozen=True)
class Fits:
    """Which values of a flag change nothing here."""

    in_words: str  # for the tables
    test: Callable[[Any, Said], bool]  # of a value, and all that was said with it


ALL = Fits("any value", lambda _given, _said: True)
NONE = Fits("no value", lambda _given, _said: False)


@dataclass(frozen=True, kw_only=True)
class ForeignFlag:
    """A flag that other programs have, under this name or with these values."""

    names: tuple[str, ...]  # the first is what messages name
    takes: str = "value"  # "value", "values", or "nothing": a switch
    because: str = ""  # why a value that fits changes nothing
    otherwise: str = ""  # why another one is not served, and what to say instead; empty: all values fit
    fits: Fits = NONE
    becomes: str = ""  # our flag that means the same
    key: str = ""  # of that flag's JSON, which it sets; empty: the whole value
    spelled: Mapping[str, str] = field(default_factory=dict)  # words of the other program -> ours

    @property
    def name(self) -> str:
        """What messages call it, and where its value is found."""
        return self.names[0]

    @property
    def off_names(self) -> tuple[str, ...]:
        """The names that turn a switch off."""
        return off_names_of(self.names) if self.takes == "nothing" else ()

    @property
    def fate(self) -> str:
        """What becomes of it: alias, harmless (with some values or all), or refused."""
        return "alias" if self.becomes else "harmless" if self.because else "refused"


def refused(
    otherwise: str, *, values: str = "", lists: str = "", switches: str = ""
) -> tuple[ForeignFlag, ...]:
    """Declare flags that are not served.

    Args:
        otherwise: why, and what to say instead; one for all.
        values: names of flags with a value each, separated by blanks; other names of the same flag after a slash.
        lists: of flags with several values.
        switches: of flags with none.
    """
    return tuple(
        ForeignFlag(names=names, takes=takes, otherwise=otherwise)
        for names, takes in _each(values, lists, switches)
    )


def harmless(
    because: str,
    *,
    fits: Fits = ALL,
    otherwise: str = "",
    values: str = "",
    lists: str = "",
    switches: str = "",
) -> tuple[ForeignFlag, ...]:
    """Declare flags that change nothing here, all their values or those that fit.

    Args:
        because: why they change nothing.
        fits: which values do.
        otherwise: why the others are not served, and what to say instead.
        values, lists, switches: as for `refused`.
    """
    return tuple(
        ForeignFlag(names=names, takes=takes, because=because, otherwise=otherwise, fits=fits)
        for names, takes in _each(values, lists, switches)
    )


def alias(
    names: str, becomes: str, *, takes: str = "value", spelled: Mapping[str, str] | None = None
) -> ForeignFlag:
    """Declare a flag that one of ours means the same as."""
    return ForeignFlag(names=tuple(names.split("/")), takes=takes, becomes=becomes, spelled=spelled or {})


def part(
    names: str, becomes: str, key: str, *, takes: str = "value", spelled: Mapping[str, str] | None = None
) -> ForeignFlag:
    """Declare a flag that sets one key of a JSON value of ours; numbers are numbers there."""
    return ForeignFlag(
        names=tuple(names.split("/")), takes=takes, becomes=becomes, key=key, spelled=spelled or {}
    )


def _each(values: str, lists: str, switches: str) -> Iterator[tuple[tuple[str, ...], str]]:
    for words, takes in ((values, "value"), (lists, "values"), (switches, "nothing")):
        for word in words.split():
            yield tuple(word.split("/")), takes


def of(*allowed: Any) -> Fits:
    """Return a test for some values; a switch's are True and False."""
    words = dict.fromkeys(map(str, allowed))
    return Fits(" or ".join(words), lambda given, _said: str(given) in words)


def judge(flag: ForeignFlag, given: Any, said: Said) -> str:
    """Return the line that says why a flag changes nothing.

    Raises:
        OptionsError: it would have to change something that cannot be changed.
    """
    if flag.fits.test(given, said):
        return f"{shown(flag, given)} changes nothing: {flag.because}"
    if given is False and flag.takes == "nothing" and not flag.because:
        return f"{shown(flag, given)} changes nothing: it is off"
    why = flag.otherwise or flag.because
    raise OptionsError(f"{shown(flag, given)}: {why.replace(GIVEN, str(given))}")


def shown(flag: ForeignFlag, given: Any) -> str:
    """Return the flag as it may be written."""
    if flag.takes == "nothing":
        return flag.name if given is not False else flag.off_names[0]
    words = given if isinstance(given, list | tuple) else [given]
    return " ".join([flag.name, *map(str, words)])
