"""The prose gate: counts of habits that make a native reader read twice may only fall."""

from collections import Counter

from tests.house.prose import habits

# At most so many, by package. Lower a number when you have rewritten prose; `python -m tests.house.prose` prints the counts.
LIMITS = {}


def test_habits_only_become_fewer() -> None:
    found = list(habits())
    counts = Counter(each.package for each in found)
    over = {package for package, count in counts.items() if count > LIMITS.get(package, 0)}
    lines = [f"{each.file}:{each.line}: {each.text}" for each in found if each.package in over]
    assert not over, "\n".join(
        [f"{package}: {counts[package]} > {LIMITS.get(package, 0)}" for package in sorted(over)] + lines
    )


def test_the_gate_finds_each_habit() -> None:
    assert sum(each.package == "tests" for each in habits()) > 0
