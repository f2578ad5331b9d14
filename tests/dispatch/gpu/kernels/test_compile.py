"""Dispatch kernels for GPUs compile for sm_90 without spills, to the intended instructions.

Other tests here check their results in the interpreter.
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from dispatch.low_latency.calls import LowLatencyShape, size_hint

pytest.importorskip("triton", reason="needs triton: pip install -r requirements-dev.txt")
from dispatch.gpu import nvshmem
from dispatch.gpu.kernels.flags import begin_call, post_flags, post_refusal, wait_flags
from dispatch.gpu.kernels.low_latency import (
    deliver_blocks,
    deliver_rows,
    order_blocks,
    send_answers,
    send_rows,
    sum_answers,
)
from dispatch.gpu.kernels.ordering import add_chunks, count_chunks, order_few, place_chunks
from dispatch.gpu.kernels.pairs import order_pairs, sum_pairs
from dispatch.gpu.symmetric import TEXT_BYTES, CombineContents, DispatchContents, SymmetricLayout
from tests.support.gpu.triton_compile import (
    OTHERS,
    Compiled,
    Kernel,
    another,
    assemble,
    check_budget,
    check_compiled,
    compile_kernel,
)

BF16 = torch.bfloat16
HALF = {"calls": "*i64", "half_bytes": "i64"}
TO_PEERS = {"peers": "*i64", "mask": "*i32", "rank": "i32", **HALF}
RECEIVED = {"choices": "i64", "arrived": "*i32", **HALF}
SEND = {
    "x": "*i16", "topk": "*i64", "labels": "constexpr", "sent": "*i64", "sent_bytes": "*i64", **TO_PEERS, "ended": "*i32", "num_tokens": "i32",
    "choices_at": "i64", "rows_at": "i64", "staging_at": "i64", "kind": "i32",
}  # fmt: skip
ANSWER = {
    "y": "*i16",
    "at_NK": "*i32",
    "sent_bytes": "*i64",
    **TO_PEERS,
    "ended": "*i32",
    "answers_at": "i64",
    "staging_at": "i64",
    "kind": "i32",
}
WAIT = {
    **TO_PEERS, "arrived": "*i32", "trouble": "*i64", "waits": "*i64", "stop": "i64", "kind": "i32", "limit": "i64"
}  # fmt: skip
ORDER = {
    "choices": "*i64", **HALF, "row_of_pair": "*i64", "pair_of_choice": "*i32", "offsets": "*i64", "num_choices": "i32",
    "chunk": "i32",
}  # fmt: skip
BLOCKS = {
    **RECEIVED, "at_NK": "*i32", "counts": "*i32", "layout_range": "*i64", "source_tokens": "*i32", "stats": "*i32"
}  # fmt: skip
DELIVER = {"rows": "i64", "at_NK": "*i32", **HALF, "x_out": "*i16"}
DELIVER_ROWS = {**DELIVER, "choices": "i64", "labels_out": "*i64"}
SUM = {
    "answers": "i64", **HALF, "arrived": "*i32", "topk": "*i64", "sent": "*i64", "weights": "*fp32", "out": "*i16"
}  # fmt: skip
PAIRS = {"y": "*i16", "pair_of_choice": "*i32", "weights": "*fp32", "out": "*i16"}

V3 = {"R": 8, "L": 32, "M": 128, "K": 8, "K_PAD": 8, "H": 7168}  # DeepSeek-V3's decode on 8 ranks
PLAIN = {"ROW_BYTES": 14336, "SCALES_AT": 0, "IS_FP8": False}
FP8 = {"ROW_BYTES": 7392, "SCALES_AT": 7168, "IS_FP8": True}
ROW = {
    **V3, "GROUPS": 8, "IS_BFLOAT16": True, "ROUND_SCALE": False, "HAS_REMOTE": False, "BEGINS": True, "labels": None,
}  # fmt: skip
LABELLED = {key: value for key, value in ROW.items() if key != "labels"}
BLOCK = {**V3, "N": 1024, "SCALES": 0, "SCALES_PAD": 1, "IS_UE8M0": False}
ANSWERED = {
    **V3, "ANSWER_BYTES": 14336, "TILE": 1024, "IS_BFLOAT16": True, "HAS_BFLOAT16_WEIGHTS": False, "HAS_REMOTE": False,
    "BEGINS": True,
}  # fmt: skip
CHOICES = {
    "choices": "*i64", "slot_of": "*i64", "cache_slots": "*i64", "num_decodes": "*i64", "counts": "*i64"
}  # fmt: skip
WRITTEN = {"row_of_pair": "*i64", "pair_of_choice": "*i32", "offsets": "*i64", "num_pairs": "i32"}
CHUNKED = {"slots": "*i32", "counts_CS": "*i32", "num_pairs": "i32"}
RECEIVED_PAIRS = {"S": 32, "K": 8, "R": 8, "PER_SOURCE": 1024, "TILE": 512, "HAS_LABELS": False}
EXPERTS = {"S": 256, "E": 256, "E_PAD": 256, "K": 8, "HAS_EXPERTS": True, "HAS_COUNTS": True}
SLOTS = {
    **EXPERTS, "HAS_EXPERTS": False, "HAS_COUNTS": False, "slot_of": None, "cache_slots": None, "num_decodes": None,
    "counts": None,
}  # fmt: skip
KERNELS = {
    "send_bf16": Kernel(send_rows, SEND, {**ROW, **PLAIN}),
    "send_fp8": Kernel(send_rows, SEND, {**ROW, **FP8}),
    "send_fp8_rounded": Kernel(send_rows, SEND, {**ROW, **FP8, "ROUND_SCALE": True}),
    "send_fp16": Kernel(send_rows, {**SEND, "x": "*fp16"}, {**ROW, **FP8, "IS_BFLOAT16": False}),
    "send_bf16_labelled": Kernel(send_rows, {**SEND, "labels": "*i64"}, {**LABELLED, **PLAIN}),
    "send_fp8_labelled": Kernel(send_rows, {**SEND, "labels": "*i64"}, {**LABELLED, **FP8}),
    "begin": Kernel(begin_call, HALF, {}, 1),
    "post": Kernel(post_flags, {**TO_PEERS, "kind": "i32"}, {"HAS_REMOTE": False}, 1),
    "refuse": Kernel(
        post_refusal,
        {**TO_PEERS, "text": "*u8", "texts_at": "i64"},
        {"TEXT_BYTES": 1024, "HAS_REMOTE": False},
        1,
    ),
    "wait": Kernel(
        wait_flags,
        WAIT,
        {"IS_LAST": True, "IS_MASKING": True, "ANY_CALL": False, "HAS_CLOCK": True, "HAS_WAITS": True},
        1,
    ),
    "wait_without_clock": Kernel(
        wait_flags,
        {**WAIT, "waits": "constexpr"},
        {
            "waits": None,
            "IS_LAST": True,
            "IS_MASKING": False,
            "ANY_CALL": True,
            "HAS_CLOCK": False,
            "HAS_WAITS": False,
        },
        1,
    ),
    "order_received": Kernel(order_pairs, {**ORDER, **RECEIVED}, RECEIVED_PAIRS, 4),
    "order_labelled": Kernel(order_pairs, {**ORDER, **RECEIVED}, {**RECEIVED_PAIRS, "HAS_LABELS": True}, 4),
    "order_few": Kernel(order_few, {**CHOICES, **WRITTEN}, {**EXPERTS, "TILE": 256}, 1),
    "order_most_at_once": Kernel(order_few, {**CHOICES, **WRITTEN}, {**EXPERTS, "TILE": 4096}, 16, 128),
    "order_slots": Kernel(order_few, {"choices": "*i64", **WRITTEN}, {**SLOTS, "TILE": 2048}, 8),
    "count_chunks": Kernel(count_chunks, {**CHOICES, **CHUNKED}, {**EXPERTS, "BINS": 512}, 4),
    "add_chunks": Kernel(
        add_chunks,
        {**CHOICES, **CHUNKED, "total_S": "*i32", "num_chunks": "i32"},
        {**EXPERTS, "C_PAD": 256},
        4,
    ),
    "place_chunks": Kernel(
        place_chunks, {**CHUNKED, **WRITTEN, "total_S": "*i32"}, {**EXPERTS, "S_PAD": 256}, 8, 128
    ),
    "deliver": Kernel(deliver_rows, DELIVER_ROWS, {**ROW, **PLAIN, "labels_out": None}),
    "deliver_fp8": Kernel(deliver_rows, DELIVER_ROWS, {**ROW, **FP8, "labels_out": None}),
    "deliver_labelled": Kernel(deliver_rows, DELIVER_ROWS, {**ROW, **PLAIN}),
    "deliver_fp8_labelled": Kernel(deliver_rows, DELIVER_ROWS, {**ROW, **FP8}),
    "order_blocks": Kernel(order_blocks, BLOCKS, {**V3, "TILE": 64, "HAS_STATS": True}, 4),
    "deliver_blocks": Kernel(deliver_blocks, DELIVER, {**BLOCK, **PLAIN, "scales_out": None}),
    "deliver_blocks_ue8m0": Kernel(
        deliver_blocks,
        {**DELIVER, "x_out": "*u8", "scales_out": "*u8"},
        {**BLOCK, **FP8, "SCALES": 56, "SCALES_PAD": 64, "IS_UE8M0": True},
    ),
    "answer": Kernel(send_answers, ANSWER, ANSWERED),
    "sum": Kernel(sum_answers, SUM, {**ANSWERED, "added": None}),
    "sum_and_shared": Kernel(sum_answers, {**SUM, "added": "*i16"}, ANSWERED),
    "sum_fp16": Kernel(
        sum_answers, {**SUM, "out": "*fp16"}, {**ANSWERED, "added": None, "IS_BFLOAT16": False}
    ),
    "sum_pairs": Kernel(sum_pairs, PAIRS, {**ANSWERED, "added": None}, 4),
    "sum_pairs_and_shared": Kernel(sum_pairs, {**PAIRS, "added": "*i16"}, ANSWERED, 4),
    "sum_pairs_with_short_weights": Kernel(
        sum_pairs, {**PAIRS, "weights": "*i16"}, {**ANSWERED, "added": None, "HAS_BFLOAT16_WEIGHTS": True}, 4
    ),
}
KERNELS = {name: kernel._replace(aligned=True) for name, kernel in KERNELS.items()}  # as launched


@cache
def compiled(name: str) -> Compiled:
    """Compile a kernel for sm_90, once for all tests."""
    return compile_kernel(KERNELS[name])


# Another launch of the same kernel is compiled by `make test`.
VARIANTS = {
    "send_fp8_rounded", "send_fp16", "send_bf16_labelled", "send_fp8_labelled", "wait_without_clock", "order_labelled",
    "order_most_at_once", "order_slots", "deliver_labelled", "deliver_fp8_labelled", "deliver_blocks_ue8m0", "sum_and_shared",
    "sum_fp16", "sum_pairs_and_shared", "sum_pairs_with_short_weights",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in VARIANTS else []) for name in KERNELS]
)
def test_kernels_stay_within_their_budget(name: str, tmp_path: Path) -> None:
    check_compiled(compiled(name), KERNELS[name].max_registers, tmp_path)


def on_others() -> Iterator[tuple[str, int]]:
    """Yield all names with another architecture by turns, and those of a function with each architecture at least once."""
    for function in dict.fromkeys(kernel.function.__name__ for kernel in KERNELS.values()):
        names = [name for name, kernel in KERNELS.items() if kernel.function.__name__ == function]
        for place in range(max(len(OTHERS), len(names))):
            yield names[place % len(names)], another(place)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arch"), list(on_others()))
def test_kernels_stay_within_their_budget_on_other_gpus(name: str, arch: int, tmp_path: Path) -> None:
    check_budget(KERNELS[name], tmp_path, arch)


@pytest.mark.parametrize("name", ["send_bf16", "deliver", "deliver_blocks", "answer"])
def test_rows_move_in_pieces_of_sixteen_bytes(name: str) -> None:
    """The compiler does not know the alignment of a peer's address. Without a hint it stores 2 bytes at a time."""
    ptx = compiled(name).ptx
    assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx
    assert "st.global.b16" not in ptx


