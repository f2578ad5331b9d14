"""Data of every rank arrives on all ranks, in rank order, as values and never as programs."""

import pickle

import pytest
import torch
import torch.distributed as dist

from dispatch.gathered import gather_values
from tests.fixtures import PoolOf


def say(values: list[object]) -> list[object]:
    return gather_values(values[dist.get_rank()], dist.group.WORLD)


def say_bytes() -> str:
    """Send bytes on rank 1 that are not JSON, as an intruder in its place could."""
    content = b"7" if dist.get_rank() == 0 else pickle.dumps(["x"])
    own = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    if dist.get_rank() == 0:
        with pytest.raises(ValueError):
            gather_values(7, dist.group.WORLD)
        return "refused"
    dist.all_gather(sizes, torch.tensor([own.numel()]))
    rows = [torch.empty(max(int(size) for size in sizes), dtype=torch.uint8) for _ in range(2)]
    dist.all_gather(rows, own)
    return "sent"


def test_all_ranks_hear_all_values(pool_of: PoolOf) -> None:
    for values in (["", "ü" * 300], [None, {"a": [1, 2.5, True]}], [0, 1 << 40]):
        assert pool_of(2).run(say, values) == [values, values]


def test_a_peer_that_sends_a_pickle_is_refused(pool_of: PoolOf) -> None:
    assert pool_of(2).run(say_bytes) == ["refused", "sent"]
