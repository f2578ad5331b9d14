"""Kernels take fewer steps in the patched interpreter, and return the bits of Triton's own."""

import inspect
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from benchmarks.gpu.interpreter import patch_once
from kvcache.codes import E4M3, INT8
from tests.attention.gpu.test_decode import decode
from tests.support.gpu.attention import Heads, make_paged
from tests.support.gpu.interpreted import needs_triton
from tests.support.gpu.path import Part, build_interpreted, run_steps
from tests.support.models.families import VOCABULARY, write_checkpoint
from tests.support.ranks import RankPool

MODULE = "triton.runtime.interpreter"
LENGTHS = (9, 4)
PROMPTS_THEN_DECODES = [[Part(0, 0, 8), Part(1, 0, 3)], [Part(0, 8, 9), Part(1, 3, 4)]]


def counted(run: Callable[[], list[np.ndarray]]) -> tuple[list[np.ndarray], int]:
    """Return the results, and the number of calls of Python functions."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        return run(), calls
    finally:
        sys.setprofile(None)


def before_and_after(run: Callable[[], Any]) -> tuple[Any, Any]:
    """Run kernels in Triton's own interpreter, then in the patched one. The process must be new."""
    os.environ["TRITON_INTERPRET"] = "1"
    before = run()
    patch_once()
    return before, run()


def decodes() -> list[np.ndarray]:
    """Decode from caches of 8 bits in float32 and float16, with sinks, a window and a soft cap."""
    found = []
    for dtype, codes in ((torch.float32, INT8), (torch.float16, E4M3)):
        paged = make_paged([(50, 1)], Heads(2, 1, 16, 16), dtype, codes)
        query_SHD = torch.randn(1, 2, 16).to(dtype)
        sinks_H = torch.linspace(-1, 2, 2)
        out_SHV = decode(paged, query_SHD, 1, window=40, soft_cap=3.0, sinks_H=sinks_H)
        found.append(out_SHV.numpy())
    return found


def logits(directory: Path) -> list[np.ndarray]:
    """Return logits of two prompts and of two decodes of a whole model."""
    generator = np.random.default_rng(5)
    sequences = [generator.integers(3, VOCABULARY, length).tolist() for length in LENGTHS]
    return run_steps(build_interpreted(directory), sequences, PROMPTS_THEN_DECODES)


def in_both(run: Callable[[], Any]) -> tuple[Any, Any]:
    """Return the results of both interpreters."""
    with RankPool(1, timeout_s=400.0) as pool:
        both: tuple[Any, Any] = pool.run(before_and_after, run)[0]
        return both


def check_same_bits(before: list[np.ndarray], after: list[np.ndarray]) -> None:
    assert len(before) == len(after) > 0
    for ours, theirs in zip(after, before, strict=True):
        assert np.isfinite(theirs).all() and theirs.any()
        np.testing.assert_array_equal(ours, theirs)


@needs_triton
def test_decodes_have_the_same_bits_and_take_fewer_calls() -> None:
    (before, num_before), (after, num_after) = in_both(partial(counted, decodes))
    check_same_bits(before, after)
    assert num_after < num_before / 8, (num_before, num_after)


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("family", ["qwen3_next", "deepseek_v32"])
def test_models_have_the_same_bits(family: str, tmp_path: Path) -> None:
    """Recurrences; latents and indexes."""
    write_checkpoint(family, tmp_path, is_shallow=True)
    check_same_bits(*in_both(partial(logits, tmp_path)))


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
def test_an_unknown_version_of_triton_keeps_its_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has nothing that could be replaced, except for the function that replaces names."""
    names: Any = {"_patch_lang": lambda function: None, "triton": SimpleNamespace(__version__="3.60.0")}
    other = SimpleNamespace(**names)
    monkeypatch.setitem(sys.modules, MODULE, other)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    patch_once()
    assert vars(other).keys() == names.keys() and other._patch_lang is not names["_patch_lang"]


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
