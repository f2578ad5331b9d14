"""The device is chosen once: one sentence explains why GPUs cannot be used, and defaults follow from the device."""

import shutil
import subprocess
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from scheduler.step.sizing import WORKSPACE_BYTES, KVMemoryError, gpu_cache_budget
from server.options.flag import OptionsError
from server.options.reading import options_from_keywords
from server.options.table import Options
from server.serve.preflight.device import (
    NO_FACTS,
    Gpu,
    GpuFacts,
    choose_device,
    collect,
    driver_version,
    facts_from,
    look,
    on_device,
    why_not,
    why_slow,
)
from server.serve.preflight.memory import float_bytes
from server.serve.preflight.model import PreflightError

H200 = Gpu(name="NVIDIA H200", capability=(9, 0), free_bytes=140 << 30, total_bytes=141 << 30)
GOOD = GpuFacts(devices=(H200, H200), torch="2.11.0+cu130", built_for="13.0", driver="13.1", triton="3.6.0")


def test_a_machine_with_all_that_is_needed_is_taken() -> None:
    assert why_not(GOOD, has_device=True) == ""
    assert why_not(replace(GOOD, triton="3.6.1", driver="13.0"), has_device=True) == ""


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        (replace(GOOD, built_for="", devices=()), "torch 2.11.0+cu130 was built without CUDA"),
        (
            replace(GOOD, driver="12.4", devices=()),
            "the NVIDIA driver supports CUDA 12.4, but torch 2.11.0+cu130 was built for CUDA 13.0; install a newer",
        ),
        (replace(GOOD, driver="", devices=()), "torch finds no usable GPU"),
        (replace(GOOD, driver=""), ""),
        (replace(GOOD, devices=()), "torch finds no usable GPU"),
        (
            replace(GOOD, devices=(H200, replace(H200, name="Tesla T4", capability=(7, 5)))),
            "GPU 1 (Tesla T4) has compute capability 7.5; 8.0 or higher is required; hide this GPU with CUDA_VISIBLE_DEVICES",
        ),
        (replace(GOOD, triton=""), "the package triton is not installed; install wideep[gpu]"),
        (replace(GOOD, triton="3.5.1"), "triton is 3.5.1; 3.6 or later is required"),
        (replace(GOOD, triton="3.10.0rc1"), ""),
    ],
)
def test_what_is_missing_is_named(facts: GpuFacts, text: str) -> None:
    found = why_not(facts, has_device=True)
    assert text in found if text else not found


def test_no_device_is_said_without_looking_further() -> None:
    assert look(has_device=lambda: False) == (
        NO_FACTS,
        "this machine has no CUDA device (/dev/nvidiactl is missing)",
    )


class Torch:
    """The facts that a build of torch reports. All other names, private ones above all, are missing."""

    def __init__(self, version: str, *, cuda: str | None, gpus: int, fault: Exception | None = None) -> None:
        def memory(index: int) -> tuple[int, int]:
            if fault is not None:
                raise fault
            return index + 1, 10

        self.__version__ = version
        self.version = SimpleNamespace(cuda=cuda)
        self.cuda = SimpleNamespace(
            device_count=lambda: gpus,
            mem_get_info=memory,
            get_device_name=lambda index: f"gpu {index}",
            get_device_capability=lambda _index: (9, 0),
            can_device_access_peer=lambda one, other: {one, other} != {0, 1},
            nccl=SimpleNamespace(version=lambda: (2, 28, 9)),
        )
        self.distributed = SimpleNamespace(is_available=lambda: True, is_nccl_available=lambda: True)


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.12.1+cu130", "2.13.0+cu132"])
def test_torch_is_asked_by_public_names_and_the_answer_survives_json(version: str) -> None:
    facts = collect(Torch(version, cuda="13.0", gpus=2), "3.6.0", "13.1")
    assert facts.driver == "13.1" and [gpu.free_bytes for gpu in facts.devices] == [1, 2]
    assert (facts.nccl, facts.apart) == ("2.28.9", ((0, 1),))
    values = asdict(facts)
    values["devices"] = [{**each, "capability": list(each["capability"])} for each in values["devices"]]
    values["apart"] = [list(pair) for pair in values["apart"]]
    assert facts_from(values) == facts
    assert why_not(facts, has_device=True) == ""


def test_the_names_that_the_child_asks_for_are_those_of_this_torch() -> None:
    fake = Torch("2.13.0", cuda=None, gpus=0)
    for name in vars(fake):
        assert hasattr(torch, name), name
    for owner in ("cuda", "distributed"):
        for name in vars(getattr(fake, owner)):
            assert hasattr(getattr(torch, owner), name), f"{owner}.{name}"
    assert hasattr(torch.cuda.nccl, "version")


