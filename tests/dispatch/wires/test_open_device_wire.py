"""Which wire a public buffer opens for the device of its tensors, and normal mode over collectives of device tensors.

Without a GPU, the collective wire runs on CPU tensors. A guard looks for tensors that are created without a device,
which on a GPU would be on the wrong one.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore
from torch.overrides import TorchFunctionMode

from dispatch import Buffer
from dispatch.errors import WireUnavailable
from dispatch.faces import buffer, wires
from dispatch.gpu.nccl import NcclRows
from tests.dispatch.faces import test_buffer as buffers
from tests.dispatch.faces.buffer_cases import portable
from tests.fixtures import PoolOf

_FACTORIES = ("arange", "empty", "full", "ones", "tensor", "zeros")
HOST_TABLES = {  # functions that create tensors for the host: counts of ranks and heads of messages
    "dispatch/rows.py: send",  # the matrix of counts
    "dispatch/gpu/nccl.py: start_headers",
    "dispatch/faces/normal.py: _count_experts",
    "dispatch/faces/handles.py: pack",  # counts of nodes
}


@pytest.mark.parametrize(
    ("backend", "has_cuda", "wanted"),
    [
        ("auto", False, "cpu"), ("nccl", False, "cpu"), ("nvshmem", False, "cpu"), ("auto", True, "cuda"),
        ("nccl", True, "cuda"), ("nvshmem", True, "cuda"), ("gloo", True, "cpu"), ("shm", True, "cpu"),
        ("local", True, "cpu"),
    ],
)  # fmt: skip
def test_gpus_are_used_where_they_are_and_nothing_else_is_asked_for(
    backend: str, has_cuda: bool, wanted: str
) -> None:
    assert wires.device_of(backend, has_cuda=has_cuda).type == wanted


def open_for_gpus() -> list[str]:
    texts = []
    for backend in ("nccl", "nvshmem"):
        with pytest.raises(WireUnavailable) as caught:
            Buffer(dist.group.WORLD, backend=backend)
        texts.append(str(caught.value))
    return texts


@pytest.mark.skipif(torch.cuda.is_available(), reason="only without a CUDA device")
def test_without_a_gpu_its_backends_are_a_named_error(pool_of: PoolOf) -> None:
    for nccl, nvshmem in pool_of(2).run(open_for_gpus):
        assert nccl.startswith("nccl cannot be used: this machine has no CUDA device")
        assert nvshmem.startswith("nvshmem cannot be used: this machine has no CUDA device")


@pytest.fixture
def group_of_one() -> Iterator[Any]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_other_kernels_than_ours_are_refused(group_of_one: Any) -> None:
    refusing = Buffer(group_of_one, kernels="cutlass")
    with pytest.raises(ValueError, match="kernels is 'cutlass'; it must be one of auto, triton"):
        refusing.clean_low_latency_buffer(1, 1, 1)


def make_groups() -> tuple[bool, bool, int, float]:
    """A group with the backend is kept. Otherwise exactly its ranks create one that has it."""
    kept = wires.group_with_backend(dist.group.WORLD, "cpu", "gloo", timeout_s=20.0) is dist.group.WORLD
    pair = dist.new_group([0, 2], backend="gloo")
    if dist.get_rank() == 1:
        return kept, True, 0, 0.0
    made = wires.group_with_backend(pair, "xpu", "gloo", timeout_s=20.0)
    total = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(total, group=made)
    return kept, made is not pair, dist.get_world_size(made), float(total)


def test_ranks_of_a_group_make_one_with_the_backend_that_it_lacks(pool_of: PoolOf) -> None:
    assert pool_of(3).run(make_groups) == [(True, True, 2, 4.0), (True, True, 0, 0.0), (True, True, 2, 4.0)]


class MadeAnywhere(TorchFunctionMode):
    """Records our functions that create a tensor without a device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in _FACTORIES and "device" not in (kwargs or {}):
            frame = sys._getframe(1)
            path = frame.f_code.co_filename
            if "/dispatch/" in path and "/tests/" not in path:
                self.found.add(f"dispatch/{path.rpartition('/dispatch/')[2]}: {frame.f_code.co_name}")
        return func(*args, **(kwargs or {}))


@contextmanager
def collectives_instead_of_nccl() -> Iterator[None]:
    """Let buffers move rows as between GPUs, over gloo."""

    def open_collective(backend: str, group: Any, *, timeout_s: float, mask_lost: bool) -> wires.Wires:
        cpu = torch.device("cpu")
        mover = NcclRows(group, device=cpu, timeout_s=timeout_s)
        return wires.Wires("nccl", mover, None, cpu, group, "CUDA", timeout_s, mask_lost)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffer, "open_wires", open_collective)
        yield


def run_over_collectives(node_size: int) -> tuple[Any, Any, set[str]]:
    """Run normal mode over collectives and over gloo in all forms. Return also the functions that create tensors anywhere."""
    guard = MadeAnywhere()
    with collectives_instead_of_nccl(), guard:
        ours = buffers.run_layers("auto", node_size)
    return ours, buffers.run_layers("gloo", node_size), guard.found


@pytest.mark.parametrize("node_size", [8, 1])
def test_normal_mode_over_collectives_equals_gloo_and_leaves_nothing_on_the_cpu(
    pool_of: PoolOf, node_size: int
) -> None:
    for ours, theirs, found in pool_of(2).run(run_over_collectives, node_size):
        assert flat(ours) == flat(theirs)
        assert "dispatch/gpu/nccl.py: start_headers" in found
        assert found <= HOST_TABLES, found - HOST_TABLES


def flat(results: Any) -> Any:
    """Turn tensors into comparable values."""
    if isinstance(results, torch.Tensor):
        whole = portable(results.contiguous())
        return str(whole.dtype), list(whole.shape), whole.view(-1).view(torch.uint8).tolist()
    if isinstance(results, dict):
        return {name: flat(value) for name, value in results.items()}
    return [flat(value) for value in results] if isinstance(results, (list, tuple)) else results


def test_the_guard_notices_a_tensor_made_anywhere() -> None:
    guard = MadeAnywhere()
    with guard:
        wires.device_of("auto", has_cuda=False)
        assert guard.found == set()
        buffer.scratch_like(torch.int8, None, 0, name="num_nvl_bytes", num_bytes=4)
    assert guard.found == {"dispatch/faces/buffer.py: scratch_like"}
