"""Recurrences for GPUs, in Triton's interpreter and on a GPU if there is one: the CPU's cases. No bit depends on cuts."""

from collections.abc import Callable

import pytest
import torch

from kvcache.paged_cache import LayerShape
from kvcache.states import NO_STATE, StatePiece
from tests.fixtures import OnDevice
from tests.support.models.recurrences import KINDS, Rank, check_a_batch, check_cuts, whole

Rows = tuple[torch.Tensor, ...]
SEEN_ELSEWHERE = (
    "convolution",
    "gated delta rule of given lengths",
)  # tests of other kinds run their kernels too
FIRST_KINDS = [
    pytest.param(each, marks=pytest.mark.slow) if each in SEEN_ELSEWHERE else each for each in KINDS
]


def rank_on(device: str, name: str, *, is_invariant: bool = True) -> Rank:
    from attention.recurrences import gpu  # noqa: PLC0415 - in the interpreter
    from kvcache.gpu.cache import DeviceCache  # noqa: PLC0415
    from kvcache.gpu.step import DeviceStep  # noqa: PLC0415

    kind, place = KINDS[name](device), torch.device(device)
    step = DeviceStep(
        max_tokens=128,
        max_sequences=8,
        max_blocks=8,
        block_tokens=16,
        device=place,
        is_invariant=is_invariant,
    )
    cache = DeviceCache([LayerShape(state=kind.state)], 1, 16, dtype=torch.float32, device=place)
    cache.step = step
    return Rank(kind, gpu, step, cache)


def checked(device: str, name: str, check: Callable[[Rank], None]) -> None:
    check(rank_on(device, name))


def chunks(device: str, name: str) -> None:
    """Prompts in chunks match `transformers`. Cuts at the ends of blocks, and other parts of the batch, change no bit."""
    rank = rank_on(device, name, is_invariant=False)
    check_a_batch(rank)
    at, inputs = rank.kind.time_at, rank.kind.inputs(10, 75)
    wanted = rank.kind.oracle(*inputs)

    def part(begin: int, end: int) -> Rows:
        return tuple(x.narrow(at, begin, end - begin) for x in inputs)

    whole_text = rank.run([whole(75)], [inputs])[0]
    left = [StatePiece(NO_STATE, 1, 32), StatePiece(1, 2, 16)]
    first = rank.run([whole(5), left], [part(0, 5), part(0, 48)])[1]
    last = rank.run([[StatePiece(2, 3, 27)]], [part(48, 75)], starts=[48])[0]
    assert torch.equal(torch.cat((first, last), at), whole_text)
    again = rank.run([[StatePiece(1, 4, 43)]], [part(32, 75)], starts=[32])[0]
    assert torch.equal(again, whole_text.narrow(at, 32, 43)), "from a snapshot"
    assert torch.equal(rank.cache.states[0][3], rank.cache.states[0][4])
    # Cut within chunks, then continue with decodes, which run token by token.
    found = [rank.run([[StatePiece(NO_STATE, 5, 21)]], [part(0, 21)])[0]]
    found += rank.run([[StatePiece(5, 6, 1)]], [part(21, 22)], num_decodes=1, starts=[21])[:1]
    found += rank.run([[StatePiece(6, 7, 53)]], [part(22, 75)], starts=[22])[:1]
    assert torch.allclose(torch.cat(found, at), wanted, rtol=5e-5, atol=5e-5)
    wrong = rank.run([[StatePiece(6, 7, 53)]], [part(21, 74)], starts=[22])[0]
    assert not torch.allclose(wrong, wanted.narrow(at, 22, 53), rtol=5e-5, atol=5e-5)


