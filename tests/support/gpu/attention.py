"""Inputs and reference results for tests of paged attention on GPUs. Nothing here imports triton."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import pytest
import torch
from torch import Tensor

from attention import reference
from kvcache.step import Span, Step
from tests.support.cached_codes import quantised

BLOCK = 16
SCALE = 0.2


class Heads(NamedTuple):
    """A layer's shape."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int


class Paged(NamedTuple):
    """A step over shuffled blocks. Its token-major pages, or the scales of pages of codes, hold NaN in all rows without a token."""

    step: Step
    keys_NGBD: Tensor
    values_NGBV: Tensor
    scales: tuple[Tensor, Tensor] | None = None  # [N, G, B] of keys and values

    def of(self, sequences: int | slice) -> tuple[Tensor, Tensor]:
        """Return contexts and block tables of the first sequences, or of a slice, on the pages' device."""
        rows = slice(0, sequences) if isinstance(sequences, int) else sequences
        device = self.keys_NGBD.device
        return self.step.context_S[rows].to(device), self.step.block_table_SM[rows].to(device)

    def to(self, device: str) -> Self:
        """Return a copy with its pages on a device."""
        moved = self._replace(keys_NGBD=self.keys_NGBD.to(device), values_NGBV=self.values_NGBV.to(device))
        if self.scales is None:
            return moved
        return moved._replace(scales=(self.scales[0].to(device), self.scales[1].to(device)))

    def decoded(self) -> tuple[Tensor, Tensor]:
        """Return keys and values in float32 on the CPU."""
        pages = self.keys_NGBD.float().cpu(), self.values_NGBV.float().cpu()
        if self.scales is None:
            return pages
        keys, values = (page * scale.cpu()[..., None] for page, scale in zip(pages, self.scales, strict=True))
        return keys, values


def some_fast(cases: Mapping[str, Any], *fast: str) -> list[Any]:
    """Return cases for `pytest.mark.parametrize`. All but those in `fast` are marked slow: the interpreter is slow."""
    assert set(fast) <= set(cases), "unknown case"
    return [
        pytest.param(case, id=name, marks=() if name in fast else pytest.mark.slow)
        for name, case in cases.items()
    ]


def dtypes_on(device: str, dtype: torch.dtype) -> list[torch.dtype]:
    """Return a case's type, and on a GPU bfloat16 too, which the interpreter multiplies and rounds incorrectly."""
    return [dtype] if device == "cpu" else [dtype, torch.bfloat16]


def make_paged(
    spans: list[tuple[int, int]],
    heads: Heads,
    dtype: torch.dtype = torch.float32,
    codes: torch.dtype | None = None,
) -> Paged:
    """Place sequences, given as (tokens cached, tokens of this step), on shuffled blocks of the CPU."""
    torch.manual_seed(sum(map(sum, spans)))
    counts = [-(-sum(span) // BLOCK) for span in spans]
    order = torch.randperm(sum(counts) + 2).tolist()
    tokens = sum(length for _, length in spans)
    step = Step(
        max_tokens=tokens, max_sequences=len(spans) + 3, max_blocks=max(counts) + 2, block_tokens=BLOCK
    )
    begins = [sum(counts[:i]) for i in range(len(spans))]
    step.fill(
        [
            Span(start, length, order[begin : begin + count])
            for (start, length), begin, count in zip(spans, begins, counts, strict=True)
        ]
    )
    is_held = torch.zeros(len(order), BLOCK, dtype=torch.bool)
    for row, (start, length) in enumerate(spans):
        for token in range(start + length):
            is_held[step.block_table_SM[row, token // BLOCK], token % BLOCK] = True

    def pages(dim: int) -> Tensor:
        values = torch.randn(len(order), heads.kv_heads, BLOCK, dim)
        return values.masked_fill(~is_held[:, None, :, None], float("nan")).to(dtype)

    keys, values = pages(heads.key_dim), pages(heads.value_dim)
    if codes is None:
        return Paged(step, keys, values)
    (key_codes, key_scales), (value_codes, value_scales) = (
        quantised(page.nan_to_num(0.0), codes) for page in (keys, values)
    )
    scales = [
        scale[..., 0].masked_fill(~is_held[:, None], float("nan")) for scale in (key_scales, value_scales)
    ]
    return Paged(step, key_codes, value_codes, (scales[0], scales[1]))


def oracle(query_THD: Tensor, paged: Paged, **options: Any) -> Tensor:
    """Attend in float32 on the CPU, one sequence at a time."""
    keys_NGBD, values_NGBV = paged.decoded()
    options = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in options.items()}
    return reference.paged_attention(
        query_THD.float().cpu().transpose(0, 1), keys_NGBD.transpose(2, 3), values_NGBV, paged.step,
        scale=SCALE, **options,
    )  # fmt: skip


def check_close(ours: Tensor, want: Tensor) -> None:
    """Check equality up to the order of float32 sums, a GPU's exp2, and rounding of weights and results in short types."""
    tolerance = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[ours.dtype]
    torch.testing.assert_close(ours.float().cpu(), want.float().cpu(), atol=tolerance, rtol=tolerance)
