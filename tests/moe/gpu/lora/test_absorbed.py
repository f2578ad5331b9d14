"""Adapters of `kv_b_proj`: both halves in absorbed form, and expanded latents, equal the products with the whole change."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.fixtures import OnDevice

HEADS, UNROTATED, VALUE, LATENT, ROTARY = 3, 20, 24, 40, 8
RANKS = (4, 17)
BLOCK = 16


class Adapted(NamedTuple):
    step: Any
    adapters: Any
    change_PYL: list[Tensor]  # by place: what the adapter adds to the weight [H * Y, L], in float64


def make(device: str) -> Adapted:
    """Fill a step of two decodes and two prompts, with adapters at two places."""
    from kvcache.gpu.step import DeviceStep  # noqa: PLC0415 - in the interpreter
    from kvcache.step import Span  # noqa: PLC0415
    from moe.gpu.lora.absorbed import AbsorbedAdapters  # noqa: PLC0415
    from moe.lora.tables import factors_of  # noqa: PLC0415

    step = DeviceStep(
        max_tokens=16, max_sequences=4, max_blocks=4, block_tokens=BLOCK, device=torch.device(device)
    )
    step.num_adapters = len(RANKS)
    spans = [
        Span(4, 1, range(1), adapter=-1), Span(7, 1, range(1, 2), adapter=0), Span(30, 2, range(2, 4), adapter=1),
        Span(3, 3, range(4, 5), adapter=-1),
    ]  # fmt: skip
    step.fill(spans, 2)
    step.inputs([0] * 7, [0])
    adapters = AbsorbedAdapters(step, heads=HEADS, unrotated_dim=UNROTATED, value_dim=VALUE)
    generator, changes = torch.Generator().manual_seed(2), []
    for place, rank in enumerate(RANKS):
        a, b = (
            torch.randn(shape, generator=generator) * 0.2
            for shape in ((rank, LATENT), (HEADS * (UNROTATED + VALUE), rank))
        )
        adapters.put(place, factors_of(a, b, 0.5))
        changes.append(0.5 * b.double() @ a.double())
    return Adapted(step, adapters, changes)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def halves(change: Tensor) -> tuple[Tensor, Tensor]:
    of_heads = change.view(HEADS, UNROTATED + VALUE, LATENT)
    return of_heads[:, :UNROTATED], of_heads[:, UNROTATED:]


def compare(found: Tensor, before: Tensor, wanted: Tensor, is_adapted: Tensor) -> None:
    """Compare tensors [rows, ...]. Rows without an adapter are not touched."""
    found = found.cpu()
    assert float((found.double() - wanted).abs().max()) < 1e-4
    assert torch.equal(found[~is_adapted], before[~is_adapted])
    assert not torch.equal(found[is_adapted], before[is_adapted])


def check_absorbed(device: str, first: int) -> None:
    """Add to rows from `first` on: queries in latent space, and values of means."""
    step, adapters, changes = make(device)
    places = step.adapters_on_device().tolist()[first:]
    assert step.adapters_on_device().tolist() == [-1, 0, 1, 1, -1, -1, -1, -1] and adapters.is_used
    query, mean = drawn(len(places), HEADS, UNROTATED + ROTARY), drawn(len(places), HEADS, LATENT)
    latent, value = drawn(HEADS, len(places), LATENT), drawn(HEADS, len(places), VALUE)
    found = latent.to(device, copy=True), value.to(device, copy=True)
    adapters.add_to_queries(query.to(device), found[0], first)
    adapters.add_to_values(mean.to(device), found[1], first)
    wanted = latent.double().transpose(0, 1).clone(), value.double().transpose(0, 1).clone()
    for row, place in enumerate(places):
        if place >= 0:
            keys, values = halves(changes[place])
            wanted[0][row] += torch.einsum("hu,hul->hl", query[row, :, :UNROTATED].double(), keys)
            wanted[1][row] += torch.einsum("hl,hvl->hv", mean[row].double(), values)
    is_adapted = torch.tensor(places) >= 0
    for own, before, want in zip(found, (latent, value), wanted, strict=True):
        compare(own.transpose(0, 1), before.transpose(0, 1), want, is_adapted)


@pytest.mark.parametrize("first", [0, 2])
def test_both_halves_equal_products_with_the_change(on_device: OnDevice, first: int) -> None:
    on_device(check_absorbed, first)


def check_expanded(device: str) -> None:
    """Expand the blocks of both prompts for the last two heads. The first prompt has the adapter at place 1."""
    step, adapters, changes = make(device)
    [blocks] = step.expansions(100)
    assert step.adapters_of_blocks(blocks).tolist() == [1, 1, -1]
    width = 2 * (UNROTATED + VALUE)
    latent, out = drawn(3, BLOCK, LATENT + ROTARY), drawn(3, BLOCK, width)
    found = out.to(device, copy=True)
    adapters.add_to_expanded(latent.to(device)[..., :LATENT], found, blocks, 1)
    wanted = out.double()
    wanted[:2] += latent[:2, :, :LATENT].double() @ changes[1][UNROTATED + VALUE :].t()
    compare(found, out, wanted, torch.tensor([True, True, False]))


def test_latents_of_a_prompt_are_expanded_with_its_adapter(on_device: OnDevice) -> None:
    on_device(check_expanded)


def check_emptied(device: str) -> None:
    _, adapters, _ = make(device)
    for place in range(len(RANKS)):
        assert adapters.is_used
        adapters.put(place, None)
    assert not adapters.is_used


def test_an_emptied_place_adds_nothing(on_device: OnDevice) -> None:
    on_device(check_emptied)
