"""Logits of rows requested after the forward."""

from pathlib import Path

import pytest
import torch

from kvcache.paged_cache import PagedCache
from kvcache.step import Span
from moe.model import Model
from tests.support.engines.serving import build
from tests.support.models.families import VOCABULARY, write_checkpoint

TOKENS = 70


def forward(model: Model, rows_R: torch.Tensor, *, keeps_hidden: bool) -> torch.Tensor:
    """Run one sequence's tokens."""
    model.step.fill([Span(0, TOKENS, range(-(-TOKENS // model.step.block_tokens)))])
    tokens = torch.zeros(model.step.num_padded, dtype=torch.int64)
    tokens[:TOKENS] = torch.randint(3, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(1))
    cache = PagedCache(model.skeleton.cache_shapes, 16)
    return model.forward(tokens, cache, rows_R, keeps_hidden=keeps_hidden)


@pytest.mark.parametrize("family", ["granitemoe", "gpt_oss"])
def test_rows_asked_for_later_have_the_bits_of_the_forward(family: str, tmp_path: Path) -> None:
    """Granite scales its logits after the projection, in its own code."""
    write_checkpoint(family, tmp_path)
    model = build(tmp_path, max_model_len=128).model
    everything = forward(model, torch.arange(TOKENS), keeps_hidden=False)
    with pytest.raises(AssertionError, match="did not keep its hidden states"):
        model.logits_of(torch.arange(3))
    last = forward(model, torch.tensor([TOKENS - 1]), keeps_hidden=True)
    assert torch.equal(last, everything[-1:])
    for rows in (torch.arange(64), torch.arange(64, TOKENS), torch.tensor([5])):
        assert torch.equal(model.logits_of(rows), everything[rows])
    assert torch.equal(forward(model, torch.arange(TOKENS), keeps_hidden=False), everything), "logits differ"
