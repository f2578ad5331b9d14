"""The attention kernels, compiled as models launch them, without a GPU: registers, spills, shared memory."""

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from tests.support.gpu.attention import Heads

pytest.importorskip("triton", reason="needs triton: pip install -r requirements-dev.txt")
from attention.gpu import decode, mla, prefill, rotary, runs, sparse, splits
from attention.recurrences import gpu as recurrences
from attention.recurrences.mixers import (
    UNIT_LENGTH,
    ChannelScan,
    Convolution,
    DeltaRule,
    HeadScan,
    MixerCall,
    decaying_sum,
)
from attention.sparse.pools import Pooling
from kvcache.codes import E4M3, INT8
from kvcache.gpu.write import Scales
from tests.support.gpu.triton_compile import OTHERS, SHARED_LIMITS, check_budget, waits_in_loops
from tests.support.service.recorded_launch import Launch, recording

META = torch.device("meta")
BF16 = torch.bfloat16


class Case(NamedTuple):
    """A caller of the kernels, and the registers allowed to its main one on sm_90."""

    launch: Callable[[torch.dtype], object]
    kernel: str
    max_registers: int = 255  # 128: room for four programs of four warps


def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def scales_of(codes: torch.dtype | None, kv_heads: int) -> Any:
    return codes and Scales(*(empty(99, kv_heads, 16, dtype=torch.float32) for _ in range(2)))


def launch_decode(
    heads: Heads,
    sequences: int,
    dtype: torch.dtype,
    *,
    is_invariant: bool = False,
    codes: torch.dtype | None = None,
    **options: Any,
) -> None:
    H, G, D, V = heads
    scratch = splits.DecodeScratch(
        max_sequences=sequences,
        heads=H,
        value_dim=V,
        max_tokens=40960,
        device=META,
        is_invariant=is_invariant,
    )
    pages = (empty(99, G, 16, dim, dtype=codes or dtype) for dim in (D, V))
    about = (empty(sequences), empty(sequences, 2560))
    options = {"scale": 0.1, "scales": scales_of(codes, G), **options}
    decode.paged_decode(empty(sequences, H, D, dtype=dtype), *pages, *about, scratch, **options)


def launch_latents(heads: int, sequences: int, dtype: torch.dtype, codes: torch.dtype | None = None) -> None:
    scratch = splits.DecodeScratch(
        max_sequences=sequences, heads=heads, value_dim=512, max_tokens=40960, device=META
    )
    about = (empty(sequences), empty(sequences, 2560))
    mla.latent_decode(
        empty(sequences, heads, 576, dtype=dtype), empty(99, 16, 576, dtype=codes or dtype), *about, scratch,
        latent_dim=512, scale=0.1, scales=scales_of(codes, 1),
    )  # fmt: skip


def launch_prefill(
    heads: Heads, dtype: torch.dtype, codes: torch.dtype | None = None, **options: Any
) -> None:
    H, G, D, V = heads
    pages = (empty(99, G, 16, dim, dtype=codes or dtype) for dim in (D, V))
    about = (empty(7, 3), empty(5), empty(4), empty(4, 2560))
    options = {"scale": 0.1, "scales": scales_of(codes, G), **options}
    prefill.paged_prefill(empty(512, H, D, dtype=dtype), *pages, *about, **options)


def launch_rotary(rotary_dim: int, is_interleaved: bool, dtype: torch.dtype) -> None:
    angles = empty(64, rotary_dim, dtype=torch.float32)
    query, keys = empty(64, 32, 128, dtype=dtype), empty(64, 4, 128, dtype=dtype)
    rotary.rotate(
        query, angles, angles, keys_TGD=keys, rotation=rotary.Rotation(is_interleaved=is_interleaved)
    )


