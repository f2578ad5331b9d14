"""The residual stream: sums stay pending until a norm or another operator needs them, and values are always torch's."""

import pytest
import torch
from torch import Tensor, nn

from moe.adopt.adopt import SampleRows, adopt
from moe.adopt.norms import Norms
from moe.adopt.stream import Stream, start_streams

ROWS = SampleRows(torch.float32, torch.device("cpu"))


class PlainRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(4)), 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


def drawn(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 3, 4, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_sum_is_pending_until_an_operator_needs_it(is_first: bool) -> None:
    one, two, three = drawn(3)
    stream = Stream(one)
    total = stream + two if is_first else two + stream
    assert isinstance(total, Stream) and total.added is two
    assert total.shape == one.shape and total.dtype is one.dtype and total.added is two
    assert torch.equal(total.view(-1, 4), (one + two).view(-1, 4)) and total.added is None
    more = total + three
    assert torch.equal(more * 2, (one + two + three) * 2)
    assert torch.equal(torch.cat((total, stream), -1), torch.cat((one + two, one), -1))


def test_a_sum_that_changes_shape_or_type_is_torchs() -> None:
    one, two = drawn(2)
    stream = Stream(one)
    for other in (two[..., :1], two.double(), 1.5):
        found = stream + other
        assert not isinstance(found, Stream) and torch.equal(found, one + other)
    assert torch.equal(torch.add(stream, two, alpha=2), one + 2 * two)


def test_a_change_in_place_does_not_reach_the_terms_of_a_sum() -> None:
    one, two = drawn(2)
    kept = one.clone()
    total = Stream(one) + two
    total *= 3
    assert torch.equal(total, (kept + two) * 3) and torch.equal(one, kept)


def norm_stream() -> tuple[list[str], Tensor, Tensor]:
    """Return the kernels called for a norm of a pending sum, the norm, and the stream's values."""
    called = []

    def launch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        called.append("norm")
        return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))

    def launch_sum(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        called.append("sum")
        total = x + added
        return total, weight * (total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps))

    norm = PlainRMSNorm()
    assert adopt([norm], (Norms(launch, launch_sum),), ROWS)["Norms"] == 1
    called.clear()
    one, two = drawn(2)
    total = Stream(one) + two
    assert isinstance(total, Stream)
    with torch.inference_mode():
        found = norm(total)
        again = norm(total)
    assert torch.equal(found, again) and type(found) is Tensor
    torch.testing.assert_close(found, PlainRMSNorm.forward(norm, one + two))
    return called, found, total.plain()


def test_a_norm_of_a_pending_sum_is_one_launch_that_settles_the_sum() -> None:
    called, _, total = norm_stream()
    one, two = drawn(2)
    assert called == ["sum", "norm"] and torch.equal(total, one + two)


def test_a_sum_kernel_that_differs_is_not_adopted() -> None:
    def launch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))

    def wrong(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return x + added, launch(x, weight, eps)

    assert not adopt([PlainRMSNorm()], (Norms(launch, wrong),), ROWS)


class Layer(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states + hidden_states.flip(-1)


def test_layers_take_and_return_streams() -> None:
    (x,) = drawn(1)
    layers = [Layer(), Layer()]
    start_streams(layers)
    first = layers[0](x)
    assert isinstance(first, Stream) and first.added is not None
    last = layers[1](hidden_states=first)
    wanted = x + x.flip(-1)
    assert isinstance(last, Stream) and torch.equal(last.plain(), wanted + wanted.flip(-1))
