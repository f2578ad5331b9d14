"""The Triton kernels compile for sm_90 without spilling; what they compute, `test_triton_face` tries in the interpreter."""

import re
import sys
from pathlib import Path

import pytest
import torch

from dispatch.errors import WireUnavailable
from dispatch.gpu.symmetric import TEXT_BYTES, CombineContents, DispatchContents, SymmetricLayout
from dispatch.gpu.torch_symmetric import TorchSymmetricMemory, check_addresses
from dispatch.low_latency.choose import load_triton
from dispatch.low_latency.shape import LowLatencyShape, size_hint

triton = pytest.importorskip("triton", reason="needs triton: pip install -r requirements-dev.txt")
from dispatch.gpu import nvshmem  # noqa: E402
from dispatch.gpu.answers import send_answers, sum_answers  # noqa: E402
from dispatch.gpu.flags import begin_call, post_flags, post_refusal, wait_flags  # noqa: E402
from dispatch.gpu.kernels import deliver_rows, place_rows, send_rows  # noqa: E402
from tests.support.triton_compile import Kernel, assemble, check_budget, compile_kernel  # noqa: E402

BF16 = torch.bfloat16


def test_the_parts_of_symmetric_memory_do_not_overlap() -> None:
    shape = LowLatencyShape(
        world_size=3, experts_per_rank=2, max_tokens=5, hidden=200, choices=3, dtype=BF16, is_fp8=True
    )
    for has_remote in (False, True):
        sent = DispatchContents(shape=shape, has_remote=has_remote)
        answered = CombineContents(shape=shape, dtype=torch.float32, has_remote=has_remote)
        num_bytes = max(sent.num_bytes, answered.num_bytes)
        layout = SymmetricLayout(world_size=3, total_bytes=SymmetricLayout.bytes_for(3, num_bytes))
        assert layout.content_bytes >= num_bytes
        halves = [(at, at + layout.texts_at, at + layout.contents_at) for at in (0, layout.half_bytes)]
        starts = [*halves[0], *halves[1], layout.total_bytes]
        needed = [8 * 3, TEXT_BYTES * 3, num_bytes] * 2
        for start, size, following in zip(starts[:-1], needed, starts[1:], strict=True):
            assert start % 128 == 0
            assert start + size <= following
        rows = 3 * 5 * sent.row_bytes
        assert sent.rows_at >= 4 * 3 * 5 * 3 and sent.rows_at + rows <= sent.staging_at <= sent.num_bytes
        assert 5 * 3 * answered.answer_bytes <= answered.staging_at <= answered.num_bytes
        assert (sent.num_bytes > sent.staging_at, answered.num_bytes > answered.staging_at) == (
            has_remote,
        ) * 2


def test_the_size_hint_has_room_for_deepeps_largest_calls() -> None:
    """What callers of DeepEP give as num_rdma_bytes, so that memory need not grow."""
    hint = size_hint(128, 7168, 8, 256)
    room = SymmetricLayout(world_size=8, total_bytes=hint).content_bytes
    shape = LowLatencyShape(
        world_size=8, experts_per_rank=32, max_tokens=128, hidden=7168, choices=11, dtype=BF16
    )
    assert DispatchContents(shape=shape).num_bytes <= room
    assert CombineContents(shape=shape, dtype=torch.float32).num_bytes <= room


@pytest.mark.skipif(torch.cuda.is_available(), reason="only where there is no CUDA device")
def test_symmetric_memory_says_what_it_needs() -> None:
    with pytest.raises(
        WireUnavailable, match="needs a CUDA device and this machine has none; use shm or gloo"
    ):
        TorchSymmetricMemory(None, 128, torch.device("cuda"))  # type: ignore[arg-type]


def test_kernels_are_interpreted_on_the_cpu_only_where_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(WireUnavailable, match="set TRITON_INTERPRET=1 before Python starts"):
        load_triton(torch.device("cpu"))
    assert load_triton(torch.device("cuda", 0)).TritonExchange.dtypes == (BF16, torch.float16, torch.float32)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(WireUnavailable, match=r"on cuda:0 needs Triton.*pip install 'wideep\[gpu\]'"):
        load_triton(torch.device("cuda", 0))