@pytest.mark.parametrize("name", ["send_fp8", "deliver_fp8"])
def test_codes_and_what_they_stand_for_move_in_pieces(name: str) -> None:
    assert "st.global.b8" not in compiled(name).ptx
    assert "st.global.b16" not in compiled(name).ptx


@pytest.mark.parametrize("name", ["sum", "sum_pairs"])
def test_products_are_not_fused_into_sums(name: str) -> None:
    """A different number of roundings would change the bits compared with the CPU."""
    ptx = compiled(name).ptx
    assert "mul.rn.f32" in ptx or "mul.f32" in ptx
    assert "fma.rn" not in ptx


def test_flags_are_released_and_acquired_for_the_whole_system() -> None:
    assert "sys.release" in compiled("post").ptx
    assert "sys.release" in compiled("refuse").ptx
    wait = compiled("wait").ptx
    assert "sys.acquire" in wait
    assert "ld.volatile.global" in wait, "the host's word must be read from memory each time"


@pytest.mark.crossed("name", every=2)
@pytest.mark.parametrize(
    ("name", "functions"),
    [
        ("send_fp8", {"nvshmemx_putmem_nbi_block"}),
        ("send_fp8_labelled", {"nvshmemx_putmem_nbi_block"}),
        ("send_bf16", {"nvshmemx_putmem_nbi_block"}),
        ("post", {"nvshmem_quiet", "nvshmem_long_p"}),
        ("refuse", {"nvshmemx_putmem_nbi_block", "nvshmem_quiet", "nvshmem_long_p"}),
        ("answer", {"nvshmemx_putmem_nbi_block"}),
    ],
)
def test_peers_without_an_address_are_reached_by_nvshmem(
    name: str, functions: set[str], tmp_path: Path
) -> None:
    """Assembled, not linked: NVSHMEM provides the library."""
    kernel = KERNELS[name]
    ptx = compile_kernel(kernel._replace(sizes={**kernel.sizes, "HAS_REMOTE": True})).ptx
    assert set(re.findall(r"\bnvshmem\w+(?=\s*\n?\()", ptx)) == functions
    registers, spilled = assemble(ptx, tmp_path, "--compile-only")
    assert spilled == 0
    assert registers <= 255
    assert "nvshmem" not in compiled(name).ptx
    assert set(nvshmem.LINKED) >= {kernel.function.__name__}


