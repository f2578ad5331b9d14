"""Imported once by the server that ranks are forked from: what every rank would otherwise load for itself."""

import numba
import numpy
import torch
import torch.distributed

from dispatch import cpu_kernels
from dispatch.native import compile_all
from dispatch.transports import parts, regions, signals

__all__ = ["numba", "numpy", "torch"]

compile_all(*cpu_kernels.KERNELS, *signals.KERNELS, *parts.KERNELS, *regions.KERNELS)
