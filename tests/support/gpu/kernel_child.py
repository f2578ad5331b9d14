"""Runs CPU kernels named on the command line, in that order, and checks each against torch: a process of its own."""

import sys

import numpy as np
import torch

from moe.cpu.linear import grouped_linear, linear, pack


def check(kernel: str) -> None:
    """Run `linear` or `grouped`, `serial` or `parallel`, over both weight types."""
    name, _, kind = kernel.partition("-")
    for dtype in (torch.float32, torch.bfloat16):
        weight, x = torch.randn(32, 24).to(dtype), torch.randn(7, 24)
        out = torch.empty(7, 32)
        if name == "linear":
            linear(x, pack(weight), out, parallel=kind == "parallel")
        else:
            packed = pack(weight)
            address_S, offsets = np.array([packed.data_ptr()]), torch.tensor([0, 7])
            out = grouped_linear(x, packed, address_S, offsets, parallel=kind == "parallel")
        torch.testing.assert_close(out, x @ weight.float().T, atol=1e-4, rtol=1e-4)


if __name__ == "__main__":
    for kernel in sys.argv[1:]:
        check(kernel)