def step_of(rows: int, *, is_in_chunks: bool = False) -> Any:
    """Return the device arrays of a step. Only shapes and types count."""
    names = ("position_P", "cache_slot_P", "state_before_P", "state_after_P", "row_before_P")
    on = SimpleNamespace(
        **{name: empty(rows) for name in names},
        query_start_S=empty(rows + 1),
        walk_start_W=empty(1 if is_in_chunks else rows + 1),
        chunk_start_C=empty(rows + 1 if is_in_chunks else 1),
        context_S=empty(rows),
        table_SM=empty(rows, 2560),
    )
    return SimpleNamespace(on_device=on, max_context=40960, max_rows=8192, sizes=(256,), device=META)


def launch_index(heads: int, dim: int, dtype: torch.dtype, codes: torch.dtype | None = None) -> None:
    scale = codes and empty(99, 1, 16, dtype=torch.float32)
    pages: Any = SimpleNamespace(
        step=step_of(256),
        indexes=[empty(99, 16, dim, dtype=codes or dtype)],
        index_scales=[scale],
        room=lambda _key, make: make(),
    )
    query, weight = empty(256, heads, dim, dtype=dtype), empty(256, heads, dtype=torch.float32)
    sparse.choose_from_pages(pages, 0, query, weight, 0.1, 2048)


def launch_pools(dtype: torch.dtype) -> None:
    pages: Any = SimpleNamespace(
        step=step_of(256), indexes=[empty(99, 16, 264, dtype=dtype)], index_scales=[None], room=lambda _key, make: make()
    )  # fmt: skip
    query, weight = empty(256, 32, 128, dtype=dtype), empty(256, 32, dtype=torch.float32)
    sparse.choose_pools(pages, 0, query, weight, 0.1, Pooling(16, 128, empty(16, 128, dtype=torch.float32)))


def launch_chosen(heads: int, dtype: torch.dtype, codes: torch.dtype | None = None) -> None:
    query, latents = empty(256, heads, 576, dtype=dtype), empty(99, 16, 576, dtype=codes or dtype)
    chosen = empty(256, 2048, dtype=torch.int32)
    about: Any = {"latent_dim": 512, "scale": 0.1, "scales": scales_of(codes, 1)}
    sparse.chosen_attention(query, latents, chosen, 0, **about)


def call_of(tail: tuple[int, ...], recurrent: tuple[int, ...], *, is_in_chunks: bool = False) -> MixerCall:
    """Return a mixer's call with a cache of four state slots."""
    call = MixerCall(0)
    floats = partial(empty, dtype=torch.float32)
    step = step_of(64, is_in_chunks=is_in_chunks)
    call.pages = SimpleNamespace(step=step, tails=[floats(4, *tail)], states=[floats(4, *recurrent)])
    return call


def launch_convolution(channels: int, dtype: torch.dtype) -> None:
    x, weight = empty(1, 64, channels, dtype=dtype).transpose(1, 2), empty(channels, 4, dtype=dtype)
    recurrences.convolve(call_of((3, channels), (0,)), Convolution(x, weight, has_silu=True))


def launch_delta(
    key_heads: int, heads: int, decay_dims: tuple[int, ...], dtype: torch.dtype, *, is_in_chunks: bool = False
) -> None:
    query, value = empty(1, 64, key_heads, 128, dtype=dtype), empty(1, 64, heads, 128, dtype=dtype)
    decay, rate = empty(1, 64, heads, *decay_dims, dtype=torch.float32), empty(1, 64, heads, dtype=dtype)
    call = call_of((0, 0), (heads, 128, 128), is_in_chunks=is_in_chunks)
    recurrences.delta_rule(call, DeltaRule(query, query, value, decay, rate, UNIT_LENGTH))


def launch_lightning(dtype: torch.dtype, *, is_in_chunks: bool = False) -> None:
    rows = empty(1, 64, 64, 128, dtype=dtype)
    call = call_of((0, 0), (64, 128, 128), is_in_chunks=is_in_chunks)
    recurrences.delta_rule(call, decaying_sum(rows, rows, rows, empty(64, dtype=torch.float32)))


