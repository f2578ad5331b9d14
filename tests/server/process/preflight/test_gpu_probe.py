"""Every reason why GPUs cannot be used is one sentence that names what is there, what is needed and what to do."""

from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from server.process.preflight.device import NO_FACTS, Gpu, GpuFacts, collect, facts_from, look, why_not

H200 = Gpu(name="NVIDIA H200", capability=(9, 0), free_bytes=140 << 30, total_bytes=141 << 30)
GOOD = GpuFacts(devices=(H200, H200), torch="2.11.0+cu130", built_for="13.0", driver="13.1", triton="3.6.0")


def test_a_machine_with_all_that_is_needed_is_taken() -> None:
    assert why_not(GOOD, has_device=True) == ""
    assert why_not(replace(GOOD, triton="3.5.1", driver="13.0"), has_device=True) == ""


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        (replace(GOOD, built_for="", devices=()), "torch 2.11.0+cu130 was built without CUDA"),
        (
            replace(GOOD, driver="12.4", devices=()),
            "the NVIDIA driver supports CUDA 12.4 and torch 2.11.0+cu130 was built for CUDA 13.0; install a newer",
        ),
        (replace(GOOD, driver="", devices=()), "supports CUDA of no known version"),
        (replace(GOOD, devices=()), "torch finds no GPU that this process may use"),
        (
            replace(GOOD, devices=(H200, replace(H200, name="Tesla T4", capability=(7, 5)))),
            "GPU 1 (Tesla T4) has compute capability 7.5; 8.0 or higher is needed: hide it with CUDA_VISIBLE_DEVICES",
        ),
        (replace(GOOD, triton=""), "the package triton is not installed; install wideep[gpu]"),
        (replace(GOOD, triton="3.4.0"), "triton is 3.4.0; 3.5 or later is needed"),
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


def fake_torch(*, cuda: str | None, driver: int, gpus: int) -> Any:
    device = SimpleNamespace(
        device_count=lambda: gpus,
        mem_get_info=lambda index: (index + 1, 10),
        get_device_name=lambda index: f"gpu {index}",
        get_device_capability=lambda _index: (9, 0),
    )
    return SimpleNamespace(
        __version__="2.11.0",
        version=SimpleNamespace(cuda=cuda),
        cuda=device,
        _C=SimpleNamespace(_cuda_getDriverVersion=lambda: driver),
    )


def test_torch_is_asked_and_the_answer_survives_json() -> None:
    facts = collect(fake_torch(cuda="13.0", driver=13010, gpus=2), "3.6.0")
    assert facts.driver == "13.1" and [gpu.free_bytes for gpu in facts.devices] == [1, 2]
    values = asdict(facts)
    values["devices"] = [{**each, "capability": list(each["capability"])} for each in values["devices"]]
    assert facts_from(values) == facts
    assert why_not(facts, has_device=True) == ""


def test_a_torch_without_cuda_is_not_asked_for_a_driver() -> None:
    facts = collect(fake_torch(cuda=None, driver=0, gpus=0), "")
    assert facts == GpuFacts(torch="2.11.0") and "built without CUDA" in why_not(facts, has_device=True)


@pytest.mark.slow
def test_the_child_that_looks_is_this_copy_whatever_else_is_called_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "__init__.py").write_text("raise SystemExit('another server')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    facts, _ = look(has_device=lambda: True)
    assert facts.torch, "the child has looked"
