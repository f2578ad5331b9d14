"""Generate docs/from_vllm.md and docs/from_sglang.md from the tables: `python -m server.tools.guides`; a test compares them."""

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from server.options.foreign.flags import GIVEN, ForeignFlag
from server.options.foreign.sglang import (
    DIFFERS_FROM_SGLANG,
    FITS_IN_SGLANG,
    SAME_AS_SGLANG,
    SGLANG_FLAGS,
    SHARED_WITH_VLLM,
)
from server.options.foreign.vllm import DIFFERS_FROM_VLLM, SAME_AS_VLLM, VLLM_FLAGS
from server.options.table import OPTIONS

FOLDER = Path(__file__).resolve().parents[2] / "docs"
_WIDTH = 130  # of the list of flags, in characters
_LEGEND = """\
| verdict | meaning |
|---|---|
| **same** | The name and the meaning are the same ([options.md](options.md)). "same, but" states a difference. |
| **alias** | The flag is another name for a flag of WideEP. |
| **ignored** | The flag is accepted without effect. The service logs it at startup, with the reason in the table. |
| **rejected** | The service prints the message in the table and exits with status 2 before it loads anything. |

If only some values of a flag are **ignored**, the table has these values, and the message for the others. For an unknown flag, the
message suggests a flag with a similar name.
"""
_SPELLING = """\
## How flags are written

- Names may contain underscores instead of dashes.
- `--no-enable-NAME` and `--disable-NAME` turn `--enable-NAME` off. `--no-NAME` turns other switches off.
- The keys of a JSON value may be given one by one: `--eplb-config.num_redundant_experts 8`.
- `--config FILE` reads a YAML file of names and values: dashes or underscores, lists as lists, JSON as mappings. The command line
  takes precedence.
- Numbers of tokens may end in k, m or g (thousand, million, 10^9) or in K, M or G (1,024 and its powers), as in vLLM:
  `--max-model-len 8k` is 8,000 and `--max-model-len 8K` is 8,192. Sizes in bytes (`--kv-cache-memory 2G`) always use powers of 1,024.
- `LLM(...)` takes the same names as keywords ([offline.md](offline.md)).
"""
_VLLM = """\
# Coming from vLLM

After reading this page you can start WideEP with your `vllm serve` command line. Each flag of vLLM has one of four verdicts:

{legend}
A wide-EP command and its equivalent:

```console
# needs: eight GPUs, and the hub
$ vllm serve deepseek-ai/DeepSeek-V3 --data-parallel-size 8 --tensor-parallel-size 1 --enable-expert-parallel \\
    --all2all-backend deepep_low_latency --enable-eplb --eplb-config '{{"num_redundant_experts": 32}}'
$ wideep serve deepseek-ai/DeepSeek-V3 --data-parallel-size 8 --enable-eplb --eplb-config '{{"num_redundant_experts": 32}}'
```

`wideep serve` also accepts the flags of the first command. On several nodes, torchrun starts the ranks, with the same command
line on each node ([nodes.md](nodes.md)). Flags such as `--headless` and `--data-parallel-address` are then rejected.

{spelling}
## The flags of `vllm serve` 0.33

These flags are the **same**:

{same}

The table lists all other flags. Flags with the same verdict and the same reason share a row. Rows are sorted by their first flag.
"""
_SGLANG = """\
# Coming from SGLang

After reading this page you can start WideEP with your `sglang.launch_server` command line. Each flag of SGLang has one of four
verdicts:

{legend}
A wide-EP command and its equivalent:

```console
# needs: eight GPUs, and the hub
$ python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3 --tp 8 --dp 8 --ep 8 --enable-dp-attention \\
    --moe-a2a-backend deepep --deepep-mode auto --enable-eplb --ep-num-redundant-experts 32 --mem-fraction-static 0.85
$ wideep serve deepseek-ai/DeepSeek-V3 -dp 8 --enable-eplb --eplb-config '{{"num_redundant_experts": 32}}' \\
    --gpu-memory-utilization 0.85
```

`wideep serve` also accepts the flags of the first command. Two limits count differently. With data-parallel attention, SGLang's
`--max-running-requests` and `--chunked-prefill-size` count all ranks together. WideEP's `--max-num-seqs` and
`--max-num-batched-tokens` count one rank.

{spelling}
## The flags of `sglang.launch_server` 0.5.23

This page covers the flags of SGLang's published recipes and other common flags. Other flags are **rejected** as unknown.

These flags are the **same**:

{same}

The table lists all other flags. Flags with the same verdict and the same reason share a row. Rows are sorted by their first flag.
"""