def launch_heads(dtype: torch.dtype, *, is_in_chunks: bool = False) -> None:
    x, time, group = (
        empty(1, 64, 128, 64, dtype=dtype),
        empty(1, 64, 128, dtype=dtype),
        empty(1, 64, 8, 128, dtype=dtype),
    )
    of_head = empty(128, dtype=torch.float32)
    call = call_of((0, 0), (128, 128, 64), is_in_chunks=is_in_chunks)
    recurrences.scan_heads(
        call, HeadScan(x, time, of_head, group, group, of_head, of_head, has_softplus=True)
    )


def launch_channels(dtype: torch.dtype) -> None:
    x, group = empty(1, 64, 8192, dtype=dtype).transpose(1, 2), empty(1, 64, 16, dtype=dtype).transpose(1, 2)
    rates, of_channel = empty(8192, 16, dtype=torch.float32), empty(8192, dtype=torch.float32)
    call = call_of((0, 0), (16, 8192))
    recurrences.scan_channels(
        call, ChannelScan(x, x, rates, group, group, of_channel, x, of_channel, has_softplus=True)
    )


QWEN3, GPT_OSS, GEMMA = Heads(32, 4, 128, 128), Heads(64, 8, 64, 64), Heads(8, 4, 256, 256)
LLAMA4, GEMMA4 = Heads(40, 8, 128, 128), Heads(16, 2, 512, 512)
SINKS: dict[str, Any] = {"window": 128, "sinks_H": empty(64, dtype=BF16)}
CASES = {
    "decode_qwen3": Case(partial(launch_decode, QWEN3, 256), "attend_splits", 128),
    "merge": Case(partial(launch_decode, QWEN3, 256), "merge_parts", 64),
    "decode_in_runs": Case(partial(launch_decode, QWEN3, 256, is_invariant=True), "attend_splits", 168),
    "merge_of_runs": Case(partial(launch_decode, QWEN3, 256, is_invariant=True), "merge_units", 80),
    "latents_deepseek": Case(partial(launch_latents, 128, 256), "attend_latent_splits"),
    "prefill_qwen3": Case(partial(launch_prefill, QWEN3), "attend_tile"),
    "decode_fp8": Case(partial(launch_decode, QWEN3, 256, codes=E4M3), "attend_splits", 168),
    "prefill_int8": Case(partial(launch_prefill, QWEN3, codes=INT8), "attend_tile"),
    "rotary": Case(partial(launch_rotary, 128, False), "rotate_rows", 64),
    "index_deepseek": Case(partial(launch_index, 64, 128), "score_items"),
    "choice_deepseek": Case(partial(launch_index, 64, 128), "choose_best"),
    "chosen_deepseek": Case(partial(launch_chosen, 128), "attend_chosen"),
    "convolution_qwen3_next": Case(partial(launch_convolution, 8192), "convolve_rows", 64),
    "delta_qwen3_next": Case(partial(launch_delta, 16, 32, ()), "walk_tokens", 128),
    "delta_qwen3_next_in_chunks": Case(partial(launch_delta, 16, 32, (), is_in_chunks=True), "walk_chunks"),
    "mamba2_nemotron": Case(launch_heads, "walk_tokens", 128),
    "mamba_jamba": Case(launch_channels, "walk_channels", 128),
}
MORE_CASES = {
    "prefill_gemma4": Case(partial(launch_prefill, GEMMA4), "attend_tile"),
    "decode_int8": Case(partial(launch_decode, QWEN3, 256, codes=INT8), "attend_splits", 168),
    "prefill_fp8": Case(partial(launch_prefill, QWEN3, codes=E4M3), "attend_tile"),
    "latents_fp8": Case(partial(launch_latents, 128, 256, codes=E4M3), "attend_latent_splits"),
    "index_int8": Case(partial(launch_index, 64, 128, codes=INT8), "score_items"),
    "chosen_fp8": Case(partial(launch_chosen, 128, codes=E4M3), "attend_chosen"),
    "decode_gpt_oss": Case(partial(launch_decode, GPT_OSS, 32, **SINKS), "attend_splits", 128),
    "decode_gpt_oss_full": Case(partial(launch_decode, GPT_OSS, 32, sinks_H=SINKS["sinks_H"]), "attend_splits", 128),
    "decode_one_sequence": Case(partial(launch_decode, QWEN3, 1), "attend_splits", 128),
    "decode_mixtral": Case(partial(launch_decode, Heads(32, 8, 128, 128), 64), "attend_splits", 128),
    "decode_olmoe": Case(partial(launch_decode, Heads(16, 16, 128, 128), 64), "attend_splits", 128),
    # A group of 12 heads needs more registers: three programs.
    "decode_glm": Case(partial(launch_decode, Heads(96, 8, 128, 128), 64), "attend_splits", 168),
    "decode_96": Case(partial(launch_decode, Heads(32, 8, 96, 96), 64), "attend_splits", 128),
    "decode_mimo": Case(partial(launch_decode, Heads(64, 4, 192, 128), 64, **SINKS), "attend_splits"),
    "decode_gemma": Case(partial(launch_decode, GEMMA, 64, soft_cap=50.0), "attend_splits"),
    "decode_gemma4": Case(partial(launch_decode, GEMMA4, 64), "attend_splits"),
    "merge_gemma4": Case(partial(launch_decode, GEMMA4, 64), "merge_parts", 128),
    "decode_gemma4_group_of_16": Case(partial(launch_decode, Heads(32, 2, 512, 512), 64), "attend_splits"),
    "prefill_gemma4_images": Case(
        partial(launch_prefill, GEMMA4, window=1024, image_end_T=empty(512)), "attend_tile"
    ),
    "prefill_gemma4_group_of_16": Case(partial(launch_prefill, Heads(32, 2, 512, 512)), "attend_tile"),
    "decode_320": Case(partial(launch_decode, Heads(16, 2, 320, 320), 64, window=1024), "attend_splits"),
    "prefill_320": Case(partial(launch_prefill, Heads(16, 2, 320, 320), window=1024), "attend_tile"),
    "decode_llama4": Case(partial(launch_decode, LLAMA4, 64, chunk=8192), "attend_splits"),
    "merge_sinks": Case(partial(launch_decode, GPT_OSS, 64, sinks_H=SINKS["sinks_H"]), "merge_parts", 64),
    "decode_in_runs_sinks": Case(
        partial(launch_decode, GPT_OSS, 64, is_invariant=True, sinks_H=SINKS["sinks_H"]), "attend_splits", 168
    ),
    "decode_in_runs_gemma": Case(partial(launch_decode, GEMMA, 64, is_invariant=True), "attend_splits"),
    "decode_in_runs_glm": Case(partial(launch_decode, Heads(96, 8, 128, 128), 64, is_invariant=True), "attend_splits"),
    "decode_in_runs_window": Case(
        partial(launch_decode, QWEN3, 64, is_invariant=True, window=4096), "attend_splits", 192
    ),
    "merge_of_runs_sinks": Case(
        partial(launch_decode, GPT_OSS, 64, is_invariant=True, sinks_H=SINKS["sinks_H"]), "merge_units", 80
    ),
    "merge_of_runs_gemma": Case(partial(launch_decode, GEMMA, 64, is_invariant=True), "merge_units", 80),
    "merge_gemma": Case(partial(launch_decode, GEMMA, 64), "merge_parts", 64),
    "merge_latents": Case(partial(launch_latents, 128, 64), "merge_parts", 128),
    "latents_16_heads": Case(partial(launch_latents, 16, 16), "attend_latent_splits"),
    "prefill_gpt_oss": Case(partial(launch_prefill, GPT_OSS, **SINKS), "attend_tile"),
    "prefill_gpt_oss_full": Case(partial(launch_prefill, GPT_OSS, sinks_H=SINKS["sinks_H"]), "attend_tile"),
    "prefill_olmoe": Case(partial(launch_prefill, Heads(16, 16, 128, 128)), "attend_tile"),
    "prefill_glm": Case(partial(launch_prefill, Heads(96, 8, 128, 128)), "attend_tile"),
    "prefill_96": Case(partial(launch_prefill, Heads(32, 8, 96, 96)), "attend_tile"),
    "prefill_deepseek": Case(partial(launch_prefill, Heads(128, 128, 192, 128)), "attend_tile"),
    "prefill_gemma": Case(partial(launch_prefill, GEMMA, soft_cap=50.0, window=4096), "attend_tile"),
    "prefill_llama4": Case(partial(launch_prefill, LLAMA4, chunk=8192), "attend_tile"),
    "pool_keys_glm": Case(launch_pools, "make_pool_keys", 64),
    "pools_glm": Case(launch_pools, "score_items"),
    "choice_of_pools_glm": Case(launch_pools, "choose_best"),
    "chosen_16_heads": Case(partial(launch_chosen, 16), "attend_chosen"),
    "delta_kimi": Case(partial(launch_delta, 32, 32, (128,)), "walk_tokens", 128),
    "delta_lightning": Case(launch_lightning, "walk_tokens", 128),
    "delta_kimi_in_chunks": Case(partial(launch_delta, 32, 32, (128,), is_in_chunks=True), "walk_chunks"),
    "lightning_in_chunks": Case(partial(launch_lightning, is_in_chunks=True), "walk_chunks"),
    "mamba2_in_chunks": Case(partial(launch_heads, is_in_chunks=True), "walk_chunks"),
    "time_nemotron": Case(launch_heads, "pass_time", 64),
    "rotary_interleaved": Case(partial(launch_rotary, 64, True), "rotate_rows", 64),
}  # fmt: skip
ALL = CASES | MORE_CASES