def test_a_missing_device_library_is_named() -> None:
    try:
        assert Path(nvshmem.find_device_library()).name == "libnvshmem_device.bc"
    except FileNotFoundError as error:
        assert "pip install nvidia-nvshmem-cu13" in str(error)


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
        assert (
            sent.row_bytes % 16
            == sent.rows_at % 16
            == sent.staging_at % 16
            == answered.answer_bytes % 16
            == 0
        )
        rows = 3 * 5 * sent.row_bytes
        assert sent.rows_at >= 4 * 3 * 5 * 3 and sent.rows_at + rows <= sent.staging_at <= sent.num_bytes
        assert 5 * 3 * answered.answer_bytes <= answered.staging_at <= answered.num_bytes
        staged = (sent.num_bytes - sent.staging_at, answered.num_bytes - answered.staging_at)
        least = (
            (5 * sent.row_bytes + 4 * 3 * 5 * 3, 3 * 5 * 3 * answered.answer_bytes) if has_remote else (0, 0)
        )
        assert staged[0] >= least[0] and staged[1] >= least[1]


def test_the_size_hint_has_room_for_deepeps_largest_calls() -> None:
    """The values that callers of DeepEP pass as num_rdma_bytes, so that memory need not grow."""
    hint = size_hint(128, 7168, 8, 256)
    room = SymmetricLayout(world_size=8, total_bytes=hint).content_bytes
    shape = LowLatencyShape(
        world_size=8, experts_per_rank=32, max_tokens=128, hidden=7168, choices=11, dtype=BF16
    )
    assert DispatchContents(shape=shape).num_bytes <= room
    assert CombineContents(shape=shape, dtype=torch.float32).num_bytes <= room
