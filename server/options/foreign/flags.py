"""Flags of other programs: how command lines written for vLLM or SGLang are accepted or rejected, with a reason.

`vllm` and `sglang` declare them with `rejected`, `ignored` and `alias`. A flag with the same name and meaning
here is declared once, in `table`. These declarations produce the parser (which needs each flag's number of values), the
lines logged at startup, the rejections, docs/from_vllm.md and docs/from_sglang.md. Rejected: ignoring unknown flags, as a
service that starts without a requested feature fails only in production.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from server.options.flag import OptionsError, off_names_of

GIVEN = "{given}"  # placeholder for the value in `otherwise`
Said = Mapping[str, Any]  # given values, by our keyword or by the name of another program's flag


@dataclass(frozen=True)
class Fits:
    """The values of a flag that have no effect here."""

    in_words: str  # description for the tables
    test: Callable[[Any, Said], bool]  # takes a value, and all values given with it


ALL = Fits("any value", lambda _given, _said: True)
NONE = Fits("no value", lambda _given, _said: False)

# What both programs' flags share.
SLEEPS = Fits("--device cpu", lambda given, said: given is False or said.get("device") == "cpu")
NO_SLEEP = "sleep mode (docs/sleep.md) works with --device cpu only; give that too, or leave it out"
GENERATES = "only text generation is supported, without embeddings, scores or rewards; leave it out"
IMAGES = "one process per front encodes images, with the checkpoint's processor and tower"
IMAGES_ONLY = f"{IMAGES}; video, audio and embeddings are not accepted; leave it out"
LORA = "adapters have no weights of this kind; docs/adapters.md lists what they may adapt"
LORA_LAYOUTS = "every layout of adapters is read, on all modules that docs/adapters.md lists"
NO_HALVES = "dual-batch overlap is no longer supported: it was slower in most measurements on CPUs (docs/LOG.md); leave it out"
MEMORY = (
    "weights and the KV cache of running requests stay in the device's memory; if it is too small, use more ranks "
    "(--data-parallel-size), --quantization int8, or a smaller --kv-cache-memory"
)
TIERS = (
    "WideEP has its own KV cache offloading: --kv-offloading-size for host memory, --kv-offloading-dir and "
    "--kv-offloading-disk-size for disk"
)
POOLS = "use --pools prefill:1,decode:1 for disaggregated prefill/decode, or --role with a torchrun for each pool (docs/pools.md)"
PACE = "use --target-itl-ms, the target time between two tokens for steps with prompts"
KERNELS = "each kind of device has one set of kernels, chosen by --device and the device's capabilities; leave it out"
GRAPHS = (
    "decode steps on a GPU are captured for every padded size; --enforce-eager runs them without CUDA graphs, "
    "--enable-torch-compile compiles the operations between the kernels"
)
DRAFTS = "drafts come from texts or from the model's own layers; use --speculative-config"


@dataclass(frozen=True, kw_only=True)
class ForeignFlag:
    """A flag of other programs that is not one of ours, or has other values there."""

    names: tuple[str, ...]  # messages use the first
    takes: str = "value"  # "value", "values", or "nothing": a switch
    because: str = ""  # why a value that fits has no effect
    otherwise: str = ""  # why another value is rejected, and its replacement; if empty, all values fit
    fits: Fits = NONE
    becomes: str = ""  # our flag with the same meaning
    key: str = ""  # the key that it sets in that flag's JSON; if empty, it sets the whole value
    # Our values for those of the other program. None marks a value without effect.
    spelled: Mapping[str, str | None] = field(default_factory=dict)
    # Returns our value, or raises OptionsError without the flag's name, if a value is more than one word. `spelled` describes it.
    means: Callable[[Any], str] | None = None

    def ours(self, given: Any) -> Any:
        """Return our value for the flag's, or None if it has no effect.

        Raises:
            OptionsError: The value is not supported.
        """
        if self.means is None:
            return self.spelled.get(str(given), given)
        try:
            return self.means(given)
        except OptionsError as error:
            raise OptionsError(f"{shown(self, given)}: {error}") from error

    @property
    def name(self) -> str:
        """Return the name that messages use and that values are stored under."""
        return self.names[0]

    @property
    def off_names(self) -> tuple[str, ...]:
        """Return the names that turn a switch off."""
        return off_names_of(self.names) if self.takes == "nothing" else ()


def rejected(
    otherwise: str, *, values: str = "", lists: str = "", switches: str = ""
) -> tuple[ForeignFlag, ...]:
    """Declare flags that are not supported.

    Args:
        otherwise: The reason for all of them, and their replacement.
        values: Names of flags with one value, separated by blanks; a slash separates names of the same flag.
        lists: Names of flags with several values.
        switches: Names of flags without a value.
    """
    return tuple(
        ForeignFlag(names=names, takes=takes, otherwise=otherwise)
        for names, takes in _each(values, lists, switches)
    )


def ignored(
    because: str,
    *,
    fits: Fits = ALL,
    otherwise: str = "",
    values: str = "",
    lists: str = "",
    switches: str = "",
) -> tuple[ForeignFlag, ...]:
    """Declare flags that have no effect here, either with any value or with values that fit.

    Args:
        because: Why they have no effect.
        fits: The values without an effect.
        otherwise: Why other values are rejected, and their replacement. If empty, `because` and "leave it out".
        values, lists, switches: As for `rejected`.
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
    spelled: Mapping[str, str | None] | None = None,
    means: Callable[[Any], str] | None = None,
) -> ForeignFlag:
    """Declare a flag with the meaning of one of ours, or of one key of its JSON. Numbers are stored as numbers there."""
    return ForeignFlag(
        names=tuple(names.split("/")),
        takes=takes,
        becomes=becomes,
        key=key,
        spelled=spelled or {},
        means=means,
    )


def _each(values: str, lists: str, switches: str) -> Iterator[tuple[tuple[str, ...], str]]:
    for words, takes in ((values, "value"), (lists, "values"), (switches, "nothing")):
        for word in words.split():
            yield tuple(word.split("/")), takes


def of(*allowed: Any) -> Fits:
    """Return a test for these values; a switch's values are True and False."""
    words = dict.fromkeys(map(str, allowed))
    return Fits(" or ".join(words), lambda given, _said: str(given) in words)


def judge(flag: ForeignFlag, given: Any, said: Said) -> str:
    """Return the line that explains why a flag has no effect.

    Raises:
        OptionsError: The flag's value is not supported.
    """
    if flag.fits.test(given, said):
        return f"{shown(flag, given)} has no effect: {flag.because}"
    if given is False and flag.takes == "nothing" and not flag.because:
        return f"{shown(flag, given)} has no effect: it is off"
    why = flag.otherwise or flag.because
    raise OptionsError(f"{shown(flag, given)}: {why.replace(GIVEN, str(given))}")


def shown(flag: ForeignFlag, given: Any) -> str:
    """Return the flag and its value as on a command line."""
    if flag.takes == "nothing":
        return flag.name if given is not False else flag.off_names[0]
    words = given if isinstance(given, list | tuple) else [given]
    return " ".join([flag.name, *map(str, words)])
