"""The Triton kernels: interpreted across processes they equal the oracle bit for bit, and for sm_90 they compile without
spilling. The interpreter is slow, so sizes are small."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from dispatch.errors import TransportUnavailable
from dispatch.low_latency.shape import LowLatencyShape
from dispatch.low_latency.symmetric import SymmetricLayout
from dispatch.low_latency.torch_symmetric import TorchSymmetricMemory
from tests.dispatch.low_latency.cases import Layer, assert_same, make_cases, simulate
from tests.dispatch.low_latency.interpreted import dispatch_without, run_interpreted
from tests.support.ranks import RankPool

triton = pytest.importorskip("triton", reason="needs triton: pip install -r requirements-dev.txt")
from triton._C.libtriton import ir  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia.compiler import get_ptxas  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.compiler.compiler import make_backend  # noqa: E402

from dispatch.low_latency import triton_kernels as kernels  # noqa: E402
from dispatch.low_latency import triton_nvshmem as nvshmem  # noqa: E402

BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def fresh_pool() -> Iterator[RankPool]:
    """Two ranks of their own: the interpreter must be chosen before anything in a process imports triton."""
    with RankPool(2, timeout_s=120.0) as pool:
        yield pool


def small_layers() -> list[Layer]:
    return [
        Layer(make_cases(1, [3, 5], hidden=200, dtype=BF16), 5, 2),
        Layer(make_cases(2, [4, 0], hidden=130, choices=5, no_choice=0.0), 6, 2),  # float32, repeated experts
        Layer(make_cases(3, [2, 3], hidden=300, dtype=BF16), 3, 2, is_fp8=True),
        Layer(make_cases(4, [2, 3], hidden=640), 3, 2, is_fp8=True, round_scale=True, is_ue8m0=True),
        Layer(
            make_cases(5, [3, 2], hidden=128, dtype=BF16, only_expert=3), 3, 2, is_fp8=True, round_scale=True
        ),
    ]


def test_interpreted_kernels_give_the_oracles_bits_across_processes(fresh_pool: RankPool) -> None:
    layers = small_layers()
    results = fresh_pool.run(run_interpreted, layers)
    for index, layer in enumerate(layers):
        for rank, want in enumerate(simulate(layer)):
            for turn, ours in enumerate(results[rank][index]):
                assert_same(ours, want, f"layer {index}, rank {rank}, turn {turn}")


def test_a_rank_that_does_not_come_is_masked_and_adds_nothing(fresh_pool: RankPool) -> None:
    layer = Layer(make_cases(6, [3, 2], hidden=16), 3, 2)
    late, mask, counts, out_TH = fresh_pool.run(dispatch_without, layer, 1)[0]
    present, absent = layer.cases
    cases = [
        present._replace(topk_TK=torch.where(present.topk_TK // 2 == 1, -1, present.topk_TK)),
        absent._replace(topk_TK=torch.full_like(absent.topk_TK, -1)),
    ]
    want = simulate(layer._replace(cases=cases))[0]
    assert late == [1]
    assert mask == [0, 1]
    assert counts == want.count_L.tolist()
    assert torch.equal(out_TH, want.combined_TH)


def test_the_parts_of_symmetric_memory_do_not_overlap() -> None:
    shape = LowLatencyShape(
        world_size=3, experts_per_rank=2, max_tokens=5, hidden=200, choices=3, dtype=BF16, is_fp8=True
    )
    for has_remote in (False, True):
        layout = SymmetricLayout(shape=shape, has_remote=has_remote)
        starts = [
            part(number)
            for number in (2, 3)
            for part in (
                layout.flags_at,
                layout.entries_at,
                layout.rows_at,
                layout.answers_at,
                layout.staging_at,
            )
        ]
        needed = [4 * 3, 4 * 3 * 5 * 3, 3 * 5 * layout.row_bytes, 5 * 3 * layout.answer_bytes, 0] * 2
        for start, size, following in zip(starts, needed, [*starts[1:], layout.total_bytes], strict=True):
            assert start % 128 == 0
            assert start + size <= following


@pytest.mark.skipif(torch.cuda.is_available(), reason="only where there is no CUDA device")
def test_symmetric_memory_says_what_it_needs() -> None:
    with pytest.raises(
        TransportUnavailable, match="needs a CUDA device and this machine has none; use shm or gloo"
    ):
        TorchSymmetricMemory(None, 128, torch.device("cuda"))  # type: ignore[arg-type]


class Kernel(NamedTuple):
    """A kernel as DeepSeek-V3's layers would launch it on 8 ranks, and what it may use."""

    name: str
    types: dict[str, str]
    sizes: dict[str, Any]
    warps: int = 8
    max_registers: int = 80


