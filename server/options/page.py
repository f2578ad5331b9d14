"""docs/options.md, from the table: `python -m server.options.page > docs/options.md`; a test holds them equal."""

import itertools
from collections.abc import Iterator

from server.options.flag import Option, default_text
from server.options.table import OPTIONS

_HEAD = """\
# Options

Every flag of `wideep serve` and `wideep worker`; `run-batch` takes them too, and `LLM(...)` as keywords with underscores
([offline.md](offline.md)). This page is written by `python -m server.options.page`, from the table that the flags come
from (server/options/table.py). What the endpoint's options are for: [operations.md](operations.md). `--no-NAME` turns a
switch off, underscores may stand for dashes, and `--eplb-config.num_redundant_experts 8` for
`--eplb-config '{"num_redundant_experts": 8}'`. Flags of vLLM's and SGLang's that are not here:
[from_vllm.md](from_vllm.md), [from_sglang.md](from_sglang.md).

`--tokenizer`, `--hf-overrides`, `--generation-config` and `--override-generation-config` leave the model's files alone: the
service runs from a folder of links to them under `~/.cache/wideep/checkpoints` (or `$XDG_CACHE_HOME/wideep`), with the changed ones
written anew. It may be deleted when no service runs from it.
"""


def options_page() -> str:
    """Return the page's text."""
    lines = [_HEAD]
    groups = list(dict.fromkeys(option.flag.group for option in OPTIONS))
    for group in groups:
        lines += [f"## {group.title[0].upper()}{group.title[1:]}", "", f"For {group.heeded_by}.", ""]
        lines += ["| flag | default | what |", "|---|---|---|"]
        found = (option for option in OPTIONS if option.flag.group == group)
        lines += [*itertools.chain.from_iterable(map(_rows, found)), ""]
    return "\n".join([*lines, ""])


def _rows(option: Option) -> Iterator[str]:
    """Yield an option's row; a switch has one for each way to turn it."""
    declared = option.flag
    if declared.is_switch:
        default = "on" if declared.default else "off"
        yield from (
            _row(names, default, help)
            for names, help in ((declared.names, declared.help), (declared.off_names, declared.off_help))
            if names
        )
        return
    value = f" {declared.metavar}" if declared.metavar and declared.name != declared.metavar else ""
    names = tuple(f"{name}{value}" for name in declared.names)
    yield _row(names, default_text(declared, declared.default), declared.help)


def _row(names: tuple[str, ...], default: str, help: str) -> str:
    shown = ", ".join(f"`{name}`" for name in names)
    return f"| {shown} | {default} | {help} |".replace("|  |", "| |")


if __name__ == "__main__":
    print(options_page(), end="")