def recorded(case: Case, dtype: torch.dtype = BF16, arch: int = 90) -> Launch:
    """Return the launch of the case's kernel on a device of an architecture."""
    kernels = (
        (decode, "attend_splits"), (mla, "attend_latent_splits"), (prefill, "attend_tile"),
        (splits, "merge_parts"), (runs, "merge_units"), (rotary, "rotate_rows"), (sparse, "score_items"), (sparse, "make_pool_keys"), (sparse, "choose_best"),
        (sparse, "attend_chosen"), (recurrences, "convolve_rows"), (recurrences, "walk_tokens"),
        (recurrences, "walk_chunks"), (recurrences, "pass_time"), (recurrences, "walk_channels"),
    )  # fmt: skip
    with recording(*kernels) as launched, contextlib.ExitStack() as patches:
        for module in (decode, mla, prefill):
            patches.enter_context(mock.patch.object(module, "device_names", return_value=(f"sm_{arch}",)))
        case.launch(dtype)
    return next(launch for launch in launched if launch.function.__name__ == case.kernel)


# Programs per multiprocessor of the kernels that copy ahead of their products on sm_90.
PIPELINED = {
    "decode_qwen3": 4, "decode_gpt_oss": 4, "decode_glm": 3, "decode_gemma": 2, "decode_gemma4": 2,
    "latents_deepseek": 1, "latents_16_heads": 2, "prefill_qwen3": 1, "decode_in_runs": 3,
    "prefill_deepseek": 1, "prefill_gpt_oss": 2, "prefill_gpt_oss_full": 2,
}  # fmt: skip


