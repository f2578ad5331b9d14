"""The warning about a processor without the instructions that fast kernels need."""

import pytest

from server.machine.processor import why_slow


@pytest.mark.parametrize(
    ("machine", "facts", "said"),
    [
        ("x86_64", "flags\t\t: sse4_2 avx avx2 fma\n", ""),
        ("x86_64", "flags\t\t: sse4_2 avx\nflags\t\t: sse4_2 avx\n", "no AVX2 and no FMA; kernels take"),
        ("x86_64", "flags : avx avx2\n", "no FMA; kernels"),
        ("x86_64", "", ""),
        ("aarch64", "Features : asimd\n", ""),
    ],
)
def test_what_is_missing_is_named(machine: str, facts: str, said: str) -> None:
    found = why_slow(machine, facts)
    assert said in found and bool(said) == bool(found)


def test_this_machine_can_be_asked() -> None:
    assert isinstance(why_slow(), str)
