"""The day's tables, printed last: a part after another, every failure a line in its place."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.gpu.ledger import DONE
from benchmarks.gpu.parts import Part
from benchmarks.gpu.rows import Figure, Row

_GAP = "  "


def day_lines(
    units: Mapping[str, Mapping[str, Any]], parts: Iterable[Part], not_reached: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """Yield the lines of all parts."""
    for part in parts:
        entries = {
            key.partition("/")[2]: entry for key, entry in units.items() if key.partition("/")[0] == part.name
        }
        left = not_reached.get(part.name, ())
        if not entries and not left:
            continue
        yield ""
        yield f"{part.title} ({part.name})"
        yield from part_lines(entries)
        if left:
            yield f"  not reached: {', '.join(left)}"


def part_lines(entries: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield a part's rows, those with the same figures under one head, then what failed."""
    rows = [Row(**row) for entry in entries.values() for row in entry["rows"]]
    for head, group in _by_head(rows):
        yield from _table(head, group)
    for unit, entry in entries.items():
        if entry["status"] != DONE:
            yield f"  {unit}: {entry['status'].upper()}: {entry['note']}"


def _by_head(rows: Sequence[Row]) -> Iterator[tuple[tuple[str, ...], list[Row]]]:
    """Group neighbours that have the same figures."""
    group: list[Row] = []
    for row in rows:
        if group and tuple(row.figures) != tuple(group[0].figures):
            yield tuple(group[0].figures), group
            group = []
        group.append(row)
    if group:
        yield tuple(group[0].figures), group


def _table(head: Sequence[str], rows: Sequence[Row]) -> Iterator[str]:
    cells = [[row.name, *(_cell(row, name) for name in head)] for row in rows]
    widths = [max(map(len, column)) for column in zip(["", *head], *cells, strict=True)]
    yield "  " + _line(["", *head], widths)
    for row, line in zip(rows, cells, strict=True):
        yield ("  " if row.is_right else "! ") + _line(line, widths) + (_GAP + row.note if row.note else "")


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = (f"{cell:<{width}}" if at == 0 else f"{cell:>{width}}" for at, (cell, width) in enumerate(zip(cells, widths, strict=True)))  # fmt: skip
    return _GAP.join((first, *rest)).rstrip()


def _cell(row: Row, name: str) -> str:
    """Write a figure, with a mark where it has a goal: + reached, - not."""
    mark = "" if name not in row.goals else "-" if name in row.missed() else "+"
    return _number(row.figures[name]) + mark


def _number(value: Figure) -> str:
    if value is None:
        return "."
    if isinstance(value, str | int):
        return str(value)
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:.2e}"