def check_on_sm_90(name: str, folder: Path) -> None:
    """Check the budget of a kernel, and that its loops do not wait for copies of later tiles."""
    compiled = check_budget(recorded(ALL[name]).kernel(ALL[name].max_registers), folder)
    if name in PIPELINED:
        waits = waits_in_loops(compiled.ttgir)
        assert waits and min(waits) > 0, f"a loop waits for all its copies: {waits}"
        own_bytes = compiled.shared_bytes + 1024  # of which the driver takes a kilobyte
        assert own_bytes * PIPELINED[name] <= SHARED_LIMITS[90] + 1024, f"{own_bytes} bytes of shared memory"


# Another launch of the same kernel is compiled by `make test`.
AGAIN = {"decode_in_runs", "decode_fp8", "prefill_int8", "mamba2_nemotron"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in AGAIN else []) for name in CASES]
)
def test_kernels_compile_for_sm_90_within_their_budget(name: str, tmp_path: Path) -> None:
    check_on_sm_90(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(PIPELINED) - set(CASES)))
def test_loops_of_further_models_do_not_wait_for_later_tiles(name: str, tmp_path: Path) -> None:
    check_on_sm_90(name, tmp_path)


# For float16 and for other architectures: cases of each kernel, from `CASES` or one that they lack.
SEEN = {case.kernel for case in CASES.values()}
OF_KERNELS = [
    *CASES,
    *{case.kernel: name for name, case in MORE_CASES.items() if case.kernel not in SEEN}.values(),
]
OF_KERNEL = {
    kernel: [name for name in OF_KERNELS if ALL[name].kernel == kernel]
    for kernel in dict.fromkeys(ALL[name].kernel for name in OF_KERNELS)
}
# The tests above compile the rest. Cases of a kernel share the other architectures.
CONFIGURATIONS = [
    *((names[place % len(names)], BF16, arch) for names in OF_KERNEL.values() for place, arch in enumerate(OTHERS)),
    *((name, BF16, 90) for name in ALL if name not in CASES | PIPELINED),
    *((names[0], torch.float16, 90) for names in OF_KERNEL.values()),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "arch"), CONFIGURATIONS)