V3 = {"R": 8, "L": 32, "M": 128, "K": 8, "K_PAD": 8, "H": 7168}
SEND = {
    "x": "*i16", "topk": "*i64", "sent": "*i32", "peers": "*i64", "mask": "*i32", "num_tokens": "i32", "rank": "i32",
    "entries_at": "i64", "rows_at": "i64", "staging_at": "i64",
}  # fmt: skip
ROW = {"SCALES_AT": 7168, "GROUPS": 8, "IS_BFLOAT16": True, "ROUND_SCALE": False, "HAS_REMOTE": False}
DELIVER = {"rows": "i64", "counts": "*i32", "row_places": "*i32"}
KERNELS = {
    "send_bf16": Kernel("send_rows", SEND, {**V3, **ROW, "ROW_BYTES": 14336, "IS_FP8": False}),
    "send_fp8": Kernel("send_rows", SEND, {**V3, **ROW, "ROW_BYTES": 7392, "IS_FP8": True}),
    "send_fp8_rounded": Kernel("send_rows", SEND, {**V3, **ROW, "ROW_BYTES": 7392, "IS_FP8": True, "ROUND_SCALE": True}),
    "post": Kernel(
        "post_flags",
        {"peers": "*i64", "mask": "*i32", "rank": "i32", "flags_at": "i64", "number": "i32"},
        {"HAS_REMOTE": False},
        1,
    ),
    "wait": Kernel(
        "wait_flags",
        {
            "peers": "*i64", "mask": "*i32", "arrived": "*i32", "polls": "*i64", "rank": "i32", "flags_at": "i64",
            "number": "i32", "max_polls": "i32",
        },
        {"IS_MASKING": True},
        1,
    ),
    "place": Kernel(
        "place_rows",
        {
            "entries": "i64", "arrived": "*i32", "counts": "*i32", "layout_range": "*i64", "source_tokens": "*i32",
            "row_places": "*i32", "row_choices": "*i32", "stats": "*i32",
        },
        {"R": 8, "L": 32, "M": 128, "K": 8, "K_PAD": 8, "TILE": 32, "HAS_STATS": True},
        4,
    ),
    "deliver_bf16": Kernel(
        "deliver_rows",
        {**DELIVER, "x_out": "*i16"},
        {
            "scales_out": None, "N": 1024, "H": 7168, "ROW_BYTES": 14336, "SCALES_AT": 0, "SCALES": 0, "SCALES_PAD": 1,
            "TILE": 1024, "IS_FP8": False, "IS_UE8M0": False,
        },
    ),
    "deliver_ue8m0": Kernel(
        "deliver_rows",
        {**DELIVER, "x_out": "*u8", "scales_out": "*u8"},
        {
            "N": 1024, "H": 7168, "ROW_BYTES": 7392, "SCALES_AT": 7168, "SCALES": 56, "SCALES_PAD": 64, "TILE": 1024,
            "IS_FP8": True, "IS_UE8M0": True,
        },
    ),
    "answer": Kernel(
        "send_answers",
        {
            "y": "*i16", "counts": "*i32", "row_places": "*i32", "row_choices": "*i32", "peers": "*i64", "mask": "*i32",
            "rank": "i32", "answers_at": "i64", "staging_at": "i64",
        },
        {"M": 128, "N": 1024, "K": 8, "H": 7168, "ANSWER_BYTES": 14336, "TILE": 1024, "HAS_REMOTE": False},
    ),
    "sum": Kernel(
        "sum_answers",
        {"answers": "i64", "arrived": "*i32", "topk": "*i64", "sent": "*i32", "weights": "*fp32", "out": "*i16"},
        {"L": 32, "K": 8, "K_PAD": 8, "H": 7168, "ANSWER_BYTES": 14336, "TILE": 1024, "IS_BFLOAT16": True},
    ),
}  # fmt: skip