class _Row(NamedTuple):
    names: str
    verdict: str
    what: str


def vllm_guide() -> str:
    """Return the text of docs/from_vllm.md."""
    return _page(_VLLM, SAME_AS_VLLM, DIFFERS_FROM_VLLM, VLLM_FLAGS, {})


def sglang_guide() -> str:
    """Return the text of docs/from_sglang.md."""
    shared = set(SHARED_WITH_VLLM.split())
    flags = [*SGLANG_FLAGS, *(flag for flag in VLLM_FLAGS if shared & {*flag.names})]
    return _page(_SGLANG, SAME_AS_SGLANG, DIFFERS_FROM_SGLANG, flags, FITS_IN_SGLANG)


def _page(
    head: str, same: str, differs: Mapping[str, str], flags: Iterable[ForeignFlag], fits: Mapping[str, str]
) -> str:
    notes = _notes_on(same.split(), differs)
    alike = ", ".join(f"`{name}`" for name in sorted(notes, key=_key) if not notes[name])
    listed = textwrap.fill(alike, _WIDTH, break_long_words=False, break_on_hyphens=False)
    rows = [_Row(f"`{name}`", "same, but", note) for name, note in notes.items() if note]
    rows += [_foreign_row(flag, fits.get(flag.name, flag.fits.in_words)) for flag in flags]
    text = head.format(legend=_LEGEND, spelling=_SPELLING, same=listed)
    return "\n".join([text, "| flag | verdict | notes |", "|---|---|---|", *_lines(rows), ""])


def _lines(rows: Iterable[_Row]) -> Iterator[str]:
    """Yield the table: one line for all rows with the same verdict and notes, sorted by their first flag."""
    together: dict[tuple[str, str], list[str]] = {}
    for row in sorted(rows, key=lambda row: _key(row.names)):
        together.setdefault((row.verdict, row.what), []).append(row.names)
    for (verdict, what), names in together.items():
        linked = re.sub(r"docs/(\w+\.md)", r"[\1](\1)", what)
        yield f"| {', '.join(names)} | {verdict} | {linked} |"


def _key(names: str) -> str:
    return names.strip("`").lstrip("-").lower()


def _notes_on(names: Iterable[str], differs: Mapping[str, str]) -> dict[str, str]:
    """Return what is different about each of our flags, or "" if nothing is."""
    taken = {option.flag.names[0]: option.flag for option in OPTIONS if option.flag.taken_as}
    notes: dict[str, str] = {}
    for name in names:
        flag = taken.get(name)
        words = "" if flag is None else _words(flag.taken_as) + f": {flag.taken_because}"
        notes[name] = "; ".join(filter(None, [differs.get(name, ""), words]))
    return notes


def _words(taken_as: Mapping[str, str]) -> str:
    parts = []
    for ours in dict.fromkeys(taken_as.values()):
        theirs = [f"`{word}`" for word, value in taken_as.items() if value == ours]
        parts.append(f"{', '.join(theirs)} {'means' if len(theirs) == 1 else 'mean'} `{ours}`")
    return ", ".join(parts)


def _foreign_row(flag: ForeignFlag, fits: str) -> _Row:
    names = ", ".join(f"`{name}`" for name in flag.names)
    otherwise = flag.otherwise.replace(GIVEN, "N")
    if flag.becomes:
        spelled = ", ".join(
            f"`{theirs}` is `{ours}`" if ours else f"`{theirs}` has no effect"
            for theirs, ours in flag.spelled.items()
        )
        key = f", key `{flag.key}`" if flag.key else ""
        return _Row(names, "alias", f"`{flag.becomes}`{key}" + (f"; {spelled}" if spelled else ""))
    if not flag.because:
        return _Row(names, "rejected", otherwise)
    if not otherwise:
        return _Row(names, "ignored", flag.because)
    # A message often begins with the reason for the values without effect.
    message = otherwise.removeprefix(f"{flag.because}; ")
    if flag.takes == "nothing" and fits == str(True):
        return _Row(names, "ignored", f"{flag.because}; `{flag.off_names[0]}` is rejected: {message}")
    return _Row(names, f"ignored with {fits}", f"{flag.because}; otherwise rejected: {message}")


if __name__ == "__main__":
    (FOLDER / "from_vllm.md").write_text(vllm_guide(), encoding="utf-8")
    (FOLDER / "from_sglang.md").write_text(sglang_guide(), encoding="utf-8")
