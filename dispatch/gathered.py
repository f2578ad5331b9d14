"""Exchange a value with every rank of a group, as JSON.

torch's object collectives (all_gather_object) unpickle data from gloo's connections, which are not authenticated: an
attacker in a peer's place could run code here. JSON holds values only. It turns tuples into lists; callers that need
records rebuild them.
"""

import json
from typing import Any

import torch
import torch.distributed as dist

_MOST_BYTES = 1 << 20  # per rank's value: names, numbers and settings


def gather_values(own: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return the value of every rank, in rank order, decoded from JSON. Collective over a gloo group.

    Raises:
        RuntimeError: gloo's error if a peer is gone.
        ValueError: A value is not JSON, or is too large.
    """
    content = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([content.numel()]), group=group)
    num_bytes = [int(size) for size in sizes]
    if not all(0 < size <= _MOST_BYTES for size in num_bytes):
        raise ValueError(f"the ranks' values have {num_bytes} bytes; at most {_MOST_BYTES} are allowed")
    padded = torch.zeros(max(num_bytes), dtype=torch.uint8)
    padded[: content.numel()] = content
    rows = [torch.empty_like(padded) for _ in num_bytes]
    dist.all_gather(rows, padded, group=group)
    return [json.loads(bytes(row[:size].tolist())) for row, size in zip(rows, num_bytes, strict=True)]
