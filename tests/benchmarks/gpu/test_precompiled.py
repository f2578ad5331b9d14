"""Kernels compiled in parallel: one that fails, or ends its process, does not affect the others."""

import pytest

from benchmarks.gpu.results import Setting
from tests.benchmarks.gpu.sample_part import launched

pytest.importorskip("triton", reason="needs triton: pip install -r requirements-dev.txt")
from benchmarks.gpu.precompiled import CompileOutcome, run, side_by_side


def test_what_fails_is_told_and_the_others_are_launched() -> None:
    assert side_by_side(launched, ["a", "bad", "c"], 1) == [
        CompileOutcome("a", ""), CompileOutcome("bad", "ValueError: no such shape"), CompileOutcome("c", ""),
    ]  # fmt: skip


def test_a_process_that_ends_is_no_end_of_the_part() -> None:
    (outcome,) = side_by_side(launched, ["gone"], 1)
    assert outcome.problem.startswith("BrokenProcessPool: ")


def test_the_interpreter_compiles_nothing() -> None:
    (row,) = run(Setting(device="interpreter", is_tiny=True), "kernels")
    assert (row.name, row.is_right) == ("nothing is compiled", True)
