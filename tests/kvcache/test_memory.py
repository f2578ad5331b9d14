"""Memory that is given back: the process gets smaller, and its addresses stay valid."""

import mmap
import os

import pytest
import torch

from kvcache.memory import drop_pages, give_back
from kvcache.paged_cache import LayerShape, PagedCache, StateShape
from kvcache.unit import block_parts, filled, state_parts
from tests.support.service.process_figures import rss_bytes

SIZE = 32 << 20
SLACK = 4 << 20  # what the test itself may allocate meanwhile


def test_the_memory_of_a_tensor_returns_to_the_system_and_can_be_written_again() -> None:
    tensor = torch.ones(SIZE // 4)
    address, full = tensor.data_ptr(), rss_bytes(os.getpid())
    give_back([tensor])
    assert rss_bytes(os.getpid()) < full - SIZE + SLACK
    assert tensor.data_ptr() == address
    inner = tensor[mmap.PAGESIZE : -mmap.PAGESIZE]
    assert not inner.any(), "released pages read as zeros"
    tensor.fill_(2.0)
    assert rss_bytes(os.getpid()) > full - SLACK and tensor.sum() == 2 * len(tensor)


def test_pages_that_a_tensor_shares_with_its_neighbours_stay() -> None:
    whole = torch.ones(8 * mmap.PAGESIZE, dtype=torch.uint8)
    middle = whole[mmap.PAGESIZE // 2 : -mmap.PAGESIZE // 2]
    give_back([middle])
    first = -whole.data_ptr() % mmap.PAGESIZE  # offset of the first page
    begin = first + mmap.PAGESIZE * (first < mmap.PAGESIZE // 2)
    assert whole[:begin].all() and whole[-mmap.PAGESIZE // 2 :].all()
    assert not whole[begin : begin + 6 * mmap.PAGESIZE].any()


@pytest.mark.parametrize("size", [0, 1, 100])
def test_a_tensor_without_a_whole_page_keeps_its_values(size: int) -> None:
    tensor = torch.ones(size)
    give_back([tensor])
    assert tensor.all()


def test_a_refusal_of_the_system_is_an_error() -> None:
    with pytest.raises(OSError, match="madvise failed"):
        drop_pages(1 << 60, (1 << 60) + mmap.PAGESIZE)


def test_all_parts_of_a_cache_are_released() -> None:
    shapes = [
        LayerShape(num_kv_heads=2, key_dim=32, value_dim=32, index_dim=16),
        LayerShape(num_kv_heads=1, key_dim=64, value_dim=0, latent=True),
        LayerShape(state=StateShape(tail=(3, 64), recurrent=(4, 32, 32))),
        LayerShape(num_kv_heads=2, key_dim=32, value_dim=32, codes=torch.int8),
    ]
    cache = PagedCache(shapes, 4096, 512)
    parts = [*block_parts(cache), *state_parts(cache)]
    for part in filled(parts):
        part.view(torch.uint8).fill_(1)
    num_bytes, full = sum(part.nbytes for part in parts), rss_bytes(os.getpid())
    assert num_bytes > 8 * SLACK
    give_back(parts)
    assert rss_bytes(os.getpid()) < full - num_bytes + SLACK


def test_the_first_write_to_a_block_takes_no_huge_pages() -> None:
    cache = PagedCache([LayerShape(num_kv_heads=2, key_dim=64, value_dim=64)] * 16, 2048)
    parts, before = filled(block_parts(cache)), rss_bytes(os.getpid())
    assert len(parts) == 32 and all(part.nbytes > SLACK for part in parts)
    for part in parts:
        part[len(part) // 2].fill_(1)
    assert rss_bytes(os.getpid()) < before + SLACK
