"""A packed weight behaves like a plain tensor in all the ways that transformers' modules use weights."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from kvcache.step import Span, Step
from moe.cpu.weights.packed_weight import PackedWeight

TOLERANCE = {"atol": 2e-5, "rtol": 2e-5}  # sums of 24 products, in another order than the library's


def make_step(num_tokens: int = 0) -> Step:
    """Return a step of this many tokens; 0 leaves it empty."""
    step = Step(max_tokens=64, max_sequences=4, max_blocks=4, block_tokens=16)
    if num_tokens:
        step.fill([Span(0, num_tokens, range(4))])
    return step


def pair(
    rows: int = 20, columns: int = 24, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, PackedWeight]:
    """Return a plain float32 weight and the same weight packed."""
    plain = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(dtype)
    return plain.float(), PackedWeight(plain, make_step())


X = torch.randn(5, 24, generator=torch.Generator().manual_seed(1))
BIAS = torch.linspace(-1, 1, 20)
USES: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda w: functional.linear(X, w),
    "linear with bias": lambda w: functional.linear(X, w, BIAS),
    "linear by keywords": lambda w: functional.linear(input=X, weight=w, bias=BIAS),
    "linear of a vector": lambda w: functional.linear(X[0], w),
    "linear of no rows": lambda w: functional.linear(X[:0], w),
    "linear of a batch": lambda w: functional.linear(X[None, :, None], w),
    "linear of a transpose": lambda w: functional.linear(X.T.contiguous().T, w),
    "linear of strided rows": lambda w: functional.linear(X.repeat(1, 2)[:, :24], w),
    "router in float32": lambda w: functional.linear(X.type(torch.float32), w.type(torch.float32)),
    "router with float()": lambda w: functional.linear(X.float(), w.float()),
    "cast of the input to the weight": lambda w: functional.linear(X.double().to(w.dtype), w),
    "matmul with t()": lambda w: torch.mm(X, w.t()),
    "matmul with T": lambda w: X @ w.T,
    "matmul with mT": lambda w: torch.matmul(X, w.mT),
    "weight on the left": lambda w: w @ X.T,
    "embedding": lambda w: functional.embedding(torch.tensor([[3, 0], [19, 3]]), w),
    "embedding with padding": lambda w: functional.embedding(torch.tensor([3, 0]), w, 0),
    "indexing": lambda w: w[torch.tensor([4, 4, 19])],
    "slicing": lambda w: w[3:7, ::2],
    "view": lambda w: w.view(4, 5, 24).transpose(1, 2),
    "arithmetic": lambda w: w * 2 + torch.ones(24),
    "reflected arithmetic": lambda w: torch.ones(20, 24) - w,
    "in a list": lambda w: torch.cat([w, X, w]),
    "by keyword": lambda w: torch.sum(input=w, dim=1),
    "data": lambda w: w.data.sum(0),
    "cast to float64": lambda w: w.to(torch.float64),
    "cast by keyword": lambda w: w.to(dtype=torch.float32),
    "einsum": lambda w: torch.einsum("tk,nk->tn", X, w),
    "clone": lambda w: w.detach().clone(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("use", USES)
def test_a_packed_weight_answers_as_a_plain_one(use: str, dtype: torch.dtype) -> None:
    plain, packed = pair(dtype=dtype)
    ours, theirs = USES[use](packed), USES[use](plain)
    assert type(ours) in (Tensor, PackedWeight)
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    if isinstance(ours, PackedWeight):
        ours = ours.plain()
    torch.testing.assert_close(ours, theirs, **TOLERANCE)


def test_it_tells_about_itself_without_being_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    _, packed = pair(dtype=torch.bfloat16)

    def unpacked(_self: PackedWeight) -> Tensor:
        raise AssertionError("unpacked")

    monkeypatch.setattr(PackedWeight, "plain", unpacked)
    assert packed.shape == (20, 24)
    assert packed.dtype == torch.float32
    assert packed.device == torch.device("cpu")
    assert (packed.ndim, packed.requires_grad, packed.is_meta) == (2, False, False)
    assert (
        packed.float() is packed
        and packed.to(torch.float32) is packed
        and packed.type(torch.float32) is packed
    )


def test_modules_use_it_in_place_of_their_parameter() -> None:
    torch.manual_seed(0)
    linear, embedding = nn.Linear(24, 20), nn.Embedding(20, 24, padding_idx=0)
    ids = torch.tensor([[1, 19, 0]])
    with torch.inference_mode():
        wanted = linear(X), embedding(ids)
        for module in (linear, embedding):
            weight = module.weight.detach()
            del module._parameters["weight"]
            module.weight = PackedWeight(weight, make_step())  # type: ignore[assignment]
        torch.testing.assert_close(linear(X), wanted[0], **TOLERANCE)
        assert torch.equal(embedding(ids), wanted[1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_an_input_of_another_dtype_is_refused_as_torch_refuses_it(dtype: torch.dtype) -> None:
    plain, packed = pair()
    for weight in (plain, packed):
        with pytest.raises(RuntimeError, match="dtype"):
            functional.linear(X.to(dtype), weight)


def test_an_input_of_the_wrong_width_is_refused_as_torch_refuses_it() -> None:
    for weight in pair():
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            functional.linear(torch.zeros(6, 8), weight)


def test_one_column_with_odd_strides_is_read_right() -> None:
    weight = torch.linspace(-1, 1, 20)[:, None]
    x = torch.arange(12.0).reshape(3, 4).t()[:, :1]
    ours = functional.linear(x, PackedWeight(weight, make_step()))
    torch.testing.assert_close(ours, x @ weight.T)


def test_padded_rows_of_the_packed_batch_come_back_as_zero() -> None:
    step = make_step(num_tokens=5)
    plain, _ = pair()
    packed = PackedWeight(plain, step)
    batch = torch.randn(1, step.num_padded, 24, generator=torch.Generator().manual_seed(2))
    out = functional.linear(batch, packed)
    torch.testing.assert_close(out[0, :5], batch[0, :5] @ plain.T, **TOLERANCE)
    assert not out[0, 5:].any()


def test_what_is_not_the_packed_batch_is_computed_whole_though_it_has_as_many_rows() -> None:
    """It has more dimensions: 30 tokens have 32 padded rows, and another tensor may have 32 rows too."""
    step = make_step(num_tokens=30)
    plain, _ = pair()
    others = torch.randn(1, 1, step.num_padded, 24, generator=torch.Generator().manual_seed(3))
    out = functional.linear(others, PackedWeight(plain, step))
    torch.testing.assert_close(out, others @ plain.T, **TOLERANCE)
