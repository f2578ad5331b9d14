"""Errors about features that a GPU lacks come when the model is built. Kernels are compiled before the first step."""

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs triton: pip install -r requirements-dev.txt")
from moe.gpu.backend import GpuDevice, backend_on, warm_up
from moe.gpu.limits import why_no_blocks
from moe.load.quantisation import Quantisation, WeightFormat


def test_scales_for_numbers_of_inputs_that_no_tile_is_made_of_are_refused() -> None:
    served = (
        WeightFormat(name="fp8", block_rows=128, block=128),
        WeightFormat(name="nvfp4", block=16),
        WeightFormat(name="int8"),
    )
    assert why_no_blocks(Quantisation(method="fp8", formats=served)) is None
    other = WeightFormat(name="fp8", block_rows=16, block=48)
    problem = why_no_blocks(Quantisation(method="fp8", formats=(*served, other)))
    assert problem is not None
    assert problem.startswith(
        "weights with unsupported scales: scales are for 48 inputs; the GPU kernels support 16, 32, 64"
    )


@pytest.mark.parametrize(
    ("device", "steps"), [("cpu", [(1, 0), (1, 1)]), ("cuda", [(1, 0), (1, 1), (32, 0)])]
)
def test_a_gpu_runs_the_largest_prompts_before_it_serves_and_waits_for_every_step(
    monkeypatch: pytest.MonkeyPatch, device: str, steps: list[tuple[int, int]]
) -> None:
    """Many rows use another tile of the experts' kernel. Without this it would be compiled during the first such step."""
    on = GpuDevice(device=torch.device("cpu"), dtype=torch.float32)
    step = backend_on(on).make_step(max_tokens=32, max_sequences=2, max_blocks=2, block_tokens=16, threads=1)
    ran: list[tuple[int, int] | str] = []
    head = SimpleNamespace(weight=torch.empty(50, 8))
    model: Any = SimpleNamespace(
        step=step, layers=[], num_mtp_layers=0, load_counts=SimpleNamespace(clear=lambda: ran.append("clear")),
        net=SimpleNamespace(get_output_embeddings=lambda: head),
        forward=lambda *_: ran.append((step.num_tokens, step.num_decodes)),
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: ran.append("wait"))
    on = replace(on, device=torch.device(device))
    warm_up(on, model, SimpleNamespace(num_blocks=7))  # type: ignore[arg-type]
    assert [each for each in ran if isinstance(each, tuple)] == steps
    assert ran.count("wait") == (len(steps) if device == "cuda" else 0)
    assert ran[-1] == "clear"


@pytest.mark.gpu
def test_a_thread_that_moves_experts_works_beside_the_steps_and_after_those_launched_so_far() -> None:
    on, seen = GpuDevice(device=torch.device("cuda", 0), dtype=torch.bfloat16), []
    place = torch.zeros(1 << 20, device="cuda")

    def move() -> None:
        backend_on(on).enter_thread()
        stream = torch.cuda.current_stream()
        place.fill_(2.0)
        stream.synchronize()
        backend_on(on).enter_thread()
        seen.append((stream, torch.cuda.current_stream(), place.unique().tolist()))

    torch.cuda._sleep(50_000_000)  # a step that is still running, and then reads and writes the place
    place.fill_(1.0)
    mover = threading.Thread(target=move)
    mover.start()
    mover.join()
    ((first, second, values),) = seen
    assert first == second != torch.cuda.default_stream() and values == [2.0]
