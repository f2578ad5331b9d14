"""Recurrences for GPUs, in Triton's interpreter and where there is a GPU on it: the CPU's cases, and no bit depends on cuts."""

from collections.abc import Callable

import pytest
import torch

from kvcache.paged_cache import LayerShape
from tests.conftest import OnDevice
from tests.support.models.recurrences import KINDS, Rank, check_a_batch, check_cuts, whole


def rank_on(device: str, name: str) -> Rank:
    from attention.recurrences import gpu  # noqa: PLC0415 - in the interpreter
    from kvcache.gpu.cache import DeviceCache  # noqa: PLC0415
    from kvcache.gpu.step import DeviceStep  # noqa: PLC0415

    kind, place = KINDS[name](device), torch.device(device)
    step = DeviceStep(max_tokens=128, max_sequences=8, max_blocks=8, block_tokens=16, device=place)
    cache = DeviceCache([LayerShape(state=kind.state)], 1, 16, dtype=torch.float32, device=place)
    cache.step = step
    return Rank(kind, gpu, step, cache)


def checked(device: str, name: str, check: Callable[[Rank], None]) -> None:
    check(rank_on(device, name))


def decodes_and_padding(device: str, name: str) -> None:
    """Decodes of a padded step give the bits that prompts of one token give; padding is finite."""
    rank = rank_on(device, name)
    inputs = [rank.kind.inputs(10 * index, 1) for index in range(3)]
    prompts = rank.run([whole(1) for _ in inputs], inputs)[:3]
    *decodes, padding = rank.run([whole(1) for _ in inputs], inputs, num_decodes=3)
    assert padding.shape[rank.kind.time_at] == 1
    assert padding.isfinite().all()
    assert all(torch.equal(one, other) for one, other in zip(prompts, decodes, strict=True))
    rank.run([], [])


@pytest.mark.parametrize("check", [check_a_batch, check_cuts])
@pytest.mark.parametrize("name", KINDS)
def test_sequences_give_what_transformers_gives_and_cuts_change_no_bit(
    name: str, check: Callable[[Rank], None], on_device: OnDevice
) -> None:
    on_device(checked, name, check)


@pytest.mark.parametrize("name", KINDS)
def test_decodes_have_the_bits_of_prompts(name: str, on_device: OnDevice) -> None:
    on_device(decodes_and_padding, name)