def test_peers_that_cannot_be_addressed_are_named() -> None:
    check_addresses([1 << 40, 1 << 41])
    with pytest.raises(WireUnavailable, match=r"memory of ranks \[1, 2\] cannot be addressed"):
        check_addresses([1 << 40, 0, 0])


V3 = {"R": 8, "L": 32, "M": 128, "K": 8, "K_PAD": 8, "H": 7168}
HALF = {"calls": "*i64", "half_bytes": "i64"}
SEND = {
    "x": "*i16", "topk": "*i64", "sent": "*i64", "peers": "*i64", "mask": "*i32", "num_tokens": "i32", "rank": "i32",
    **HALF, "entries_at": "i64", "rows_at": "i64", "staging_at": "i64",
}  # fmt: skip
ROW = {"SCALES_AT": 7168, "GROUPS": 8, "IS_BFLOAT16": True, "ROUND_SCALE": False, "HAS_REMOTE": False}
FLAGS = {"peers": "*i64", "mask": "*i32", "rank": "i32", **HALF, "kind": "i32"}
WAIT = {**FLAGS, "arrived": "*i32", "trouble": "*i64", "waits": "*i64", "max_polls": "i32"}
DELIVER = {"rows": "i64", **HALF, "counts": "*i32", "row_places": "*i32"}
SUM = {
    "answers": "i64",
    **HALF,
    "arrived": "*i32",
    "topk": "*i64",
    "sent": "*i64",
    "weights": "*fp32",
    "out": "*i16",
}
KERNELS = {
    "send_bf16": Kernel(send_rows, SEND, {**V3, **ROW, "ROW_BYTES": 14336, "IS_FP8": False}),
    "send_fp8": Kernel(send_rows, SEND, {**V3, **ROW, "ROW_BYTES": 7392, "IS_FP8": True}),
    "send_fp8_rounded": Kernel(send_rows, SEND, {**V3, **ROW, "ROW_BYTES": 7392, "IS_FP8": True, "ROUND_SCALE": True}),
    "send_fp16": Kernel(
        send_rows, {**SEND, "x": "*fp16"}, {**V3, **ROW, "ROW_BYTES": 7392, "IS_FP8": True, "IS_BFLOAT16": False}
    ),
    "begin": Kernel(begin_call, HALF, {}, 1),
    "post": Kernel(post_flags, FLAGS, {"HAS_REMOTE": False}, 1),
    "refuse": Kernel(
        post_refusal, {**FLAGS, "text": "*u8", "texts_at": "i64"}, {"TEXT_BYTES": 1024, "HAS_REMOTE": False}, 1
    ),
    "wait": Kernel(wait_flags, WAIT, {"IS_LAST": True, "IS_MASKING": True, "ANY_CALL": False, "HAS_CLOCK": True}, 1),
    "wait_without_clock": Kernel(
        wait_flags,
        {**WAIT, "waits": "constexpr"},
        {"waits": None, "IS_LAST": True, "IS_MASKING": False, "ANY_CALL": True, "HAS_CLOCK": False},
        1,
    ),
    "place": Kernel(
        place_rows,
        {
            "entries": "i64", **HALF, "arrived": "*i32", "counts": "*i32", "layout_range": "*i64", "source_tokens": "*i32",
            "row_places": "*i32", "row_choices": "*i32", "stats": "*i32",
        },
        {"R": 8, "L": 32, "M": 128, "K": 8, "K_PAD": 8, "TILE": 32, "HAS_STATS": True},
        4,
    ),
    "deliver_bf16": Kernel(
        deliver_rows,
        {**DELIVER, "x_out": "*i16"},
        {
            "scales_out": None, "N": 1024, "H": 7168, "ROW_BYTES": 14336, "SCALES_AT": 0, "SCALES": 0, "SCALES_PAD": 1,
            "TILE": 1024, "IS_FP8": False, "IS_UE8M0": False,
        },
    ),
    "deliver_ue8m0": Kernel(
        deliver_rows,
        {**DELIVER, "x_out": "*u8", "scales_out": "*u8"},
        {
            "N": 1024, "H": 7168, "ROW_BYTES": 7392, "SCALES_AT": 7168, "SCALES": 56, "SCALES_PAD": 64, "TILE": 1024,
            "IS_FP8": True, "IS_UE8M0": True,
        },
    ),
    "answer": Kernel(
        send_answers,
        {
            "y": "*i16", "counts": "*i32", "row_places": "*i32", "row_choices": "*i32", "peers": "*i64", "mask": "*i32",
            "rank": "i32", **HALF, "answers_at": "i64", "staging_at": "i64",
        },
        {
            "starts": None, "M": 128, "N": 1024, "K": 8, "H": 7168, "ANSWER_BYTES": 14336, "TILE": 1024,
            "IS_PACKED": False, "HAS_REMOTE": False,
        },
    ),
    "answer_packed": Kernel(
        send_answers,
        {
            "y": "*i16", "starts": "*i64", "counts": "*i32", "row_places": "*i32", "row_choices": "*i32", "peers": "*i64",
            "mask": "*i32", "rank": "i32", **HALF, "answers_at": "i64", "staging_at": "i64",
        },
        {
            "M": 128, "N": 1024, "K": 8, "H": 7168, "ANSWER_BYTES": 14336, "TILE": 1024, "IS_PACKED": True,
            "HAS_REMOTE": False,
        },
    ),
    "sum": Kernel(
        sum_answers,
        SUM,
        {"R": 8, "L": 32, "K": 8, "K_PAD": 8, "H": 7168, "ANSWER_BYTES": 14336, "TILE": 1024, "IS_BFLOAT16": True},
    ),
    "sum_fp16": Kernel(
        sum_answers,
        {**SUM, "out": "*fp16"},
        {"R": 8, "L": 32, "K": 8, "K_PAD": 8, "H": 7168, "ANSWER_BYTES": 14336, "TILE": 1024, "IS_BFLOAT16": False},
    ),
}  # fmt: skip


