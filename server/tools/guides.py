"""Generate docs/from_vllm.md and docs/from_sglang.md from the tables: `python -m server.tools.guides`; a test compares them."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from server.options.foreign.flags import GIVEN, ForeignFlag
from server.options.foreign.sglang import DIFFERS_FROM_SGLANG, SAME_AS_SGLANG, SGLANG_FLAGS, SHARED_WITH_VLLM
from server.options.foreign.vllm import DIFFERS_FROM_VLLM, SAME_AS_VLLM, VLLM_FLAGS
from server.options.table import OPTIONS

FOLDER = Path(__file__).resolve().parents[2] / "docs"
_COMMON = """\
A flag of the other program is accepted if it means the same here or has no effect here; in the second case the service logs a
line at startup. A flag for a feature that WideEP does not have is refused before anything is loaded, with the message below and
exit status 2. For an unknown flag, the message suggests a flag with a similar name, if there is one.

Names may contain underscores instead of dashes. `--no-enable-NAME` and `--disable-NAME` turn `--enable-NAME` off; `--no-NAME`
turns other switches off. The keys of a JSON value may be given one by one: `--eplb-config.num_redundant_experts 8`.
`--config FILE` reads a YAML file of names and values (dashes or underscores, lists as lists, JSON as mappings); the command
line takes precedence. Numbers of tokens may end in k, m or g (thousand, million, 10^9) or K, M or G (1,024 and its powers), as
in vLLM: `--max-model-len 8k` is 8,000 and `--max-model-len 8K` is 8,192. Sizes in bytes (`--kv-cache-memory 2G`) always use
powers of 1,024. `LLM(...)` accepts and refuses the same names as keywords.
"""
_VLLM = """\
# Coming from vLLM

{common}
A wide-EP command and its equivalent:

```console
# needs: eight GPUs, and the hub
$ vllm serve deepseek-ai/DeepSeek-V3 --data-parallel-size 8 --tensor-parallel-size 1 --enable-expert-parallel \\
    --all2all-backend deepep_low_latency --enable-eplb --eplb-config '{{"num_redundant_experts": 32}}'
$ wideep serve deepseek-ai/DeepSeek-V3 --data-parallel-size 8 --enable-eplb --eplb-config '{{"num_redundant_experts": 32}}'
```

`wideep serve` also accepts the flags of the first command. On several nodes, torchrun starts the ranks with the same command
line on each node ([README](../README.md)); flags such as `--headless` and `--data-parallel-address` do not apply.

## The flags of `vllm serve` 0.33

"same": the same name and meaning ([options.md](options.md)). "alias": another name for one of WideEP's flags. "harmless":
accepted without effect. "refused": not supported.
"""
_SGLANG = """\
# Coming from SGLang

{common}
A wide-EP command and its equivalent:

```console
# needs: eight GPUs, and the hub
$ python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3 --tp 8 --dp 8 --ep 8 --enable-dp-attention \\
    --moe-a2a-backend deepep --deepep-mode auto --enable-eplb --ep-num-redundant-experts 32 --mem-fraction-static 0.85
$ wideep serve deepseek-ai/DeepSeek-V3 -dp 8 --enable-eplb --eplb-config '{{"num_redundant_experts": 32}}' \\
    --gpu-memory-utilization 0.85
```

`wideep serve` also accepts the flags of the first command. Two counts differ. With data-parallel attention, SGLang's
`--max-running-requests` and `--chunked-prefill-size` count all ranks together; `--max-num-seqs` and `--max-num-batched-tokens`
count one rank.

## The flags of `sglang.launch_server` 0.5.23

The flags of its published recipes and other common ones; rare flags are refused as unknown. "same": the same name and meaning
([options.md](options.md)). "alias": another name for one of WideEP's flags. "harmless": accepted without effect. "refused": not
supported.
"""


class _Row(NamedTuple):
    names: str
    fate: str
    what: str


def vllm_guide() -> str:
    """Return the text of docs/from_vllm.md."""
    return _page(_VLLM, SAME_AS_VLLM, DIFFERS_FROM_VLLM, VLLM_FLAGS)


def sglang_guide() -> str:
    """Return the text of docs/from_sglang.md."""
    shared = set(SHARED_WITH_VLLM.split())
    flags = [*SGLANG_FLAGS, *(flag for flag in VLLM_FLAGS if shared & {*flag.names})]
    return _page(_SGLANG, SAME_AS_SGLANG, DIFFERS_FROM_SGLANG, flags)


def _page(head: str, same: str, differs: Mapping[str, str], flags: Iterable[ForeignFlag]) -> str:
    rows = [*_same_rows(same.split(), differs), *itertools.chain.from_iterable(map(_foreign_rows, flags))]
    lines = [head.format(common=_COMMON), "| flag | here | what |", "|---|---|---|"]
    for (fate, what), alike in itertools.groupby(rows, key=lambda row: (row.fate, row.what)):
        lines.append(f"| {', '.join(row.names for row in alike)} | {fate} | {what} |".replace("|  |", "| |"))
    return "\n".join([*lines, ""])


def _same_rows(names: Iterable[str], differs: Mapping[str, str]) -> Iterator[_Row]:
    """Yield rows of our flags; flags without a remark come first, so that they share one row."""
    taken = {option.flag.names[0]: option.flag for option in OPTIONS if option.flag.taken_as}
    told: dict[str, str] = {}
    for name in names:
        flag = taken.get(name)
        words = "" if flag is None else _words(flag.taken_as) + f": {flag.taken_because}"
        told[name] = "; ".join(filter(None, [differs.get(name, ""), words]))
    yield from (_Row(f"`{name}`", "same", "") for name, what in told.items() if not what)
    yield from (_Row(f"`{name}`", "same", what) for name, what in told.items() if what)


def _words(taken_as: Mapping[str, str]) -> str:
    parts = []
    for ours in dict.fromkeys(taken_as.values()):
        theirs = [f"`{word}`" for word, value in taken_as.items() if value == ours]
        parts.append(f"{', '.join(theirs)} {'means' if len(theirs) == 1 else 'mean'} `{ours}`")
    return ", ".join(parts)


def _foreign_rows(flag: ForeignFlag) -> Iterator[_Row]:
    names = ", ".join(f"`{name}`" for name in flag.names)
    otherwise = flag.otherwise.replace(GIVEN, "N")
    if flag.becomes:
        spelled = ", ".join(
            f"`{theirs}` is `{ours}`" if ours else f"`{theirs}` has no effect"
            for theirs, ours in flag.spelled.items()
        )
        key = f", key `{flag.key}`" if flag.key else ""
        yield _Row(names, "alias", f"`{flag.becomes}`{key}" + (f"; {spelled}" if spelled else ""))
    elif not flag.because:
        yield _Row(names, "refused", otherwise)
    else:
        otherwise = f"; otherwise refused: {otherwise}" if otherwise else ""
        yield _Row(
            names,
            f"harmless with {flag.fits.in_words}" if otherwise else "harmless",
            flag.because + otherwise,
        )


if __name__ == "__main__":
    (FOLDER / "from_vllm.md").write_text(vllm_guide(), encoding="utf-8")
    (FOLDER / "from_sglang.md").write_text(sglang_guide(), encoding="utf-8")
