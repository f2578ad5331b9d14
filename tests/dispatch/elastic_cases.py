"""What tests of ElasticBuffer share."""

from typing import Any

import torch.distributed as dist

from dispatch.faces.elastic import ElasticBuffer

E, K, H, M = 8, 3, 32, 12


def open_buffer(**options: Any) -> ElasticBuffer:
    """A buffer over all of a pool's ranks."""
    assert dist.group.WORLD is not None
    return ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=M, timeout_s=20.0, **options)
