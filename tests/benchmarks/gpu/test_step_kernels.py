"""Rows of a profiled step: the longest kernels first, then the sum of the others, with short names."""

import pytest

from benchmarks.gpu.ranks.prompt_steps import KernelTime
from benchmarks.gpu.ranks.step_kernels import _SHOWN, _rows, short_name


def test_the_longest_kernels_have_a_row_and_the_others_one_together() -> None:
    times = [KernelTime(f"kernel {number}", 2, 1e-6 * number) for number in range(1, _SHOWN + 4)]
    rows = list(_rows("model 1 decodes", times))
    assert len(rows) == _SHOWN + 1
    assert rows[0].name == f"model 1 decodes: kernel {_SHOWN + 3}"
    assert rows[0].figures["us"] == pytest.approx((_SHOWN + 3) / 2)
    assert rows[-1].name == "model 1 decodes: others"
    assert rows[-1].figures["launches"] == 6
    assert rows[-1].figures["ms"] == pytest.approx((1 + 2 + 3) / 1e3)
    assert sum(float(row.figures["share"] or 0) for row in rows) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("grouped_rows", "grouped_rows"),
        ("void at::native::elementwise_kernel<128, 4, f(int)>(int)", "elementwise_kernel"),
        ("Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD "),
        ("<unnamed>", "<unnamed>"),
    ],
)
def test_names_have_no_types_and_arguments(name: str, short: str) -> None:
    assert short_name(name) == short.strip()
