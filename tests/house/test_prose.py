"""The prose gate: counts of habits that make a native reader read twice may only fall."""

from collections import Counter

from tests.house.prose import habits

# Highest counts allowed, by package. Lower one after rewriting prose; `python -m tests.house.prose` prints the counts.
LIMITS = {
    "attention": 9,
    "benchmarks": 20,
    "dispatch": 25,
    "docs": 27,
    "expert_placement": 6,
    "moe": 24,
    "scheduler": 27,
    "server/api": 3,
    "server/clients": 2,
    "server/experts": 2,
    "server/front": 11,
    "server/http": 3,
    "server/link": 1,
    "server/machine": 6,
    "server/options": 17,
    "server/serve": 19,
    "server/tools": 13,
    "tests": 49,
}


def test_habits_only_become_fewer() -> None:
    found = list(habits())
    counts = Counter(each.package for each in found)
    assert counts["tests"], "no habits found: the patterns or the file list are broken"
    over = [package for package, count in sorted(counts.items()) if count > LIMITS.get(package, 0)]
    lines = [f"{each.file}:{each.line}: {each.text}" for each in found if each.package in over]
    assert not over, "\n".join(
        [f"{package}: {counts[package]}, at most {LIMITS.get(package, 0)}" for package in over] + lines
    )
