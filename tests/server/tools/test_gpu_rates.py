"""Measured rates of a GPU: the child process, with CPU tensors instead, and the doctor's lines about them."""

import pytest
import torch

from server.serve.preflight.device import ChosenDevice, Gpu, GpuFacts
from server.serve.preflight.model import PreflightError
from server.tools.doctor.run import check_speed
from server.tools.gpu_rates import GpuRates, measure_gpu, rates_on

H200 = GpuFacts(
    devices=(Gpu(name="NVIDIA H200", capability=(9, 0), free_bytes=1, total_bytes=1),), triton="3.6.0"
)


def test_rates_are_measured_on_a_device() -> None:
    rates = rates_on(torch, "cpu", copied_bytes=1 << 20, rows=64)
    assert 1e6 < rates.copy_bytes_per_s < 1e14 and 1e6 < rates.bfloat16_per_s < 1e15


def test_a_child_reports_rates_and_its_last_line_if_it_fails() -> None:
    child = 'print(\'{"copy_bytes_per_s": 4e12, "bfloat16_per_s": 8e14}\')'
    assert measure_gpu(child=child) == GpuRates(4e12, 8e14)
    with pytest.raises(PreflightError, match="could not be measured: RuntimeError: no kernel image"):
        measure_gpu(child='raise RuntimeError("no kernel image")')


@pytest.mark.parametrize(
    ("copied", "status", "says"),
    [
        (4.2e12, "ok", "copies 4.20 TB/s and multiplies 800 TFLOP/s in bfloat16"),
        (2.0e12, "warning", "its data sheet says 4.80 TB/s"),
    ],
)
def test_the_doctor_compares_a_gpu_with_its_data_sheet(copied: float, status: str, says: str) -> None:
    device = ChosenDevice(name="cuda", reason="found", facts=H200)
    check = check_speed(device, lambda: GpuRates(copied, 8e14))
    assert (check.status, says in check.text) == (status, True)


def test_the_doctor_reports_a_gpu_that_cannot_be_measured() -> None:
    def fail() -> GpuRates:
        raise PreflightError("the GPU's rates could not be measured: out of memory")

    check = check_speed(ChosenDevice(name="cuda", reason="found", facts=H200), fail)
    assert check.status == "FAILURE" and "out of memory" in check.text