def compile_for_sm90(kernel: Kernel) -> str:
    """Compile without a GPU, up to the assembler's text."""
    function = getattr(kernels, kernel.name)
    names = [parameter.name for parameter in function.params]
    signature = {name: kernel.types.get(name, "constexpr") for name in names}
    constants = {name: value for name, value in kernel.sizes.items() if name in names}
    source = ASTSource(fn=function, signature=signature, constexprs=constants)
    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    options = backend.parse_options({"num_warps": kernel.warps, "enable_fp_fusion": False})
    context, stages = ir.context(), {}
    ir.load_dialects(context)
    backend.load_dialects(context)
    backend.add_stages(stages, options, source.language)
    module = source.make_ir(
        target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
    )
    metadata = {"target": target, **options.__dict__}
    for stage in ("ttir", "ttgir", "llir", "ptx"):
        module = stages[stage](module, metadata)
    return module


def assemble(ptx: str, folder: Path, *flags: str) -> tuple[int, int]:
    """Return registers per thread and spilled bytes, as the assembler reports them."""
    (folder / "kernel.ptx").write_text(ptx)
    command = [get_ptxas(90).path, "-v", *flags, "--gpu-name=sm_90a", "kernel.ptx", "-o", "kernel.o"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", done.stderr)]
    return max(registers), sum(int(size) for size in re.findall(r"(\d+) bytes spill", done.stderr))


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_for_sm90_without_spilling(name: str, tmp_path: Path) -> None:
    registers, spilled = assemble(compile_for_sm90(KERNELS[name]), tmp_path)
    assert spilled == 0
    assert registers <= KERNELS[name].max_registers


def test_products_are_not_fused_into_sums() -> None:
    """One rounding more or less would give other bits than the CPU."""
    ptx = compile_for_sm90(KERNELS["sum"])
    assert "mul.rn.f32" in ptx or "mul.f32" in ptx
    assert "fma.rn" not in ptx


def test_flags_are_released_and_acquired_for_the_whole_system() -> None:
    assert "sys.release" in compile_for_sm90(KERNELS["post"])
    assert "sys.acquire" in compile_for_sm90(KERNELS["wait"])


@pytest.mark.parametrize(
    ("name", "functions"),
    [
        ("send_fp8", {"nvshmemx_putmem_nbi_block"}),
        ("send_bf16", {"nvshmemx_putmem_nbi_block"}),
        ("post", {"nvshmem_quiet", "nvshmem_int_p"}),
        ("answer", {"nvshmemx_putmem_nbi_block"}),
    ],
)
def test_peers_without_an_address_are_reached_by_nvshmem(
    name: str, functions: set[str], tmp_path: Path
) -> None:
    """Assembled, not linked: the library comes with NVSHMEM."""
    kernel = KERNELS[name]
    ptx = compile_for_sm90(kernel._replace(sizes={**kernel.sizes, "HAS_REMOTE": True}))
    assert set(re.findall(r"\bnvshmem\w+(?=\s*\n?\()", ptx)) == functions
    registers, spilled = assemble(ptx, tmp_path, "--compile-only")
    assert spilled == 0
    assert registers <= 255
    assert "nvshmem" not in compile_for_sm90(kernel)


def test_a_missing_device_library_is_named() -> None:
    try:
        assert Path(nvshmem.find_device_library()).name == "libnvshmem_device.bc"
    except FileNotFoundError as error:
        assert "pip install nvidia-nvshmem-cu13" in str(error)
