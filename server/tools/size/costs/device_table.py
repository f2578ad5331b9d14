"""Devices that `wideep size` knows by name: the hardware of one rank. Imports neither torch nor numpy.

A device is a GPU, or a machine's processor with memory and cores that its ranks share. Rates are dense ones (without sparsity)
from data sheets; memory is what the driver makes available. The achieved share of a rate is in `roofline.RateShares`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

_GIB = 1 << 30
_NVIDIA = "https://www.nvidia.com/en-us/data-center"


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

    def part_for(self, num_ranks: int, num_others: int) -> "Device":
        """Return the part that is left for some ranks of a machine if other ranks share it."""
        share = num_ranks / (num_ranks + min(num_others, max(0, self.node_ranks - num_ranks)))
        if not self.is_cpu or share == 1:
            return self
        return replace(
            self,
            memory_bytes=int(self.memory_bytes * share),
            memory_bytes_per_s=self.memory_bytes_per_s * share,
            link_bytes_per_s=self.link_bytes_per_s * share,
            rates={kind: rate * share for kind, rate in self.rates.items()},
        )

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


def sheet_of(name: str) -> Device | None:
    """Return the table's row for a GPU's full name, such as "NVIDIA H200", or None."""
    return next((each for each in _TABLE if each.name in name.lower().replace("-", " ").split()), None)