KERNELS = {name: kernel._replace(aligned=True) for name, kernel in KERNELS.items()}  # as they are launched


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_for_sm90_without_spilling(name: str, tmp_path: Path) -> None:
    check_budget(KERNELS[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 89, 100])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_for_other_gpus_without_spilling(name: str, arch: int, tmp_path: Path) -> None:
    check_budget(KERNELS[name], tmp_path, arch)


def test_products_are_not_fused_into_sums() -> None:
    """One rounding more or less would give other bits than the CPU."""
    ptx = compile_kernel(KERNELS["sum"]).ptx
    assert "mul.rn.f32" in ptx or "mul.f32" in ptx
    assert "fma.rn" not in ptx


def test_flags_are_released_and_acquired_for_the_whole_system() -> None:
    assert "sys.release" in compile_kernel(KERNELS["post"]).ptx
    assert "sys.release" in compile_kernel(KERNELS["refuse"]).ptx
    assert "sys.acquire" in compile_kernel(KERNELS["wait"]).ptx


@pytest.mark.parametrize(
    ("name", "functions"),
    [
        ("send_fp8", {"nvshmemx_putmem_nbi_block"}),
        ("send_bf16", {"nvshmemx_putmem_nbi_block"}),
        ("post", {"nvshmem_quiet", "nvshmem_long_p"}),
        ("refuse", {"nvshmemx_putmem_nbi_block", "nvshmem_quiet", "nvshmem_long_p"}),
        ("answer", {"nvshmemx_putmem_nbi_block"}),
    ],
)
def test_peers_without_an_address_are_reached_by_nvshmem(
    name: str, functions: set[str], tmp_path: Path
) -> None:
    """Assembled, not linked: the library comes with NVSHMEM."""
    kernel = KERNELS[name]
    ptx = compile_kernel(kernel._replace(sizes={**kernel.sizes, "HAS_REMOTE": True})).ptx
    assert set(re.findall(r"\bnvshmem\w+(?=\s*\n?\()", ptx)) == functions
    registers, spilled = assemble(ptx, tmp_path, "--compile-only")
    assert spilled == 0
    assert registers <= 255
    assert "nvshmem" not in compile_kernel(kernel).ptx


def test_a_missing_device_library_is_named() -> None:
    try:
        assert Path(nvshmem.find_device_library()).name == "libnvshmem_device.bc"
    except FileNotFoundError as error:
        assert "pip install nvidia-nvshmem-cu13" in str(error)
