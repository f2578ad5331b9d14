"""Generate docs/options.md from the table: `python -m server.tools.page > docs/options.md`; a test compares them."""

import itertools
from collections.abc import Iterator

from server.options.flag import Option, default_text
from server.options.table import OPTIONS

_HEAD = """\
# Options

All flags of `wideep serve` and `wideep worker`. `run-batch` accepts them too, and `LLM(...)` accepts them as keywords with
underscores ([offline.md](offline.md)). `python -m server.tools.page` generates this page from the table of flags
(server/options/table.py). [operations.md](operations.md) explains the endpoint's options. `--no-NAME` turns a switch off.
Underscores may replace dashes, and `--eplb-config.num_redundant_experts 8` is the same as
`--eplb-config '{"num_redundant_experts": 8}'`. For flags of vLLM and SGLang that are not listed here, see
[from_vllm.md](from_vllm.md) and [from_sglang.md](from_sglang.md).

`--tokenizer`, `--hf-overrides`, `--generation-config` and `--override-generation-config` do not change the model's files: the
service runs from a folder of links to them under `~/.cache/wideep/checkpoints` (or `$XDG_CACHE_HOME/wideep`), with new copies of
the changed files. This folder may be deleted when no service uses it.
"""


def options_page() -> str:
    """Return the text of docs/options.md."""
    lines = [_HEAD]
    groups = list(dict.fromkeys(option.flag.group for option in OPTIONS))
    for group in groups:
        lines += [f"## {group.title[0].upper()}{group.title[1:]}", "", f"For {group.heeded_by}.", ""]
        lines += ["| flag | default | what |", "|---|---|---|"]
        found = (option for option in OPTIONS if option.flag.group == group)
        lines += [*itertools.chain.from_iterable(map(_rows, found)), ""]
    return "\n".join([*lines, ""])


def _rows(option: Option) -> Iterator[str]:
    """Yield an option's row; a switch has one row for on and one for off."""
    declared = option.flag
    if declared.is_switch:
        yield from (
            _row(names, "on" if is_on else "off", help)
            for names, is_on, help in (
                (declared.names, declared.default, declared.help),
                (declared.off_names, not declared.default, declared.off_help),
            )
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
