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

# What is said of flags of both programs.
GENERATES = "only generation of text is served, no embeddings, scores or rewards; leave it out"
TEXT = "models that see or hear are served as their text decoder"
TEXT_ONLY = f"{TEXT}, and no image, audio or video is taken; leave it out"
LORA = "adapters are not served; merge one into the weights (merge_and_unload in PEFT) and serve the result"
NO_HALVES = "steps in two halves (dual-batch overlap) were slower wherever they were measured and are no longer offered; leave it out"
MEMORY = (
    "weights and KV cache stay in the device's memory; where it is short take more ranks (--data-parallel-size), "
    "--quantization int8, or a smaller --kv-cache-memory"
)
PACE = "say --target-itl-ms: the time between two tokens that steps with prompts keep to"
KERNELS = "there is one set of kernels for each kind of device, chosen by --device and what the device can; leave it out"
GRAPHS = (
    "decode steps on a GPU are captured for every padded size; --enforce-eager runs them without CUDA graphs, "
    "--enable-torch-compile compiles what lies between the kernels"
)
DRAFTS = "drafts come from texts or the model's own layers; say --speculative-config"


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
        otherwise: why the others are not served, and what to say instead; empty: as `because`, and to leave them out.
        values, lists, switches: as for `refused`.
    """
    if fits is not ALL:
        otherwise = otherwise or f"{because}; leave it out"
    return tuple(
        ForeignFlag(names=names, takes=takes, because=because, otherwise=otherwise, fits=fits)
        for names, takes in _each(values, lists, switches)
    )


def alias(
    names: str,
    becomes: str,
    key: str = "",
    *,
    takes: str = "value",
    spelled: Mapping[str, str] | None = None,
) -> ForeignFlag:
    """Declare a flag that means the same as one of ours, or sets one key of its JSON; numbers are numbers there."""
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