def test_every_configuration_compiles_within_its_budget(
    name: str, dtype: torch.dtype, arch: int, tmp_path: Path
) -> None:
    if arch < 89 and name.endswith("fp8"):
        pytest.skip("such GPUs have no FP8; they are refused (moe.gpu.backend)")
    most = ALL[name].max_registers if arch == 90 else 255
    check_budget(recorded(ALL[name], dtype, arch).kernel(most), tmp_path, arch)


def test_as_many_programs_run_as_the_device_seats_or_as_there_are_parts() -> None:
    """A captured launch fits contexts of any length."""
    seats = splits.DecodeScratch(max_sequences=1, heads=1, value_dim=16, max_tokens=1, device=META)
    assert recorded(ALL["decode_qwen3"]).grid == (seats.multiprocessors * decode.DecodeTile().programs,)
    with recording((decode, "attend_splits"), (splits, "merge_parts")) as launched:
        launch_decode(Heads(2, 1, 16, 16), 1, BF16, tile=decode.DecodeTile(programs=1000))
    assert launched[0].grid == (128,)
    assert launched[1].grid == (1, 2)


@pytest.mark.parametrize(("window", "launches"), [(0, 2), (128, 1), (200, 1), (300, 2)])
def test_short_windows_are_one_split_and_need_no_merge(window: int, launches: int) -> None:
    with recording((decode, "attend_splits"), (splits, "merge_parts")) as launched:
        launch_decode(GPT_OSS, 32, BF16, window=window)
    assert len(launched) == launches


@pytest.mark.parametrize(
    ("heads", "value_dim", "steady", "adapted"),
    [
        (32, 128, (256, 64), (64, 128)),
        (64, 64, (256, 64), (64, 128)),
        (128, 512, (1024, 32), (64, 64)),
    ],
)
def test_splits_are_chosen_by_the_shape_of_the_heads(
    heads: int, value_dim: int, steady: tuple[int, int], adapted: tuple[int, int]
) -> None:
    for sequences in (1, 256):
        for is_invariant, expected in ((True, steady), (False, adapted)):
            scratch = splits.DecodeScratch(
                max_sequences=sequences, heads=heads, value_dim=value_dim, max_tokens=131072, device=META,
                is_invariant=is_invariant,
            )  # fmt: skip
            assert (scratch.split_tokens, scratch.num_splits) == expected
            has_runs = is_invariant and value_dim < 512
            cuts = scratch.cuts(32, programs=4, turns=4, of_split=1, has_runs=value_dim < 512)
            assert cuts.run == (8 if has_runs else 0)
            assert (cuts.at_once == 0) is (is_invariant and not has_runs)
            scratch.check(sequences, heads, value_dim, cuts)
