"""What ranks with engines need besides `preload`: transformers, the engine, and the compiled kernels of models.

transformers imports triton, which reads once whether kernels are interpreted. Ranks without a GPU run interpreted ones only.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from attention.cpu.attention import ATTEND
from attention.cpu.latents import latent_kernels
from attention.recurrences.cpu_kernels import KERNELS as RECURRENCE_KERNELS
from attention.sparse.cpu import sparse_kernels
from attention.sparse.cpu_pools import POOL_KERNELS
from dispatch.compiled.team import Kernel
from dispatch.compiled.turns import compile_in_turns
from dispatch.cpu_kernels.passes import PASSES
from moe.cpu.kernels.products import GATHER, GROUPED, LINEAR, QUANTISE
from moe.cpu.program.spread_experts import CHOOSE
from scheduler import assembly
from scheduler.sampling import draw
from tests.support import preload
from tests.support.engines import serving
from tests.support.models import families

__all__ = ["assembly", "families", "preload", "serving"]

del os.environ["TRITON_INTERPRET"]
kernels: tuple[Kernel[...], ...] = (
    *draw.KERNELS, LINEAR, GROUPED, GATHER, QUANTISE, ATTEND[torch.float32], CHOOSE,
    *PASSES, *latent_kernels(torch.float32), *sparse_kernels(torch.float32, torch.float32), *POOL_KERNELS, *RECURRENCE_KERNELS,
)  # fmt: skip
compile_in_turns({kernel.name: kernel.compile for kernel in kernels})
