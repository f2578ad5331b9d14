"""Measured ceilings of this device: bytes per second of a copy, operations per second of its matrix units.

Every fraction in the day's tables refers to these, never to a data sheet. Data is random, because zeros run faster. A copy
counts bytes read and bytes written. It is launched eagerly: inside a CUDA graph a copy is a node of another kind, which reached
two thirds of the bandwidth on an H200.
"""

import functools
from collections.abc import Iterator

import torch

from benchmarks.gpu.bench import Bench, time_calls, time_queued
from benchmarks.gpu.results import Row, Setting

_COPY_BYTES = 4 << 30
_MATRIX = 8192
_TINY_COPY_BYTES, _TINY_MATRIX = 1 << 20, 128


def units(setting: Setting) -> list[str]:
    """Return the units: the device, memory, and the two types of matrix products."""
    return ["device", "copy", "bf16", "fp8"]


def run(setting: Setting, unit: str) -> Iterator[Row]:
    """Measure one unit."""
    bench = Bench.of(setting)
    if unit == "device":
        yield _device_row(bench)
    elif unit == "copy":
        yield _copy_row(bench, _TINY_COPY_BYTES if setting.is_tiny else _COPY_BYTES)
    elif unit == "bf16":
        yield _matrix_row(bench, _TINY_MATRIX if setting.is_tiny else _MATRIX)
    else:
        yield _fp8_row(bench, _TINY_MATRIX if setting.is_tiny else _MATRIX)


def _device_row(bench: Bench) -> Row:
    if bench.device.type != "cuda":
        return Row(name="interpreter", figures={"multiprocessors": 0, "memory_gib": 0.0, "l2_mib": 0.0})
    about = torch.cuda.get_device_properties(bench.device)
    figures = {
        "multiprocessors": about.multi_processor_count,
        "memory_gib": round(about.total_memory / 2**30, 1),
        "l2_mib": round(about.L2_cache_size / 2**20, 1),
    }
    return Row(name=f"{about.name}, sm_{about.major}{about.minor}", figures=figures)


def _copy_row(bench: Bench, num_bytes: int) -> Row:
    source = bench.normal(bench.generator(0), num_bytes // bench.dtype.itemsize)
    seconds = time_queued(bench, functools.partial(torch.empty_like(source).copy_, source))
    return Row(name="copy", figures={"copy_tb_per_s": 2 * num_bytes / seconds / 1e12}, note="eager")


def _matrix_row(bench: Bench, size: int) -> Row:
    generator = bench.generator(0)
    left, right = (bench.normal(generator, size, size) for _ in range(2))
    timed = time_calls(bench, [functools.partial(torch.matmul, left, right.T, out=torch.empty_like(left))])
    return Row(name=f"matmul of {size}", figures={"bf16_tflops": 2 * size**3 / timed.seconds / 1e12})


def _fp8_row(bench: Bench, size: int) -> Row:
    generator = bench.generator(0)
    left, right = (bench.normal(generator, size, size).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=bench.device)
    product = functools.partial(
        torch._scaled_mm, left, right.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    timed = time_calls(bench, [product])
    return Row(name=f"scaled matmul of {size}", figures={"fp8_tflops": 2 * size**3 / timed.seconds / 1e12})