def test_a_torch_without_cuda_is_asked_nothing_else() -> None:
    facts = collect(Torch("2.11.0", cuda=None, gpus=3), "", "")
    assert facts == GpuFacts(torch="2.11.0") and "built without CUDA" in why_not(facts, has_device=True)


def test_an_old_driver_is_named_and_its_devices_are_not_asked() -> None:
    broken = Torch("2.11.0", cuda="13.0", gpus=1, fault=RuntimeError("The NVIDIA driver is too old"))
    facts = collect(broken, "3.6.0", "12.4")
    assert "driver supports CUDA 12.4" in why_not(facts, has_device=True)
    with pytest.raises(RuntimeError, match="too old"):  # of an unknown version: torch reports it itself
        collect(broken, "3.6.0", "")


def test_a_driver_without_a_library_is_of_an_unknown_version() -> None:
    assert driver_version("libno-such-driver.so.1") == ""


def test_the_drivers_library_says_which_cuda_it_supports(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler here")
    for number, status, version in ((13010, 0, "13.1"), (12020, 0, "12.2"), (0, 0, ""), (13000, 3, "")):
        source, library = tmp_path / "cuda.c", tmp_path / f"libcuda-{number}-{status}.so"
        source.write_text(f"int cuDriverGetVersion(int *out) {{ *out = {number}; return {status}; }}")
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True, timeout=30)
        assert driver_version(str(library)) == version


FAULTS = [
    (
        "raise AttributeError(\"module 'torch._C' has no attribute 'x'\")",
        "AttributeError: module 'torch._C' has no attribute 'x'",
    ),
    ("print('not JSON')", "Expecting value"),
    ("print('{}')", "devices"),
    ("import os; os._exit(7)", "exit status 7"),
]


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
@pytest.mark.parametrize(("child", "cause"), FAULTS)
def test_an_unexpected_error_ends_the_start_with_its_cause_and_a_way_out(
    wanted: str, child: str, cause: str
) -> None:
    with pytest.raises(PreflightError) as caught:
        choose_device(wanted, partial(look, has_device=lambda: True, child=child))
    text = str(caught.value)
    assert cause in text and "use --device cpu" in text


@pytest.mark.slow
def test_the_child_that_looks_is_this_copy_whatever_else_is_called_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "__init__.py").write_text("raise SystemExit('another server')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    facts, _ = look(has_device=lambda: True)
    assert facts.torch, "the child has looked"


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


def test_cpu_is_taken_without_looking() -> None:
    def look() -> tuple[GpuFacts, str]:
        raise AssertionError("not reached")

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
    assert (filled.engine.max_num_seqs, filled.engine.max_num_batched_tokens) == limits
    assert filled.device == name


def test_limits_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(
        OptionsError, match="--max-num-batched-tokens is 32; it must be at least --max-num-seqs"
    ):
        options(max_num_seqs=33, max_num_batched_tokens=32)
    with pytest.raises(OptionsError, match=r"is 32; it must be at least --max-num-seqs \(64\)"):
        on_device(options(max_num_batched_tokens=32), choose_device("cpu"), num_local_ranks=1)


def test_a_rank_for_each_gpu_is_the_default() -> None:
    device = choose_device("cuda", found)
    assert device.ranks == 2
    assert on_device(options(), device, num_local_ranks=2).device == "cuda"


@pytest.mark.parametrize(
    ("device", "dtype", "size"),
    [("cpu", "auto", None), ("cpu", "bfloat16", 2), ("cuda", "auto", 2), ("cuda", "float32", 4)],
)
def test_weights_are_counted_in_the_type_that_the_device_keeps(
    device: str, dtype: str, size: int | None
) -> None:
    assert float_bytes(replace(options(dtype=dtype), device=device)) == size


def test_a_gpus_cache_is_what_its_weights_and_steps_leave() -> None:
    gib = 1 << 30
    assert gpu_cache_budget(100 * gib, 0.5, 40 * gib, 3 * gib) == 7 * gib - WORKSPACE_BYTES
    with pytest.raises(
        KVMemoryError, match=r"has 100\.0 GiB free, of which --gpu-memory-utilization allows 0.5"
    ):
        gpu_cache_budget(100 * gib, 0.5, 49 * gib, 0)


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
def test_instructions_that_a_processor_lacks_are_named(machine: str, facts: str, said: str) -> None:
    found = why_slow(machine, facts)
    assert said in found and bool(said) == bool(found)


def test_the_processor_of_this_machine_is_read() -> None:
    assert isinstance(why_slow(), str)