def alike_keys(device: str) -> None:
    """Equal keys, no decay, and everything learnt at once: inverses by squaring lose their digits here."""
    rank = rank_on(device, "gated delta rule", is_invariant=False)
    query, key, value, _, rate = rank.kind.inputs(3, 64)
    inputs = query, key[:, :1].expand_as(key), value, torch.zeros_like(rate), torch.ones_like(rate)
    found, wanted = rank.run([whole(64)], [inputs])[0], rank.kind.oracle(*inputs)
    assert torch.allclose(found, wanted, rtol=2e-5, atol=2e-5)


def decodes_and_padding(device: str, name: str) -> None:
    """Decodes of a padded step have the bits of one-token prompts. Padding is finite."""
    rank = rank_on(device, name)
    inputs = [rank.kind.inputs(10 * index, 1) for index in range(3)]
    prompts = rank.run([whole(1) for _ in inputs], inputs)[:3]
    *decodes, padding = rank.run([whole(1) for _ in inputs], inputs, num_decodes=3)
    assert padding.shape[rank.kind.time_at] == 1
    assert padding.isfinite().all()
    assert all(torch.equal(one, other) for one, other in zip(prompts, decodes, strict=True))
    rank.run([], [])


def drafts(device: str, name: str) -> None:
    """A decode and its drafts have the bits of consecutive decodes, and so do the states after each of them, alone and
    next to a prompt, which runs in chunks."""
    rank = rank_on(device, name, is_invariant=False)
    at, inputs, prompt = rank.kind.time_at, rank.kind.inputs(10, 6), rank.kind.inputs(20, 17)
    states = rank.cache.states[0], rank.cache.tails[0]

    def part(begin: int, end: int) -> Rows:
        return tuple(x.narrow(at, begin, end - begin) for x in inputs)

    rank.run([[StatePiece(NO_STATE, 0, 3)]], [part(0, 3)])
    found = [
        rank.run([[StatePiece(row, row + 1, 1)]], [part(3 + row, 4 + row)], num_decodes=1, starts=[3 + row])[
            0
        ]
        for row in range(3)
    ]
    kept = [kind[1:4].clone() for kind in states]
    drafted = [StatePiece(0, 5, 1), StatePiece(5, 6, 1), StatePiece(6, 7, 1)]
    alone = rank.run([drafted], [part(3, 6)], num_decodes=3, starts=[3])[0]
    assert torch.equal(alone, torch.cat(found, at))
    assert all(torch.equal(kind[5:8], one) for kind, one in zip(states, kept, strict=True))
    for kind in states:
        kind[5:8] = 0
    prompt_alone = rank.run([whole(17)], [prompt])[0]
    beside = rank.run([drafted, whole(17, 9)], [part(3, 6), prompt], num_decodes=3, starts=[3, 0])
    assert torch.equal(beside[0], alone) and torch.equal(beside[1], prompt_alone)
    assert all(torch.equal(kind[5:8], one) for kind, one in zip(states, kept, strict=True))


@pytest.mark.crossed("name", "check", every=2)
@pytest.mark.parametrize("check", [check_a_batch, check_cuts])
@pytest.mark.parametrize("name", FIRST_KINDS)
def test_sequences_give_what_transformers_gives_and_cuts_change_no_bit(
    name: str, check: Callable[[Rank], None], on_device: OnDevice
) -> None:
    on_device(checked, name, check)


@pytest.mark.parametrize("name", FIRST_KINDS)
def test_decodes_have_the_bits_of_prompts(name: str, on_device: OnDevice) -> None:
    on_device(decodes_and_padding, name)


@pytest.mark.slow  # among the fast tests, `alike_keys` runs the gated delta rule's kernel for chunks
@pytest.mark.parametrize("name", KINDS)
def test_prompts_in_chunks_give_what_transformers_gives(name: str, on_device: OnDevice) -> None:
    on_device(chunks, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_drafts_have_the_bits_of_decodes_one_after_the_other(name: str, on_device: OnDevice) -> None:
    on_device(drafts, name)


def test_alike_keys_lose_no_digits(on_device: OnDevice) -> None:
    on_device(alike_keys)
