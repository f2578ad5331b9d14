"""Requirements of each way to exchange tokens, checked before anything is loaded."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from dispatch.wires import availability
from dispatch.wires.availability import BACKENDS, why_not_served_by, why_unavailable
from dispatch.wires.open import open_wire
from tests.dispatch.exchange import catch
from tests.fixtures import PoolOf


def open_by_name(name: str) -> str:
    return catch(lambda: open_wire(name, dist.group.WORLD))


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "_CUDA_DEVICE", Path("/dev/none"))


@pytest.fixture
def a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "_CUDA_DEVICE", Path("/dev/null"))


@pytest.mark.usefixtures("no_device")
@pytest.mark.parametrize("name", ["nccl", "nvshmem", "deep_ep"])
def test_what_connects_gpus_is_refused_without_one(name: str) -> None:
    text = str(why_not_served_by(name, 2))
    assert text.startswith(
        f"--all2all-backend is {name}, which cannot be used: this machine has no CUDA device"
    )
    assert text.endswith("; use auto, gloo or shm")


@pytest.mark.usefixtures("a_device")
@pytest.mark.parametrize(("name", "package"), [("nvshmem", "nvshmem4py-cu13"), ("deep_ep", "DeepEP")])
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, name: str, package: str) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    assert str(why_unavailable(name)).startswith(f"the package {name} is not installed ({package}")


@pytest.mark.usefixtures("a_device")
def test_the_service_says_that_it_computes_on_the_cpu() -> None:
    text = "the service computes on the CPU; use auto, gloo or shm"
    assert text in str(why_not_served_by("nccl", 2))
    assert why_not_served_by("nccl", 2, on_gpus=True) is None


@pytest.mark.parametrize("name", ["auto", "gloo", "shm"])
def test_what_works_anywhere_is_not_refused(name: str) -> None:
    assert why_not_served_by(name, 4) is None
    assert why_unavailable(name) is None


def test_local_serves_one_rank() -> None:
    assert why_not_served_by("local", 1) is None
    assert "local with 2 ranks; it supports one: use auto, gloo or shm" in str(why_not_served_by("local", 2))


@pytest.mark.parametrize("name", ["nvshmem", "deep_ep"])
def test_what_is_no_wire_is_refused_on_every_rank(pool_of: PoolOf, name: str) -> None:
    for text in pool_of(2).run(open_by_name, name):
        assert text.startswith(f"WireUnavailable: {name} cannot be used: ")
        assert text.endswith("; use auto, gloo or shm")


def test_it_loads_no_torch() -> None:
    script = "import sys, dispatch.wires.availability; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0


def test_every_backend_is_a_choice_of_the_service() -> None:
    assert BACKENDS == ("auto", "local", "gloo", "shm", "nccl", "nvshmem", "deep_ep")
