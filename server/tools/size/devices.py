"""Devices that `wideep size` supports by name, and measurements of this machine. Does not import torch.

A device is the hardware of one rank: a GPU, or a machine's processor with memory and cores that its ranks share. Rates are
dense ones (without sparsity) from data sheets; memory is what the driver makes available. The achieved share of a rate is
in `roofline.Shares`; only the rates of `this` are measured, and thus achieved.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from server.serve.preflight.device import Gpu, look
from server.serve.preflight.memory import available_bytes, usable_cores
from server.tools.gpu_rates import GpuRates, measure_gpu

_GIB = 1 << 30
_NVIDIA = "https://www.nvidia.com/en-us/data-center"
_MEASURED_BYTES = 256 << 20  # much larger than any cache
_MEASURED_ROWS = 1024  # of a square matrix product
_REPEATS = 5
_ETHERNET_BYTES_PER_S = 1.25e9
_PCIE_BYTES_PER_S = 32e9


class UnknownDeviceError(ValueError):
    """The device is not in the table; the message lists the known ones."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """The hardware that a rank computes on.

    Attributes:
        memory_bytes: Memory available to programs.
        memory_bytes_per_s: Read rate of the memory.
        rates: Matrix products in operations per second (a multiply-add is two), by number type.
        link_bytes_per_s: Rate one way, from one device to the others of its domain.
        link_ranks: Number of devices in a domain of such links.
        network_bytes_per_s: Rate one way, from one device to other domains.
        node_ranks: Number of ranks on a machine.
        is_cpu: The ranks of a machine share its memory, memory rate and cores.
        is_measured: The rates were measured, not taken from a data sheet.
        source: Source of the figures.
    """

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    rates: Mapping[str, float]
    link_bytes_per_s: float
    link_ranks: int
    network_bytes_per_s: float
    node_ranks: int
    is_cpu: bool = False
    is_measured: bool = False
    source: str

    def rate_of(self, kind: str) -> float:
        """Return operations per second for a type of numbers, or for the widest type if this one has no products."""
        return self.rates.get(kind, next(iter(self.rates.values())))

    def shared_by(self, num_ranks: int) -> "Device":
        """Return one rank's share if the machine has this number of ranks."""
        if not self.is_cpu or num_ranks == 1:
            return self
        return replace(
            self,
            memory_bytes_per_s=self.memory_bytes_per_s / num_ranks,
            link_bytes_per_s=self.link_bytes_per_s / num_ranks,
            rates={kind: rate / num_ranks for kind, rate in self.rates.items()},
        )


def _gpu(
    name: str,
    memory_gib: float,
    tb_per_s: float,
    bf16: float,
    fp8: float,
    fp4: float,
    link_gb: float,
    source: str,
    *,
    link_ranks: int = 8,
    node_ranks: int = 8,
    network_gbit: float = 400,
) -> Device:
    """Return a row of the table: rates in 10^12 operations/s (0 for missing types), links in 10^9 bytes/s one way."""
    rates = {"bfloat16": bf16, "fp8": fp8, "fp4": fp4}
    return Device(
        name=name,
        memory_bytes=int(memory_gib * _GIB),
        memory_bytes_per_s=tb_per_s * 1e12,
        rates={kind: rate * 1e12 for kind, rate in rates.items() if rate},
        link_bytes_per_s=link_gb * 1e9,
        link_ranks=link_ranks,
        network_bytes_per_s=network_gbit / 8 * 1e9,
        node_ranks=node_ranks,
        source=source,
    )


_EPYC = "https://www.amd.com/en/products/processors/server/epyc/4th-generation-9004-and-8004-series/amd-epyc-9654.html"
_TABLE = (
    _gpu("a100", 79.1, 2.039, 312, 0, 0, 300, f"{_NVIDIA}/a100/", network_gbit=200),
    _gpu("h100", 79.1, 3.35, 989, 1979, 0, 450, f"{_NVIDIA}/h100/"),
    # An H100 with NVLink limited to 400 GB/s both ways: DeepSeek-V3's report, arXiv 2412.19437, and DeepEP's README.
    _gpu("h800", 79.1, 3.35, 989, 1979, 0, 200, "https://arxiv.org/abs/2412.19437"),
    _gpu("h200", 139.8, 4.8, 989, 1979, 0, 450, f"{_NVIDIA}/h200/"),
    _gpu("b200", 178.0, 7.7, 2250, 4500, 9000, 900, f"{_NVIDIA}/dgx-b200/"),
    _gpu("gb200", 184.0, 8.0, 2500, 5000, 10000, 900, f"{_NVIDIA}/gb200-nvl72/", link_ranks=72, node_ranks=4),
    _gpu(
        "gb300", 277.0, 8.0, 2500, 5000, 15000, 900, f"{_NVIDIA}/gb300-nvl72/", link_ranks=72, node_ranks=4,
        network_gbit=800,
    ),
    _gpu(
        "mi300x", 191.5, 5.3, 1307, 2615, 0, 448,
        "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html",
    ),
    _gpu(
        "mi355x", 287.0, 8.0, 2500, 5000, 10000, 538,
        "https://www.amd.com/en/products/accelerators/instinct/mi350/mi355x.html",
    ),
    _gpu("l40s", 44.5, 0.864, 362, 733, 0, 32, f"{_NVIDIA}/l40s/", network_gbit=200),
    Device(
        name="cpu", memory_bytes=768 * _GIB, memory_bytes_per_s=460.8e9,
        # 96 cores at 2.4 GHz, two fused multiply-adds of 8 numbers each per cycle.
        rates={"float32": 96 * 2.4e9 * 32}, link_bytes_per_s=100e9, link_ranks=64, network_bytes_per_s=12.5e9,
        node_ranks=2, is_cpu=True, source=f"{_EPYC} (12 channels of DDR5-4800)",
    ),
)  # fmt: skip
DEVICES = {device.name: device for device in _TABLE}
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


def sheet_of(name: str) -> Device | None:
    """Return the table's row for a GPU's full name, such as "NVIDIA H200", or None."""
    return next((each for each in _TABLE if each.name in name.lower().replace("-", " ").split()), None)


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
