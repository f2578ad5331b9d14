"""Modules that the fork server of the ranks imports once, so that ranks need not load them."""

import numba
import numpy
import torch
import torch.distributed

from dispatch import cpu_kernels
from dispatch.compiled.native import compile_all
from dispatch.cpu_kernels import fp8
from dispatch.wires import gloo_parts as parts
from dispatch.wires import shm_regions as regions
from dispatch.wires import signals

__all__ = ["numba", "numpy", "torch"]


KERNELS = (*cpu_kernels.KERNELS, *fp8.KERNELS, *signals.KERNELS, *parts.KERNELS, *regions.KERNELS)
compile_all(*KERNELS)
