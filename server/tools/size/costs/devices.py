"""The device of an estimate: one of the table, or this machine's, measured. Does not import torch."""

import os
import time
from collections.abc import Callable, Sequence

import numpy as np

from server.serve.preflight.device import Gpu, look
from server.serve.preflight.memory import available_bytes, usable_cores
from server.tools.gpu_rates import GpuRates, measure_gpu
from server.tools.size.costs.device_table import DEVICES, Device, sheet_of

_MEASURED_BYTES = 256 << 20  # much larger than any cache
_MEASURED_ROWS = 1024  # of a square matrix product
_REPEATS = 5
_ETHERNET_BYTES_PER_S = 1.25e9
_PCIE_BYTES_PER_S = 32e9


class UnknownDeviceError(ValueError):
    """The device is not in the table; the message lists the known ones."""


THIS = "this"
NAMES = (*DEVICES, THIS)


def device_named(name: str) -> Device:
    """Return a device; `this` is measured, which takes some seconds.

    Raises:
        UnknownDeviceError: No device has this name.
        PreflightError: There is a GPU, but it cannot be measured.
    """
    if name == THIS:
        facts, problem = look()
        return measure_cpu() if problem else gpu_of(facts.devices, measure_gpu())
    if name not in DEVICES:
        raise UnknownDeviceError(
            f"--device is {name!r}; known devices are {', '.join(NAMES)}; {THIS} measures this machine's GPU, or its processor"
        )
    return DEVICES[name]


def gpu_of(devices: Sequence[Gpu], rates: GpuRates) -> Device:
    """Return this machine's GPUs with measured rates. Links are those of the table, or of PCIe for an unknown GPU."""
    known = sheet_of(devices[0].name)
    return Device(
        name=THIS,
        memory_bytes=devices[0].free_bytes,
        memory_bytes_per_s=rates.copy_bytes_per_s,
        rates={"bfloat16": rates.bfloat16_per_s},
        link_bytes_per_s=known.link_bytes_per_s if known else _PCIE_BYTES_PER_S,
        link_ranks=len(devices),
        network_bytes_per_s=known.network_bytes_per_s if known else _ETHERNET_BYTES_PER_S,
        node_ranks=len(devices),
        is_measured=True,
        source=f"{len(devices)} x {devices[0].name}; memory and products measured now, links from data sheets",
    )


def measure_cpu() -> Device:
    """Measure this machine's processor: its memory read rate and its float32 products."""
    cores = usable_cores()
    return Device(
        name=THIS,
        memory_bytes=available_bytes(),
        memory_bytes_per_s=_measure_reading(),
        rates={"float32": _measure_products()},
        link_bytes_per_s=_measure_copying(),
        link_ranks=1 << 30,  # only this machine is known
        network_bytes_per_s=_ETHERNET_BYTES_PER_S,
        node_ranks=2,
        is_cpu=True,
        is_measured=True,
        source=f"measured now: numpy on {cores} core{'' if cores == 1 else 's'} of this machine ({os.uname().machine})",
    )


def _shortest_s(call: Callable[[], object]) -> float:
    """Return the shortest of several times, because other work on the machine only makes them longer."""
    times = []
    for _ in range(_REPEATS):
        started_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - started_s)
    return max(min(times), 1e-9)


def _measure_reading() -> float:
    numbers = np.ones(_MEASURED_BYTES // 4, dtype=np.float32)
    return _MEASURED_BYTES / _shortest_s(numbers.sum)


def _measure_copying() -> float:
    """Return the rate of messages through shared memory: one rank writes them, another reads them."""
    source = np.ones(_MEASURED_BYTES // 4, dtype=np.float32)
    target = np.zeros_like(source)
    return _MEASURED_BYTES / _shortest_s(lambda: np.copyto(target, source)) / 2


def _measure_products() -> float:
    square = np.ones((_MEASURED_ROWS, _MEASURED_ROWS), dtype=np.float32)
    return float(2 * _MEASURED_ROWS**3 / _shortest_s(lambda: square @ square))
