"""Run the CPU kernels named on the command line in order, and check each against torch. Runs as a separate process."""

import sys

import torch

from moe.cpu.kernels.panels import format_of, pack
from moe.cpu.kernels.products import linear
from tests.moe.cpu.kernels.test_products import grouped


def check(kernel: str) -> None:
    """Run `linear` or `grouped` with both weight types."""
    for dtype in (torch.float32, torch.bfloat16):
        weight, x = torch.randn(32, 24).to(dtype), torch.randn(7, 24)
        packed, out = pack(weight), torch.empty(7, 32)
        if kernel == "linear":
            linear(x, packed, None, format_of(packed), out, None)
        else:
            out = grouped(x, packed[None], torch.tensor([0, 7]))
        torch.testing.assert_close(out, x @ weight.float().T, atol=1e-4, rtol=1e-4)


if __name__ == "__main__":
    for kernel in sys.argv[1:]:
        check(kernel)
