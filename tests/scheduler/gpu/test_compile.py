"""Sampling's kernels compiled for GPUs without one, as a vocabulary of 151,936 tokens launches them."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs triton: pip install -r requirements-dev.txt")
from scheduler.sampling.gpu import logprobs, sampling_kernels
from scheduler.sampling.gpu.draws import Draws
from scheduler.sampling.gpu.sampling import SamplingScratch, choose_tokens
from tests.support.recorded_launch import recording
from tests.support.triton_compile import Kernel, check_budget

ROWS, VOCABULARY = 256, 151936
KERNELS = ("edit_logits", "find_tops", "weigh_parts", "gather_candidates", "choose_tokens")
MEASURE = "measure_rows"
META = torch.device("meta")


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def launch() -> None:
    """A step of rows that are masked, edited and drawn, one of them with logprobs."""
    floats, integers = {"dtype": torch.float32}, {"dtype": torch.int32}
    draws = Draws(
        inverse_temperature_R=empty(ROWS, **floats), least_weight_R=empty(ROWS, **floats),
        top_k_R=empty(ROWS, **integers), top_p_R=empty(ROWS, dtype=torch.float64),
        uniform_R=empty(ROWS, dtype=torch.float64), penalty_R=empty(ROWS, **floats), mask_row_R=empty(ROWS, **integers),
        masks_MW=empty(3, VOCABULARY // 32, **integers), edit_row_E=empty(99, **integers),
        edit_id_E=empty(99, **integers), bias_E=empty(99, **floats), is_seen_E=empty(99, dtype=torch.int8),
        subtracted_E=empty(99, **floats), draws=True, masked_rows=(0, 1, 2),
    )  # fmt: skip
    logits_RV = empty(ROWS, VOCABULARY, **floats)
    ids_R = choose_tokens(logits_RV, draws, SamplingScratch(ROWS, VOCABULARY, META))
    logprobs.measure(logits_RV, [logprobs.Asked(7, 7, 20)], ids_R)


def compiled(name: str) -> Kernel:
    """A kernel as it is launched."""
    of_sampling = [(sampling_kernels, kernel) for kernel in KERNELS]
    with recording(*of_sampling, (logprobs, MEASURE)) as launched:
        launch()
    return {each.function.__name__: each for each in launched}[name].kernel(128)


@pytest.mark.parametrize(
    "arch", [90, *(pytest.param(arch, marks=pytest.mark.slow) for arch in (80, 89, 100))]
)
@pytest.mark.parametrize("name", [*KERNELS, MEASURE])
def test_the_kernels_compile_within_their_budget(name: str, arch: int, tmp_path: Path) -> None:
    check_budget(compiled(name), tmp_path, arch)
