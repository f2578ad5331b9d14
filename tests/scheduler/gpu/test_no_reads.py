"""A decode step on the GPU path reads nothing back from the device. Otherwise no graph could be captured."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvcache.step import Span
from tests.support.gpu.interpreted import needs_triton
from tests.support.gpu.path import build_interpreted
from tests.support.models.families import write_checkpoint
from tests.support.models.no_reads import HostReadError, NoReads
from tests.support.ranks import RankPool


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(), lambda x: x.tolist(), lambda x: int(x[0]), lambda x: bool(x[0] > 0), torch.nonzero,
        lambda x: x[x > 0], lambda x: x.cpu(), lambda x: x.numpy(), torch.unique, lambda x: list(range(5))[x[0]],
    ],
)  # fmt: skip
def test_the_guard_catches_reads(read: Callable[[Tensor], object]) -> None:
    x = torch.tensor([1, 2, 0])
    read(x)
    with NoReads(), pytest.raises(HostReadError):
        read(x)


def test_the_guard_lets_work_on_the_device_pass() -> None:
    x = torch.tensor([1, 2, 0])
    with NoReads():
        y = torch.where(x > 0, x, -1)[x].cumsum(0)
        y[1:] += 1
    assert y.tolist() == [2, 2, 3]


def decode_without_reads(directory: Path) -> list[float]:
    """Run a prompt, then two decodes, the second one guarded. Return the logits of both."""
    built = build_interpreted(directory)
    model, step, cache = built.model, built.runner.step, built.runner._cache
    step.fill([Span(0, 4, [3])])
    inputs = step.inputs([5, 6, 7, 8], [3])
    model.forward(inputs.token_T, cache, inputs.row_R)
    step.fill([Span(4, 1, [3])], 1)
    inputs = step.inputs([9], [0])
    first = model.forward(inputs.token_T, cache, inputs.row_R)
    with NoReads():
        second = model.forward(inputs.token_T, cache, inputs.row_R)
    return [float((first - second).abs().max()), float(second.abs().max())]


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize(
    "family", ["gpt_oss", "deepseek_v3", "qwen3_next", "nemotron_h", "minimax", "deepseek_v32"]
)
def test_a_decode_step_reads_nothing_back(family: str, interpreter: RankPool, tmp_path: Path) -> None:
    write_checkpoint(family, tmp_path)
    difference, largest = interpreter.run(decode_without_reads, tmp_path, timeout_s=400.0)[0]
    assert difference == 0.0 and largest > 0.0
