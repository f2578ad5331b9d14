"""Selection of the path for tokens between GPUs from the abilities of all ranks, and its log lines."""

import sys

import pytest
import torch

pytest.importorskip("triton", reason="needs triton: pip install -r requirements-dev.txt")
from dispatch.errors import WireUnavailable
from dispatch.faces.wires import load_triton
from dispatch.gpu.open import RankDevice, decide
from dispatch.gpu.symmetric import TorchSymmetricMemory, check_addresses

ONE = RankDevice(("host",), "gpu-0", has_nccl=True, has_nvshmem=False)
TWO = ONE._replace(gpu="gpu-1")
FAR = ONE._replace(host=("other",))
INTERPRETED = ONE._replace(gpu="interpreter", has_nccl=False)


def with_nvshmem(*facts: RankDevice) -> list[RankDevice]:
    return [own._replace(has_nvshmem=True) for own in facts]


@pytest.mark.parametrize(
    ("backend", "facts", "wire", "memory", "says"),
    [
        ("auto", [ONE, TWO], "nccl", "CUDA", "all GPUs are on one host"),
        ("nccl", [ONE, TWO], "nccl", "CUDA", "it was requested, and all GPUs are on one host"),
        ("auto", [ONE, ONE], "auto", "", "ranks [0, 1] share a GPU, which NCCL refuses"),
        ("auto", [ONE, TWO._replace(has_nccl=False)], "auto", "", "ranks [1] have no NCCL"),
        ("auto", with_nvshmem(ONE, FAR), "nccl", "NVSHMEM", "there are several hosts"),
        ("auto", [ONE, *with_nvshmem(FAR)], "nccl", "", "and ranks [0] have no NVSHMEM"),
        ("nccl", with_nvshmem(ONE, FAR), "nccl", "", "there are several hosts: NCCL serves every step"),
        ("nvshmem", with_nvshmem(ONE, TWO), "nccl", "NVSHMEM", "it was requested"),
        ("gloo", [ONE, TWO], "gloo", "", "rows go through the hosts' memory"),
        ("shm", [ONE, ONE], "shm", "", "rows go through the hosts' memory"),
        ("auto", [INTERPRETED] * 2, "auto", "shared", "kernels are interpreted"),
    ],
)
def test_what_is_taken_follows_from_what_all_ranks_have(
    backend: str, facts: list[RankDevice], wire: str, memory: str, says: str
) -> None:
    choice = decide(backend, facts)
    assert (choice.wire, choice.memory) == (wire, memory)
    assert says in choice.reason


@pytest.mark.parametrize(
    ("backend", "facts", "text"),
    [
        (
            "nccl",
            [ONE, ONE],
            "nccl cannot be used: ranks [0, 1] share a GPU, which NCCL refuses; use auto, gloo or shm",
        ),
        ("nvshmem", [*with_nvshmem(ONE), TWO], "nvshmem cannot be used: ranks [1] do not have it; use auto"),
    ],
)
def test_what_cannot_work_is_refused(backend: str, facts: list[RankDevice], text: str) -> None:
    with pytest.raises(WireUnavailable) as raised:
        decide(backend, facts)
    assert str(raised.value) == text


@pytest.mark.skipif(torch.cuda.is_available(), reason="only without a CUDA device")
def test_symmetric_memory_says_what_it_needs() -> None:
    with pytest.raises(
        WireUnavailable, match="needs a CUDA device and this machine has none; use shm or gloo"
    ):
        TorchSymmetricMemory(None, 128, torch.device("cuda"))  # type: ignore[arg-type]


def test_peers_that_cannot_be_addressed_are_named() -> None:
    check_addresses([1 << 40, 1 << 41])
    with pytest.raises(WireUnavailable, match=r"memory of ranks \[1, 2\] cannot be addressed"):
        check_addresses([1 << 40, 0, 0])


def test_kernels_are_interpreted_on_the_cpu_only_where_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(WireUnavailable, match="set TRITON_INTERPRET=1 before Python starts"):
        load_triton(torch.device("cpu"))
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    assert load_triton(torch.device("cuda", 0)).LowLatencyBlocks.dtypes == dtypes
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(WireUnavailable, match=r"on cuda:0 needs Triton.*pip install 'wideep\[gpu\]'"):
        load_triton(torch.device("cuda", 0))
