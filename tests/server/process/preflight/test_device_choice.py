"""The device is chosen once: what was wished is had or refused by name, and defaults follow from it."""

from dataclasses import replace

import pytest

from scheduler.step.sizing import WORKSPACE_BYTES, KVMemoryError, gpu_cache_budget
from server.options.flag import OptionsError
from server.options.reading import options_from_keywords
from server.options.table import Options
from server.process.preflight.device import GpuFacts, choose_device, on_device
from server.process.preflight.memory import float_bytes
from server.process.preflight.model import PreflightError
from tests.server.process.preflight.test_gpu_probe import GOOD

OLD_DRIVER = "the NVIDIA driver supports CUDA 12.4 and torch was built for CUDA 13.0"


def found() -> tuple[GpuFacts, str]:
    return GOOD, ""


def not_found() -> tuple[GpuFacts, str]:
    return GpuFacts(), OLD_DRIVER


def options(**keywords: object) -> Options:
    return options_from_keywords("demo", keywords)


def test_auto_takes_the_gpu_that_is_there_and_says_what_it_found() -> None:
    device = choose_device("auto", found)
    assert device.name == "cuda" and device.free_bytes == 140 << 30
    assert device.reason == "2 x NVIDIA H200, driver for CUDA 13.1, triton 3.6.0"


def test_auto_takes_the_cpu_and_says_why() -> None:
    device = choose_device("auto", not_found)
    assert (device.name, device.reason, device.ranks, device.free_bytes) == ("cpu", OLD_DRIVER, 2, None)


def test_cuda_that_cannot_be_had_is_refused_with_the_reason() -> None:
    with pytest.raises(
        PreflightError, match=r"--device is cuda, which cannot be used: the NVIDIA driver .*cpu"
    ):
        choose_device("cuda", not_found)


def test_cpu_is_taken_without_looking() -> None:
    def look() -> tuple[GpuFacts, str]:
        raise AssertionError("nobody asked")

    assert choose_device("cpu", look).name == "cpu"


@pytest.mark.parametrize(
    ("name", "said", "limits"),
    [
        ("cpu", {}, (64, 512)),
        ("cuda", {}, (256, 8192)),
        ("cuda", {"max_num_seqs": 8}, (8, 8192)),
        ("cpu", {"max_num_batched_tokens": 64}, (64, 64)),
        ("cuda", {"max_num_seqs": 3, "max_num_batched_tokens": 40}, (3, 40)),
    ],
)
def test_limits_that_nobody_said_follow_from_the_device(
    name: str, said: dict[str, int], limits: tuple[int, int]
) -> None:
    device = choose_device(name, found)
    filled = on_device(options(**said), device, num_local_ranks=1)
    assert (filled.max_num_seqs, filled.max_num_batched_tokens) == limits
    assert filled.device == name


def test_limits_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(
        OptionsError, match="--max-num-batched-tokens is 32; it must be at least --max-num-seqs"
    ):
        options(max_num_seqs=33, max_num_batched_tokens=32)
    with pytest.raises(OptionsError, match=r"is 32; it must be at least --max-num-seqs \(64\)"):
        on_device(options(max_num_batched_tokens=32), choose_device("cpu"), num_local_ranks=1)


def test_a_rank_for_each_gpu_is_the_default_and_more_are_refused() -> None:
    device = choose_device("cuda", found)
    assert device.ranks == 2
    assert on_device(options(), device, num_local_ranks=2).device == "cuda"
    with pytest.raises(
        PreflightError, match=r"3 ranks on a node with 2 GPUs; .* give --data-parallel-size 2 or less"
    ):
        on_device(options(), device, num_local_ranks=3)


@pytest.mark.parametrize(
    ("device", "dtype", "size"),
    [("cpu", "auto", 4), ("cpu", "bfloat16", 2), ("cuda", "auto", 2), ("cuda", "float32", 4)],
)
def test_weights_are_counted_in_the_type_that_the_device_keeps(device: str, dtype: str, size: int) -> None:
    assert float_bytes(replace(options(dtype=dtype), device=device)) == size


def test_a_gpus_cache_is_what_its_weights_and_steps_leave() -> None:
    gib = 1 << 30
    assert gpu_cache_budget(100 * gib, 0.5, 40 * gib, 3 * gib) == 7 * gib - WORKSPACE_BYTES
    with pytest.raises(
        KVMemoryError, match=r"has 100\.0 GiB free, of which --gpu-memory-utilization 0.5 may be taken"
    ):
        gpu_cache_budget(100 * gib, 0.5, 49 * gib, 0)
