"""What every rank of a group says, as JSON.

torch's own collectives of objects (all_gather_object) unpickle what comes over gloo's connections, which nobody authenticates:
whoever takes a peer's place there could run a program here. JSON holds values only. It turns tuples into lists; callers that
want records build them again.
"""

import json
from typing import Any

import torch
import torch.distributed as dist

_MOST_BYTES = 1 << 20  # of one rank's value: names, numbers and settings


def gather_values(own: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return what every rank says, in their order, each as JSON has it. Collective over a gloo group.

    Raises:
        RuntimeError: all that gloo says of a peer that is gone.
        ValueError: what came is no JSON, or too large.
    """
    content = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([content.numel()]), group=group)
    num_bytes = [int(size) for size in sizes]
    if not all(0 < size <= _MOST_BYTES for size in num_bytes):
        raise ValueError(f"ranks say values of {num_bytes} bytes; at most {_MOST_BYTES} are taken")
    padded = torch.zeros(max(num_bytes), dtype=torch.uint8)
    padded[: content.numel()] = content
    rows = [torch.empty_like(padded) for _ in num_bytes]
    dist.all_gather(rows, padded, group=group)
    return [json.loads(bytes(row[:size].tolist())) for row, size in zip(rows, num_bytes, strict=True)]
