"""What DeepEP's hardware and kernels cannot do and ours can: refused with `strict=True` and by the `deep_ep` backend.

Numbers are those of csrc/kernels/legacy/compiled.cuh and csrc/legacy/buffer.hpp at dd758ca.
"""

from dispatch.faces.config import NVL_PEERS

MAX_NODES = 20
MAX_LOCAL_EXPERTS = 1024
VECTOR_BYTES = 16  # rows are copied in such pieces
BUFFER_ALIGNMENT = 128


def check_buffer(num_ranks: int, num_nvl_bytes: int, num_rdma_bytes: int, low_latency_mode: bool) -> None:
    """Raise ValueError for a group or buffer sizes that DeepEP does not run with."""
    if num_ranks > NVL_PEERS and num_ranks % NVL_PEERS != 0:
        raise ValueError(
            f"group has {num_ranks} ranks; DeepEP takes up to {NVL_PEERS} or a multiple of {NVL_PEERS} (strict=True)"
        )
    if num_ranks > NVL_PEERS * MAX_NODES and not low_latency_mode:
        raise ValueError(
            f"group has {num_ranks} ranks; DeepEP's normal mode takes up to {NVL_PEERS * MAX_NODES} (strict=True)"
        )
    for name, size in (("num_nvl_bytes", num_nvl_bytes), ("num_rdma_bytes", num_rdma_bytes)):
        if size < 0 or size % BUFFER_ALIGNMENT != 0:
            raise ValueError(f"{name} is {size}; DeepEP needs a multiple of {BUFFER_ALIGNMENT} (strict=True)")
