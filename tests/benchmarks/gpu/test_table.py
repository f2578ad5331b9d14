"""The tables of a day, as they are printed."""

from benchmarks.gpu.parts import Part
from benchmarks.gpu.rows import Row
from benchmarks.gpu.table import day_lines

PART = Part("kernels", "k", "Kernel times", 1.0)


def entry(*rows: Row, status: str = "done", note: str = "") -> dict[str, object]:
    return {"status": status, "note": note, "rows": [row.as_json() for row in rows]}


def test_rows_failures_and_what_was_not_reached_are_lines() -> None:
    goals = {"of_copy": 0.85}
    units = {
        "kernels/decode": entry(
            Row(name="qwen3 b1", figures={"us": 12.34, "of_copy": 0.5}, goals=goals),
            Row(name="qwen3 b32", figures={"us": 1234.5, "of_copy": 0.9}, goals=goals, note="eager"),
        ),
        "kernels/norm": entry(Row(name="norm", figures={"error": 2e-7, "peer": None}, is_right=False)),
        "kernels/prefill": entry(status="failed", note="ValueError: no such tile"),
        "others/x": entry(),
    }
    assert list(day_lines(units, [PART], {"kernels": ["rotary", "write"]})) == [
        "",
        "Kernel times (kernels)",
        "               us  of_copy",
        "  qwen3 b1   12.3     0.5-",
        "  qwen3 b32  1234     0.9+  eager",
        "           error  peer",
        "! norm  2.00e-07     .",
        "  prefill: FAILED: ValueError: no such tile",
        "  not reached: rotary, write",
    ]


def test_a_part_of_which_nothing_is_known_has_no_lines() -> None:
    assert list(day_lines({}, [PART], {"kernels": []})) == []


def test_a_figure_that_is_no_number_misses_no_goal() -> None:
    assert Row(name="a", figures={"x": None}, goals={"x": 1.0, "y": 1.0}).missed() == []
