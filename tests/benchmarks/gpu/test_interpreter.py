"""The interpreter's names are replaced once. That kernels then do what they did is what all interpreted tests show."""

import inspect
import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch

from benchmarks.gpu.interpreter import patch_once
from tests.support.gpu.interpreted import needs_triton
from tests.support.ranks import RankPool

MODULE = "triton.runtime.interpreter"


def looks_of_second_launch() -> tuple[int, bool]:
    """Return how often the second launch of a kernel looks through names, and whether its result is right."""
    from moe.gpu.norm import rms_norm  # noqa: PLC0415 - after the interpreter is chosen

    x_TD = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    weight_D = torch.linspace(0.5, 2.0, 64)
    rms_norm(x_TD, weight_D, 1e-6)
    with mock.patch.object(inspect, "getmembers", wraps=inspect.getmembers) as look:
        normed_TD = rms_norm(x_TD, weight_D, 1e-6)
    expected_TD = torch.nn.functional.rms_norm(x_TD, (64,), weight_D, 1e-6)
    return look.call_count, torch.allclose(normed_TD, expected_TD, atol=1e-5)


def test_a_kernel_that_has_run_does_not_look_through_the_names_again(interpreter: RankPool) -> None:
    assert interpreter.run(looks_of_second_launch) == [(0, True)]


@needs_triton
def test_each_function_s_names_are_replaced_once_and_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    patched: list[object] = []
    real = SimpleNamespace(_patch_lang=lambda function: patched.append(function))
    monkeypatch.setitem(sys.modules, MODULE, real)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for _ in range(2):
        patch_once()
        for function in (len, max, len):
            real._patch_lang(function).restore()
    assert patched == [len, max]


@needs_triton
@pytest.mark.parametrize("names", [["_patch_lang"], []])
def test_a_process_that_compiles_and_another_triton_stay_as_they_are(
    names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType(MODULE)
    for name in names:
        setattr(module, name, len)
    before = dict(vars(module))
    monkeypatch.setitem(sys.modules, MODULE, module)
    monkeypatch.setenv("TRITON_INTERPRET", "0" if names else "1")
    patch_once()
    assert vars(module) == before
