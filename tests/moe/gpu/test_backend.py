"""What a GPU lacks for a model is said when the model is built."""

import pytest
import torch

pytest.importorskip("triton", reason="needs triton: pip install -r requirements-dev.txt")
from moe.gpu.backend import why_no_fp8
from moe.quantisation import Quantisation

BLOCKS = Quantisation(method="fp8", block_rows=128, block=128)


@pytest.mark.parametrize(
    ("capability", "text"),
    [
        ((8, 0), "FP8 weights, which take a GPU of compute capability 8.9; this one has 8.0"),
        ((8, 9), ""),
        ((9, 0), ""),
    ],
)
def test_fp8_weights_are_refused_on_gpus_that_have_no_such_type(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], text: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    assert why_no_fp8(BLOCKS, torch.device("cuda")) == text


def test_fp8_weights_in_other_blocks_are_refused() -> None:
    other = Quantisation(method="fp8", block_rows=1, block=128)
    assert why_no_fp8(other, torch.device("cpu")).startswith(
        "FP8 weights in blocks of (1, 128); the GPU kernels take"
    )
    assert not why_no_fp8(BLOCKS, torch.device("cpu"))
