"""What the attention kernels do not take, said before a weight is read. Knows no Triton."""

from collections.abc import Iterable, Sequence

from attention.gpu.limits import LARGEST_DIM, LARGEST_LATENT, LEAST_DIM
from kvcache.paged_cache import LayerShape


def why_not(shapes: Sequence[LayerShape], latent_ranks: Iterable[int]) -> str:
    """Say what the kernels lack; "" if nothing.

    Args:
        shapes: what each layer caches.
        latent_ranks: `kv_lora_rank` of the layers that cache latents.
    """
    dims = {dim for shape in shapes if not shape.latent for dim in (shape.key_dim, shape.value_dim)}
    bad = sorted(dim for dim in dims if not LEAST_DIM <= dim <= LARGEST_DIM)
    if bad:
        return f"heads of {bad[0]} values; the GPU kernels take {LEAST_DIM} to {LARGEST_DIM}"
    if any(shape.latent and shape.window for shape in shapes):
        return "a sliding window over latents; the GPU kernels have none"
    for rank in latent_ranks:
        if rank & (rank - 1) or not LEAST_DIM <= rank <= LARGEST_LATENT:
            return (
                f"latents of {rank} values (kv_lora_rank); the GPU kernels take powers of 2 from {LEAST_DIM} to "
                f"{LARGEST_LATENT}"
            )
    return ""
